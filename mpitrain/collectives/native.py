"""MPI's own all-reduce behind the same calls, to compare with and to fall back on."""

import numpy as np

from mpitrain.collectives.execute import started_twice
from mpitrain.errors import CommError, on_every_rank
from mpitrain.transport.base import Request, Transport


class Native:
    """The library's all-reduce bound to an array: a Reduction."""

    state = learn = None
    is_messages = False

    def __init__(self, transport: Transport, array: np.ndarray, op: str):
        if array.dtype.name not in transport.native_dtypes:
            raise on_every_rank(CommError(  # the ranks have compared their dtypes
                f"rank {transport.rank}: algorithm native cannot reduce {array.dtype}; "
                f"MPI reduces {', '.join(sorted(transport.native_dtypes))}.",
                "Use algorithm ring, which reduces any type."))
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
