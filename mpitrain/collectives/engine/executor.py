"""The executor: runs a plan over one array, again and again, through views and scratch it made once."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from mpitrain.collectives.engine.arithmetic import HOST, Arithmetic
from mpitrain.collectives.plans.steps import Plan, Step, Transfer, pieces
from mpitrain.errors import CommError
from mpitrain.transport.base import Request, Transport

OPS = ("add", "maximum")
"""Reductions by name."""


BETWEEN_HOSTS = 60 << 10
"""Bytes of one message between hosts; longer transfers are cut. Just below the 64 KiB up to which MPI's TCP transports send
at once: a longer message waits for a reply to its announcement, and several short ones keep the link busier."""

WINDOW = 8
"""Such messages under way at once, to all peers together: enough to fill a link, few enough not to pile up in front of it."""


class Reduction(Protocol):
    """A collective bound to its buffer. Every run does the same thing to whatever the buffer then holds.

    Between `start` and the `wait` that returns (or the `poll` that says True) the buffer must not be touched. Several
    may be under way at once and be polled in any order; `wait` moves only its own, so ranks that wait for several must
    wait in one order. All ranks `run` it or all `start` it: `shared` and `native` meet differently then.
    """

    @property
    def state(self) -> dict[str, np.ndarray] | None:
        """What a lossy wire format keeps from run to run, which belongs in a checkpoint; None where nothing is lost.

        `residual` and `prediction` lie like the buffer; the residual is each rank's own, all else is the same on all ranks.
        """

    algorithm: str
    """Which algorithm it became: what `auto` chose, or what stood in for one that this machine lacks; "" where nobody chooses."""

    @property
    def learn(self) -> Callable[[np.ndarray], None] | None:
        """Where there is state: takes note of a sum over this buffer that another reduction made."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes that it has allocated besides its buffer and its state, until it is gone."""

    @property
    def is_messages(self) -> bool:
        """Whether it is made of messages, and of work between them, alone: any thread may then poll it, one at a time."""

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
    return CommError(
        "A reduction was started again before its last run had ended.",
        "Call wait() first, or bind one reduction per buffer.",
    )


class _BoundStep(NamedTuple):
    """A step, or the part of one that is under way at a time, with views in place of bounds.

    after            how many of these must have ended before this one begins
    sends, receives  (array, peer)
    copies           (target, source): what a rank sends to itself
    combines         (target, received)
    """

    after: int
    sends: list[tuple[np.ndarray, int]]
    receives: list[tuple[np.ndarray, int]]
    copies: list[tuple[np.ndarray, np.ndarray]]
    combines: list[tuple[np.ndarray, np.ndarray]]


class Execution:
    """A plan bound to an array and a tag: a Reduction. With `outgoing`, sends come out of that array instead."""

    state = learn = None
    algorithm = ""
    is_messages = True

    def __init__(
        self,
        transport: Transport,
        array: np.ndarray,
        op: str,
        plan: Plan,
        tag: int,
        outgoing: np.ndarray | None = None,
        arithmetic: Arithmetic = HOST,
    ):
        self._transport, self._combine, self._tag = transport, arithmetic.combining(array, op), tag
        flat = array.reshape(-1)
        self._steps, scratch = bind_plan(
            transport, plan, flat if outgoing is None else outgoing.reshape(-1), flat
        )
        self.scratch_bytes = sum(array.nbytes for array in scratch)
        self._requests: deque[list[Request]] = deque()
        self._posted = self._ended = len(self._steps)
        self._aside = transport.aside(array)

    def run(self) -> None:
        self.start()
        self.wait()

    def start(self) -> None:
        if self._ended < len(self._steps):
            raise started_twice()
        self._posted = self._ended = 0
        if self._aside is None:
            self._post()
        elif self._steps:
            self._aside.begin()

    def poll(self) -> bool:
        if self._aside is None or self._ended == len(self._steps):
            return self._go_on()
        if not self._posted and not self._aside.is_ready():
            return False
        with self._aside.here():
            self._post()
            ended = self._go_on()
        if ended:
            self._aside.end()
        return ended

    def wait(self) -> None:
        if self._aside is None or self._ended == len(self._steps):
            return self._finish()
        self._aside.wait()
        with self._aside.here():
            self._post()
            self._finish()
        return self._aside.end()

    def _go_on(self) -> bool:
        while self._ended < len(self._steps):
            if not all(request.test() for request in self._requests[0]):
                return False
            self._end_step()
        return True

    def _finish(self) -> None:
        while self._ended < len(self._steps):
            for request in self._requests[0]:
                request.wait()
            self._end_step()

    def _post(self) -> None:
        """Begin every step that may begin."""
        transport, tag = self._transport, self._tag
        while (
            self._posted < len(self._steps)
            and (step := self._steps[self._posted]).after <= self._ended
        ):
            requests = [transport.start_recv(view, peer, tag) for view, peer in step.receives]
            requests += [transport.start_send(view, peer, tag) for view, peer in step.sends]
            for target, source in step.copies:
                target[...] = source
            self._requests.append(requests)
            self._posted += 1

    def _end_step(self) -> None:
        """Combine what the oldest step received, and begin what waited for it."""
        self._requests.popleft()
        for target, received in self._steps[self._ended].combines:
            self._combine(target, received)
        self._ended += 1
        self._post()


def bind_plan(
    transport: Transport, plan: Plan, source: np.ndarray, flat: np.ndarray
) -> tuple[list[_BoundStep], list[np.ndarray]]:
    """The plan's steps over these arrays, those between hosts in parts; and the scratch, which it allocates."""
    longest = max(
        (sum(t.stop - t.start for t in step.receives) for step in plan.steps if step.combine),
        default=0,
    )
    scratch = [np.empty_like(flat, shape=longest) for _ in range(plan.depth)]
    bound: list[_BoundStep] = []
    ends: list[int] = []
    for i, step in enumerate(plan.steps):
        before, used = ends[i - plan.depth] if i >= plan.depth else 0, 0
        for part in cut(step, transport, max(1, BETWEEN_HOSTS // flat.itemsize)):
            after = max(
                before,
                len(bound) + 1 - max(2, WINDOW // max(1, len(part.sends), len(part.receives))),
            )
            bound.append(
                bind_step(part, after, transport.rank, source, flat, scratch[i % plan.depth][used:])
            )
            used += sum(t.stop - t.start for t in part.receives)
        ends.append(len(bound))
    return bound, scratch


def cut(step: Step, transport: Transport, limit: int) -> list[Step]:
    """The step in parts, none of which has a transfer to or from another host that is longer than `limit` elements."""
    here, hosts = transport.hosts[transport.rank], transport.hosts

    def parts(transfer: Transfer) -> list[Transfer]:
        length = transfer.stop - transfer.start
        if length <= limit or hosts[transfer.peer] == here:
            return [transfer]
        return [
            Transfer(transfer.peer, *part)
            for part in pieces(transfer.start, transfer.stop, -(-length // limit))
        ]

    sends, receives = ([parts(t) for t in way] for way in (step.sends, step.receives))
    return [
        Step(
            tuple(s[i] for s in sends if i < len(s)),
            tuple(r[i] for r in receives if i < len(r)),
            step.combine,
        )
        for i in range(max(map(len, sends + receives), default=0))
    ]


def bind_step(
    step: Step, after: int, rank: int, source: np.ndarray, flat: np.ndarray, scratch: np.ndarray
) -> _BoundStep:
    """Views of the arrays, and of the scratch where received elements wait to be combined."""
    sends = [(source[t.start : t.stop], t.peer) for t in step.sends]
    targets = [(flat[t.start : t.stop], t.peer) for t in step.receives]
    own = (
        [view for view, peer in sends if peer == rank],
        [view for view, peer in targets if peer == rank],
    )
    sends = [(view, peer) for view, peer in sends if peer != rank]
    targets = [(view, peer) for view, peer in targets if peer != rank]
    copies = list(zip(own[1], own[0], strict=True))
    if not step.combine:
        return _BoundStep(after, sends, targets, copies, [])
    receives, used = [], 0
    for target, peer in targets:
        receives.append((scratch[used : used + target.size], peer))
        used += target.size
    combines = [
        (target, received) for (target, _), (received, _) in zip(targets, receives, strict=True)
    ]
    return _BoundStep(after, sends, receives, copies, combines)
