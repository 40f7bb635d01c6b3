"""Files of text and of tokens: their dtypes and headers, and the scan for the largest token."""

import errno
import glob
import hashlib
import os
import struct
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple

import numpy as np

from mpitrain.data.flat_tokens import FileTokens, FlatTokens, JoinedTokens, largest
from mpitrain.data.meta import noted_dtype
from mpitrain.data.source import Scan
from mpitrain.errors import DataError
from mpitrain.files import check_regular, reading

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
"""The errors of NumPy for a header that is damaged."""
KEYS = "data.source and data.validation"
"""The keys that may have named a file, for messages."""
AUTO = "auto"
BLOCK, BLOCKS = 4096, 64
"""Bytes of a block, and number of blocks, that represent a larger file in its digest."""

TENTH = "tenth"
"""The value of data.validation that holds out the last tenth of the source."""


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
    held_out = path.with_name("val.bin")
    return f"tokens:{held_out}" if held_out.exists() else TENTH


def as_it_is(name: str, dtype: str = AUTO) -> Scan:
    """Return the state of a tokens:PATTERN before its scan: its largest token is -1.

    Of several files it has the sums of sizes and of times, which change if any of them does.
    """
    place = name.partition(":")[2]
    paths = token_paths(place)
    sizes = [_size(path) for path in paths]
    dtypes = {_layout(*facts, dtype).dtype.name for facts in zip(paths, sizes, strict=True)}
    changed = sum(path.stat().st_mtime_ns for path in paths) % (1 << 62)
    return Scan(str(Path(place).resolve()), sum(sizes), changed, -1, " ".join(sorted(dtypes)))


def largest_token(name: str, part: int, parts: int, dtype: str = AUTO) -> int:
    """Return the largest token in one of `parts` equal slices of a tokens:PATTERN; -1 if empty."""
    tokens = tokens_of(name.partition(":")[2], dtype)
    return largest(tokens.region(part * len(tokens) // parts, (part + 1) * len(tokens) // parts))


def pydocs() -> np.ndarray:
    """Return CPython's documentation topics as uint8: real text that every installation has."""
    from pydoc_data import topics

    return np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)


def text(path: Path) -> FlatTokens:
    """Return the bytes of a file as tokens; DataError if it is empty or cannot be read."""
    size = _size(path)
    if size == 0:
        raise DataError(f"{path} is empty.", "Name a file with text in it.")
    return FileTokens(path, np.dtype(np.uint8), 0, size)


def token_paths(place: str) -> list[Path]:
    """Return the files that a path or a pattern names, in the order of their names.

    raises  DataError if no file matches a pattern
    """
    if not glob.has_magic(place) or Path(place).exists():
        return [Path(place)]
    paths = sorted(map(Path, glob.glob(place)))
    if not paths:
        raise DataError(f"{place} must match a file, but matches none.", f"Check {KEYS}.")
    return paths


def file_digest(path: Path) -> str:
    """Return the size of a file and a digest of its bytes, as text.

    Of a file of more than BLOCKS blocks only so many are read, the first and the last among them.
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
    return FileTokens(path, layout.dtype, layout.offset, room // itemsize)


def _layout(path: Path, size: int, dtype: str) -> TokenLayout:
    """Read the header of a file of tokens, if any; DataError for an unknown version or dtype."""
    with path.open("rb") as file:
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
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
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
    """Opening a pipe or a terminal would block forever, so only a regular file has a size."""
    try:
        check_regular(path)
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        is_full = error.errno in (errno.EMFILE, errno.ENFILE)
        raise DataError(
            f"The data file {path} cannot be read: {error.strerror}.",
            "Raise the limit of open files with ulimit -n, or join the files."
            if is_full
            else f"Check {KEYS}.",
        ) from None
