"""Algorithms of the user: files that return messages as data, and the proof of every added row.

A file defines `all_reduce(rank, ranks, count)`, a pure function. It returns the list of steps of
a rank. A step is `(sends, receives, adds)`. The first two are lists of `(peer, start, stop)`. If
`adds`, received elements are added to the rank's own; otherwise they replace these. A child runs the
file. Rows of plugins have plans as built-in rows do.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import RLock

from mpitrain.collectives.plans import checked
from mpitrain.collectives.plans.own_file import Wrong, answers, from_json
from mpitrain.collectives.plans.steps import Plan, Step, Transfer
from mpitrain.collectives.selection.algorithm import Algorithm, never, of_plans
from mpitrain.collectives.selection.cost_model import plans_of
from mpitrain.collectives.selection.table import ALL_REDUCE, TABLES
from mpitrain.config.plugins import MARK
from mpitrain.errors import ConfigError, on_every_rank
from mpitrain.files import contents

SUFFIX = ".py"
_ONE_AT_A_TIME = RLock()
"""Ranks may be threads; one of them runs the file."""


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
            with _ONE_AT_A_TIME:
                return (answer(path, code, len(hosts), count)[rank],)

        ALL_REDUCE[pinned] = of_plans(plans, is_rival=never)
    return pinned


def shown(name: str) -> str:
    """Return an algorithm's name for people: the file without its folder and digest."""
    return Path(name.partition(MARK)[0]).name if is_file(name) else name


def proven(
    operation: str, algorithm: str, hosts: Sequence[str], count: int
) -> list[tuple[Plan, ...]]:
    """Return the plans of each rank, which run one after the other; those of added rows are proven.

    raises  ConfigError if an added algorithm gives wrong results, deadlocks, raises or is too slow
    """
    with _ONE_AT_A_TIME:
        return _proven(TABLES[operation][algorithm], operation, algorithm, tuple(hosts), count)


@cache
def _proven(
    row: Algorithm, operation: str, algorithm: str, hosts: tuple[str, ...], count: int
) -> list[tuple[Plan, ...]]:
    ranks, table = len(hosts), TABLES[operation]
    plans = [plans_of(operation, algorithm, rank, hosts, count) for rank in range(ranks)]
    if not table.is_added(algorithm):
        return plans
    try:
        steps: list[list[checked.Step]] = []
        for rank, rank_plans in enumerate(plans):
            steps.append([])
            for plan in rank_plans:
                call = f"{algorithm.partition(MARK)[0]}({rank}, {ranks}, {count})"
                own = checked.steps_of(plan.steps, rank, ranks, count, call)
                checked.check_depth(own, plan.depth, rank)
                steps[rank] += own
        checked.simulate(steps, count, operation=operation)
    except Wrong as wrong:
        title = f"{algorithm.partition(MARK)[0]}{table.of_plugin(algorithm)}"
        raise _wrong(title, ranks, count, wrong, operation) from None
    return plans


@cache
def answer(path: str, code: bytes, ranks: int, count: int) -> list[Plan]:
    """Return what the file says is the plan of each rank for an array of `count` elements.

    raises  ConfigError if the file raises, takes too long, or returns anything else
    """
    output = answers(path, code, f"{checked.__name__}:all_reduce", ranks, count)
    if not output.results:
        raise _wrong(path, ranks, count, output.reason())
    (result,) = output.results
    if "problem" in result:
        problem = from_json(result["problem"])
        # Every rank asks the same question at the same time.
        raise on_every_rank(_wrong(path, ranks, count, Wrong(problem.law, **problem.values)))
    return [
        Plan(
            tuple(
                Step(
                    tuple(Transfer(*transfer) for transfer in sends),
                    tuple(Transfer(*transfer) for transfer in receives),
                    adds,
                )
                for sends, receives, adds in steps
            )
        )
        for steps in result["plans"]
    ]


def _wrong(
    title: str, ranks: int, count: int, wrong: Wrong, operation: str = "allreduce"
) -> ConfigError:
    task = "gather the chunks" if operation == "all-gather" else "sum the arrays"
    return ConfigError(
        f"The algorithm {title} must {task} of {ranks} ranks, but for {count:,} elements "
        f"{wrong!s:.300}.",
        "Correct the file.",
    )
