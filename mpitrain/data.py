"""Data sources: deterministic samplers of a global batch, where each rank reads its own rows.

The global batch of step k depends on the seed, on k, and for samples also on the number of
samples before it. It does not depend on the number of ranks. Token sources hold out a second
file or their last tenth. Sample sources have a test set.

B batch, T tokens of a context, F features.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mpitrain.errors import ConfigError, DataError
from mpitrain.files import check_regular, contents

SOURCES = "pydocs, digits, text:FILE, tokens:FILE or idx:DIR"
BYTES = 256  # The tokens of text are its bytes.
# The first int32 of a token file of llm.c. Its header has 256 int32; the tokens follow.
LLM_C_MAGIC = 20240520


class Source(Protocol):
    """The protocol of a data source: rows to train on, and held-out rows to evaluate on.

    Attributes
    ----------
    model : str
        The model.kind that fits this source: "gpt" for tokens, "mlp" for samples.
    inputs : int
        Vocabulary size of tokens, or the number of features of a sample.
    classes : int
        Number of classes that a prediction chooses from.
    held_out : int
        Number of held-out rows.
    """

    model: str
    inputs: int
    classes: int
    held_out: int

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return some rows of the global batch of a step.

        Parameters
        ----------
        seed : int
            Seed of the data order.
        step : int
            Number of the step, from 0.
        size : int
            Number of rows in the global batch, over all ranks.
        rows : range
            The rows of the global batch to return; each rank passes its own.
        before : int, optional
            Number of samples in all earlier global batches. None: `step` x `size`.

        Returns
        -------
        inputs : ndarray
            (len(rows), T) int64 tokens, or (len(rows), F) features.
        targets : ndarray
            (len(rows), T) or (len(rows),) int64 classes.
        """

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return held-out rows by number.

        Parameters
        ----------
        rows : sequence of int
            Numbers from 0 to held_out - 1.

        Returns
        -------
        inputs, targets : ndarray
            In the shapes and dtypes of `batch`.
        """


class Scan(NamedTuple):
    """The result of a scan of a token file, with the state of the file at that time.

    path        absolute path of the file
    nbytes      its size
    changed_ns  time of its last change, in ns
    largest     the largest token in it; -1 before the scan
    """

    path: str
    nbytes: int
    changed_ns: int
    largest: int


class TokenSource:
    """A token data source: windows of T tokens, drawn from a flat array.

    inputs are (B, T) int64; targets are the same windows, one token later.

    tokens      1-D, all of them; those held out included, unless `validation` has them
    name        of the source, for messages
    scan        the scan of a tokens:FILE, or None
    validation  the held-out tokens and their name; None holds out the last tenth of `tokens`
    raises      DataError if training or held-out tokens are shorter than a window
    """

    model = "gpt"

    def __init__(
        self,
        tokens: np.ndarray,
        vocabulary: int,
        context: int,
        name: str,
        scan: Scan | None = None,
        validation: tuple[np.ndarray, str] | None = None,
    ):
        self.inputs = self.classes = vocabulary
        self.scan = scan
        self._context = context
        cut = len(tokens) - (0 if validation else len(tokens) // 10)
        self._train, self._test = tokens[:cut], validation[0] if validation else tokens[cut:]
        self.tokens, self.held_out_tokens = len(self._train), len(self._test)
        self.held_out = (len(self._test) - 1) // context
        if validation and min(self.tokens, self.held_out_tokens) <= context:
            raise DataError(
                f"A row is {context + 1} tokens, but {name} has {self.tokens} tokens and {validation[1]} {self.held_out_tokens}.",
                "Lower model.context, use longer files, or hold out the last tenth with data.validation=tenth.",
            )
        if self.held_out < 1:
            raise DataError(
                f"The held-out tenth of {name} must hold a context of {context} tokens and one more, but the source has "
                f"{len(tokens)} tokens in all.",
                f"Use at least {10 * (context + 1)} tokens, or lower model.context.",
            )

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        starts = np.random.default_rng([seed, step]).integers(
            len(self._train) - self._context, size=size
        )
        return self._windows(self._train, starts[rows.start : rows.stop])

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return self._windows(self._test, np.asarray(rows, np.int64) * self._context)

    def _windows(self, tokens: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        windows = tokens[starts[:, None] + np.arange(self._context + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


class SampleSource:
    """A data source of labelled samples, shuffled anew in each epoch by (seed, epoch).

    inputs are (B, F), targets (B,) int64; each sample comes once per epoch.
    """

    model = "mlp"

    def __init__(self, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]):
        self._train, self._test = train, test
        # The last (seed, epoch) that was shuffled, and the order of its samples.
        self._shuffled: tuple[tuple[int, int], np.ndarray] | None = None
        self.samples, self.inputs = train[0].shape
        self.classes = int(max(train[1].max(), test[1].max())) + 1
        self.held_out = len(test[1])

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        samples, labels = self._train
        position = (step * size if before is None else before) + np.arange(rows.start, rows.stop)
        chosen = np.empty(len(position), np.int64)
        for epoch in np.unique(position // len(labels)):
            here = position // len(labels) == epoch
            chosen[here] = self._order(seed, int(epoch))[position[here] % len(labels)]
        return samples[chosen], labels[chosen]

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the numbers of all samples in the order of an epoch: (samples,) int64.

        A permutation costs time in proportion to all samples, so the last one is cached.
        """
        if self._shuffled is None or self._shuffled[0] != (seed, epoch):
            order = np.random.default_rng([seed, epoch]).permutation(len(self._train[1]))
            self._shuffled = (seed, epoch), order
        return self._shuffled[1]

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        samples, labels = self._test
        chosen = np.asarray(rows, np.int64)
        return samples[chosen], labels[chosen]


class Unopened(NamedTuple):
    """The sizes of a data source without its data: enough to build a model and generate text."""

    model: str
    inputs: int
    classes: int
    held_out: int = 0


TENTH = "tenth"
"""The value of data.validation that holds out the last tenth of the source."""


def beside(name: str) -> str:
    """Return the value that replaces an empty data.validation, for a source tokens:FILE.

    It is val.bin in the folder of a train.bin, as nanoGPT writes them; else the last tenth.
    """
    path = Path(name.partition(":")[2])
    if path.name != "train.bin":  # a path such as . has no name at all
        return TENTH
    other = path.with_name("val.bin")
    return f"tokens:{other}" if other.exists() else TENTH


def open_source(
    name: str,
    context: int,
    dtype: str,
    vocabulary: int = 0,
    scan: Scan | None = None,
    validation: str = "",
) -> Source:
    """Open a source by its configuration name.

    context     tokens per row of a token source
    dtype       of the features of a sample source
    vocabulary  of a token source; 0: 256 for text, largest token + 1 for tokens:FILE
    scan        the scan of a tokens:FILE if it is known; None costs a pass over the file
    validation  held-out tokens of a tokens:FILE: another one; tenth or empty: the last tenth
    raises      ConfigError for a name that is no source or has options of another kind;
                DataError if it is missing, unreadable, too small, or exceeds the vocabulary
    """
    if validation and not has_tokens(name):
        raise ConfigError(
            f"data.validation is of data.source tokens:FILE, but that is {name}.",
            "Leave out data.validation.",
        )
    kind, _, place = name.partition(":")
    if kind in ("pydocs", "text") and vocabulary not in (0, BYTES):
        raise ConfigError(
            f"Text has {BYTES} tokens, one for each byte, but data.vocabulary is {vocabulary}.",
            "Leave out data.vocabulary, or name a tokens:FILE.",
        )
    if kind == "pydocs" and not place:
        return TokenSource(_pydocs(), BYTES, context, "pydocs")
    if kind == "text" and place:
        return TokenSource(_text(Path(place)), BYTES, context, place)
    if kind == "tokens" and place:
        scan = scan or as_it_is(name)._replace(largest=largest_token(name, 0, 1))
        if 0 < vocabulary <= scan.largest:
            raise DataError(
                f"{place} holds token {scan.largest}, so data.vocabulary must be at least {scan.largest + 1}, "
                f"but is {vocabulary}.",
                "Leave out data.vocabulary, or train on other tokens.",
            )
        if validation in ("", TENTH):
            return TokenSource(
                _tokens(Path(place)), vocabulary or scan.largest + 1, context, place, scan
            )
        most, other = largest_token(validation, 0, 1), validation.partition(":")[2]
        if 0 < vocabulary <= most:
            raise DataError(
                f"{other} holds token {most}, so data.vocabulary must be at least {most + 1}, but is {vocabulary}.",
                "Leave out data.vocabulary, or name other tokens with data.validation.",
            )
        return TokenSource(
            _tokens(Path(place)),
            vocabulary or max(most, scan.largest) + 1,
            context,
            place,
            scan,
            (_tokens(Path(other)), other),
        )
    if kind == "digits" and not place:
        return _digits(dtype)
    if kind == "idx" and place:
        return _idx(Path(place), dtype)
    raise ConfigError(
        f"data.source must be {SOURCES}, but is {name!r}.",
        "For example: --set data.source=text:book.txt",
    )


def amounts(source: Source | Unopened) -> dict[str, int]:
    """Return {name: count} of the data, for example of its training and held-out tokens.

    The result is {} unless the source is a TokenSource or a SampleSource.
    """
    if isinstance(source, TokenSource):
        return {
            "tokens": source.tokens,
            "held_out_tokens": source.held_out_tokens,
            "vocabulary": source.inputs,
        }
    if isinstance(source, SampleSource):
        return {
            "samples": source.samples,
            "held_out_samples": source.held_out,
            "classes": source.classes,
        }
    return {}


def has_tokens(name: str) -> bool:
    """Return whether a source of this name is a tokens:FILE, which has to be scanned."""
    return name.startswith("tokens:")


def as_it_is(name: str) -> Scan:
    """Return the state of a tokens:FILE before its scan: its largest token is -1."""
    path = Path(name.partition(":")[2])
    nbytes = _size(path, TOKEN_KEYS)
    return Scan(str(path.resolve()), nbytes, path.stat().st_mtime_ns, -1)


def largest_token(name: str, part: int, parts: int) -> int:
    """Return the largest token in one of `parts` equal slices of a tokens:FILE; -1 if empty."""
    tokens = _tokens(Path(name.partition(":")[2]))
    tokens = tokens[part * len(tokens) // parts : (part + 1) * len(tokens) // parts]
    # Chunks bound the resident memory of a large memory map.
    return max(
        (int(tokens[i : i + (1 << 24)].max()) for i in range(0, len(tokens), 1 << 24)), default=-1
    )


def absolute(name: str) -> str:
    """Return the source's name with its path, if it has one, made absolute."""
    kind, _, place = name.partition(":")
    return f"{kind}:{Path(place).resolve()}" if place else name


def _pydocs() -> np.ndarray:
    """Return CPython's documentation topics as uint8: real text that every installation has."""
    from pydoc_data import topics

    return np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)


def _text(path: Path) -> np.ndarray:
    if _size(path) == 0:
        raise DataError(f"{path} is empty.", "Name a file with text in it.")
    return np.memmap(path, np.uint8, "r")


def _tokens(path: Path) -> np.ndarray:
    size = _size(path, TOKEN_KEYS)
    if size == 0 or size % 2:
        raise DataError(
            f"{path} must hold uint16 tokens, but has {size} bytes.",
            "Write it with numpy.ndarray.tofile.",
        )
    with path.open("rb") as file:
        head = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    has_header = head[0] == LLM_C_MAGIC
    if has_header and size <= 1024:
        raise DataError(
            f"{path} has the header of a token file and no tokens.",
            "Write the tokens after the header.",
        )
    if has_header and head[1] != 1:
        raise DataError(
            f"{path} is a token file of version {head[1]}, but only version 1 has tokens of 16 bits.",
            "Write it with numpy.ndarray.tofile, as uint16.",
        )
    if has_header and size != 1024 + 2 * head[2]:
        raise DataError(
            f"{path} should hold {head[2]} tokens, as its header says, but holds {(size - 1024) // 2}.",
            "Copy the file again.",
        )
    return np.memmap(path, "<u2", "r", offset=1024 if has_header else 0)


TOKEN_KEYS = "data.source and data.validation"
"""The keys that name tokens:FILE."""


def _size(path: Path, keys: str = "data.source") -> int:
    """Return the size of a regular file in bytes; DataError if it cannot be read.

    Opening a pipe or a terminal would block forever.

    keys  the keys that may have named the file, for the message
    """
    try:
        check_regular(path)
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise DataError(
            f"The data file {path} cannot be read: {error.strerror}.", f"Check {keys}."
        ) from None


def _digits(dtype: str) -> SampleSource:
    """Return the 1797 handwritten 8 x 8 digits of scikit-learn, scaled to 0..1.

    Every fifth is a test image.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "data.source digits needs scikit-learn, which is not installed.",
            "pip install scikit-learn",
        ) from None
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(dtype), labels.astype(np.int64)
    test = np.arange(len(labels)) % 5 == 4
    return SampleSource((images[~test], labels[~test]), (images[test], labels[test]))


def _idx(folder: Path, dtype: str) -> SampleSource:
    """Return the images of four MNIST-format files, gzipped or not, with pixels scaled to 0..1.

    folder  holds train-images-idx3-ubyte and its three companions
    """
    parts = {}
    for part in ("train", "t10k"):
        images = _idx_array(folder, f"{part}-images-idx3-ubyte", 3)
        labels = _idx_array(folder, f"{part}-labels-idx1-ubyte", 1)
        if len(images) != len(labels) or images.size == 0:
            raise DataError(
                f"{folder} has {len(images)} {part} images of {images[0].size if len(images) else 0} pixels but "
                f"{len(labels)} labels.",
                "Every image needs pixels and a label.",
            )
        parts[part] = (images.reshape(len(images), -1).astype(dtype) / 255, labels.astype(np.int64))
    if parts["train"][0].shape[1] != parts["t10k"][0].shape[1]:
        raise DataError(
            f"Train and test images in {folder} differ in size.", "Use files of one data set."
        )
    return SampleSource(parts["train"], parts["t10k"])


def _idx_array(folder: Path, name: str, dims: int) -> np.ndarray:
    """Read one idx file: two zero bytes, type 8 (uint8), the number of dims, sizes, data.

    The sizes are big-endian uint32.
    """
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise DataError(
            f"{folder} holds neither {name} nor {name}.gz.",
            "Name a folder with the four MNIST-format files.",
        )
    try:
        raw = gzip.decompress(contents(path)) if path.suffix == ".gz" else contents(path)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.", "Copy the file again.") from None
    head = 4 + 4 * dims
    if len(raw) < head or raw[:4] != bytes((0, 0, 8, dims)):
        raise DataError(
            f"{path} is not an idx file of {dims} dims of bytes.", "Use files in the MNIST format."
        )
    shape = struct.unpack(f">{dims}I", raw[4:head])
    if len(raw) - head != math.prod(shape):  # NumPy's product would wrap around at 64 bits.
        raise DataError(
            f"{path} should hold {math.prod(shape)} bytes after its header, but holds {len(raw) - head}.",
            "Copy the file again.",
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)
