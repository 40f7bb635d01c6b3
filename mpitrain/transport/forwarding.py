"""The base of transport decorators: it passes every call on to the transport that it wraps."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.transport.base import Transport
from mpitrain.transport.requests import Request


class Forwarding(Transport):
    """A Transport around another one, the base of all decorators.

    A decorator defines `over`, and overrides the calls that it changes. The blocking calls with a
    body in the protocol use the decorator's own `start_send`, `start_recv` and `wait_until`.
    """

    def __init__(self, inner: Transport):
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.hosts, self.members = inner.hosts, inner.members
        self.traffic, self.windows, self.tenants = inner.traffic, inner.windows, inner.tenants
        self.recorder, self.native_dtypes = inner.recorder, inner.native_dtypes
        self.admits_threads = inner.admits_threads
        self.allocates_on_device = inner.allocates_on_device

    def aside(self, array: Any) -> Any:
        return self._inner.aside(array)

    def claim_tag(self) -> int:
        return self._inner.claim_tag()

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        return self._inner.start_send(array, to, tag)

    def start_recv(self, array: np.ndarray, source: int, tag: int = 0) -> Request:
        return self._inner.start_recv(array, source, tag)

    def start_recv_any(self, array: np.ndarray, tag: int = 0) -> Request:
        return self._inner.start_recv_any(array, tag)

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        self._inner.wait_until(done, pause, what)

    def admit_thread(self) -> None:
        self._inner.admit_thread()

    def dismiss_thread(self) -> None:
        self._inner.dismiss_thread()

    def barrier(self) -> None:
        self._inner.barrier()

    def split(self, color: int | None, key: int = 0) -> Transport | None:
        part = self._inner.split(color, key)
        return None if part is None else self.over(part)

    def over(self, inner: Transport) -> Transport:
        """Return the same decorator around a transport that was split from its own."""
        raise NotImplementedError

    def gather_text(self, value: Any) -> list[Any]:
        return self._inner.gather_text(value)

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        return self._inner.allocate(count, dtype)

    def close(self) -> None:
        self._inner.close()

    def native_all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        self._inner.native_all_reduce(array, op)

    def start_native_all_reduce(self, array: np.ndarray, op: str = "add") -> Request:
        return self._inner.start_native_all_reduce(array, op)

    def bind_native(
        self, operation: str, array: np.ndarray, other: np.ndarray
    ) -> Callable[[], None]:
        return self._inner.bind_native(operation, array, other)

    def abort(self, message: str, exit_code: int = 1) -> None:
        self._inner.abort(message, exit_code)


class Polled(Forwarding):
    """A Transport that admits no second thread, nor do the transports split from it."""

    def __init__(self, inner: Transport):
        super().__init__(inner)
        self.admits_threads = False

    def over(self, inner: Transport) -> "Polled":
        return Polled(inner)
