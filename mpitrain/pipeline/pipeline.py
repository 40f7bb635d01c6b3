"""A pipe: the parts of a model that lie on this rank, and the programs that take micro-batches through all parts of it."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from mpitrain.layers.base import Unit
from mpitrain.machine.arena import Arena
from mpitrain.parallel.replication.protocol import Replication
from mpitrain.pipeline.channel import Channel
from mpitrain.pipeline.execute import execute
from mpitrain.pipeline.instructions import (
    Instruction,
    Plan,
    forward_alone,
    fused_at_the_input,
    with_messages,
)
from mpitrain.pipeline.stage import ForwardOnly, Stage
from mpitrain.transport.base import Transport

Shape = tuple[int, ...]


class Pipeline:
    """The stages of one replica, seen from one of them; the others carry out their parts of each call at the same time.

    stages       the parts that lie here, by number, in ascending order
    input_shape  (part, shape of a model's input) -> shape of that part's input
    channel      to the other stages
    peak_bytes   of activations, the most there were here at a time in the last step, its update left out
    bytes sent  for each micro-batch an activation and a gradient over each boundary between parts of different stages
    """

    def __init__(
        self,
        plan: Plan,
        parts: Sequence[Sequence[Unit]],
        transport: Transport,
        replication: Replication,
        arena: Arena,
        dtype: Any,
    ):
        """parts: the units of each part of the model; transport: of the stages, by rank; dtype: of what crosses boundaries."""
        here, self._last = transport.rank, plan.place[-1]
        self._transport, self._parts = transport, parts
        self._arena, self.channel = arena, Channel(transport, arena, dtype)
        channel, self.peak_bytes = self.channel, 0

        def poll() -> None:
            replication.poll()
            channel.poll()

        self.stages, self._asked, first = dict[int, Stage](), {}, 0
        for part in own(plan.place, here):
            self.stages[part] = self._stage(
                parts[part], replication, arena, first, poll, transport.recorder
            )
            self._asked[part] = ForwardOnly(
                parts[part], replication, arena, first, poll, transport.recorder
            )
            first += len(parts[part])
        transport.recorder.facts(
            parts={part: [unit.name for unit in parts[part]] for part in self.stages}
        )
        self._program: Sequence[Instruction] = with_messages(fused_at_the_input(plan))[here]
        self._question = with_messages(forward_alone(plan.place))[here]
        self.input_shape = cache(partial(input_shape, parts))

    def _stage(self, units: Sequence[Unit], replication: Any, *rest: Any) -> Stage:
        """A part of the model, to be trained."""
        return Stage(units, replication, *rest)

    def train(
        self, shapes: Sequence[Shape], first: Callable[[int], Any], loss: Callable[[int, Any], Any]
    ) -> None:
        """Take the micro-batches of a step forward and back.

        shapes  of the model's input in each micro-batch
        first   (micro-batch) -> that input; called on the first part's stage alone
        loss    (micro-batch, output of the model) -> the gradient of that output; called on the last part's stage alone
        """
        for stage in self.stages.values():
            stage.begin(len(shapes))
        self.channel.begin(partial(shape_in, self.input_shape, shapes))
        arena, before = self._arena, self._arena.peak
        arena.peak = arena.live
        execute(self._program, self.stages, len(self._parts), first, loss, self.channel)
        self.peak_bytes, arena.peak = arena.peak, max(before, arena.peak)

    def drain(self) -> None:
        """Finish what `train` has left under way, which here is nothing; collective."""

    def ask(self, shape: Shape, first: Callable[[], Any]) -> Any:
        """The model's output for an input of this shape on the last part's stage, None on the others."""
        found: list[Any] = []
        self.channel.begin(partial(shape_in, self.input_shape, [shape]))
        execute(
            self._question,
            self._asked,
            len(self._parts),
            lambda micro: first(),
            lambda micro, y: found.append(y),
            self.channel,
        )
        return found.pop() if found else None

    def output_shape(self, shape: Shape) -> Shape:
        """Of the model, for an input of this shape."""
        return self.input_shape(len(self._parts), shape)

    def tell_first(self, array: np.ndarray) -> None:
        """Bring what the last part's stage has in an array of host memory to that of the first, where it lies afterwards."""
        tag = 2 * len(self._parts)
        if self._last and self._transport.rank == self._last:
            self._transport.send(array, 0, tag)
        if self._last and self._transport.rank == 0:
            self._transport.recv(array, self._last, tag)


# Bound to no pipe, which would refer to itself then, and keep what lies in windows beyond its last use.
def input_shape(parts: Sequence[Sequence[Unit]], part: int, shape: Shape) -> Shape:
    """The shape of a part's input, for a model's input of this shape."""
    for units in parts[:part]:
        for unit in units:
            shape = unit.layer.output_shape(shape)
    return shape


def shape_in(
    input_shape: Callable[[int, Shape], Shape], shapes: Sequence[Shape], part: int, micro: int
) -> Shape:
    """The shape of a part's input in a micro-batch. shapes: of the model's input, by micro-batch of a step"""
    return input_shape(part, shapes[micro % len(shapes)])


def own(place: Sequence[int], stage: int) -> list[int]:
    """The parts that lie on a stage."""
    return [part for part, home in enumerate(place) if home == stage]
