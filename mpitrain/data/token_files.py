"""Files of tokens: their layouts, the facts about them in meta.json, their digests, and reading.

Files are read by `preadv`, which releases the interpreter's lock: other threads compute meanwhile.
A page fault of a memory map would stop all threads of Python.
"""

import errno
import glob
import hashlib
import os
import struct
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from itertools import accumulate
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel, Field

from mpitrain.data.source import Scan
from mpitrain.data.tokenizer import TOKENIZER, digest
from mpitrain.errors import DataError
from mpitrain.files import BYTE_ORDER_MARK, ON_READ, PARSING, contents, reading, reading_of, text_of
from mpitrain.strict_json import parsed, validated

PEEK, FEWEST = 1 << 12, 64
"""Tokens at the beginning, in the middle and at the end of a file that show its dtype, and the fewest that do."""
CHUNK = 1 << 22
"""The number of tokens that a scan reads at a time."""
LLM_C_MAGIC = 20240520
"""The first int32 of a token file of llm.c. Its header has 256 int32; the tokens follow."""
LLM_C_KINDS = {LLM_C_MAGIC: (1, "uint16"), 20240801: (7, "uint32")}
"""{first int32 of a token file of llm.c: (its version, dtype of its tokens)}."""
LLM_C_HEADER = 1024
NPY_MAGIC = b"\x93NUMPY"
UNREADABLE = (
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    SyntaxError,
    TokenError,
    MemoryError,
    RecursionError,
)
"""The errors that NumPy raises for a damaged header."""
KEYS = "data.source and data.validation"
"""The keys that may have named a file, for messages."""
AUTO = "auto"
BLOCK, BLOCKS = 4096, 64
"""Bytes of a block, and the number of blocks that the digest of a larger file covers."""

TENTH = "tenth"
"""The value of data.validation that holds out the last tenth of the source."""
COUNTS, BEGINS, FOLLOWS = 1, 2, 4
"""Bits of a mark: the token counts as a target; a row begins with the token; the row before is of the same conversation."""
ALL_BITS = COUNTS | BEGINS | FOLLOWS
META = "meta.json"
"""A file in the folder of token files; its key "dtype" names their dtype."""
FORMAT = "mpitrain tokens 1"
"""The value of the key "format" of a meta.json that `data prepare` wrote."""

Count = Annotated[int, Field(ge=0, lt=1 << 62, strict=True)]


class FlatTokens(Protocol):
    dtype: np.dtype

    def __len__(self) -> int:
        """Return the number of tokens."""

    def region(self, start: int, stop: int) -> "FlatTokens":
        """Return the tokens start .. stop - 1, without a copy."""

    def read(self, start: int, out: np.ndarray) -> None:
        """Read the tokens from `start` on into `out`, which is contiguous and of this dtype."""


class ArrayTokens(FlatTokens):
    def __init__(self, array: np.ndarray):
        self._array, self.dtype = array, array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def region(self, start: int, stop: int) -> FlatTokens:
        return ArrayTokens(self._array[start:stop])

    def read(self, start: int, out: np.ndarray) -> None:
        out[:] = self._array[start : start + len(out)]


class _OpenedFile:
    """A file that is closed with the last reference to this object.

    number  its descriptor
    """

    def __init__(self, path: Path):
        file = reading(path)
        self.number = file.fileno()
        weakref.finalize(self, file.close)


class FileTokens(FlatTokens):
    """Tokens in a file.

    offset  of the first token, in bytes
    """

    def __init__(self, path: Path, dtype: np.dtype, offset: int, count: int):
        self._path, self.dtype, self._offset, self._count = path, dtype, offset, count
        self._file = _OpenedFile(path)

    def __len__(self) -> int:
        return self._count

    def region(self, start: int, stop: int) -> FlatTokens:
        region = copy(self)  # which shares the open file
        region._offset, region._count = self._offset + start * self.dtype.itemsize, stop - start
        return region

    def read(self, start: int, out: np.ndarray) -> None:
        rest, at = memoryview(out).cast("B"), self._offset + start * self.dtype.itemsize
        while rest:
            nbytes = os.preadv(self._file.number, [rest], at)
            if not nbytes:
                raise DataError(
                    f"{self._path} has become shorter while it is in use.",
                    "Copy the file again, then go on with --resume.",
                )
            rest, at = rest[nbytes:], at + nbytes


class JoinedTokens(FlatTokens):
    """The tokens of several sequences in their order; all have one dtype."""

    def __init__(self, members: Sequence[FlatTokens]):
        self._members, self._starts = members, [0, *accumulate(map(len, members))]
        self.dtype = np.result_type(*(member.dtype for member in members))

    def __len__(self) -> int:
        return self._starts[-1]

    def region(self, start: int, stop: int) -> FlatTokens:
        return JoinedTokens(
            [
                member.region(max(start - first, 0), min(stop - first, len(member)))
                for first, member in zip(self._starts, self._members, strict=False)
                if first < stop and start < first + len(member)
            ]
            or [ArrayTokens(np.empty(0, self.dtype))]
        )

    def read(self, start: int, out: np.ndarray) -> None:
        while len(out):
            at = bisect_right(self._starts, start) - 1
            member, first = self._members[at], self._starts[at]
            count = min(len(out), first + len(member) - start)
            some = out[:count] if member.dtype == self.dtype else np.empty(count, member.dtype)
            member.read(start - first, some)
            out[:count] = some
            start, out = start + count, out[count:]


def windows(tokens: FlatTokens, starts: np.ndarray, length: int) -> np.ndarray:
    rows = np.empty((len(starts), length), tokens.dtype)
    for row, start in zip(rows, starts.tolist(), strict=True):
        tokens.read(start, row)
    return rows.astype(np.int64)


def largest(tokens: FlatTokens) -> int:
    """Return the largest token; -1 if there is none."""
    buffer, most = np.empty(min(CHUNK, len(tokens)), tokens.dtype), -1
    for start in range(0, len(tokens), CHUNK):
        some = buffer[: len(tokens) - start]
        tokens.read(start, some)
        most = max(most, int(some.max()))
        ON_READ.get()()
    return most


class TokenLayout(NamedTuple):
    """The layout of a file of tokens.

    offset  of the first token, in bytes
    length  number of tokens in the header; None without a header
    """

    dtype: np.dtype
    offset: int
    length: int | None


def beside(name: str) -> str:
    """Return the value that replaces an empty data.validation, for a source tokens:FILE.

    It is val.bin in the folder of a train.bin, as nanoGPT writes them; else the last tenth.
    """
    path = Path(name.partition(":")[2])
    if path.name != "train.bin":  # a path such as . has no name at all
        return TENTH
    held_out = str(path.with_name("val.bin"))
    with suppress(DataError):
        if all(file.exists() for file in token_paths(held_out)):
            return f"tokens:{held_out}"
    return TENTH


def as_it_is(name: str, dtype: str = AUTO) -> Scan:
    """Return the `Scan` of a tokens:PATTERN before its tokens are read: the largest token is -1.

    For several files, `nbytes` and `changed_ns` are sums, which change if any file changes.
    """
    place = name.partition(":")[2]
    paths = token_paths(place)
    sizes = [_size(path) for path in paths]
    dtypes = {_layout(*facts, dtype).dtype.name for facts in zip(paths, sizes, strict=True)}
    changed = sum(path.stat().st_mtime_ns for path in paths) % (1 << 62)
    return Scan(literal(place), sum(sizes), changed, -1, " ".join(sorted(dtypes)))


def largest_token(name: str, part: int, parts: int, dtype: str = AUTO) -> int:
    """Return the largest token in slice `part` of `parts` equal slices of a tokens:PATTERN; -1 if
    the slice is empty.
    """
    tokens = tokens_of(name.partition(":")[2], dtype)
    return largest(tokens.region(part * len(tokens) // parts, (part + 1) * len(tokens) // parts))


def pydocs() -> np.ndarray:
    """Return CPython's documentation topics as uint8: real text that every installation has."""
    from pydoc_data import topics

    return np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)


def text(path: Path) -> FlatTokens:
    """Return the bytes of a file as tokens; DataError if it is empty or cannot be read."""
    size = _size(path)
    with reading(path) as file:
        start = len(BYTE_ORDER_MARK) * (file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK)
    if size == start:
        raise DataError(f"{path} is empty.", "Name a file with text in it.")
    return FileTokens(path, np.dtype(np.uint8), start, size - start)


def token_paths(place: str) -> list[Path]:
    """Return the files that a path or a pattern names, in the order of their names.

    A name of the path that exists, such as run[1], is no pattern.

    raises  DataError if no file matches a pattern
    """
    if not glob.has_magic(place):
        return [Path(place)]
    found = [Path(Path(place).anchor)]
    for name in Path(place).parts[bool(Path(place).anchor) :]:
        found = [path / match for path in found for match in _matches(path, name)]
    paths = sorted(path for path in found if os.path.lexists(path))
    if not paths:
        raise DataError(f"{place} must match a file, but matches none.", f"Check {KEYS}.")
    return paths


def _matches(folder: Path, name: str) -> list[str]:
    is_pattern = glob.has_magic(name) and not os.path.lexists(folder / name)
    return glob.glob(name, root_dir=folder) if is_pattern else [name]


def literal(place: str) -> str:
    """Return an absolute path or pattern whose folders and file, where they exist, are no patterns.

    So a later reader of the place takes the same files, whatever else was made or moved meanwhile.
    """
    names, folder = list[str](), Path("/")
    # Path.resolve would fail at a loop of links; who reads the file names it.
    for name in Path(os.path.realpath(place)).parts[1:]:
        is_there = glob.has_magic(name) and os.path.lexists(folder / name)
        names.append(glob.escape(name) if is_there else name)
        matches = _matches(folder, name)
        folder = folder / (matches[0] if len(matches) == 1 else name)
    return str(Path("/", *names))


def file_digest(path: Path) -> str:
    """Return the size of a file and a digest of its bytes, as text.

    Of a file of more than BLOCKS blocks, only BLOCKS blocks are read. They are spread evenly over
    the file, and include its first and its last bytes.
    """
    digest = hashlib.sha256()
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = BLOCK if size > BLOCKS * BLOCK else size
        starts = {number * (size - length) // (BLOCKS - 1) for number in range(BLOCKS)}
        for start in sorted(starts):
            digest.update(os.pread(file.fileno(), length, start))
    return f"{size} bytes with digest {digest.hexdigest()[:12]}"


def tokens_of(place: str, dtype: str = AUTO) -> FlatTokens:
    """Return the tokens of a file, or of all files that a pattern names, in their order.

    dtype   data.dtype
    raises  DataError if a file cannot be read or is damaged
    """
    files = [_tokens_of(path, dtype) for path in token_paths(place)]
    return files[0] if len(files) == 1 else JoinedTokens(files)


def _tokens_of(path: Path, dtype: str) -> FlatTokens:
    size = _size(path)
    layout = _layout(path, size, dtype)
    itemsize, room = layout.dtype.itemsize, size - layout.offset
    if dtype not in (AUTO, layout.dtype.name):
        raise DataError(
            f"{path} has {layout.dtype.name} tokens, as its header says, but data.dtype is {dtype}.",
            "Leave out data.dtype.",
        )
    if layout.length is None and (room <= 0 or room % itemsize):
        raise DataError(
            f"{path} must hold {layout.dtype.name} tokens, but has {size} bytes.",
            "Write it with numpy.ndarray.tofile, or set data.dtype.",
        )
    if layout.length is not None and room <= 0:
        raise DataError(
            f"{path} has the header of a token file and no tokens.",
            "Write the tokens after the header.",
        )
    if layout.length is not None and room != itemsize * layout.length:
        raise DataError(
            f"{path} should hold {layout.length} tokens, as its header says, but holds {room // itemsize}.",
            "Copy the file again.",
        )
    tokens = FileTokens(path, layout.dtype, layout.offset, room // itemsize)
    if layout.length is None and dtype == AUTO and itemsize == 2:
        _check_width(path, tokens)
    return tokens


def _check_width(path: Path, tokens: FileTokens) -> None:
    """Raise DataError if tokens without a noted dtype, read as uint16, are halves of wider numbers."""
    length = min(PEEK, len(tokens) // 4 * 4)
    starts = {part * (len(tokens) - length) // 8 * 4 for part in range(3)}
    content = _content(path.with_name(META))
    if length < FEWEST or not isinstance(content, dict) or "dtype" in content:
        return
    quads = np.empty((len(starts), length // 4, 4), tokens.dtype)
    for start, out in zip(sorted(starts), quads, strict=True):
        tokens.read(start, out.reshape(-1))
    low, high = quads[..., ::2].max(), quads[..., 1::2].max()
    # No vocabulary of 2^20 tokens is in use; one of 16 has no token of 256.
    is_wide = high < 16 and (high == 0 or low >= 256)
    if not is_wide or np.count_nonzero(quads[..., ::2]) < FEWEST // 4:
        return
    wide = "64-bit" if high == 0 == quads[..., 2].max() else "uint32"
    says = "is 0" if high == 0 else f"is at most {high}"
    raise DataError(
        f"{path} is read as uint16 tokens, the default, but looks like {wide} numbers: every second uint16 {says}.",
        "Set data.dtype to uint32; to uint16 if it is right."
        if wide == "uint32"
        else "Write it anew as numpy.uint32 and set data.dtype to uint32; to uint16 if it is right.",
    )


def _layout(path: Path, size: int, dtype: str) -> TokenLayout:
    """Read the header of a file of tokens, if any; DataError for an unknown version or dtype."""
    with reading(path) as file:
        head = file.read(12)
    if head.startswith(NPY_MAGIC):
        return _npy(path)
    magic, version, count = struct.unpack("<3i", head.ljust(12, b"\0"))
    if magic in LLM_C_KINDS:
        wanted, name = LLM_C_KINDS[magic]
        if version != wanted and size > LLM_C_HEADER:
            raise DataError(
                f"{path} is a token file of version {version}, but version {wanted} has {name} tokens.",
                "Write it with numpy.ndarray.tofile, as uint16.",
            )
        return TokenLayout(np.dtype(name).newbyteorder("<"), LLM_C_HEADER, count)
    name = dtype if dtype != AUTO else noted_dtype(path)
    return TokenLayout(np.dtype(name).newbyteorder("<"), 0, None)


def _npy(path: Path) -> TokenLayout:
    with reading(path) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            with PARSING:
                shape, _, dtype = read(file)
        except UNREADABLE as error:
            raise DataError(
                f"{path} is not a NumPy file that can be read: {str(error).splitlines()[0][:80]}.",
                "Write it with numpy.save.",
            ) from None
        offset = file.tell()
    if len(shape) != 1 or dtype.kind != "u" or dtype.itemsize > 4 or dtype.str[0] == ">":
        raise DataError(
            f"{path} must have one dim of uint16 or uint32 tokens, but has shape {shape} of {dtype}.",
            "Write it with numpy.save(path, tokens.astype(numpy.uint16)).",
        )
    return TokenLayout(dtype, offset, shape[0])


def _size(path: Path) -> int:
    """Return the size of a file; DataError unless it is a regular file that can be opened.

    Opening a pipe or a terminal would block forever.
    """
    try:
        with reading(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        is_full = error.errno in (errno.EMFILE, errno.ENFILE)
        raise DataError(
            f"The data file {path} cannot be read: {error.strerror}.",
            "Raise the limit of open files with ulimit -n, or join the files."
            if is_full
            else f"Check {KEYS}.",
        ) from None


def mark_path(path: Path) -> Path:
    """Return the file of marks beside a file of conversations: train.mask of train.bin."""
    return path.with_suffix(".mask")


def marks_of(paths: Sequence[Path]) -> np.ndarray:
    """Return the marks of the tokens of some files of conversations, (tokens,) uint8.

    raises  DataError if a file is missing, damaged, or has another length than its tokens
    """
    parts = []
    for path in paths:
        facts, name = prepared(path), mark_path(path)
        with reading_of(f"The marks {name}", f"Copy them beside {path}.", DataError):
            marks = np.frombuffer(contents(name), np.uint8)
        wanted = facts.files[path.name].tokens if facts else 0
        if len(marks) != wanted or not wanted or marks.max() > ALL_BITS or not marks[0] & BEGINS:
            raise DataError(
                f"{name} must have a mark for each of the {wanted} tokens of {path}, but it does not.",
                "Copy it again, or prepare the data again.",
            )
        parts.append(marks)
    return np.concatenate(parts)


def template_of(place: str) -> str:
    """Return the template of conversations that `data prepare` wrote; empty for other token files."""
    facts = [prepared(path) for path in token_paths(place)]
    templates = {one.template if one else "" for one in facts}
    if len(templates) > 1:
        raise DataError(
            f"Files of conversations must have one template, but those of {place} have {len(templates)}.",
            "Prepare them together.",
        )
    return next(iter(templates))


def files_of_tokens(place: str) -> list[Path]:
    """Return the files that a path or a pattern of tokens:FILE names, and their marks."""
    paths = token_paths(place)
    return [*paths, *map(mark_path, paths)]


class Counts(BaseModel):
    """Counts of a file of tokens.

    bytes  length of the text in UTF-8, to which separators add nothing
    """

    documents: Count = 0
    tokens: Count = 0
    bytes: Count = 0

    def added(self, documents: int, tokens: int, nbytes: int) -> "Counts":
        return Counts(
            documents=self.documents + documents,
            tokens=self.tokens + tokens,
            bytes=self.bytes + nbytes,
        )


class Prepared(BaseModel):
    """The content of meta.json of a directory that `data prepare` wrote.

    separator      the token that ends a document; -1: there is none
    tokenizer      SHA-256 of tokenizer.json in the same directory
    files          {name: counts} of train.bin and val.bin
    configuration  SHA-256 of inputs and options
    template       of conversations; empty: the files have documents
    """

    format: Literal["mpitrain tokens 1"] = FORMAT  # type: ignore[assignment]
    dtype: Literal["uint16", "uint32"]
    vocabulary: Annotated[int, Field(ge=1, le=1 << 32, strict=True)]
    separator: Annotated[int, Field(ge=-1, lt=1 << 32, strict=True)]
    tokenizer: str
    files: dict[str, Counts]
    configuration: str
    template: str = ""


def noted_dtype(path: Path) -> str:
    """Return the dtype of a token file without a header: that in meta.json beside it, or uint16."""
    content = _content(path.with_name(META))
    name = content.get("dtype", "uint16") if isinstance(content, dict) else None
    if name not in ("uint16", "uint32"):
        raise DataError(
            f"The dtype in {path.with_name(META)} must be uint16 or uint32, but is {name!r}.",
            "Write it again, or set data.dtype.",
        )
    return str(name)


def prepared(path: Path) -> Prepared | None:
    """Return the meta.json in the folder of a token file if `data prepare` wrote both; else None.

    raises  DataError if a meta.json of `data prepare` is damaged
    """
    meta, content = path.with_name(META), None
    with suppress(DataError):  # With data.dtype, a meta.json of other programs is not read.
        content = _content(meta)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    try:
        facts = validated(Prepared, text_of(meta))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{meta} must be as mpitrain data prepare writes it, but {error}.", "Prepare it again."
        ) from None
    return facts if path.name in facts.files else None


def bytes_per_token(paths: Iterable[Path]) -> float:
    """Return the bytes of text per token of some files; 0 unless meta.json has the counts of all."""
    tokens = nbytes = 0
    for path in paths:
        facts = prepared(path)
        counts = facts.files[path.name] if facts else Counts()
        if facts is None or path.stat().st_size != counts.tokens * np.dtype(facts.dtype).itemsize:
            return 0.0
        tokens, nbytes = tokens + counts.tokens, nbytes + counts.bytes
    return nbytes / tokens if tokens else 0.0


def tokenizer_beside(path: Path) -> bytes | None:
    """Return the content of tokenizer.json in the folder of a token file; None unless `data prepare`
    wrote the token file.

    raises  DataError if tokenizer.json is missing, or is not the one whose digest meta.json has
    """
    facts = prepared(path)
    if facts is None:
        return None
    name = path.with_name(TOKENIZER)
    with reading_of(f"The tokenizer {name}", f"Copy it beside {path}.", DataError):
        data = contents(name)
    if digest(data) != facts.tokenizer:
        raise DataError(
            f"{name} must be the tokenizer that made {path}, but its digest differs.",
            "Copy it again, or prepare the data again.",
        )
    return data


def _content(meta: Path) -> object:
    """Return the content of a meta.json; {} if there is no such file."""
    if not meta.is_file():
        return {}
    try:
        return parsed(text_of(meta))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{meta} must be JSON, but {error}.", "Write it again, or set data.dtype."
        ) from None
