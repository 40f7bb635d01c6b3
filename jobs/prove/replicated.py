"""A training step of a PyTorch MLP with `mpitrain.torch.Replicated` and with DistributedDataParallel over gloo, in turns.

It prints for each model the medians of a step and of its processor time in ms (of the slowest rank), and how many times as fast
ours is, with the spread over blocks. `~`: other work ran most of the time; processor time shows the difference even then. About a
minute on two free cores; needs PyTorch.
    mpitrain launch -n 2 -- python jobs/prove/replicated.py [BLOCKS] [STEPS]
"""

import copy
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpitrain import ranks
from mpitrain.tools.bench.turns import is_spoilt, ratios, spread, take_turns, verdict
from mpitrain.torch import Replicated

WIDTHS = (240, 800, 1536)  # 0.15, 1.4 and 4.9 million parameters
ROWS = 32


def mlp(width):
    sizes = (64, width, width, width, 64)
    layers = [torch.nn.Linear(*pair) for pair in pairwise(sizes)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))


def steps_of(transport, model, inputs, steps):
    """Return a function of a block: the seconds of a step on the slowest rank, and of its processor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def turn(block):
        transport.barrier()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        spent = time.perf_counter() - began, time.process_time() - busy
        return [
            max(of_ranks) / steps for of_ranks in zip(*transport.gather_text(spent), strict=True)
        ]

    return turn


def main(blocks=9, steps=20):
    torch.set_num_threads(1)
    with ranks() as transport:
        folder = transport.gather_text(tempfile.mkdtemp() if transport.rank == 0 else None)[0]
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=transport.rank,
            world_size=transport.size,
        )
        for width in WIDTHS:
            model = mlp(width)
            sides = Replicated(copy.deepcopy(model), transport), DistributedDataParallel(model)
            inputs = torch.randn(ROWS, 64)
            turns = [steps_of(transport, side, inputs, steps) for side in sides]
            by_side = [
                list(zip(*side, strict=True)) for side in take_turns(turns, blocks, warm_up=1)
            ]
            if transport.rank == 0:
                print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters")
                for what, ours, theirs in zip(("step", "processor"), *by_side, strict=True):
                    faster = ratios(ours, theirs)
                    disturbed = " ~" if is_spoilt(ours) or is_spoilt(theirs) else ""
                    print(
                        f"  {what:9}  Replicated {1e3 * median(ours):7.2f} ms, DDP over gloo {1e3 * median(theirs):7.2f} ms; "
                        f"ratio {median(faster):.2f} ({spread(faster)}) {verdict(faster)}{disturbed}",
                        flush=True,
                    )
        dist.destroy_process_group()


main(*map(int, sys.argv[1:]))
