"""Tensors with our names and shapes: stored in safetensors files, or computed on writing."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpitrain.files import reading
from mpitrain.formats.safetensors_files import FLOATS, Located, read_into
from mpitrain.layers.base import Rectangle


class StoredTensor(NamedTuple):
    """A tensor in a file, with our order of dims.

    is_transposed  whether the file has the dims in reverse order, as for Conv1D of GPT-2, whose
                   weights are (inputs, outputs)
    """

    located: Located
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.located.shape[::-1] if self.is_transposed else self.located.shape

    def read(self, rectangle: Rectangle) -> np.ndarray:
        """Read a rectangle, in our order of dims, and no other byte of the file.

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
        with reading(self.located.file) as file:
            for corner in np.ndindex(*bits.shape[:last]):
                offset = sum(i * stride for i, stride in zip(corner, strides, strict=False))
                read_into(file.fileno(), bits[corner], first + offset)
        values = bits.view(dtype)
        if self.located.dtype == "BF16":
            values = values.astype(np.float32)
        return values.T if self.is_transposed else values


class ComputedTensor(NamedTuple):
    """A tensor that is computed at each `read`; it has the interface of `StoredTensor`.

    made           () -> the tensor, with our order of dims
    own_shape      the shape of that tensor
    is_transposed  whether `shape` and `read` reverse the dims
    """

    made: Callable[[], np.ndarray]
    own_shape: tuple[int, ...]
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.own_shape[::-1] if self.is_transposed else self.own_shape

    def read(self, rectangle: Rectangle) -> np.ndarray:
        made = self.made()
        return (made.T if self.is_transposed else made)[rectangle]


class JoinedTensor(NamedTuple):
    """Tensors of several files, one after another along their rows."""

    parts: tuple[StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]

    def read(self, rectangle: Rectangle) -> np.ndarray:
        """Read a rectangle, as `StoredTensor.read`, from the parts that have rows of it."""
        (rows, *rest), before, read = rectangle, 0, []
        for part in self.parts:
            low, high = max(rows.start - before, 0), min(rows.stop - before, part.shape[0])
            if low < high:
                read.append(part.read((slice(low, high), *rest)))
            before += part.shape[0]
        return np.concatenate(read)


class RowsOfTensor(NamedTuple):
    """Some rows of another tensor."""

    of: "AnyTensor"
    rows: slice

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.stop - self.rows.start, *self.of.shape[1:]

    def read(self, rectangle: Rectangle) -> np.ndarray:
        rows, *rest = rectangle
        return self.of.read(
            (slice(rows.start + self.rows.start, rows.stop + self.rows.start), *rest)
        )


class StackedTensor(NamedTuple):
    """Matrices of equal shape, (E, rows, columns), from a matrix with the rows of one after another."""

    of: "AnyTensor"
    experts: int

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.of.shape
        return self.experts, rows // self.experts, columns

    def read(self, rectangle: Rectangle) -> np.ndarray:
        matrices, rows, columns = rectangle
        each = self.shape[1]
        return np.stack(
            [
                self.of.read((slice(n * each + rows.start, n * each + rows.stop), columns))
                for n in range(matrices.start, matrices.stop)
            ]
        )


class UnstackedTensor(NamedTuple):
    """The matrix with the rows of matrices (E, rows, columns), one after another."""

    of: "AnyTensor"

    @property
    def shape(self) -> tuple[int, ...]:
        count, rows, columns = self.of.shape
        return count * rows, columns

    def read(self, rectangle: Rectangle) -> np.ndarray:
        """Read rows of one matrix."""
        rows, columns = rectangle
        number, first = divmod(rows.start, self.of.shape[1])
        own = slice(first, first + rows.stop - rows.start)
        return self.of.read((slice(number, number + 1), own, columns))[0]


AnyTensor = (
    StoredTensor | ComputedTensor | JoinedTensor | RowsOfTensor | StackedTensor | UnstackedTensor
)


ROWS = 4096
"""Rows that are compared at a time."""


def is_copy(copy: "StoredTensor", of: AnyTensor) -> bool:
    """Return whether a matrix has the values of another one, rounded to its own dtype."""
    rows, columns = of.shape
    pieces = [slice(first, min(first + ROWS, rows)) for first in range(0, rows, ROWS)]
    dtype = FLOATS[copy.located.dtype]
    return copy.shape == of.shape and all(
        np.array_equal(
            copy.read((some, slice(0, columns))), of.read((some, slice(0, columns))).astype(dtype)
        )
        for some in pieces
    )


def read_whole(tensor: AnyTensor) -> np.ndarray:
    return tensor.read(tuple(slice(0, length) for length in tensor.shape))


def parts_of(tensor: AnyTensor) -> tuple[StoredTensor, ...]:
    """Return the tensors in files that make up a tensor; none if it is computed."""
    if isinstance(tensor, StackedTensor):
        return parts_of(tensor.of)
    if isinstance(tensor, StoredTensor):
        return (tensor,)
    return tensor.parts if isinstance(tensor, JoinedTensor) else ()


def reversed_dims(tensor: AnyTensor) -> ComputedTensor | StoredTensor:
    """Return a matrix with its dims in reverse order."""
    known = tensor if isinstance(tensor, StoredTensor | ComputedTensor) else as_ours(tensor)
    return known._replace(is_transposed=not known.is_transposed)


def as_ours(stored: AnyTensor) -> ComputedTensor:
    """Return the tensor as a `ComputedTensor`, in our order of dims whichever order its file has."""
    return ComputedTensor(lambda: read_whole(stored), stored.shape)


def shifted(stored: AnyTensor, by: float) -> ComputedTensor:
    """Return a tensor plus a number, in the dtype of the tensor."""

    def made() -> np.ndarray:
        values = read_whole(stored)
        return values + values.dtype.type(by)

    return ComputedTensor(made, stored.shape)


def padded(stored: StoredTensor, dim: int, length: int) -> AnyTensor:
    """Return a matrix that is padded with zeros at the end of `dim`, up to this length."""
    shape = tuple(length if d == dim else own for d, own in enumerate(stored.shape))
    if shape == stored.shape:
        return stored

    def made() -> np.ndarray:
        own = read_whole(stored)
        return np.pad(own, [(0, now - then) for now, then in zip(shape, own.shape, strict=True)])

    return ComputedTensor(made, shape)


def merged(weight: AnyTensor, pairs: list[tuple[slice, AnyTensor, AnyTensor]], scale: float):
    """Return a weight plus the products of its adapters: W + scale B A.

    pairs  (rows of the weight, A, B) of each adapter
    """

    def made() -> np.ndarray:
        values = read_whole(weight)
        # The sum is rounded once, to the dtype of the weight.
        total = values.astype(np.float64)
        for rows, a, b in pairs:
            total[rows] += scale * (read_whole(b).astype(np.float64) @ read_whole(a))
        return total.astype(values.dtype)

    return ComputedTensor(made, weight.shape)


def stacked(pairs: list[tuple[slice, AnyTensor, AnyTensor]], outputs: int):
    """Join adapters of different rows of one weight into one adapter, and return its A and B.

    pairs    (rows of the weight, A, B) of each adapter
    outputs  number of rows of the weight
    """
    ranks = [a.shape[0] for _, a, _ in pairs]
    inputs = pairs[0][1].shape[1]

    def made_a() -> np.ndarray:
        return np.concatenate([read_whole(a) for _, a, _ in pairs])

    def made_b() -> np.ndarray:
        blocks = [read_whole(b) for _, _, b in pairs]
        whole = np.zeros((outputs, sum(ranks)), blocks[0].dtype)
        first = 0
        for (rows, _, _), block, rank in zip(pairs, blocks, ranks, strict=True):
            whole[rows, first : first + rank] = block
            first += rank
        return whole

    return (
        ComputedTensor(made_a, (sum(ranks), inputs)),
        ComputedTensor(made_b, (outputs, sum(ranks))),
    )
