"""Backend "mpitrain" of PyTorch: tests of PyTorch itself, trainings and drawn programs as over gloo. One start for all."""

import json
from pathlib import Path

import pytest

from tests.processes import python_ranks

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
    print(json.dumps([world.rank, name, suite.run(*tests, f"test_{{name}}", folder, world)[0]]), flush=True)
work = {{name: equal.TRAININGS[name] for name in {TRAININGS!r}}} | equal.drawn({DRAWN})
for found in equal.compare(work, str(Path("store").resolve()), world.rank, world.size).items():
    print(json.dumps([world.rank, *found]), flush=True)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{test, training or program: what each rank has found}."""
    done = python_ranks(RANKS, PROGRAM, tmp_path_factory.mktemp("torch"))
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0, f"{lines[-RANKS:]} {done.stderr[-4000:]}"
    return {name: [value for _, n, value in lines if n == name] for _, name, _ in lines}


def test_pytorchs_own_tests_pass(found):
    assert {name: found[name] for name in OF_PYTORCH} == {
        name: ["passed"] * RANKS for name in OF_PYTORCH
    }


def test_twenty_steps_of_a_training_equal_those_over_gloo(found):
    for name in TRAININGS:
        assert len(found[name]) == RANKS and max(found[name]) <= 1e-6, name


def test_drawn_programs_of_collectives_equal_those_over_gloo(found):
    for number in range(DRAWN):
        apart = found[f"program {number}"]
        assert len(apart) == RANKS and max(apart) <= 1e-6, number
