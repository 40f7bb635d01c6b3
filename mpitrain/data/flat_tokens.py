"""Flat sequences of tokens: arrays in memory, files that are read row by row, and several of them.

A file is read by `preadv`, which lets go of the interpreter: other threads compute meanwhile. A
page fault of a memory map would stop all threads of Python.
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np

from mpitrain.errors import DataError

CHUNK = 1 << 22
"""The number of tokens that a scan reads at a time."""


class FlatTokens(Protocol):
    """A 1-D sequence of tokens."""

    dtype: np.dtype

    def __len__(self) -> int:
        """Return the number of tokens."""

    def region(self, start: int, stop: int) -> "FlatTokens":
        """Return the tokens start .. stop - 1, without a copy."""

    def read(self, start: int, out: np.ndarray) -> None:
        """Read the tokens from `start` on into `out`, which is contiguous and of this dtype."""


class ArrayTokens(FlatTokens):
    """Tokens in memory."""

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
        file = path.open("rb", buffering=0)
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
    """Return windows of tokens: (len(starts), length) int64."""
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
    return most
