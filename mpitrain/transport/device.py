"""Messages of GPU memory over a transport of host memory: arrays of a device take a carrier, all else goes straight on.

A carrier is how a device's array gets into a message: `Direct` hands its pointer to an MPI that can read GPU memory,
`staging.Staged` copies through host memory. MPI knows nothing of streams: whatever wrote an array, or still reads the one
that a receive will overwrite, must have ended before MPI or a copy beside the stream touches it. So both carriers wait
for the current stream, once, as the first thing that a start does, and nobody else has to.
"""

from collections.abc import Callable
from typing import Any, Protocol

from mpitrain.machine.backend import DeviceBackend, on_device
from mpitrain.transport.base import Request, Transport


class Carrier(Protocol):
    """Moves arrays in device memory. Both ends of a message lie in device memory."""

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


class Direct:
    """Hands device pointers to the transport below."""

    def __init__(self, host: Transport, backend: DeviceBackend):
        self._host, self._backend = host, backend

    def over(self, host: Transport) -> "Direct":
        return Direct(host, self._backend)

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
        self._host.wait_until(done, pause, what)

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

    def __init__(self, host: Transport, backend: DeviceBackend, carrier: Carrier):
        self._host, self.backend, self._carrier = host, backend, carrier
        self.rank, self.size, self.hosts, self.members = host.rank, host.size, host.hosts, host.members
        self.traffic, self.windows, self.native_dtypes = host.traffic, host.windows, host.native_dtypes
        self.tenants, self.recorder = host.tenants, host.recorder

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
        return None if part is None else DeviceTransport(part, self.backend, self._carrier.over(part))

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
        self._carrier.native_all_reduce(array, op)  # Open MPI cannot begin one on GPU memory (open-mpi/ompi#12045)
        return _Ended()

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
