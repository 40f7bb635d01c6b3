"""Stragglers on purpose: what run.delay says, and how much longer a step takes by it. Nothing here sleeps."""

import random
from collections.abc import Sequence
from typing import NamedTuple

_MS, _P = r"[0-9]{1,7}(\.[0-9]{1,3})?", r"(0(\.[0-9]{1,9})?|1(\.0{1,9})?)"
_ONE = rf"([0-9]{{1,6}}:{_MS}|random:{_MS}:{_P})"
PATTERN = rf"^({_ONE}(,{_ONE})*)?$"


class Delay(NamedTuple):
    """Steps of a rank, or of every rank (None), take so many seconds longer, each with this probability."""

    rank: int | None
    seconds: float
    probability: float


def delays(text: str) -> list[Delay]:
    """The delays that a text names which matches PATTERN."""
    named = [one.split(":") for one in text.split(",") if one]
    return [
        Delay(
            None if who == "random" else int(who),
            float(ms) / 1e3,
            float(probability[0]) if probability else 1.0,
        )
        for who, ms, *probability in named
    ]


def delay_s(delays: Sequence[Delay], rank: int, *drawn_from: int) -> float:
    """Seconds that a step of this rank takes longer. Each delay is drawn for itself, and the same from the same numbers."""
    chance = random.Random(repr(drawn_from))
    draws = [chance.random() for _ in delays]
    return sum(
        delay.seconds
        for delay, draw in zip(delays, draws, strict=True)
        if delay.rank in (None, rank) and draw < delay.probability
    )
