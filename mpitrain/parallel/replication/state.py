"""What a run keeps in its checkpoints, as each rank holds it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mpitrain.layers.flat import Piece


class StateBuffer(NamedTuple):
    """An array of this rank's that checkpoints keep. Loading writes into it.

    name    what it is: "parameters", a buffer of the optimizer's such as "first_moment", "residual" ...
    array   1-D, in the memory of the backend
    pieces  which elements of the flat buffer lie where in it; none if it is no part of one
    kind    "agreed": equal on all ranks that hold the same elements of a tensor;
            "own": each rank's own; with another number of replicas what counts is its sum over them;
            "mean": each rank's own; with another number of replicas, or where it is "agreed", what counts is its mean over them;
            "bound": means something to the same rank of the same layout alone, and starts anew elsewhere
    needed  whether a checkpoint is refused that has none of it, if it is "agreed"; else it starts as in a new run then
    like    if there is none of it, or it is "bound" elsewhere, it starts as a copy of what has this name, and is "agreed"
    """

    name: str
    array: Any
    pieces: Sequence[Piece] = ()
    kind: Literal["agreed", "own", "mean", "bound"] = "agreed"
    needed: bool = True
    like: str = ""
