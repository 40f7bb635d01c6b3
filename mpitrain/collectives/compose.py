"""Reductions made of reductions: one after the other, and side by side."""

from collections.abc import Callable, Sequence

from mpitrain.collectives.execute import Reduction, started_twice


class Local:
    """Work between messages, as a link of a chain."""

    state = None

    def __init__(self, work: Callable[[], None]):
        self.run = self.start = work

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Chain:
    """Reductions that run one after the other as one; `ended` of its `length` links have."""

    state = None

    def __init__(self, links: Sequence[Reduction]):
        self._links, self.length = links, len(links)
        self.ended = self.length

    def run(self) -> None:
        if self.ended < self.length:
            raise started_twice()
        for link in self._links:
            link.run()

    def start(self) -> None:
        if self.ended < self.length:
            raise started_twice()
        self.ended = 0
        self._links[0].start()
        self.poll()

    def poll(self) -> bool:
        while self.ended < self.length:
            if not self._links[self.ended].poll():
                return False
            self._go_on()
        return True

    def wait(self) -> None:
        while self.ended < self.length:
            self.advance()

    def advance(self) -> None:
        """Wait for the link under way, and start the next."""
        self._links[self.ended].wait()
        self._go_on()

    def _go_on(self) -> None:
        self.ended += 1
        if self.ended < self.length:
            self._links[self.ended].start()


class Lanes:
    """Chains that run side by side as one: while the messages of one are on their way, another one works."""

    state = None

    def __init__(self, chains: Sequence[Chain]):
        self._chains = chains

    def run(self) -> None:
        self.start()
        self.wait()

    def start(self) -> None:
        for chain in self._chains:
            chain.start()

    def poll(self) -> bool:
        open_ones = [chain for chain in self._chains if not chain.poll()]
        return not open_ones

    def wait(self) -> None:
        # The chain that is furthest behind first: were each rank to choose, two could wait for each other's second choice.
        while (behind := min(self._chains, key=lambda chain: chain.ended)).ended < behind.length:
            behind.advance()
