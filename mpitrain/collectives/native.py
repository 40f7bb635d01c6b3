"""MPI's own all-reduce behind the same calls, to compare with and to fall back on."""

import numpy as np

from mpitrain.errors import CommError
from mpitrain.transport.base import Request, Transport


class Native:
    """The library's all-reduce bound to an array: a Reduction."""

    state = None

    def __init__(self, transport: Transport, array: np.ndarray, op: str):
        if array.dtype.name not in transport.native_dtypes:
            raise CommError(f"rank {transport.rank}: algorithm native cannot reduce {array.dtype}; "
                            f"MPI reduces {', '.join(sorted(transport.native_dtypes))}.",
                            "Use algorithm ring, which reduces any type.")
        self._transport, self._array, self._op = transport, array, op
        self._request: Request | None = None

    def run(self) -> None:
        self._transport.native_all_reduce(self._array, self._op)

    def start(self) -> None:
        if self._request is not None:
            raise CommError(f"rank {self._transport.rank}: a reduction was started again before its last run had ended.",
                            "Call wait() first, or bind one reduction per buffer.")
        self._request = self._transport.start_native_all_reduce(self._array, self._op)

    def poll(self) -> bool:
        if self._request is not None and self._request.test():
            self._request = None
        return self._request is None

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
            self._request = None
