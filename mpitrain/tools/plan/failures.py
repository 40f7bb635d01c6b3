"""What failures of ranks cost a job: with checkpoints and restarts (Young 1974, Daly 2006), and with spares.

mean      seconds between two failures of any rank of the job
pause     seconds without steps in a save
restart   seconds from a failure until the steps go on
every     seconds between two saves
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from mpitrain.run.metrics import seconds


def daly(pause: float, mean: float) -> float:
    """Return the best interval between saves: Daly 2006, Future Gener. Comput. Syst. 22(3), equation 37."""
    part = pause / (2 * mean)
    best = math.sqrt(2 * pause * mean) * (1 + math.sqrt(part) / 3 + part / 9) - pause
    return best if part < 1 else mean


def lost(every: float, pause: float, restart: float, mean: float) -> float:
    """Return the part of the time that is lost (Daly's equation 20)."""
    exponents = restart / mean, (every + pause) / mean
    if max(exponents) > 700:
        return 1.0
    return 1 - every / (mean * math.exp(exponents[0]) * math.expm1(exponents[1]))


def lost_with_spares(
    spares: int, ranks: int, hours: float, replace: float, pause: float, restart: float, mean: float
) -> float:
    """Return the part of the time of all ranks, spares too, that a job of some hours loses.

    Failures come by chance (Poisson). The first ones cost `replace` seconds each, and those without a spare what a restart
    costs: it repeats the steps since the last save. The next job has all its spares again.
    """
    every, expected = daly(pause, mean), 3600 * hours / mean
    in_saves = pause / (every + pause)
    each = (lost(every, pause, restart, mean) - in_saves) * mean
    chance, covered = math.exp(-expected), float(spares)
    for failures in range(spares):
        covered -= (spares - failures) * chance
        chance *= expected / (failures + 1)
    part = in_saves + (covered * replace + (expected - covered) * each) / (3600 * hours)
    return 1 - max(0.0, 1 - part) * ranks / (ranks + spares)


def measured(runs: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Return what runs have measured, by the option that asks for it; no key without a measurement.

    runs     the records of the metrics of each
    returns  seconds of each `pause`, `restart` and `replace`, and the median of a `step` of each run
    """
    found: dict[str, list[float]] = {}
    for records in runs:
        for record in records:
            if record.get("event") == "checkpoint":
                found.setdefault("pause", []).append(seconds(record, "checkpoint_pause_s"))
            if record.get("event") == "resume" and "filled_from" not in record:
                found.setdefault("restart", []).append(_until_it_went_on(record))
            elif record.get("replaced"):
                found.setdefault("replace", []).append(_until_it_went_on(record))
        if steps := [seconds(record, "step_s") for record in records if "step_s" in record]:
            found.setdefault("step", []).append(median(steps))
    return found


def _until_it_went_on(record: Mapping[str, Any]) -> float:
    return seconds(record, "waited_s") + seconds(record, "startup_s")
