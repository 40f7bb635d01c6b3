"""The executor: runs a plan over one array, again and again, through views and scratch it made once."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mpitrain.collectives.plans import Plan, Step
from mpitrain.errors import CommError
from mpitrain.transport.base import Request, Transport

OPS = {"add": np.add, "maximum": np.maximum}
"""Reductions by name; CuPy arrays answer to the same functions."""


class Reduction(Protocol):
    """A collective bound to its buffer. Every run does the same thing to whatever the buffer then holds.

    Between `start` and the `wait` that returns (or the `poll` that says True) the buffer must not be touched. Several
    may be under way at once and be polled in any order; `wait` moves only its own, so ranks that wait for several must
    wait in one order.
    """

    state: np.ndarray | None
    """Residuals of a lossy wire format, which belong in a checkpoint; None where nothing is lost."""

    def run(self) -> None:
        """`start`, then `wait`."""

    def start(self) -> None:
        """Send what can be sent at once. CommError if the last start has not been waited for."""

    def poll(self) -> bool:
        """Go as far as possible without blocking; True once the result is in the buffer, and before any start."""

    def wait(self) -> None:
        """Block until the result is in the buffer."""


def started_twice(rank: int) -> CommError:
    """The error of a start before the end of the last run."""
    return CommError(f"rank {rank}: a reduction was started again before its last run had ended.",
                     "Call wait() first, or bind one reduction per buffer.")


class _BoundStep(NamedTuple):
    """A step with views in place of bounds.

    sends, receives  (array, peer)
    copies           (target, source): what a rank sends to itself
    combines         (target, received)
    """

    sends: list[tuple[np.ndarray, int]]
    receives: list[tuple[np.ndarray, int]]
    copies: list[tuple[np.ndarray, np.ndarray]]
    combines: list[tuple[np.ndarray, np.ndarray]]


def scratch_count(plan: Plan) -> int:
    """Elements that one step of the plan receives before it combines them, at most."""
    return max((sum(t.stop - t.start for t in step.receives) for step in plan.steps if step.combine), default=0)


class Execution:
    """A plan bound to an array and a tag: a Reduction. With `outgoing`, sends come out of that array instead."""

    state = None

    def __init__(self, transport: Transport, array: np.ndarray, op: str, plan: Plan, tag: int,
                 outgoing: np.ndarray | None = None):
        self._transport, self._combine, self._tag, self._depth = transport, OPS[op], tag, plan.depth
        flat = array.reshape(-1)
        source = flat if outgoing is None else outgoing.reshape(-1)
        scratch = [np.empty_like(flat, shape=scratch_count(plan)) for _ in range(plan.depth)]
        self._steps = [bind_step(step, transport.rank, source, flat, scratch[i % plan.depth])
                       for i, step in enumerate(plan.steps)]
        self._requests: deque[list[Request]] = deque()
        self._ended = len(self._steps)

    def run(self) -> None:
        self.start()
        self.wait()

    def start(self) -> None:
        if self._ended < len(self._steps):
            raise started_twice(self._transport.rank)
        self._ended = 0
        for step in self._steps[:self._depth]:
            self._post(step)

    def poll(self) -> bool:
        while self._ended < len(self._steps):
            if not all(request.test() for request in self._requests[0]):
                return False
            self._end_step()
        return True

    def wait(self) -> None:
        while self._ended < len(self._steps):
            for request in self._requests[0]:
                request.wait()
            self._end_step()

    def _post(self, step: _BoundStep) -> None:
        transport, tag = self._transport, self._tag
        requests = [transport.start_recv(view, peer, tag) for view, peer in step.receives]
        requests += [transport.start_send(view, peer, tag) for view, peer in step.sends]
        for target, source in step.copies:
            target[...] = source
        self._requests.append(requests)

    def _end_step(self) -> None:
        """Combine what the oldest step received, and post the one that waited for it."""
        self._requests.popleft()
        for target, received in self._steps[self._ended].combines:
            self._combine(target, received, out=target)
        self._ended += 1
        following = self._ended + self._depth - 1
        if following < len(self._steps):
            self._post(self._steps[following])


def bind_step(step: Step, rank: int, source: np.ndarray, flat: np.ndarray, scratch: np.ndarray) -> _BoundStep:
    """Views of the arrays, and of the scratch where received elements wait to be combined."""
    sends = [(source[t.start:t.stop], t.peer) for t in step.sends]
    targets = [(flat[t.start:t.stop], t.peer) for t in step.receives]
    own = [view for view, peer in sends if peer == rank], [view for view, peer in targets if peer == rank]
    sends = [(view, peer) for view, peer in sends if peer != rank]
    targets = [(view, peer) for view, peer in targets if peer != rank]
    copies = list(zip(own[1], own[0], strict=True))
    if not step.combine:
        return _BoundStep(sends, targets, copies, [])
    receives, used = [], 0
    for target, peer in targets:
        receives.append((scratch[used:used + target.size], peer))
        used += target.size
    combines = [(target, received) for (target, _), (received, _) in zip(targets, receives, strict=True)]
    return _BoundStep(sends, receives, copies, combines)


class Chain:
    """Reductions that run one after the other as one."""

    state = None

    def __init__(self, links: Sequence[Reduction]):
        self._links = links
        self._ended = len(links)

    def run(self) -> None:
        for link in self._links:
            link.run()

    def start(self) -> None:
        self._ended = 0
        self._links[0].start()

    def poll(self) -> bool:
        while self._ended < len(self._links):
            if not self._links[self._ended].poll():
                return False
            self._go_on()
        return True

    def wait(self) -> None:
        while self._ended < len(self._links):
            self._links[self._ended].wait()
            self._go_on()

    def _go_on(self) -> None:
        """The link under way has ended: start the next."""
        self._ended += 1
        if self._ended < len(self._links):
            self._links[self._ended].start()
