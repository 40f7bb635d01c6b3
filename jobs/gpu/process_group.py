"""Part of the GPU job: PyTorch over the backend mpitrain on ranks that share one GPU, beside NCCL where NCCL allows that.

mpirun -n 2 python3 jobs/gpu/process_group.py DEVICE

An all-reduce of 64 MiB, and a step of DistributedDataParallel of GPT-2 124M in bfloat16. NCCL refuses ranks that share a GPU,
unless its version or MPS allows it: then its column is empty. Without a GPU: CPU tensors, tiny sizes, and gloo.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from table import emit, micro
from torch.nn.parallel import DistributedDataParallel

import mpitrain.torch  # noqa: F401  registers the backend
from mpitrain.tools.bench.training.torch_gpt import GPT
from mpitrain.torch.store import world

RUNS, WARM_UP = 11, 3
NBYTES = {"cuda": 64 << 20, "cuda-sim": 64 << 10}
GB_PER_S, SLOWEST = 80.0, 1.15
"""What the all-reduce must reach, and the most times as long as over NCCL that a step may take."""
SHAPES = {
    "cuda": {"vocab": 50257, "context": 1024, "width": 768, "heads": 12, "depth": 12},
    "cuda-sim": {"vocab": 64, "context": 16, "width": 32, "heads": 2, "depth": 1},
}
ROWS = 4


def timed(device: torch.device, run: Callable[[], object]) -> float:
    """Median seconds over runs, each on its slowest rank."""
    times = []
    for _ in range(WARM_UP + RUNS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        world().barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median([*map(max, zip(*world().gather_text(times), strict=True))][WARM_UP:])


def measured(kind: str, device: torch.device) -> tuple[float, float, float, bool]:
    """Return the seconds of the all-reduce and of the step, the last loss, and whether the sum is right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(NBYTES[kind] // 4, device=device, dtype=torch.float32) % 1009
    array = torch.empty_like(mine)

    def reduce() -> None:
        array.copy_(mine + rank)
        dist.all_reduce(array)

    seconds = timed(device, reduce)
    is_right = torch.equal(array, size * mine + sum(range(size)))
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(**SHAPES[kind], tied=True).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    shape, losses = SHAPES[kind], []
    generator = np.random.default_rng(rank)
    tokens = torch.from_numpy(generator.integers(shape["vocab"], size=(ROWS, shape["context"] + 1)))
    tokens = tokens.to(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    return seconds, timed(device, step), losses[-1].item(), is_right


def main(kind: str) -> None:
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    dist.init_process_group("mpitrain")
    ours = measured(kind, device)
    dist.destroy_process_group()
    peer, theirs, why = "nccl" if kind == "cuda" else "gloo", None, ""
    file = world().gather_text(tempfile.mktemp())[0]
    try:
        ranks: Any = {"rank": world().rank, "world_size": world().size}
        dist.init_process_group(peer, init_method=f"file://{file}", **ranks)
        theirs = measured(kind, device)
        dist.destroy_process_group()
    except RuntimeError as error:
        why = f"; {peer} refuses: {str(error).strip().splitlines()[-1][:60]}"
    if world().rank:
        return
    n = world().size
    bus = 2 * (n - 1) / n * NBYTES[kind] / ours[0] / 1e9
    emit(
        f"PyTorch's all_reduce of {n} ranks on one device, {NBYTES[kind]:,} bytes, {bus:.2f} GB/s{why}",
        micro(ours[0]),
        micro(theirs[0]) if theirs else f"{GB_PER_S:g} GB/s",
        ratio=bus / GB_PER_S,
        required=1.0,
        ok=ours[3],
    )
    emit(
        f"a step of DistributedDataParallel, {n} ranks on one device, bfloat16{why}",
        micro(ours[1]),
        micro(theirs[1]) if theirs else "-",
        ratio=theirs[1] / ours[1] if theirs else None,
        required=1 / SLOWEST if theirs else None,
        ok=ours[2] == ours[2] and (theirs is None or abs(ours[2] - theirs[2]) < 5e-2),
    )


if __name__ == "__main__":
    main(sys.argv[1])
