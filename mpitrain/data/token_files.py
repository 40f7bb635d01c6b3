"""Files of text and of tokens: opened as memory maps, and scanned for the largest token."""

import struct
from pathlib import Path

import numpy as np

from mpitrain.data.source import Scan
from mpitrain.errors import DataError
from mpitrain.files import check_regular

LLM_C_MAGIC = 20240520
"""The first int32 of a token file of llm.c. Its header has 256 int32; the tokens follow."""
TOKEN_KEYS = "data.source and data.validation"
"""The keys that name tokens:FILE."""


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


def as_it_is(name: str) -> Scan:
    """Return the state of a tokens:FILE before its scan: its largest token is -1."""
    path = Path(name.partition(":")[2])
    nbytes = _size(path, TOKEN_KEYS)
    return Scan(str(path.resolve()), nbytes, path.stat().st_mtime_ns, -1)


def largest_token(name: str, part: int, parts: int) -> int:
    """Return the largest token in one of `parts` equal slices of a tokens:FILE; -1 if empty."""
    tokens = tokens_of(Path(name.partition(":")[2]))
    tokens = tokens[part * len(tokens) // parts : (part + 1) * len(tokens) // parts]
    # Chunks bound the resident memory of a large memory map.
    return max(
        (int(tokens[i : i + (1 << 24)].max()) for i in range(0, len(tokens), 1 << 24)), default=-1
    )


def pydocs() -> np.ndarray:
    """Return CPython's documentation topics as uint8: real text that every installation has."""
    from pydoc_data import topics

    return np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)


def text(path: Path) -> np.ndarray:
    """Return the bytes of a file as uint8; DataError if it is empty or cannot be read."""
    if _size(path) == 0:
        raise DataError(f"{path} is empty.", "Name a file with text in it.")
    return np.memmap(path, np.uint8, "r")


def tokens_of(path: Path) -> np.ndarray:
    """Return the uint16 tokens of a file, with or without a header of llm.c.

    raises  DataError if the file cannot be read or is damaged
    """
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
