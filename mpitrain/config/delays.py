"""Artificial stragglers: parses run.delay and computes the delay of a step; `Trainer` sleeps."""

import random
from collections.abc import Sequence
from typing import NamedTuple

_MS, _P = r"[0-9]{1,7}(\.[0-9]{1,3})?", r"(0(\.[0-9]{1,9})?|1(\.0{1,9})?)"
_ONE = rf"([0-9]{{1,6}}:{_MS}|random:{_MS}:{_P})"
PATTERN = rf"^({_ONE}(,{_ONE})*)?$"


class Delay(NamedTuple):
    """A delay of steps, each with a probability.

    rank         the rank to delay; None for every rank
    seconds      added to a step
    probability  that a step is delayed
    """

    rank: int | None
    seconds: float
    probability: float


def delays(text: str) -> list[Delay]:
    """Parse a text that matches PATTERN."""
    named = [entry.split(":") for entry in text.split(",") if entry]
    return [
        Delay(
            None if who == "random" else int(who),
            float(ms) / 1e3,
            float(probability[0]) if probability else 1.0,
        )
        for who, ms, *probability in named
    ]


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
