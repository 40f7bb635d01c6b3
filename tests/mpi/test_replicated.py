"""Replicated in PyTorch loops over MPI: equal to DDP over gloo, and to one process."""

import pytest

from tests.processes import mpitrain

PROGRAM = """
import copy, sys
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
import mpitrain
from mpitrain.torch import Replicated

torch.set_num_threads(1)
world = mpitrain.from_communicator(MPI.COMM_WORLD)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=world.rank, world_size=world.size)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 10, bias=False)
        self.norm = torch.nn.BatchNorm1d(10)
        self.frozen = torch.nn.Linear(10, 10).requires_grad_(False)
        self.sometimes, self.never = torch.nn.Linear(10, 10), torch.nn.Linear(7, 3)
        self.last = torch.nn.Linear(10, 3)

    def forward(self, x, uses_all):
        x = torch.nn.functional.gelu(self.norm(self.first(x)))
        return {"y": [self.last(self.sometimes(x) if uses_all else self.frozen(x))]}


def batches(rows, steps):
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
        yield step, x[rows], y[rows]


def loss(y, target):
    return torch.nn.functional.mse_loss(y, target)


def apart(one, other):
    pairs = zip(one, other, strict=True)
    return max((p.double() - q.double()).abs().max().item() for p, q in pairs) / 1e-6


def by_hand(transport, group, rows):
    # hooks of one's own; also one process with all rows
    ours = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.GELU(), torch.nn.Linear(40, 3))
    theirs = DistributedDataParallel(copy.deepcopy(ours), process_group=group)
    replicated = mpitrain.Replicated(transport, ours.parameters(), bucket_mb=1e-3)
    for i, p in enumerate(ours.parameters()):
        p.register_post_accumulate_grad_hook(lambda p, i=i: replicated.ready(i, p.grad))
    alone = copy.deepcopy(ours)
    for p in alone.parameters():
        p._post_accumulate_grad_hooks = None
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs, alone)]
    for model, optimizer, own in zip((ours, theirs, alone), optimizers, (rows, rows, slice(None))):
        for step, x, y in batches(own, 10):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            if model is ours:
                replicated.wait()
            optimizer.step()
    yield apart(ours.parameters(), theirs.parameters())
    yield apart(ours.parameters(), alone.parameters())


def frozen_unused_no_sync_buffers(transport, group, rows):
    model = Model()
    theirs = DistributedDataParallel(copy.deepcopy(model), process_group=group, find_unused_parameters=True)
    ours = Replicated(model, transport, bucket_mb=1e-3)
    for replicated in (ours, theirs):
        optimizer = torch.optim.SGD(replicated.parameters(), lr=0.1, momentum=0.9)
        for step, x, y in batches(rows, 12):
            # From step 4 on some rank does without `sometimes`, in steps 0 and 8 all do.
            uses_all = step % 4 != 0 and (step < 4 or transport.rank != step % transport.size)
            if step % 3 == 2:
                with replicated.no_sync():
                    loss(replicated(x[:2], True)["y"][0], y[:2]).backward()
            loss(replicated(x, uses_all)["y"][0], y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with torch.no_grad():
                replicated(x, True)  # moves the statistics
    assert list(ours.state_dict()) == list(theirs.module.state_dict())
    assert [p.grad is None for p in ours.parameters()] == [p.grad is None for p in theirs.parameters()]
    yield apart(ours.state_dict().values(), theirs.module.state_dict().values())


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        dtypes = [getattr(torch, name) for name in DIGITS]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 3, False, dtype=dtype) for dtype in dtypes)

    def forward(self, x):
        return sum(layer(x.to(layer.weight)).double() for layer in self.layers)


def all_dtypes(transport, group, rows):
    # The truth is the mean in float64 of the gradients of all ranks.
    alone = Mixed()
    ours = Replicated(copy.deepcopy(alone), transport, bucket_mb=1e-4)
    alone.load_state_dict(ours.state_dict())
    ((_, x, y),) = batches(rows, 1)
    for model in (ours, alone):
        loss(model(x), y.double()).backward()
    for (name, digits), p, q in zip(DIGITS.items(), ours.parameters(), alone.parameters(), strict=True):
        gradients, averages = [[torch.empty_like(q.grad) for _ in range(transport.size)] for _ in range(2)]
        dist.all_gather(gradients, q.grad, group=group)
        dist.all_gather(averages, p.grad, group=group)
        assert p.grad.dtype == q.dtype and all(torch.equal(p.grad, other) for other in averages)
        gradients = torch.stack(gradients).double()
        sums = 2.0 ** -(22 if digits < 53 else 51) * gradients.abs().mean(0)  # of the sums in float32
        allowed = 2.0**-digits * gradients.mean(0).abs() + sums + 2.0**-25 * (digits == 11)
        yield ((p.grad.double() - gradients.mean(0)).abs() / allowed).max().item()


DIGITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
PARTS = [dist.new_group(ranks) for ranks in ((0, 1, 2), (0, 1), (2,))]
for law in (by_hand, frozen_unused_no_sync_buffers, all_dtypes):
    for group in PARTS:
        ranks = dist.get_process_group_ranks(group)
        transport = world.split(0 if world.rank in ranks else None)
        if transport is not None:
            torch.manual_seed(world.rank)
            rank, size = transport.rank, transport.size
            rows = slice(rank * 12 // size, (rank + 1) * 12 // size)
            print(law.__name__, size, *law(transport, group, rows), flush=True)
            transport.close()
dist.destroy_process_group()
"""


def test_loops_in_pytorch_equal_ddp_over_gloo_and_the_mean_in_float64(tmp_path):
    """One start: 3 ranks, then 2 of them, and the other alone. Differences are in units of the tolerance."""
    pytest.importorskip("torch")
    (tmp_path / "own.py").write_text(PROGRAM)
    done = mpitrain("launch", "-n", 3, "--", "python", "own.py", tmp_path / "store", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert sorted((law, int(size)) for law, size, *_ in lines) == sorted(
        (law, size)
        for law in ("by_hand", "frozen_unused_no_sync_buffers", "all_dtypes")
        for size in (1, 2, 2, 3, 3, 3)
    )
    for law, size, *apart in lines:
        assert all(float(one) < 1 for one in apart), (law, size, apart)
