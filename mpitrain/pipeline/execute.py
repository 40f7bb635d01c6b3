"""`execute` runs the instructions of a stage, `Channel` carries its messages; neither knows a schedule."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpitrain.machine.arena import Arena
from mpitrain.pipeline.instructions import (
    ACTIVATION,
    GRADIENT,
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
from mpitrain.transport.base import Request, Transport


def execute(
    instructions: Iterable[Instruction],
    stages: Mapping[int, Stage],
    chunks: int,
    first: Callable[[int], Any],
    loss: Callable[[int, Any], Any],
    channel: "Channel",
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
        return held.pop(message) if message in held else channel.finish_receive(message)

    for instruction in instructions:
        channel.micro = instruction.micro
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


class Channel:
    """Channel over which a stage sends activations and gradients to other stages, and receives theirs.

    Each boundary between chunks has one tag in each direction, for all micro-batches. That
    suffices, because sender and receiver process the micro-batches of a chunk in ascending order.
    Both sides know a message's shape in advance, so no header is sent.

    sent   {"activation" or "gradient": (messages, bytes)} in the current step
    micro  the micro-batch of the running instruction
    """

    micro = 0

    def __init__(self, transport: Transport, arena: Arena, dtype: Any):
        """Connect a stage to the other stages of its pipeline.

        transport  of the pipeline's stages; its ranks are the stages
        arena      allocates the buffers of received arrays
        dtype      of all messages
        """
        self._transport, self._arena, self._dtype = transport, arena, dtype
        self._recorder = recorder = transport.recorder
        self._names = {
            what: recorder.name(what, transport.members) for what in (ACTIVATION, GRADIENT)
        }
        self._sends: dict[Message, tuple[Request, Any]] = {}
        self._receives: dict[Message, tuple[Request, Any]] = {}
        self._under_way: list[Request] = []

    def begin(self, shape: Callable[[int, int], tuple[int, ...]]) -> None:
        """Begin a step, and reset the counts of sent messages.

        shape  (chunk, micro-batch) -> shape of the chunk's input
        """
        self._shape = shape
        self.sent = dict.fromkeys((ACTIVATION, GRADIENT), (0, 0))

    def send(self, message: Message, array: Any, peer: int) -> None:
        """Start to send an array, which must not change until `complete`.

        The channel refers to the array until then.
        """
        what, _, micro = message
        messages, nbytes = self.sent[what]
        self.sent[what] = messages + 1, nbytes + array.nbytes
        self._recorder.about(self._names[what], micro)
        request = self._transport.start_send(array, peer, _tag(message))
        self._sends[message] = request, array
        self._under_way.append(request)
        self._recorder.about(0, -1)

    def complete(self, message: Message) -> None:
        """Wait until a send is complete, and release its array."""
        self._wait(self._sends.pop(message)[0], message)

    def receive(self, message: Message, peer: int) -> None:
        """Start to receive an array into a buffer of the arena."""
        what, chunk, micro = message
        array = self._arena.take(self._shape(chunk + (what == "gradient"), micro), self._dtype)
        self._recorder.about(self._names[what], micro)
        request = self._transport.start_recv(array, peer, _tag(message))
        self._receives[message] = request, array
        self._under_way.append(request)
        self._recorder.about(0, -1)

    def finish_receive(self, message: Message) -> Any:
        """Wait until the array of a started receive is complete, and return it; the caller owns it."""
        request, array = self._receives.pop(message)
        self._wait(request, message)
        return array

    def _wait(self, request: Request, message: Message) -> None:
        what, chunk, micro = message
        self._transport.traffic.content = f"the {what} of micro-batch {micro} for chunk {chunk}"
        request.wait()
        self._transport.traffic.content = ""
        if request in self._under_way:
            self._under_way.remove(request)

    def poll(self) -> None:
        """Progress all messages in flight.

        Stages call this between layers, because messages progress only inside calls of the transport.
        """
        if self._under_way:
            self._under_way = [request for request in self._under_way if not request.test()]


def _tag(message: Message) -> int:
    what, chunk, _ = message
    return 2 * chunk + (what == "gradient")
