"""Traffic of a collective: counted from its messages, beside the published formula.

Legend of the formulas:

    n   ranks
    n'  largest power of two up to n
    r   n - n'
    h   hosts
    k   ranks of the smallest host
    g   ranks of the largest host
    S   bytes of the whole array
"""

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from mpitrain.collectives.engine.executor import check_name
from mpitrain.collectives.selection.algorithm import Topology, is_file, shown
from mpitrain.collectives.selection.cost_model import Tuning, predict
from mpitrain.collectives.selection.table import TABLES, title
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.tools.plan import MOST_SHOWN, several, uncollected
from mpitrain.tools.plan.collective import Collective, listed, plans_of
from mpitrain.tools.text_table import TextColumn, TextTable

ITEM = 4
"""Bytes of an element."""


class Totals(NamedTuple):
    """Steps, messages and data of a collective.

    all_ranks  data that all ranks together send, in units of the array
    busiest    data that the busiest rank sends, in units of the array
    """

    steps: int | Fraction
    messages: int | Fraction
    all_ranks: int | Fraction
    busiest: int | Fraction


NAMES = ("steps", "messages", "sent by all ranks", "sent by the busiest one")
"""The fields of Totals in words."""


class FormulaLetters(NamedTuple):
    """Values of the letters in the formulas; see the legend of this file.

    power  n'
    """

    n: int
    power: int
    h: int
    k: int
    g: int

    @property
    def lg(self) -> int:
        return self.power.bit_length() - 1

    @property
    def r(self) -> int:
        return self.n - self.power


class PublishedTotals(NamedTuple):
    steps: str
    messages: str
    all_ranks: str
    busiest: str
    value: Callable[[FormulaLetters], tuple[int | Fraction, ...]]


_HALF = PublishedTotals(
    "n - 1",
    "n (n - 1)",
    "(n - 1) S",
    "(n - 1)/n S",
    lambda x: (x.n - 1, x.n * (x.n - 1), x.n - 1, Fraction(x.n - 1, x.n)),
)

_BRUCK = PublishedTotals(
    "ceil(lg n)",
    "(n - 1) (ceil(lg n) + 1)",
    "(n - 1) S",
    "(n - 1)/n S",
    lambda x: (
        (x.n - 1).bit_length(),
        (x.n - 1) * ((x.n - 1).bit_length() + 1),
        x.n - 1,
        Fraction(x.n - 1, x.n),
    ),
)

FORMULAS = {
    ("allreduce", "ring"): PublishedTotals(
        "2 (n - 1)",
        "2 n (n - 1)",
        "2 (n - 1) S",
        "2 (n - 1)/n S",
        lambda x: (2 * (x.n - 1), 2 * x.n * (x.n - 1), 2 * (x.n - 1), Fraction(2 * (x.n - 1), x.n)),
    ),
    ("allreduce", "halving-doubling"): PublishedTotals(
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
    ("allreduce", "recursive-doubling"): PublishedTotals(
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
    ("allreduce", "tree"): PublishedTotals(
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
    ("allreduce", "star"): PublishedTotals(
        "2",
        "2 (n - 1)",
        "2 (n - 1) S",
        "(n - 1) S",
        lambda x: (2 * (x.n > 1), 2 * (x.n - 1), 2 * (x.n - 1), x.n - 1),
    ),
    ("allreduce", "hierarchical"): PublishedTotals(
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
    ("reduce-scatter", "bruck"): _BRUCK,
    ("reduce-scatter", "pairwise"): _HALF,
    ("all-gather", "ring"): _HALF,
    ("all-gather", "bruck"): _BRUCK,
    ("all-gather", "pairwise"): _HALF,
}
"""Formulas by operation and algorithm.

Uneven chunks change the total of the busiest rank by less than one chunk.
"""


def numbers(hosts: Sequence[str]) -> FormulaLetters:
    ranks = Counter(hosts).values()
    return FormulaLetters(
        len(hosts), 1 << len(hosts).bit_length() - 1, len(ranks), min(ranks), max(ranks)
    )


def sent_by(collective: Collective) -> list[Fraction]:
    sent = [0] * collective.ranks
    for message in (message for messages in collective.steps for message in messages):
        sent[message.source] += (
            collective.bounds[message.last - 1][1] - collective.bounds[message.first][0]
        )
    return [Fraction(elements, collective.elements) for elements in sent]


def totals(collective: Collective) -> Totals:
    sent = sent_by(collective)
    return Totals(
        len(collective.steps), sum(map(len, collective.steps)), sum(sent, Fraction()), max(sent)
    )


def table_of_totals(collective: Collective) -> list[str]:
    counted, sent = totals(collective), sent_by(collective)
    formula = FORMULAS.get((collective.operation, collective.algorithm))
    busiest = listed((rank for rank, arrays in enumerate(sent) if arrays == counted.busiest), ",")
    texts = formula[:4] if formula else ("-",) * 4
    x = numbers(collective.hosts)
    values = formula.value(x) if formula else (None,) * 4
    rows = []
    for name, count, text, value in zip(NAMES, counted, texts, values, strict=True):
        unit = " S" if name.startswith("sent") else ""
        by_formula = None if value is None else amount(value) + unit
        rows.append((name, amount(count) + unit, text, by_formula))
    lines = TextTable(
        [
            TextColumn("of an array of S bytes", "<24", 0),
            TextColumn("counted", "10", 1, gap=0),
            TextColumn("formula", "<31", 2, gap=4),
            TextColumn("is", "8", 3),
        ]
    ).lines(rows)
    lines += [f"busiest rank: {busiest}"] if counted.messages else []
    letters, used = [f"n = {several(x.n, 'rank')}"], " ".join(texts)
    if "n'" in used:
        letters += [f"n' = {x.power}, the largest power of 2 up to n", f"r = n - n' = {x.r}"]
    if "h" in used:
        letters += [
            f"h = {several(x.h, 'host')}",
            f"k = {x.k} and g = {x.g} ranks on the smallest and the largest host",
        ]
    lines += [f"where {', '.join(letters)}"]
    if not formula:
        lines += [
            f"-: no formula is known for {shown(collective.algorithm)}; its messages were counted"
        ]
    return lines


def amount(number: float | Fraction) -> str:
    """Return a number as text with at most four digits; whole numbers stay as they are."""
    return f"{int(number)}" if number == int(number) else f"{float(number):.4g}"


@uncollected()
def times(operation: str, hosts: Sequence[str], nbytes: int, tuning: Tuning) -> list[str]:
    """Return a table of the times that the cost model predicts for algorithms with plans, below a title."""
    seconds = {
        name: predict(tuning, operation, name, hosts, nbytes // ITEM, ITEM)
        for name, row in TABLES[operation].items()
        if row.plans and not is_file(name) and not row.refusal(Topology(hosts))
    }
    rows = sorted(seconds.items(), key=lambda row: row[1])
    columns = [
        TextColumn("algorithm", "<24", 0),
        TextColumn("predicted ms", "12.4g", lambda row: 1e3 * row[1]),
    ]
    constants = (
        "30 us and 1 GB/s between hosts" if tuning is DEFAULT else "the constants of --tuning"
    )
    title = f"of a float32 array of {nbytes:,} bytes, with {constants}:"
    return [title, *TextTable(columns).lines(rows)]


def of_many(operation: str, algorithm: str, hosts: Sequence[str]) -> list[str]:
    """Return lines about a collective on more ranks than its steps are printed for.

    raises  ConfigError for an algorithm without a formula
    """
    check_name(
        f"{operation} algorithm", algorithm, [name for of, name in FORMULAS if of == operation]
    )
    what = f"{shown(algorithm)} {title(operation)} on {len(hosts):,} ranks on {several(len({*hosts}), 'host')}"
    formula = FORMULAS[operation, algorithm]
    return [
        f"{what}; steps are printed up to {MOST_SHOWN} ranks",
        *(
            f"{name}: {text} = {amount(value)}{' S' * name.startswith('sent')}"
            for name, text, value in zip(
                NAMES, formula[:4], formula.value(numbers(hosts)), strict=True
            )
        ),
    ]


def amounts(operation: str, algorithm: str, hosts: Sequence[str], nbytes: int) -> list[str]:
    """Return lines with the bytes that each rank sends for a float32 array of `nbytes` bytes.

    A long array is sent in segments, each of which is a message.
    """
    same: dict[tuple[int, int], list[int]] = {}
    for rank, plans in enumerate(plans_of(operation, algorithm, hosts, nbytes // ITEM)):
        messages = [t.stop - t.start for plan in plans for step in plan.steps for t in step.sends]
        same.setdefault((ITEM * sum(messages), len(messages)), []).append(rank)
    lines = [
        f"{'each of ranks' if ranks[1:] else 'rank'} {listed(ranks, ', ')}: {total} bytes in "
        f"{several(messages, 'message')}"
        for (total, messages), ranks in same.items()
    ]
    return [
        f"of an array of {nbytes} bytes, float32:",
        *lines,
        f"all together: {sum(total * len(ranks) for (total, _), ranks in same.items())} bytes",
    ]
