"""A tensor of ours that is computed from tensors in files as it is written."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpitrain.formats.stored_tensor import StoredTensor
from mpitrain.layers.base import Rectangle


class ComputedTensor(NamedTuple):
    """A tensor with the interface of `StoredTensor`.

    made           returns our tensor
    own_shape      of our tensor
    is_transposed  whether `shape` and `read` reverse the dims
    """

    made: Callable[[], np.ndarray]
    own_shape: tuple[int, ...]
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, with the dims reversed if `is_transposed`."""
        return self.own_shape[::-1] if self.is_transposed else self.own_shape

    @property
    def whole(self) -> Rectangle:
        """The rectangle of all elements."""
        return tuple(slice(0, length) for length in self.shape)

    def read(self, rectangle: Rectangle) -> np.ndarray:
        """Compute the tensor, and return a rectangle of it."""
        made = self.made()
        return (made.T if self.is_transposed else made)[rectangle]


AnyTensor = StoredTensor | ComputedTensor


def as_ours(stored: AnyTensor) -> ComputedTensor:
    """Return a stored tensor in our order of dims, whichever order its file has."""
    return ComputedTensor(lambda: stored.read(stored.whole), stored.shape)


def padded(stored: StoredTensor, dim: int, length: int) -> AnyTensor:
    """Return a matrix with zeros at the end of a dim, so that the dim has this length."""
    shape = tuple(length if d == dim else own for d, own in enumerate(stored.shape))
    if shape == stored.shape:
        return stored

    def made() -> np.ndarray:
        own = stored.read(stored.whole)
        return np.pad(own, [(0, now - then) for now, then in zip(shape, own.shape, strict=True)])

    return ComputedTensor(made, shape)


def merged(weight: AnyTensor, pairs: list[tuple[slice, AnyTensor, AnyTensor]], scale: float):
    """Return a weight plus the products of its adapters: W + scale B A.

    pairs  (rows of the weight, A, B) of each adapter
    """

    def made() -> np.ndarray:
        values = weight.read(weight.whole)
        # The sum is rounded once, to the dtype of the weight.
        total = values.astype(np.float64)
        for rows, a, b in pairs:
            total[rows] += scale * (b.read(b.whole).astype(np.float64) @ a.read(a.whole))
        return total.astype(values.dtype)

    return ComputedTensor(made, weight.shape)


def stacked(pairs: list[tuple[slice, AnyTensor, AnyTensor]], outputs: int):
    """Return A and B of one adapter that equals adapters of some rows each.

    pairs    (rows of the weight, A, B) of each adapter
    outputs  rows of the weight
    """
    ranks = [a.shape[0] for _, a, _ in pairs]
    inputs = pairs[0][1].shape[1]

    def made_a() -> np.ndarray:
        return np.concatenate([a.read(a.whole) for _, a, _ in pairs])

    def made_b() -> np.ndarray:
        blocks = [b.read(b.whole) for _, _, b in pairs]
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
