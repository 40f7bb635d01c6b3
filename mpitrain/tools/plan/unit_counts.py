"""Counts of each unit of a model in one micro-batch: activation bytes, FLOPs and collectives."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from mpitrain.data import zeros
from mpitrain.layers.base import Now, Unit
from mpitrain.layers.flat import Storage
from mpitrain.parallel.tensor.layer_factory import loss_for
from mpitrain.pipeline.pipeline import Stage, input_shape, own
from mpitrain.run.count.step import Body, CountedReplica, Counter, Sums
from mpitrain.run.trainer import places_of
from mpitrain.trace.recorder import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Silent


class UnitCount(NamedTuple):
    """The counts of one unit in one micro-batch; `saved`, `pending`, `peak` are activation bytes.

    The last unit of a recomputed segment repeats the segment's forwards, so their bytes and FLOPs
    count as its own.

    saved    what the forward adds: saved state and output, less an input that is freed
    pending  what the input half of the backward keeps for the weight half, if these are apart
    peak     the most on the rank during the unit's forward and backward; the last unit's includes
             the loss
    working  the most during the forward, the backward and its two halves, each beside what was on the
             rank before the forward; in the halves, beside what other units keep pending
    flops    floating-point operations of matrix products, forward and backward
    sums     {(axis, operation, bytes of the array): times} of its collectives over tp and cp, forward
             and backward
    loss     of the model's last unit: what the gradient of the loss adds, less the output
    """

    name: str
    saved: int
    pending: int
    peak: int
    working: tuple[int, int, int, int]
    flops: int
    sums: Mapping[tuple[str, str, int], int]
    loss: int = 0

    def with_input(self, nbytes: int) -> "UnitCount":
        """Return these counts if the forward adds also its input, of so many bytes."""
        forward, backward, half, weight = self.working
        working = forward + nbytes, backward + nbytes, half + nbytes, weight
        return self._replace(saved=self.saved + nbytes, working=working)


PHASES = FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT


class UnitCounter(Silent):
    """Counts the activations and FLOPs of each unit of a chunk, as the recorder of its `Stage`.

    units    the units of the chunk
    replica  their parameters and gradients
    begun    bytes on the rank when the first forward begins: those of its input
    """

    def __init__(self, body: Body, units: Sequence[Unit], replica: CountedReplica, rows: Now):
        super().__init__()
        self._rows = rows
        self._body, self._units, self._replica = body, units, replica
        self._lowest = replica.first
        self._peaks: list[dict[int, int]] = [dict.fromkeys(PHASES, 0) for _ in units]
        self._flops = [0] * len(units)
        self._saved, self._sums = [0] * len(units), [Sums() for _ in units]
        self._live, self._pending = [0] * len(units), [0] * len(units)
        self._loss = self.begun = 0
        self._unit = self._before = 0

    def count(self, x: Callable[[], Any], targets: Any) -> list[UnitCount]:
        """Return the counts of all units.

        x        () -> an input of the chunk
        targets  () -> the targets of the loss; None for a chunk that is not the last
        """
        replica: Any = self._replica
        stage = Stage(self._units, replica, self._body.arena, recorder=self, lowest=self._lowest)

        # No variable may refer to a gradient as well: its buffer would return later.
        def gradient() -> Any:
            stage.left = 1
            return self._gradient(self._forward(stage, x), targets)

        if self._lowest == len(self._units):
            gradient()
        else:
            stage.backward(0, gradient())
        # The halves run forwards again.
        flops, sums = [*self._flops], [dict(each) for each in self._sums]
        if self._lowest < len(self._units):
            stage.backward_input(0, gradient())
            stage.backward_weight(0)
        names, pending = [unit.name for unit in self._units], self._pending
        peaks = [max(most[FORWARD], most[BACKWARD]) for most in self._peaks]
        working = [
            (
                most[FORWARD] - live,
                most[BACKWARD] - live,
                most[BACKWARD_INPUT] - live - sum(pending[unit + 1 :]),
                most[BACKWARD_WEIGHT] - sum(pending[:unit]),
            )
            for unit, (most, live) in enumerate(zip(self._peaks, self._live, strict=True))
        ]
        counts = [*map(UnitCount, names, self._saved, pending, peaks, working, flops, sums)]
        return [*counts[:-1], counts[-1]._replace(loss=self._loss)]

    def keeps(self, x: Any) -> Iterator[tuple[bool, bool]]:
        """Yield for each unit whether what its forward saves has its input, and its output."""
        arena, replica = self._body.arena, self._replica
        for number, unit in enumerate(self._units):
            alone = replace(unit, segment=unit.segment and [unit.name])
            stage = Stage([alone], replica, arena, number, lowest=self._lowest)  # type: ignore[arg-type]
            stage.left = 1
            y = stage.forward(0, self._rows, x)
            live, x = arena.live, None
            has_input, is_last = arena.live == live, number == len(self._units) - 1
            x = None if is_last else arena.take(y.shape, y.dtype)
            live, y = arena.live, None
            yield has_input, arena.live == live

    def _forward(self, stage: Stage, x: Callable[[], Any]) -> Any:
        y = stage.forward(0, self._rows, x())
        self.begun = self._live[0]
        live = [*self._live, self._body.arena.live]
        self._saved = [after - before for before, after in pairwise(live)]
        return y

    def _gradient(self, y: Any, targets: Any) -> Any:
        """Return the gradient of the output `y`; the loss computes it if the chunk is the last."""
        if targets is None:
            return self._body.arena.take(y.shape, y.dtype)
        self._begin(len(self._units) - 1)
        right = targets().reshape(-1)
        _, dy = self._replica.loss(y.reshape(len(right), -1), right, 1.0)
        self.end(FORWARD)
        dy, y = dy.reshape(y.shape), None
        self._loss = self._body.arena.live - self._live[-1] - self._saved[-1]
        return dy

    def _begin(self, unit: int) -> None:
        self._unit, self._before = unit, self._body.count.flops
        self._body.sums.clear()
        self._body.arena.peak = self._body.arena.live

    def compute(self, *fields: int, **more: int) -> int:
        """Begin the forward or a backward of a unit; return which of them it is."""
        _, phase, unit, _ = fields
        self._begin(unit)
        if phase == FORWARD:
            self._live[unit] = self._body.arena.live
        if phase == BACKWARD_WEIGHT:
            self._pending[unit] = self._body.arena.live
        return phase

    def end(self, span: int) -> None:
        """End the forward or backward that `compute` began.    span: the result of `compute`"""
        arena, unit = self._body.arena, self._unit
        self._peaks[unit][span] = max(self._peaks[unit][span], arena.peak)
        self._flops[unit] += self._body.count.flops - self._before
        self._sums[unit] += self._body.sums
        if span == BACKWARD_WEIGHT:
            self._pending[unit] -= arena.live


def unit_counts(counter: Counter, pp: int) -> list[UnitCount]:
    """Count each unit of pipeline stage `pp`, for the largest micro-batch of replica 0."""
    last, counts = len(counter.chunks.chunks) - 1, list[UnitCount]()
    for chunk in own(counter.job.plan.stage_of, pp):
        units, first, targets = _of_chunk(counter, chunk)
        of_chunk = units.count(first, targets if chunk == last else None)
        if chunk == 0:  # Tokens on a device are what its first forward adds.
            of_chunk[0] = of_chunk[0].with_input(units.begun)
        counts += of_chunk
    return counts


def keeps(counter: Counter) -> list[tuple[bool, bool]]:
    """Return, for each unit of the first chunk, the result of `UnitCounter.keeps`."""
    units, first, _ = _of_chunk(counter, 0)
    return [*units.keeps(first())]


def _of_chunk(
    counter: Counter, chunk: int
) -> tuple[UnitCounter, Callable[[], Any], Callable[[], Any]]:
    """Return the counter of a chunk; () -> its input, in the largest micro-batch; () -> targets."""
    job, config, axes, plan = counter.job, counter.job.config, counter.job.axes, counter.job.plan
    body, chunks = counter.body, counter.chunks.chunks
    rows = math.ceil(config.batch.size / axes.dp / plan.micro_batches)
    inputs, targets = zeros(counter.job.source, rows, config.precision.stored)
    share = body.layers.tokens
    places = places_of(body.layers, inputs.shape, None, body.placed)
    inputs, targets = share.cut(inputs), share.cut(targets)
    storage = Storage(chunks[chunk], config.precision.stored, axes.copies)
    lowest = counter.chunks.first(chunks[chunk])
    replica = CountedReplica(storage, body, loss_for(body.layers), lowest, plan.micro_batches > 1)
    computed = job.device.half or storage.dtype

    def first() -> Any:
        if chunk == 0:
            return body.placed(inputs)
        return body.arena.take(input_shape(chunks, chunk, inputs.shape), computed)

    units = UnitCounter(body, chunks[chunk], replica, Now(0, 0, rows, True, places))
    return units, first, lambda: body.taken(targets, targets.dtype)
