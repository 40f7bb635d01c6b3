"""Agreement on errors: an error that only some ranks see is raised on all ranks.

Without it, the other ranks would wait for ever for a rank that has stopped.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from mpitrain import errors
from mpitrain.transport.base import Transport

Result = TypeVar("Result")


def on_all_ranks(transport: Transport, function: Callable[[], Result]) -> Result:
    """Call `function` on every rank; if any rank raises an MpitrainError, raise it on all ranks.

    Of several errors, the one of the lowest rank is raised. Collective. The function must not
    communicate. The error has its attribute `agreed` set, because every rank has it. So one rank
    may print it, and all ranks may exit together. If only some ranks failed, the message names
    them. An OSError that the function does not catch becomes a ConfigError: the system refused a
    path.
    """
    result: Any = None
    failure = None
    try:
        result = function()
    except errors.MpitrainError as error:
        failure = [type(error).__name__, error.law, error.way_out]
    except OSError as error:
        failure = [
            "ConfigError",
            f"{error.filename or 'A file'} cannot be used: {error.strerror or error}.",
            "Name another path, or look at what is there.",
        ]
    failures = transport.gather_text(failure)
    first = next((f for f in failures if f), None)
    if first is None:
        return result
    kind, law, way_out = first
    ranks = [rank for rank, f in enumerate(failures) if f]
    if len(ranks) < transport.size:
        where = ", ".join(f"{rank} ({transport.hosts[rank]})" for rank in ranks[:8]) + (
            ", ..." if len(ranks) > 8 else ""
        )
        law = f"On rank {where}: {law}"
    agreed_on = errors.on_every_rank(getattr(errors, kind)(law, way_out))
    # A frame in the error's own traceback must not refer to it. Such a cycle would keep all objects
    # of those frames alive.
    try:
        raise agreed_on
    finally:
        # objects of those frames alive.
        del (
            agreed_on,
            result,
        )


def check_same(transport: Transport, what: str, facts: dict[str, Any]) -> None:
    """Raise an agreed ConfigError unless every rank passes the same facts; collective.

    what   the subject of the facts, for the message
    facts  name -> a value that JSON can carry
    """
    everyone = transport.gather_text(facts)
    for rank, others in enumerate(everyone):
        for name in facts:
            if others[name] != everyone[0][name]:
                raise errors.on_every_rank(
                    errors.ConfigError(
                        f"All ranks need one {what}, but {name} is {everyone[0][name]!r} on rank 0 ({transport.hosts[0]}) and "
                        f"{others[name]!r} on rank {rank} ({transport.hosts[rank]}).",
                        "Start all ranks with the same arguments, and let them read the same files.",
                    )
                )
