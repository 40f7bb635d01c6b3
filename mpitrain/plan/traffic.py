"""What a collective sends: counted from its messages, beside the published formula.

Legend: n ranks, n' the largest power of two up to n, r = n - n'; h hosts, k the ranks of the
smallest host, g of the largest; S bytes of the whole array.
"""

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from mpitrain.plan.collective import Collective, plans_of
from mpitrain.plan.words import listed, several

ITEM = 4
"""Bytes of an element."""


class Totals(NamedTuple):
    """Steps, messages, and what all ranks and the busiest one send: 2 is twice the array."""

    steps: int | Fraction
    messages: int | Fraction
    all_ranks: int | Fraction
    busiest: int | Fraction


class Numbers(NamedTuple):
    """The letters of the formulas."""

    n: int
    power: int
    h: int
    k: int
    g: int

    @property
    def lg(self) -> int:
        """lg n'."""
        return self.power.bit_length() - 1

    @property
    def r(self) -> int:
        return self.n - self.power


class Formula(NamedTuple):
    """Totals in words, and as a function of the numbers."""

    steps: str
    messages: str
    all_ranks: str
    busiest: str
    value: Callable[[Numbers], tuple[int | Fraction, ...]]


_HALF = Formula(
    "n - 1",
    "n (n - 1)",
    "(n - 1) S",
    "(n - 1)/n S",
    lambda x: (x.n - 1, x.n * (x.n - 1), x.n - 1, Fraction(x.n - 1, x.n)),
)

FORMULAS = {
    ("allreduce", "ring"): Formula(
        "2 (n - 1)",
        "2 n (n - 1)",
        "2 (n - 1) S",
        "2 (n - 1)/n S",
        lambda x: (2 * (x.n - 1), 2 * x.n * (x.n - 1), 2 * (x.n - 1), Fraction(2 * (x.n - 1), x.n)),
    ),
    ("allreduce", "halving-doubling"): Formula(
        "2 lg n', + 2 if r > 0",
        "2 n' lg n' + 2 r",
        "2 (n - 1) S",
        "2 (n' - 1)/n' S, + S if r > 0",
        lambda x: (
            2 * x.lg + 2 * (x.r > 0),
            2 * x.power * x.lg + 2 * x.r,
            2 * (x.n - 1),
            Fraction(2 * (x.power - 1), x.power) + (x.r > 0),
        ),
    ),
    ("allreduce", "recursive-doubling"): Formula(
        "lg n', + 2 if r > 0",
        "n' lg n' + 2 r",
        "(n' lg n' + 2 r) S",
        "lg n' S, + S if r > 0",
        lambda x: (
            x.lg + 2 * (x.r > 0),
            x.power * x.lg + 2 * x.r,
            x.power * x.lg + 2 * x.r,
            x.lg + (x.r > 0),
        ),
    ),
    ("allreduce", "tree"): Formula(
        "2 ceil(lg n)",
        "2 (n - 1)",
        "2 (n - 1) S",
        "ceil(lg n) S",
        lambda x: (
            2 * (x.n - 1).bit_length(),
            2 * (x.n - 1),
            2 * (x.n - 1),
            (x.n - 1).bit_length(),
        ),
    ),
    ("allreduce", "star"): Formula(
        "2",
        "2 (n - 1)",
        "2 (n - 1) S",
        "(n - 1) S",
        lambda x: (2 * (x.n > 1), 2 * (x.n - 1), 2 * (x.n - 1), x.n - 1),
    ),
    ("allreduce", "hierarchical"): Formula(
        "2 (h - 1), + 2 if g > 1",
        "2 k (n - h) + 2 k h (h - 1)",
        "2 (n - 1) S",
        "(k + g - 2 + 2 (h - 1)/h)/k S",
        lambda x: (
            2 * (x.h - 1) + 2 * (x.g > 1),
            2 * x.k * (x.n - x.h) + 2 * x.k * x.h * (x.h - 1),
            2 * (x.n - 1),
            (x.k + x.g - 2 + Fraction(2 * (x.h - 1), x.h)) / x.k,
        ),
    ),
    ("reduce-scatter", "ring"): _HALF,
    ("reduce-scatter", "pairwise"): _HALF,
    ("all-gather", "ring"): _HALF,
    ("all-gather", "pairwise"): _HALF,
}
"""By operation and algorithm; uneven chunks change the busiest rank by less than one chunk."""


def numbers(hosts: Sequence[str]) -> Numbers:
    """The letters of the formulas for ranks on these hosts."""
    ranks = Counter(hosts).values()
    return Numbers(len(hosts), 1 << len(hosts).bit_length() - 1, len(ranks), min(ranks), max(ranks))


def sent_by(found: Collective) -> list[Fraction]:
    """What each rank sends, in arrays."""
    sent = [0] * found.ranks
    for message in (message for messages in found.steps for message in messages):
        sent[message.source] += found.bounds[message.last - 1][1] - found.bounds[message.first][0]
    return [Fraction(elements, found.elements) for elements in sent]


def totals(found: Collective) -> Totals:
    """Counted from the messages, for chunks that each travel in one message."""
    sent = sent_by(found)
    return Totals(len(found.steps), sum(map(len, found.steps)), sum(sent, Fraction()), max(sent))


def sent_of_array(
    operation: str, algorithm: str, hosts: Sequence[str], nbytes: int
) -> list[tuple[int, int]]:
    """Bytes and messages that each rank sends of a float32 array; segments are messages."""
    plans = plans_of(operation, algorithm, hosts, nbytes // ITEM)
    sent = [
        [ITEM * (t.stop - t.start) for plan in mine for step in plan.steps for t in step.sends]
        for mine in plans
    ]
    return [(sum(messages), len(messages)) for messages in sent]


def table_of_totals(found: Collective, width: int) -> list[str]:
    """Counted totals, the formula, and its value."""
    counted, formula, sent = (
        totals(found),
        FORMULAS.get((found.operation, found.algorithm)),
        sent_by(found),
    )
    busiest = listed((rank for rank, arrays in enumerate(sent) if arrays == counted.busiest), ",")
    values = formula.value(numbers(found.hosts)) if formula else ()
    lines = [f"{'of an array of S bytes':<24}{'counted':>10}    {'formula':<31} {'is':>8}"]
    names = ("steps", "messages", "sent by all ranks", "sent by the busiest one")
    for name, count, text, value in zip(
        names, counted, formula[:4] if formula else (), values, strict=True
    ):
        unit = " S" if name.startswith("sent") else ""
        lines.append(
            f"{name:<24}{amount(count) + unit:>10}    {text:<31} {amount(value) + unit:>8}"
        )
    lines += textwrap.wrap(f"busiest rank: {busiest}", width) if counted.messages else []
    return [
        *lines,
        *textwrap.wrap(_letters(found, " ".join(formula[:4]) if formula else ""), width),
    ]


def amount(number: float | Fraction) -> str:
    """At most four digits, and whole numbers as they are."""
    return f"{int(number)}" if number == int(number) else f"{float(number):.4g}"


def _letters(found: Collective, formula: str) -> str:
    """The letters of a formula, with their values here."""
    x = numbers(found.hosts)
    letters = [f"n = {several(x.n, 'rank')}"]
    if "n'" in formula:
        letters += [f"n' = {x.power}, the largest power of 2 up to n", f"r = n - n' = {x.r}"]
    if "h" in formula:
        letters += [
            f"h = {several(x.h, 'host')}",
            f"k = {x.k} and g = {x.g} ranks on the smallest and the largest host",
        ]
    return f"where {', '.join(letters)}"


def amounts(operation: str, algorithm: str, hosts: Sequence[str], nbytes: int) -> list[str]:
    """What each rank sends of a float32 array of so many bytes, in words.

    Segments of long arrays are messages of their own.
    """
    sent = sent_of_array(operation, algorithm, hosts, nbytes)
    same: dict[tuple[int, int], list[int]] = {}
    for rank, each in enumerate(sent):
        same.setdefault(each, []).append(rank)
    lines = [
        f"{'each of ranks' if ranks[1:] else 'rank'} {listed(ranks, ', ')}: {total} bytes in "
        f"{several(messages, 'message')}"
        for (total, messages), ranks in same.items()
    ]
    return [
        f"of an array of {nbytes} bytes, float32:",
        *lines,
        f"all together: {sum(total for total, _ in sent)} bytes",
    ]
