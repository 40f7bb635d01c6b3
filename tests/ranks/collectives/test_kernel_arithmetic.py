"""Collectives whose arithmetic is done by our kernels, in the simulator: the same sums as NumPy's, format by format."""

import numpy as np
import pytest

from mpitrain.collectives.engine.arithmetic import HOST, arithmetic_of, parse_wire
from mpitrain.collectives.group import Group
from mpitrain.ops.device import device_for
from mpitrain.transport.threads import run_ranks

pytestmark = pytest.mark.compile

COUNTS = (0, 1, 5, 64, 1001)


def simulated():
    """Arithmetic by kernels, for every array."""
    return arithmetic_of(device_for("cuda-sim"))


def brought(rank, count, dtype="float32"):
    """Different on every rank and place; whole numbers, so that sums are exact, in bfloat16 up to 256."""
    return (np.arange(count) % 13 + 17 * rank).astype(dtype)


@pytest.mark.parametrize(
    "algorithm", ["ring", "star", "halving-doubling", "recursive-doubling", "tree"]
)
@pytest.mark.parametrize("op", ["add", "maximum"])
def test_all_reduce_by_kernels_is_exact(algorithm, op):
    def check(transport):
        kernels = device_for("cuda-sim").kernels
        for dtype in ("float32", "float64", "float16", "bfloat16", "int32"):
            for count in COUNTS:
                array, before = brought(transport.rank, count, dtype), kernels.launches
                Group(transport, algorithm, arithmetic=simulated()).all_reduce(array, op)
                stack = np.stack([brought(rank, count, dtype) for rank in range(transport.size)])
                np.testing.assert_array_equal(array, stack.sum(0) if op == "add" else stack.max(0))
                if transport.size > 1 and count == 1001 and dtype != "int32":
                    assert kernels.launches > before, "nothing was reduced by a kernel"

    for n in (1, 2, 3, 5):
        run_ranks(n, check)


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8", "topk:0.1"])
def test_wire_formats_by_kernels_give_the_host_s_sums(wire):
    """To the last bit, but for int8, where a kernel multiplies and adds in one rounding."""

    def check(transport):
        rng = np.random.default_rng(transport.rank)
        for count in (1, 300, 1001):
            start = rng.standard_normal(count).astype(np.float32)
            mine, theirs = start.copy(), start.copy()
            Group(transport, arithmetic=simulated()).bind_lossy(mine, parse_wire(wire)).run()
            Group(transport, arithmetic=HOST).bind_lossy(theirs, parse_wire(wire)).run()
            np.testing.assert_allclose(
                mine, theirs, rtol=1e-6 if wire == "int8" else 0, atol=1e-6 if wire == "int8" else 0
            )

    for n in (1, 2, 4):
        run_ranks(n, check)


def test_a_number_that_is_not_finite_arrives_as_such():
    def check(transport):
        for wire in ("fp16", "bf16", "int8"):
            array = np.ones(600, np.float32)
            array[300] = np.inf if transport.rank == 0 else 1
            Group(transport, arithmetic=simulated()).bind_lossy(array, parse_wire(wire)).run()
            assert not np.isfinite(array[300]) and array[0] == transport.size

    run_ranks(2, check)
