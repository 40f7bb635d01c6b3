"""What only the threads transport promises: strictness, and an end to every wait."""

import numpy as np
import pytest

from mpitrain.collectives import coded
from mpitrain.collectives.lossy import bind_lossy
from mpitrain.collectives.wire import parse_wire
from mpitrain.errors import CommError
from mpitrain.transport.threads import run_ranks
from tests.laws.transport import raises_comm_error


def test_two_sends_that_face_each_other_are_a_deadlock_named_on_every_rank():
    def face(transport):
        other = 1 - transport.rank
        return raises_comm_error(lambda: transport.send(np.zeros(1), other, tag=5))

    for rank, text in enumerate(run_ranks(2, face)):
        assert text == (
            f"CommError: rank {rank}: send to rank {1 - rank}, tag 5, 8 bytes cannot complete: "
            "every rank waits and no message can move.\n"
            "           rank 0 waits in send to rank 1, tag 5, 8 bytes\n"
            "           rank 1 waits in send to rank 0, tag 5, 8 bytes"
        )


def test_waiting_for_a_rank_that_has_returned_is_a_deadlock():
    def leave(transport):
        if transport.rank == 1:
            transport.recv(np.zeros(2), 0)

    with pytest.raises(CommError, match="rank 1 waits in recv from rank 0, tag 0, 16 bytes"):
        run_ranks(2, leave)


def test_a_barrier_that_one_rank_never_enters_is_a_deadlock():
    def stay(transport):
        if transport.rank == 0:
            transport.recv(np.zeros(1), 1)
        else:
            transport.barrier()

    with pytest.raises(CommError, match="rank 2 waits in barrier"):
        run_ranks(3, stay)


@pytest.mark.timeout(30)
def test_lanes_that_one_rank_never_moves_are_a_deadlock(monkeypatch):
    monkeypatch.setattr(coded, "LANE", 500)

    def stay(transport):
        reduction = bind_lossy(transport, np.ones(20_011, "float32"), parse_wire("int8"))
        if transport.rank:
            reduction.run()

    with pytest.raises(CommError) as caught:
        run_ranks(3, stay)
    for rank in (1, 2):
        assert f"rank {rank} waits in recv from rank 0, tag 16384, 520 bytes and 9 more" in str(caught.value)


def test_different_collective_calls_do_not_meet():
    def differ(transport):
        transport.barrier() if transport.rank else transport.gather_text(1)

    with pytest.raises(CommError, match="same collective calls in the same order"):
        run_ranks(2, differ)


def test_the_exception_of_a_rank_ends_the_others_and_is_raised():
    ended = []

    def die(transport):
        if transport.rank == 2:
            raise ZeroDivisionError("the real cause")
        try:
            transport.recv(np.zeros(1), 2)
        except CommError as error:
            ended.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError, match="the real cause") as caught:
        run_ranks(4, die)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]
    assert len(ended) == 3
    assert all("rank 2 ended with ZeroDivisionError: the real cause" in text for text in ended)


def test_abort_ends_a_rank_that_polls():
    def stop(transport):
        if transport.rank == 0:
            transport.abort("enough")
        request = transport.start_recv(np.zeros(1), 0)
        while not request.test():
            pass

    with pytest.raises(CommError, match="rank 0: aborted: enough"):
        run_ranks(2, stop)


def test_a_buffer_changed_before_its_send_is_complete_arrives_changed():
    def hurry(transport):
        array = np.ones(3)
        if transport.rank == 0:
            request = transport.start_send(array, 1)
            array[:] = 7
            request.wait()
        else:
            transport.recv(array, 0)
        return array

    assert np.array_equal(run_ranks(2, hurry)[1], [7, 7, 7])


def test_a_posted_receive_reads_as_nan_until_it_is_complete():
    def peek(transport):
        array = np.ones(3)
        if transport.rank == 0:
            request = transport.start_recv(array, 1)
            transport.barrier()
            early = array.copy()
            transport.barrier()
            request.wait()
            assert np.array_equal(array, [2, 2, 2])
            return early
        transport.barrier()
        transport.barrier()
        transport.send(np.full(3, 2.0), 0)
        return None

    assert np.isnan(run_ranks(2, peek)[0]).all()


def test_an_array_changed_during_a_native_reduction_spoils_it():
    def hurry(transport):
        array = np.ones(1)
        request = transport.start_native_all_reduce(array)
        array[:] = 5
        request.wait()
        return array[0]

    assert run_ranks(2, hurry) == [10, 10]


def test_a_send_that_nobody_receives_is_reported():
    with pytest.raises(CommError, match="rank 1: send to rank 0, tag 2, 8 bytes"):
        run_ranks(2, lambda transport: transport.rank == 1 and transport.start_send(np.zeros(1), 0, tag=2))


def test_hosts_can_be_pretended():
    hosts = ["a", "a", "b"]
    assert run_ranks(3, lambda transport: transport.hosts, hosts=hosts) == [tuple(hosts)] * 3
