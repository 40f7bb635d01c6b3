"""Replicated in a PyTorch loop over MPI: equal to DDP over gloo, and to one process."""

import pytest

from tests.processes import mpitrain

PROGRAM = """
import copy, sys
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
from mpitrain import Replicated, from_communicator

transport = from_communicator(MPI.COMM_WORLD)
rank, size = transport.rank, transport.size
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
torch.manual_seed(rank)
ours = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.GELU(), torch.nn.Linear(40, 3))
theirs = DistributedDataParallel(copy.deepcopy(ours))
replicated = Replicated(transport, ours.parameters(), bucket_mb=1e-3)
for i, p in enumerate(ours.parameters()):
    p.register_post_accumulate_grad_hook(lambda p, i=i: replicated.ready(i, p.grad))
alone = copy.deepcopy(ours)
for p in alone.parameters():
    p._post_accumulate_grad_hooks = None
generator = torch.Generator().manual_seed(0)
optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs, alone)]
for step in range(10):
    x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
    rows = slice(rank * 12 // size, (rank + 1) * 12 // size)
    for model, optimizer, mine in zip((ours, theirs, alone), optimizers, (rows, rows, slice(None))):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        if model is ours:
            replicated.wait()
        optimizer.step()
apart = [
    max((p - q).abs().max().item() for p, q in zip(ours.parameters(), other.parameters()))
    for other in (theirs, alone)
]
print("apart", *apart, flush=True)
dist.destroy_process_group()
transport.close()
"""


@pytest.mark.parametrize("ranks", (2,))
def test_ten_steps_in_pytorch_equal_ddp_over_gloo_and_one_process(ranks, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "own.py").write_text(PROGRAM)
    done = mpitrain(
        "launch", "-n", ranks, "--", "python", "own.py", tmp_path / "store", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("apart")]
    assert len(lines) == ranks
    for _, ddp, alone in lines:
        assert float(ddp) < 1e-6 and float(alone) < 1e-6
