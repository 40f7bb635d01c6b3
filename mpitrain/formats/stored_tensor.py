"""A parameter tensor in a safetensors file, from which any rectangle can be read."""

import math
from typing import NamedTuple

import numpy as np

from mpitrain.files import reading
from mpitrain.formats.header import FLOATS, Located
from mpitrain.formats.safetensors_files import read_into
from mpitrain.layers.base import Rectangle


class StoredTensor(NamedTuple):
    """A tensor of ours in a file.

    is_transposed  whether the file has the dims in reverse order, as Conv1D of GPT-2 does: its
                   weights are (inputs, outputs)
    """

    located: Located
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of our tensor."""
        return self.located.shape[::-1] if self.is_transposed else self.located.shape

    @property
    def whole(self) -> Rectangle:
        """The rectangle of all elements."""
        return tuple(slice(0, length) for length in self.shape)

    def read(self, rectangle: Rectangle) -> np.ndarray:
        """Read a rectangle of our tensor, and no other byte of the file.

        returns  the elements, in the shape of the rectangle and the dtype of the file; bfloat16 as
                 float32
        raises   OSError if the file cannot be read
        """
        shape = self.located.shape
        stored = rectangle[::-1] if self.is_transposed else rectangle
        dtype = FLOATS[self.located.dtype]
        bits = np.empty([part.stop - part.start for part in stored], f"u{dtype.itemsize}")
        # The elements of the dims from `last` on are contiguous in the file.
        last = max((d for d, n in enumerate(shape) if bits.shape[d] != n), default=0)
        strides = [math.prod(shape[d + 1 :]) * dtype.itemsize for d in range(len(shape))]
        first = self.located.start + sum(
            part.start * stride for part, stride in zip(stored, strides, strict=True)
        )
        with reading(self.located.file, self.located.inner) as file:
            for corner in np.ndindex(*bits.shape[:last]):
                offset = sum(i * stride for i, stride in zip(corner, strides, strict=False))
                read_into(file.fileno(), bits[corner], first + offset)
        values = bits.view(dtype)
        if self.located.dtype == "BF16":
            values = values.astype(np.float32)
        return values.T if self.is_transposed else values
