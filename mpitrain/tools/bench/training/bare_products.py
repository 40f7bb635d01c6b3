"""The floor of a training step: only its matrix products, with their shapes.

M rows, K inputs, N outputs of a linear layer. B batch, T tokens, C channels, H heads.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.machine.arena import Arena
from mpitrain.ops.host.attention_whole import QUERIES
from mpitrain.ops.host.product import put_product

Shape = tuple[int, ...]


class Array(NamedTuple):
    """An array of a recorded product. Equal descriptions are one array in the floor.

    address        of its first byte in the step, so that arrays share caches as they did there
    is_transposed  whether the product reads the transpose
    """

    address: int
    shape: Shape
    dtype: str
    is_transposed: bool = False

    @property
    def transposed(self) -> "Array":
        return self._replace(is_transposed=not self.is_transposed)


class Product(NamedTuple):
    """A product a b of one kind of unit; leading dims of the arrays are a batch."""

    kind: str
    a: Array
    b: Array
    out: Array


def _of(array: np.ndarray) -> Array:
    return Array(array.__array_interface__["data"][0], array.shape, array.dtype.str)


def _forward(arguments: Sequence[Any], result: Any) -> list[tuple[Array, Array, Array]]:
    """x w^T.    x: (M, K); w: (N, K)"""
    return [(_of(arguments[0]), _of(arguments[1]).transposed, _of(result[0]))]


def _input_half(arguments: Sequence[Any], result: Any) -> list[tuple[Array, Array, Array]]:
    """dy w.    dy: (M, N); w: (N, K)"""
    return [(_of(arguments[0]), _of(arguments[1]), _of(result[0]))]


def _weight_half(arguments: Sequence[Any], result: Any) -> list[tuple[Array, Array, Array]]:
    """dy^T x.    dy: (M, N); x: (M, K); the gradient: (N, K)"""
    dy, x = arguments[0]
    return [(_of(dy).transposed, _of(x), _of(arguments[1]))]


def attention_products(batch: int, length: int, heads: int, width: int, dtype: str) -> list[Any]:
    """Return the two products of each block of queries in a forward: scores, then values.

    A block sees the keys up to its last query. The backward has twice as many.
    """
    products: list[tuple[Array, Array, Array]] = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        q = Array(-1, (heads, stop - start, width), dtype)
        keys = Array(-2, (heads, stop, width), dtype)
        scores = Array(-3, (heads, stop - start, stop), dtype)
        products += [(q, keys.transposed, scores), (scores, keys, q)]
    return products * batch


def _attention(arguments: Sequence[Any], result: Any) -> list[tuple[Array, Array, Array]]:
    (batch, length, packed), heads = arguments[0].shape, arguments[1]
    dtype = arguments[0].dtype.str
    return attention_products(batch, length, heads, packed // 3 // heads, dtype)


FORWARDS = ("linear", "logits", "linear_gelu", "linear_relu")
PRODUCTS: Mapping[str, Callable[[Sequence[Any], Any], list[tuple[Array, Array, Array]]]] = {
    **dict.fromkeys(FORWARDS, _forward),
    **{f"{name}_backward_input": _input_half for name in FORWARDS if name != "logits"},
    "gelu_linear_backward_input": _input_half,
    "linear_backward_weight": _weight_half,
    "attention": _attention,
}
"""{operation: (arguments, result) -> its products as (a, b, out)}. Those of attention's backward
follow from its forward.
"""


def products_of(kind: str, name: str, arguments: Sequence[Any], result: Any) -> list[Product]:
    """Return the matrix products of a call of an operation; empty for other operations."""
    if name not in PRODUCTS:
        return []
    products = [Product(kind, *each) for each in PRODUCTS[name](arguments, result)]
    return products * 3 if name == "attention" else products


class BareProducts:
    """A side of a comparison that computes the products of a step, and nothing else.

    seconds  {kind of unit: seconds of its products} in each step
    """

    name = "bare products"

    def __init__(self, recorded: Sequence[Product]):
        """recorded: the products of a step. The list may grow until `step` is first called."""
        self._recorded, self._arrays = recorded, dict[Array, np.ndarray]()
        self._bound: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
        self.seconds: list[dict[str, float]] = []

    def _array(self, described: Array) -> np.ndarray:
        """Return an array of this shape and dtype, with numbers so small that no product overflows."""
        is_transposed, plain = described.is_transposed, described._replace(is_transposed=False)
        if plain not in self._arrays:
            self._arrays[plain] = np.full(plain.shape, 1e-3, plain.dtype)
        array = self._arrays[plain]
        return array.swapaxes(-1, -2) if is_transposed else array

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        """Compute all products once; a floor has no loss."""
        if not self._bound:
            self._bound = [
                (kind, self._array(a), self._array(b), self._array(out))
                for kind, a, b, out in self._recorded
            ]
        spent: dict[str, float] = defaultdict(float)
        arena, last = Arena(), time.perf_counter()
        for kind, a, b, out in self._bound:
            if out.ndim == 2:
                put_product(a, b, out, False, arena)
            else:
                np.matmul(a, b, out=out)
            now = time.perf_counter()
            spent[kind] += now - last
            last = now
        self.seconds.append(spent)
        return 0.0

    def close(self) -> None:
        self._arrays.clear()
        self._bound.clear()
