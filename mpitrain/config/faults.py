"""Artificial stragglers and failures: parses run.delay and run.inject, and draws the delay of a step."""

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

_MS, _P = r"[0-9]{1,7}(\.[0-9]{1,3})?", r"(0(\.[0-9]{1,9})?|1(\.0{1,9})?)"
_ONE = rf"([0-9]{{1,6}}:{_MS}|random:{_MS}:{_P})"
DELAY = rf"^({_ONE}(,{_ONE})*)?$"


class Delay(NamedTuple):
    """A delay that is drawn anew for each step.

    rank         the rank to delay; None for every rank
    seconds      added to a step
    probability  that a step is delayed
    """

    rank: int | None
    seconds: float
    probability: float


def delays(text: str) -> list[Delay]:
    """Parse run.delay, a text that matches DELAY."""
    named = [entry.split(":") for entry in text.split(",") if entry]
    return [
        Delay(
            None if who == "random" else int(who),
            float(ms) / 1e3,
            float(probability[0]) if probability else 1.0,
        )
        for who, ms, *probability in named
    ]


def of_ranks(text: str, ranks: int) -> str:
    """Return run.delay without the delays of ranks that a job of so many ranks does not have."""
    return ",".join(
        entry
        for entry in text.split(",")
        if not entry.partition(":")[0].isdigit() or int(entry.partition(":")[0]) < ranks
    )


def delay_s(delays: Sequence[Delay], rank: int, *drawn_from: int) -> float:
    """Return the seconds to add to a step of this rank.

    Each delay is drawn independently. The same numbers give the same draws.

    drawn_from  the seed, the step and the coordinates that identify the draw
    """
    chance = random.Random(repr(drawn_from))
    draws = [chance.random() for _ in delays]
    return sum(
        delay.seconds
        for delay, draw in zip(delays, draws, strict=True)
        if delay.rank in (None, rank) and draw < delay.probability
    )


IN_THREAD = ("thread", "publish")
"""The points in the thread that saves, where no message may be sent; publish is on rank 0 alone."""
POINTS = (
    "start",
    "step",
    "forward",
    "backward",
    "save",
    "snapshot",
    *IN_THREAD,
    "evaluation",
    "end",
)
"""Points of a run at which a failure can happen, in the order of their first passage."""
MAY_SEND = tuple(point for point in POINTS if point not in IN_THREAD)
OUTSIDE_PASSES = ("start", "step", "save", "snapshot", "evaluation", "end")
"""The points outside of forwards and backwards, and of that thread."""


class FailureKind(NamedTuple):
    """A kind of failure.

    effect  the effect on the rank, for the help
    points  the points at which it can happen, the default first
    ranks   the smallest number of ranks
    """

    effect: str
    points: tuple[str, ...] = ("step", *POINTS)
    ranks: int = 1


KINDS = {
    "kill": FailureKind("SIGKILL"),
    "segfault": FailureKind("a read of address 0"),
    "stop": FailureKind("SIGSTOP"),
    "exit": FailureKind("sys.exit(0)"),
    "_exit": FailureKind("os._exit(0)"),
    "raise": FailureKind("an exception"),
    "oom": FailureKind("MemoryError"),
    "disk": FailureKind("from now on no file of this rank can grow"),
    "deadlock": FailureKind(
        "this rank and the next one wait for a message of each other", ("step", *MAY_SEND), 2
    ),
    "mismatch": FailureKind("one barrier more than the other ranks", ("step", *MAY_SEND), 2),
    "lose": FailureKind("the next message is never sent", ("step", *OUTSIDE_PASSES), 2),
    "nan": FailureKind("the first element of a gradient becomes NaN", ("backward",)),
    "bitflip": FailureKind("one bit of the first element of a gradient changes", ("backward",)),
}
"""The kinds of failure, by name."""

INJECTION = rf"^(({'|'.join(KINDS)}):[0-9]{{1,6}}@[0-9]{{1,9}}(:({'|'.join(POINTS)}))?)?$"


class Injection(NamedTuple):
    """A failure of one rank. It happens once, at the first passage of `point` from `step` on.

    step  as printed, from 1; 0 for the point "start"
    """

    kind: str
    rank: int
    step: int
    point: str


def injection(text: str) -> Injection | None:
    """Parse run.inject, a text that matches INJECTION; None if it is empty."""
    if not text:
        return None
    kind, rank, step, point = re.split("[:@]", text + ("" if text.count(":") > 1 else ":"))
    default = "start" if int(step) == 0 else KINDS[kind].points[0]
    return Injection(kind, int(rank), int(step), point or default)
