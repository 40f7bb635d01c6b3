"""What a transport around GPU memory must do, whatever the way its messages take. A GPU is played by tests.fakes.cupy."""

import numpy as np

from mpitrain.collectives.compression import bind_lossy
from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.group import Group, bind, bind_all_to_all
from mpitrain.collectives.selection import table as algorithm_table
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import on_device
from mpitrain.machine.cuda import CudaBackend
from mpitrain.transport.device import Direct, Staged
from tests.fakes import cupy
from tests.laws.transport import coded, first_complete, raises_comm_error

PIECE = 64
"""Elements of a piece, so that short messages travel in several."""

CARRIERS = {"direct": Direct, "staged": lambda host, backend: Staged(host, backend, PIECE * 8)}


def next_complete(transport, requests):
    """The name of a request that is complete."""
    return list(requests)[first_complete(transport, list(requests.values()))]


class DeviceLaws:
    """A law is a function of one rank's host transport, the name of the carrier, and the backend."""

    def device(self, host, carrier, backend):
        cupy.log().clear()
        return CARRIERS[carrier](host, backend)

    def law_messages_of_any_length_arrive_untouched_before_their_time(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        after, before = (host.rank + 1) % host.size, (host.rank - 1) % host.size
        for count in (0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5):
            outgoing = backend.from_host(
                coded(host.rank, count)
            )  # written by work that nobody has waited for
            incoming = backend.zeros(count, "float64")
            outgoing += outgoing
            transport.exchange(outgoing, after, incoming, before)
            assert np.array_equal(backend.to_host(incoming), 2 * coded(before, count)), count
        assert cupy.faults == []

    def law_a_start_waits_on_the_host_only_to_pass_device_pointers(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        after, before = (host.rank + 1) % host.size, (host.rank - 1) % host.size
        outgoing, incoming = (
            backend.from_host(coded(host.rank, 3 * PIECE)),
            backend.zeros(3 * PIECE, "float64"),
        )
        starts = []
        for start in (
            lambda: transport.start_recv(incoming, before),
            lambda: transport.start_send(outgoing, after),
        ):
            cupy.log().clear()
            starts.append((start(), list(cupy.log())))
        for request, _ in starts:
            request.wait()
        received, sent = (seen for _, seen in starts)
        if carrier == "direct":
            for seen in (received, sent):
                assert seen[0] == ("synchronize",) and {event for event, _ in seen[1:]} == {
                    "pointer"
                }
        else:
            assert sent == [("copy", PIECE * 8)] * 3 and received == [], (
                "the host never sees a device pointer, nor waits"
            )
        assert (
            np.array_equal(backend.to_host(incoming), coded(before, 3 * PIECE))
            and cupy.faults == []
        )

    def law_no_step_of_a_reduction_waits_for_what_is_computed_meanwhile(
        self, host, carrier, backend
    ):
        transport = self.device(host, carrier, backend)
        for algorithm in (
            "ring",
            "recursive-doubling",
        ):  # the last thing that a rank does: receive, add
            self.reduce_beside_computation(transport, backend, algorithm)

    def reduce_beside_computation(self, transport, backend, algorithm):
        array, other = (
            backend.from_host(coded(transport.rank, 5 * PIECE + 3)),
            backend.zeros(7, "float64"),
        )
        array += array  # which must have ended before the first message
        reduction = bind(transport, array, algorithm=algorithm)
        reduction.start()
        while not reduction.poll() and not reduction._requests:
            pass
        other += other  # another layer is computed meanwhile
        computing = list(cupy.get_current_stream()._pending)
        transport.wait_until(reduction.poll)
        left = cupy.get_current_stream()._pending
        assert all(any(work is pending for pending in left) for work in computing[-2:]), (
            "a step has waited for the computation"
        )
        array += array  # which must wait for the last sum, though nobody on the host did
        total = 4 * sum(coded(rank, 5 * PIECE + 3) for rank in range(transport.size))
        assert np.array_equal(backend.to_host(array), total) and cupy.faults == [], algorithm

    def law_long_messages_of_one_tag_keep_their_order(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        after, before = (host.rank + 1) % host.size, (host.rank - 1) % host.size
        counts = (2 * PIECE + 1, 5, 3 * PIECE)
        incoming = [backend.zeros(count, "float64") for count in counts]
        requests = [transport.start_recv(array, before, 7) for array in incoming]
        requests += [
            transport.start_send(backend.from_host(coded(host.rank, n) + n), after, 7)
            for n in counts
        ]
        while not all(request.test() for request in requests):
            pass
        for array, count in zip(incoming, counts, strict=True):
            assert np.array_equal(backend.to_host(array), coded(before, count) + count)
        assert requests[0].source == before

    def law_a_started_message_needs_nobody_to_move_it_on(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        after, before = (host.rank + 1) % host.size, (host.rank - 1) % host.size
        incoming = backend.zeros(5 * PIECE, "float64")
        receive = transport.start_recv(incoming, before)
        send = transport.start_send(backend.from_host(coded(host.rank, 5 * PIECE)), after)
        transport.barrier()
        if host.rank == 0:
            send.wait()
        transport.barrier()
        receive.wait()
        send.wait()
        assert np.array_equal(backend.to_host(incoming), coded(before, 5 * PIECE))

    def law_receive_from_any_takes_one_piece(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        send = transport.start_send(backend.from_host(coded(host.rank, PIECE)), 0, 3)
        for _ in range(host.size if host.rank == 0 else 0):
            incoming = backend.zeros(PIECE, "float64")
            request = transport.start_recv(incoming, None, 3)
            request.wait()
            assert np.array_equal(backend.to_host(incoming), coded(request.source, PIECE))
        send.wait()
        if carrier == "staged":
            text = raises_comm_error(
                lambda: transport.start_recv(backend.zeros(PIECE + 1, "float64"), None, 3)
            )
            assert (
                f"rank {host.rank}: a receive from any rank holds at most 512" in text
                and "520" in text
            )

    def law_messages_of_a_device_and_of_the_host_are_polled_together(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        after, before = (host.rank + 1) % host.size, (host.rank - 1) % host.size
        header, incoming = np.zeros(2), backend.zeros(3 * PIECE + 1, "float64")
        requests = {
            "array": transport.start_recv(incoming, before, 5),
            "header": transport.start_recv(header, None, 6),
        }
        requests["array sent"] = transport.start_send(
            backend.from_host(coded(host.rank, 3 * PIECE + 1)), after, 5
        )
        transport.barrier()  # ranks then wait for copies alone, which must not look like a deadlock
        del requests[next_complete(transport, {name: requests[name] for name in ("array",)})]
        assert np.array_equal(backend.to_host(incoming), coded(before, 3 * PIECE + 1))
        requests["header sent"] = transport.start_send(np.full(2, host.rank + 1.0), after, 6)
        source = requests["header"]
        while requests:
            del requests[next_complete(transport, requests)]
        assert source.source == before and np.array_equal(header, np.full(2, before + 1.0))

    def law_all_reduces_are_exact_run_after_run(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        for algorithm in algorithm_table.choices("allreduce"):
            if algorithm == "shared":
                continue  # It sends no messages; `test_shared_gpu.py` and `test_cuda_ipc.py` prove it.
            for count in (0, 1, 5 * PIECE + 3):
                array = backend.zeros(count, "float64")
                reduction = bind(transport, array, algorithm=algorithm)
                for run in range(3):
                    array[...] = backend.from_host(coded(host.rank, count) + run)
                    reduction.run()
                    total = sum(coded(rank, count) + run for rank in range(host.size))
                    assert np.array_equal(backend.to_host(array), total), (algorithm, count)
        assert cupy.faults == []

    def law_staging_memory_is_used_again(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        after, before = (host.rank + 1) % host.size, (host.rank - 1) % host.size
        outgoing, incoming = (
            backend.zeros(3 * PIECE, "float64"),
            backend.zeros(3 * PIECE, "float64"),
        )
        for _ in range(20):
            transport.exchange(outgoing, after, incoming, before)
        transport.barrier()
        if carrier == "staged":
            buffers = transport._buffers
            assert buffers.allocations <= 2 and buffers.live == 0

    def law_all_to_all_and_split_work_on_device_memory(self, host, carrier, backend):
        transport = self.device(host, carrier, backend).split(0, key=-host.rank)
        n = transport.size
        outgoing = backend.from_host(np.repeat(np.arange(n) + 10.0 * transport.rank, PIECE + 1))
        incoming = backend.zeros(n * (PIECE + 1), "float64")
        bind_all_to_all(transport, outgoing, incoming).run()
        assert np.array_equal(
            backend.to_host(incoming), np.repeat(10.0 * np.arange(n) + transport.rank, PIECE + 1)
        )
        counts = [PIECE + 1 if rank == 0 else 0 for rank in range(n)]
        received, _ = Group(transport).all_to_all(outgoing[: PIECE + 1], counts)
        mine = 10.0 * np.arange(n if transport.rank == 0 else 0)
        assert np.array_equal(backend.to_host(received), np.repeat(mine, PIECE + 1))

    def law_host_arrays_go_straight_on(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        control = np.full(4, host.rank + 1.0)
        bind(transport, control).run()
        assert np.array_equal(control, np.full(4, host.size * (host.size + 1) / 2))
        assert cupy.log() == []
        assert on_device(transport.allocate(3, "float32"))

    def law_formats_whose_residuals_are_the_host_s_are_refused_with_a_way_out(
        self, host, carrier, backend
    ):
        transport = self.device(host, carrier, backend)
        for name in ("topk:0.1", "powersgd:1"):
            try:
                bind_lossy(transport, backend.zeros(8, "float32"), parse_wire(name))
            except ConfigError as error:
                assert error.agreed and "in a GPU's" in str(error) and "Use wire fp16" in str(error)
            else:
                raise AssertionError(f"{name} has nowhere to keep what it did not send")
        bind_lossy(
            transport, np.ones(8, np.float32), parse_wire("topk:0.1")
        ).run()  # the host's arrays may travel so

    def law_what_cannot_be_a_message_is_refused(self, host, carrier, backend):
        transport = self.device(host, carrier, backend)
        assert "is not among ranks" in raises_comm_error(
            lambda: transport.start_send(backend.zeros(3, "float64"), host.size)
        )
        strided = backend.zeros(8, "float64").reshape(4, 2)[:, :1]
        assert "one contiguous block" in raises_comm_error(lambda: transport.start_recv(strided, 0))


def cuda_backend() -> CudaBackend:
    """A backend on the fake GPU: for tests that have put tests.fakes.cupy in the place of cupy."""
    return CudaBackend()
