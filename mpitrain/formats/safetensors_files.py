"""Safetensors files: headers, which are checked before a tensor is read, and streaming writers.

The format is described at https://huggingface.co/docs/safetensors:

    8 bytes   length of the header, little-endian
    header    JSON: dtype, shape and data_offsets of each tensor, in bytes from the header's end
    tensors   one after the other, without gaps

The library `safetensors` checks the headers. It cannot write a file from several ranks, or hash its
blocks. So this module writes files and reads elements itself.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open

from mpitrain.files import ON_READ, created, reading
from mpitrain.strict_json import validated

INDEX = "model.safetensors.index.json"
"""The name of the index of several safetensors files."""

NUMPY: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
}
"""{name in a header: dtype} for the dtypes of checkpoints."""
FLOATS: dict[str, np.dtype] = {
    **{name: NUMPY[name] for name in ("F64", "F32", "F16")},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""{name in a header: dtype} for the parameters that mpitrain reads in folders of other projects."""
CODES = {dtype.name: name for name, dtype in {**NUMPY, **FLOATS}.items()}
"""{NumPy's name of a dtype: name in a header} for the dtypes that mpitrain writes."""
MOST = 100_000_000
"""The largest length of a header in bytes, as in the reference implementation."""
BLOCK = 16 << 20
"""Bytes per block of a file; each block has its own SHA-256."""

SYNCED = 8
"""Blocks between two syncs of a file that is being written: the system holds no more back than these."""

MOVED = 4 << 20
"""Largest number of bytes in a message between ranks, a copy from a device, or a read."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Tensor(BaseModel):
    """The entry of one tensor in a header."""

    model_config = ConfigDict(strict=True)

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


class Header(BaseModel):
    """A parsed header: optional metadata (a dict of strings), and one entry per tensor."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Tensor] = Field(init=False)

    metadata: dict[str, str] | None = Field(None, alias="__metadata__")


class Located(NamedTuple):
    """The location of a tensor in a file.

    dtype  the name of the dtype in the header
    start  offset of the tensor in the file, in bytes
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def numpy(self) -> np.dtype:
        """The dtype of the elements; ValueError for one that mpitrain does not read."""
        if self.dtype not in NUMPY:
            raise ValueError(
                f"{self.file.name} has a tensor of {self.dtype}, and mpitrain reads {', '.join(NUMPY)}"
            )
        return NUMPY[self.dtype]


def located(path: Path) -> tuple[dict[str, str], dict[str, Located]]:
    """Return the metadata of a safetensors file, perhaps {}, and {tensor: its location}.

    raises  OSError if the file cannot be read; ValueError, which names the file, if it breaks a
            rule of the format
    """
    with reading(path) as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(8)
        length = int.from_bytes(head, "little")
        if not 2 <= length <= min(MOST, size - 8):
            raise ValueError(f"{path.name} has {size} bytes, which cannot hold its header")
        try:
            header = validated(Header, file.read(length))
            tensors = header.__pydantic_extra__
            with safe_open(f"/proc/self/fd/{file.fileno()}", "numpy"):
                pass  # The library checks dtypes, sizes and places.
        except (ValueError, SafetensorError) as error:
            raise ValueError(f"the header of {path.name} is damaged: {error}") from None
    return header.metadata or {}, {
        name: Located(path, tensor.dtype, tuple(tensor.shape), 8 + length + tensor.data_offsets[0])
        for name, tensor in tensors.items()
    }


class WrittenFile(NamedTuple):
    """The result of writing a file: its size in bytes, and the SHA-256 of each block."""

    nbytes: int
    digests: list[str]


class Writing:
    """A writer of a new file.

    `close` raises the errors of the constructor and of `write`. So a rank with a full disk still
    receives the messages of other ranks, and does not block them.
    """

    def __init__(self, path: Path):
        self._nbytes, self._digests, self._digest = 0, list[str](), hashlib.sha256()
        self._file: BinaryIO | None = None
        self._error: OSError | None = None
        try:
            self._file = os.fdopen(created(path), "wb")
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
                self._sync()
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

    def _sync(self) -> None:
        """Bring every SYNCED-th block to the disk, so that `close` waits for few of them."""
        if not self._file or self._error or len(self._digests) % SYNCED:
            return
        try:
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except OSError as error:
            self._error = error

    def _end_block(self) -> None:
        self._digests.append(self._digest.hexdigest())
        self._digest = hashlib.sha256()


class WritingTensors(Writing):
    """A writer of a new safetensors file. `write` takes the elements of its tensors, in order.

    tensors   {name: (dtype, shape)}, in the order of writing
    metadata  {name: text} of the header
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ):
        super().__init__(path)
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
        ON_READ.get()()
