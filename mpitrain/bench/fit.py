"""Fitting the cost model to measurements, and telling how well it does on sizes it has not seen."""

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpitrain.bench.sweep import Row
from mpitrain.collectives.choose import candidates, choose
from mpitrain.collectives.cost import DEFAULT, REGIMES, TERMS, WHOLE, Tuning, predict, regime_of, work


class Check(NamedTuple):
    """How a fit does on sizes that were left out of it.

    error      median over rows of |predicted - measured| / measured
    choices    {bytes: (chosen, its time over the fastest one's)}
    """

    error: float
    choices: dict[int, tuple[str, float]]


def median_of_sweeps(rows: Sequence[Row]) -> list[Row]:
    """One row per algorithm, buffers and size, with the median of its times."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault((row.algorithm, row.buffers, row.bytes), []).append(row)
    return [same[0]._replace(time_us=median(row.time_us for row in same)) for same in found.values()]


def modelled(row: Row) -> str:
    """The model's name for a row's algorithm."""
    return "shared-copied" if (row.algorithm, row.buffers) == ("shared", "plain") else row.algorithm


def fit(machine: dict[str, Any], hosts: Sequence[str], rows: Sequence[Row]) -> Tuning:
    """Constants for one number of ranks from measured all-reduces.

    Each regime is fitted to the rows in it, by least squares of the relative error with no constant below zero. A
    constant that nothing measured says anything about (links between hosts, on one host) is the default one.
    """
    plans, whole = {}, {}
    moved = [row for row in rows if row.algorithm not in WHOLE]
    works = {row: work("allreduce", row.algorithm, hosts, row.count, row.bytes // row.count) for row in moved}
    defaults = next(iter(DEFAULT.plans.values()))
    for regime in REGIMES:
        here = [row for row in moved if regime_of(row.bytes) == regime] or moved
        amounts = np.array([works[row] for row in here], float)
        constants = least_squares(amounts, np.array([row.time_us * 1e-6 for row in here]))
        plans[regime] = tuple(float(c) if amounts[:, term].any() else defaults[regime][term] for term, c in enumerate(constants))
    for name in dict.fromkeys(modelled(row) for row in rows if row.algorithm in WHOLE):
        whole[name] = {}
        mine = [row for row in rows if modelled(row) == name]
        for regime in REGIMES:
            here = [row for row in mine if regime_of(row.bytes) == regime]
            here = here if len({row.bytes for row in here}) > 1 else mine
            amounts = np.array([(1, row.bytes) for row in here], float)
            whole[name][regime] = tuple(map(float, least_squares(amounts, np.array([row.time_us * 1e-6 for row in here]))))
    n = len(hosts)
    return Tuning(machine, {n: plans}, {n: whole})


def least_squares(amounts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Constants >= 0 that minimise the sum of ((amounts @ constants - seconds) / seconds)^2.

    amounts (rows, terms). Tries every set of terms that may be positive: there are five at most.
    """
    terms = amounts.shape[1]
    scaled = amounts / seconds[:, None]
    best, least = np.zeros(terms), float("inf")
    for used in (list(u) for size in range(1, terms + 1) for u in combinations(range(terms), size)):
        found = np.linalg.lstsq(scaled[:, used], np.ones(len(seconds)), rcond=None)[0]
        if (found < 0).any():
            continue
        error = float(((scaled[:, used] @ found - 1) ** 2).sum())
        if error < least - 1e-12:
            best, least = np.zeros(terms), error
            best[used] = found
    return best


def check(tuning: Tuning, hosts: Sequence[str], rows: Sequence[Row]) -> Check:
    """Compare the model with rows that it was not fitted to."""
    errors, times = [], {}
    for row in rows:
        predicted = predict(tuning, "allreduce", modelled(row), hosts, row.count, row.bytes // row.count) * 1e6
        errors.append(abs(predicted - row.time_us) / row.time_us)
        if row.buffers == "window":
            times.setdefault((row.bytes, row.count), {})[row.algorithm] = row.time_us
    choices = {}
    for (nbytes, count), measured in times.items():
        chosen = choose(tuning, hosts, count, nbytes // count)
        fastest = min(measured[name] for name in candidates(hosts, is_native=True))
        choices[nbytes] = chosen, measured[chosen] / fastest
    return Check(median(errors), choices)


def merged(old: Tuning | None, new: Tuning) -> Tuning:
    """The new constants beside those of other numbers of ranks on the same machine."""
    if old is None or old.machine != new.machine:
        return new
    return Tuning(new.machine, {**old.plans, **new.plans}, {**old.whole, **new.whole})


def described(tuning: Tuning, n: int) -> list[str]:
    """The constants for n ranks as a table: microseconds, and GB/s."""
    lines = [f"{'arrays up to':>14}  " + "  ".join(f"{term:>10}" for term in TERMS) + "   (us; GB/s)"]
    for regime, constants in tuning.plans[n].items():
        shown = [f"{c * 1e6:10.2f}" if term.endswith("alpha") else f"{1e-9 / c:10.2f}" if c else f"{'-':>10}"
                 for term, c in zip(TERMS, constants, strict=True)]
        lines.append(f"{'any size' if regime == REGIMES[-1] else f'{regime} B':>14}  " + "  ".join(shown))
    return lines
