"""The header of a safetensors file, which lists the tensors of the file and their offsets.

It is checked before any tensor is read. The format is described at
https://huggingface.co/docs/safetensors:

    8 bytes   length of the header, little-endian
    header    JSON: dtype, shape and data_offsets of each tensor, in bytes from the header's end
    tensors   one after the other, without gaps
"""

import os
from pathlib import Path
from typing import Annotated, NamedTuple

import ml_dtypes
import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open

from mpitrain.files import reading
from mpitrain.strict_json import validated

INNER = 3
"""How many names of a checkpoint's path come after the run directory: checkpoints, the checkpoint,
the file.
"""
INDEX = "model.safetensors.index.json"
"""The name of the index of several safetensors files."""

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint16": "U16",
    "uint8": "U8",
}
NUMPY = {name: np.dtype(dtype) for dtype, name in DTYPES.items()}
CODES = {**DTYPES, "bfloat16": "BF16"}
"""Names in a header of the dtypes that mpitrain writes."""
FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes of parameters that mpitrain reads in folders of other projects."""
MOST = 100_000_000
"""The largest length of a header in bytes, as in the reference implementation."""

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
    inner  how many names at the end of the path must not be links
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    inner: int = INNER

    @property
    def numpy(self) -> np.dtype:
        """The dtype of the elements; ValueError for one that mpitrain does not read."""
        if self.dtype not in NUMPY:
            raise ValueError(
                f"{self.file.name} has a tensor of {self.dtype}, and mpitrain reads {', '.join(NUMPY)}"
            )
        return NUMPY[self.dtype]


def located(path: Path, inner: int = INNER) -> tuple[dict[str, str], dict[str, Located]]:
    """Return the metadata of a safetensors file, perhaps {}, and the location of each tensor.

    inner   how many names at the end of the path must not be links
    raises  OSError if the file cannot be read; ValueError, which names the file, if it breaks a
            rule of the format
    """
    with reading(path, inner) as file:
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
        name: Located(
            path, tensor.dtype, tuple(tensor.shape), 8 + length + tensor.data_offsets[0], inner
        )
        for name, tensor in tensors.items()
    }
