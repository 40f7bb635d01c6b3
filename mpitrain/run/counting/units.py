"""Activations and FLOPs of each unit of a pipeline stage, for one micro-batch."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from mpitrain.layers.base import Unit
from mpitrain.pipeline.stage import Stage
from mpitrain.run.counting.body import Body, Replica
from mpitrain.trace.recorder import Silent
from mpitrain.trace.ring_buffer import BACKWARD_WEIGHT, FORWARD


class UnitCount(NamedTuple):
    """The counts of one unit in one micro-batch. All bytes are bytes of activations.

    The last unit of a recomputed segment runs the segment's forwards again: it has their bytes and
    FLOPs.

    saved    that its forward adds: its saved state and its output, less an input that dies
    pending  from the input half of backward to the weight half, if a schedule separates them
    peak     of the rank while its forward or its backward runs; the loss counts as the last unit's
    flops    floating-point operations of its matrix products, forward and backward
    """

    name: str
    saved: int
    pending: int
    peak: int
    flops: int


class UnitCounter(Silent):
    """Counts the activations and FLOPs of each unit of a chunk, as the recorder of its `Stage`.

    units    the units of the chunk
    replica  their parameters and gradients
    """

    def __init__(self, body: Body, units: Sequence[Unit], replica: Replica):
        super().__init__()
        self._body, self._units, self._replica = body, units, replica
        self._lowest = replica.replica.first
        self._peaks, self._flops = [0] * len(units), [0] * len(units)
        self._saved = [0] * len(units)
        self._live, self._pending = [0] * len(units), [0] * len(units)
        self._unit = self._before = 0

    def count(self, x: Callable[[], Any], targets: Any) -> list[UnitCount]:
        """Return the counts of all units.

        x        () -> an input of the chunk
        targets  None, or () -> the targets, if the loss follows the chunk
        """
        replica: Any = self._replica
        stage = Stage(
            self._units,
            replica,
            self._body.arena,
            recorder=self,
            lowest=self._lowest,
        )

        # No variable may refer to a gradient as well: its buffer would return later.
        def gradient() -> Any:
            stage.begin(1)
            return self._gradient(self._forward(stage, x), targets)

        if self._lowest == len(self._units):
            gradient()
        else:
            stage.backward(0, gradient())
        # The halves run forwards again.
        peaks, flops = [*self._peaks], [*self._flops]
        if self._lowest < len(self._units):
            stage.backward_input(0, gradient())
            stage.backward_weight(0)
        names = [unit.name for unit in self._units]
        return [*map(UnitCount, names, self._saved, self._pending, peaks, flops)]

    def _forward(self, stage: Stage, x: Callable[[], Any]) -> Any:
        """Return the output of the chunk; count the bytes that each unit saves."""
        y = stage.forward(0, x())
        live = [*self._live, self._body.arena.live]
        self._saved = [after - before for before, after in pairwise(live)]
        return y

    def _gradient(self, y: Any, targets: Any) -> Any:
        """Return the gradient of the output, from the loss if it follows."""
        if targets is None:
            return self._body.arena.take(y.shape, y.dtype)
        self._begin(len(self._units) - 1)
        right = targets().reshape(-1)
        _, dy = self._replica.loss(y.reshape(len(right), -1), right, 1.0)
        self.end(0)
        return dy.reshape(y.shape)

    def _begin(self, unit: int) -> None:
        self._unit, self._before = unit, self._body.count.flops
        self._body.arena.peak = self._body.arena.live

    def compute(self, *fields: int, **more: int) -> int:
        """Begin a pass of a unit, as the stage announces it; return its phase."""
        _, phase, unit, _ = fields
        self._begin(unit)
        if phase == FORWARD:
            self._live[unit] = self._body.arena.live
        if phase == BACKWARD_WEIGHT:
            self._pending[unit] = self._body.arena.live
        return phase

    def end(self, span: int) -> None:
        """End a pass of a unit.    span: the result of `compute`"""
        arena, unit = self._body.arena, self._unit
        self._peaks[unit] = max(self._peaks[unit], arena.peak)
        self._flops[unit] += self._body.count.flops - self._before
        if span == BACKWARD_WEIGHT:
            self._pending[unit] -= arena.live
