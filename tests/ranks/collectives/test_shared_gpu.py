"""Ranks of one host that reduce each other's GPU memory: threads play the processes, tests.fakes.cupy the GPU."""

import sys

import numpy as np
import pytest

from mpitrain.collectives.bind import bind, bind_all_gather, bind_reduce_scatter
from mpitrain.collectives.direct import cuda_ipc
from mpitrain.collectives.direct.stream_ordered import StreamOrdered
from mpitrain.collectives.engine.device_arithmetic import by_kernels
from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.group import Group
from mpitrain.errors import CommError, ConfigError
from mpitrain.machine import cuda
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import on_device
from mpitrain.machine.cuda import CudaBackend
from mpitrain.transport.device.messages import DeviceTransport
from mpitrain.transport.device.staging import Staged
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu

COUNTS = (0, 1, 2, 5, 1001)
BEFORE = 3  # elements of an allocation before the array


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    """A machine with CuPy and a GPU that all ranks share; in the end no fault, and nothing is open."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda, "_allocation_start", cupy.allocation_start)
    monkeypatch.setattr(cupy.ipc, "works", lambda: True)
    cuda_ipc._say_once.cache_clear()
    cupy.faults.clear()
    yield
    assert cupy.faults == [] and cupy.ipc.opened == [] and cupy.ipc.events == {}


def on_ranks(n, function, **options):
    """Call function(transport, backend) on n ranks whose messages are staged."""

    def run(threads):
        memory = CudaBackend()
        return function(DeviceTransport(threads, memory, Staged(threads, memory)), memory)

    return run_ranks(n, run, **options)


def brought(rank, count, dtype):
    """Different on every rank and place, some negative; whole numbers, so that sums are exact."""
    return ((np.arange(count) * 7 + 31 * rank) % 97 - 40).astype(dtype)


def expected(n, count, dtype, op):
    """What an all-reduce of these must give."""
    everyone = np.stack([brought(rank, count, dtype) for rank in range(n)])
    return everyone.sum(0, dtype) if op == "add" else everyone.max(0)


@pytest.mark.compile
@pytest.mark.parametrize("op", ["add", "maximum"])
def test_every_rank_gets_the_same_bits_by_our_kernels_run_after_run(op):
    kernels = gpu.kernels()

    def check(transport, memory):
        arithmetic = by_kernels(kernels, memory.holds, Arena())
        for dtype in ("float32", "float64", "float16", "int32"):
            for count in COUNTS:
                array = memory.zeros(BEFORE + count, dtype)[
                    BEFORE:
                ]  # pools cut one allocation into many arrays
                reduction, messages = (
                    bind(transport, array, op, "shared", arithmetic=arithmetic),
                    transport.traffic.nbytes,
                )
                assert isinstance(reduction, StreamOrdered)
                for run in (type(reduction).run, started_and_waited, polled):
                    array[...] = memory.from_host(
                        brought(transport.rank, count, dtype)
                    )  # nobody has waited for it
                    before = kernels.launches
                    run(reduction)
                    assert np.array_equal(
                        memory.to_host(array), expected(transport.size, count, dtype, op)
                    ), (dtype, count)
                    if transport.size > 1 and count == 1001 and dtype != "int32":
                        assert kernels.launches > before, "nothing was reduced by a kernel"
                assert transport.traffic.nbytes == messages, "only empty messages travel"

    for n in (1, 2, 3, 5):
        on_ranks(n, check)


def started_and_waited(reduction):
    reduction.start()
    reduction.wait()


def polled(reduction):
    reduction.start()
    while not reduction.poll():
        pass


def test_sums_that_round_are_the_same_bits_on_all_ranks():
    def check(transport, memory):
        array = memory.from_host(
            np.random.default_rng(transport.rank).standard_normal(1001).astype(np.float32)
        )
        bind(transport, array, algorithm="shared").run()
        return memory.to_host(array).tobytes()

    assert len(set(on_ranks(5, check))) == 1


def test_two_shared_halves_equal_the_all_reduce_bitwise():
    def check(transport, memory):
        for count in COUNTS:
            brings = np.random.default_rng(transport.rank).standard_normal(count).astype(np.float32)
            whole, halves = memory.from_host(brings), memory.from_host(brings)
            reductions = [
                bind(transport, whole, algorithm="shared"),
                bind_reduce_scatter(transport, halves, algorithm="shared"),
                bind_all_gather(transport, halves, "shared"),
            ]
            messages = transport.traffic.nbytes
            for run in range(2):
                whole[...] = halves[...] = memory.from_host(brings * (run + 1))
                for reduction in reductions:
                    started_and_waited(reduction)
                assert memory.to_host(whole).tobytes() == memory.to_host(halves).tobytes(), count
            assert transport.traffic.nbytes == messages
            assert [reduction.algorithm for reduction in reductions] == ["shared"] * 3

    for n in (1, 2, 3, 5):
        on_ranks(n, check)


def test_two_reductions_may_be_under_way_and_one_may_not_start_twice():
    def check(transport, memory):
        arrays = [
            memory.from_host(brought(transport.rank, count, "float64")) for count in (100, 37)
        ]
        reductions = [bind(transport, array, algorithm="shared") for array in arrays]
        for reduction in reductions:
            reduction.start()
        with pytest.raises(CommError, match="started again"):
            reductions[0].start()
        for reduction in reductions:
            reduction.wait()
        for array in arrays:
            assert np.array_equal(
                memory.to_host(array), expected(transport.size, array.size, "float64", "add")
            )

    on_ranks(3, check)


def test_memory_is_open_as_long_as_its_reduction_lives():
    def check(transport, memory):
        array = memory.zeros(100, "float32")
        reduction = bind(transport, array, algorithm="shared")
        transport.barrier()
        assert len(cupy.ipc.opened) == len(cupy.ipc.events) == transport.size * (transport.size - 1)
        transport.barrier()
        del reduction
        transport.barrier()
        assert cupy.ipc.opened == [] and cupy.ipc.events == {}

    for _ in range(2):  # closed memory opens again
        on_ranks(3, check)


@pytest.mark.parametrize("refused", ["works", "shares_events"])
def test_all_ranks_fall_back_to_the_ring_if_one_cannot_open(refused, monkeypatch, capsys):
    def check(transport, memory):
        if transport.rank == 1:
            cupy._local.forbidden = True
        for _ in range(2):
            array = memory.from_host(brought(transport.rank, 100, "float32"))
            reduction = bind(transport, array, algorithm="shared")
            assert isinstance(reduction, Execution) and reduction.algorithm == "ring"
            reduction.run()
            assert np.array_equal(
                memory.to_host(array), expected(transport.size, 100, "float32", "add")
            )

    monkeypatch.setattr(cupy.ipc, refused, lambda: not hasattr(cupy._local, "forbidden"))
    on_ranks(3, check)
    assert (
        capsys.readouterr().err
        == {
            "works": (
                "mpitrain: algorithm shared falls back on ring. On rank 1 (localhost): GPU memory of "
                "another process cannot be opened: cudaErrorInvalidContext: invalid device context.\n"
            ),
            "shares_events": (
                "mpitrain: algorithm shared falls back on ring. On rank 1 (localhost): GPU events of "
                "another process cannot be opened: cudaErrorInvalidContext: invalid device context.\n"
            ),
        }[refused]
    )


def test_a_driver_that_does_not_answer_is_no_way_either(monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(
        cuda.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: cannot open"))
    )

    def check(transport, memory):
        assert isinstance(
            bind(transport, memory.zeros(10, "float32"), algorithm="shared"), Execution
        )

    on_ranks(2, check)
    assert "processes: libcuda.so.1:" in capsys.readouterr().err


def refusal(n, function, **options):
    with pytest.raises(ConfigError) as raised:
        on_ranks(n, function, **options)
    assert raised.value.agreed and raised.value.exit_code == 2
    return str(raised.value)


def test_a_transport_of_host_memory_is_refused():
    def check(transport):
        bind(transport, CudaBackend().zeros(10, "float32"), algorithm="shared")

    with pytest.raises(ConfigError, match="is the host's") as raised:
        run_ranks(2, check)
    assert raised.value.agreed


def test_gpus_that_are_hidden_from_other_ranks_are_refused():
    def check(transport, memory):
        cupy.see(f"0000:0{transport.rank}:00.0")
        bind(transport, memory.zeros(10, "float32"), algorithm="shared")

    assert refusal(2, check) == (
        "ConfigError: algorithm shared needs every rank to see the GPUs of all, but rank 0 does "
        "not see that of rank 1 (0000:01:00.0).\n"
        "             Leave CUDA_VISIBLE_DEVICES and Slurm's --gpus-per-task out, or use "
        "algorithm ring."
    )


def test_several_hosts_are_refused():
    text = refusal(
        2,
        lambda transport, memory: bind(transport, memory.zeros(1, "float32"), algorithm="shared"),
        hosts="ab",
    )
    assert "are on 2." in text


def test_auto_does_not_choose_it():
    def check(transport, memory):
        array = memory.zeros(1000, "float32")
        chosen = bind(transport, array, algorithm="auto")
        assert on_device(array) and not isinstance(chosen, StreamOrdered)

    on_ranks(4, check)


@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_activations_are_leased_in_gpu_memory_and_found_again(algorithm):
    def run(transport, memory):
        group = Group(transport, algorithm, arena=memory.arena())
        places = []
        for step in range(3):
            lease, other = (group.exchange((3, 5), "float32") for _ in range(2))
            assert on_device(lease.array) and lease.array.shape == (3, 5)
            lease.array[...] = memory.from_host(
                brought(transport.rank, 15, "float32").reshape(3, 5) + step
            )
            lease.all_reduce().run()
            right = expected(transport.size, 15, "float32", "add") + transport.size * step
            assert np.array_equal(memory.to_host(lease.array).reshape(-1), right)
            places.append(
                (
                    lease.array.data.ptr,
                    other.array.data.ptr,
                    lease.all_reduce().algorithm,
                    group.arena.live,
                )
            )
            del lease, other
        assert places == places[:1] * 3 and group.arena.live == 0 and group.arena.allocations == 2
        transport.barrier()  # what others have open stays
        return places[0][2:]

    assert on_ranks(2, run) == [(algorithm, 128)] * 2
