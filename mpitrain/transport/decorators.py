"""Decorators of transports: the base, which passes every call on, and the one that keeps a trace."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.trace.recorder import LIBRARY_CALLS, MESSAGES, RECEIVE, REDUCTION, SEND, Recorder
from mpitrain.transport.base import Request, Transport


def _passed_on(name: str) -> Any:
    """Return the method of a decorator that calls the inner transport's method of this name."""

    def call(self: "Forwarding", *arguments: Any, **named: Any) -> Any:
        return getattr(self._inner, name)(*arguments, **named)

    return call


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
        self.allocates_on_device, self.needs_all = inner.allocates_on_device, inner.needs_all

    aside = _passed_on("aside")
    claim_tag = _passed_on("claim_tag")
    start_send = _passed_on("start_send")
    start_recv = _passed_on("start_recv")
    start_recv_any = _passed_on("start_recv_any")
    wait_until = _passed_on("wait_until")
    admit_thread = _passed_on("admit_thread")
    dismiss_thread = _passed_on("dismiss_thread")
    barrier = _passed_on("barrier")
    gather_text = _passed_on("gather_text")
    allocate = _passed_on("allocate")
    close = _passed_on("close")
    native_all_reduce = _passed_on("native_all_reduce")
    start_native_all_reduce = _passed_on("start_native_all_reduce")
    bind_native = _passed_on("bind_native")
    abort = _passed_on("abort")
    end_rank = _passed_on("end_rank")
    leave = _passed_on("leave")
    abandon = _passed_on("abandon")

    def split(self, color: int | None, key: int = 0) -> Transport | None:
        part = self._inner.split(color, key)
        return None if part is None else self._over(part)

    def subset(self, ranks: Sequence[int]) -> Transport:
        return self._over(self._inner.subset(ranks))

    def _over(self, part: Transport) -> Transport:
        over = self.over(part)
        over.admits_threads = self.admits_threads
        return over

    def over(self, inner: Transport) -> Transport:
        """Return the same decorator around a transport that was split from its own."""
        raise NotImplementedError

    def survivors(self) -> Transport:
        Forwarding.__init__(self, self._inner.survivors())
        return self


class Recorded(Forwarding):
    """A Transport that wraps another one and records its messages and waits.

    A message has the name that the recorder had at the `claim_tag` of its tag. Its record lasts
    from its start until this rank has seen it complete. Every call that blocks the recorder's
    thread is recorded as a wait. The wait is for the peer of a message, or for all ranks.
    """

    def __init__(self, inner: Transport, recorder: Recorder):
        super().__init__(inner)
        self.recorder = recorder
        self._named: dict[int, int] = {}
        self._messages, self._barrier, self._text, self._native = (
            recorder.name(what, inner.members) for what in (MESSAGES, *LIBRARY_CALLS)
        )

    def over(self, inner: Transport) -> "Recorded":
        return Recorded(inner, self.recorder)

    def survivors(self) -> Transport:
        """A new recorder notes the new ranks: the old one has names of the old ones."""
        Recorded.__init__(self, self._inner.survivors(), Recorder())
        return self

    def claim_tag(self) -> int:
        tag = self._inner.claim_tag()
        self._named[tag] = self.recorder.name(
            self.recorder.naming, self.members if self.recorder.naming else ()
        )
        return tag

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        return self._noted(SEND, self._inner.start_send, array, tag, self._member(to), to)

    def start_recv(self, array: np.ndarray, source: int, tag: int = 0) -> Request:
        return self._noted(
            RECEIVE, self._inner.start_recv, array, tag, self._member(source), source
        )

    def start_recv_any(self, array: np.ndarray, tag: int = 0) -> Request:
        return self._noted(RECEIVE, self._inner.start_recv_any, array, tag, -1)

    def _noted(
        self, kind: int, start: Callable, array: np.ndarray, tag: int, peer: int, *to: int
    ) -> Request:
        """Start a message by `start(array, *to, tag)`, and record it until it is complete."""
        recorder, name = self.recorder, self._named.get(tag) or self.recorder.topic
        span = recorder.begin(kind, name, 0, -1, recorder.micro, array.nbytes, peer, tag)
        return _Noted(start(array, *to, tag), recorder, span, name, peer)

    def _member(self, rank: int) -> int:
        # The inner transport refuses a number that is no rank.
        return self.members[rank] if 0 <= rank < self.size else -1

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        wait = self.recorder.wait(self._messages)
        self._inner.wait_until(done, pause, what)
        self.recorder.go_on(wait)

    def barrier(self) -> None:
        wait = self.recorder.wait(self._barrier)
        self._inner.barrier()
        self.recorder.go_on(wait)

    def gather_text(self, value: Any) -> list[Any]:
        wait = self.recorder.wait(self._text)
        values = self._inner.gather_text(value)
        self.recorder.go_on(wait)
        return values

    def native_all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        wait = self.recorder.wait(self._native)
        self._inner.native_all_reduce(array, op)
        self.recorder.go_on(wait)

    def start_native_all_reduce(self, array: np.ndarray, op: str = "add") -> Request:
        span = self.recorder.begin(REDUCTION, self._native, nbytes=array.nbytes)
        return _Noted(
            self._inner.start_native_all_reduce(array, op), self.recorder, span, self._native, -1
        )


class _Noted:
    """A request that ends its record when it is seen complete."""

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
