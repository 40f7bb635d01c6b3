"""A training step of a PyTorch MLP with `mpitrain.torch.Replicated` and with DistributedDataParallel over gloo, in turns.

It prints for each model the median of both in ms (of the slowest rank), how many times as fast ours is, and the spread of this
ratio over blocks. About a minute on two free cores; needs PyTorch.
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
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def turn(block):
        transport.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return max(transport.gather_text(time.perf_counter() - began)) / steps

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
            ours, theirs = take_turns(turns, blocks, warm_up=1)
            faster, count = ratios(ours, theirs), sum(p.numel() for p in model.parameters())
            if transport.rank == 0:
                disturbed = "~" if is_spoilt(ours) or is_spoilt(theirs) else ""
                print(
                    f"{count / 1e6:5.2f} M parameters: Replicated {1e3 * median(ours):6.2f} ms, DDP over gloo "
                    f"{1e3 * median(theirs):6.2f} ms; ratio {median(faster):.2f} ({spread(faster)}) {verdict(faster)}{disturbed}",
                    flush=True,
                )
        dist.destroy_process_group()


main(*map(int, sys.argv[1:]))
