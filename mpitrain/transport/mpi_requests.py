"""MPI requests that share MPI with the other threads of their rank, one call at a time.

This module does not import mpi4py: the transport passes in the module.
"""

from collections.abc import Callable, Set
from typing import Any, NoReturn, Protocol

import numpy as np

from mpitrain.errors import CommError
from mpitrain.transport.failures.guard import MpiJob
from mpitrain.transport.requests import Traffic


class MpiCalls(Protocol):
    """The part of an MPI transport that its requests use.

    MPI      the module mpi4py.MPI
    rank     in the communicator of the transport
    own_name as errors name this rank
    members  rank in the whole job of each rank
    job      its lock, communicators and requests
    """

    rank: int
    own_name: str
    members: tuple[int, ...]
    job: MpiJob
    traffic: Traffic

    @property
    def MPI(self) -> Any: ...

    def error(self, error: Any, what: str) -> CommError: ...

    def wait_until(
        self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None
    ) -> None: ...


class SendRequest:
    """A send, or a non-blocking collective of the library, in progress; `what` is its name in
    messages.

    peer  the other rank of a message; None: a collective that no rank leaves while another computes;
          negative: any rank, or another collective
    """

    source: int = -1
    _status: Any = None

    def __init__(self, transport: MpiCalls, request: Any, what: str, peer: int | None = None):
        self._transport, self._job = transport, transport.job
        self._request, self._what, self._peer = request, what, peer
        self._job.requests.add(self)

    def needs(self, left: Set[int]) -> bool:
        """Return whether this request cannot complete once the ranks of `left` have ended."""
        members = self._transport.members
        if self._peer is None:
            return any(rank in left for rank in members)
        if self._peer < 0:
            others = (rank for place, rank in enumerate(members) if place != self._transport.rank)
            return all(rank in left for rank in others)
        return members[self._peer] in left

    def test(self) -> bool:
        try:
            with self._job.lock:
                return self._request.Test(self._status) and self._finish()
        except self._transport.MPI.Exception as error:
            self._fail(error)

    def wait(self) -> None:
        if self._job.admitted:
            self._transport.wait_until(self.test, what=self)
            return
        self._transport.traffic.waits_for = self
        try:
            self._request.Wait(self._status)
        except self._transport.MPI.Exception as error:
            self._fail(error)
        finally:
            self._transport.traffic.waits_for = None
        self._finish()

    def _finish(self) -> bool:
        self._job.requests.discard(self)
        return True

    def __str__(self) -> str:
        return self._what

    def _in_full(self) -> str:
        return f"{self._transport.own_name}: {self._what}"

    def _fail(self, error: Any) -> NoReturn:
        self._job.requests.discard(self)
        raise self._transport.error(error, self._in_full()) from error


class ReceiveRequest(SendRequest):
    """A receive in progress."""

    def __init__(
        self,
        transport: MpiCalls,
        request: Any,
        array: np.ndarray,
        unit: Any,
        what: str,
        peer: int,
    ):
        super().__init__(transport, request, what, peer)
        self._unit, self._count, self._status = unit, array.size, transport.MPI.Status()
        self._done = False

    def test(self) -> bool:
        return self._done or super().test()

    def wait(self) -> None:
        if not self._done:
            super().wait()

    def _finish(self) -> bool:
        """Check the size of the message that has arrived, and set `source`. Calls MPI."""
        self._job.requests.discard(self)
        arrived = self._status.Get_elements(self._unit)
        self.source = self._status.source
        if arrived != self._count:
            raise CommError(
                f"{self._in_full()} met a message of {arrived} from rank {self.source}.",
                "Make both arrays of one length and dtype.",
            )
        self._done = True
        return True

    def _in_full(self) -> str:
        return f"{super()._in_full()} of {self._count} elements"
