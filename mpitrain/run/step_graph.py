"""The forward and backward passes of a step as one launch: a CUDA graph."""

from collections.abc import Callable, Hashable
from typing import Any

from mpitrain.errors import KernelError, say


class StepGraph:
    """A graph of the launches of a step, made once, and launched again while its key is the same.

    The key has everything that the launches depend on: shapes, numbers, and the addresses of arrays
    outside the arena. The leases of a step have the same addresses in each step, if as much of the
    arena is leased when the step begins. So the key has that, too. With a new key a step runs as
    without a graph; with the same key again it is captured.

    captured  a function as `CudaBackend.captured`
    """

    def __init__(self, captured: Callable[[Callable[[], None]], Callable[[], None]]):
        self._captured, self._refused = captured, False
        self._key: Hashable = None
        self._launch: Callable[[], None] | None = None

    def run(self, key: Hashable, work: Callable[[], None], undo: Callable[[], Any]) -> None:
        """Run `work`, or launch the graph of it.

        undo  takes back what an unfinished `work` did on the host
        """
        if key != self._key:
            self._key, self._launch = key, None
        elif self._launch is None and not self._refused:
            try:
                self._launch = self._captured(work)
            except KernelError as error:
                self._refused = True
                say_without_graph(error.law)
                undo()
        if self._launch is not None:
            self._launch()
            return
        work()


def say_without_graph(reason: str) -> None:
    say(f"note: device.graph is auto, but each kernel is launched by itself. {reason}")
