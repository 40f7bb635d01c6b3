"""Backend "mpitrain" of PyTorch: tests of PyTorch itself, trainings and drawn programs as over gloo. One start for all."""

from pathlib import Path

import pytest

from tests.processes import WRITES, python_ranks, rows_of_ranks

for package in ("torch", "expecttest"):
    pytest.importorskip(package, reason=f"PyTorch's own tests need {package}")

JOBS = Path(__file__).parents[2] / "jobs/prove"
RANKS = 3
NAMES = """
    DistributedDataParallelCPU_grad_is_view accumulate_gradients_no_sync_allreduce_with_then_hook
    all_gather_coalesced_with_empty all_gather_complex all_gather_group all_gather_object_subgroup
    all_reduce_coalesced_full_group_max all_reduce_complex_unsupported_ops all_reduce_full_group_product
    all_reduce_group_min all_reduce_sum_async all_reduce_sum_complex all_to_all_group
    all_to_all_single_unequal_split_full_group barrier_timeout_full_group batch_isend_irecv_gloo_tags
    broadcast_group ddp_create_graph destroy_group gather_checks gather_group get_future isend_torch_profiler
    irecv reduce_group_max reduce_sum_twice scatter_complex scatter_group scatter_object_list
    send_recv_any_source send_recv_with_tag sparse_all_reduce_sum static_graph_api_cpu
"""
"""Of PyTorch's tests, without "test_": some for each collective."""
OF_PYTORCH = NAMES.split()
TRAININGS = ["ddp", "fsdp2", "tensor_parallel", "pipeline", "zero"]
DRAWN = 12
CALLBACKS = """
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

def trained(group, hook=None):
    "Parameters after ten steps; six buckets, whose callbacks make calls while later buckets are reduced."
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(24, 24, dtype=torch.float64) for _ in range(6)])
    run = DistributedDataParallel(model, bucket_cap_mb=0.005, process_group=group)
    if hook:
        run.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(10, 8, 24, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    for batch in rows:
        optimizer.zero_grad()
        run(batch).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

def chained(group, other, n):
    "Sums whose callbacks make calls of two groups, some of them in callbacks of their own; the next calls do not wait."
    def started(value, of=group):
        return dist.all_reduce(torch.tensor([float(value)]), group=of, async_op=True)

    def value(future):
        return future.value()[0].item()

    def deeper(future):
        return started(value(future), other).get_future().then(
            lambda future: started(value(future)).get_future().wait()[0].item()).wait()

    def callback(future):
        tensor = torch.tensor([value(future)])
        dist.all_reduce(tensor, group=group)
        found = started(tensor.item()).get_future().then(deeper).wait()
        dist.barrier(group=group)
        started(1)
        return found

    futures = []
    for number in range(6):
        futures.append(started(number).get_future().then(callback).then(lambda future: future.value() + 1))
        if number % 2:
            dist.all_reduce(torch.ones(3 + number), group=group)
    both = torch.futures.collect_all([started(1).get_future(), started(2).get_future()]).then(
        lambda future: started(len(future.value())).get_future().wait()[0].item())
    return [future.wait() for future in futures] == [number * n**5 + 1 for number in range(6)] and both.wait() == 2 * n

dist.init_process_group("mpitrain")
for n in range(1, world.size + 1):
    group, other = dist.new_group([*range(n)]), dist.new_group([*range(n)])
    if world.rank < n:
        exact = PowerSGDState(group, matrix_approximation_rank=24, min_compression_rate=0.01, start_powerSGD_iter=2)
        apart = (trained(group, (exact, powerSGD_hook)) - trained(group)).abs().max().item()
        says(world.rank, f"callbacks {n}", [apart, chained(group, other, n)])

def bind_at_once(*groups):
    "Whether the sums of two groups are right, each in a thread of its own; both bind new memory at the same time."
    import threading
    together, rights = threading.Barrier(len(groups)), []

    def sums(group, sign):
        for bits in range(6, 18):
            own = sign * (torch.arange(1 << bits) + 1000 * dist.get_rank())
            together.wait()
            dist.all_reduce(own, group=group)
            rights.append(torch.equal(own, sign * (3 * torch.arange(1 << bits) + 3000)))

    threads = [threading.Thread(target=sums, args=each) for each in zip(groups, (1, -1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rights

says(world.rank, "at once", bind_at_once(dist.new_group(), dist.new_group()))

def passed_tensors(me, n):
    "A parameter, complex numbers and an output with strides, as gloo takes them."
    weight = nn.Parameter(torch.full((3,), float(me)))
    dist.all_reduce(weight)
    part = torch.empty(2, dtype=torch.complex64)
    dist.reduce_scatter_single(part, (torch.arange(2 * n) - 1j * me).conj())
    rows = torch.empty(2, n).t()
    dist.all_reduce(torch.empty(1, 0).expand(3, 0))  # no element is written twice
    dist.all_gather_single(rows, torch.full((1, 2), float(me)))
    row = torch.empty(1, 4 * n)[:, ::2]
    dist.all_gather_single(row, torch.full((1, 2), float(me)))
    root = torch.ones(1).expand(4) if me == 1 else torch.empty(4)  # The root writes nothing.
    dist.broadcast(root, 1)
    return [weight.tolist(), torch.view_as_real(part).tolist(), rows.tolist(), row.tolist(), root.tolist()]

def refused_tensors(n):
    "How many calls are refused before a message is sent; the group stays usable."
    from mpitrain.errors import ConfigError
    one, count = torch.ones(1), 0
    for call in (
        lambda: dist.all_gather_single(torch.empty(n + 1), one),
        lambda: dist.reduce_scatter_single(one, torch.ones(n + 1)),
        lambda: dist.all_gather([torch.ones(2)] * n, one),
        lambda: dist.all_reduce(one.expand(4)),
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
    ):
        try:
            call()
        except ConfigError:
            count += 1
    dist.barrier()
    return count

def seconds_of_crossed_ends(me):
    import time
    groups = dist.new_group(), dist.new_group()
    began = time.monotonic()
    for group in groups if me % 2 else groups[::-1]:
        dist.destroy_process_group(group)
    return time.monotonic() - began

me = world.rank
found = passed_tensors(me, world.size), refused_tensors(world.size), seconds_of_crossed_ends(me)
says(me, "corners", found)
dist.destroy_process_group()
"""
"""A future's callbacks that make calls and wait for them, on 1, 2 and 3 ranks. PowerSGD of full rank averages exactly."""
PROGRAM = f"""
import importlib.util, json, os, warnings
from pathlib import Path
import torch
from mpi4py import MPI
import mpitrain.torch

def job(name):
    spec = importlib.util.spec_from_file_location(name, Path({str(JOBS)!r}) / f"torch-{{name}}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

world = MPI.COMM_WORLD
os.environ |= {{"WORLD_SIZE": str(world.size), "MASTER_ADDR": "localhost"}}
torch.set_num_threads(1)
warnings.simplefilter("ignore", FutureWarning)
suite, equal = job("suite"), job("equal")
tests = suite.suite("mpitrain")
for name in {OF_PYTORCH!r}:
    folder = Path(name).resolve()
    folder.mkdir(exist_ok=True)
    world.Barrier()
    says(world.rank, name, suite.run(*tests, f"test_{{name}}", folder, world)[0])
work = {{name: equal.TRAININGS[name] for name in {TRAININGS!r}}} | equal.drawn({DRAWN})
for found in equal.compare(work, str(Path("store").resolve()), world.rank, world.size).items():
    says(world.rank, *found)
import torch.distributed as dist
{CALLBACKS}"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{test, training or program: what each rank has found}."""
    folder = tmp_path_factory.mktemp("torch")
    done = python_ranks(RANKS, WRITES + PROGRAM, folder)
    lines = rows_of_ranks(folder)
    assert done.returncode == 0, f"{lines[-RANKS:]} {done.stderr[-4000:]}"
    return {name: [value for _, n, value in lines if n == name] for _, name, _ in lines}


def test_pytorchs_own_tests_pass(found):
    assert {name: found[name] for name in OF_PYTORCH} == {
        name: ["passed"] * RANKS for name in OF_PYTORCH
    }


def test_twenty_steps_of_a_training_equal_those_over_gloo(found):
    for name in TRAININGS:
        assert len(found[name]) == RANKS and max(found[name]) <= 1e-6, name


def test_callbacks_of_futures_make_calls_and_wait_for_them(found):
    for ranks in range(1, RANKS + 1):
        assert len(found[f"callbacks {ranks}"]) == ranks, ranks
        for apart, is_right in found[f"callbacks {ranks}"]:
            assert apart <= 1e-12 and is_right, (ranks, apart, is_right)


def test_two_groups_bind_in_two_threads_at_once(found):
    assert found["at once"] == [[True] * 24] * RANKS


def test_tensors_of_any_kind_are_taken_or_refused_at_once_and_groups_end_in_any_order(found):
    for me, (taken, refused, seconds) in enumerate(found["corners"]):
        sums = [[3.0 * (2 * me + k), 3.0] for k in range(2)]
        rows = [[float(rank)] * 2 for rank in range(RANKS)]
        assert taken == [[3.0] * 3, sums, rows, [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]], [1.0] * 4]
        assert refused == 5 and seconds < 15  # 30 where both wait for each other


def test_drawn_programs_of_collectives_equal_those_over_gloo(found):
    for number in range(DRAWN):
        apart = found[f"program {number}"]
        assert len(apart) == RANKS and max(apart) <= 1e-6, number
