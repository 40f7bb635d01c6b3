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
    chunks: int,
    first: Callable[[int], Any],
    loss: Callable[[int, Any], Any],
    channel: Channel,
    lowest: int = 0,
) -> None:
    """Execute the instructions of one rank.

    stages   {chunk: Stage} of this rank
    chunks   number of chunks in the whole model
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
            case Forward(chunk, micro):
                if chunk == 0:
                    held["activation", 0, micro] = first(micro)
                held["activation", chunk + 1, micro] = stages[chunk].forward(
                    micro, taken(("activation", chunk, micro))
                )
                if chunk == chunks - 1:
                    held["gradient", chunk, micro] = loss(
                        micro, held.pop(("activation", chunks, micro))
                    )
            case BackwardInput(chunk, micro):
                held["gradient", chunk - 1, micro] = stages[chunk].backward_input(
                    micro, taken(("gradient", chunk, micro))
                )
            case BackwardWeight(chunk, micro):
                stages[chunk].backward_weight(micro)
            case Backward(chunk, micro):
                held["gradient", chunk - 1, micro] = stages[chunk].backward(
                    micro, taken(("gradient", chunk, micro))
                )
            case Send(what, chunk, micro, peer):
                channel.send((what, chunk, micro), held.pop((what, chunk, micro)), peer)
            case Receive(what, chunk, micro, peer):
                channel.receive((what, chunk, micro), peer)
            case Complete(what, chunk, micro):
                channel.complete((what, chunk, micro))
            case Handoff() | Skip():
                pass  # The result is in `held` already, where the next chunk finds it.
        # No chunk uses the gradient of the input of the first chunk with a backward.
        held.pop(("gradient", lowest - 1, instruction.micro), None)
