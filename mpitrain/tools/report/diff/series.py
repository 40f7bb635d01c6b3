"""The first logged step, digest or checkpoint at which two runs differ."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.tools.report.diff.sides import ComparedRun, order
from mpitrain.tools.report.diff.tensors import Apart, Beyond, beyond, different_bits

TOLERANCES = {"sgd": 1e-5, "momentum": 1e-5}
"""Relative tolerance of losses in float32 between layouts, by rule; any other rule has FLOAT32."""

FLOAT32, FLOAT64 = 1e-4, 1e-9


class Unequal(NamedTuple):
    """The first record of one kind that differs between two runs.

    logged   (loss, gradient norm) of both; None: not finite
    tensors  whose digests differ, in the order of a step
    ranks    whose digests differ
    apart    tensors of a checkpoint that differ
    """

    step: int
    logged: tuple[Any, Any] | None = None
    tensors: Sequence[str] = ()
    ranks: Sequence[int] = ()
    apart: Sequence[Apart] = ()


class Bits(NamedTuple):
    """The comparison of two runs of one layout, bit for bit.

    unequal  {kind: the first record that differs}, of logged, digests and checkpoint
    equal    last step before all of these whose whole state is known to be equal; -1: none is known
    last     the last step with a record of both
    common   number of common records
    """

    unequal: dict[str, Unequal]
    equal: int
    last: int
    common: int

    @property
    def first(self) -> int | None:
        """The first step at which the runs differ; None: all common records are equal."""
        return min((difference.step for difference in self.unequal.values()), default=None)


def compare_bits(one: ComparedRun, other: ComparedRun) -> Bits:
    """Compare everything that two runs of one layout have recorded, in the order of steps.

    raises  ConfigError if they have nothing in common to compare; CheckpointError for a damaged
            checkpoint
    """
    every = sorted(_shared(one, other))
    if not every:
        raise nothing_common(one, other)
    equal, unequal = -1, dict[str, Unequal]()
    for step, _, kind in every:
        if kind in unequal:
            continue
        if difference := _compared(kind, step, one, other):
            unequal[kind] = difference
        elif not unequal and kind != "logged":
            equal = step
    return Bits(unequal, equal, every[-1][0], len(every))


def _compared(kind: str, step: int, one: ComparedRun, other: ComparedRun) -> Unequal | None:
    if kind == "checkpoint":
        apart = different_bits(one.saved[step], other.saved[step])
        return Unequal(step, apart=apart) if apart else None
    left, right = getattr(one, kind)[step], getattr(other, kind)[step]
    if left == right:
        return None
    if kind == "logged":
        return Unequal(step, logged=(left, right))
    names = {*left.tensors, *right.tensors}
    tensors = [name for name in names if left.tensors.get(name) != right.tensors.get(name)]
    pairs = enumerate(zip(left.ranks, right.ranks, strict=False))
    ranks = [rank for rank, (first, second) in pairs if first != second]
    return Unequal(step, tensors=sorted(tensors, key=order), ranks=ranks)


def _shared(one: ComparedRun, other: ComparedRun) -> Iterator[tuple[int, int, str]]:
    """Yield (step, order within it, kind) of each record that both runs have."""
    yield from ((step, 0, "logged") for step in one.logged.keys() & other.logged.keys())
    yield from ((step, 1, "digests") for step in one.digests.keys() & other.digests.keys())
    yield from ((step, 2, "checkpoint") for step in one.saved.keys() & other.saved.keys())


def start_of_replay(first: int, one: ComparedRun, other: ComparedRun) -> int:
    """Return the step of the nearest checkpoint before a difference; 0: the initial parameters.

    A checkpoint of both runs that differs would already be the first difference.
    """
    common = one.saved.keys() & other.saved.keys()
    return max((step for step in common if step < first), default=0)


def nothing_common(one: ComparedRun, other: ComparedRun) -> ConfigError:
    return ConfigError(
        f"diff compares steps that both runs recorded, but {one.folder} ends at step {one.last}, "
        f"{other.folder} at step {other.last}, and they have none in common.",
        "Let them run, with equal run.log_every or checkpoint.every.",
    )


def tolerance(config: Config) -> float:
    """Return the relative tolerance between equal trainings in two layouts.

    It is that of losses, over 20 steps. No such law holds for mixed precision.

    raises  ConfigError in mixed precision
    """
    if config.precision.is_half:
        raise ConfigError(
            "Runs of two layouts are compared in float32 or float64, but precision.compute is "
            f"{config.precision.compute}.",
            "Compare runs of one layout, or train both in float32.",
        )
    if config.precision.stored == "float64":
        return FLOAT64
    return TOLERANCES.get(config.optimizer.name, FLOAT32)


def compare_numbers(
    one: ComparedRun, other: ComparedRun, limit: float
) -> tuple[tuple[int, str, float, float] | None, list[tuple[int, list[Beyond], int]]]:
    """Compare two runs of different layouts, within a relative tolerance.

    returns  the first logged number beyond it, as `first_beyond`; of each common checkpoint its
             step, the tensors beyond it, and the number of all tensors
    raises   as `compare_bits`
    """
    steps = sorted(one.saved.keys() & other.saved.keys())
    if not steps and not one.logged.keys() & other.logged.keys():
        raise nothing_common(one, other)
    # AdamW and Lion make a step of the rounding that is the gradient of key biases.
    skips_keys = limit == FLOAT32
    compared = [
        (step, *beyond(one.saved[step], other.saved[step], limit, skips_keys)) for step in steps
    ]
    return first_beyond(one, other, limit), compared


def first_beyond(
    one: ComparedRun, other: ComparedRun, limit: float
) -> tuple[int, str, float, float] | None:
    """Return step, name and values of the first logged number beyond a tolerance, or None."""
    for step in sorted(one.logged.keys() & other.logged.keys()):
        pairs = zip(("loss", "grad_norm"), one.logged[step], other.logged[step], strict=True)
        for name, left, right in pairs:
            a, b = (math.nan if value is None else value for value in (left, right))
            if left is None and right is None:
                continue
            # Gradient norms are sums of squares: law 6 bounds them in float64 alone.
            bound = limit if name == "loss" or limit == FLOAT64 else 10 * limit
            if not abs(a - b) <= bound * max(abs(a), abs(b)):
                return step, name, a, b
    return None
