"""Algorithms of the user: files that return messages as data, and the proof of every added row.

A file defines `all_reduce(rank, ranks, count)`, a pure function. It returns the list of steps of
a rank. A step is `(sends, receives, adds)`. The first two are lists of `(peer, start, stop)`. If
`adds`, received elements are added to the rank's own; otherwise they replace these. An added row is
such a file, or a plugin's row. Its plans are simulated.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path
from threading import RLock
from types import ModuleType
from zlib import crc32

import numpy as np

from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import Agreed, Reduction
from mpitrain.collectives.plans import checked
from mpitrain.collectives.plans.checked import Wrong
from mpitrain.collectives.plans.steps import Plan, Step, Transfer, chunk_bounds
from mpitrain.collectives.selection.algorithm import Algorithm, never, of_plans, shown
from mpitrain.collectives.selection.cost_model import plans_of
from mpitrain.collectives.selection.table import ALL_REDUCE, TABLES, title
from mpitrain.config.plugins import MARK
from mpitrain.errors import ConfigError
from mpitrain.files import contents, reading_of
from mpitrain.machine.backend import on_device
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

_ONE_AT_A_TIME = RLock()
"""Lock for ranks that are threads: one at a time runs the file."""


def file_algorithm(name: str) -> str:
    """Add the file to the all-reduces, and return its name there: the path and the digest.

    name    FILE.py, or FILE.py and MARK and a digest
    raises  ConfigError if the file cannot be read, or has another digest
    """
    path, _, wanted = name.partition(MARK)
    way_out = "Name a Python file that defines all_reduce(rank, ranks, count)."
    with reading_of(f"The algorithm {path}", way_out):
        code = contents(Path(path))
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


def bind_added(
    transport: Transport,
    operation: str,
    algorithm: str,
    array: np.ndarray,
    op: str,
    agreed: Agreed,
    arithmetic: Arithmetic,
    bind_trial: Callable[[np.ndarray], Reduction] | None,
) -> Reduction:
    """Bind an added algorithm, after a simulation of its plans and a trial have shown that it is right.

    bind_trial  binds it to an array for the trial; None: without one, as for an array in GPU memory
    raises      ConfigError on every rank if a plan or a result is wrong, or its bind returns no Reduction
    """
    table = TABLES[operation]
    if table[algorithm].plans:
        # Each rank plans by itself: a function that is not pure has many answers.
        on_all_ranks(
            transport,
            partial(proven, operation, algorithm, transport.hosts, array.size),
            f"answer of {shown(algorithm)}",
            lambda plans: {"its digest": crc32(repr(plans).encode())},
        )
    reduction = table[algorithm].bind(transport, array, op, agreed, arithmetic)
    bound = partial(table.made, algorithm, "algorithm", lambda: reduction)
    on_all_ranks(transport, partial(bound, "a Reduction", lambda made: isinstance(made, Reduction)))
    assert reduction is not None
    reduction.algorithm = algorithm
    if bind_trial and not on_device(array):
        numbers = np.empty_like(array)
        check_trial(transport, operation, bind_trial(numbers), numbers, op)
    return reduction


def proven(
    operation: str, algorithm: str, hosts: Sequence[str], count: int
) -> list[tuple[Plan, ...]]:
    """Return the plans of each rank; ConfigError if those of an added row are wrong."""
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
    """Return the plan of each rank, from a user's file; ConfigError if the file returns no plans."""
    own = ModuleType("own")
    own.__file__ = path
    sys.modules[own.__name__] = own  # A dataclass looks for its module there.
    try:
        with redirect_stdout(sys.stderr):  # Standard output is the command's.
            exec(compile(code, path, "exec"), own.__dict__)
            plan = checked.function_of(own, "all_reduce", "(rank, ranks, count)")
            every = [
                checked.steps_of(plan(rank, ranks, count), rank, ranks, count)
                for rank in range(ranks)
            ]
    except (Exception, SystemExit) as error:
        wrong = checked.reason_of(error, path)
        raise _wrong(path, ranks, count, wrong).on_every_rank() from None
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
        for steps in every
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


def check_trial(
    transport: Transport, operation: str, trial: Reduction, array: np.ndarray, op: str
) -> None:
    """Run an added algorithm on whole numbers, different on each rank.

    trial   bound to `array`, whose contents are replaced
    raises  ConfigError on every rank if the result is wrong on any
    """
    n, rank, flat = transport.size, transport.rank, array.reshape(-1)

    def number(r: int, place: np.ndarray) -> np.ndarray:
        # At each place the number of one rank is 1 more than the others.
        return 1 + place % 3 + ((place + r) % n == 0)

    place, bounds = np.arange(array.size), chunk_bounds(array.size, n)
    flat[...] = number(rank, place)
    trial.run()
    if operation == "all-gather":
        right = np.concatenate([number(r, place[slice(*bounds[r])]) for r in range(n)])
    else:
        right = 2 + place % 3 if op == "maximum" else 1 + n * (1 + place % 3)
    own = slice(*bounds[rank]) if operation == "reduce-scatter" else slice(None)
    is_right = bool(np.array_equal(flat[own].astype(float), right[own]))
    if not all(transport.gather_text(is_right)):
        name, table = trial.algorithm, TABLES[operation]
        raise ConfigError(
            f"The algorithm {name}{table.of_plugin(name)} must be an {title(operation)} of "
            f"{transport.size} ranks, but its result of {array.size:,} whole numbers is wrong.",
            "Correct its bind.",
        ).on_every_rank()
