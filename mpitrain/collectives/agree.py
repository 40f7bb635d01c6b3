"""Agreement: the ranks compare what they are about to bind, so that a run need not check anything."""

from typing import Any

import numpy as np

from mpitrain.collectives.execute import OPS
from mpitrain.errors import CommError, ConfigError, MpitrainError
from mpitrain.transport.base import Transport


def agree(transport: Transport, operation: str, array: np.ndarray, known: tuple[str, ...], algorithm: str,
          **settings: Any) -> int:
    """Compare what the ranks are about to bind, and return the tag it gets.

    raises   CommError on every rank if anything differs, if any rank's array is not one contiguous block, or if there is
             no rank `root`; ConfigError for an unknown op or algorithm
    """
    contiguous = bool(array.flags.c_contiguous) and not array.dtype.hasobject
    mine = {"operation": operation, "count": array.size, "dtype": array.dtype.name,
            "algorithm": algorithm, **settings, "tag": transport.claim_tag(), "contiguous": contiguous}
    everyone = transport.gather_text(mine)
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        values = [facts.get(name) for facts in everyone]
        if name == "contiguous" and not all(values):
            raise everywhere(CommError(
                f"rank {transport.rank}: {operation} needs contiguous arrays of plain numbers on every rank, but "
                f"rank {values.index(False)} passed another kind.",
                "Bind numpy.ascontiguousarray(array), or the buffer that the array is a view of."))
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise everywhere(CommError(
                f"rank {transport.rank}: {operation} needs one {name} on every rank, but it is {listed}.",
                "All ranks must bind the same collectives, on equal arrays, in the same order."))
    check_name(f"{operation} algorithm", algorithm, known)
    check_name("op", settings.get("op", "add"), OPS)
    if not 0 <= settings.get("root", 0) < transport.size:
        raise everywhere(CommError(
            f"rank {transport.rank}: root {settings['root']} is not among ranks 0 to {transport.size - 1}."))
    return mine["tag"]


def check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    """ConfigError that lists what there is, unless the name is among it."""
    if name not in known:
        raise everywhere(ConfigError(f"{what} must be one of {', '.join(known)}, but it is {name!r}."))


def everywhere(error: MpitrainError) -> MpitrainError:
    """Mark an error that every rank raises, so that one may print it and all may leave together."""
    error.agreed = True
    return error
