"""All-reduces of the user: a Python file that returns messages as data, which a child checks.

The file defines `all_reduce(rank, ranks, count)`, a pure function. It returns the list of steps of
a rank. A step is `(sends, receives, adds)`. The first two are lists of `(peer, start, stop)`. If
`adds`, received elements are added to the rank's own; otherwise they replace these. The code never
runs in this process.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from mpitrain.collectives.plans import checked
from mpitrain.collectives.plans.steps import Plan, Step, Transfer
from mpitrain.collectives.selection.algorithm import never, of_plans
from mpitrain.collectives.selection.table import ALL_REDUCE
from mpitrain.config.plugins import MARK
from mpitrain.errors import ConfigError, on_every_rank
from mpitrain.files import contents
from mpitrain.machine.process import environment_of_one

SECONDS = 8.0
"""Longest time in which a file must answer."""
SUFFIX = ".py"


def is_file(name: str) -> bool:
    """Return whether an algorithm is spelled as a file: FILE.py, or that and its digest."""
    return name.partition(MARK)[0].endswith(SUFFIX)


def file_algorithm(name: str) -> str:
    """Add the file to the all-reduces, and return its name there: the path and the digest.

    name    FILE.py, or FILE.py and MARK and a digest
    raises  ConfigError if the file cannot be read, or has another digest
    """
    path, _, wanted = name.partition(MARK)
    try:
        code = contents(Path(path))
    except OSError as error:
        raise ConfigError(
            f"The algorithm {path} cannot be read: {error.strerror}.",
            "Name a Python file that defines all_reduce(rank, ranks, count).",
        ) from None
    digest = hashlib.sha256(code).hexdigest()
    if wanted not in ("", digest):
        raise ConfigError(
            f"The algorithm {path} must have sha256 {wanted[:12]}, but it has {digest[:12]}.",
            "Name the file as it was, or another --out.",
        )
    pinned = f"{Path(path).absolute()}{MARK}{digest}"
    if pinned not in ALL_REDUCE:

        def plans(rank: int, hosts: Sequence[str], count: int) -> tuple[Plan, ...]:
            return (answer(path, code, len(hosts), count)[rank],)

        ALL_REDUCE[pinned] = of_plans(plans, is_rival=never)
    return pinned


def shown(name: str) -> str:
    """Return an algorithm's name for people: the file without its folder and digest."""
    return Path(name.partition(MARK)[0]).name if is_file(name) else name


@cache
def answer(path: str, code: bytes, ranks: int, count: int) -> list[Plan]:
    """Return the plan of each rank for an array of `count` elements, proven by simulation.

    raises  ConfigError if the file gives wrong sums, deadlocks, raises, or takes too long
    """
    # An isolated interpreter imports nothing from the working directory.
    words = [sys.executable, "-I", checked.__file__, path, ranks, count]
    where = f"The algorithm {path} must sum the arrays of {ranks} ranks, but for {count:,} elements"
    try:
        child = subprocess.run(
            [*map(str, words)],
            input=code,
            capture_output=True,
            timeout=SECONDS,
            env=environment_of_one(),
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{where} it gives no answer within {SECONDS:g} s.",
            "Return the steps of one rank, as a list.",
        ) from None
    try:
        found = json.loads(child.stdout)
    except ValueError:
        raise ConfigError(
            f"{where} its process ended with {child.returncode}.",
            "Return the steps of one rank, as a list.",
        ) from None
    if "problem" in found:
        # Every rank asks the same question at the same time.
        raise on_every_rank(ConfigError(f"{where} {found['problem']}.", "Correct the file."))
    return [
        Plan(
            tuple(
                Step(
                    tuple(Transfer(*one) for one in sends),
                    tuple(Transfer(*one) for one in receives),
                    adds,
                )
                for sends, receives, adds in steps
            )
        )
        for steps in found["plans"]
    ]
