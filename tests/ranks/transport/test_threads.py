"""What only the threads transport promises: strictness, and an end to every wait."""

import time

import numpy as np
import pytest

from mpitrain.collectives import compression
from mpitrain.collectives.compression import bind_lossy
from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.group import Group
from mpitrain.errors import CommError, TrainingError
from mpitrain.transport.native import bind_native_all_reduce
from mpitrain.transport.threads import run_ranks
from tests.laws.transport import raises_comm_error


def test_two_sends_that_face_each_other_are_a_deadlock_named_on_every_rank():
    def face(transport):
        other = 1 - transport.rank
        return raises_comm_error(lambda: transport.send(np.zeros(1), other, tag=5))

    for rank, text in enumerate(run_ranks(2, face)):
        assert text == (
            f"CommError: rank {rank}: send to rank {1 - rank}, tag 5, 8 bytes cannot complete: every "
            "rank waits and no message can move.\n"
            "           rank 0 waits in send to rank 1, tag 5, 8 bytes\n"
            "           rank 1 waits in send to rank 0, tag 5, 8 bytes"
        )


def poll_for_ever(transport):
    if transport.rank == 0:
        transport.abort("enough")
    request = transport.start_recv(np.zeros(1), 0)
    while not request.test():
        pass


# {what ranks do: (number of ranks, the function of a rank, a part of the error)}
ENDED = {
    "wait for a rank that has returned": (
        2,
        lambda transport: transport.rank and transport.recv(np.zeros(2), 0),
        "rank 1 waits in recv from rank 0, tag 0, 16 bytes",
    ),
    "enter a barrier that one never enters": (
        3,
        lambda transport: transport.barrier() if transport.rank else transport.recv(np.zeros(1), 1),
        "rank 2 waits in barrier",
    ),
    "reduce without one rank, which is named by the call that the user wrote": (
        3,
        lambda transport: transport.rank and Group(transport).all_reduce(np.zeros(2)),
        r"rank 1 waits in .*, for Group.all_reduce in line \d+ of test_threads.py\n *rank 2 waits in .*, for Group",
    ),
    "enter different collective calls": (
        2,
        lambda transport: transport.barrier() if transport.rank else transport.gather_text(1),
        "same collective calls in",
    ),
    "send what nobody receives": (
        2,
        lambda transport: transport.rank and transport.start_send(np.zeros(1), 0, tag=2),
        "rank 1: send to rank 0, tag 2, 8 bytes",
    ),
    "poll when another aborts": (2, poll_for_ever, "rank 0: aborted: enough"),
}


@pytest.mark.parametrize("what", ENDED)
def test_ranks_end_with_an_error_that_says_why_if_they(what):
    n, function, law = ENDED[what]
    with pytest.raises(CommError, match=law):
        run_ranks(n, function)


def test_an_error_of_every_rank_waits_until_each_has_come_to_it():
    told = np.zeros(2)

    def fail(transport):
        if transport.rank == 0:
            transport.start_send(np.ones(2), 1)
        else:
            time.sleep(0.05)
            transport.recv(told, 0)
        raise TrainingError("the loss is not finite", "").on_every_rank()

    with pytest.raises(TrainingError, match="not finite"):
        run_ranks(2, fail)
    assert np.all(told == 1)


@pytest.mark.parametrize(
    ("others", "law"),
    [
        (lambda transport: None, r"ranks \[1\] returned"),
        (lambda transport: transport.recv(np.zeros(1), 0), "rank 1 waits in recv from rank 0"),
        (lambda transport: [][transport.rank], "out of range"),
    ],
    ids=("returns", "hangs", "raises another"),
)
def test_an_error_of_every_rank_that_one_does_not_have_is_a_defect(others, law):
    def fail(transport):
        if transport.rank == 1:
            others(transport)
            return
        raise TrainingError("the loss is not finite", "").on_every_rank()

    with pytest.raises((CommError, IndexError), match=law):
        run_ranks(2, fail)


def test_an_unmoved_pipelined_chain_is_a_deadlock_by_name(monkeypatch):
    monkeypatch.setattr(compression, "LANE", 500)

    def stay(transport):
        reduction = bind_lossy(transport, np.ones(20_011, "float32"), parse_wire("int8"))
        return raises_comm_error(reduction.run) if transport.rank else None

    for text in run_ranks(3, stay)[1:]:
        assert "every rank waits and" in text
        rows = [row for row in text.splitlines() if " waits in " in row]
        assert [row.split(" waits in ")[0].strip() for row in rows] == ["rank 1", "rank 2"]
        assert all(
            row.count("recv from rank 0, ") == row.count("send to rank 0, ") == 5 for row in rows
        ), text


@pytest.mark.parametrize("way", ["fp16", "bf16", "int8", "topk:0.1", "powersgd:2"])
def test_a_lossy_all_reduce_that_one_rank_leaves_is_a_deadlock(way):
    def leave(transport):
        reduction = bind_lossy(transport, np.ones((40, 50), "float32"), parse_wire(way))
        if transport.rank == 1:
            return raises_comm_error(lambda: transport.recv(np.zeros(1), 0))
        return raises_comm_error(reduction.run)

    for rank, text in enumerate(run_ranks(3, leave)):
        assert text.startswith(f"CommError: rank {rank}: ")
        assert "rank 1 waits in recv from rank 0, tag 0, 8 bytes" in text
        assert text.count(" waits in ") == 3 and "no message\n" not in text, text


def test_ranks_that_wait_in_different_ways_are_one_deadlock():
    def wait(transport):
        receive = transport.start_recv(np.zeros(1), 0, tag=transport.rank)
        ways = [
            lambda: transport.wait_until(receive.test, what=receive),
            receive.wait,
            lambda: transport.wait_until(receive.test),
        ]
        return raises_comm_error([*ways, transport.barrier][transport.rank])

    for text in run_ranks(4, wait):
        for what in (
            "recv from rank 0, tag 0, 8 bytes",
            "recv from rank 0, tag 1, 8 bytes",
            "recv from rank 0, tag 2, 8 bytes",
            "barrier",
        ):
            assert f" waits in {what}" in text


def test_a_rank_that_waits_while_another_computes_is_no_deadlock():
    def late(transport):
        if transport.rank == 0:
            time.sleep(0.1)
            transport.send(np.ones(1), 1)
        else:
            transport.wait_until(transport.start_recv(np.zeros(1), 0).test)

    run_ranks(2, late)


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
        request = bind_native_all_reduce(transport, array).start()
        array[:] = 5
        request.wait()
        return array[0]

    assert run_ranks(2, hurry) == [10, 10]


def test_hosts_can_be_pretended():
    hosts = ["a", "a", "b"]
    assert run_ranks(3, lambda transport: transport.hosts, hosts=hosts) == [tuple(hosts)] * 3
