"""A whole PyTorch program over mpitrain and over gloo, in turns, also beside other work on the cores.

It is what many programs are: DistributedDataParallel, workers of a DataLoader, autocast to bfloat16,
and gradients that are accumulated over two micro-batches.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from mpitrain.machine.process import blas_threads
from mpitrain.tools.bench.torch_groups import process_group
from mpitrain.tools.bench.training.torch_gpt import GPT
from mpitrain.tools.bench.turns import is_spoilt, ratios, spread, take_turns, verdict
from mpitrain.tools.text_table import TextColumn, TextTable, marked
from mpitrain.transport.base import Transport

BACKENDS = "mpitrain", "gloo"
VOCABULARY, CONTEXT, ROWS, MICRO_BATCHES = 256, 64, 4, 2
WARM_UP = 1
"""Turns of each side before the first one that counts."""

BUSY = """
import os
os.sched_setaffinity(0, range(os.cpu_count()))
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""
"""A program that keeps a core busy until its parent ends."""


class RandomWindows(Dataset):
    """Windows of tokens, each with its next tokens, which a worker draws by the window's number."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (CONTEXT + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


class ProgramSide:
    """The training program over one backend; its construction and steps are collective."""

    def __init__(self, transport: Transport, backend: str, workers: int):
        torch.manual_seed(0)
        model = GPT(vocab=VOCABULARY, context=CONTEXT, width=128, heads=4, depth=2, tied=False)
        self.model = DistributedDataParallel(
            model, process_group=process_group(transport, backend), gradient_as_bucket_view=True
        )
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = RandomWindows()
        sampler: Any = DistributedSampler(data, transport.size, transport.rank)
        self._batches = iter(DataLoader(data, ROWS, sampler=sampler, num_workers=workers))
        self._transport, self.loss = transport, 0.0

    def step(self) -> None:
        for micro_batch in range(MICRO_BATCHES):
            inputs, targets = next(self._batches)
            is_last = micro_batch == MICRO_BATCHES - 1
            with nullcontext() if is_last else self.model.no_sync():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = self.model(inputs, targets) / MICRO_BATCHES
                loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = loss.item()

    def turn(self, steps: int, block: int) -> float:
        """Return the seconds of a step on the slowest rank."""
        self._transport.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return max(self._transport.gather_text((time.perf_counter() - began) / steps))


class ProgramRow(NamedTuple):
    """A line of the table.

    busy      busy processes on each host beside the program
    ours_s    seconds of a step over mpitrain, median over the turns; theirs_s: over gloo
    ratio     how many times as fast ours is, median over neighbouring turns
    ratios    of all turns
    apart     largest distance of the two losses after the last turn, over the ranks
    """

    busy: int
    ours_s: float
    theirs_s: float
    ratio: float
    ratios: list[float]
    is_spoilt: bool
    apart: float


TABLE = TextTable(
    [
        TextColumn("busy", "4", "busy"),
        TextColumn("mpitrain", "9.1f", lambda row: 1e3 * row.ours_s, unit="ms"),
        TextColumn("gloo", "9.1f", lambda row: 1e3 * row.theirs_s, unit="ms"),
        TextColumn("ratio", "7", lambda row: marked(f"{row.ratio:.2f}", row.is_spoilt)),
        TextColumn("ratios", "<20", lambda row: f"{spread(row.ratios)} {verdict(row.ratios)}"),
        TextColumn("losses apart", "12.1e", "apart"),
    ]
)


def measure(
    transport: Transport, workers: int, busy: int, blocks: int, steps: int
) -> Iterator[ProgramRow]:
    """Measure the program on a host as it is, then beside busy processes. Collective.

    busy  number of these processes on each host
    """
    torch.set_num_threads(blas_threads())
    sides = [ProgramSide(transport, backend, workers) for backend in BACKENDS]
    turns = [partial(side.turn, steps) for side in sides]
    for number in dict.fromkeys((0, busy)):
        with busy_processes(transport, number):
            ours, theirs = take_turns(turns, blocks, WARM_UP)
        apart = max(transport.gather_text(abs(sides[0].loss - sides[1].loss)))
        faster = ratios(ours, theirs)
        yield ProgramRow(
            number,
            median(ours),
            median(theirs),
            median(faster),
            faster,
            is_spoilt(ours) or is_spoilt(theirs),
            apart,
        )
    dist.destroy_process_group()


@contextmanager
def busy_processes(transport: Transport, number: int) -> Iterator[None]:
    """Keep cores of each host busy: its first rank starts that many processes, and ends them."""
    is_first = transport.hosts.index(transport.hosts[transport.rank]) == transport.rank
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number * is_first)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()
