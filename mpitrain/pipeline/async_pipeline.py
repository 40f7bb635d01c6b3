"""Asynchronous pipelines: no flush between steps (PipeDream, Narayanan et al. 2019, 2021).

The pipeline does not drain at the end of a step, and each stage updates its parameters by itself.
A call of `AsyncPipeline.train` is one step. It runs the forwards of all micro-batches of the step,
and the backwards that 1F1B puts between these forwards. The first of these backwards belong to the
step before. The next step, or `drain`, runs the backwards that are left. `STREAMS` in schedules.py
has a drawing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from mpitrain.parallel.replica import Replica
from mpitrain.pipeline.pipeline import LossGradient, MicroBatch, Pipeline, Stage
from mpitrain.pipeline.schedules import (
    STREAMS,
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    Receive,
    Skip,
    plan_of,
    training_program,
)


class Pieces(NamedTuple):
    """Programs of one stage for one step of an asynchronous pipeline.

    The micro-batches of the step are 0, 1, ...; negative numbers belong to the step before.

    first  the program of a step that begins with an empty pipeline
    next   the program of a step that follows another step
    last   the program that drains the pipeline after `first` or `next`
    """

    first: tuple[Instruction, ...]
    next: tuple[Instruction, ...]
    last: tuple[Instruction, ...]


def pieces(stage: int, stages: int, micro_batches: int, lowest: int = 0) -> Pieces:
    """Return the programs of one stage.

    A stage posts the receive of a step's first activation when the step begins. It cannot post the
    receive earlier, because it does not know whether there will be another step.

    micro_batches  of a step; at least as many as stages
    lowest         the first stage with a backward
    """
    program = training_program(plan_of(next(iter(STREAMS)), stages, 3 * micro_batches), lowest)
    first, second, third = _cut(program[stage], micro_batches)
    following, end = moved(second, -micro_batches), moved(third, -2 * micro_batches)
    done = {(type(i), i) for i in following}
    return Pieces(first, following, tuple(i for i in end if (type(i), i) not in done))


def _cut(program: Sequence[Instruction], micro_batches: int) -> list[tuple[Instruction, ...]]:
    """Cut the program of several steps into one program for each step.

    A step begins with the forward of its first micro-batch, and with the receive that this forward
    waits for.

    micro_batches  of a step
    """
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
    """Return the program with every instruction's micro-batch index shifted.

    by       added to each index
    numbers  each sum is taken modulo this number; 0: it is not
    """
    return tuple(
        i._replace(micro=(i.micro + by) % numbers if numbers else i.micro + by) for i in program
    )


class Updating(Stage):
    """Stage that calls `PipeDream.turned` after each backward, so that its parameters are updated."""

    def __init__(self, units: Any, replica: Replica, *rest: Any):
        super().__init__(units, replica, *rest)
        self._stashed: Any = replica

    def backward_weight(self, micro: int) -> None:
        super().backward_weight(micro)
        self._stashed.turned()

    def backward(self, micro: int, dy: Any) -> Any:
        dx = super().backward(micro, dy)
        self._stashed.turned()
        return dx


class AsyncPipeline(Pipeline):
    """Asynchronous pipeline: each stage updates by itself, and a step leaves backwards to the next.

    Micro-batch numbers wrap around after two steps, because no more than two steps are in flight.
    """

    stage_type = Updating

    def __init__(self, plan: Any, cut: Any, transport: Any, replica: Any, *rest: Any):
        super().__init__(plan, cut, transport, replica, *rest)
        self._stashed = replica
        self._micro_batches = plan.micro_batches
        self._pieces = pieces(transport.rank, transport.size, plan.micro_batches, self.lowest)
        self._micros = dict[int, MicroBatch]()  # of two steps
        self._steps = 0  # counts the steps since the pipeline was empty

    def train(self, micros: Sequence[MicroBatch], loss: LossGradient) -> None:
        """Run a step's forwards and the backwards between them; drain after the step if
        `PipeDream.ends` says so.
        """
        m = self._micro_batches
        self.channel.sent.clear()
        for number, batch in enumerate(micros, self._steps * m):
            self._micros[number % (2 * m)] = batch
        self._run(self._pieces.next if self._steps else self._pieces.first, loss)
        self._steps += 1
        if self._stashed.ends:
            self.drain()

    def drain(self) -> None:
        if self._steps:
            self._steps -= 1
            self._run(self._pieces.last, _no_loss)
            self._steps = 0
            self._stashed.sync()

    def _run(self, program: Sequence[Instruction], loss: LossGradient) -> None:
        """Execute a program of `Pieces`, with its micro-batch numbers moved to the current step."""
        m = self._micro_batches
        moved_program = moved(program, self._steps * m, 2 * m)
        self._executor.execute(self._turning(moved_program), self._micros, loss)

    def _turning(self, program: Iterable[Instruction]) -> Iterator[Instruction]:
        """Yield the instructions of a program; before each backward, call `PipeDream.turn`.

        A frozen stage makes the same calls at each `Skip`, so that it sends the same control
        messages as the other stages.

        The call must come before the stage waits for the gradient. Otherwise the stages could
        deadlock: the sender of the gradient may wait for a control message that this rank still has
        to progress.
        """
        for instruction in program:
            if isinstance(instruction, BackwardInput | Backward | Skip) and self._stashed.turn():
                self.stages[instruction.chunk].left = self._stashed.every
            yield instruction
            if isinstance(instruction, Skip):
                self._stashed.turned()


def _no_loss(*arguments: Any) -> NoReturn:
    raise AssertionError(arguments)  # no forward is left in flight
