"""The matrix products of a training step alone: the step's floor.

Legend: M rows, K inputs, N outputs of a linear layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.machine.backend import Arena
from mpitrain.ops import Ops
from mpitrain.ops.host.attention import QUERIES
from mpitrain.ops.host.product import put_product
from mpitrain.ops.reference.attention import CAUSAL, Seen
from mpitrain.run.job import Job
from mpitrain.run.trainer import Trainer
from mpitrain.transport.base import Transport


class ProductArray(NamedTuple):
    """An array of a matrix product that was recorded in a step. Equal records are one array in the floor.

    address        of the array's first byte in the step: arrays that are one there are one here, so
                   that caches help as much
    is_transposed  whether the product reads the transpose
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    is_transposed: bool = False

    @property
    def transposed(self) -> "ProductArray":
        return self._replace(is_transposed=not self.is_transposed)


Operands = tuple[ProductArray, ProductArray, ProductArray]
"""a, b and the result of a product."""


def _of(array: np.ndarray) -> ProductArray:
    return ProductArray(array.__array_interface__["data"][0], array.shape, array.dtype.str)


def _forward(arguments: Sequence[Any], result: Any) -> list[Operands]:
    """The product of a linear layer's forward, x w^T. x: (M, K); w: (N, K)"""
    return [(_of(arguments[0]), _of(arguments[1]).transposed, _of(result[0]))]


def _input_half(arguments: Sequence[Any], result: Any) -> list[Operands]:
    """The product for the gradient of the input, dy w. dy: (M, N); w: (N, K)"""
    return [(_of(arguments[0]), _of(arguments[1]), _of(result[0]))]


def _weight_half(arguments: Sequence[Any], result: Any) -> list[Operands]:
    """The product for the gradient of the weight (N, K), dy^T x. dy: (M, N); x: (M, K)"""
    dy, x = arguments[0]
    return [(_of(dy).transposed, _of(x), _of(arguments[1]))]


def attention_products(
    batch: int, length: int, heads: int, width: int, dtype: str, seen: Seen = CAUSAL
) -> list[Operands]:
    """Return the matrix products of attention's forward: for each block of queries, scores and values.

    A block of queries sees the keys of a run, documents apart. The backward has twice as many
    products.
    """
    products: list[Operands] = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        q = ProductArray(-1, (heads, stop - start, width), dtype)
        end = start + seen.offset + 1
        begin = max(0, end - seen.window) if seen.window else 0
        count = min(stop + seen.offset, length) - begin
        keys = ProductArray(-2, (heads, count, width), dtype)
        scores = ProductArray(-3, (heads, stop - start, count), dtype)
        products += [(q, keys.transposed, scores), (scores, keys, q)]
    return products * batch


def _attention(arguments: Sequence[Any], result: Any) -> list[Operands]:
    q, _, heads = arguments[:3]
    batch, length, columns = q.shape
    return attention_products(batch, length, heads, columns // heads, q.dtype.str, *arguments[4:5])


FORWARDS = ("linear", "logits", "linear_gelu", "linear_relu")
PRODUCTS: Mapping[str, Callable[[Sequence[Any], Any], list[Operands]]] = {
    **dict.fromkeys(FORWARDS, _forward),
    **{f"{name}_backward_input": _input_half for name in FORWARDS if name != "logits"},
    "gelu_linear_backward_input": _input_half,
    "linear_backward_weight": _weight_half,
    "attention": _attention,
}
"""{operation: (arguments, result) -> its products as (a, b, out)}. Those of attention's backward
follow from its forward.
"""


def products_of(name: str, arguments: Sequence[Any], result: Any) -> list[Operands]:
    """Return the matrix products of a call of an operation, backward included for attention.

    The list is empty for an operation without such products.
    """
    products = PRODUCTS[name](arguments, result) if name in PRODUCTS else []
    return products * 3 if name == "attention" else products


def recorded(transport: Transport, job: Job) -> list[Operands]:
    """Return the matrix products that this rank computes in a step: a copy of the job takes one. Collective.

    raises  ConfigError on every rank, if the job computes on a GPU
    """
    resolved, products = job.trainer.job, list[Operands]()
    if resolved.device.kind != "cpu":
        raise ConfigError(
            f"The floor is measured on the host, but device.kind is {resolved.device.kind}.",
            "Use --device cpu, or leave out the peer bare-products.",
        ).on_every_rank()

    def noted(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            result = body(*arguments, **named)
            products.extend(products_of(name, arguments, result))
            return result

        return run

    bodies = {name: noted(name, body) for name, body in vars(resolved.device.ops).items()}
    device = resolved.device._replace(ops=cast(Ops, SimpleNamespace(**bodies)))
    trainer = Trainer(transport, job.units, replace(resolved, device=device))
    trainer.step(0, *trainer.replica.batch(job.data, 0))
    trainer.close()
    return products


class BareProducts:
    """A side of a comparison that computes the matrix products of a step, and nothing else."""

    name = "bare products"

    def __init__(self, products: Sequence[Operands]):
        self._arrays = dict[ProductArray, np.ndarray]()
        self._bound = [(self._array(a), self._array(b), self._array(out)) for a, b, out in products]

    def _array(self, described: ProductArray) -> np.ndarray:
        """Return an array as recorded, with numbers so small that no product of them overflows."""
        is_transposed, plain = described.is_transposed, described._replace(is_transposed=False)
        if plain not in self._arrays:
            self._arrays[plain] = np.full(plain.shape, 1e-3, plain.dtype)
        array = self._arrays[plain]
        return array.swapaxes(-1, -2) if is_transposed else array

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        """Compute all products once; there is no loss, so NaN is returned."""
        arena = Arena()
        for a, b, out in self._bound:
            if out.ndim == 2:
                put_product(a, b, out, False, arena)
            else:
                np.matmul(a, b, out=out)
        return math.nan

    def close(self) -> None:
        self._arrays.clear()
        self._bound.clear()
