"""Memory, weight versions and ZeRO gathers of a stage, computed only from its list of instructions.

The durations of instructions have no influence.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from mpitrain.pipeline.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from mpitrain.pipeline.simulate import Cost


class Peak(NamedTuple):
    """Peaks of one stage's activation memory; each field is a maximum of its own.

    live     micro-batches between the forward and the end of the weight half, counted in each chunk
    whole    of `live`, micro-batches before the end of the input half, which save all activations
    pending  of `live`, micro-batches between the two halves
    nbytes   saved bytes of both kinds, plus the working memory of the current instruction
    """

    live: int
    whole: int
    pending: int
    nbytes: float


def peak(instructions: Sequence[Compute], costs: Sequence[Cost]) -> Peak:
    """Return the peaks of one stage's activation memory.

    instructions  of one stage, in order
    costs         of each chunk of the model
    """
    whole = pending = 0
    nbytes = 0.0
    most = Peak(0, 0, 0, 0)
    for instruction in instructions:
        cost, during = costs[instruction.chunk], nbytes
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
    """Weight versions of an asynchronous stage during one instruction.

    used        the version that the instruction computes with
    newest      the version that the stage made last
    held        number of versions in memory after the instruction, the newest included
    is_updated  whether an update follows, which makes version newest + 1
    """

    used: int
    newest: int
    held: int
    is_updated: bool


def weights(instructions: Sequence[Compute], every: int = 0) -> list[Weights]:
    """Return the weight versions of an asynchronous stage with one chunk, for each instruction.

    every   micro-batches per update, which all use the newest version but one (PipeDream-2BW);
            0: an update per micro-batch, which uses the newest version at its forward (PipeDream)
    """
    used: dict[int, int] = {}
    newest, by_instruction = 0, []
    for instruction in instructions:
        micro, is_last = instruction.micro, isinstance(instruction, BackwardWeight | Backward)
        if isinstance(instruction, Forward):
            used[micro] = max(0, micro // every - 1) if every else newest
        version = used.pop(micro) if is_last else used[micro]
        is_updated = is_last and (micro + 1) % max(1, every) == 0
        held = len({newest + is_updated, *used.values()})
        by_instruction.append(Weights(version, newest, held, is_updated))
        newest += is_updated
    return by_instruction


def versions(instructions: Sequence[Compute], every: int = 0) -> int:
    """Return the peak number of weight versions on a stage of one chunk.

    every   as in `weights`
    """
    return max((entry.held for entry in weights(instructions, every)), default=0)


def staleness(instructions: Sequence[Compute], every: int = 0) -> int:
    """Return the largest staleness of a gradient on a stage of one chunk, in updates.

    The staleness is the number of updates between a gradient's own version and the version it
    updates.

    every   as in `weights`
    """
    lasts = (
        entry
        for entry, instruction in zip(weights(instructions, every), instructions, strict=True)
        if isinstance(instruction, BackwardWeight | Backward)
    )
    return max((entry.newest - entry.used for entry in lasts), default=0)


def goes_in_passes(instructions: Sequence[Compute]) -> bool:
    """Return whether each chunk runs all its forwards, and all its backwards, in a row.

    ZeRO then gathers a chunk once per pass, and reduces its gradients once.
    """
    passes = [key for key, _ in groupby((i.chunk, isinstance(i, Forward)) for i in instructions)]
    return len(passes) == len(set(passes))


def turns(instructions: Sequence[Compute]) -> int:
    """Return how often a stage begins with or switches to a chunk.

    ZeRO gathers this many chunks per step, if a stage holds one unsharded chunk at a time.
    """
    return sum(
        index == 0 or instructions[index - 1].chunk != instruction.chunk
        for index, instruction in enumerate(instructions)
    )
