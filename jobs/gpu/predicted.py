"""A training step of GPT-2 124M on paper, so that each measured row has a figure beside it.

python3 jobs/gpu/predicted.py DEVICE    a row for each part of the step: milliseconds on an H100, and on an H200

Products take the cycles of the cost model that also chooses their tiles. Attention takes the rate that an H100 had in the run of
2026-11-28, in 3xTF32 the one that `split_rate` derives from it, and by warpgroups the one that `by_warpgroups` derives from their
instructions. All other kernels take their bytes at the share of the memory's rate that they had there.
"""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from table import emit
from workload import HOPPER_WAYS, VOCABULARY, WAYS, stored, table

from mpitrain.kernels.loader import H100
from mpitrain.ops.cuda.attention import HOPPER_LOOPS
from mpitrain.ops.cuda.tiles import DEFAULT, HopperTile, MeasuredTiles, Tiling, cost

LAYERS, WIDTH, TOKENS, CONTEXT = 12, 768, 8192, 1024
PARAMETERS = 124_439_808


class Gpu(NamedTuple):
    """A GPU on paper: cycles and bytes a second."""

    name: str
    clock: float
    memory: float
    multiprocessors: int = 132


GPUS = (Gpu("H100", 1.755e9, 3.35e12), Gpu("H200", 1.755e9, 4.8e12))
FLOAT32 = 22.4e12, 18.1e12
BFLOAT16 = 182e12, 139e12


def split_rate(rate: float, products: float) -> float:
    """Operations a second of attention by 3xTF32, from those of bfloat16 in the same kernel.

    A scheduler of 528 had so many cycles for each product of tensor cores of bfloat16, which takes 6.5. In float32 there are six:
    three products, each half as deep. Each has 6.9 other instructions to issue (tests/unit/kernels/test_nvrtc.py), which takes
    longer than the product itself. The rest of a step stays.

    products  of 16 x 8 x 16 in tensor cores, relative to the operations that count
    """
    cycles = 1.755e9 * 528 * 4096 / (rate * products)
    return rate * cycles / (cycles - 6.5 + 6 * 6.9)


DIAGONAL = 1.125
"""Tiles of 128 queries, also those that a causal mask cuts, of the half of 1024 x 1024 scores that counts."""
SPLIT = split_rate(BFLOAT16[0], DIAGONAL), split_rate(BFLOAT16[1], 7 / 5 * DIAGONAL)


def by_warpgroups(kernel: str, products: int) -> float:
    """Operations a second of attention by warpgroups, from the instructions of its main loop.

    The loop is for 128 queries, 128 keys and 64 channels. Tensor cores make 4,096 operations a cycle. A scheduler has two warps,
    and issues an instruction of one of them a cycle; 16 exponentials take a cycle of a multiprocessor. The products come after
    all else, as if the two never overlapped; nobody waits for memory or for a barrier.

    products  5 in the backward, 2 forward
    """
    operations = products * 2 * 128 * 128 * 64
    issued = 2 * HOPPER_LOOPS[kernel, 64][1]
    cycles = operations / 4096 + max(issued, 128 * 128 / 16)
    return operations * 132 * 1.755e9 / cycles / DIAGONAL


WARPGROUPS = by_warpgroups("attention_hopper", 2), by_warpgroups("attention_hopper_backward", 5)
ATTENTION = {"float32": FLOAT32, "3xtf32": SPLIT} | dict.fromkeys(HOPPER_WAYS, BFLOAT16)
ATTENTION["wgmma"] = WARPGROUPS
"""Operations a second of attention, forward and backward, as in the README's table of measured figures."""
SHARE = {"norms": 0.81, "loss": 0.66, "updates": 0.82, "others": 0.85}
"""Of the memory's rate, likewise; a copy has 0.85."""


LIBRARY = 0.59e15
"""Operations a second of cuBLAS in bfloat16, of products with 768 columns or more and no odd dim, on an H200."""


def products() -> Iterator[tuple[str, tuple[int, int, int]]]:
    """(how operands are stored, shape) of every product of a step."""
    wide = [3 * WIDTH, WIDTH, 4 * WIDTH, WIDTH], [WIDTH, WIDTH, WIDTH, 4 * WIDTH]
    layers = list(zip(*wide, strict=True)) * LAYERS + [(VOCABULARY, WIDTH)]
    for outputs, inputs in layers:
        yield "NT", (TOKENS, outputs, inputs)
        yield "NN", (TOKENS, inputs, outputs)
        yield "TN", (outputs, inputs, TOKENS)


def by_library(form: str, shape: tuple[int, int, int]) -> bool:
    """Whether device.gemm=auto takes the library: not forward, where a bias is added, nor where GELU's gradient is."""
    goes_with_gelu = form == "NN" and shape[1] == 4 * WIDTH
    return form != "NT" and not goes_with_gelu and not any(dim % 8 for dim in shape)


def tiled(
    gpu: Gpu, form: str, shape: tuple[int, int, int], dtype: str, table: MeasuredTiles = DEFAULT
) -> tuple[Tiling, float]:
    """The tiling of a product, and its seconds."""
    engine: Any = SimpleNamespace(
        capability=90, has_wgmma=True, multiprocessors=gpu.multiprocessors, multiprocessor=H100
    )
    chosen = table.tiling(np.empty(0, dtype), form, (*shape, 1), engine)
    return chosen, cost(chosen, *shape, 1, engine) / gpu.clock


def tilings(gpu: Gpu, way: str) -> Iterator[tuple[str, str, float]]:
    for form, shape in products():
        if way == "auto" and by_library(form, shape):
            m, n, k = shape
            summed = 2 * k * m / (SHARE["others"] * gpu.memory) if form == "TN" else 0.0
            yield "the library's", f"{form} {m} x {n} x {k}", 2 * m * n * k / LIBRARY + summed
            continue
        (tile, splits), seconds = tiled(gpu, form, shape, stored(way), table(way))
        pairs = ", in pairs" * (isinstance(tile, HopperTile) and tile.CLUSTER == 2)
        yield (
            f"{tile.TILE_M} x {tile.TILE_N} x {tile.TILE_K}{pairs}",
            f"{form} {' x '.join(map(str, shape))}, splits {splits}",
            seconds,
        )


def step(gpu: Gpu, compute: str) -> dict[str, float]:
    size = np.dtype(stored(compute)).itemsize
    pairs = 2.0 * LAYERS * TOKENS * CONTEXT * WIDTH
    forward, backward = ATTENTION[compute]
    rows, logits = (2 * LAYERS + 1) * TOKENS * WIDTH, TOKENS * VOCABULARY
    others = (4 * LAYERS + 6) * TOKENS * WIDTH * size
    return {
        "products": sum(seconds for *_, seconds in tilings(gpu, compute)),
        "attention": pairs / forward + 2.5 * pairs / backward,
        "norms": 6 * rows * size / (SHARE["norms"] * gpu.memory),
        "loss": 2 * logits * size / (SHARE["loss"] * gpu.memory),
        "updates": PARAMETERS * (28 + 2 * (size == 2) + 4) / (SHARE["updates"] * gpu.memory),
        "others": others / (SHARE["others"] * gpu.memory),
    }


def total(gpu: Gpu, compute: str) -> float:
    return sum(step(gpu, compute).values())


def main() -> None:
    for compute in (*WAYS, "wgmma", "auto"):
        sides = [step(gpu, compute) for gpu in GPUS]
        for part in sides[0]:
            emit(
                f"predicted on paper, {compute}: {part}, {GPUS[0].name} and {GPUS[1].name}",
                *(f"{1e3 * side[part]:,.2f} ms" for side in sides),
            )
        emit(
            f"predicted on paper, {compute}: the step, {GPUS[0].name} and {GPUS[1].name}",
            *(f"{1e3 * sum(side.values()):,.2f} ms" for side in sides),
        )
    for way in ("bfloat16", "wgmma", "auto"):
        for tile in dict.fromkeys(tile for tile, *_ in tilings(GPUS[0], way)):
            found = [
                [(name, seconds) for other, name, seconds in tilings(gpu, way) if other == tile]
                for gpu in GPUS
            ]
            emit(
                f"predicted on paper, {way}: {len(found[0])} products in tiles of {tile}",
                *(f"{1e3 * sum(seconds for _, seconds in side):,.2f} ms" for side in found),
                products=dict(Counter(name for name, _ in found[0])),
            )


if __name__ == "__main__":
    main()
