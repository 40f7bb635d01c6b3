"""The executor of a pipeline program: dispatches a rank's instructions, and knows no schedule."""

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
    Skip,
)
from mpitrain.pipeline.stage import Stage


def execute(
    instructions: Iterable[Instruction],
    stages: Mapping[int, Stage],
    parts: int,
    first: Callable[[int], Any],
    loss: Callable[[int, Any], Any],
    channel: Channel,
    lowest: int = 0,
) -> None:
    """Execute the instructions of one rank.

    stages   {chunk: Stage} of this rank
    parts    number of chunks in the whole model
    first    (micro-batch) -> the input of the model
    loss     (micro-batch, output of the model) -> the gradient of that output
    channel  to the other stages
    lowest   the first chunk with a backward
    """
    # Maps a message to its array until the consumer takes it. No variable may refer to an array as
    # well: its buffer would return to the arena later.
    held: dict[Message, Any] = {}

    def taken(message: Message) -> Any:
        """Return the input of an instruction: a local result or a received message."""
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
            case Handoff() | Skip():
                pass  # The result is in `held` already, where the next chunk finds it.
        # No chunk uses the gradient of the input of the first chunk with a backward.
        held.pop(("gradient", lowest - 1, instruction.micro), None)
