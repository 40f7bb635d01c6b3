"""All-reduces of the user: a Python file that returns messages as data, which a child checks.

The file defines `all_reduce(rank, ranks, count)`, a pure function. It returns the list of steps of
a rank. A step is `(sends, receives, adds)`. The first two are lists of `(peer, start, stop)`. If
`adds`, received elements are added to the rank's own; otherwise they replace these. The code never
runs in this process.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from mpitrain.collectives.engine.agreement import Agreed
from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import Execution, Reduction
from mpitrain.collectives.plans import checked
from mpitrain.collectives.plans.isolated_values import from_json
from mpitrain.collectives.plans.isolated_worker import Wrong
from mpitrain.collectives.plans.steps import Plan, Step, Transfer
from mpitrain.collectives.selection.algorithm import never, of_plans
from mpitrain.collectives.selection.isolated_answers import SECONDS, answers
from mpitrain.collectives.selection.table import ALL_REDUCE
from mpitrain.config.plugins import MARK
from mpitrain.errors import ConfigError, on_every_rank
from mpitrain.files import contents
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

SUFFIX = ".py"
_ONE_AT_A_TIME = Lock()


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

        def bind(
            transport: Transport, array: np.ndarray, op: str, agreed: Agreed, arithmetic: Arithmetic
        ) -> Reduction:
            # Each rank runs the file by itself: a function that is not pure has many answers.
            found = on_all_ranks(
                transport,
                lambda: answer(path, code, transport.size, array.size),
                f"answer of {shown(path)}",
                lambda plans: {"its digest": hashlib.sha256(repr(plans).encode()).hexdigest()[:12]},
            )
            plan = found[transport.rank]
            return Execution(transport, array, op, plan, agreed.tag, arithmetic=arithmetic)

        ALL_REDUCE[pinned] = of_plans(plans, is_rival=never)._replace(bind=bind)
    return pinned


def shown(name: str) -> str:
    """Return an algorithm's name for people: the file without its folder and digest."""
    return Path(name.partition(MARK)[0]).name if is_file(name) else name


def answer(path: str, code: bytes, ranks: int, count: int) -> list[Plan]:
    """Return the plan of each rank for an array of `count` elements, proven by simulation.

    raises  ConfigError if the file gives wrong sums, deadlocks, raises, or takes too long
    """
    with _ONE_AT_A_TIME:  # Ranks may be threads.
        return _answer(path, code, ranks, count)


@cache
def _answer(path: str, code: bytes, ranks: int, count: int) -> list[Plan]:
    where = f"The algorithm {path} must sum the arrays of {ranks} ranks, but for {count:,} elements"
    given = answers(path, code, f"{checked.__name__}:all_reduce", ranks, count, seconds=SECONDS)
    if given.is_slow:
        raise ConfigError(
            f"{where} it gives no answer within {SECONDS:g} s.",
            "Return the steps of one rank, as a list.",
        )
    try:
        (found,) = given.found
        problem = from_json(found.get("problem", ""))
        plans = [] if problem else [_plan(found["plans"][r], r, ranks, count) for r in range(ranks)]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, Wrong):
        raise ConfigError(
            f"{where} its process ended with {given.ended} and no answer.",
            "Return the steps of one rank, as a list.",
        ) from None
    if problem:
        # Every rank asks the same question at the same time.
        raise on_every_rank(ConfigError(f"{where} {problem:.300}.", "Correct the file."))
    return plans


def _plan(answer: Any, rank: int, ranks: int, count: int) -> Plan:
    """Return the plan of a rank from JSON; Wrong if the file wrote something else in its place."""
    return Plan(
        tuple(
            Step(
                tuple(Transfer(*one) for one in sends),
                tuple(Transfer(*one) for one in receives),
                adds,
            )
            for sends, receives, adds in checked.steps_of(answer, rank, ranks, count)
        )
    )
