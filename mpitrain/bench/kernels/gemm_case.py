"""A matrix product on random operands of a device, with its check against a reference."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpitrain.bench.kernels.work import count_wrong, stored, values
from mpitrain.ops.device import Device
from mpitrain.ops.reference.layers import linear_gelu

Shape = tuple[int, int, int]
"""M, N, K: (M, K) times (K, N)."""

WRONG = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest error of a correct element, relative to the reference's largest element."""


MOST_COMPARED = 256
"""Largest number of rows that are compared: evenly spaced ones and the last.

The host computes the reference, so it does not compute all rows.
"""


class Product(NamedTuple):
    """One of the products of a linear layer.

    stored    layout of the operands; T: stored transposed
    epilogue  "gelu": bias and GELU, with saved pre-activation; "sums": bias gradient; "": nothing
    """

    stored: str
    epilogue: str = ""


PRODUCTS = {
    "NT": Product("NT"),
    "NN": Product("NN"),
    "TN": Product("TN"),
    "NT+gelu": Product("NT", "gelu"),
    "TN+sums": Product("TN", "sums"),
}
"""NT: forward. NN: input half of backward. TN: weight half. NT+gelu: forward with bias and GELU.
TN+sums: weight half and bias gradient."""


class Case(NamedTuple):
    """A product on given operands.

    by     (multiply) -> function that computes the product with `multiply`, such as product.gemm
    wrong  () -> number of wrong elements in the result of the last run
    """

    by: Callable[[Callable[..., None]], Callable[[], None]]
    wrong: Callable[[], int]


def case_of(device: Device, shape: Shape, dtype: str, what: Product) -> Case:
    """Return random operands with their product and its check against a float32 reference.

    The elements of the product are near 1, where GELU is not linear. Only some rows are compared.
    """
    m, n, k = shape
    drawn = _drawn(shape)
    a = stored(drawn[0].reshape((k, m) if what.stored[0] == "T" else (m, k)), dtype)
    b = stored(drawn[1].reshape((n, k) if what.stored[1] == "T" else (k, n)), dtype)
    bias = stored(drawn[2], dtype)
    put, get, arena = device.backend.from_host, device.backend.to_host, device.arena()
    x, y, added = put(a), put(b), put(bias)
    z, kept = (device.backend.zeros(m * n, a.dtype).reshape(m, n) for _ in range(2))
    sums = device.backend.zeros(m, np.float32)
    extras = {
        "gelu": {"bias": added, "activation": "gelu", "saved": kept},
        "sums": {"row_sums": sums},
    }.get(what.epilogue, {})

    def by(multiply: Callable[..., None]) -> Callable[[], None]:
        return lambda: multiply(
            device.kernels,
            arena,
            x,
            y,
            z,
            transposed_a=what.stored[0] == "T",
            transposed_b=what.stored[1] == "T",
            **extras,
        )

    def wrong() -> int:
        left = values(a).T if what.stored[0] == "T" else values(a)
        right = (
            values(b) if what.stored[1] == "T" else values(b).T
        )  # it has a weight's shape, (N, K)
        found = sum(_wrong_rows(part, left[part], right) for part in _compared(m))
        return found + (
            count_wrong(get(sums), left.sum(1, dtype=np.float64), WRONG["float32"])
            if what.epilogue == "sums"
            else 0
        )

    def _wrong_rows(part: slice, left: np.ndarray, right: np.ndarray) -> int:
        truth = (
            linear_gelu(left, right, values(bias), None)[0]
            if what.epilogue == "gelu"
            else left @ right.T
        )
        found = count_wrong(values(get(z[part])), truth, WRONG[dtype])
        if what.epilogue == "gelu":
            found += count_wrong(
                values(get(kept[part])), left @ right.T + values(bias), WRONG[dtype]
            )
        return found

    return Case(by, wrong)


@lru_cache(maxsize=1)
def _drawn(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the flat numbers of both operands and of the bias.

    The largest shapes take seconds, so the next call with the same shape reuses them.
    """
    (m, n, k), rng = shape, np.random.default_rng(shape)
    a, b = rng.standard_normal(m * k, np.float32), rng.standard_normal(n * k, np.float32)
    return a, b * k**-0.5, rng.standard_normal(n, np.float32)


def _compared(rows: int) -> tuple[slice, ...]:
    """Return the rows to compare: all, or every k-th one and the last."""
    step = -(-rows // MOST_COMPARED)
    return (slice(None),) if step == 1 else (slice(None, None, step), slice(rows - 1, rows))
