"""MPI's own all-reduce with the interface of a Reduction, as a baseline and as a fallback."""

import numpy as np

from mpitrain.collectives.engine.agreement import Agreed
from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import started_twice
from mpitrain.collectives.plans.topology import Topology
from mpitrain.errors import CommError
from mpitrain.transport.base import Request, Transport


class Native:
    """MPI's all-reduce bound to an array; a Reduction. It ignores the agreement and the arithmetic."""

    state = learn = None
    algorithm = ""
    is_messages = False
    scratch_bytes = 0

    def __init__(
        self,
        transport: Transport,
        array: np.ndarray,
        op: str,
        agreed: Agreed,
        arithmetic: Arithmetic,
    ):
        self._transport, self._array, self._op = transport, array, op
        self._request: Request | None = None

    def run(self) -> None:
        if self._request is not None:
            raise started_twice()
        self._transport.native_all_reduce(self._array, self._op)

    def start(self) -> None:
        if self._request is not None:
            raise started_twice()
        self._request = self._transport.start_native_all_reduce(self._array, self._op)

    def poll(self) -> bool:
        if self._request is not None and self._request.test():
            self._request = None
        return self._request is None

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
            self._request = None


def refusal(situation: Topology) -> CommError | None:
    """Return an error unless MPI reduces the dtype."""
    if situation.is_native:
        return None
    return CommError(
        f"algorithm native needs a dtype that MPI reduces, which {situation.dtype} is not.",
        "Use algorithm ring, which reduces any type.",
    )


def is_rival(situation: Topology) -> bool:
    """Return whether the arrays are in host memory.

    MPI does not overlap a reduction of GPU memory with computation.
    """
    return not situation.is_on_device
