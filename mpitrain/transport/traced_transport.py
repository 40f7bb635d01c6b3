"""A transport whose messages and waits a recorder notes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.trace.recorder import Recorder
from mpitrain.trace.ring_buffer import RECEIVE, REDUCTION, SEND
from mpitrain.transport.base import Request, Transport


class Recorded(Transport):
    """A Transport over another one. A message is called what the recorder said when its tag was claimed.

    A message lasts until this rank has seen it complete. Whatever makes the recorder's thread stand still is a wait: for the
    peer of a message, or for all ranks.
    """

    def __init__(self, inner: Transport, recorder: Recorder):
        self._inner, self.recorder = inner, recorder
        self.rank, self.size, self.hosts, self.members = (
            inner.rank,
            inner.size,
            inner.hosts,
            inner.members,
        )
        self.traffic, self.windows, self.tenants = inner.traffic, inner.windows, inner.tenants
        self.native_dtypes, self.admits_threads = inner.native_dtypes, inner.admits_threads
        self.allocates_on_device = inner.allocates_on_device
        self._named: dict[int, int] = {}
        self._messages, self._barrier, self._text, self._native = (
            recorder.name(what, inner.members)
            for what in ("messages", "a barrier", "words of all ranks", "MPI's all-reduce")
        )

    def aside(self, array: Any) -> Any:
        return self._inner.aside(array)

    def claim_tag(self) -> int:
        tag = self._inner.claim_tag()
        self._named[tag] = self.recorder.name(
            self.recorder.naming, self.members if self.recorder.naming else ()
        )
        return tag

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        recorder, peer = self.recorder, self._member(to)
        name = self._named.get(tag) or recorder.topic
        span = recorder.begin(SEND, name, 0, -1, recorder.micro, array.nbytes, peer, tag)
        return _Noted(self._inner.start_send(array, to, tag), recorder, span, name, peer)

    def start_recv(self, array: np.ndarray, source: int, tag: int = 0) -> Request:
        recorder, peer = self.recorder, self._member(source)
        name = self._named.get(tag) or recorder.topic
        span = recorder.begin(RECEIVE, name, 0, -1, recorder.micro, array.nbytes, peer, tag)
        return _Noted(self._inner.start_recv(array, source, tag), recorder, span, name, peer)

    def start_recv_any(self, array: np.ndarray, tag: int = 0) -> Request:
        recorder = self.recorder
        name = self._named.get(tag) or recorder.topic
        span = recorder.begin(RECEIVE, name, 0, -1, recorder.micro, array.nbytes, -1, tag)
        return _Noted(self._inner.start_recv_any(array, tag), recorder, span, name, -1)

    def _member(self, rank: int) -> int:
        return (
            self.members[rank] if 0 <= rank < self.size else -1
        )  # the transport beneath refuses what is no rank

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        wait = self.recorder.wait(self._messages)
        self._inner.wait_until(done, pause, what)
        self.recorder.go_on(wait)

    def admit_thread(self) -> None:
        self._inner.admit_thread()

    def dismiss_thread(self) -> None:
        self._inner.dismiss_thread()

    def barrier(self) -> None:
        wait = self.recorder.wait(self._barrier)
        self._inner.barrier()
        self.recorder.go_on(wait)

    def split(self, color: int | None, key: int = 0) -> "Recorded | None":
        part = self._inner.split(color, key)
        return None if part is None else Recorded(part, self.recorder)

    def gather_text(self, value: Any) -> list[Any]:
        wait = self.recorder.wait(self._text)
        found = self._inner.gather_text(value)
        self.recorder.go_on(wait)
        return found

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        return self._inner.allocate(count, dtype)

    def close(self) -> None:
        self._inner.close()

    def native_all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        wait = self.recorder.wait(self._native)
        self._inner.native_all_reduce(array, op)
        self.recorder.go_on(wait)

    def start_native_all_reduce(self, array: np.ndarray, op: str = "add") -> Request:
        span = self.recorder.begin(REDUCTION, self._native, nbytes=array.nbytes)
        return _Noted(
            self._inner.start_native_all_reduce(array, op), self.recorder, span, self._native, -1
        )

    def bind_native(
        self, operation: str, array: np.ndarray, other: np.ndarray
    ) -> Callable[[], None]:
        return self._inner.bind_native(operation, array, other)

    def abort(self, message: str) -> None:
        self._inner.abort(message)


class _Noted:
    """A request whose record ends when it is seen complete."""

    __slots__ = ("_inner", "_name", "_peer", "_recorder", "_span")

    def __init__(self, inner: Request, recorder: Recorder, span: int, name: int, peer: int):
        self._inner, self._recorder, self._span, self._name, self._peer = (
            inner,
            recorder,
            span,
            name,
            peer,
        )

    @property
    def source(self) -> int:
        return self._inner.source

    def test(self) -> bool:
        if not self._inner.test():
            return False
        self._end()
        return True

    def wait(self) -> None:
        wait = self._recorder.wait(self._name, self._peer, self._span)
        self._inner.wait()
        self._recorder.go_on(wait)
        self._end()

    def _end(self) -> None:
        if self._span:
            self._recorder.end(self._span)
            self._span = 0

    def __str__(self) -> str:
        return str(self._inner)


def recorded(connect: Callable[[], Transport], recorder: Recorder | None) -> Transport:
    """The transport that this makes, over which everything is noted if there is a recorder; and that it is being made."""
    if recorder is None:
        return connect()
    with recorder.pausing("finding the other ranks"):
        found = connect()
    return Recorded(found, recorder)
