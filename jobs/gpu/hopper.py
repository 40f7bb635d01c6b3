"""Parts of the GPU job for Hopper: products by warpgroups, from the first tile to a training step.

python3 jobs/gpu/hopper.py DEVICE first       one tile with ones, then the cases of the tests, the simplest first
python3 jobs/gpu/hopper.py DEVICE products    products of GPT-2 124M, in turns with mma.sync and the library
python3 jobs/gpu/hopper.py DEVICE attention   bfloat16 attention by warpgroups and by mma.sync, in turns with PyTorch's
python3 jobs/gpu/hopper.py DEVICE training    a step of GPT-2 124M in turns: ours by mma.sync, by wgmma, by the library and by
                                              auto; PyTorch eager and, on a GPU, torch.compile

A row says which of ours is the fastest on this device.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
from predicted import GPUS, tiled, total
from table import emit, micro, wrong_words
from training import APART, LOSSES, WARM_UP, Events, Rival, furthest, measured, milli, our_events
from workload import BLOCKS, HOPPER_WAYS, PRODUCTS, STEPS, config, multiply_ones, source, table

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.tiles import HOPPER_TILES, Tiling
from mpitrain.ops.device import device_for
from mpitrain.run.build import build
from mpitrain.tools.bench.kernels.gemm import PRODUCTS as FORMS
from mpitrain.tools.bench.kernels.gemm import case_of
from mpitrain.tools.bench.kernels.operations import attentions, seconds
from mpitrain.tools.bench.kernels.operations import measured as measured_operations
from mpitrain.transport.threads import run_ranks
from tests.cases.hopper import by_warpgroups
from tests.cases.layers import check_attention
from tests.cases.products import hopper

BY = {"bfloat16": "mma.sync", "wgmma": "wgmma", "library": "cuBLAS", "auto": "mma.sync and cuBLAS"}
"""By what each way multiplies; on cuda-sim the library is NumPy, and auto takes mma.sync alone."""
PATIENCE = 40
"""Seconds for a process that makes the products of GUARDED, which the part `compiled` has compiled."""
OF_THE_LIBRARY = 0.75
"""What a product shall reach of cuBLAS, which has some 790 TFLOP/s on an H200: 600."""


def kernels_for(kind: str) -> Kernels:
    """The kernels of a device that take arrays of the host, as those of the tests do."""
    if kind == "cuda":
        import cupy

        from tests.gpu.test_kernels import Visiting

        return Kernels(Visiting(cupy))
    kernels = device_for(kind).kernels
    assert kernels is not None
    return kernels


def first(kind: str) -> None:
    """With ones, each sum is the depth: a wrong place shows before wrong values do."""
    kernels, tile = kernels_for(kind), HOPPER_TILES[0]
    if not kernels.engine.has_wgmma:
        emit(f"{kernels.engine.name} has no wgmma: nothing to show")
        return
    for depth in (16, 64, 192, 640):
        a, b = (np.ones((rows, depth), ml_dtypes.bfloat16) for rows in (tile.TILE_M, tile.TILE_N))
        c, sums = np.empty((tile.TILE_M, tile.TILE_N), "float32"), np.empty(tile.TILE_M, "float32")
        ways: dict[str, Any] = {"transposed_b": True, "tiling": Tiling(tile, 1)}
        product.gemm(kernels, Arena(), a, b, c, row_sums=sums, **ways)
        wrong = sum(int((x != depth).sum()) for x in (c, sums))
        emit(f"one tile of ones, {depth} deep{wrong_words(wrong)}", ok=wrong == 0)
    for case in hopper():
        given = {**case.keywords, "tile": "x".join(map(str, case.keywords["tile"]))}
        words = ", ".join(f"{name} {value}" for name, value in given.items() if value is not True)
        words += "".join(f", {name}" for name, value in given.items() if value is True)
        try:
            case(kernels)
            emit(words)
        except Exception as error:  # the other cases say where it begins
            emit(f"{words}: {type(error).__name__} {str(error)[:100]}", ok=False)


def works(kind: str, what: str) -> bool:
    """Whether products, or attention, by warpgroups end, and are right: in another process, as a wrong wait has no end."""
    words = [sys.executable, __file__, kind, f"some {what}"]
    try:
        done = subprocess.run(words, timeout=PATIENCE, stdout=subprocess.DEVNULL, check=False)
        is_right = done.returncode == 0
    except subprocess.TimeoutExpired:
        is_right = False
    if not is_right:
        emit(f"{what} by wgmma: left out, a small one is wrong, or has no end", ok=False)
    return is_right


def some_products(kind: str) -> None:
    if multiply_ones(kernels_for(kind), kind):
        sys.exit(1)


def some_attention(kind: str) -> None:
    by_warpgroups(check_attention, kernels_for(kind), b=1, t=300, h=2, d=64, dtype="bfloat16")


def products(kind: str) -> None:
    """Each of the three has its turns; the first row of a product is the one by warpgroups."""
    device, is_right = device_for(kind), works(kind, "products")
    for shape, names in PRODUCTS[kind] if is_right else ():
        for name in names:
            case = case_of(device, shape, "bfloat16", FORMS[name])
            ways: dict[str, Callable[..., None]] = {
                "wgmma": partial(product.gemm, table=table("wgmma")),
                "bfloat16": partial(product.gemm, table=table("bfloat16")),
                "library": product.library,
            }
            runs = {way: case.by(multiply) for way, multiply in ways.items()}
            runs["wgmma"]()
            device.backend.synchronize()
            wrong, error = case.compared()
            spent = dict(zip(runs, seconds(device, *runs.values()), strict=True))
            m, n, k = shape
            for way in ("wgmma", "bfloat16"):
                tiling, predicted = tiled(GPUS[0], name[:2], shape, "bfloat16", table(way))
                rate = 2e-12 * m * n * k / spent[way]
                checked = f"{wrong_words(wrong)}, error {error:.1e}" if way == "wgmma" else ""
                emit(
                    f"{name} {m}x{n}x{k} by {BY[way]} against {BY['library']}, {rate:,.1f} TFLOP/s, "
                    f"tile {'x'.join(map(str, tiling.tile))}/{tiling.splits}{checked}",
                    micro(spent[way]),
                    micro(spent["library"]),
                    ratio=spent["library"] / spent[way],
                    goal=OF_THE_LIBRARY if way == "wgmma" else None,
                    predicted=micro(predicted),
                    ok=wrong == 0 or way != "wgmma",
                )


def attention(kind: str) -> None:
    """Forward and backward; what mma.sync takes is the figure to beat."""
    peer = None
    if find_spec("torch"):
        from mpitrain.tools.bench.training.torch_peer import TorchAttention as peer
    for way in ("wgmma", "mma") if works(kind, "attention") else ("mma",):
        device = device_for(kind, tensor_cores=way)
        for row in measured_operations(device, attentions(device, peer)):
            if "bfloat16" not in row.name:
                continue
            has_peer = row.peer_us == row.peer_us
            emit(
                f"{row.name} by {BY.get(way, 'mma.sync')} against PyTorch's flash attention{wrong_words(row.wrong)}",
                micro(row.time_us / 1e6),
                micro(row.peer_us / 1e6) if has_peer else "-",
                ratio=row.peer_us / row.time_us if has_peer else None,
                goal=1.0 if has_peer and way == "wgmma" else None,
                ok=row.wrong == 0,
                gflops=row.rate,
            )


def one_step(trainer: Any, rows: list[Any], losses: list[float], index: int) -> None:
    losses.append(trainer.step(index, *rows[index]).loss)


def one_step_of(rival: Rival, rows: list[Any], index: int) -> None:
    rival.step(index, *rows[index])


def training(transport: Any, kind: str) -> None:
    """Ours of each way and PyTorch eager, in turns in the same seconds; then ours and torch.compile, which compiles for long."""
    count = WARM_UP + BLOCKS[kind] * STEPS[kind]
    sides: dict[str, tuple[Events, Callable[[int], Any]]] = {}
    losses: dict[str, list[float]] = {}
    rows: list[Any] = []
    settings = job = None
    is_right = works(kind, "products") and works(kind, "attention")
    ways = [way for way in HOPPER_WAYS if way != "wgmma" or is_right]
    for way in ways:
        settings = config(kind, way)
        job = build(transport, settings, source=source(kind, settings))
        size = settings.batch.size
        if not rows:
            rows += [job.data.batch(0, index, size, range(size)) for index in range(count)]
        losses[way] = []
        step = partial(one_step, job.trainer, rows, losses[way])
        sides[way] = our_events(kind, job.trainer.backend.synchronize), step
    assert settings is not None and job is not None
    peers = ["PyTorch eager", *(["torch.compile"] if kind == "cuda" else [])]
    rivals = {  # all of them begin with the weights that ours begin with
        peer: Rival(kind, settings, job.data.inputs, job.trainer.tensors())
        for peer in (peers if find_spec("torch") else ())
    }
    best = ""
    for peer in rivals or [""]:
        against = dict(sides)
        if peer:
            rival = rivals[peer]
            if peer == "torch.compile":  # the rows before are known by then
                rival.compile()
            losses[peer] = rival.losses
            against[peer] = rival.events(), partial(one_step_of, rival, rows)
        times = dict(zip(against, measured(kind, [*against.values()]), strict=True))
        for way in ways:
            apart = furthest(losses[way][:count], losses[peer or "bfloat16"][:count])
            emit(
                f"training step of a GPT in bfloat16, products by {BY[way]}, "
                f"{f'against {peer}' if peer else 'PyTorch is not installed'}, "
                f"first {LOSSES} losses {apart:.0e} apart",
                milli(times[way].event),
                milli(times[peer].event) if peer else "-",
                ratio=times[peer].event / times[way].event if peer else None,
                goal=1.0 if peer and way == "wgmma" else None,
                predicted="-" if way == "library" else milli(total(GPUS[0], way)),
                ok=bool(apart <= APART["bfloat16"]),
                host_ms=1e3 * times[way].host,
            )
        if not best:
            best = min(ways, key=lambda way: times[way].event)
            emit(
                f"the fastest of ours on this device: products by {BY[best]}",
                milli(times[best].event),
            )


def main(kind: str, part: str) -> None:
    if part == "training":
        run_ranks(1, training, kind)
    else:
        parts = {"first": first, "products": products, "attention": attention}
        parts |= {"some products": some_products, "some attention": some_attention}
        parts[part](kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
