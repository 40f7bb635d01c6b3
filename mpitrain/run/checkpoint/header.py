"""The header of a safetensors file: which tensors the file has, and where. It is checked before a
byte of a tensor is read.

The file is eight bytes with the length of the header, the header (JSON: dtype, shape and
data_offsets of each tensor, which count from the header's end), and the tensors, one behind the
other.
https://huggingface.co/docs/safetensors has the rules.
"""

import os
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mpitrain.files import reading
from mpitrain.strict_json import validated

INNER = 3
"""Names of a checkpoint's file beneath its run directory: the folder of checkpoints, the checkpoint's, its own."""

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
WIDTHS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element of every dtype with whole ones. NUMPY has those that can be read here."""

MOST = 100_000_000
"""Bytes of a header at most, as other readers have it."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Tensor(BaseModel):
    """What a header says of one tensor."""

    model_config = ConfigDict(strict=True)

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


class Header(BaseModel):
    """What a header says: texts by name, if there are any, and every other name is that of a
    tensor.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Tensor] = Field(init=False)

    metadata: dict[str, str] | None = Field(None, alias="__metadata__")


class Located(NamedTuple):
    """Where a tensor lies in a file, in bytes; `dtype` is its name in the header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def numpy(self) -> np.dtype:
        """The dtype of the elements; ValueError for one that cannot be read here."""
        if self.dtype not in NUMPY:
            raise ValueError(
                f"{self.file.name} has a tensor of {self.dtype}, and mpitrain reads {', '.join(NUMPY)}"
            )
        return NUMPY[self.dtype]


def located(path: Path) -> tuple[dict[str, str], dict[str, Located]]:
    """Metadata, where there is any, and tensors of a safetensors file.

    raises  OSError if the file cannot be read, and ValueError, which names it, if it breaks a rule
            of the format
    """
    with reading(path, INNER) as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(8)
        length = int.from_bytes(head, "little")
        if not 2 <= length <= min(MOST, size - 8):
            raise ValueError(f"{path.name} has {size} bytes, which cannot hold its header")
        text = file.read(length)
    try:
        header = validated(Header, text)
        tensors = header.__pydantic_extra__
        _check_places(tensors, size - 8 - length)
    except ValueError as error:
        raise ValueError(f"the header of {path.name} is damaged: {error}") from None
    return header.metadata or {}, {
        name: Located(path, tensor.dtype, tuple(tensor.shape), 8 + length + tensor.data_offsets[0])
        for name, tensor in tensors.items()
    }


def _check_places(tensors: dict[str, Tensor], room: int) -> None:
    """ValueError unless each tensor has as many bytes as its shape says, and all lie one behind the
    other and fill the file.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in WIDTHS:
            raise ValueError(f"{name!a} is of dtype {tensor.dtype!a}, which safetensors has not")
        start, stop = tensor.data_offsets
        needed = prod(tensor.shape) * WIDTHS[tensor.dtype]
        if stop - start != needed:
            raise ValueError(f"{name!a} takes {needed} bytes, but lies at {start} to {stop}")
    places = sorted(tensor.data_offsets for tensor in tensors.values())
    for (_, stop), (start, _) in pairwise([(0, 0), *places, (room, room)]):
        if start != stop:
            raise ValueError(
                f"a tensor or the file ends at {stop}, where the next begins at {start}"
            )
