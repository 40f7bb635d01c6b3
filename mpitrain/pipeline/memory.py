"""What a stage holds at most, and what it gathers: told by its list of instructions alone, however long they take."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from mpitrain.pipeline.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from mpitrain.pipeline.simulate import Cost


class Peak(NamedTuple):
    """The most that a stage holds at a time, each for itself.

    live     micro-batches between the forward and the end of the weight half; in chunks where a stage has several parts
    whole    of these, those before the end of the input half, which hold all that the forward saved
    pending  of these, those between the halves
    nbytes   bytes of both kinds together, and what an instruction holds besides while it computes
    """

    live: int
    whole: int
    pending: int
    nbytes: float


def peak(mine: Sequence[Compute], costs: Sequence[Cost]) -> Peak:
    """The peaks of one stage; `costs` of each part of the model."""
    whole = pending = 0
    nbytes = 0.0
    most = Peak(0, 0, 0, 0)
    for instruction in mine:
        cost, during = costs[instruction.part], nbytes
        match instruction:
            case Forward():
                during += cost.forward_bytes
                whole, nbytes = whole + 1, nbytes + cost.saved
            case BackwardInput():
                during += cost.input_bytes - cost.saved
                whole, pending, nbytes = whole - 1, pending + 1, nbytes - cost.saved + cost.pending
            case BackwardWeight():
                during += cost.weight_bytes - cost.pending
                pending, nbytes = pending - 1, nbytes - cost.pending
            case Backward():
                during += cost.input_bytes - cost.saved
                whole, nbytes = whole - 1, nbytes - cost.saved
        most = Peak(
            max(most.live, whole + pending),
            max(most.whole, whole),
            max(most.pending, pending),
            max(most.nbytes, nbytes, during),
        )
    return most


class Weights(NamedTuple):
    """The versions of its weights that a stage which updates by itself has during one instruction.

    used        the version that the instruction computes with
    newest      the version that the stage made last
    held        versions that the stage holds after the instruction, the newest included
    is_updated  whether an update follows, which makes version newest + 1
    """

    used: int
    newest: int
    held: int
    is_updated: bool


def weights(mine: Sequence[Compute], every: int = 0) -> list[Weights]:
    """The versions of a stage of one part, by instruction, if it updates by itself.

    every   micro-batches that one update uses, which all use the newest version but one
            (PipeDream-2BW); 0: one, which uses the newest that there is when it goes forward (PipeDream)
    """
    used: dict[int, int] = {}
    newest, found = 0, []
    for instruction in mine:
        micro, is_last = instruction.micro, isinstance(instruction, BackwardWeight | Backward)
        if isinstance(instruction, Forward):
            used[micro] = max(0, micro // every - 1) if every else newest
        version = used.pop(micro) if is_last else used[micro]
        is_updated = is_last and (micro + 1) % max(1, every) == 0
        held = len({newest + is_updated, *used.values()})
        found.append(Weights(version, newest, held, is_updated))
        newest += is_updated
    return found


def versions(mine: Sequence[Compute], every: int = 0) -> int:
    """The most versions of its weights that a stage of one part holds. every: as of `weights`."""
    return max((each.held for each in weights(mine, every)), default=0)


def staleness(mine: Sequence[Compute], every: int = 0) -> int:
    """The most updates between the version of a gradient and the version it is applied to. every: as of `weights`."""
    lasts = (
        each
        for each, instruction in zip(weights(mine, every), mine, strict=True)
        if isinstance(instruction, BackwardWeight | Backward)
    )
    return max((each.newest - each.used for each in lasts), default=0)


def goes_in_passes(mine: Sequence[Compute]) -> bool:
    """Whether all micro-batches go forward through a part of the stage one after another, and later back through it likewise.

    ZeRO gathers a part once for each such pass then, and reduces its gradients once.
    """
    passes = [way for way, _ in groupby((i.part, isinstance(i, Forward)) for i in mine)]
    return len(passes) == len(set(passes))


def turns(mine: Sequence[Compute]) -> int:
    """How often a stage comes to a part, its first included: what ZeRO gathers per step if it holds one part at a time."""
    return sum(
        index == 0 or mine[index - 1].part != instruction.part
        for index, instruction in enumerate(mine)
    )
