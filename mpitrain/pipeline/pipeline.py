"""The pipeline of one rank: the passes of a step over the model.

`Chunks` is the model, cut. `Stage` computes a chunk. `Channel` carries messages between stages. `execute` runs the
instructions of a rank, and knows no schedule. `Pipeline` has the programs to train and to infer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Layer, Now, Places, Unit, backward, forward_only
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
    """

    model: list[Unit]
    chunks: list[list[Unit]]
    tied: dict[str, list[int]]

    def of_stage(self, stage_of: Sequence[int], stage: int) -> tuple[list[Unit], list[range]]:
        """Return the units of a stage, and the units of each of its chunks, numbered as in this list;
        no chunks if the model is not cut.
        """
        own = [self.chunks[chunk] for chunk, at in enumerate(stage_of) if at == stage]
        firsts = [0, *accumulate(map(len, own))] if len(self.chunks) > 1 else []
        return [unit for chunk in own for unit in chunk], [
            range(first, end) for first, end in pairwise(firsts)
        ]

    def first(self, units: Sequence[Unit]) -> int:
        """Return how many of a stage's units, the first ones, are frozen and run no backward."""
        before = {unit.name for unit in self.model[: forward_only(self.model)]}
        return sum(unit.name in before for unit in units)


class Stage:
    """Stage that computes one chunk of the model, in training and for inference.

    Before a unit computes, the stage gets its parameters by `open` of the replica.
    After the unit's gradients are written, the stage calls `ready` of the replica.

    A micro-batch that trains goes forward, then backward: through the two halves, or through both at once. As
    soon as a call has used an activation that an earlier call saved, its buffer goes back to the
    arena.

    Of a recomputed segment (`Unit.segment`) the stage saves only the input. The backward of
    the segment's last unit first computes the other activations of the segment again.
    """

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
        self._layers: list[tuple[int, Any]] = [
            (first + index, unit.layer) for index, unit in enumerate(units)
        ]
        self._lowest = lowest
        self._order_backward()
        self._names = [unit.name for unit in units]
        self._replica = replica
        self._arena, self._poll = arena, poll
        # These functions begin and end a unit's span in the trace. After an error the span stays open.
        names = {first + index: recorder.name(unit.name) for index, unit in enumerate(units)}
        self._pass = recorder.compute, self._poll, recorder.end, names
        self._segments = [unit.segment for unit in units]
        # The names of the units before the first forward, which checks their outputs.
        self._unseen = self._names
        # Both map a micro-batch to a list with the saved activations of each unit.
        self._saved: dict[int, list[Any]] = {}
        self._pending: dict[int, list[Any]] = {}
        self._rows: Mapping[int, Now] = {}
        self._left = 0

    def replace_layers(self, replaced: Callable[[Any, str], Any]) -> None:
        """Let others compute in place of the layers.    replaced: (layer, name of its unit) -> layer"""
        self._layers = [
            (number, replaced(layer, name))
            for (number, layer), name in zip(self._layers, self._names, strict=True)
        ]
        self._order_backward()

    def _order_backward(self) -> None:
        self._backward = [
            (index, *each) for index, each in enumerate(self._layers) if each[0] >= self._lowest
        ][::-1]

    def begin(self, micro_batches: int, rows: Mapping[int, Now]) -> None:
        """Begin a step of this many micro-batches; the last one's backward completes the gradients.

        rows  of each micro-batch, which layers read in a forward
        """
        self._left, self._rows = micro_batches, rows

    def forward(self, micro: int, x: Any) -> Any:
        """Run the forward of a micro-batch; return the output of the last unit."""
        replica, arena, now = self._replica, self._arena, self._rows[micro]
        begin, poll, end, names = self._pass
        if now.trains:
            self._saved[micro] = kept = list[Any]()
        for index, (number, layer) in enumerate(self._layers):
            segment = self._segments[index]
            if segment and now.trains and self._begins_segment(index):
                kept.append((x, now))
            span = begin(names[number], FORWARD, number, micro)
            y, saved = layer.forward(replica.open(number, micro), x, now, arena)
            if self._unseen:
                check_output(self._unseen[index], layer, x, y)
            x = y
            poll()
            end(span)
            if now.trains and not segment and number >= self._lowest:
                kept.append(saved)
            del saved
        self._unseen = []
        return x

    def _begins_segment(self, index: int) -> bool:
        return index == 0 or self._segments[index - 1] is not self._segments[index]

    def _save_again(self, micro: int, index: int, segment: Sequence[str], saved: list[Any]) -> None:
        """Replace the saved input of a segment by the activations of its units.

        index  of a unit of this segment; unless it is the last one, nothing is done
        """
        if index + 1 < len(self._layers) and self._segments[index + 1] is segment:
            return
        replica, (x, now) = self._replica, saved.pop()
        now = now._replace(is_again=True)
        for number, layer in self._layers[index + 1 - len(segment) : index]:
            x, state = layer.forward(replica.open(number, micro), x, now, self._arena)
            saved.append(state)
            self._poll()
        number, layer = self._layers[index]
        saved.append(saved_again(layer, replica.open(number, micro), x, now, self._arena))

    def backward_input(self, micro: int, dy: Any) -> Any:
        """Run the half of the backward pass that computes input gradients.

        Return the gradient of the chunk's input; None if the input is tokens.
        """
        replica, saved, pending = self._replica, self._saved.pop(micro), []
        begin, poll, end, names = self._pass
        for index, number, layer in self._backward:
            span = begin(names[number], BACKWARD_INPUT, number, micro)
            if segment := self._segments[index]:
                self._save_again(micro, index, segment, saved)
            dy, state = layer.backward_input(
                replica.open(number, micro), dy, saved.pop(), self._arena
            )
            poll()
            end(span)
            pending.append(state)
        self._pending[micro] = pending[::-1]
        return dy

    def backward_weight(self, micro: int) -> None:
        """Run the weight half: accumulate the gradients of the parameters."""
        replica, pending = self._replica, self._pending.pop(micro)
        begin, poll, end, names = self._pass
        self._left -= 1
        for _, number, layer in self._backward:
            span = begin(names[number], BACKWARD_WEIGHT, number, micro)
            layer.backward_weight(pending.pop(), replica.gradients(number), self._arena)
            replica.ready(number, self._left == 0)
            poll()
            end(span)

    def backward(self, micro: int, dy: Any) -> Any:
        """Run both halves, unit by unit; return the same as `backward_input`."""
        replica, saved = self._replica, self._saved.pop(micro)
        begin, poll, end, names = self._pass
        self._left -= 1
        for index, number, layer in self._backward:
            span = begin(names[number], BACKWARD, number, micro)
            if segment := self._segments[index]:
                self._save_again(micro, index, segment, saved)
            dy = backward(
                layer,
                replica.open(number, micro),
                dy,
                saved.pop(),
                replica.gradients(number),
                self._arena,
            )
            replica.ready(number, self._left == 0)
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
        self._started: dict[Message, tuple[Request, Any]] = {}
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
        messages, nbytes = self.sent[message[0]]
        self.sent[message[0]] = messages + 1, nbytes + array.nbytes
        self._start(self._transport.start_send, message, array, peer)

    def receive(self, message: Message, peer: int) -> None:
        """Start to receive an array into a buffer of the arena."""
        what, chunk, micro = message
        array = self._arena.take(self._shape(chunk + (what == "gradient"), micro), self._dtype)
        self._start(self._transport.start_recv, message, array, peer)

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
        return held.pop(message) if message in held else channel.complete(message)

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
        chunks: Sequence[Sequence[Unit]],
        transport: Transport,
        replica: Replica,
        arena: Arena,
        dtype: Any,
    ):
        """Build this rank's stages and programs.

        chunks     the units of each chunk of the model
        transport  of the pipeline's stages; its ranks are the stages
        dtype      of the messages between stages
        """
        here, self._stage_of = transport.rank, plan.stage_of
        self._transport, self._chunks = transport, chunks
        self._arena, self.channel = arena, Channel(transport, arena, dtype)
        channel, self.peak_bytes, self._micro_batches = self.channel, 0, plan.micro_batches
        self.lowest = lowest_chunk(chunks)

        def poll() -> None:
            replica.poll()
            channel.poll()

        self.stages, first = dict[int, Stage](), 0
        for chunk in own(plan.stage_of, here):
            self.stages[chunk] = self.stage_type(
                *(
                    chunks[chunk],
                    replica,
                    arena,
                    first,
                    poll if transport.size > 1 else replica.poll,
                ),
                *(transport.recorder, replica.first),
            )
            first += len(chunks[chunk])
        # Trace files call chunks `parts`.
        transport.recorder.facts(
            parts={chunk: [unit.name for unit in chunks[chunk]] for chunk in self.stages}
        )
        self._program: Sequence[Instruction] = training_program(plan, self.lowest)[here]
        self.input_shape = cache(partial(input_shape, chunks))

    def train(
        self,
        rows: Sequence[Now],
        shapes: Sequence[Shape],
        first: Callable[[int], Any],
        loss: Callable[[int, Any], Any],
    ) -> None:
        """Run the forwards and backwards of one step.

        rows    of each micro-batch
        shapes  shape of the model's input in each micro-batch
        first   (micro-batch) -> that input; called only on the stage of the first chunk
        loss    (micro-batch, output of the model) -> the gradient of that output; called only on
                the stage of the last chunk
        """
        of_micro = dict(enumerate(rows))
        for stage in self.stages.values():
            stage.begin(len(rows), of_micro)
        self.channel.begin(partial(shape_in, self.input_shape, shapes))
        arena, before = self._arena, self._arena.peak
        arena.peak = arena.live
        execute(
            self._program, self.stages, len(self._chunks), first, loss, self.channel, self.lowest
        )
        self.peak_bytes, arena.peak = arena.peak, max(before, arena.peak)
        of_micro.clear()  # ends the leases of the rows' places and weights

    @property
    def micro(self) -> int:
        """The micro-batch of the running instruction of `train`, as the step numbers it."""
        return self.channel.micro % self._micro_batches

    def drain(self) -> None:
        """Finish the micro-batches that `train` left in flight; in this class there are none."""

    @cached_property
    def _infer_program(self) -> Sequence[Instruction]:
        return with_messages(forward_alone(self._stage_of))[self._transport.rank]

    def infer(self, shape: Shape, first: Callable[[], Any], places: Places | None = None) -> Any:
        """Run one forward without a backward, and return the model's output.

        Only the last chunk's stage has the output; the others return None.

        shape      of the model's input
        first      () -> that input; called only on the stage of the first chunk
        places  of the tokens of these rows
        """
        outputs: list[Any] = []
        self.channel.begin(partial(shape_in, self.input_shape, [shape]))
        for stage in self.stages.values():
            stage.begin(0, {0: Now(0, 0, shape[0], False, places)})
        execute(
            self._infer_program,
            self.stages,
            len(self._chunks),
            lambda micro: first(),
            lambda micro, y: outputs.append(y),
            self.channel,
        )
        return outputs.pop() if outputs else None

    def output_shape(self, shape: Shape) -> Shape:
        return self.input_shape(len(self._chunks), shape)


# This is a function, because a cached method would make the pipeline refer to itself. That
# reference cycle would delay the release of buffers in MPI windows.
def input_shape(chunks: Sequence[Sequence[Unit]], chunk: int, shape: Shape) -> Shape:
    """Return the shape of a chunk's input for a model input of this shape."""
    for units in chunks[:chunk]:
        for unit in units:
            shape = unit.layer.output_shape(shape)
    return shape


def shape_in(
    input_shape: Callable[[int, Shape], Shape], shapes: Sequence[Shape], chunk: int, micro: int
) -> Shape:
    """Return the shape of a chunk's input in one micro-batch.

    shapes  of the model's input, by micro-batch of a step
    """
    return input_shape(chunk, shapes[micro % len(shapes)])


def lowest_chunk(chunks: Sequence[Sequence[Unit]]) -> int:
    frozen = forward_only([unit for units in chunks for unit in units])
    return sum(end <= frozen for end in accumulate(map(len, chunks)))


def own(stage_of: Sequence[int], stage: int) -> list[int]:
    """Return the chunks of a stage, in ascending order."""
    return [chunk for chunk, home in enumerate(stage_of) if home == stage]
