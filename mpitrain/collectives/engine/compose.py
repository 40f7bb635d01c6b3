"""Reductions made of reductions: one after the other, pipelined, or recorded in a trace."""

from collections.abc import Callable, Sequence

import numpy as np

from mpitrain.collectives.engine.executor import Reduction, started_twice
from mpitrain.trace.recorder import REDUCTION, Recorder
from mpitrain.transport.base import Transport


class LocalReduction:
    """Function without messages, as one link of a chain of reductions."""

    state = learn = None
    algorithm = ""
    is_messages = True
    scratch_bytes = 0

    def __init__(self, work: Callable[[], None]):
        self.run = self.start = work

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class PipelinedChain:
    """Several chains as one Reduction: while one chain waits for messages, another one works.

    lanes    for each chain, its links: reductions that run one after the other. All chains have the
             same number of links
    width    number of chains in flight at once: chain i starts when chain i - width has ended, and
             may use the scratch and the tags of that chain
    scratch  bytes that the links use in addition to their own `scratch_bytes`
    """

    state: dict[str, np.ndarray] | None = None
    learn: Callable[[np.ndarray], None] | None = None
    algorithm = ""

    def __init__(
        self,
        transport: Transport,
        lanes: Sequence[Sequence[Reduction]],
        width: int,
        scratch: int = 0,
    ):
        self._transport = transport
        self._lanes, self._width, self._length = lanes, width, len(lanes[0])
        # Each chain has ended this many of its links; -1: the chain has not started.
        self._ended = [self._length] * len(lanes)
        self._first = len(lanes)  # all chains before this one have ended
        self.is_messages = all(link.is_messages for lane in lanes for link in lane)
        self.scratch_bytes = scratch + sum(
            {id(link): link.scratch_bytes for lane in lanes for link in lane}.values()
        )

    def run(self) -> None:
        self.start()
        self.wait()

    def start(self) -> None:
        if self._first < len(self._lanes):
            raise started_twice()
        self._ended = [-1] * len(self._lanes)
        self._first = 0
        self._go_on()

    def poll(self) -> bool:
        self._go_on()
        return self._first == len(self._lanes)

    def wait(self) -> None:
        # Blocking on one chain would delay the others.
        self._transport.wait_until(self.poll)

    def _go_on(self) -> None:
        """Progress all chains without blocking, the oldest chain first."""
        lane, most = self._first, self._length
        while lane < min(self._first + self._width, len(self._lanes)):
            if self._ended[lane] < 0:
                self._end_link(lane)
            while self._ended[lane] < most and self._lanes[lane][self._ended[lane]].poll():
                self._end_link(lane)
            most = self._ended[lane]
            self._first += most == self._length
            lane += 1

    def _end_link(self, lane: int) -> None:
        self._ended[lane] += 1
        if self._ended[lane] < self._length:
            self._lanes[lane][self._ended[lane]].start()


class Chain(PipelinedChain):
    """Reductions that run one after the other, as one Reduction."""

    def __init__(self, transport: Transport, links: Sequence[Reduction], scratch: int = 0):
        super().__init__(transport, [links], 1, scratch)

    def run(self) -> None:
        if not self.poll():
            raise started_twice()
        for link in self._lanes[0]:
            link.run()

    def wait(self) -> None:
        while not self.poll():
            self._lanes[0][self._ended[0]].wait()


class TracedReduction:
    """Decorator of a Reduction that records its runs, from start to end, and its waits in a trace."""

    def __init__(self, inner: Reduction, recorder: Recorder, name: int, nbytes: int):
        self._inner, self._recorder, self._name, self._nbytes = inner, recorder, name, nbytes
        self._span = 0
        self.algorithm, self.is_messages = inner.algorithm, inner.is_messages
        self.scratch_bytes = inner.scratch_bytes

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
