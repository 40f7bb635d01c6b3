"""Streams: pipelines that do not run empty at the end of a step, and whose stages update by themselves meanwhile.

A call of `train` is a step: it takes the step's micro-batches forward, and back as many as then follow in the order of 1F1B, the
last ones of the step before among them. What is left is done with the next step, or when the pipe is drained.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpitrain.config import ASYNCHRONOUS, Config
from mpitrain.parallel.data.weight_stashing import WeightStashing
from mpitrain.pipeline.execute import execute
from mpitrain.pipeline.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    Receive,
    fused_at_the_input,
    with_messages,
)
from mpitrain.pipeline.pipeline import Pipeline, Shape, shape_in
from mpitrain.pipeline.schedules import plan_of
from mpitrain.pipeline.stage import Stage


class Pieces(NamedTuple):
    """What a stage does with the micro-batches of one step, which are 0, 1 ...; those of the step before are negative.

    first  if the pipe was empty
    next   if another step went before
    last   after either of them, if none follows
    """

    first: tuple[Instruction, ...]
    next: tuple[Instruction, ...]
    last: tuple[Instruction, ...]


def pieces(stage: int, stages: int, micro_batches: int) -> Pieces:
    """The pieces of a stream, for at least as many micro-batches as stages.

    A stage begins to receive the first activation of a step when the step begins: whether there is one it does not know before.
    """
    plan = fused_at_the_input(plan_of(ASYNCHRONOUS[0], stages, 3 * micro_batches))
    first, second, third = _cut(with_messages(plan)[stage], micro_batches)
    following, end = moved(second, -micro_batches), moved(third, -2 * micro_batches)
    done = {(type(i), i) for i in following}
    return Pieces(first, following, tuple(i for i in end if (type(i), i) not in done))


def _cut(program: Sequence[Instruction], micro_batches: int) -> list[tuple[Instruction, ...]]:
    """Before each forward of the first micro-batch of a step."""
    steps: list[list[Instruction]] = []
    put_off: list[Instruction] = []
    for instruction in program:
        is_first = instruction.micro % micro_batches == 0
        match instruction:
            case Receive("activation") if is_first:
                put_off.append(instruction)
            case Forward() if is_first:
                steps.append([*put_off, instruction])
                put_off = []
            case _:
                (steps[-1] if steps else put_off).append(instruction)
    return [tuple(step) for step in steps]


def moved(program: Iterable[Instruction], by: int, numbers: int = 0) -> tuple[Instruction, ...]:
    """The same with other micro-batches, counted in a circle of so many numbers if there is one."""
    return tuple(
        i._replace(micro=(i.micro + by) % numbers if numbers else i.micro + by) for i in program
    )


class Updating(Stage):
    """A stage that updates its parameters when it has done the weight half of a micro-batch."""

    def __init__(self, units: Any, replication: WeightStashing, *rest: Any):
        super().__init__(units, replication, *rest)
        self._stashed = replication

    def backward_weight(self, micro: int) -> None:
        super().backward_weight(micro)
        self._stashed.turned()

    def backward(self, micro: int, dy: Any) -> Any:
        dx = super().backward(micro, dy)
        self._stashed.turned()
        return dx


class AsyncPipeline(Pipeline):
    """A pipe of stages that update by themselves, which ends a step with some of its micro-batches under way.

    Micro-batches are numbered in a circle of two steps: no more are under way.
    """

    def __init__(self, plan: Any, parts: Any, transport: Any, replication: Any, *rest: Any):
        super().__init__(plan, parts, transport, replication, *rest)
        assert isinstance(replication, WeightStashing)
        self._stashed, self._micro_batches = replication, plan.micro_batches
        self._pieces = pieces(transport.rank, transport.size, plan.micro_batches)
        self._steps = 0  # since the pipe was empty

    def _stage(self, units: Any, replication: Any, *rest: Any) -> Stage:
        return Updating(units, replication, *rest)

    def train(
        self, shapes: Sequence[Shape], first: Callable[[int], Any], loss: Callable[[int, Any], Any]
    ) -> None:
        """Take the micro-batches of a step forward; back what follows, and all of it where the pipe is to be empty then."""
        m = self._micro_batches
        self.channel.begin(partial(shape_in, self.input_shape, shapes))
        self._run(
            self._pieces.next if self._steps else self._pieces.first,
            lambda micro: first(micro % m),
            lambda micro, y: loss(micro % m, y),
        )
        self._steps += 1
        if self._stashed.ends:
            self.drain()

    def drain(self) -> None:
        """Take back what is under way; collective."""
        if self._steps:
            self._steps -= 1
            self._run(self._pieces.last, _nothing, _nothing)
            self._steps = 0
            self._stashed.settle()

    def _run(
        self,
        program: Sequence[Instruction],
        first: Callable[[int], Any],
        loss: Callable[[int, Any], Any],
    ) -> None:
        m = self._micro_batches
        execute(
            self._turning(moved(program, self._steps * m, 2 * m)),
            self.stages,
            len(self._parts),
            first,
            loss,
            self.channel,
        )

    def _turning(self, program: Iterable[Instruction]) -> Iterator[Instruction]:
        """The program, in which a stage learns that a backward is next before it waits for the gradient that this needs.

        Later would deadlock: who waits for the gradient may wait for a rank that waits until this one has moved a message on.
        """
        for instruction in program:
            if isinstance(instruction, BackwardInput | Backward) and self._stashed.turn():
                self.stages[instruction.part].begin(self._stashed.every)
            yield instruction


def _nothing(*arguments: Any) -> None:
    """Nothing goes forward in an end."""
    raise AssertionError(arguments)


def pipeline_for(config: Config) -> type[Pipeline]:
    """The kind of pipe that the configured schedule needs."""
    return AsyncPipeline if config.pipeline.schedule in ASYNCHRONOUS else Pipeline
