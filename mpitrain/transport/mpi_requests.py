"""MPI requests that share MPI with the other threads of their rank, one call at a time.

This module does not import mpi4py: the transport passes in the module.
"""

from collections.abc import Callable
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
    job      its lock and communicators
    """

    rank: int
    own_name: str
    job: MpiJob
    traffic: Traffic

    @property
    def MPI(self) -> Any: ...

    def error(self, error: Any, what: str) -> CommError: ...

    def wait_until(
        self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None
    ) -> None: ...


class Send:
    """A send, or a non-blocking collective of the library, in progress; `what` is its name in
    messages.
    """

    source: int = -1
    _status: Any = None

    def __init__(self, transport: MpiCalls, request: Any, what: str):
        self._transport, self._job = transport, transport.job
        self._request, self._what = request, what

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
        self._transport.traffic.waits_for = None
        self._finish()

    def _finish(self) -> bool:
        """Return True: the request is complete."""
        return True

    def __str__(self) -> str:
        return self._what

    def _in_full(self) -> str:
        """Return the name for an error."""
        return f"{self._transport.own_name}: {self._what}"

    def _fail(self, error: Any) -> NoReturn:
        raise self._transport.error(error, self._in_full()) from error


class Receive(Send):
    """A receive in progress."""

    def __init__(self, transport: MpiCalls, request: Any, array: np.ndarray, unit: Any, what: str):
        super().__init__(transport, request, what)
        self._unit, self._count, self._status = unit, array.size, transport.MPI.Status()
        self._done = False

    def test(self) -> bool:
        return self._done or super().test()

    def wait(self) -> None:
        if not self._done:
            super().wait()

    def _finish(self) -> bool:
        """Check the size of the message that has arrived, and set `source`. Calls MPI."""
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
