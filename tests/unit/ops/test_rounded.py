"""Half precision on the host: what float32 arrays are rounded to, and by which operations."""

import math

import ml_dtypes
import numpy as np
import pytest

from mpitrain.machine.backend import Arena
from mpitrain.ops.device import TYPES, host_ops, rounded
from mpitrain.parallel.replica import DynamicLossScale, StepResult
from tests.cases.packed import Packed
from tests.cases.training import STEPS, step_of

SHORT = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def cast(x, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(SHORT[dtype]).astype(np.float32)


@pytest.mark.parametrize("dtype", SHORT)
def test_numbers_are_rounded_as_a_cast_rounds(dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(SHORT[dtype]).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    x = np.concatenate(
        [
            every,
            every[:-1] / 2 + every[1:] / 2,
            np.nextafter(every, np.float32(0)),
            bits.view(np.float32),
            np.float32(
                [
                    65519.9,
                    65520,
                    65536,
                    -65520,
                    3e38,
                    -3e38,
                    np.inf,
                    -np.inf,
                    np.nan,
                    2**-25,
                    1.1 * 2**-25,
                ]
            ),
        ]
    )
    found = x.copy()
    TYPES[dtype](found, Arena())
    np.testing.assert_array_equal(found, cast(x, dtype))


@pytest.mark.parametrize("dtype", SHORT)
def test_outputs_are_rounded_and_gradients_of_parameters_are_not(dtype):
    ops, arena, rng = rounded(dtype).ops, Arena(), np.random.default_rng(1)

    def numbers(*shape):
        return cast(rng.standard_normal(shape).astype(np.float32), dtype)

    def is_short(*arrays):
        return all(np.array_equal(array, cast(array, dtype)) for array in arrays)

    x, w, b, dy, qkv = (
        numbers(70, 12),
        numbers(12, 12),
        numbers(12),
        numbers(70, 12),
        numbers(2, 35, 36),
    )
    for product in ("linear", "linear_gelu", "linear_relu"):
        y, saved = getattr(ops, product)(x, w, b, arena)
        dx, pending = getattr(ops, f"{product}_backward_input")(dy, w, saved, arena)
        ops.linear_backward_weight(pending, dw := np.empty((12, 12), np.float32), False, arena)
        assert is_short(y, dx) and not is_short(dw), product
    y, saved = ops.layer_norm(x, b, b, 1e-5, arena)
    dx, _ = ops.layer_norm_backward_input(dy, b, saved, arena)
    assert is_short(y, dx)
    packed = Packed(ops)
    y, saved = packed.attention(qkv, 3, arena)
    assert is_short(y, packed.attention_backward(numbers(2, 35, 12), saved, arena))
    x_of_tokens, _ = ops.embedding(np.zeros((2, 3), int), w, numbers(3, 12), arena)
    loss, dlogits = ops.cross_entropy(numbers(70, 12), np.arange(70) % 12, 0.3, arena)
    ops.add(x, dy, total := np.empty_like(x), arena)
    ops.add_bias(x, b, biased := np.empty_like(x), arena, dy)
    np.testing.assert_array_equal(biased, cast((x + b) + dy, dtype))
    assert is_short(x_of_tokens, dlogits, total) and not is_short(np.float32(loss))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_host_s_and_writes_the_mirror_rounded(name):
    ops = rounded("bfloat16").ops
    alone, numbers = step_of(name, 200_003, "float32")
    mine, mirror = [array.copy() for array in alone], np.empty_like(alone[0])
    getattr(host_ops(), name)(*alone, arena=Arena(), **numbers)
    getattr(ops, name)(*mine, arena=Arena(), mirror=mirror, **numbers)
    for one, other in zip(alone, mine, strict=True):
        assert np.array_equal(one, other)
    p = alone[0]
    assert np.array_equal(mirror, cast(p, "bfloat16")) and not np.array_equal(mirror, p)


def step(loss=1.0, updated=True):
    return StepResult(loss, 1.0 if updated else math.inf, 0, 0.1, updated, False)


def test_the_loss_scale_doubles_and_halves_within_bounds():
    scale = DynamicLossScale()
    told = [scale.conclude(step()).extras["loss_scale"] for _ in range(200)]
    assert set(told) == {2.0**16} and scale.loss_scale == 2**17
    for overflows in (1, 2, 3):
        outcome = scale.conclude(step(updated=False))
        assert (
            outcome.extras["overflows"] == overflows
            and outcome.extras["loss_scale"] == 2 * scale.loss_scale
        )
    assert scale.loss_scale == 2**14
    assert scale.conclude(step(loss=math.nan, updated=False)).extras.get("overflows", 0) == 0, (
        "that is on_nonfinite's"
    )
    assert (scale.loss_scale, scale.overflows) == (2**14, 3)
    scale.conclude(step())
    other = DynamicLossScale()
    other.restore(scale.scalars())
    assert vars(other) == vars(scale) and (scale.good, scale.overflows) == (1, 0)
    for _ in range(20):
        scale.conclude(step(updated=False))
    assert scale.loss_scale == 1
    for _ in range(200 * 30):
        scale.conclude(step())
    assert scale.loss_scale == 2**24
