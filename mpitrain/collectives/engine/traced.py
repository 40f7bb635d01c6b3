"""Reductions that record each run in a trace, from start to end, and the time a rank blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.trace.recorder import REDUCTION, Recorder
from mpitrain.transport.base import Transport


def bind_traced(
    transport: Transport, operation: str, array: Any, bind: Callable[[], Reduction]
) -> Reduction:
    """Bind a reduction that records its runs and messages under the present name of the recorder.

    operation  prefix of that name: "all-reduce" or the like
    bind       binds the reduction to trace; returned as it is if the recorder is off
    """
    recorder = transport.recorder
    if not recorder.is_on:
        return bind()
    what = f"{operation} of {recorder.naming}" if recorder.naming else operation
    with recorder.called(what):
        return TracedReduction(
            bind(), recorder, recorder.name(what, transport.members), array.nbytes
        )


class TracedReduction:
    """Decorator of a Reduction that records its runs and its waits."""

    def __init__(self, inner: Reduction, recorder: Recorder, name: int, nbytes: int):
        self._inner, self._recorder, self._name, self._nbytes = inner, recorder, name, nbytes
        self._span = 0
        self.algorithm, self.is_messages, self.scratch_bytes = (
            inner.algorithm,
            inner.is_messages,
            inner.scratch_bytes,
        )

    @property
    def state(self) -> dict[str, np.ndarray] | None:
        return self._inner.state

    @property
    def learn(self) -> Callable[[np.ndarray], None] | None:
        return self._inner.learn

    def run(self) -> None:
        self._begin()
        wait = self._recorder.wait(self._name)
        self._inner.run()
        self._recorder.go_on(wait)
        self._end()

    def start(self) -> None:
        self._begin()
        self._inner.start()

    def poll(self) -> bool:
        if not self._inner.poll():
            return False
        self._end()
        return True

    def wait(self) -> None:
        wait = self._recorder.wait(self._name)
        self._inner.wait()
        self._recorder.go_on(wait)
        self._end()

    def _begin(self) -> None:
        self._span = self._recorder.begin(REDUCTION, self._name, nbytes=self._nbytes)

    def _end(self) -> None:
        span, self._span = self._span, 0
        if span:
            self._recorder.end(span)
