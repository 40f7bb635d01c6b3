"""A PyTorch program with a checkpoint of its own, which passes time limits and lost hosts.

mpitrain slurm --nodes 2 --ranks-per-node 2 --time 8:00:00 --submit -- python jobs/slurm/own_program.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpitrain.torch

STEPS, CHECKPOINT = 20_000, "own_program.pt"
dist.init_process_group("mpitrain")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
first = 0
if os.path.exists(CHECKPOINT):
    model_state, optimizer_state, first = torch.load(CHECKPOINT)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
parallel = DistributedDataParallel(model)
for step in range(first, STEPS):
    points = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * ranks + rank))
    optimizer.zero_grad()
    (parallel(points).flatten() - points.sum(1)).square().mean().backward()
    optimizer.step()
    must_stop = mpitrain.torch.stop_requested()  # the same on all ranks
    if rank == 0 and (must_stop or (step + 1) % 100 == 0 or step + 1 == STEPS):
        state = model.state_dict(), optimizer.state_dict(), step + 1
        torch.save(state, f"{CHECKPOINT}.partial")
        os.replace(f"{CHECKPOINT}.partial", CHECKPOINT)  # complete or absent
    if must_stop:
        sys.exit(85)  # `mpitrain slurm` queues the job again
print(f"rank {rank}: {STEPS} steps, {first} of them before this start")
