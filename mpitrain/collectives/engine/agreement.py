"""Agreement: ranks compare the arguments of a binding once, so that runs need no checks."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.executor import OPS
from mpitrain.errors import CommError, ConfigError, on_every_rank
from mpitrain.transport.base import Transport


class Agreed(NamedTuple):
    """The agreement of all ranks on the arguments of one binding.

    tag   of the collective
    owns  by rank: the facts in which ranks may differ, such as the location of the array
    """

    tag: int
    owns: list[Any]


def agree(
    transport: Transport,
    operation: str,
    array: np.ndarray,
    known: tuple[str, ...],
    algorithm: str,
    own: Any = None,
    **settings: Any,
) -> Agreed:
    """Compare the arguments of a binding over all ranks; collective, in one gather.

    array     the array to bind
    known     names of the algorithms that exist
    own       facts of this rank for the others, serialisable as JSON
    settings  other arguments that must be the same on all ranks
    raises    CommError on every rank if any argument differs, if any rank's array is not one
              contiguous, writable block of numbers, or if there is no rank `root`;
              ConfigError on every rank for an unknown op or algorithm
    """
    problem = unfit(array)
    arguments = {
        "operation": operation,
        "problem": problem,
        "algorithm": algorithm,
        **settings,
        "tag": transport.claim_tag(),
    }
    if problem is None:
        arguments |= {"count": array.size, "dtype": array.dtype.name}
    everyone, owns = zip(*transport.gather_text([arguments, own]), strict=True)
    for rank, facts in enumerate(everyone):
        if facts["problem"] is not None:
            raise on_every_rank(
                CommError(
                    f"rank {transport.rank}: {operation} needs contiguous arrays of plain numbers on every rank, but rank {rank} "
                    f"passed {facts['problem']}.",
                    "Bind numpy.ascontiguousarray(array), or the buffer that the array is a view of.",
                )
            )
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        values = [facts.get(name) for facts in everyone]
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise on_every_rank(
                CommError(
                    f"rank {transport.rank}: {operation} needs one {name} on every rank, but it is {listed}.",
                    "All ranks must bind the same collectives, on equal arrays, in the same order.",
                )
            )
    check_name(f"{operation} algorithm", algorithm, known)
    check_name("op", settings.get("op", "add"), OPS)
    root = settings.get("root", 0)
    if not isinstance(root, int) or not 0 <= root < transport.size:
        raise on_every_rank(
            CommError(
                f"rank {transport.rank}: root {root} is not among ranks 0 to {transport.size - 1}."
            )
        )
    return Agreed(arguments["tag"], [*owns])


def unfit(array: Any) -> str | None:
    """Describe why an object cannot be reduced, in words that follow "passed".

    None for one writable, contiguous block of numbers.
    """
    if not hasattr(array, "flags") or not hasattr(array, "dtype"):
        return f"a {type(array).__name__}, which is no array"
    if array.dtype.name != "bfloat16" and (
        array.dtype.kind not in "biuf" or array.dtype.itemsize > 8
    ):
        return f"elements of type {array.dtype}"
    if not array.dtype.isnative:
        return f"{array.dtype.str}, whose bytes are in another order than this machine's"
    if not array.flags.c_contiguous:
        return f"an array with gaps (shape {array.shape}, strides {array.strides})"
    if not getattr(array.flags, "writeable", True):
        return "an array that is read-only"
    return None


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Raise ConfigError, with the list of known names, unless `name` is among them."""
    if name not in known:
        raise on_every_rank(
            ConfigError(f"{what} must be one of {', '.join(known)}, but it is {name!r}.")
        )
