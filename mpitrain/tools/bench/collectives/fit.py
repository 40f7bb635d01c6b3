"""Fit of the cost model's constants to measured collectives, and checks on sizes left out of the fit."""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.cost_model import (
    KNOTS,
    LEVELS,
    TERMS,
    Constants,
    Level,
    Tuning,
    choose,
    is_whole,
    level_of,
    predict,
    shares,
    work,
)
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.tools.bench.collectives.sweep import CollectiveRow
from mpitrain.tools.bench.collectives.table import is_spoilt
from mpitrain.tools.bench.turns import FAR
from mpitrain.tools.text_table import TextColumn, TextTable

SHORT = 1 << 14
"""Bytes up to which an array is short: there the number of messages determines the time."""
NEGLIGIBLE = 10.0
"""A run shows the rate of a link if it takes at least NEGLIGIBLE times the latency."""
ZERO = 1e-9
"""Costs and pivots closer to 0 are rounding errors; all columns have norm 1."""
RAISED = 1e-10
"""Upper bound of the random amount that is added to a target."""


class Check(NamedTuple):
    """Accuracy of the cost model on measured sizes that were left out of its fit.

    error    median over rows of |predicted - measured| / measured
    short    the same median over arrays of up to SHORT bytes
    choices  {bytes: (algorithm that `auto` chooses, its time divided by the fastest one's)}
    """

    error: float
    short: float
    choices: dict[int, tuple[str, float]]


def median_of_sweeps(rows: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    """Join the sweeps: one row per algorithm, buffers and size, with the median of the times.

    Spoilt rows are left out.
    """
    sweeps: dict[tuple, list[CollectiveRow]] = {}
    for row in (row for row in rows if not is_spoilt(row)):
        sweeps.setdefault((row.chosen, row.buffers, row.bytes), []).append(row)
    return [
        same[0]._replace(time_us=median(row.time_us for row in same)) for same in sweeps.values()
    ]


def levels_seen(hosts: Sequence[str], sockets: Sequence[str]) -> dict[str, list[int]]:
    """Return {level: number of each rank's group}, the narrowest first; the last has all ranks.

    Only levels that rank 0 shares with another rank. Groups are the places of a level.

    hosts, sockets  as in `level_of`
    """
    socket_places: list[Any] = [*zip(hosts, sockets, strict=True)]
    seen = dict[str, list[int]]()
    for name, places in zip(LEVELS, (socket_places, hosts, [""] * len(hosts)), strict=True):
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        group = [rank for rank, place in enumerate(places) if place == places[0]]
        spanned = level_of([hosts[rank] for rank in group], [sockets[rank] for rank in group])
        if len(group) > 1 and spanned == name:
            seen[name] = [numbers[place] for place in places]
    return seen


def fit(
    machine: dict[str, Any], hosts: Sequence[str], rows: Sequence[CollectiveRow], level: str = ""
) -> Tuning:
    """Fit the constants of the cost model to measured all-reduces on one number of ranks.

    level  that the ranks span; "": the one that their hosts show
    """
    name, n = level or level_of(hosts), len(hosts)
    defaults = next(iter(DEFAULT.nearest(name)[1].plans.values()))
    link = link_seconds(hosts, rows, machine["cores"])
    plans: dict[str, Constants] = {}
    whole: dict[str, dict[str, Constants]] = {}
    for memory in dict.fromkeys(row.buffers for row in rows):
        of_memory = [row for row in rows if row.buffers == memory]
        moved = [row for row in of_memory if not is_whole("allreduce", row.chosen)]
        works = [
            work(
                "allreduce", row.chosen, hosts, row.count, row.bytes // row.count, machine["cores"]
            )
            for row in moved
        ]
        least = np.zeros((len(KNOTS), len(TERMS)))
        least[:, TERMS.index("net_beta")] = link
        plans[memory] = constants(moved, works, least, defaults[memory])
        alone = Tuning(machine, {name: Level({n: plans}, {n: {memory: {} for memory in plans}})})
        whole[memory] = {}
        for algorithm in dict.fromkeys(
            row.chosen for row in of_memory if is_whole("allreduce", row.chosen)
        ):
            measured = [row for row in of_memory if row.chosen == algorithm]
            least = np.zeros((len(KNOTS), 2))
            least[:, 1] = link * crossing(hosts)
            last = max(measured, key=lambda row: row.bytes)
            if last.time_us > min(
                (row.time_us for row in moved if row.bytes == last.bytes), default=math.inf
            ):
                names = {row.chosen for row in moved}
                knot = max(0, bisect_right(KNOTS, last.bytes) - 1)
                bound = _fastest_plan(alone, names, hosts, last, memory)
                least[knot:] = np.maximum(least[knot:], bound)
            whole[memory][algorithm] = constants(
                measured, [(1, row.bytes) for row in measured], least
            )
    return Tuning(machine, {name: Level({n: plans}, {n: whole})})


def _fastest_plan(
    plans: Tuning, names: Collection[str], hosts: Sequence[str], row: CollectiveRow, memory: str
) -> tuple[float, float]:
    """Return (a, b): near the size of a row, the predicted time of the fastest plan is a + b * bytes.

    names  algorithms with plans
    """
    once, twice = (
        min(
            predict(
                plans, "allreduce", name, hosts, times * row.count, row.bytes // row.count, memory
            )
            for name in names
        )
        for times in (1, 2)
    )
    b = (twice - once) / row.bytes
    return max(0.0, once - b * row.bytes), b


def crossing(hosts: Sequence[str]) -> float:
    """Return the least fraction of an array that some host sends to others in an all-reduce."""
    return 2 * (1 - 1 / len(set(hosts)))


def link_seconds(hosts: Sequence[str], rows: Sequence[CollectiveRow], cores: int) -> float:
    """Return the seconds per byte of the fastest run over a host's link; 0 if no run shows them.

    The time of an algorithm's shortest array is subtracted as its latency. Only runs that take
    NEGLIGIBLE times this latency, or longer, are used.
    """
    seconds_per_byte = []
    for row in rows:
        latency = min(
            (other.bytes, other.time_us)
            for other in rows
            if (other.chosen, other.buffers) == (row.chosen, row.buffers)
        )[1]
        if row.time_us < NEGLIGIBLE * latency:
            continue
        sent = crossing(hosts) * row.bytes
        if not is_whole("allreduce", row.chosen):
            sent = work(
                "allreduce", row.chosen, hosts, row.count, row.bytes // row.count, cores
            ).net_bytes
        if sent:
            seconds_per_byte.append(1e-6 * (row.time_us - latency) / sent)
    return min(seconds_per_byte, default=0.0)


def constants(
    rows: Sequence[CollectiveRow],
    amounts: Sequence[Sequence[float]],
    least: np.ndarray,
    defaults: Constants | None = None,
) -> Constants:
    """Fit the constants of the cost model at every knot (array size), by least absolute relative error.

    If no row determines a constant at a knot, the constant is copied from the nearest knot at which
    rows do; if there is none, it is the default. So a knot far from all measured sizes has copies:
    on slow links, for example, no measured array is as long as the last knot. Without rows, all
    constants are defaults.

    amounts  per row: the amount of work that each constant multiplies, (rows, terms)
    least    lower bounds of the constants, (knots, terms)
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
    fitted = least_absolute(
        columns.reshape(len(rows), -1) / seconds[:, None], least.reshape(-1)
    ).reshape(least.shape)
    known = columns.any(axis=0)
    for knot, term in np.argwhere(~known):
        others = np.flatnonzero(known[:, term])
        if others.size:
            fitted[knot, term] = fitted[others[np.abs(others - knot).argmin()], term]
        elif defaults:
            fitted[knot, term] = defaults[KNOTS[knot]][term]
    fitted = np.maximum(fitted, least)
    return {knot: tuple(map(float, values)) for knot, values in zip(KNOTS, fitted, strict=True)}


def check(tuning: Tuning, hosts: Sequence[str], rows: Sequence[CollectiveRow]) -> dict[str, Check]:
    """Compare the cost model with rows that it was not fitted to; return {class of memory: Check}."""
    return {
        memory: _check(tuning, hosts, [row for row in rows if row.buffers == memory], memory)
        for memory in dict.fromkeys(row.buffers for row in rows)
        if memory in tuning.nearest(level_of(hosts))[1].plans[len(hosts)]
    }


def _check(
    tuning: Tuning, hosts: Sequence[str], rows: Sequence[CollectiveRow], memory: str
) -> Check:
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


def all_spoilt(rows: Sequence[CollectiveRow]) -> list[str]:
    """Return the classes of memory in which every row is spoilt (see `table.is_spoilt`)."""
    return sorted(
        {row.buffers for row in rows} - {row.buffers for row in rows if not is_spoilt(row)}
    )


def checked(
    machine: dict[str, Any], hosts: Sequence[str], rows: Sequence[CollectiveRow]
) -> list[str]:
    """Fit the model to every second size; return one line per class of memory on the other sizes.

    The line has the errors of the predictions, and how fast the choices of `auto` are.
    """
    spoilt, total = sum(map(is_spoilt, rows)), len(rows)
    rows = median_of_sweeps(rows)
    known = sorted({row.bytes for row in rows})[::2]
    tuning = fit(machine, hosts, [row for row in rows if row.bytes in known])
    lines = [
        f"~ {spoilt} of {total} rows are left out: their median is above {FAR:g} times the fastest run"
    ] * bool(spoilt)
    for memory, (error, short, choices) in check(
        tuning, hosts, [row for row in rows if row.bytes not in known]
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


def decided(tuning: Tuning, hosts: Sequence[str], rows: Sequence[CollectiveRow]) -> list[str]:
    """Return lines, one per class of memory: the sizes from which `auto` chooses which algorithm."""
    rows, lines = median_of_sweeps(rows), []
    if link := link_seconds(hosts, rows, tuning.machine["cores"]):
        lines.append(
            f"a host's link carries {1e-6 / link:.3g} MB/s at most, so no all-reduce of S bytes takes less "
            f"than {crossing(hosts):.3g} S / {1e-6 / link:.3g} MB/s"
        )
    for memory in tuning.nearest(level_of(hosts))[1].plans[len(hosts)]:
        counts = sorted({(row.bytes, row.count) for row in rows if row.buffers == memory})
        chosen = [
            (choose(tuning, Topology(hosts), count, nbytes // count, memory), nbytes)
            for nbytes, count in counts
        ]
        steps = [
            f"{name} from {next(same)[1]}" for name, same in groupby(chosen, lambda each: each[0])
        ]
        lines.append(
            f"{memory} arrays of {counts[0][0]} to {counts[-1][0]} bytes decide: auto takes {', '.join(steps)}; "
            "times of longer ones are extrapolated"
        )
    return lines


def merged(old: Tuning | None, new: Tuning) -> Tuning:
    """Add new constants to old ones; they replace old ones for the same number of ranks.

    If the old constants are from another machine, all of them are dropped.
    """
    if old is None or not same_machine(old.machine, new.machine):
        return new
    levels = dict(old.levels)
    for name, level in new.levels.items():
        before = old.levels.get(name, Level({}, {}))
        levels[name] = Level({**before.plans, **level.plans}, {**before.whole, **level.whole})
    hosts = max(old.machine["hosts"], new.machine["hosts"])
    return Tuning(new.machine | {"hosts": hosts}, levels)


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two descriptions are of one machine; jobs on it may use more or fewer hosts."""
    return one | {"hosts": 1} == other | {"hosts": 1}


def described(name: str, level: Level, n: int) -> list[str]:
    """Format the constants of a level for n ranks as tables with a legend.

    Constants of the network are listed only if it has been measured.
    """
    lines = []
    for memory, constants in level.plans[n].items():
        columns = [
            TextColumn(term, "10.2f", at, gap=2)
            for at, term in enumerate(TERMS, 1)
            if name == "network" or not term.startswith("net_")
        ]
        table = TextTable([TextColumn(f"{name}, {memory} arrays of", "24", 0), *columns])
        lines += table.lines(
            [f"{knot} B", *map(_shown, TERMS, values)] for knot, values in constants.items()
        )
    return [
        *lines,
        "alpha: us of a message; long: us more of one that waits for its receiver; beta: GB/s of messages; "
        "gamma: GB/s of sums",
        "",
    ]


def _shown(term: str, constant: float) -> float | None:
    """Return a constant in the unit of the tables: microseconds of a latency, GB/s of a cost per byte.

    None stands for an infinite rate: a cost of 0.
    """
    if term.endswith(("alpha", "long")):
        return constant * 1e6
    return 1e-9 / constant if constant else None


def least_absolute(matrix: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Return the x >= least that minimises the sum of |matrix @ x - 1|, by the simplex method.

    Outliers change this sum less than a sum of squares.

    matrix  (rows, terms)
    source  Barrodale and Roberts, SIAM J. Numer. Anal. 10(5), 1973: each residual is the difference
            of two parts >= 0. The columns of both parts are opposite, so the tableau stores one
    """
    rows, terms = matrix.shape
    # The unknowns are x - least >= 0. A basis of residuals alone needs targets >= 0.
    targets = 1 - matrix @ least
    signs = np.where(targets < 0, -1, 1)
    matrix, targets = signs[:, None] * matrix, abs(targets)
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    matrix = matrix / scale
    basis = _optimal_basis(matrix, targets)
    chosen = [index for index in basis if index < terms]
    # Rows whose residual is not in the basis are met exactly. They determine x without the rounding
    # errors of the pivots.
    missed = {(index - terms) % rows for index in basis if index >= terms}
    met = [row for row in range(rows) if row not in missed]
    unknowns = np.zeros(terms)
    unknowns[chosen] = np.linalg.lstsq(matrix[np.ix_(met, chosen)], targets[met])[0]
    return least + unknowns.clip(0) / scale


def _optimal_basis(matrix: np.ndarray, targets: np.ndarray) -> list[int]:
    """Return the indices of the variables in the optimal basis of the linear program.

    Indices count the unknowns first, then a residual below the target for each row, then one above.
    The first basis has the residuals below, which means x = 0. A random amount of up to RAISED is
    added to each target, because pivots among equal targets can cycle.
    """
    rows, terms = matrix.shape
    basis = list(range(terms, terms + rows))
    raised = targets[:, None] + RAISED * np.random.default_rng(0).random((rows, 1))
    # The last row has reduced costs, the last column values.
    tableau = np.block([[matrix, np.eye(rows), raised], [-matrix.sum(0), np.zeros(rows + 1)]])
    while True:
        costs = np.concatenate([tableau[-1, :-1], 2 - tableau[-1, terms:-1]])
        entering = int(costs.argmin())
        if costs[entering] > -ZERO:
            return basis
        column = (
            tableau[:-1, entering] if entering < terms + rows else -tableau[:-1, entering - rows]
        )
        able = np.flatnonzero(column > ZERO)
        leaving = able[(tableau[able, -1] / column[able]).argmin()]
        tableau[leaving] /= column[leaving]
        factors = np.append(column, costs[entering])
        factors[leaving] = 0
        tableau -= np.outer(factors, tableau[leaving])
        basis[leaving] = entering
