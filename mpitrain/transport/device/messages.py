"""Messages of GPU memory over a transport of host memory: the DeviceTransport.

Arrays in device memory go through one of two strategies. `Direct` passes the device pointer to a
CUDA-aware MPI. `staging.Staged` copies through pinned host memory. Arrays in host memory go
straight to the host transport.

Work on the device that wrote an array must end before a message reads it. Work that still reads the
target of a receive must end before the message arrives. A copy waits for that work on the device.
MPI does not know streams. Before MPI gets a pointer, the host therefore waits for all work started
so far on the current stream.

A reduction of many messages runs on a stream of its own (`aside`). Its copies and sums wait once
for the computation before it. The computation after it waits for them. So no step of a ring waits
for computation that runs meanwhile:

    computation  ... writes the array |  other work      | reads the sum ...
                                begin v                  ^ end
    messages                          | copies and sums  |
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any, Self

from mpitrain.machine.backend import Copy, DeviceBackend, on_device
from mpitrain.transport.base import Transport
from mpitrain.transport.forwarding import Forwarding
from mpitrain.transport.requests import Request, Several


class UnderWay:
    """A record of device work in progress: a wait for the device is no deadlock."""

    def __init__(self) -> None:
        self._is_any = False

    def ended(self, copies: Sequence[Copy]) -> bool:
        """Return whether all copies have ended; if not, record that the device is still busy."""
        if all(copy.test() for copy in copies):
            return True
        self._is_any = True
        return False

    def wait_until(
        self, host: Transport, done: Callable[[], bool], pause: float, what: Any
    ) -> None:
        """Implement `Transport.wait_until` over the host transport.

        The host transport reports a deadlock if no message can end a wait. So its wait returns
        whenever the device is busy, and this loop starts it again.
        """
        ended = False

        def goes_on() -> bool:
            nonlocal ended
            self._is_any = False
            ended = done()
            return ended or self._is_any

        while not ended:
            host.wait_until(goes_on, pause, what)


class Aside:
    """The message stream of a device, for a reduction of an array in device memory."""

    def __init__(self, backend: DeviceBackend, under_way: UnderWay):
        self._backend, self._under_way = backend, under_way
        self._before: list[Copy] = []

    def begin(self) -> None:
        """Record an event after the computation launched so far.

        Work on the message stream may start only after this event: when `is_ready` returns True, or
        after `wait`.
        """
        self._before = [self._backend.so_far()]

    def is_ready(self) -> bool:
        """Return whether the computation before `begin` has ended. Never blocks."""
        return self._under_way.ended(self._before)

    def has_passed(self, event: Copy) -> bool:
        """Return whether the device has passed an event. Never blocks."""
        return self._under_way.ended([event])

    def wait(self) -> None:
        """Block until the computation before `begin` has ended."""
        for before in self._before:
            before.wait()

    def here(self) -> AbstractContextManager[Any]:
        """Return a context in which work starts on the message stream."""
        return self._backend.aside()

    def end(self) -> None:
        """Make the computation started from now on wait for the message stream."""
        with self.here():
            after = self._backend.so_far()
        self._backend.follow(after)


class Carrier(Forwarding):
    """A transport of arrays in device memory: the base of both strategies.

    under_way  the work that the device has in progress for messages

    All results of `over` share it, and a strategy's staging memory.
    """

    def __init__(self, host: Transport, backend: DeviceBackend):
        super().__init__(host)
        self._backend, self.under_way = backend, UnderWay()

    def over(self, inner: Transport) -> Self:
        other = copy(self)
        Forwarding.__init__(other, inner)
        return other

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        """Poll until `done`, which may poll messages of host memory, too."""
        self.under_way.wait_until(self._inner, done, pause, what)


class Direct(Carrier):
    """The strategy that passes device pointers to a CUDA-aware transport."""

    def start_send(self, array: Any, to: int, tag: int = 0) -> Request:
        self._backend.synchronize()
        return self._inner.start_send(array, to, tag)

    def start_recv(self, array: Any, source: int, tag: int = 0) -> Request:
        self._backend.synchronize()
        return self._inner.start_recv(array, source, tag)

    def start_recv_any(self, array: Any, tag: int = 0) -> Request:
        self._backend.synchronize()
        return self._inner.start_recv_any(array, tag)

    def native_all_reduce(self, array: Any, op: str = "add") -> None:
        self._backend.synchronize()
        self._inner.native_all_reduce(array, op)


class DeviceTransport(Forwarding):
    """A Transport for messages in device and host memory; its `allocate` returns device memory.

    `hosts`, tags, traffic and windows are the host transport's. A staged message counts in
    `traffic` once per piece. `backend` manages the device memory. Only the main thread may call: it
    owns the streams and the staging memory.

    unshared  the reason why these ranks cannot use each other's device memory, "" if they can; None
              until collectives have tried
    refusals  such reasons of all groups of this rank
    is_whole  whether these are all ranks of the transport from which this one was split
    """

    def __init__(
        self,
        host: Transport,
        backend: DeviceBackend,
        carrier: Carrier,
        whole: "DeviceTransport | None" = None,
    ):
        super().__init__(host)
        self.refusals: list[str] = whole.refusals if whole else []
        self.is_whole: bool = whole is None or (whole.is_whole and host.size == whole.size)
        self.backend, self._carrier = backend, carrier
        self.admits_threads, self.allocates_on_device = False, True
        self.unshared: str | None = None

    def over(self, inner: Transport) -> "DeviceTransport":
        return DeviceTransport(inner, self.backend, self._carrier.over(inner), self)

    def aside(self, array: Any) -> Aside | None:
        """Return the message stream for a reduction of `array`; None in host memory, where all work
        is in order.
        """
        return Aside(self.backend, self._carrier.under_way) if on_device(array) else None

    def start_send(self, array: Any, to: int, tag: int = 0) -> Request:
        return self._way(array).start_send(array, to, tag)

    def start_recv(self, array: Any, source: int, tag: int = 0) -> Request:
        return self._way(array).start_recv(array, source, tag)

    def start_recv_any(self, array: Any, tag: int = 0) -> Request:
        return self._way(array).start_recv_any(array, tag)

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        self._carrier.wait_until(done, pause, what)

    def allocate(self, count: int, dtype: Any) -> Any:
        return self.backend.zeros(count, dtype)

    def native_all_reduce(self, array: Any, op: str = "add") -> None:
        self._way(array).native_all_reduce(array, op)

    def start_native_all_reduce(self, array: Any, op: str = "add") -> Request:
        if not on_device(array):
            return self._inner.start_native_all_reduce(array, op)
        # The call blocks: Open MPI cannot begin an all-reduce on GPU memory (open-mpi/ompi#12045).
        # A request for no message is complete at once.
        self._carrier.native_all_reduce(array, op)
        return Several([])

    def _way(self, array: Any) -> Transport:
        return self._carrier if on_device(array) else self._inner
