"""Reductions made of reductions: one after the other, or pipelined."""

from collections.abc import Callable, Iterator, Sequence

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.transport.base import Request, Transport


class LocalReduction(Reduction):
    """Function without messages, as one link of a chain of reductions."""

    def __init__(self, work: Callable[[], None]):
        self._work = work

    def _steps(self) -> Iterator[Request]:
        self._work()
        yield from ()


class Chain(Reduction):
    """Reductions that run one after the other, as one Reduction.

    scratch  bytes that the links use in addition to their own `scratch_bytes`
    """

    def __init__(self, links: Sequence[Reduction], scratch: int = 0):
        self._links = links
        self.is_messages = all(link.is_messages for link in links)
        self.scratch_bytes = scratch + sum({id(one): one.scratch_bytes for one in links}.values())

    def _run(self) -> None:
        for link in self._links:
            link.run()

    def _steps(self) -> Iterator[Request]:
        for link in self._links:
            link.start()
            yield link


class Lanes:
    """A request that is complete once all chains have ended; at most `width` of them are in flight at once."""

    source = -1

    def __init__(self, transport: Transport, lanes: Sequence[Sequence[Reduction]], width: int):
        """Start the first chains."""
        self._transport, self._lanes, self._width = transport, lanes, width
        self._length = len(lanes[0])
        # Each chain has ended this many of its links; -1: the chain has not started.
        self._ended = [-1] * len(lanes)
        self._first = 0  # all chains before this one have ended
        self.test()

    def test(self) -> bool:
        """Progress all chains, the oldest one first."""
        lane, most = self._first, self._length
        while lane < min(self._first + self._width, len(self._lanes)):
            if self._ended[lane] < 0:
                self._end_link(lane)
            while self._ended[lane] < most and self._lanes[lane][self._ended[lane]].poll():
                self._end_link(lane)
            most = self._ended[lane]
            self._first += most == self._length
            lane += 1
        return self._first == len(self._lanes)

    def wait(self) -> None:
        """Progress all chains to their ends; blocking on one would delay the others."""
        self._transport.wait_until(self.test)

    def _end_link(self, lane: int) -> None:
        self._ended[lane] += 1
        if self._ended[lane] < self._length:
            self._lanes[lane][self._ended[lane]].start()


class PipelinedChain(Reduction):
    """Several chains as one Reduction: while one chain waits for messages, another one works.

    lanes    for each chain, its links: reductions that run one after the other. All chains have the
             same number of links
    width    number of chains in flight at once: chain i starts when chain i - width has ended, and
             may use the scratch and the tags of that chain
    scratch  as of a chain
    """

    def __init__(
        self,
        transport: Transport,
        lanes: Sequence[Sequence[Reduction]],
        width: int,
        scratch: int = 0,
    ):
        joined = Chain([link for lane in lanes for link in lane], scratch)
        self.is_messages, self.scratch_bytes = joined.is_messages, joined.scratch_bytes
        self._arguments = transport, lanes, width

    def _steps(self) -> Iterator[Request]:
        yield Lanes(*self._arguments)
