"""A matrix product on random operands of a device, with its check against a reference."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpitrain.ops.cuda.layers import pitch
from mpitrain.ops.device import Device
from mpitrain.ops.reference.layers import linear_gelu
from mpitrain.tools.bench.kernels.work import count_wrong, stored, values

Shape = tuple[int, int, int]
"""M, N, K: (M, K) times (K, N)."""

WRONG = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest error of a correct element, relative to the reference's largest element."""


MOST_COMPARED = 256
"""Largest number of rows that are compared: evenly spaced ones and the last.

The host computes the reference, so it does not compute all rows.
"""


PERIOD = 1_048_573
"""Numbers after which the operands repeat. It is a prime, so that all rows differ."""


class LayerProduct(NamedTuple):
    """One of the products of a linear layer.

    stored    layout of the operands; T: stored transposed
    epilogue  "gelu": bias and GELU, with saved pre-activation; "sums": bias gradient; "": nothing
    """

    stored: str
    epilogue: str = ""


PRODUCTS = {
    "NT": LayerProduct("NT"),
    "NN": LayerProduct("NN"),
    "TN": LayerProduct("TN"),
    "NT+gelu": LayerProduct("NT", "gelu"),
    "TN+sums": LayerProduct("TN", "sums"),
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


def case_of(device: Device, shape: Shape, dtype: str, what: LayerProduct) -> Case:
    """Return random operands with their product and its check against a float32 reference.

    The elements of the product are near 1, where GELU is not linear. Only some rows are compared.
    With kernels, rows of the first operand and of the result have the pitch of logits in training.
    Logits have no bias, so with "sums" rows have none.
    """
    m, n, k = shape
    put, get, arena = device.backend.from_host, device.backend.to_host, device.arena()
    rows, columns = (k, m) if what.stored[0] == "T" else (m, k)
    has_pitch = device.kernels is not None and what.epilogue != "sums"
    wide, step = (pitch(each) if has_pitch else each for each in (columns, n))
    rng = np.random.default_rng(shape)
    padded = _drawn(rng, rows, wide, dtype)
    a, x = padded[:, :columns], put(padded)[:, :columns]
    b = _drawn(rng, *((n, k) if what.stored[1] == "T" else (k, n)), dtype, k**-0.5)
    bias = _drawn(rng, 1, n, dtype)[0]
    y, added = put(b), put(bias)
    z, kept = (device.backend.zeros(m * step, a.dtype).reshape(m, step)[:, :n] for _ in range(2))
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
        left = a.T if what.stored[0] == "T" else a
        right = (
            values(b) if what.stored[1] == "T" else values(b).T
        )  # it has a weight's shape, (N, K)
        count = sum(_wrong_rows(part, values(left[part]), right) for part in _compared(m))
        return count + (
            count_wrong(get(sums), values(left).sum(1, dtype=np.float64), WRONG["float32"])
            if what.epilogue == "sums"
            else 0
        )

    def _wrong_rows(part: slice, left: np.ndarray, right: np.ndarray) -> int:
        truth = (
            linear_gelu(left, right, values(bias), None)[0]
            if what.epilogue == "gelu"
            else left @ right.T
        )
        count = count_wrong(values(get(z[part])), truth, WRONG[dtype])
        if what.epilogue == "gelu":
            count += count_wrong(
                values(get(kept[part])), left @ right.T + values(bias), WRONG[dtype]
            )
        return count

    return Case(by, wrong)


def _drawn(
    rng: np.random.Generator, rows: int, columns: int, dtype: str, scale: float = 1.0
) -> np.ndarray:
    """Return random numbers (rows, columns); the largest operands would take seconds to draw."""
    drawn = rng.standard_normal(min(rows * columns, PERIOD), np.float32)
    return np.resize(stored(drawn * np.float32(scale), dtype), (rows, columns))


def _compared(rows: int) -> tuple[slice, ...]:
    step = -(-rows // MOST_COMPARED)
    return (slice(None),) if step == 1 else (slice(None, None, step), slice(rows - 1, rows))
