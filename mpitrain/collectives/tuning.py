"""The tuning file: what `bench fit` measured on this machine, as JSON."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from mpitrain.collectives.cost import KNOTS, TERMS, Constants, Tuning
from mpitrain.errors import ConfigError
from mpitrain.files import contents, write_whole


def read_tuning(path: Path) -> Tuning:
    """The constants in a file; ConfigError if it is none of ours."""
    try:
        found = json.loads(contents(path))
        tuning = Tuning(
            dict(found["machine"]),
            {int(n): {memory: _constants(at) for memory, at in memories.items()} for n, memories in found["plans"].items()},
            {int(n): {memory: {name: _constants(at) for name, at in names.items()} for memory, names in memories.items()}
             for n, memories in found["whole"].items()})
    except OSError as error:
        raise ConfigError(f"The tuning file {path} cannot be read: {error.strerror}.", "mpitrain bench fit writes one.") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else f"{error!r:.100}"
        raise ConfigError(f"{path} is no tuning file: {why}.", "mpitrain bench fit writes one.") from None
    if not _is_complete(tuning):
        raise ConfigError(f"{path} is a tuning file of another version of mpitrain.",
                          "Delete it and measure again: mpitrain bench fit.")
    return tuning


def _constants(found: dict[str, list[float]]) -> Constants:
    return {int(knot): tuple(map(float, values)) for knot, values in found.items()}


def _is_complete(tuning: Tuning) -> bool:
    """Whether `predict` finds what it looks for."""
    plans, whole = tuning.plans, tuning.whole
    tables = [(at, len(TERMS)) for memories in plans.values() for at in memories.values()]
    tables += [(at, 2) for memories in whole.values() for names in memories.values() for at in names.values()]
    return ({"hosts", "cores"} <= set(tuning.machine) and len(plans) > 0
            and all("plain" in memories for memories in plans.values())
            and {n: set(memories) for n, memories in plans.items()} == {n: set(memories) for n, memories in whole.items()}
            and all(set(at) == set(KNOTS) and {len(values) for values in at.values()} == {length} for at, length in tables))


def tuning_text(tuning: Tuning) -> str:
    """What the file holds, a line for the constants of a knot."""
    text = json.dumps(tuning._asdict(), indent=1, allow_nan=False)
    return re.sub(r"\[[^]]*]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Write the file whole."""
    write_whole(path, tuning_text(tuning))


def foreign(tuning: Tuning, hosts: Sequence[str]) -> str:
    """One line of advice if the tuning was measured on one host, but the ranks are on several; else nothing."""
    if len(set(hosts)) == 1 or tuning.machine["hosts"] > 1:
        return ""
    return (f"No network measurements: algorithm auto guesses. Run `mpitrain launch -n {len(hosts)} -- bench fit` on these "
            f"{len(set(hosts))} hosts, and name its file")


DEFAULT = read_tuning(Path(__file__).with_name("default.json"))
"""For machines that have not been measured: 2 ranks on 2 cores of a server of 2023, 4 ranks on the same 2 cores, and for
links between hosts 30 us and 1 GB/s."""
