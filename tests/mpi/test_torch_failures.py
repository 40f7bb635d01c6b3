"""What ranks of backend "mpitrain" say of each other when their calls do not match: one start for all cases."""

import sys
from pathlib import Path

import pytest

from tests.processes import WRITES, python_ranks, rows_of_ranks, run
from tests.processes import mpitrain as start

torch = pytest.importorskip("torch", reason="backend mpitrain needs PyTorch")
import mpitrain.torch  # noqa: E402  it needs PyTorch

PROGRAM = """
import json, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, mpitrain.torch
from mpitrain.transport import failures
from mpitrain.torch import calls, process_group
failures.PATIENCE, process_group.SLOW, calls.GRACE, ones = 0.75, 0.3, 0.5, torch.ones(10)
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

def absent_in_ddp(group, hook=None):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    if hook: model.register_comm_hook(group, hook)
    if rank != 2:
        model(torch.ones(1, 2)).sum().backward()  # The calls are made in C++.

def absent_in_a_hook(group):
    absent_in_ddp(group, mpitrain.torch.hook("int8"))

def more_steps(group):
    for _ in range(2 + (rank == 1)):
        dist.all_reduce(ones, group=group)
    dist.destroy_process_group(group)

def more_messages(group):
    try:
        if rank == 1: dist.recv(ones, 2, group=group)
    finally:
        dist.destroy_process_group(group)

def waiting_callback(group):
    first = dist.all_reduce(ones, group=group, async_op=True).get_future()
    later = []
    def callback(future):  # It stands before the second call, as on all ranks.
        while not later: time.sleep(0.01)
        later[0].wait()
    waited = first.then(callback)
    later.append(dist.all_reduce(torch.ones(10), group=group, async_op=True).get_future())
    waited.wait()

def no_sum(group):
    dist.all_reduce(torch.ones(2, dtype=torch.float8_e5m2), group=group)

def no_bits(group):
    dist.all_reduce(ones, dist.ReduceOp.BXOR, group=group)

def refused_by_one(group):
    for _ in range(2):  # All refuse one alike, which counts for none of them.
        try: dist.all_reduce(ones, dist.ReduceOp.BXOR, group=group)
        except mpitrain.MpitrainError: pass
    dist.barrier(group=group)
    if rank == 1:  # It may correct its call.
        try: dist.all_reduce(torch.ones(1).expand(10), group=group)
        except mpitrain.MpitrainError: pass
    dist.all_reduce(ones, group=group)
    began = time.monotonic()
    try: dist.all_reduce(ones if rank != 1 else torch.ones(1).expand(10), group=group)
    finally: assert time.monotonic() < began + 30

for case, seconds in {
    refused_by_one: 900, other_order: 60, other_bound_call: 60, other_shape: 60, absent: 3, absent_sender: 3, after_a_failure: 3,
    absent_in_ddp: 3, absent_in_a_hook: 3, more_steps: 900, more_messages: 900, waiting_callback: 3, no_sum: 60, no_bits: 60,
}.items():
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    try: case(group)
    except mpitrain.MpitrainError as error: said[case.__name__] = error.law
    except RuntimeError as error: said[case.__name__] = str(error)
    dist.barrier()
    try: dist.destroy_process_group(group)
    except ValueError: pass  # It is destroyed.
says(rank, said)
if rank == 1: sys.exit()
dist.all_reduce(ones)
"""


def test_torchrun_starts_pytorchs_own_backends_and_not_this_one(tmp_path):
    code = "import sys, torch.distributed as dist, mpitrain.torch; dist.init_process_group(sys.argv[1])"
    # One write a rank: torchrun starts Python with -u, under which print writes each of its parts by itself.
    said = r"print(f'{dist.get_rank()} {dist.get_world_size()}\n', end='')"
    (tmp_path / "own.py").write_text(f"{code}; {said}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = run([*torchrun, "own.py", "gloo"], cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"], done
    done = run([*torchrun, "own.py", "mpitrain"], cwd=tmp_path)
    assert done.returncode and "torchrun started 2 processes" in done.stderr and not done.stdout
    assert 'own.py", line 1, in <module>' in done.stderr


def test_a_mismatch_an_absent_rank_and_one_that_ends_are_named(tmp_path):
    done = python_ranks(3, WRITES + PROGRAM, tmp_path)
    assert done.returncode == 1 and "rank 1 has ended" in done.stderr, done.stderr
    said = dict(rows_of_ranks(tmp_path))
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
    for case in ("absent_in_ddp", "absent_in_a_hook"):
        for rank in (0, 1):
            assert f"rank {rank}: a" in said[rank][case], said[rank][case]
            assert "rank 2 has not made it" in said[rank][case]
        assert case not in said[2]
    # The others raise it, too, unless they hear of this error first.
    assert "here, and destroy_process_group on rank" in said[1]["more_steps"]
    assert (
        "recv from rank 2" in said[1]["more_messages"]
        and "is in destroy" in said[1]["more_messages"]
    )
    assert all(
        "waits for a callback of all_reduce" in said[rank]["waiting_callback"] for rank in said
    )
    assert "absent" not in said[2] and "from rank 2" in said[1]["absent_sender"]
    assert all("float8_e5m2" in said[rank]["no_sum"] for rank in said)
    assert all("bxor" in said[rank]["no_bits"] for rank in said)
    assert "sizes [10], strides [0]" in said[1]["refused_by_one"]
    for rank in (0, 2):
        assert "rank 1 has refused it" in said[rank]["refused_by_one"], said[rank]["refused_by_one"]


LATE = """
import time
import torch, torch.distributed as dist, mpitrain.torch
from mpitrain.torch import calls
from mpitrain.torch.store import MpiStore
from mpitrain.transport import failures
failures.PATIENCE, calls.GRACE = 1e6, 60  # One rank may leave long before the other.
dist.init_process_group("mpitrain")
write = MpiStore.set

def late(store, key, value):
    time.sleep(b"same calls" in bytes(value))
    write(store, key, value)

MpiStore.set = late
message = dist.irecv(torch.ones(1), 1 - dist.get_rank(), group=dist.new_group())
message.get_future().then(lambda of: print("left", flush=True))  # The exit ends the wait for it.
try: dist.all_reduce(torch.ones(2 + dist.get_rank()))
except RuntimeError: print("caught", flush=True)
"""


def test_a_rank_that_ends_after_an_error_and_before_a_message_is_not_aborted(tmp_path):
    done = python_ranks(2, LATE, tmp_path)
    said = sorted(done.stdout.splitlines())
    assert (done.returncode, said) == (0, ["caught"] * 2 + ["left"] * 2), done.stderr


def test_the_ddp_loop_of_the_page_goes_on_with_a_spare_in_the_place_of_a_killed_rank(tmp_path):
    """Its loss is that of one rank with all rows: rank 0 prints that of its half of them."""
    page = (
        (Path(mpitrain.torch.__file__).parent / "README.md").read_text().partition("## Spares")[2]
    )
    code = page.partition("```python\n")[2].partition("```")[0]
    kill = "if step == 20 and os.environ['OMPI_COMM_WORLD_RANK'] == '0': os.kill(os.getpid(), 9)"
    backward = "            loss.backward()\n"
    assert code.count(backward) == 1 and "steps, size = 0, 200," in code
    asks = "assert not mpitrain.torch.stop_requested()"  # The agreement is made anew, too.
    code = code.replace(backward, f"            {asks}\n            {kill}\n{backward}").replace(
        "= 0, 200,", "= 0, 40,"
    )
    (tmp_path / "own.py").write_text(f"import os\n{code}")
    words = ["-n", 3, "--spares", 1, "--fault-tolerant", "--", "python", tmp_path / "own.py"]
    done = start("launch", *words)
    if "ULFM" in done.stderr:
        pytest.skip("only Open MPI has ULFM")
    assert done.returncode == 0, done.stderr
    assert "1 of 2 ranks are lost; spares take the place of rank 0, and 0 wait" in done.stderr
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(40):
        rows = torch.rand(24, 8, generator=torch.Generator().manual_seed(step))
        losses = (model(rows) - rows.sum(1, keepdim=True)).square()
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    text = done.stdout.partition("after step 40 the loss is ")[2]
    assert abs(float(text) - losses[:12].mean().item()) < 1e-5
