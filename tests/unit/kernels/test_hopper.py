"""Hopper's products: the simulator notices each broken rule, and machine code and values are what they should be."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import Argument, Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.tiles import (
    HOPPER_TILES,
    TENSOR_TILES,
    MeasuredTiles,
    Tiling,
    blocks_over,
    count,
    usual,
)
from mpitrain.ops.device import device_for
from mpitrain.run.count.operations import Unlaunched
from tests.cases.numbers import assert_close, numbers
from tests.unit.kernels.machine_code import faults_of, jobs

ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]
STEPS = 3
SHARED = 1024 + 4 * 64 * 128 + 256 + 32

# In the order of enum Mistake: the errors of the checked build, and those of the fast one, or "wrong" for wrong numbers; several
# where the order of the threads decides. None: only the checked build can see it.
MISTAKES = {
    "none": ("", ""),
    "a tile off 1,024 bytes": ("tile", "tile"),
    "a layout without its swizzle": ("wrong", "wrong"),
    "lanes with other operands": ("tile", "tile"),
    "sums used before the wait": ("wrong", "wrong"),
    "products that are not committed": ("registers|in flight|wrong", "registers|in flight|wrong"),
    "no fence before products": ("registers", "registers"),
    "a stage left too early": ("in flight", "in flight"),
    "a copy not awaited": ("in flight|uninitialised", "in flight|wrong|deadlock|mbarrier"),
    "a barrier for too few": ("mbarrier|in flight", "mbarrier|in flight"),
    "a barrier for too many": ("deadlock", "deadlock"),
    "too few bytes announced": ("deadlock|in flight|mbarrier", "deadlock|in flight|mbarrier"),
    "too many bytes announced": ("deadlock", "deadlock"),
    "a parity that never changes": ("in flight|deadlock", "in flight|deadlock"),
    "no fence behind ordinary stores": ("proxy", None),
    "no barrier behind ordinary stores": ("race|uninitialised", None),
    "barriers used before all know them": ("mbarrier|race|uninitialised", None),
    "registers changed behind the fence": ("registers", "registers"),
}


def planted(number: int, checked: bool, order: tuple[str, int]) -> str:
    """What came of the planted kernel: "", "wrong", or the text of the error."""
    engine = Simulator(checked, *order)
    a, b = (numbers(seed, 64, 64 * STEPS).astype(ml_dtypes.bfloat16) for seed in (1, 2))
    y = np.empty(64 * 64 + 64, np.float32)
    maps = engine.tensor_map(a, 64), engine.tensor_map(b, 64)
    try:
        Kernels(engine, folder=Path(__file__).parent).launch(
            "one_mistake", (1,), (160,), (*maps, STEPS, number, Argument(y, fresh=True)), SHARED
        )
    except KernelError as error:
        return error.law
    left, right = a.astype(np.float64), b.astype(np.float64)
    truth = np.concatenate([(left @ right.T).ravel(), left.sum(1)])
    return "" if np.abs(y - truth).max() <= 1e-4 else "wrong"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_broken_rule_is_noticed_in_any_order(mistake):
    number = list(MISTAKES).index(mistake)
    for checked, expected in zip((True, False), MISTAKES[mistake], strict=True):
        for order in ORDERS if expected is not None else ():
            said = planted(number, checked, order)
            assert said.startswith(tuple(expected.split("|"))) and bool(said) == bool(expected), (
                checked,
                order,
                said,
            )


def test_the_values_are_those_of_mma_sync_within_one_rounding():
    """bfloat16, split sums, and with row sums: a product by warpgroups and one by warps."""
    kernels = Kernels(Simulator())
    a, b = (numbers(seed, 328, 136).astype(ml_dtypes.bfloat16) for seed in (3, 4))
    for splits in (1, 2):
        sides = []
        for tile in (HOPPER_TILES[3], TENSOR_TILES[2]):
            c, sums = np.empty((136, 136), ml_dtypes.bfloat16), np.empty(136, np.float32)
            ways = {"transposed_a": True, "row_sums": sums, "tiling": Tiling(tile, splits)}
            product.gemm(kernels, Arena(), a, b, c, **ways)
            sides.append((c.astype(np.float64), sums))
        (ours, our_sums), (theirs, their_sums) = sides
        step = 2.0 ** (np.frexp(np.abs(theirs) + 1e-3)[1] - 8)  # between neighbours in bfloat16
        assert (np.abs(ours - theirs) <= step).all() and (ours == theirs).mean() > 0.99
        assert np.abs(our_sums - their_sums).max() <= 2e-5


def test_shapes_that_the_copy_engine_refuses_take_mma_sync():
    """Rows that do not begin at 16 bytes, batches, empty sums, float32; and split sums fill all multiprocessors."""
    engine, table = Simulator(), MeasuredTiles(wgmma=True)
    brain, single = np.empty(0, ml_dtypes.bfloat16), np.empty(0, np.float32)

    def kernel(a: np.ndarray, *shape: int, has_boxes: bool = True) -> str:
        return table.tiling(a, "NT", shape, engine, has_boxes).tile.kernel

    assert kernel(brain, 8192, 768, 768, 1) == "gemm_hopper"
    assert kernel(brain, 8192, 768, 768, 1, has_boxes=False) == "gemm_tensor"
    assert kernel(brain, 64, 64, 64, 12) == kernel(brain, 64, 64, 0, 1) == "gemm_tensor"
    assert kernel(single, 8192, 768, 768, 1) == "gemm"
    assert not product.in_boxes(np.empty((4, 12), brain.dtype), np.empty((4, 16), brain.dtype))
    assert product.in_boxes(np.empty((4, 16), brain.dtype)[:, :9], np.empty((4, 16), brain.dtype))
    # 12 tiles of 256 x 192.
    assert usual(HOPPER_TILES[:1], 768, 768, 8192, 1, engine).splits == 11
    for m, n in ((768, 768), (2304, 768), (3072, 768), (768, 3072)):
        tile, splits = table.tiling(brain, "TN", (m, n, 8192, 1), engine)
        blocks = blocks_over(tile, m, n) * splits
        assert blocks / (132 * count(blocks, 132)) >= 0.7, (m, n)


def test_a_product_is_counted_without_a_launch_and_without_a_map():
    kernels = Kernels(Simulator())
    a, b, c = (np.empty(shape, ml_dtypes.bfloat16) for shape in ((64, 40), (72, 40), (64, 72)))
    ways = {"transposed_b": True, "table": MeasuredTiles(wgmma=True)}
    product.gemm(Unlaunched(kernels), Arena(), a, b, c, **ways)
    assert [name for name, _ in kernels.expected] == ["gemm_hopper"] and kernels.launches == 0


def test_a_linear_layer_computes_by_warpgroups():
    """All three products, with a bias, a residual and the gradient of the bias; the kernels that ran are named."""
    device = device_for("cuda-sim", compute="bfloat16", tensor_cores="wgmma")
    x, w, b, residual, dy = (
        numbers(seed, *shape).astype(ml_dtypes.bfloat16)
        for seed, shape in enumerate([(136, 64), (72, 64), (72,), (136, 72), (136, 72)])
    )
    ops, arena, ran = device.ops, Arena(), []
    launch = device.kernels._first
    device.kernels._first = lambda name, *rest: ran.append(name) or launch(name, *rest)
    try:
        y, saved = ops.linear(x, w, b, arena, residual=residual)
        dx, pending = ops.linear_backward_input(dy, w, saved, arena)
        dw, db = np.empty((72, 64), np.float32), np.empty(72, np.float32)
        ops.linear_backward_weight(pending, dw, False, arena, db)
    finally:
        del device.kernels._first
    wide = [each.astype(np.float64) for each in (x, w, b, residual, dy)]
    assert_close(y, wide[0] @ wide[1].T + wide[2] + wide[3], "bfloat16", "y")
    assert_close(dx, wide[4] @ wide[1], "bfloat16", "dx")
    assert_close(dw, wide[4].T @ wide[0], "float32", "dw")
    assert_close(db, wide[4].sum(0), "float32", "db")
    assert ran == ["gemm_hopper"] * 3


@pytest.mark.parametrize(
    "name",
    [
        "newest gemm_hopper 256x192x64x3x1 NT __nv_bfloat16 bias, GELU, saved",
        "newest gemm_hopper 256x192x64x3x1 TN __nv_bfloat16 row sums, split",
        "oldest gemm_hopper 256x192x64x3x2 NN __nv_bfloat16 bias, residual",
        "newest attention_hopper 64 __nv_bfloat16 causal",
        "oldest attention_hopper 128 __nv_bfloat16 whole documents",
        "newest attention_hopper_backward 64 __nv_bfloat16 whole documents",
    ],
)
def test_the_machine_code_is_that_of_warpgroups(name):
    """`python -m tests.unit.kernels.machine_code` compiles all of them."""
    assert [faults_of(job)[0] for job in jobs() if job.name == name] == [[]]
