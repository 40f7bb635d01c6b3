"""`Pipeline`, the pipeline runtime of one rank: its stages, and its programs to train and to infer."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

from mpitrain.layers.base import Now, Places, Unit, forward_only
from mpitrain.machine.arena import Arena
from mpitrain.parallel.replica import Replica
from mpitrain.pipeline.execute import Channel, execute
from mpitrain.pipeline.instructions import (
    Instruction,
    Plan,
    forward_alone,
    training_program,
    with_messages,
)
from mpitrain.pipeline.stage import ForwardOnly, Stage
from mpitrain.transport.base import Transport

Shape = tuple[int, ...]


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
        here, self._last = transport.rank, plan.stage_of[-1]
        self._transport, self._chunks = transport, chunks
        self._arena, self.channel = arena, Channel(transport, arena, dtype)
        channel, self.peak_bytes, self._micro_batches = self.channel, 0, plan.micro_batches
        self.lowest = lowest_chunk(chunks)

        def poll() -> None:
            replica.poll()
            channel.poll()

        self.stages, self._infer_stages, first = dict[int, Stage](), {}, 0
        for chunk in own(plan.stage_of, here):
            common = (
                *(chunks[chunk], replica, arena, first, poll, transport.recorder),
                replica.first,
            )
            self.stages[chunk] = self._stage(*common)
            self._infer_stages[chunk] = ForwardOnly(*common)
            first += len(chunks[chunk])
        # Trace files call chunks `parts`.
        transport.recorder.facts(
            parts={chunk: [unit.name for unit in chunks[chunk]] for chunk in self.stages}
        )
        self._program: Sequence[Instruction] = training_program(plan, self.lowest)[here]
        self._infer_program = with_messages(forward_alone(plan.stage_of))[here]
        self.input_shape = cache(partial(input_shape, chunks))

    def _stage(self, units: Sequence[Unit], replica: Any, *rest: Any) -> Stage:
        return Stage(units, replica, *rest)

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
        for stage in self.stages.values():
            stage.begin(len(rows), dict(enumerate(rows)))
        self.channel.begin(partial(shape_in, self.input_shape, shapes))
        arena, before = self._arena, self._arena.peak
        arena.peak = arena.live
        execute(
            self._program, self.stages, len(self._chunks), first, loss, self.channel, self.lowest
        )
        self.peak_bytes, arena.peak = arena.peak, max(before, arena.peak)

    @property
    def micro(self) -> int:
        """The micro-batch of the running instruction of `train`, as the step numbers it."""
        return self.channel.micro % self._micro_batches

    def drain(self) -> None:
        """Finish the micro-batches that `train` left in flight; in this class there are none."""

    def infer(self, shape: Shape, first: Callable[[], Any], places: Places | None = None) -> Any:
        """Run one forward without a backward, and return the model's output.

        Only the last chunk's stage has the output; the others return None.

        shape      of the model's input
        first      () -> that input; called only on the stage of the first chunk
        places  of the tokens of these rows
        """
        outputs: list[Any] = []
        self.channel.begin(partial(shape_in, self.input_shape, [shape]))
        for stage in self._infer_stages.values():
            stage.begin(0, {0: Now(0, 0, shape[0], False, places)})
        execute(
            self._infer_program,
            self._infer_stages,
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
