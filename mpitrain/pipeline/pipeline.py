"""The pipeline of one rank: the passes of a step over the model.

`Chunks` is the model, cut. `Stage` computes a chunk. `Channel` carries messages between stages.
`Executor` runs the instructions of a rank, and knows no schedule. `Pipeline` has the programs to
train and to infer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Layer, Now, Places, Unit, backward
from mpitrain.layers.recomputed import saved_again
from mpitrain.machine.backend import Arena
from mpitrain.parallel.replica import Replica
from mpitrain.pipeline.schedules import (
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
    Plan,
    Receive,
    Send,
    Skip,
    What,
    forward_alone,
    training_program,
    with_messages,
)
from mpitrain.trace.recorder import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SILENT,
    Recorder,
)
from mpitrain.transport.base import Request, Transport

Shape = tuple[int, ...]


class Chunks(NamedTuple):
    """A model that is cut for a pipeline.

    model   all units, in order
    chunks  the units of each chunk
    tied    {full name of a tied tensor: its stages}, for tensors on several stages
    frozen  number of units before the first trained tensor, which need no backward
    """

    model: list[Unit]
    chunks: list[list[Unit]]
    tied: dict[str, list[int]]
    frozen: int

    def of_stage(self, stage_of: Sequence[int], stage: int) -> tuple[list[Unit], list[range]]:
        """Return the units of a stage, and the units of each of its chunks, numbered as in this list;
        no chunks if the model is not cut.
        """
        chunks = [self.chunks[chunk] for chunk in own(stage_of, stage)]
        bounds = [0, *accumulate(map(len, chunks))] if len(self.chunks) > 1 else []
        return [*chain(*chunks)], [range(*each) for each in pairwise(bounds)]

    def first(self, units: Sequence[Unit]) -> int:
        """Return how many of a stage's units, the first ones, are frozen and run no backward."""
        frozen = {unit.name for unit in self.model[: self.frozen]}
        return sum(unit.name in frozen for unit in units)


class StageUnit(NamedTuple):
    """A unit on its stage.

    number  of the unit, as the replica counts the units of this rank
    name    number of its name in the trace
    saves   whether a forward that trains keeps what the layer saves for its backward
    begins  whether it is the first unit of a recomputed segment, whose input is kept instead
    again   if it is the last one of a segment: the indices of the segment's units, else empty
    """

    number: int
    layer: Any
    name: int
    saves: bool
    begins: bool
    again: range


class Stage:
    """Stage that computes one chunk of the model, in training and for inference.

    Before a unit computes, the stage gets its parameters by `open` of the replica.
    After the unit's gradients are written, the stage calls `ready` of the replica.

    A micro-batch that trains goes forward, then backward: through the two halves, or through both at once. As
    soon as a call has used an activation that an earlier call saved, its buffer goes back to the
    arena.

    Of a recomputed segment (`Unit.segment`) the stage saves only the input. The backward of
    the segment's last unit first computes the other activations of the segment again.

    left  backwards until the gradients are complete; whoever begins a step sets it
    """

    left = 0

    def __init__(
        self,
        units: Sequence[Unit],
        replica: Replica,
        arena: Arena,
        first: int = 0,
        poll: Callable[[], object] = lambda: None,
        recorder: Recorder = SILENT,
        lowest: int = 0,
    ):
        """Bind the stage to its units.

        first   number of the first unit, as the replica counts the units of this rank
        poll    called between layers, to progress messages
        lowest  number of the first unit with a backward; all units before are frozen and save no
                activations
        """
        self._names = [unit.name for unit in units]
        self._replica, self._arena = replica, arena
        # These functions begin and end a unit's span in the trace. After an error the span stays open.
        self._pass = recorder.compute, poll, recorder.end
        self._units, self._frozen = list[StageUnit](), max(0, lowest - first)
        for index, unit in enumerate(units):
            is_last = unit.name in unit.segment[-1:]
            self._units.append(
                StageUnit(
                    first + index,
                    unit.layer,
                    recorder.name(unit.name),
                    not unit.segment and index >= self._frozen,
                    unit.name in unit.segment[:1],
                    range(index + 1 - len(unit.segment), index + 1) if is_last else range(0),
                )
            )
        self._is_unseen = True  # The first forward checks the outputs of the units.
        # Both map a micro-batch to a list with the saved activations of each unit.
        self._saved: dict[int, list[Any]] = {}
        self._pending: dict[int, list[Any]] = {}

    def replace_layers(self, replaced: Callable[[Any, str], Any]) -> None:
        """Let others compute in place of the layers.    replaced: (layer, name of its unit) -> layer"""
        self._units = [
            unit._replace(layer=replaced(unit.layer, name))
            for unit, name in zip(self._units, self._names, strict=True)
        ]

    def forward(self, micro: int, now: Now, x: Any) -> Any:
        """Run the forward of a micro-batch; return the output of the last unit."""
        replica, arena, (begin, poll, end) = self._replica, self._arena, self._pass
        kept = list[Any]()
        for index, (number, layer, name, saves, begins, _) in enumerate(self._units):
            if begins and now.trains:
                kept.append((x, now))
            span = begin(name, FORWARD, number, micro)
            y, saved = layer.forward(replica.open(number, micro), x, now, arena)
            if self._is_unseen:
                check_output(self._names[index], layer, x, y)
            x = y
            poll()
            end(span)
            if saves and now.trains:
                kept.append(saved)
            del saved
        self._is_unseen = False
        if now.trains:
            self._saved[micro] = kept
        return x

    def _save_again(self, micro: int, again: range, saved: list[Any]) -> None:
        """Replace the saved input of a segment by the activations of its units.    again: as in StageUnit"""
        replica, (_, poll, _), (x, now) = self._replica, self._pass, saved.pop()
        now = now._replace(is_again=True)
        *earlier, last = self._units[again.start : again.stop]
        for unit in earlier:
            weights = replica.open(unit.number, micro)
            x, state = unit.layer.forward(weights, x, now, self._arena)
            saved.append(state)
            poll()
        weights = replica.open(last.number, micro)
        saved.append(saved_again(last.layer, weights, x, now, self._arena))

    def backward_input(self, micro: int, dy: Any) -> Any:
        """Run the half of the backward pass that computes input gradients.

        Return the gradient of the chunk's input; None if the input is tokens.
        """
        replica, arena, (begin, poll, end) = self._replica, self._arena, self._pass
        saved, pending = self._saved.pop(micro), list[Any]()
        for number, layer, name, _, _, again in reversed(self._units[self._frozen :]):
            span = begin(name, BACKWARD_INPUT, number, micro)
            if again:
                self._save_again(micro, again, saved)
            dy, state = layer.backward_input(replica.open(number, micro), dy, saved.pop(), arena)
            poll()
            end(span)
            pending.append(state)
        self._pending[micro] = pending[::-1]
        return dy

    def backward_weight(self, micro: int) -> None:
        """Run the weight half: accumulate the gradients of the parameters."""
        replica, arena, (begin, poll, end) = self._replica, self._arena, self._pass
        pending = self._pending.pop(micro)
        self.left -= 1
        for number, layer, name, *_ in reversed(self._units[self._frozen :]):
            span = begin(name, BACKWARD_WEIGHT, number, micro)
            layer.backward_weight(pending.pop(), replica.gradients(number), arena)
            replica.ready(number, self.left == 0)
            poll()
            end(span)

    def backward(self, micro: int, dy: Any) -> Any:
        """Run both halves, unit by unit; return the same as `backward_input`."""
        replica, arena, (begin, poll, end) = self._replica, self._arena, self._pass
        saved = self._saved.pop(micro)
        self.left -= 1
        for number, layer, name, _, _, again in reversed(self._units[self._frozen :]):
            span = begin(name, BACKWARD, number, micro)
            if again:
                self._save_again(micro, again, saved)
            weights, gradients = replica.open(number, micro), replica.gradients(number)
            dy = backward(layer, weights, dy, saved.pop(), gradients, arena)
            replica.ready(number, self.left == 0)
            poll()
            end(span)
        return dy


def check_output(name: str, layer: Layer, x: Any, y: Any) -> None:
    """Raise ConfigError unless the output of a unit has the shape that its layer states.

    The output must also have the dtype of the input, unless the input is tokens.
    """
    shape, dtype = layer.output_shape(x.shape), getattr(y, "dtype", x.dtype)
    if getattr(y, "shape", None) != tuple(shape):
        law = f"its output_shape says {tuple(shape)}, but its forward returns "
        law += f"{y.shape}" if hasattr(y, "shape") else f"{y!r:.60}"
    elif x.dtype.kind not in "iu" and dtype != x.dtype:
        law = f"its input is {x.dtype}, but its forward returns {dtype}"
    else:
        return
    raise ConfigError(
        f"The layer of unit {name} ({type(layer).__name__}) must return what it states: {law}.",
        "Correct its forward, or its output_shape.",
    )


class Channel:
    """Channel over which a stage sends activations and gradients to other stages, and receives theirs.

    Each boundary between chunks has one tag in each direction, for all micro-batches. That
    suffices, because sender and receiver process the micro-batches of a chunk in ascending order.
    Both sides know a message's shape in advance, so no header is sent.

    sent   {"activation" or "gradient": (messages, bytes)} since it was cleared; a step clears it
    micro  the micro-batch of the running instruction
    """

    micro = 0

    def __init__(
        self,
        transport: Transport,
        arena: Arena,
        dtype: Any,
        input_shape: Callable[[int, Shape], Shape],
    ):
        """Connect a stage to the other stages of its pipeline.

        transport    of the pipeline's stages; its ranks are the stages
        arena        allocates the buffers of received arrays
        dtype        of all messages
        input_shape  (chunk, shape of the model's input) -> shape of the chunk's input
        """
        self._transport, self._arena, self._dtype = transport, arena, dtype
        self._recorder, self._input_shape = transport.recorder, input_shape
        self._names = {
            what: transport.recorder.name(what, transport.members)
            for what in (ACTIVATION, GRADIENT)
        }
        self._started: dict[Message, tuple[Request, Any]] = {}
        self._under_way: list[Request] = []
        self.sent = defaultdict[What, tuple[int, int]](lambda: (0, 0))

    def send(self, message: Message, array: Any, peer: int) -> None:
        """Start to send an array, which must not change until `complete`.

        The channel refers to the array until then.
        """
        messages, nbytes = self.sent[message[0]]
        self.sent[message[0]] = messages + 1, nbytes + array.nbytes
        self._start(self._transport.start_send, message, array, peer)

    def receive(self, message: Message, peer: int, model_input: Shape) -> None:
        """Start to receive an array into a buffer of the arena.    model_input: the shape of the model's input"""
        what, chunk, _ = message
        shape = self._input_shape(chunk + (what == "gradient"), model_input)
        self._start(self._transport.start_recv, message, self._arena.take(shape, self._dtype), peer)

    def _start(
        self, start: Callable[..., Request], message: Message, array: Any, peer: int
    ) -> None:
        what, chunk, micro = message
        self._recorder.about(self._names[what], micro)
        request = start(array, peer, 2 * chunk + (what == "gradient"))
        self._recorder.about(0, -1)
        self._started[message] = request, array
        self._under_way.append(request)

    def complete(self, message: Message) -> Any:
        """Wait until a message is complete, and return its array, which the caller then owns."""
        (what, chunk, micro), (request, array) = message, self._started.pop(message)
        self._transport.traffic.content = f"the {what} of micro-batch {micro} for chunk {chunk}"
        request.wait()
        self._transport.traffic.content = ""
        if request in self._under_way:
            self._under_way.remove(request)
        return array

    def poll(self) -> None:
        """Progress all messages in flight.

        Stages call this between layers, because messages progress only inside calls of the transport.
        """
        if self._under_way:
            self._under_way = [request for request in self._under_way if not request.test()]


class MicroBatch(NamedTuple):
    """The rows of a micro-batch on a rank.

    number   of the micro-batch in its step
    now      what the layers read in its forward
    inputs   of the model, on the host or the device
    targets  of the loss; None without a loss
    """

    number: int
    now: Now
    inputs: Any
    targets: Any = None


LossGradient = Callable[[MicroBatch, Any], Any]
"""(micro-batch, output of the model) -> the gradient of that output."""


@dataclass(frozen=True, eq=False)
class Executor:
    """Executes the instructions of one rank, and knows no schedule.

    stages   {chunk: Stage} of this rank, in ascending order
    chunks   number of chunks in the whole model
    channel  to the other stages
    placed   copies inputs of the model to the device
    lowest   the first chunk with a backward: all chunks before are frozen
    """

    stages: Mapping[int, Any]
    chunks: int
    channel: Channel
    placed: Callable[[Any], Any]
    lowest: int = 0

    def execute(
        self,
        instructions: Iterable[Instruction],
        micros: Sequence[MicroBatch] | Mapping[int, MicroBatch],
        loss: LossGradient,
    ) -> None:
        """Execute instructions of this rank.

        micros  the micro-batches, by their numbers in the instructions
        loss    called only on the stage of the last chunk
        """
        stages, channel = self.stages, self.channel
        # Maps a message to its array until the consumer takes it. No variable may refer to an array
        # as well: its buffer would return to the arena later.
        held: dict[Message, Any] = {}

        def taken(message: Message) -> Any:
            """Return the input of an instruction: a local result or a received message."""
            return held.pop(message) if message in held else channel.complete(message)

        for instruction in instructions:
            channel.micro = instruction.micro
            match instruction:
                case Forward(chunk, micro):
                    batch = micros[micro]
                    if chunk == 0:
                        held["activation", 0, micro] = self.placed(batch.inputs)
                    held["activation", chunk + 1, micro] = stages[chunk].forward(
                        micro, batch.now, taken(("activation", chunk, micro))
                    )
                    if chunk == self.chunks - 1:
                        held["gradient", chunk, micro] = loss(
                            batch, held.pop(("activation", self.chunks, micro))
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
                    channel.receive((what, chunk, micro), peer, micros[micro].inputs.shape)
                case Complete(what, chunk, micro):
                    channel.complete((what, chunk, micro))
                case Handoff() | Skip():
                    pass  # The result is in `held` already, where the next chunk finds it.
            # No chunk uses the gradient of the input of the first chunk with a backward.
            held.pop(("gradient", self.lowest - 1, instruction.micro), None)


class Pipeline:
    """Pipeline of one replica, as one of its ranks runs it.

    `train`, `drain` and `infer` are collective over the ranks of the pipeline.

    stages       {chunk: Stage} of this rank, in ascending order
    input_shape  (chunk, shape of the model's input) -> shape of the chunk's input
    channel      to the other stages
    peak_bytes   peak of activation memory on this rank in the last step, without the update
    lowest       the first chunk with a backward: all chunks before are frozen
    bytes sent   per micro-batch an activation and a gradient over each boundary between stages
    """

    stage_type: type[Stage] = Stage

    def __init__(
        self,
        plan: Plan,
        cut: Chunks,
        transport: Transport,
        replica: Replica,
        arena: Arena,
        dtype: Any,
        placed: Callable[[Any], Any],
    ):
        """Build this rank's stages and programs.

        cut        the model
        transport  of the pipeline's stages; its ranks are the stages
        dtype      of the messages between stages
        placed     copies inputs of the model to the device
        """
        chunks = cut.chunks
        self._here, self._plan = transport.rank, plan
        self.input_shape = cache(partial(input_shape, chunks))
        self.channel = channel = Channel(transport, arena, dtype, self.input_shape)
        self._arena, self.peak_bytes = arena, 0
        self.lowest = sum(end <= cut.frozen for end in accumulate(map(len, chunks)))

        def poll() -> None:
            replica.poll()
            channel.poll()

        poll_all = poll if transport.size > 1 else replica.poll
        self.stages, first = dict[int, Stage](), 0
        for chunk in own(plan.stage_of, self._here):
            self.stages[chunk] = self.stage_type(
                chunks[chunk], replica, arena, first, poll_all, transport.recorder, replica.first
            )
            first += len(chunks[chunk])
        # Trace files call chunks `parts`.
        transport.recorder.facts(
            parts={chunk: [unit.name for unit in chunks[chunk]] for chunk in self.stages}
        )
        self._executor = Executor(self.stages, len(chunks), channel, placed, self.lowest)
        self._program: Sequence[Instruction] = training_program(plan, self.lowest)[self._here]

    def train(self, micros: Sequence[MicroBatch], loss: LossGradient) -> None:
        """Run the forwards and backwards of one step.    loss: called only on the last chunk's stage"""
        for stage in self.stages.values():
            stage.left = len(micros)
        self.channel.sent.clear()
        arena, before = self._arena, self._arena.peak
        arena.peak = arena.live
        self._executor.execute(self._program, micros, loss)
        self.peak_bytes, arena.peak = arena.peak, max(before, arena.peak)

    @property
    def micro(self) -> int:
        """The micro-batch of the running instruction of `train`, as the step numbers it."""
        return self.channel.micro % self._plan.micro_batches

    def drain(self) -> None:
        """Finish the micro-batches that `train` left in flight; in this class there are none."""

    @cached_property
    def _infer_program(self) -> Sequence[Instruction]:
        return with_messages(forward_alone(self._plan.stage_of))[self._here]

    def infer(self, inputs: Any, places: Places | None = None) -> Any:
        """Run one forward of inputs of the model, without a backward, and return the model's output.

        Only the last chunk's stage has the output; the others return None.

        places  of the tokens of these rows
        """
        outputs: list[Any] = []
        batch = MicroBatch(0, Now(0, 0, len(inputs), False, places), inputs)
        self._executor.execute(self._infer_program, [batch], lambda _, y: outputs.append(y))
        return outputs.pop() if outputs else None


# This is a function, because a cached method would make the pipeline refer to itself. That
# reference cycle would delay the release of buffers in MPI windows.
def input_shape(chunks: Sequence[Sequence[Unit]], chunk: int, shape: Shape) -> Shape:
    """Return the shape of a chunk's input for a model input of this shape."""
    for units in chunks[:chunk]:
        for unit in units:
            shape = unit.layer.output_shape(shape)
    return shape


def own(stage_of: Sequence[int], stage: int) -> list[int]:
    """Return the chunks of a stage, in ascending order."""
    return [chunk for chunk, home in enumerate(stage_of) if home == stage]
