"""Every schedule there is: which instructions a stage computes, and in which order.

A stage's list is its instructions sorted by a key. Keys rise strictly along everything that one instruction must wait for
another for, so no number of stages and micro-batches can deadlock.
Legend: s stage, p stages, m micro-batches, k micro-batch, v chunks of a stage, c chunk.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import NamedTuple

from mpitrain.errors import ConfigError, multiples_near
from mpitrain.pipeline.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Plan,
)

Keyed = tuple[float, Compute]


KINDS: dict[str, Callable[[int, int], Compute]] = {
    "F": Forward,
    "B": BackwardInput,
    "W": BackwardWeight,
    "BW": Backward,
}
"""Instructions by the letters they are printed and written with: forward, input half, weight half, both halves."""


def by_key(keyed: Iterable[Keyed]) -> list[Compute]:
    """Instructions in the order of their keys."""
    return [instruction for _, instruction in sorted(keyed, key=lambda pair: pair[0])]


def naive(s: int, p: int, m: int) -> list[Compute]:
    """One micro-batch after the other, through all stages and back: what the others are compared with."""
    return by_key(
        pair
        for k in range(m)
        for pair in ((s + 2 * p * k, Forward(s, k)), (2 * p - 1 - s + 2 * p * k, Backward(s, k)))
    )


def gpipe(s: int, p: int, m: int) -> list[Compute]:
    """All forwards, then all backwards: m micro-batches live. Huang et al. 2019, NeurIPS."""
    return by_key(
        pair
        for k in range(m)
        for pair in ((s + k, Forward(s, k)), (m + 2 * p - 2 - s + k, Backward(s, k)))
    )


def one_f_one_b(s: int, p: int, m: int) -> list[Compute]:
    """Forwards and backwards in turns: p - s micro-batches live. Narayanan et al. 2019, SOSP.

    The gradient leaves before the weight half: a third less bubble, and no message holds up the steady state.
    """
    return by_key(
        pair
        for k in range(m)
        for pair in (
            (s + 2 * k, Forward(s, k)),
            (_turn(s, p, k), BackwardInput(s, k)),
            (_turn(s, p, k) + 0.5, BackwardWeight(s, k)),
        )
    )


def zero_bubble(s: int, p: int, m: int) -> list[Compute]:
    """ZB-H1: as 1F1B, but weight halves come later and fill the bubble. Qi et al. 2024, ICLR."""
    return by_key(
        pair
        for k in range(m)
        for pair in (
            (s + 2 * k, Forward(s, k)),
            (_turn(s, p, k), BackwardInput(s, k)),
            (2 * p - 1 + s + 2 * k + 0.5, BackwardWeight(s, k)),
        )
    )


def _turn(s: int, p: int, k: int) -> int:
    """The key of a backward in 1F1B."""
    return 2 * p - 1 - s + 2 * k


def interleaved(s: int, p: int, m: int, v: int) -> list[Compute]:
    """1F1B over v chunks a stage, p micro-batches a chunk in turns; p divides m. Narayanan et al. 2021, SC."""
    keyed: list[Keyed] = []
    for c in range(v):
        for k in range(m):
            group, within = divmod(k, p)
            forward, backward = ((group * v + chunk) * p + within for chunk in (c, v - 1 - c))
            keyed += [
                (2 * (s + forward), Forward(c * p + s, k)),
                (2 * (v * p + p - 1 - s + backward) - 1, Backward(c * p + s, k)),
            ]
    return by_key(keyed)


def breadth_first(s: int, p: int, m: int, v: int) -> list[Compute]:
    """All micro-batches through a chunk before the next one: each is gathered and reduced once. Lamy-Poirier 2022."""
    n = max(m, p)
    return by_key(
        pair
        for c in range(v)
        for k in range(m)
        for pair in (
            (s + c * n + k, Forward(c * p + s, k)),
            (2 * v * n + p + (p - 1 - s) + (v - 1 - c) * n + k, Backward(c * p + s, k)),
        )
    )


def zb_v(s: int, p: int, m: int) -> list[Compute]:
    """Two chunks a stage, placed as a V; least bubble at the memory of 1F1B. Qi et al. 2024, NeurIPS.

    The order is written as runs, which count the micro-batches of each kind up; those beyond m are left out.
    """
    n = max(m, 2 * p - 1)
    runs = (
        (2 * (p - s) - 1, "F0"),
        (s, "F1 F0"),
        (p - s, "F1 B1 W1"),
        (n - 2 * p + 1 + s, "F0 B0 W0 F1 B1 W1"),
        (p - 1 - s, "B0 W0 F1 B1 W1"),
        (s, "B0 B1"),
        (p - s, "B0 W0"),
        (s, "W1"),
        (s, "W0"),
    )
    parts = {"0": s, "1": 2 * p - 1 - s}
    counters: dict[str, Iterator[int]] = {}
    mine: list[Compute] = []
    for times, words in runs:
        for word in words.split() * times:
            micro = next(counters.setdefault(word, count()))
            if micro < m:
                mine.append(KINDS[word[0]](parts[word[1]], micro))
    return mine


def v_half(s: int, p: int, m: int) -> list[Compute]:
    """Two chunks a stage, placed as a V; half the memory of 1F1B. Qi et al. 2024, NeurIPS.

    Forwards and input halves repeat every six slots and leave two of them free; each weight half takes the first free one.
    """
    down, up, shift = s, 2 * p - 1 - s, 0 if p % 2 else 3
    firsts = (2 * s, 3 * p - 2 - s, 3 * p + shift - 1 + 2 * s, 6 * p + shift - 2 - s)
    keyed: list[Keyed] = []
    for k in range(m):
        forward_down, forward_up, backward_up, backward_down = (first + 6 * k for first in firsts)
        keyed += [
            (forward_down, Forward(down, k)),
            (forward_up, Forward(up, k)),
            (backward_up, BackwardInput(up, k)),
            (backward_down, BackwardInput(down, k)),
        ]
    taken, slot = {first % 6 for first in firsts}, 0
    for key, instruction in sorted(
        (pair for pair in keyed if isinstance(pair[1], BackwardInput)), key=lambda pair: pair[0]
    ):
        slot = next(free for free in count(max(slot, int(key)) + 1) if free % 6 not in taken)
        keyed.append((slot, BackwardWeight(*instruction)))
    return by_key(keyed)


def looped(p: int, v: int) -> tuple[int, ...]:
    """Parts dealt out to the stages in turns."""
    return tuple(part % p for part in range(p * v))


def vee(p: int, v: int) -> tuple[int, ...]:
    """Parts down the stages and up again, so that the last stage hands over to itself."""
    return tuple(min(part, 2 * p - 1 - part) for part in range(2 * p))


class Schedule(NamedTuple):
    """A line of the table.

    compute  (stage, stages, micro-batches, chunks) -> the instructions of a stage
    chunks   parts of a stage where that is fixed; None: any number
    place    (stages, chunks) -> the stage of each part
    grouped  whether the number of micro-batches must be a multiple of the number of stages
    """

    compute: Callable[[int, int, int, int], list[Compute]]
    chunks: int | None = None
    place: Callable[[int, int], tuple[int, ...]] = looped
    grouped: bool = False


def of_chunks(
    compute: Callable[[int, int, int], list[Compute]],
    chunks: int,
    place: Callable[[int, int], tuple[int, ...]],
) -> Schedule:
    """A schedule whose number of chunks is fixed."""
    return Schedule(lambda s, p, m, v: compute(s, p, m), chunks, place)


SCHEDULES = {
    "naive": of_chunks(naive, 1, looped),
    "gpipe": of_chunks(gpipe, 1, looped),
    "1f1b": of_chunks(one_f_one_b, 1, looped),
    "interleaved": Schedule(interleaved, grouped=True),
    "zero-bubble": of_chunks(zero_bubble, 1, looped),
    "zb-v": of_chunks(zb_v, 2, vee),
    "v-half": of_chunks(v_half, 2, vee),
    "breadth-first": Schedule(breadth_first),
}
"""Every schedule of a step by name. A line here is all it takes: the command line and the laws read this table."""

STREAMS: dict[str, Callable[[int], int]] = {"async": lambda p: 0, "async-2bw": lambda p: p}
"""Those that go on over the ends of steps, in the order of 1f1b, while each stage updates by itself: (stages) -> `every` of
`memory.versions`, the least that there can be. What they do in a step says
`async_pipeline.py`, how they update `parallel/data/weight_stashing.py`."""

NAMED = {**SCHEDULES, **dict.fromkeys(STREAMS, SCHEDULES["1f1b"])}


def plan_of(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Plan:
    """What every stage computes, by a schedule of the table.

    chunks   parts of a stage; None: as many as the schedule has, 2 if it may have any number
    raises   ConfigError for a name that the table lacks, and for numbers that the schedule cannot serve
    """
    if name not in NAMED:
        raise ConfigError(
            f"The schedule must be one of {', '.join(NAMED)}, or a file, but {name!r} is neither."
        )
    schedule = NAMED[name]
    many = chunks if chunks is not None else schedule.chunks or 2
    if min(stages, micro_batches, many) < 1:
        raise ConfigError(
            f"A pipeline has at least 1 stage, 1 micro-batch and 1 chunk a stage, but these are {stages}, "
            f"{micro_batches} and {many}."
        )
    if schedule.chunks not in (None, many):
        others = ", ".join(other for other, line in NAMED.items() if line.chunks in (None, many))
        raise ConfigError(
            f"Schedule {name} has {schedule.chunks} chunk(s) a stage, but {many} were asked for.",
            f"Leave the number of chunks out, or take one of {others}.",
        )
    if schedule.grouped and micro_batches % stages:
        raise ConfigError(
            f"Schedule {name} takes as many micro-batches at a time as there are stages, but {stages} stages do "
            f"not divide {micro_batches} micro-batches.",
            f"Take {multiples_near(micro_batches, stages)} micro-batches, or schedule 1f1b or breadth-first, which "
            "serve any number.",
        )
    return Plan(
        schedule.place(stages, many),
        tuple(
            tuple(schedule.compute(stage, stages, micro_batches, many)) for stage in range(stages)
        ),
    )
