"""The executor: a rank's instructions, carried out over its parts of the model. It knows no schedule."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpitrain.pipeline.channel import Channel
from mpitrain.pipeline.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Complete,
    Forward,
    Handoff,
    Instruction,
    Message,
    Receive,
    Send,
)
from mpitrain.pipeline.stage import Stage


def execute(
    instructions: Iterable[Instruction],
    stages: Mapping[int, Stage],
    parts: int,
    first: Callable[[int], Any],
    loss: Callable[[int, Any], Any],
    channel: Channel,
) -> None:
    """Carry out the instructions of one rank.

    stages   the parts of the model that lie here, by number
    parts    that the whole model has
    first    (micro-batch) -> the input of the model
    loss     (micro-batch, output of the model) -> the gradient of that output
    channel  to the other ranks
    """
    held: dict[
        Message, Any
    ] = {}  # what was made, by who will use it; no variable names it, or its buffer would return later

    def taken(message: Message) -> Any:
        """What an instruction needs, made here or received."""
        return held.pop(message) if message in held else channel.received(message)

    for instruction in instructions:
        match instruction:
            case Forward(part, micro):
                if part == 0:
                    held["activation", 0, micro] = first(micro)
                held["activation", part + 1, micro] = stages[part].forward(
                    micro, taken(("activation", part, micro))
                )
                if part == parts - 1:
                    held["gradient", part, micro] = loss(
                        micro, held.pop(("activation", parts, micro))
                    )
            case BackwardInput(part, micro):
                held["gradient", part - 1, micro] = stages[part].backward_input(
                    micro, taken(("gradient", part, micro))
                )
            case BackwardWeight(part, micro):
                stages[part].backward_weight(micro)
            case Backward(part, micro):
                held["gradient", part - 1, micro] = stages[part].backward(
                    micro, taken(("gradient", part, micro))
                )
            case Send(what, part, micro, peer):
                channel.send((what, part, micro), held.pop((what, part, micro)), peer)
            case Receive(what, part, micro, peer):
                channel.receive((what, part, micro), peer)
            case Complete(what, part, micro):
                channel.complete((what, part, micro))
            case Handoff():
                pass  # it lies where the other part will look for it
        held.pop(
            ("gradient", -1, instruction.micro), None
        )  # nobody wants the gradient of the model's input
