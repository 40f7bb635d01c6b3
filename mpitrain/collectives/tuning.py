"""The tuning file: what `bench fit` measured on this machine, as JSON."""

import json
from pathlib import Path

from mpitrain.collectives.cost import REGIMES, TERMS, Tuning
from mpitrain.errors import ConfigError


def read_tuning(path: Path) -> Tuning:
    """The constants in a file; ConfigError if it is none of ours."""
    try:
        found = json.loads(path.read_text())
        tuning = Tuning(
            dict(found["machine"]),
            {int(n): {int(regime): tuple(map(float, constants)) for regime, constants in regimes.items()}
             for n, regimes in found["plans"].items()},
            {int(n): {name: {int(regime): (float(a), float(b)) for regime, (a, b) in regimes.items()}
                      for name, regimes in names.items()} for n, names in found["whole"].items()})
    except OSError as error:
        raise ConfigError(f"The tuning file {path} cannot be read: {error.strerror}.", "mpitrain bench fit writes one.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no tuning file: {error!r}.", "mpitrain bench fit writes one.") from None
    complete = all(set(regimes) == set(REGIMES) and {len(c) for c in regimes.values()} == {len(TERMS)}
                   for regimes in tuning.plans.values())
    if not complete or tuning.plans.keys() != tuning.whole.keys() or not tuning.plans:
        raise ConfigError(f"{path} is a tuning file of another version of mpitrain.", "Measure again: mpitrain bench fit.")
    return tuning


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Write the file whole."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(tuning._asdict(), indent=1, allow_nan=False) + "\n")
    partial.replace(path)
