"""What every transport must do. A law is a function of one rank's transport; all ranks run it together."""

import threading
import time

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import pytest

from mpitrain.errors import CommError
from mpitrain.transport.native import (
    NATIVE_OPERATIONS,
    bind_native,
    bind_native_all_reduce,
    native_all_reduce,
)


def coded(rank: int, count: int, dtype="float64") -> np.ndarray:
    """Data that tells rank and position, exact in every float type for small counts: swapped pieces cannot pass."""
    return ((rank + 1) * 100 + np.arange(count) % 89).astype(dtype)


def raises_comm_error(call) -> str:
    """The text of the CommError that the call must raise."""
    try:
        call()
    except CommError as error:
        return error.named()
    raise AssertionError("no CommError was raised")


def first_complete(transport, requests) -> int:
    """The index of a complete request, once there is one."""
    transport.wait_until(lambda: any(request.test() for request in requests))
    return next(index for index, request in enumerate(requests) if request.test())


def serve(transport, expected: int, count: int) -> None:
    """Answer each message with its negative: several receives from any rank, and the replies, are under way together."""
    incoming = np.zeros((min(3, expected), count))
    requests = [transport.start_recv(array, None, tag=3) for array in incoming]
    arrays, posted, served = list(incoming), len(requests), 0
    while requests:
        i = first_complete(transport, requests)
        request, array = requests.pop(i), arrays.pop(i)
        if request.source < 0:
            continue  # a reply
        served += 1
        reply = -array
        requests.append(transport.start_send(reply, request.source, tag=4))
        arrays.append(reply)
        if posted < expected:
            requests.append(transport.start_recv(array, None, tag=3))
            arrays.append(array)
            posted += 1
    assert served == posted == expected


def share_of_a_core(transport, seconds: float, clock) -> float:
    """CPU time by `clock` over time that passed while this rank waited for any of two messages; rank 0 sends them late."""
    transport.barrier()
    if transport.rank == 0:
        time.sleep(seconds)
        for peer in range(1, transport.size):
            transport.send(np.zeros(1), peer, tag=8)
            transport.send(np.zeros(1), peer, tag=7)
        return 0.0
    requests = [transport.start_recv(np.zeros(1), 0, tag) for tag in (7, 8)]
    began, used = time.perf_counter(), clock()
    first_complete(transport, requests)
    share = (clock() - used) / (time.perf_counter() - began)
    for request in requests:
        request.wait()
    return share


class TransportLaws:
    """Subclasses supply `on_ranks(law)`, which runs a law on one or many sizes of transport."""

    def law_a_ring_of_exchanges_moves_every_type_and_length(self, transport):
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        for dtype in (
            "float32",
            "float64",
            "float16",
            "int32",
            "int64",
            "uint8",
            "bool",
            "bfloat16",
            "complex128",
        ):
            for count in (0, 1, 3, 1001, 1 << 15):
                incoming = np.ones(count, dtype)
                transport.exchange(coded(transport.rank, count, dtype), after, incoming, before)
                assert np.array_equal(incoming, coded(before, count, dtype))

    def law_messages_of_one_tag_keep_their_order_and_tags_do_not_mix(self, transport):
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        arrays = [np.full(5, 10.0 * i + transport.rank) for i in range(4)]
        incoming = [np.zeros(5) for _ in range(4)]
        requests = [transport.start_recv(incoming[i], before, tag=i % 2) for i in (1, 3, 0, 2)]
        requests += [
            transport.start_send(array, after, tag=i % 2) for i, array in enumerate(arrays)
        ]
        for request in requests:
            request.wait()
        assert [array[0] for array in incoming] == [10.0 * i + before for i in range(4)]

    def law_test_says_true_once_complete_and_from_then_on(self, transport):
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        incoming = np.zeros(70_000)  # above every eager limit
        requests = [
            transport.start_recv(incoming, before),
            transport.start_send(coded(transport.rank, 70_000), after),
        ]
        while not all(request.test() for request in requests):
            pass
        assert all(request.test() for request in requests)
        assert np.array_equal(incoming, coded(before, 70_000))
        assert requests[0].source == before
        assert requests[1].source == -1

    def law_receive_from_any_names_its_source(self, transport):
        outgoing = coded(transport.rank, 4)
        sends = [transport.start_send(outgoing, 0, tag=3)]
        if transport.rank == 0:
            seen = set()
            for _ in range(transport.size):
                incoming = np.zeros(4)
                request = transport.start_recv(incoming, None, tag=3)
                request.wait()
                assert np.array_equal(incoming, coded(request.source, 4))
                seen.add(request.source)
            assert seen == set(range(transport.size))
        for send in sends:
            send.wait()

    def law_a_finished_request_is_found_whichever_ends_first(self, transport):
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        for count in (1, 70_000):  # below and above eager limits
            incoming = np.zeros((4, count))
            requests = [
                transport.start_recv(array, before, tag) for tag, array in enumerate(incoming)
            ]
            waiting = list(range(4))
            for tag in (2, 0, 3, 1):
                send = transport.start_send(coded(transport.rank, count) + tag, after, tag)
                assert waiting.pop(first_complete(transport, [requests[i] for i in waiting])) == tag
                assert np.array_equal(incoming[tag], coded(before, count) + tag)
                send.wait()
                transport.barrier()
        pending = transport.start_recv(np.zeros(1), before, tag=5)
        assert first_complete(transport, [pending, requests[3]]) == 1, "what is complete stays so"
        transport.barrier()
        transport.start_send(np.zeros(1), after, tag=5).wait()
        pending.wait()

    def law_reductions_of_the_library_can_be_polled(self, transport):
        array = coded(transport.rank, 1001)
        transport.wait_until(bind_native_all_reduce(transport, array).start().test)
        assert np.array_equal(array, sum(coded(rank, 1001) for rank in range(transport.size)))

    def law_a_server_waits_for_any_message_and_any_reply(self, transport):
        rounds, count = 5, 3000
        if transport.rank == 0:
            serve(transport, rounds * (transport.size - 1), count)
            return
        for i in range(rounds):
            transport.send(coded(transport.rank, count) + i, 0, tag=3)
            answer = np.zeros(count)
            transport.recv(answer, 0, tag=4)
            assert np.array_equal(answer, -coded(transport.rank, count) - i)

    def law_a_wait_keeps_out_no_thread_that_was_admitted(self, transport):
        if not transport.admits_threads:
            return
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        transport.barrier()

        def late():
            time.sleep(0.05)
            transport.send(coded(transport.rank, 70_000), after, tag=6)
            transport.dismiss_thread()

        transport.admit_thread()
        sender, incoming = threading.Thread(target=late), np.zeros(70_000)
        receive = transport.start_recv(incoming, before, tag=6)
        sender.start()
        transport.wait_until(receive.test)
        assert np.array_equal(incoming, coded(before, 70_000))
        sender.join()

    def law_gather_text_brings_values_of_any_length(self, transport):
        value = {"rank": transport.rank, "text": "ä" * 1000 * transport.rank, "none": None}
        everyone = transport.gather_text(value)
        assert [v["rank"] for v in everyone] == list(range(transport.size))
        assert [len(v["text"]) for v in everyone] == [1000 * rank for rank in range(transport.size)]

    def law_split_numbers_ranks_by_key_and_keeps_messages_apart(self, transport):
        part = transport.split(transport.rank % 2, key=-transport.rank)
        members = [rank for rank in range(transport.size) if rank % 2 == transport.rank % 2][::-1]
        assert part.size == len(members)
        assert members[part.rank] == transport.rank
        assert part.hosts == tuple(transport.hosts[rank] for rank in members)
        incoming = np.zeros(3)
        after, before = (part.rank + 1) % part.size, (part.rank - 1) % part.size
        part.exchange(coded(part.rank, 3), after, incoming, before)
        assert np.array_equal(incoming, coded((part.rank - 1) % part.size, 3))
        alone = transport.split(None if transport.rank else 0)
        assert (alone is None) == (transport.rank > 0)
        transport.barrier()

    def law_native_all_reduce_adds_and_takes_the_maximum(self, transport):
        for dtype in sorted({*transport.native_dtypes} - {"int8", "uint8"}):
            for count in (0, 1, 1001):
                stack = np.stack([coded(rank, count, dtype) for rank in range(transport.size)])
                mine = coded(transport.rank, count, dtype)
                native_all_reduce(transport, mine)
                assert np.array_equal(mine, stack.sum(axis=0))
                mine = coded(transport.rank, count, dtype)
                request = bind_native_all_reduce(transport, mine, "maximum").start()
                while not request.test():
                    pass
                assert np.array_equal(mine, stack.max(axis=0))

    def law_native_collectives_are_bound_once_and_run_again(self, transport):
        """Of the library's own: every operation on an empty, a short and a long array, in two runs of other numbers."""
        n, rank = transport.size, transport.rank
        for count in (0, n, 1001 * n):
            chunk, mine = count // n, slice(rank * (count // n), (rank + 1) * (count // n))
            for operation in NATIVE_OPERATIONS:
                array = np.empty(count)
                other = np.empty(
                    count
                    if operation == "all-to-all"
                    else chunk
                    if operation == "reduce-scatter"
                    else 0
                )
                run = bind_native(transport, operation, array, other)
                for again in range(2):
                    stack = np.stack([coded(each + again, count) for each in range(n)])
                    (other if operation == "all-to-all" else array)[:] = stack[rank]
                    run()
                    total, bounds = stack.sum(axis=0), range(0, count, max(1, chunk))
                    right = {
                        "broadcast": stack[0],
                        "reduce": total if rank == 0 else array,
                        "reduce-scatter": total[mine],
                        "all-gather": [stack[each][i : i + chunk] for each, i in enumerate(bounds)],
                        "all-to-all": [stack[each][mine] for each in range(n)],
                    }[operation]
                    found = other if operation == "reduce-scatter" else array
                    assert np.array_equal(found, np.reshape(right, -1)), (operation, count, again)

    def law_allocated_buffers_are_zero_and_aligned(self, transport):
        for count in (0, 1, 1001):
            buffer = transport.allocate(count, "float32")
            assert buffer.shape == (count,)
            assert not buffer.any()
            assert count == 0 or buffer.ctypes.data % 64 == 0

    def law_traffic_counts_what_was_sent_by_hand(self, transport):
        messages, nbytes = transport.traffic.messages, transport.traffic.nbytes
        transport.exchange(np.ones(7), transport.rank, np.ones(7), transport.rank)
        transport.exchange(np.ones(0), transport.rank, np.ones(0), transport.rank)
        transport.barrier()
        transport.gather_text("not counted")
        native_all_reduce(transport, np.ones(3))
        assert (transport.traffic.messages - messages, transport.traffic.nbytes - nbytes) == (2, 56)

    def law_claimed_tags_agree_and_differ(self, transport):
        tags = [transport.claim_tag() for _ in range(3)]
        assert len(set(tags)) == 3
        assert transport.gather_text(tags) == [tags] * transport.size

    def law_what_cannot_be_a_message_is_refused(self, transport):
        strided = np.ones((4, 4))[:, :2]
        text = raises_comm_error(lambda: transport.start_send(strided, 0))
        assert f"rank {transport.rank}: a message is one contiguous block" in text
        assert "numpy.ascontiguousarray" in text
        assert f"peer {transport.size}" in raises_comm_error(
            lambda: transport.start_recv(np.ones(1), transport.size)
        )
        assert "is not among ranks" in raises_comm_error(
            lambda: transport.start_send(np.ones(1), -1)
        )

    def law_a_message_of_another_size_is_an_error_at_its_receiver(self, transport):
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        receive = transport.start_recv(np.zeros(5), before, tag=9)
        send = transport.start_send(np.zeros(4), after, tag=9)
        text = raises_comm_error(receive.wait)
        assert f"rank {transport.rank}" in text
        assert "Make both arrays of" in text
        raises_comm_error(send.wait) if type(
            transport
        ).__name__ == "ThreadTransport" else send.wait()
        transport.barrier()


def few_and(*many: int):
    """Parametrizes a test with `sizes`, numbers of ranks: 1 to 3 among the fast tests, `many` among the slow ones. Every
    law is for all of them.
    """
    slow = pytest.param(many, marks=pytest.mark.slow)
    sizes = pytest.mark.parametrize("sizes", [(1, 2, 3), slow], ids=["few", "many"])
    return lambda test: pytest.mark.product(sizes(test))


def laws_of(cls) -> list[str]:
    """Names of the laws of a class, in the order of the file."""
    return [name for name in dir(cls) if name.startswith("law_")]
