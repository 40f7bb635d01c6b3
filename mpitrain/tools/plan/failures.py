"""What failures of ranks cost a job: with checkpoints and restarts (Young 1974, Daly 2006), and with spares.

mean      seconds between two failures of any rank of the job
pause     seconds without steps in a save
restart   seconds from a failure until the steps go on
every     seconds between two saves
"""

import math


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
