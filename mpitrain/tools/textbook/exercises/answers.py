"""Calls of a student's function, made in the child process that runs the student's file.

For each question, which is a list of calls, one answer is yielded.
"""

from collections.abc import Generator, Iterator
from types import ModuleType
from typing import Any

from mpitrain.collectives.plans.checked import Wrong, function_of
from mpitrain.errors import Sentence

Call = list[Any]
LONGEST = 1000
"""Largest number of entries in a list of an answer."""


def values(own: ModuleType, function: str, questions: list[list[Call]]) -> Iterator[dict]:
    called = function_of(own, function)
    for calls in questions:
        yield {"results": [_plain(called(*call), _shown(function, call)) for call in calls]}


def programs(own: ModuleType, function: str, questions: list[list[Call]]) -> Iterator[dict]:
    """Run one generator per rank, all together, for each question; yield their results and collectives.

    A generator yields ("all-reduce", array) or ("all-gather", array). It gets back the sum, or the
    list of all ranks' arrays.
    """
    import numpy as np

    for calls in questions:
        arguments = [
            [np.array(value, float) if isinstance(value, list) else value for value in call]
            for call in calls
        ]
        started = [function_of(own, function)(*call) for call in arguments]
        yield _together(started, function)


def _together(started: list[Any], function: str) -> dict[str, Any]:
    """Advance the ranks' generators, one collective at a time, until all have returned.

    raises  Wrong if they are not all in the same collective: on a machine they would wait forever
    """
    import numpy as np

    ranks = len(started)
    for rank, own in enumerate(started):
        if not isinstance(own, Generator):
            raise Wrong(
                "{function} of rank {rank} must yield its collectives, but only returns",
                function=function,
                rank=rank,
            )
    received: list[Any] = [None] * ranks
    results: list[Any] = [None] * ranks
    collectives: list[tuple[str, int]] = []
    for _ in range(100):
        asked: list[Any] = [None] * ranks
        for rank, own in enumerate(started):
            try:
                asked[rank] = own.send(received[rank])
            except StopIteration as end:
                results[rank] = end.value
        if all(request is None for request in asked):
            return {
                "results": [_array(result, rank) for rank, result in enumerate(results)],
                "collectives": collectives,
            }
        operations = [_operation(request, rank) for rank, request in enumerate(asked)]
        if len(set(operations)) > 1:
            waits = (
                Sentence("rank {rank} waits in {name}", rank=rank, name=name)
                if name
                else Sentence("rank {rank} has returned", rank=rank)
                for rank, name in enumerate(operations)
            )
            raise Wrong("the ranks wait forever: {waits}", waits=tuple(waits))
        arrays = [np.array(request[1], float) for request in asked]
        if operations[0] == "all-reduce":
            if len({array.shape for array in arrays}) > 1:
                raise Wrong(
                    "an all-reduce needs one shape, but has {shapes}",
                    shapes=f"{[array.shape for array in arrays]}",
                )
            received = [sum(arrays) for _ in range(ranks)]
        else:
            received = [[array.copy() for array in arrays] for _ in range(ranks)]
        collectives.append((operations[0], sum(array.size for array in arrays)))
    raise Wrong(
        "{function} must return after its collectives, but yields more than 100 times",
        function=function,
    )


def _operation(asked: Any, rank: int) -> str:
    """Return the collective that a rank calls; "" if it has returned."""
    if asked is None:
        return ""
    if (
        isinstance(asked, tuple)
        and len(asked) == 2
        and asked[0] in ("all-reduce", "all-gather")
        and _is_array(asked[1])
    ):
        return str(asked[0])
    raise Wrong(
        'rank {rank} must yield ("all-reduce", array) or ("all-gather", array), but yields {found}',
        rank=rank,
        found=f"{asked!r:.60}",
    )


def _is_array(value: Any) -> bool:
    import numpy as np

    return isinstance(value, np.ndarray) and value.dtype.kind in "fiu"


def _array(result: Any, rank: int) -> list:
    if not _is_array(result):
        raise Wrong(
            "the result of rank {rank} must be an array of numbers, but is {kind}",
            rank=rank,
            kind=type(result).__name__,
        )
    entries: list = result.tolist()
    return entries


def _shown(function: str, call: Call) -> str:
    return f"{function}({', '.join(map(repr, call))})"


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return nested lists of whole numbers, booleans and text, which JSON can hold.

    raises  Wrong for other types
    """
    if isinstance(value, bool | str | int) and depth:
        return value
    if isinstance(value, list | tuple) and depth < 5:
        if len(value) > LONGEST:
            raise Wrong(
                "{call} must return a short list, but one has {entries:,} entries",
                call=where,
                entries=len(value),
            )
        return [_plain(entry, where, depth + 1) for entry in value]
    raise Wrong(
        "{call} must return a list, but it contains or is a {kind}",
        call=where,
        kind=type(value).__name__,
    )
