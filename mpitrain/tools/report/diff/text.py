"""The lines of `mpitrain runs diff`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpitrain.tools.report.diff.replay import Differing, Replayed
from mpitrain.tools.report.diff.series import Bits
from mpitrain.tools.report.diff.sides import THREADS, ComparedRun
from mpitrain.tools.report.diff.tensors import Apart, Beyond

SHOWN = 8
"""Largest number of tensors in the list."""


def keys_that_differ(changed: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for key, values in changed.items():
        left, right = (json.dumps(value, default=str) for value in values)
        yield f"{key}: {left} and {right}"
    if not changed:
        yield "The configurations are equal."


def bits(comparison: Bits, one: ComparedRun, other: ComparedRun) -> Iterator[str]:
    high, unequal = comparison.first, comparison.unequal
    if high is None:
        yield f"All {comparison.common} common records up to step {comparison.last} are equal, bit for bit."
        if one.last != other.last:
            yield f"One run goes on to step {max(one.last, other.last)}."
        return
    low = max(0, comparison.equal) + 1
    where = f"step {high}" if low >= high else f"steps {low} to {high}"
    since = (
        f"after step {comparison.equal} their states were equal"
        if comparison.equal >= 0
        else "no earlier step has digests or a checkpoint of both"
    )
    yield f"The runs first differ in {where}: {since}."
    if logged := unequal.get("logged"):
        assert logged.logged
        for name, left, right in zip(("loss", "gradient norm"), *logged.logged, strict=True):
            if left != right:
                yield f"  step {logged.step}: {name} {left!r} and {right!r}"
    if digests := unequal.get("digests"):
        ranks = ", ".join(map(str, digests.ranks))
        yield f"  step {digests.step}: digests on rank(s) {ranks} of {_some(digests.tensors)}"
    if saved := unequal.get("checkpoint"):
        yield f"  checkpoint of step {saved.step}: {len(saved.apart)} tensor(s) differ"
        yield from map(_apart, saved.apart[:SHOWN])


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def _apart(tensor: Apart) -> str:
    if tensor.elements < 0:
        return f"    {tensor.name}: another shape, or only in one run"
    return f"    {tensor.name}: {tensor.elements} of {tensor.of} elements, at most {tensor.most:.3g} apart"


def replayed(result: Replayed, both: tuple[ComparedRun, ComparedRun]) -> Iterator[str]:
    yield f"Replayed from step {result.first} to at most step {result.last}:"
    if result.step is not None:
        head, *rest = result.differing
        when = f"in step {result.step}" if result.step > result.first else "before any step"
        yield f"  the replays first differ {when}: {_differing(head)}"
        if others := [difference.tensor for difference in rest if difference.buffer == head.buffer]:
            yield f"  also {head.buffer} of {_some(others)}"
    else:
        yield "  both replays are equal, so neither configuration nor code explains the difference"
    for side, unlike in zip(both, result.unlike, strict=True):
        name = str(side.folder)
        if unlike is None:
            yield f"  {name} is repeated, as far as it was recorded"
            continue
        where = f": {_some(unlike.tensors)}" if unlike.tensors else ", of loss and gradient norm"
        yield f"  {name} is not repeated: first the record of step {unlike.step}{where}"
        if 0 < side.threads != both[0].threads > 0:
            yield f"    its {THREADS} were {side.threads}, but those of the replay {both[0].threads}"
    if all(result.unlike) and result.step is None:
        yield "  Neither is: this process has another processor, BLAS or algorithm than the runs."


def _differing(difference: Differing) -> str:
    ranks = ", ".join(map(str, difference.ranks))
    return f"{difference.buffer} of unit {difference.unit}, tensor {difference.tensor}, on rank(s) {ranks}"


def numbers(
    limit: float,
    logged: tuple[int, str, float, float] | None,
    compared: Sequence[tuple[int, list[Beyond], int]],
) -> Iterator[str]:
    """Yield the lines of a comparison of two layouts.

    limit     the tolerance
    logged    the first number beyond it
    compared  (step, tensors beyond it, compared tensors) of each common checkpoint
    """
    yield (
        f"The work is divided in another way, so rounding differs: tolerance {limit:g}, relative, a law for the "
        "losses of 20 steps."
    )
    if logged:
        step, name, left, right = logged
        yield f"  step {step}: {name} {left!r} and {right!r}"
    else:
        yield "  All common losses and gradient norms are within it."
    for step, tensors, of in compared:
        yield f"  checkpoint of step {step}: {len(tensors)} of {of} tensors beyond it, by sum, norm and projection"
        for tensor in tensors[:SHOWN]:
            yield f"    {tensor.name}: {tensor.measure} {tensor.apart:.3g} apart"
