"""Ranks of one host that reduce each other's GPU memory: threads play the processes, tests.fakes.cupy the GPU."""

import gc
import sys

import numpy as np
import pytest

from mpitrain.collectives.cuda_ipc import StreamOrdered
from mpitrain.collectives.engine.arithmetic import by_kernels
from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.group import Group, bind, topology_of
from mpitrain.collectives.selection.cost_model import choose
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.errors import CommError, ConfigError
from mpitrain.machine import cuda
from mpitrain.machine.backend import Arena, on_device
from mpitrain.machine.cuda import CudaBackend
from mpitrain.transport.agreement import ending_together
from mpitrain.transport.device import Staged
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
    monkeypatch.setattr(cupy.ipc, "lies", lambda: False)
    cupy.faults.clear()
    yield
    assert cupy.faults == [] and cupy.ipc.opened == [] and cupy.ipc.events == {}


def on_ranks(n, function, **options):
    """Call function(transport, backend) on n ranks whose messages are staged."""

    def run(threads):
        memory = CudaBackend()
        return function(Staged(threads, memory), memory)

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
                Group(transport, "shared").bind_reduce_scatter(halves),
                Group(transport, "shared").bind_all_gather(halves),
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
        others = transport.size * (transport.size - 1)
        assert (len(cupy.ipc.opened), len(cupy.ipc.events)) == (others, 2 * others)
        transport.barrier()
        del reduction
        transport.barrier()
        assert cupy.ipc.opened == [] and cupy.ipc.events == {}

    for _ in range(2):  # closed memory opens again
        on_ranks(3, check)


def test_auto_takes_it_on_the_gpus_of_one_host():
    def check(transport, memory):
        for size in (3, 1001, 1 << 16):
            array = memory.from_host(brought(transport.rank, size, "float32"))
            reductions = [
                Group(transport).bind_all_gather(array),
                Group(transport).bind_reduce_scatter(array),
                bind(transport, array, algorithm="auto"),
            ]
            assert [type(one) for one in reductions] == [StreamOrdered] * 3
            reductions[-1].run()
            right = expected(transport.size, size, "float32", "add")
            assert np.array_equal(memory.to_host(array), right)

    for n in (2, 3):
        on_ranks(n, check)


@pytest.mark.parametrize("hosts", ["a", "ab", "aabb"])
def test_auto_takes_messages_elsewhere(hosts):
    def check(transport, memory):
        array = memory.from_host(brought(transport.rank, 100, "float32"))
        reduction = bind(transport, array, algorithm="auto")
        assert not isinstance(reduction, StreamOrdered)
        reduction.run()
        right = expected(transport.size, 100, "float32", "add")
        assert np.array_equal(memory.to_host(array), right)
        return reduction.algorithm

    assert len(set(on_ranks(len(hosts), check, hosts=hosts))) == 1


OBSTACLES = {
    "hidden": "GPU memory of another process cannot be opened",
    "works": "GPU memory of another process cannot be opened",
    "shares_events": "GPU events of another process cannot be opened",
    "lies": "a sum of known numbers was wrong on rank 0, 1",
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_without_access_auto_takes_messages_on_all_ranks_and_a_demand_is_refused(
    obstacle, monkeypatch, capsys
):
    if obstacle != "hidden":
        monkeypatch.setattr(
            cupy.ipc, obstacle, lambda: hasattr(cupy._local, "apart") == (obstacle == "lies")
        )

    def check(transport, memory, algorithm="auto"):
        if transport.rank == 1:
            cupy._local.apart = True
            if obstacle == "hidden":
                cupy.see("0000:18:00.0")
        pair = transport.split(transport.rank < 2, transport.rank)
        for ranks in (transport, pair, transport):
            for op, size in (("add", 3), ("maximum", 1001)):
                array = memory.from_host(brought(ranks.rank, size, "float32"))
                reduction = bind(ranks, array, op, algorithm)
                by_messages = choose(DEFAULT, topology_of(ranks, array), size, 4, "plain")
                if ranks.size == 3:
                    assert reduction.algorithm == by_messages
                reduction.run()
                right = expected(ranks.size, size, "float32", op)
                assert np.array_equal(memory.to_host(array), right)

    on_ranks(3, check)
    line, *others = capsys.readouterr().err.splitlines()
    assert OBSTACLES[obstacle] in line and not others
    text = refusal(3, lambda *rank: check(*rank, "shared"))
    assert OBSTACLES[obstacle] in text and "CUDA_VISIBLE_DEVICES" in text and "auto" in text
    assert capsys.readouterr().err == ""
    assert cupy.ipc.opened == [], "an array that is refused is closed"


def test_access_is_tried_by_each_group_and_an_error_of_one_group_ends_the_job(monkeypatch, capsys):
    """Of four ranks only the last one's access lies."""
    monkeypatch.setattr(cupy.ipc, "lies", lambda: hasattr(cupy._local, "apart"))

    def check(transport, memory, algorithm="auto"):
        if transport.rank == 3:
            cupy._local.apart = True
        pair = transport.split(transport.rank % 2, transport.rank)
        array = memory.from_host(brought(pair.rank, 100, "float32"))
        reduction = bind(pair, array, algorithm=algorithm)
        reduction.run()
        assert np.array_equal(memory.to_host(array), expected(2, 100, "float32", "add"))
        return isinstance(reduction, StreamOrdered), transport.refusals

    tried = on_ranks(4, check)
    assert [is_shared for is_shared, _ in tried] == [True, False] * 2
    assert [len(refusals) for _, refusals in tried] == [0, 1] * 2
    assert tried[1] == tried[3] and tried[1][1][0].startswith("Among ranks 1, 3, counted from 0: ")
    assert capsys.readouterr().err == ""

    def demanded(transport, memory):
        with ending_together(transport):
            check(transport, memory, "shared")

    with pytest.raises(CommError, match=r"aborted: ConfigError.*ranks 1, 3, .*wrong"):
        on_ranks(4, demanded)
    gc.collect()  # the tracebacks of ranks that were ended hold their arrays


def test_a_driver_that_does_not_answer_is_no_way_either(monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(
        cuda.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: cannot open"))
    )

    def check(transport, memory):
        assert isinstance(bind(transport, memory.zeros(10, "float32"), algorithm="auto"), Execution)

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


def test_several_hosts_are_refused():
    text = refusal(
        2,
        lambda transport, memory: bind(transport, memory.zeros(1, "float32"), algorithm="shared"),
        hosts="ab",
    )
    assert "are on 2." in text


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
            lease.bound_all_reduce().run()
            right = expected(transport.size, 15, "float32", "add") + transport.size * step
            assert np.array_equal(memory.to_host(lease.array).reshape(-1), right)
            places.append(
                (
                    lease.array.data.ptr,
                    other.array.data.ptr,
                    lease.bound_all_reduce().algorithm,
                    group.arena.live,
                )
            )
            del lease, other
        assert places == places[:1] * 3 and group.arena.live == 0 and group.arena.allocations == 2
        transport.barrier()  # what others have open stays
        return places[0][2:]

    assert on_ranks(2, run) == [(algorithm, 128)] * 2
