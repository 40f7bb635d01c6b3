"""Messages of GPU memory over a transport of host memory: arrays of a device take a carrier, all else goes straight on.

A carrier is how a device's array gets into a message: `Direct` hands its pointer to an MPI that can read GPU memory,
`staging.Staged` copies through host memory. Whatever wrote an array, or still reads the one that a receive will overwrite, must
have ended before a message touches it. A copy waits for that on the device. MPI knows nothing of streams: before it is handed a
pointer, the host waits for what was started so far on the current stream, and nobody else has to.

A reduction of many messages has a stream of its own, beside the computation: its copies and sums wait once for what was computed
before it, and what is computed after it waits for them (`aside`). So no step of a ring waits for what is computed meanwhile.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from mpitrain.machine.backend import Copy, DeviceBackend, on_device
from mpitrain.transport.base import Request, Transport


class Carrier(Protocol):
    """Moves arrays in device memory. Both ends of a message lie in device memory."""

    under_way: "UnderWay"
    """What the device has under way for it; shared by all that come from one `over`."""

    def over(self, host: Transport) -> "Carrier":
        """The same way, over another transport."""

    def start_send(self, array: Any, to: int, tag: int) -> Request:
        """As Transport.start_send."""

    def start_recv(self, array: Any, source: int, tag: int) -> Request:
        """As Transport.start_recv."""

    def start_recv_any(self, array: Any, tag: int) -> Request:
        """As Transport.start_recv_any."""

    def wait_until(self, done: Callable[[], bool], pause: float, what: Any) -> None:
        """As Transport.wait_until; `done` may poll messages of the host's memory, too."""

    def native_all_reduce(self, array: Any, op: str) -> None:
        """As Transport.native_all_reduce."""


class UnderWay:
    """Asks what a device has under way whether it has ended, and notes that it has not: a wait for that is no deadlock."""

    def __init__(self) -> None:
        self._is_any = False

    def ended(self, copies: Sequence[Copy]) -> bool:
        """Whether all have."""
        if all(copy.test() for copy in copies):
            return True
        self._is_any = True
        return False

    def wait_until(
        self, host: Transport, done: Callable[[], bool], pause: float, what: Any
    ) -> None:
        """As Transport.wait_until of the host's, which takes a wait that no message can end for a deadlock."""
        ended = False

        def goes_on() -> bool:
            nonlocal ended
            self._is_any = False
            ended = done()
            return ended or self._is_any

        while not ended:
            host.wait_until(goes_on, pause, what)


class Aside:
    """The stream of a device's messages, for a reduction that lies in its memory."""

    def __init__(self, backend: DeviceBackend, under_way: UnderWay):
        self._backend, self._under_way = backend, under_way
        self._before: list[Copy] = []

    def begin(self) -> None:
        """Note what was computed so far: nothing may be started on the stream before that has ended."""
        self._before = [self._backend.so_far()]

    def is_ready(self) -> bool:
        """Whether what was computed before `begin` has ended, so that no start has to wait; never blocks."""
        return self._under_way.ended(self._before)

    def wait(self) -> None:
        """Block until it is ready."""
        for before in self._before:
            before.wait()

    def here(self) -> AbstractContextManager[Any]:
        """Within it, work is started on that stream."""
        return self._backend.aside()

    def end(self) -> None:
        """Have what is computed from now on wait for the stream."""
        with self.here():
            after = self._backend.so_far()
        self._backend.follow(after)


class Direct:
    """Hands device pointers to the transport below."""

    def __init__(self, host: Transport, backend: DeviceBackend):
        self._host, self._backend, self.under_way = host, backend, UnderWay()

    def over(self, host: Transport) -> "Direct":
        part = Direct(host, self._backend)
        part.under_way = self.under_way
        return part

    def start_send(self, array: Any, to: int, tag: int) -> Request:
        self._backend.synchronize()
        return self._host.start_send(array, to, tag)

    def start_recv(self, array: Any, source: int, tag: int) -> Request:
        self._backend.synchronize()
        return self._host.start_recv(array, source, tag)

    def start_recv_any(self, array: Any, tag: int) -> Request:
        self._backend.synchronize()
        return self._host.start_recv_any(array, tag)

    def wait_until(self, done: Callable[[], bool], pause: float, what: Any) -> None:
        self.under_way.wait_until(self._host, done, pause, what)

    def native_all_reduce(self, array: Any, op: str) -> None:
        self._backend.synchronize()
        self._host.native_all_reduce(array, op)


class DeviceTransport(Transport):
    """A Transport whose messages may lie in device memory too, and whose `allocate` gives such memory.

    `hosts`, tags, traffic and windows are those of the transport below. A message that is staged counts in `traffic` as
    the pieces it travels in. `backend` is of the device's memory. No other thread should call: streams and staging memory
    are the main thread's.
    """

    admits_threads = False
    allocates_on_device = True

    def __init__(self, host: Transport, backend: DeviceBackend, carrier: Carrier):
        self._host, self.backend, self._carrier = host, backend, carrier
        self.rank, self.size, self.hosts, self.members = (
            host.rank,
            host.size,
            host.hosts,
            host.members,
        )
        self.traffic, self.windows, self.native_dtypes = (
            host.traffic,
            host.windows,
            host.native_dtypes,
        )
        self.tenants, self.recorder = host.tenants, host.recorder

    def aside(self, array: Any) -> Aside | None:
        """What orders a reduction of the array and the computation; None in host memory, where all is in order."""
        return Aside(self.backend, self._carrier.under_way) if on_device(array) else None

    def claim_tag(self) -> int:
        return self._host.claim_tag()

    def start_send(self, array: Any, to: int, tag: int = 0) -> Request:
        return self._way(array).start_send(array, to, tag)

    def start_recv(self, array: Any, source: int, tag: int = 0) -> Request:
        return self._way(array).start_recv(array, source, tag)

    def start_recv_any(self, array: Any, tag: int = 0) -> Request:
        return self._way(array).start_recv_any(array, tag)

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        self._carrier.wait_until(done, pause, what)

    def admit_thread(self) -> None:
        self._host.admit_thread()

    def dismiss_thread(self) -> None:
        self._host.dismiss_thread()

    def barrier(self) -> None:
        self._host.barrier()

    def split(self, color: int | None, key: int = 0) -> "DeviceTransport | None":
        part = self._host.split(color, key)
        return (
            None if part is None else DeviceTransport(part, self.backend, self._carrier.over(part))
        )

    def gather_text(self, value: Any) -> list[Any]:
        return self._host.gather_text(value)

    def allocate(self, count: int, dtype: Any) -> Any:
        return self.backend.zeros(count, dtype)

    def close(self) -> None:
        self._host.close()

    def native_all_reduce(self, array: Any, op: str = "add") -> None:
        self._way(array).native_all_reduce(array, op)

    def start_native_all_reduce(self, array: Any, op: str = "add") -> Request:
        if not on_device(array):
            return self._host.start_native_all_reduce(array, op)
        self._carrier.native_all_reduce(
            array, op
        )  # Open MPI cannot begin one on GPU memory (open-mpi/ompi#12045)
        return _Ended()

    def bind_native(self, operation: str, array: Any, other: Any) -> Callable[[], None]:
        return self._host.bind_native(operation, array, other)

    def abort(self, message: str) -> None:
        self._host.abort(message)

    def _way(self, array: Any) -> Any:
        return self._carrier if on_device(array) else self._host


class _Ended:
    """A request that was complete when it was made."""

    source = -1

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        pass
