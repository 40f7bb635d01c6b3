"""Data sources. The global batch of step k depends on (seed, k) alone, of a source that permutes on the samples before it;
a rank asks for its rows of it.

Token sources hold out a file of its own or their last tenth; sample sources have a test set.
B batch, T tokens in a context, F features.
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
BYTES = 256  # tokens of text: its bytes
LLM_C_MAGIC = (
    20240520  # first int32 of a token file of llm.c, whose header of 256 int32 precedes the tokens
)


class Source(Protocol):
    """Numbered rows to train on, and held-out rows to evaluate on.

    model       the model.kind this source is for
    inputs      vocabulary size, or features of a sample
    classes     what is predicted: one of so many
    held_out    number of held-out rows
    """

    model: str
    inputs: int
    classes: int
    held_out: int

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows `rows` of the global batch of `size` rows of a step: inputs, and int64 targets.

        before  samples in the batches of all earlier steps; None: as many as if they had had this one's size
        """

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Held-out rows by number, in the same form."""


class Scan(NamedTuple):
    """What a pass over a file of tokens has found, and the file as it was then: path, bytes, time of its last change in ns."""

    path: str
    nbytes: int
    changed_ns: int
    largest: int


class TokenSource:
    """A stream of tokens cut into windows of T: inputs (B, T) int64, targets the same windows one token later.

    scan        of tokens:FILE
    validation  the tokens to hold out, and their name; None: the last tenth
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
    """Labelled samples, all of them once per epoch in an order drawn from (seed, epoch): inputs (B, F), targets (B,)."""

    model = "mlp"

    def __init__(self, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]):
        self._train, self._test = train, test
        self._shuffled: tuple[tuple[int, int], np.ndarray] | None = (
            None  # the (seed, epoch) drawn last, and its order
        )
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
        """The samples' numbers in the order of an epoch. Drawing costs all samples, so the newest order is kept: steps that
        follow one another draw each epoch once, in the memory of one."""
        if self._shuffled is None or self._shuffled[0] != (seed, epoch):
            order = np.random.default_rng([seed, epoch]).permutation(len(self._train[1]))
            self._shuffled = (seed, epoch), order
        return self._shuffled[1]

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        samples, labels = self._test
        chosen = np.asarray(rows, np.int64)
        return samples[chosen], labels[chosen]


class Unopened(NamedTuple):
    """What a model must know of its data, without the data: enough to generate."""

    model: str
    inputs: int
    classes: int
    held_out: int = 0


TENTH = "tenth"
"""The data.validation of tokens that are held out at the end of the source."""


def beside(name: str) -> str:
    """What an empty data.validation means for tokens:FILE: nanoGPT's val.bin beside train.bin, or the last tenth."""
    path = Path(name.partition(":")[2])
    other = path.with_name("val.bin")
    return f"tokens:{other}" if path.name == "train.bin" and other.exists() else TENTH


def open_source(
    name: str,
    context: int,
    dtype: str,
    vocabulary: int = 0,
    scan: Scan | None = None,
    validation: str = "",
) -> Source:
    """Open a source by its configuration name; DataError if it is missing, unreadable, too small, or of more tokens.

    context     tokens per row of a token source
    dtype       of the features of a sample source
    vocabulary  of a token source; 0: 256 for text, for tokens:FILE one more than its largest token
    scan        of tokens:FILE, where it is known; None costs a pass over the file
    validation  of tokens:FILE, another tokens:FILE; tenth or empty: the last tenth
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
    """How much there is to train on and held out, of the sources of this file."""
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
    """Whether a source of this name has to be scanned."""
    return name.startswith("tokens:")


def as_it_is(name: str) -> Scan:
    """The scan of tokens:FILE yet to be made, whose largest token is -1."""
    path = Path(name.partition(":")[2])
    nbytes = _size(path, TOKEN_KEYS)
    return Scan(str(path.resolve()), nbytes, path.stat().st_mtime_ns, -1)


def largest_token(name: str, part: int, parts: int) -> int:
    """The largest token of one of so many equal parts of tokens:FILE; -1 for a part without tokens."""
    tokens = _tokens(Path(name.partition(":")[2]))
    tokens = tokens[part * len(tokens) // parts : (part + 1) * len(tokens) // parts]
    # In pieces, so that a large memory map does not become resident at once.
    return max(
        (int(tokens[i : i + (1 << 24)].max()) for i in range(0, len(tokens), 1 << 24)), default=-1
    )


def absolute(name: str) -> str:
    """The source's name with the path in it, if there is one, made absolute."""
    kind, _, place = name.partition(":")
    return f"{kind}:{Path(place).resolve()}" if place else name


def _pydocs() -> np.ndarray:
    """The text of CPython's own documentation topics, as bytes: real text that every installation has."""
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
    """Bytes of a regular file that can be read: opening a pipe or a terminal would wait for ever.

    keys  which may have named it
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
    """The 1797 handwritten 8 x 8 digits of scikit-learn, scaled to 0..1; every fifth is a test image."""
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
    """MNIST-format files (train-images-idx3-ubyte and its three companions, gzipped or not), pixels scaled to 0..1."""
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
    """One idx file: two zero bytes, type 8 (uint8), the number of dims, big-endian sizes, then the bytes."""
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
    if len(raw) - head != math.prod(shape):  # NumPy's product would wrap at 64 bits
        raise DataError(
            f"{path} should hold {math.prod(shape)} bytes after its header, but holds {len(raw) - head}.",
            "Copy the file again.",
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)
