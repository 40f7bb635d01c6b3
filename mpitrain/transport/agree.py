"""Errors that only some ranks can see become errors on all of them, so that nobody waits for a rank that gave up."""

from collections.abc import Callable
from typing import TypeVar

from mpitrain import errors
from mpitrain.transport.base import Transport

Result = TypeVar("Result")


def agreed(transport: Transport, function: Callable[[], Result]) -> Result:
    """Call `function` on every rank; if it raises an MpitrainError anywhere, raise the first one everywhere.

    Collective. The function must not communicate. The error raised has `agreed` set: every rank has it, so one may print
    it and all may leave together. An error that not every rank has names the ranks that do.
    """
    result, failure = None, None
    try:
        result = function()
    except errors.MpitrainError as error:
        failure = [type(error).__name__, error.law, error.way_out]
    failures = transport.gather_text(failure)
    first = next((f for f in failures if f), None)
    if first is None:
        return result
    kind, law, way_out = first
    ranks = [rank for rank, f in enumerate(failures) if f]
    if len(ranks) < transport.size:
        where = ", ".join(f"{rank} ({transport.hosts[rank]})" for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        law = f"On rank {where}: {law}"
    error = getattr(errors, kind)(law, way_out)
    error.agreed = True
    raise error
