"""The table of data sources by the prefix of their names, and what one asks of a source."""

import math
import os.path
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.config import Data
from mpitrain.data.prefetch import Rows
from mpitrain.data.source import Form, Reading, Request, Source, Targets, Unopened
from mpitrain.data.token_files import (
    TENTH,
    as_it_is,
    file_digest,
    files_of_tokens,
    largest_token,
    literal,
    token_paths,
    tokenizer_beside,
)
from mpitrain.data.tokenizer import BYTES_FILE, read_tokenizer
from mpitrain.data.tokens import (
    BYTES,
    MixtureSource,
    TokenSource,
    open_pydocs,
    open_text,
    open_tokens,
)
from mpitrain.errors import ConfigError, DataError
from mpitrain.files import paths_of
from mpitrain.tables import Table, on_use


class SourceKind(NamedTuple):
    """A kind of data source.

    open           makes the source; raises DataError if its data is missing or wrong
    form           of the data: a model must take it
    also           other forms in which a model may take it, as `Request.form`
    argument       what follows the prefix in a name, as help texts write it, such as :FILE; empty:
                   nothing
    help           a remark in the help of data.source; may be empty
    is_text        whether its tokens are the bytes of text, unless data.tokenizer is set
    is_token_file  whether it is files of tokens, which all ranks scan for the largest token
    can_validate   whether data.validation may name another file of this kind; of token files it may
                   always
    reads          the keys of `Reading` that it reads; token files read dtype in any case
    module         optional Python module that it needs; empty: none
    files          (path after the prefix) -> the files that it names
    has_arrays     whether it is an `ArraySource`, whose rows all ranks scan; data.validation may also
                   be a fraction
    """

    open: Callable[[Request], Source]
    form: Form
    argument: str = ""
    help: str = ""
    is_text: bool = False
    is_token_file: bool = False
    can_validate: bool = False
    reads: Sequence[str] = ()
    module: str = ""
    also: Sequence[Form] = ()
    files: Callable[[str], Sequence[Path]] = token_paths
    has_arrays: bool = False

    def does_read(self, key: str) -> bool:
        return key in self.reads or (key == "dtype" and self.is_token_file)

    @property
    def takes_validation(self) -> bool:
        """Whether data.validation may name another file of this kind."""
        return self.can_validate or self.is_token_file


def _open_mixture(request: Request) -> MixtureSource:
    """Open the members of data.mixture; each rank scans whole files of tokens."""
    reading = request.reading._replace(mixture={})
    members: dict[str, tuple[TokenSource, float]] = {}
    for name, weight in request.reading.mixture.items():
        row = source_kind(name)
        vocabulary = request.vocabulary if row.is_token_file else 0
        if row.is_text and 0 < request.vocabulary < BYTES:
            raise ConfigError(
                f"Text has {BYTES} tokens, one for each byte, so data.vocabulary of a mixture with {name} must be "
                f"at least {BYTES}, but is {request.vocabulary}.",
                "Leave out data.vocabulary.",
            )
        own = reading if row.is_token_file else reading._replace(dtype="auto")
        member = open_source(name, request.context, request.dtype, vocabulary, reading=own)
        if not isinstance(member, TokenSource):
            raise ConfigError(
                f"data.mixture must list sources of windows, but {name} has conversations.",
                "Leave it out, or train on it alone.",
            )
        members[name] = member, weight
    return MixtureSource(members, request.vocabulary)


def _open_arrays(reader: str, request: Request) -> Source:
    from mpitrain.data import arrays

    source: Any = arrays.ArraySource(getattr(arrays, reader), request)
    return source


def _refuse(request: Request) -> Source:
    raise ConfigError(
        f"data.source must be {names()}, but is {request.name!r}.",
        "For example: --set data.source=text:book.txt",
    )


MIXTURE = "mixture"
"""The name of the source that draws rows from the sources of data.mixture."""
WINDOWS = ("order", "separator")
"""The keys of sources whose rows are windows of one token sequence."""

SOURCES: Table[str, SourceKind] = Table(
    pydocs=SourceKind(open_pydocs, "tokens", is_text=True, reads=(*WINDOWS, "attend")),
    digits=SourceKind(
        on_use("mpitrain.data.samples:open_digits"), "samples", module="sklearn", also=("images",)
    ),
    text=SourceKind(
        open_text, "tokens", ":FILE", is_text=True, can_validate=True, reads=(*WINDOWS, "attend")
    ),
    tokens=SourceKind(
        open_tokens,
        "tokens",
        ":FILE",
        "flat uint16 or uint32; a pattern such as train_*.bin names several",
        is_token_file=True,
        reads=(*WINDOWS, "attend", "template", "packing"),
        files=files_of_tokens,
    ),
    jsonl=SourceKind(
        on_use("mpitrain.data.instructions:open_jsonl"),
        "tokens",
        ":FILE",
        "conversations, or labelled texts; lines or an array of JSON, or Parquet",
        is_text=True,
        can_validate=True,
        reads=("template", "tokenizer", "packing", "attend", "classes", "labels"),
        also=("texts",),
    ),
    mixture=SourceKind(
        _open_mixture,
        "tokens",
        help="of data.mixture",
        reads=("separator", "mixture", "dtype", "attend"),
    ),
    idx=SourceKind(
        on_use("mpitrain.data.samples:open_idx"),
        "samples",
        ":DIR",
        "MNIST files",
        also=("images",),
        files=on_use("mpitrain.data.samples:idx_files"),
    ),
    **{
        prefix: SourceKind(
            partial(_open_arrays, reader),
            "samples",
            argument,
            help,
            can_validate=True,
            reads=("normalise",),
            module=module,
            also=("images",),
            files=on_use(f"mpitrain.data.arrays:{files}"),
            has_arrays=True,
        )
        for prefix, argument, help, module, files, reader in (
            ("npy", ":X.npy,Y.npy", "arrays x and y", "", "npy_files", "npy"),
            ("csv", ":FILE:TARGET", "a column of a table", "", "file_before_colon", "table"),
            ("hdf5", ":FILE:/X,/Y", "two datasets", "h5py", "file_before_colon", "hdf5"),
        )
    },
)
"""Data sources by prefix: a name is PREFIX, or PREFIX:PATH where the row has an argument.

Configuration, help texts and commands read this table, so a new source needs only one entry.
"""


UNKNOWN = SourceKind(_refuse, "tokens")
"""The row of every name that is no source."""


def source_kind(name: str) -> SourceKind:
    prefix, _, place = name.partition(":")
    row = SOURCES.get(prefix, UNKNOWN)
    return row if bool(place) == bool(row.argument) else UNKNOWN


def names(with_help: bool = False) -> str:
    """Return the spellings of all sources: pydocs, digits, text:FILE, tokens:FILE or idx:DIR."""
    words = [
        prefix + row.argument + (f" ({row.help})" if with_help and row.help else "")
        for prefix, row in SOURCES.items()
    ]
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _spelled(is_meant: Callable[[SourceKind], bool]) -> str:
    """Return the spellings of some sources: text:FILE, tokens:FILE or jsonl:FILE."""
    *others, last = [prefix + row.argument for prefix, row in SOURCES.items() if is_meant(row)]
    return f"{', '.join(others)} or {last}" if others else last


def spellings(key: str) -> str:
    """Return the spellings of the sources that read a key of `Reading`."""
    return _spelled(lambda row: key in row.reads)


def token_files() -> str:
    """Return the spellings of the sources that are files of tokens: tokens:FILE."""
    return _spelled(lambda row: row.is_token_file)


def validating() -> str:
    """Return the spellings of the sources for which data.validation may name another file."""
    return _spelled(lambda row: row.takes_validation)


def is_fraction(validation: str) -> bool:
    """Return whether data.validation is a number between 0 and 1."""
    try:
        return 0 < float(validation) < 1
    except ValueError:
        return False


def check_validation(name: str, validation: str) -> None:
    """Raise ConfigError unless data.validation fits data.source.

    name  of the source
    """
    if not source_kind(name).takes_validation:
        raise ConfigError(
            f"data.validation needs data.source {validating()}, but data.source is {name}.",
            "Leave out data.validation.",
        )
    if source_kind(name).has_arrays and is_fraction(validation):
        return
    if validation != TENTH and source_kind(validation) is not source_kind(name):
        kind = name.partition(":")[0]
        raise ConfigError(
            f"data.validation must be {kind}:FILE like data.source, or tenth, or empty, but is {validation!r}.",
            f"For example: --set data.validation={kind}:held_out{Path(name).suffix}",
        )


def open_source(name: str, context: int, dtype: str, vocabulary: int = 0, **others: Any) -> Source:
    """Open a source by its configuration name, as `open_request` with these fields of a `Request`."""
    return open_request(Request(name, context, dtype, vocabulary, **others))


def open_request(request: Request) -> Source:
    """Open the source of a request.

    raises  ConfigError for a name that is no source or has options of another kind;
            DataError if it is missing, unreadable, too small, or exceeds the vocabulary
    """
    name, vocabulary, validation = request.name, request.vocabulary, request.validation
    row, reading = source_kind(name), request.reading
    if validation:
        check_validation(name, validation)
    if row.is_text and not reading.tokenizer and 0 < vocabulary < BYTES:
        raise ConfigError(
            f"Text has {BYTES} tokens, one for each byte, so data.vocabulary must be at least {BYTES}, but is {vocabulary}.",
            f"Leave out data.vocabulary, or name a {token_files()}.",
        )
    for key, value in reading._asdict().items():
        if value != Reading._field_defaults[key] and not row.does_read(key):
            raise ConfigError(
                f"data.{key} is of data.source {token_files() if key == 'dtype' else spellings(key)}, but that is {name}.",
                f"Leave out data.{key}.",
            )
    if row.is_token_file and request.scan is None:
        largest = largest_token(name, 0, 1, reading.dtype)
        request = request._replace(scan=as_it_is(name, reading.dtype)._replace(largest=largest))
    if row.is_token_file or reading.mixture:
        tokenizer_of([*(reading.mixture or [name]), *([validation] if ":" in validation else [])])
    kind = name.partition(":")[0]
    if not SOURCES.is_added(kind):
        return row.open(request)
    form = "an object with the attributes and methods of a Source"
    return SOURCES.made(kind, "data source", lambda: row.open(request), form, _is_source)


def _is_source(made: Any) -> bool:
    """Return whether an object has the attributes and methods of a `Source`, with their types."""
    numbers = [getattr(made, name, None) for name in ("inputs", "classes", "held_out")]
    shape, methods = getattr(made, "shape", None), ("batch", "held_out_rows")
    return (
        isinstance(getattr(made, "form", None), str)
        and isinstance(shape, tuple)
        and all(type(number) is int for number in (*shape, *numbers))
        and all(callable(getattr(made, name, None)) for name in methods)
    )


def read_rows(name: str, source: Source, count: int, read: Callable[[], Rows]) -> Rows:
    """Return the inputs and targets that `read` reads from a source.

    name    of the source
    count   number of rows that are read
    raises  ConfigError if the source of a plugin returns anything else
    """
    kind = name.partition(":")[0]
    if not SOURCES.is_added(kind):
        return read()
    return SOURCES.made(
        kind,
        "data source",
        read,
        f"two arrays, {count} rows of inputs of its shape and their targets",
        lambda made: (
            isinstance(made, Sequence)
            and len(made) == 2
            and all(isinstance(array, np.ndarray) for array in made)
            and made[0].shape == (count, *source.shape)
            and made[1].shape[:1] == (count,)
        ),
    )


def writes_text(name: str, mixture: Mapping[str, float], tokenizer: str = "") -> bool:
    """Return whether the tokens of a source, or of all sources of a mixture, are bytes of text."""
    return not tokenizer and all(source_kind(one).is_text for one in mixture or (name,))


def tokenizer_of(names: Iterable[str], tokenizer: str = "") -> bytes | None:
    """Return the content of the tokenizer's file of some sources; None if one has none.

    tokenizer  data.tokenizer
    raises  DataError if the sources have different tokenizers, or a file is damaged
    """
    if tokenizer:
        return read_tokenizer(tokenizer).data
    tokenizers: dict[bytes | None, str] = {}
    for name in names:
        if source_kind(name).is_token_file:
            for path in token_paths(name.partition(":")[2]):
                tokenizers.setdefault(tokenizer_beside(path), str(path))
        else:
            tokenizers.setdefault(BYTES_FILE if source_kind(name).is_text else None, name)
    if len(tokenizers) > 1 and None not in tokenizers:
        raise DataError(
            f"All tokens of a run must have one tokenizer, but {' and '.join([*tokenizers.values()][:2])} have different ones.",
            "Prepare them with one tokenizer.",
        )
    return next(iter(tokenizers)) if len(tokenizers) == 1 else None


def file_digests(data: Data) -> dict[str, str]:
    """Return {file: its size and digest} of the files that section [data] names; ranks compare these."""
    files: list[Path | str] = [data.tokenizer] if data.tokenizer else []
    for name in (*(data.mixture or [data.source]), data.validation):
        _, _, place = name.partition(":")
        files += source_kind(name).files(place) if place else []
    return {str(path): file_digest(path) for path in map(Path, files) if path.is_file()}


def absolute(name: str) -> str:
    kind, _, place = name.partition(":")
    if not place:
        return name
    if source_kind(name).is_token_file:
        return f"{kind}:{literal(place)}"
    # Path.resolve would fail at a loop of links; the source itself names it.
    places = paths_of(place) if kind == "npy" else [place]
    return f"{kind}:{','.join(map(os.path.realpath, places))}"


def amounts(source: Source | Unopened) -> dict[str, Any]:
    """Return {name: count} of the data, such as tokens and held_out_tokens, and what records of
    conversations are; {} if it has no counts."""
    return getattr(source, "amounts", {})


def rows_of_epoch(source: Source | Unopened) -> float:
    """Return the rows to train on in one epoch; 0 if the source has no counts."""
    counts = amounts(source)
    rows = (counts[key] for key in ("packed_rows", "conversations", "samples") if key in counts)
    return next(rows, 0) or counts.get("tokens", 0) / source.shape[0]


def bits_per_byte(source: Source | Unopened, nats: float) -> float | None:
    """Return the loss in bits per byte of held-out text; None if the source has no such number.

    nats  mean loss of held-out targets
    """
    bytes_per_token = getattr(source, "bytes_per_token", 0.0)
    return nats / math.log(2) / bytes_per_token if bytes_per_token else None


def perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))


def targets_of(source: Source | Unopened) -> Targets:
    """Return what the targets of a source are: classes, unless it has another attribute `targets`."""
    return getattr(source, "targets", "classes")


def zeros(source: Source | Unopened, rows: int, dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of zeros, in the shapes of a batch of this source.

    dtype  of features, pixels and targets that are no classes
    """
    if source.form == "tokens":
        return np.zeros((rows, *source.shape), np.int64), np.zeros((rows, *source.shape), np.int64)
    is_class = targets_of(source) == "classes"
    targets = np.zeros(rows, np.int64) if is_class else np.zeros((rows, source.classes), dtype)
    return np.zeros((rows, *source.shape), np.int64 if source.form == "texts" else dtype), targets
