"""CUDA tensors of the backend of PyTorch, on a fake GPU: values, bytes by pointer and staged, and the order of streams."""

import gc
import sys
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpitrain.errors import CommError, ConfigError  # noqa: E402
from mpitrain.machine import cuda  # noqa: E402
from mpitrain.torch import GroupOptions, gpu  # noqa: E402
from mpitrain.torch.comparison import Comparison, Said  # noqa: E402
from mpitrain.torch.process_group import ProcessGroup  # noqa: E402
from mpitrain.transport.threads import run_ranks  # noqa: E402
from tests.fakes import cupy, torch_cuda  # noqa: E402
from tests.fakes import gpu as fake_gpu  # noqa: E402
from tests.fakes.pointers import PointerThreads  # noqa: E402

dist = torch.distributed
WAYS = {
    "memory of one host": (None, "no"),
    "pointers": (("a", "b"), "yes"),
    "staged": (("a", "b"), "no"),
}
"""{way of the elements: hosts, cuda_aware}."""
COUNT = 1001
SYNC = SimpleNamespace(
    asyncOp=False, timeout=timedelta(0), rootRank=1, reduceOp=dist.ReduceOp(dist.ReduceOp.SUM)
)
ASYNC = SimpleNamespace(**{**vars(SYNC), "asyncOp": True})


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    fake_gpu.play(monkeypatch)
    torch_cuda.play(monkeypatch)
    monkeypatch.setattr(gpu, "tensor_of", torch_cuda.Tensor)
    monkeypatch.setattr(cuda, "_allocation_start", cupy.allocation_start)
    monkeypatch.setattr(cupy, "kernels_alone", False)  # tests and PyTorch's copies compute, too
    yield
    assert cupy.faults == []


def on_ranks(way, check):
    hosts, aware = WAYS[way]
    store = dist.HashStore()

    def run(threads):
        torch.cuda.current_stream()
        timeout = timedelta(seconds=60)
        group = ProcessGroup(
            PointerThreads(threads), store, timeout, GroupOptions(cuda_aware=aware)
        )
        check(group, group.rank(), group.size())
        group.shutdown()

    run_ranks(2, run, hosts=hosts)


def tensor(rank, count=COUNT, dtype=np.float32):
    """Different on every rank and place; written by work that nobody has waited for."""
    return torch_cuda.Tensor(cupy.asarray(((np.arange(count) * 7 + 31 * rank) % 97).astype(dtype)))


def values(one):
    return one.array.get().astype(np.float64)


@pytest.mark.compile
@pytest.mark.parametrize("way", WAYS)
def test_the_streams_wait_for_each_other_and_elements_take_their_way(way):
    def check(group, rank, size):
        group.allreduce([tensor(rank)], SYNC).wait()  # binds
        one, other = tensor(rank), cupy.zeros(7)
        one.array += one.array
        sent = group.transport.traffic.nbytes
        cupy.log().clear()
        work = group.allreduce([one], SYNC)
        other += other  # a layer that is computed meanwhile
        computing = cupy.get_current_stream()._pending[-2:]
        work.wait()
        seen, sent = [*cupy.log()], group.transport.traffic.nbytes - sent
        one.array += one.array  # behind the sum, for which nobody on the host has waited
        left = cupy.get_current_stream()._pending
        if way != "pointers":
            assert ("synchronize",) not in seen, "the host has waited for a stream"
            assert all(any(work is pending for pending in left) for work in computing)
        moved = {name: sum(n for kind, *n in seen if kind == name for n in n) for name in KINDS}
        chunk = one.array.nbytes
        expected = {
            "memory of one host": (0, 0, 0),
            "pointers": (2 * chunk, 0, chunk),
            "staged": (0, 2 * chunk, chunk),
        }
        assert (moved["pointer"], moved["copy"], sent) == pytest.approx(expected[way], abs=8)
        total = 4 * sum(values(tensor(each)) for each in range(size))
        assert np.array_equal(values(one), total)

    on_ranks(way, check)


KINDS = "pointer", "copy"


@pytest.mark.compile
@pytest.mark.parametrize("way", WAYS)
def test_every_collective_takes_cuda_tensors(way):
    def check(group, rank, size):
        of_all = [tensor(each) for each in range(size)]
        for dtype in (np.float32, np.int64):
            one = tensor(rank, dtype=dtype)
            mean = SimpleNamespace(**{**vars(SYNC), "reduceOp": dist.ReduceOp(dist.ReduceOp.AVG)})
            group.allreduce([one], mean).wait()
            total = sum(map(values, of_all)) / size
            assert np.array_equal(values(one), total if dtype == np.float32 else total // 1)
        root = tensor(rank)
        group.broadcast([root], SYNC).wait()
        assert np.array_equal(values(root), values(of_all[1]))
        places = [tensor(9) for _ in of_all]
        own = tensor(rank)
        group.allgather([places], [own], SYNC).wait()
        assert own.is_recorded
        for place, sent in zip(places, of_all, strict=True):
            assert np.array_equal(values(place), values(sent))
        part = tensor(9)
        parts = [tensor(rank + 10 * each) for each in range(size)]
        group.reduce_scatter([part], [parts], SYNC).wait()
        total = sum(values(tensor(each + 10 * rank)) for each in range(size))
        assert np.array_equal(values(part), total)
        assert all(each.is_recorded for each in parts)
        parts = [tensor(rank + 10 * each) for each in range(size)]
        group.alltoall(places, parts, SYNC).wait()
        assert all(each.is_recorded for each in parts)
        for each, place in enumerate(places):
            assert np.array_equal(values(place), values(tensor(each + 10 * rank)))
        group.gather([places] if rank == 1 else [[]], [tensor(rank)], SYNC).wait()
        if rank == 1:
            assert np.array_equal(values(places[0]), values(of_all[0]))
        parts = of_all if rank == 1 else []
        group.scatter([part], [parts], SYNC).wait()
        assert np.array_equal(values(part), values(of_all[rank]))
        assert all(each.is_recorded for each in parts)
        turns = [group.send([tensor(5)], 1, 3)] if rank == 0 else [group.recv([part], 0, 3)]
        turns[0].wait()
        assert rank == 0 or np.array_equal(values(part), values(tensor(5)))

    on_ranks(way, check)


@pytest.mark.parametrize("breaks", ["no CuPy", "CuPy fails on rank 1"])
def test_without_cupy_tensors_are_staged_and_rank_0_says_so_once(monkeypatch, capsys, breaks):
    def fail(kind):
        if threading.current_thread() in failing:
            raise cupy.CUDARuntimeError("initialization error")
        return backend_for(kind)

    failing, backend_for = [], gpu.backend_for
    monkeypatch.setattr(gpu, "backend_for", fail)
    if breaks == "no CuPy":
        monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(gpu, "_SAID", set())

    def check(group, rank, size):
        if rank == 1:
            failing.append(threading.current_thread())
        for _ in range(2):
            one = tensor(rank)
            group.allreduce([one], SYNC).wait()
            assert np.array_equal(values(one), sum(values(tensor(each)) for each in range(size)))

    on_ranks("memory of one host", check)
    assert capsys.readouterr().err.count("CUDA tensors are copied through host memory") == 1


def test_a_call_has_completed_when_the_gpu_has_done_it():
    def check(group, rank, size):
        one = tensor(rank)
        work = group.allreduce([one], SYNC)
        work._queue.wait(work._call)  # The host has started all of it.
        # The fake GPU does its work when an event is asked for the second time.
        assert [work.is_completed() for _ in range(2)] == [False, True]
        one.array += one.array
        assert np.array_equal(values(one), 2 * sum(values(tensor(each)) for each in range(size)))

    on_ranks("memory of one host", check)


@pytest.mark.compile
@pytest.mark.parametrize("way", WAYS)
def test_a_future_is_behind_its_call_and_so_are_the_callbacks_and_who_waits(way):
    def check(group, rank, size):
        total = sum(values(tensor(each)) for each in range(size))
        for _ in range(2):  # the first one binds
            one = tensor(rank)
            one.array += one.array
            future = group.allreduce([one], ASYNC).get_future()
            halved = future.then(lambda future: future.value()[0].div_(2))
            halved.wait().array += one.array  # as a communication hook of DistributedDataParallel
            assert np.array_equal(values(one), 2 * total)

    on_ranks(way, check)


@pytest.mark.parametrize("way", WAYS)
def test_a_message_is_behind_what_its_receiver_does_and_so_is_its_future(way):
    def check(group, rank, size):
        group.allreduce([tensor(rank)], SYNC).wait()  # finds out how messages go
        if rank == 0:
            for _ in range(2):
                group.send([tensor(5)], 1).wait()
            return
        for completes in ("wait", "get_future"):
            one = tensor(9)
            read = cupy.zeros(COUNT)
            read += one.array
            work = getattr(group.recv([one], 0), completes)()
            if completes == "get_future":
                work.wait()
            one.array += one.array
            assert np.array_equal(values(one), 2 * values(tensor(5)))
            assert np.array_equal(read.get(), values(tensor(9)))

    on_ranks(way, check)


def test_tensors_live_until_their_call_has_ended():
    def check(group, rank, size):
        group.transport.admit_thread()  # rank 0 is about to send
        group.allreduce([tensor(rank)], SYNC).wait()
        if rank == 0:
            own, places = tensor(rank), [tensor(9) for _ in range(size)]
            lives = [weakref.ref(each) for each in (own, *places)]
            work = group.allgather([places], [own], ASYNC)
            message = group.recv([tensor(9)], 1)
            lives.append(weakref.ref(message.result()[0]))
            del own, places
            gc.collect()
            assert all(each() is not None for each in lives)
            group.send([torch.zeros(1)], 1)
            work.wait()
            assert np.array_equal(values(work.result()[0][1]), values(tensor(1)))
            message.wait()
            del work, message
        else:
            group.recv([torch.zeros(1)], 0).wait()  # Rank 0 has looked.
            group.allgather([[tensor(9), tensor(9)]], [tensor(rank)], ASYNC).wait()
            group.send([tensor(rank)], 0).wait()
            lives = []
        group.allreduce([tensor(rank)], ASYNC).wait()  # The reports of deadlocks name it instead.
        gc.collect()
        assert [each() for each in lives] == [None] * len(lives)

    on_ranks("staged", check)


def test_within_a_host_wait_returns_while_the_gpus_have_done_nothing(monkeypatch):
    def check(group, rank, size):
        group.allreduce([tensor(rank)], SYNC).wait()  # binds
        group.barrier(SYNC).wait()
        monkeypatch.setattr(cupy.Event, "passed", lambda event: False)
        one, places = tensor(rank), [tensor(9) for _ in range(size)]
        works = [group.allreduce([one], SYNC), group.allgather([places], [one], SYNC)]
        for work in works:
            work.wait()
            assert not work.is_completed()
        total = sum(values(tensor(each)) for each in range(size))
        for each in (one, *places):
            assert np.array_equal(values(each), total)

    on_ranks("memory of one host", check)


def test_the_current_gpu_stays_the_callers_and_a_second_one_is_refused():
    def check(group, rank, size):
        cupy.devices.current.index = 1
        group.allreduce([tensor(rank)], SYNC).wait()
        assert cupy.cuda.runtime.getDevice() == 1
        other = tensor(rank)
        other.device = torch.device("cuda", 1)
        for call in (
            lambda: group.allreduce([other], SYNC),
            lambda: group.send([other], 1 - rank),
            lambda: group.recv([other], 1 - rank),
        ):
            with pytest.raises(ConfigError, match="cuda:1"):
                call()

    on_ranks("memory of one host", check)


def test_a_tensor_of_the_host_and_one_of_a_gpu_are_different_calls():
    def check(group, rank, size):
        group.transport.admit_thread()  # so the world of threads does not end the wait first
        one = tensor(rank) if rank else torch.ones(COUNT)
        with pytest.raises(CommError, match=r"same calls in one order.*on cuda"):
            group.allreduce([one], SYNC).wait()

    on_ranks("memory of one host", check)


def test_a_refused_call_ends_the_wait_of_others_at_the_second_look_that_finds_it():
    """The rank that has refused a call may make it with other tensors in the next moment."""
    notices = SimpleNamespace(refusal=(), refused_behind=lambda call: 0)
    look, call = Comparison.__new__(Comparison), SimpleNamespace(number=3)
    look._notices, refused = notices, Said(2, "refused", "rank 1: shapes differ", 1)
    look.said = [Said(3, "waits", "", 0), refused]
    look.check_failures(call, 0, range(2))
    look.said[1] = refused._replace(refused=2)  # refused again, so it has gone on meanwhile
    look.check_failures(call, 0, range(2))
    with pytest.raises(CommError, match="rank 1 has refused it: shapes differ"):
        look.check_failures(call, 0, range(2))
