"""The progress of reductions: by polling, or by a thread that begins, fails and ends."""

import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.collectives.engine.executor import ProgressEngine, ProgressThread, mover
from mpitrain.collectives.group import Group, bind
from mpitrain.config import Layout
from mpitrain.errors import CommError
from mpitrain.layers.base import READING, normal
from mpitrain.ops.device import ops_for
from mpitrain.parallel.tensor.layer_factory import layers_for
from mpitrain.parallel.tensor.linear import ColumnParallelLinear
from mpitrain.transport.failures import MpiJob
from mpitrain.transport.mpi import ReceiveRequest
from mpitrain.transport.threads import run_ranks
from tests.processes import SECONDS, run


def polled(transport):
    transport.admits_threads = False
    return transport


def test_a_thread_moves_messages_between_hosts_and_nothing_else():
    def chosen(transport, algorithm, way=lambda transport: transport):
        part = way(transport).split(0)
        return type(mover(part, [bind(part, np.ones(5), algorithm=algorithm)]))

    assert run_ranks(2, chosen, "ring", hosts="ab") == [ProgressThread] * 2
    assert run_ranks(3, chosen, "hierarchical", hosts="aab") == [ProgressThread] * 3
    assert run_ranks(2, chosen, "ring", hosts="aa") == [ProgressEngine] * 2
    assert run_ranks(2, chosen, "shared", hosts="aa") == [ProgressEngine] * 2
    assert run_ranks(2, chosen, "native", hosts="ab") == [ProgressEngine] * 2
    assert run_ranks(2, chosen, "ring", polled, hosts="ab") == [ProgressEngine] * 2


def test_a_waiting_thread_gets_the_interpreter_within_milliseconds():
    def move(transport):
        by_thread = ProgressThread(transport)
        by_thread.start(bind(transport, np.ones(5)))
        by_thread.wait()

    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(5e-3)
        run_ranks(2, move, hosts="ab")
        assert sys.getswitchinterval() <= 1e-3
    finally:
        sys.setswitchinterval(before)


def test_a_column_layers_sum_overlaps_its_weight_half():
    def run(transport, way, does_hide):
        group, leased, found = Group(way(transport)), [], []
        layers = layers_for(ops_for("cpu"), group, Layout(tp=2))

        class Patient(ColumnParallelLinear):
            """Its weight half takes as long as the sum, if that ends meanwhile."""

            def backward_weight(self, pending, dw, arena):
                end = time.monotonic() + (SECONDS if does_hide else 0.1)
                while not np.all(leased[-1].array == 3) and time.monotonic() < end:
                    time.sleep(1e-3)
                found.append(bool(np.all(leased[-1].array == 3)))

        lease = group.exchange
        group.exchange = lambda *shape: (leased.append(lease(*shape)), leased[-1])[1]
        layer, w = (
            Patient(layers, 5, 2, normal(1), bias=False),
            {"weight": np.full((1, 5), 1.0 + transport.rank)},
        )
        for _ in range(3):
            _, saved = layer.forward(w, np.ones((7, 5)), READING, group.arena)
            dx = layer.backward(w, np.ones((7, 1)), saved, {}, group.arena)
            assert np.all(dx == 3) and (does_hide or group.exposed.seconds > 0)
        return found

    assert run_ranks(2, run, lambda transport: transport, True, hosts="ab") == [[True] * 3] * 2
    assert run_ranks(2, run, polled, False, hosts="ab") == [[False] * 3] * 2


class Failing:
    """A reduction whose first poll raises."""

    state, is_messages = None, True

    def __init__(self, error):
        self.error, self.polled = error, threading.Event()

    def start(self):
        pass

    def poll(self):
        self.polled.set()
        raise self.error


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (
            ZeroDivisionError("a bug"),
            "rank 1: the progress thread of the reductions failed: ZeroDivisionError: a bug",
        ),
        (CommError("rank 1: recv from rank 0 failed"), "rank 1: recv from rank 0 failed"),
    ],
)
@pytest.mark.parametrize("call", ["poll", "wait"])
def test_an_error_in_the_thread_is_raised_and_names_the_rank(error, wanted, call):
    def fail(transport):
        by_thread = ProgressThread(transport)
        if transport.rank == 1:
            by_thread.start(Failing(error))
            by_thread._thread.join(SECONDS)
            getattr(by_thread, call)()

    with pytest.raises(CommError) as caught:
        run_ranks(2, fail, hosts="ab")
    assert caught.value.named().startswith(f"CommError: {wanted}")


def test_a_reduction_missing_on_one_rank_is_a_deadlock_with_a_thread():
    def stay(transport):
        reduction, by_thread = bind(transport, np.ones(5)), ProgressThread(transport)
        if transport.rank:
            by_thread.start(reduction)
            transport.barrier()

    with pytest.raises(CommError, match="every rank waits and"):
        run_ranks(2, stay, hosts="ab")


def test_the_thread_ends_with_the_one_that_started_it():
    threads = []

    def leave(transport):
        reduction, by_thread = bind(transport, np.ones(5)), ProgressThread(transport)
        if transport.rank:
            by_thread.start(reduction)
            threads.append(by_thread._thread)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, leave, hosts="ab")
    threads[0].join(SECONDS)
    assert not threads[0].is_alive()


def test_a_wait_for_a_finished_reduction_does_not_stop_the_thread():
    def move(transport):
        arrays = [np.full(5, 1.0 + transport.rank), np.full(7, 1.0 + transport.rank)]
        first, second = (bind(transport, array) for array in arrays)
        by_thread, sums = ProgressThread(transport), []
        by_thread.start(first)
        thread = by_thread._thread
        for _ in range(3):
            late = time.monotonic() + SECONDS / 2
            while first in by_thread._started and time.monotonic() < late:
                time.sleep(0.001)
            by_thread.start(second)
            by_thread.wait(first)
            assert by_thread._thread is thread and thread.is_alive()
            sums.append(arrays[0][0])
            arrays[0][:] = 1.0 + transport.rank
            by_thread.start(first)  # again, while the thread moves the second
            by_thread.wait(second)
            thread = by_thread._thread
        by_thread.wait()
        assert not thread.is_alive()
        return [*sums, arrays[0][0], arrays[1][0]]

    assert run_ranks(2, move, hosts="ab") == [[3.0, 3.0, 3.0, 3.0, 12.0]] * 2


def test_the_thread_does_not_keep_a_program_from_ending():
    code = """
import numpy as np
from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.engine.executor import ProgressThread
from mpitrain.collectives.plans.ring import all_reduce
from mpitrain.transport.base import Traffic
from mpitrain.transport.threads import World
from mpitrain.transport.windows import Windows
from mpitrain.transport.threads import ThreadTransport

transport = ThreadTransport(World(2), (), range(2), 0, "ab", Traffic(), Windows())
ProgressThread(transport).start(Execution(transport, np.ones(5), "add", all_reduce(0, 2, 5), 1))  # there is no rank 1
raise SystemExit(7)
"""
    assert run([sys.executable, "-c", code]).returncode == 7


def test_a_receive_that_is_tested_calls_mpi_under_the_lock_alone():
    calls = []

    class Status:
        source = 1

        def Get_elements(self, unit):
            calls.append(job.lock._is_owned())
            return 3

    class Request:
        def Test(self, status):
            calls.append(job.lock._is_owned())
            return True

    mpi = SimpleNamespace(
        Status=Status, Exception=OSError, ERR_UNKNOWN=13, THREAD_MULTIPLE=3, Query_thread=lambda: 2
    )
    job = MpiJob(mpi)
    transport = SimpleNamespace(own_name="rank 0", job=job, MPI=mpi)
    receive = ReceiveRequest(transport, Request(), np.zeros(3), None, "recv", 1)
    assert job.requests == {receive}
    assert receive.test() and receive.source == 1 and calls == [True, True]
    assert not job.requests


def test_a_run_that_an_error_has_ended_never_looks_complete():
    def wait_twice(transport):
        reduction = bind(transport, np.ones(1024), algorithm="ring")
        reduction.start()
        start, transport.start_send = transport.start_send, lambda *message: 1 / 0
        with pytest.raises(ZeroDivisionError):
            reduction.wait()
        transport.start_send = start
        for end in (reduction.wait, reduction.poll, reduction.wait):
            with pytest.raises(CommError, match="an error has ended its run"):
                end()

    run_ranks(3, wait_twice)
