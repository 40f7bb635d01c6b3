"""The executor: runs a plan over one array, again and again, through views and scratch it made once."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from mpitrain.collectives.plans import Plan, Step, Transfer, pieces
from mpitrain.errors import CommError
from mpitrain.transport.base import Request, Transport

OPS = {"add": np.add, "maximum": np.maximum}
"""Reductions by name; CuPy arrays answer to the same functions."""


BETWEEN_HOSTS = 60 << 10
"""Bytes of one message between hosts; longer transfers are cut. Just below the 64 KiB up to which MPI's TCP transports send
at once: a longer message waits for a reply to its announcement, and several short ones keep the link busier."""


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


def started_twice() -> CommError:
    """The error of a start before the end of the last run."""
    return CommError("A reduction was started again before its last run had ended.",
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
        limit = max(1, BETWEEN_HOSTS // flat.itemsize)
        self._steps = [bind_step(cut(step, transport, limit), transport.rank, source, flat, scratch[i % plan.depth])
                       for i, step in enumerate(plan.steps)]
        self._requests: deque[list[Request]] = deque()
        self._ended = len(self._steps)

    def run(self) -> None:
        self.start()
        self.wait()

    def start(self) -> None:
        if self._ended < len(self._steps):
            raise started_twice()
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


def cut(step: Step, transport: Transport, limit: int) -> Step:
    """The step with no transfer to or from another host longer than `limit` elements."""
    here, hosts = transport.hosts[transport.rank], transport.hosts

    def parts(transfer: Transfer) -> Iterable[Transfer]:
        length = transfer.stop - transfer.start
        if length <= limit or hosts[transfer.peer] == here:
            return [transfer]
        return [Transfer(transfer.peer, *part) for part in pieces(transfer.start, transfer.stop, -(-length // limit))]

    return step._replace(sends=tuple(p for t in step.sends for p in parts(t)),
                         receives=tuple(p for t in step.receives for p in parts(t)))


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
