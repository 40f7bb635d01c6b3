"""What ranks of backend "mpitrain" say of each other when their calls do not match: one start for all cases."""

import json

import pytest

from tests.processes import python_ranks

pytest.importorskip("torch", reason="backend mpitrain needs PyTorch")

PROGRAM = """
import json, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, mpitrain.torch
from mpitrain.transport import failures
from mpitrain.torch import process_group
failures.PATIENCE, process_group.SLOW, ones = 0.75, 0.3, torch.ones(10)
for late, call in ((1, lambda: dist.barrier()), (0, lambda: dist.all_reduce(ones)), (None, dist.barrier)):
    if dist.is_initialized(): dist.destroy_process_group()
    dist.init_process_group("mpitrain")  # under the name of the group before
    time.sleep(0.8 * (dist.get_rank() == late))
    call()
rank, said, ones = dist.get_rank(), {}, torch.ones(10)

def other_order(group):
    dist.broadcast(ones, 0, group=group) if rank == 1 else dist.all_reduce(ones, group=group)

def other_bound_call(group):
    for many in (ones, torch.ones(20)):
        dist.all_reduce(many, group=group)
    dist.all_reduce(ones if rank else torch.ones(20), group=group)

def other_shape(group):
    dist.all_gather_single(torch.ones(9 + 3 * (rank > 1)), torch.ones(3 + (rank > 1)), group=group)

def absent(group):
    if rank != 2:
        dist.barrier(group=group)

def absent_sender(group):
    if rank == 1:
        dist.recv(ones, 2, group=group)

def after_a_failure(group):
    try: absent(group)
    except Exception: dist.all_reduce(ones, group=group)

def no_sum(group):
    dist.all_reduce(torch.ones(2, dtype=torch.float8_e5m2), group=group)

def no_bits(group):
    dist.all_reduce(ones, dist.ReduceOp.BXOR, group=group)

for case in (other_order, other_bound_call, other_shape, absent, absent_sender, after_a_failure, no_sum, no_bits):
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    try: case(group)
    except mpitrain.MpitrainError as error: said[case.__name__] = error.law
dist.barrier()
print(json.dumps([rank, said]), flush=True)
if rank == 1: sys.exit()
dist.all_reduce(ones)
"""


def test_a_mismatch_an_absent_rank_and_one_that_ends_are_named(tmp_path):
    done = python_ranks(3, PROGRAM, tmp_path)
    assert done.returncode == 1 and "rank 1 has ended" in done.stderr, done.stderr
    said = dict(map(json.loads, done.stdout.splitlines()))
    assert sorted(said) == [0, 1, 2]
    for case, kinds in {
        "other_order": ("all_reduce", "broadcast", "all_reduce"),
        "other_bound_call": ("float32[20]", "float32[10]", "float32[10]"),
        "other_shape": ("float32[3]", "float32[3]", "float32[4]"),
    }.items():
        for rank, kind in enumerate(kinds):
            differing = next(r for r, other in enumerate(kinds) if other != kind)
            own, other = said[rank][case].split(" here, and ")
            assert kind in own, (case, rank, said[rank][case])
            assert f"{kinds[differing]}" in other, (case, rank, said[rank][case])
    for rank in (0, 1):
        assert (
            "barrier" in said[rank]["absent"] and "rank 2 has not made it" in said[rank]["absent"]
        )
        assert "earlier call" in said[rank]["after_a_failure"]
    assert "absent" not in said[2] and "from rank 2" in said[1]["absent_sender"]
    assert all("float8_e5m2" in said[rank]["no_sum"] for rank in said)
    assert all("bxor" in said[rank]["no_bits"] for rank in said)
