"""Fitting the cost model to measurements, and checking it on sizes that it has not seen."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpitrain.bench.collectives.least_absolute import least_absolute
from mpitrain.bench.collectives.row import Row
from mpitrain.bench.collectives.table import FAR, is_spoilt
from mpitrain.collectives.plans.topology import Topology
from mpitrain.collectives.selection.choose import choose
from mpitrain.collectives.selection.cost_model import (
    KNOTS,
    TERMS,
    Constants,
    Tuning,
    is_whole,
    predict,
    shares,
    work,
)
from mpitrain.collectives.selection.tuning import DEFAULT

SHORT = 1 << 14
"""Bytes up to which an array is short: there the number of messages determines the time."""


class Check(NamedTuple):
    """The accuracy of a fit on sizes that were left out of it.

    error      median over rows of |predicted - measured| / measured
    short      the same for arrays of up to SHORT bytes
    choices    {bytes: (chosen algorithm, its time over the fastest algorithm's)}
    """

    error: float
    short: float
    choices: dict[int, tuple[str, float]]


def median_of_sweeps(rows: Sequence[Row]) -> list[Row]:
    """Return one row per algorithm, buffers and size, with its median time; drop spoilt rows."""
    found: dict[tuple, list[Row]] = {}
    for row in (row for row in rows if not is_spoilt(row)):
        found.setdefault((row.chosen, row.buffers, row.bytes), []).append(row)
    return [
        same[0]._replace(time_us=median(row.time_us for row in same)) for same in found.values()
    ]


def fit(machine: dict[str, Any], hosts: Sequence[str], rows: Sequence[Row]) -> Tuning:
    """Fit the constants for one number of ranks to measured all-reduces."""
    n, defaults = len(hosts), next(iter(DEFAULT.plans.values()))
    plans: dict[str, Constants] = {}
    whole: dict[str, dict[str, Constants]] = {}
    for memory in dict.fromkeys(row.buffers for row in rows):
        here = [row for row in rows if row.buffers == memory]
        moved = [row for row in here if not is_whole("allreduce", row.chosen)]
        works = [
            work(
                "allreduce", row.chosen, hosts, row.count, row.bytes // row.count, machine["cores"]
            )
            for row in moved
        ]
        plans[memory] = constants(moved, works, defaults[memory])
        whole[memory] = {}
        for name in dict.fromkeys(row.chosen for row in here if is_whole("allreduce", row.chosen)):
            mine = [row for row in here if row.chosen == name]
            whole[memory][name] = constants(mine, [(1, row.bytes) for row in mine])
    return Tuning(machine, {n: plans}, {n: whole})


def constants(
    rows: Sequence[Row], amounts: Sequence[Sequence[float]], defaults: Constants | None = None
) -> Constants:
    """Fit the nonnegative constants at every knot (array size), by least absolute relative error.

    A constant that no row determines is copied from the nearest knot that has it, or else is the
    default. The same holds for a knot far from all measured sizes. On slow links, for example, no
    array is long enough for the last knot. Without rows, all constants are defaults.

    amounts  per row, the amount of work that each constant multiplies
    """
    if not rows:
        return defaults or {}
    seconds = np.array([row.time_us * 1e-6 for row in rows])
    near = np.array([shares(row.bytes) for row in rows])
    held = np.flatnonzero(near.max(axis=0) >= 0.5)
    for knot in set(range(len(KNOTS))).difference(held):
        near[:, held[np.abs(held - knot).argmin()]] += near[:, knot]
        near[:, knot] = 0
    columns = near[:, :, None] * np.array(amounts, float)[:, None, :]
    found = least_absolute(columns.reshape(len(rows), -1) / seconds[:, None]).reshape(
        columns.shape[1:]
    )
    known = columns.any(axis=0)
    for knot, term in np.argwhere(~known):
        others = np.flatnonzero(known[:, term])
        if others.size:
            found[knot, term] = found[others[np.abs(others - knot).argmin()], term]
        elif defaults:
            found[knot, term] = defaults[KNOTS[knot]][term]
    return {knot: tuple(map(float, values)) for knot, values in zip(KNOTS, found, strict=True)}


def check(tuning: Tuning, hosts: Sequence[str], rows: Sequence[Row]) -> dict[str, Check]:
    """Compare the model with rows that were not used in the fit, for each class of memory."""
    return {
        memory: _check(tuning, hosts, [row for row in rows if row.buffers == memory], memory)
        for memory in dict.fromkeys(row.buffers for row in rows)
        if memory in tuning.plans[len(hosts)]
    }


def _check(tuning: Tuning, hosts: Sequence[str], rows: Sequence[Row], memory: str) -> Check:
    errors: dict[bool, list[float]] = {True: [], False: []}
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        predicted = (
            predict(
                tuning, "allreduce", row.chosen, hosts, row.count, row.bytes // row.count, memory
            )
            * 1e6
        )
        # The prediction is not finite if every row of this algorithm in the fit was spoilt.
        if math.isfinite(predicted):
            errors[row.bytes <= SHORT].append(abs(predicted - row.time_us) / row.time_us)
        times.setdefault((row.bytes, row.count), {})[row.chosen] = row.time_us
    choices = {}
    for (nbytes, count), measured in times.items():
        chosen = choose(tuning, Topology(hosts), count, nbytes // count, memory=memory)
        if chosen in measured:
            choices[nbytes] = chosen, measured[chosen] / min(measured.values())
    return Check(
        median(errors[True] + errors[False] or [math.nan]),
        median(errors[True] or [math.nan]),
        choices,
    )


def all_spoilt(rows: Sequence[Row]) -> list[str]:
    """Return the classes of memory in which every row is spoilt (see `table.is_spoilt`)."""
    return sorted(
        {row.buffers for row in rows} - {row.buffers for row in rows if not is_spoilt(row)}
    )


def checked(machine: dict[str, Any], hosts: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Fit to every second size; return, for each class of memory, a line on the remaining sizes.

    The line states the errors of the fit at the sizes that were left out of it.
    """
    spoilt, total = sum(map(is_spoilt, rows)), len(rows)
    rows = median_of_sweeps(rows)
    known = sorted({row.bytes for row in rows})[::2]
    found = fit(machine, hosts, [row for row in rows if row.bytes in known])
    lines = [
        f"~ {spoilt} of {total} rows are left out: their median is above {FAR:g} times the fastest run"
    ] * bool(spoilt)
    for memory, (error, short, choices) in check(
        found, hosts, [row for row in rows if row.bytes not in known]
    ).items():
        good = sum(ratio <= 1.15 for _, ratio in choices.values())
        lines.append(
            f"{memory} arrays of sizes left out: predicted within {error:.0%} (median; {short:.0%} up to "
            f"{SHORT >> 10} KiB); auto is the fastest or within 15% of it at {good} of {len(choices)}: "
            + ", ".join(
                f"{nbytes}: {chosen} {ratio:.2f}" for nbytes, (chosen, ratio) in choices.items()
            )
        )
    return lines


def merged(old: Tuning | None, new: Tuning) -> Tuning:
    """Return the new constants, and the old ones for numbers of ranks that `new` does not have.

    Old constants of another machine are dropped.
    """
    if old is None or old.machine != new.machine:
        return new
    return Tuning(new.machine, {**old.plans, **new.plans}, {**old.whole, **new.whole})


def described(tuning: Tuning, n: int) -> list[str]:
    """Format the constants for n ranks as tables with a legend.

    Constants of the network appear only if there is more than one host.
    """
    lines = []
    measured = [
        at
        for at, term in enumerate(TERMS)
        if tuning.machine["hosts"] > 1 or not term.startswith("net_")
    ]
    for memory, constants in tuning.plans[n].items():
        lines.append(
            f"{memory + ' arrays of':>16}  " + "  ".join(f"{TERMS[at]:>10}" for at in measured)
        )
        for knot, values in constants.items():
            shown = [
                f"{c * 1e6:10.2f}"
                if term.endswith(("alpha", "long"))
                else f"{1e-9 / c:10.2f}"
                if c
                else f"{'-':>10}"
                for term, c in zip(TERMS, values, strict=True)
            ]
            lines.append(f"{knot:14d} B  " + "  ".join(shown[at] for at in measured))
    return [
        *lines,
        "alpha: us of a message; long: us more of one that waits for its receiver; beta: GB/s of messages; "
        "gamma: GB/s of sums",
        "",
    ]
