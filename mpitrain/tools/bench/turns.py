"""The engine of comparisons: sides take turns, and their seconds are compared block by block.

A side is one of the compared programs. A block is one turn of each side, so other work on the
machine slows all sides alike, and a ratio compares turns that are close in time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple, Protocol

FAR = 2.0
"""A median above FAR times the fastest run is spoilt: other work ran most of the time."""


class Row(NamedTuple):
    """What was measured of a side. A value that it does not have is None or empty.

    side           its name
    of             the shape or the trick that was measured; empty if there is one comparison
    settings       `section.key=value` that make a trick
    is_used        whether the job had the trick already
    reason         why the side was not measured
    blocks         by block: seconds of a step, on the slowest rank; of all tokens in generation
    step_s         their median
    ratios         by block: seconds relative to the first side's, for as many samples
    speed          compared with the first side: faster, slower, ~ if the blocks disagree, or spoilt
    samples        rows of a step over all ranks; prompts in generation
    tokens         of a step over all ranks, or those written; None if the data are no tokens
    losses         by step: training loss of the whole batch; None where it is not finite
    ends           by loss: seconds from the start of the training
    apart          largest difference of a loss from the first side's in the same step
    val_loss       validation loss after the training; NaN without one
    evaluated_s    seconds from the start of the training to the end of the evaluation
    workers        number of ranks that compute gradients
    comm_s         seconds of a step in which a worker waits for messages, on the worst worker
    joules         of a step: energy of the host's processors and of the GPUs of the ranks, mean over
                   all steps; on rank 0, None without meters or over several hosts
    idle           fraction of the time in which a worker waits for messages, mean over workers
    sent_bytes     by rank: payload of messages per step
    formula_bytes  the largest of `sent_bytes` as a formula predicts it; None without a formula
    formula        the formula in words
    memory         by rank: bytes of parameters, gradients, state, scratch and activations
    counted        by rank: bytes of activations, counted before the first step
    space          memory of the fullest rank, relative to the first side's
    staleness      largest number of updates between a worker's pull of parameters and the update by
                   the gradient that it computed with them; 0 in synchronous modes
    lead           largest number of steps by which a worker was ahead of the slowest one; 0 in
                   synchronous modes
    same           number of tokens that equal those of the first side. Of each prompt, only the
                   tokens before the first different one count
    """

    side: str
    of: str = ""
    settings: Sequence[str] = ()
    is_used: bool = False
    reason: str = ""
    blocks: Sequence[float] = ()
    step_s: float = 0.0
    ratios: Sequence[float] = ()
    speed: str = ""
    samples: int = 1
    tokens: int | None = None
    losses: Sequence[float | None] = ()
    ends: Sequence[float] = ()
    apart: float | None = None
    val_loss: float = math.nan
    evaluated_s: float = 0.0
    workers: int | None = None
    comm_s: float | None = None
    joules: float | None = None
    idle: float | None = None
    sent_bytes: Sequence[float] = ()
    formula_bytes: float | None = None
    formula: str = ""
    memory: Sequence[dict[str, int]] = ()
    counted: Sequence[int] = ()
    space: float | None = None
    staleness: int = 0
    lead: int = 0
    same: int | None = None

    @property
    def is_spoilt(self) -> bool:
        return is_spoilt(self.blocks)

    @property
    def ratio(self) -> float:
        """The median of `ratios`."""
        return median(self.ratios)

    @property
    def held_bytes(self) -> list[int]:
        """By rank: bytes of parameters, gradients, state and scratch, without activations."""
        return [sum(each.values()) - each["activations"] for each in self.memory]

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the rank with the most."""
        return max((sum(each.values()) for each in self.memory), default=0)


class Side(Protocol):
    """One of the compared programs. Both methods are collective."""

    def turn(self, block: int) -> float:
        """Take the turn of a block; return the seconds of a step."""

    def row(self) -> Row:
        """Return what was measured, without the times, after the last turn."""


def measured(sides: Sequence[Side], blocks: int, warm_up: int = 0, of: str = "") -> Iterator[Row]:
    """Measure all sides in turns; in the last block, yield the row of each. Collective.

    warm_up, of  as in `take_turns` and `Row`
    """
    first = None
    turns = take_turns([side.turn for side in sides], blocks, warm_up)
    for side, seconds in zip(sides, turns, strict=True):
        row = side.row()._replace(of=of, blocks=seconds, step_s=median(seconds))
        first = first or row
        yield compared(row, first)


def compared(row: Row, first: Row) -> Row:
    """Return a row with the values that are relative to the first side's."""
    scale = row.samples / first.samples
    times = [own / (scale * other) for own, other in zip(row.blocks, first.blocks, strict=True)]
    row = row._replace(ratios=times)
    if row.memory and first.nbytes:
        row = row._replace(space=row.nbytes / first.nbytes)
    if row.side == first.side:
        return row
    is_unsure = row.is_spoilt or first.is_spoilt
    speed = "spoilt" if is_unsure else verdict([1 / time for time in times])
    row = row._replace(speed=speed)
    pairs = [*zip(row.losses, first.losses, strict=False)]
    apart = [abs(own - other) for own, other in pairs if own is not None and other is not None]
    return row._replace(apart=max(apart, default=None))


def take_turns(
    sides: Sequence[Callable[[int], float]], blocks: int, warm_up: int = 0
) -> Iterator[list[float]]:
    """Run all sides in turns; in the last block, yield the seconds of each side by block.

    sides    (number of the block) -> seconds
    warm_up  number of blocks before block 0, whose seconds do not count; their numbers are negative
    """
    seconds: list[list[float]] = [[] for _ in sides]
    for block in range(-warm_up, blocks):
        for side, spent in zip(sides, seconds, strict=True):
            spent.append(side(block))
            if block == blocks - 1:
                yield spent[warm_up:]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """By block: return their seconds divided by ours, which is how many times as fast we are."""
    return [their_s / our_s for our_s, their_s in zip(ours, theirs, strict=True)]


def verdict(ratios: Sequence[float]) -> str:
    """Return `faster` if all ratios are above 1, `slower` if all are below, else ~."""
    if all(ratio > 1 for ratio in ratios):
        return "faster"
    return "slower" if all(ratio < 1 for ratio in ratios) else "~"


def is_spoilt(seconds: Sequence[float]) -> bool:
    """Return whether the median is far above the fastest turn: other work ran most of the time."""
    return median(seconds) > FAR * min(seconds)


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} .. {max(values):.{digits}f}"
