"""Streaming writers of files and safetensors files, which hash each block with SHA-256."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mpitrain.files import opened
from mpitrain.formats.header import CODES, INNER

BLOCK = 16 << 20
"""Bytes per block of a file; each block has its own SHA-256."""

MOVED = 4 << 20
"""Bytes per message between ranks, per copy from a device, and per read."""


class WrittenFile(NamedTuple):
    """The result of writing a file: its size in bytes, and the SHA-256 of each block."""

    nbytes: int
    digests: list[str]


class Writing:
    """A writer of a new file.

    `close` raises the errors of the constructor and of `write`. So a rank with a full disk still
    receives the messages of other ranks, and does not block them.

    inner  how many names at the end of the path must not be links
    """

    def __init__(self, path: Path, inner: int = INNER):
        self._nbytes, self._digests, self._digest = 0, list[str](), hashlib.sha256()
        self._file: BinaryIO | None = None
        self._error: OSError | None = None
        try:
            with opened(path.parent, inner - 1) as folder:
                self._file = os.fdopen(folder.create(path.name), "wb")
        except OSError as error:
            self._error = error

    def write(self, data: bytes | np.ndarray) -> None:
        """Append bytes, or the elements of a contiguous array."""
        rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while rest and self._file and not self._error:
            part = rest[: BLOCK - self._nbytes % BLOCK]
            try:
                self._file.write(part)
            except OSError as error:
                self._error = error
            self._digest.update(part)
            self._nbytes += len(part)
            if self._nbytes % BLOCK == 0:
                self._end_block()
            rest = rest[len(part) :]

    def close(self) -> WrittenFile:
        """Sync and close the file; raise the first OSError of the constructor or `write`."""
        try:
            if self._error or not self._file:
                raise self._error or OSError("it is not open")
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            if self._file:
                with suppress(OSError):  # An error is being raised already.
                    self._file.close()
        if self._nbytes % BLOCK:
            self._end_block()
        return WrittenFile(self._nbytes, self._digests)

    def _end_block(self) -> None:
        self._digests.append(self._digest.hexdigest())
        self._digest = hashlib.sha256()


class WritingTensors(Writing):
    """A writer of a new safetensors file. `write` then takes the elements of its tensors in order.

    tensors   {name: (dtype, shape)}, in the order of writing
    metadata  texts by name
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
        inner: int = INNER,
    ):
        super().__init__(path, inner)
        header: dict[str, Any] = {"__metadata__": metadata}
        stop = 0
        for name, (dtype, shape) in tensors.items():
            start, stop = stop, stop + prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": CODES[dtype.name],
                "shape": shape,
                "data_offsets": [start, stop],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.write(len(text).to_bytes(8, "little") + text)


def read_into(descriptor: int, array: np.ndarray, start: int) -> None:
    """Fill a contiguous array from byte `start` of an open file; OSError if it is too short."""
    rest = memoryview(array).cast("B") if array.size else memoryview(b"")
    while rest:
        done = os.preadv(descriptor, [rest[:BLOCK]], start)
        if not done:
            raise OSError(f"it ends before byte {start}")
        rest, start = rest[done:], start + done
