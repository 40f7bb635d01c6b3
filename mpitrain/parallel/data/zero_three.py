"""ZeRO, stage 3: no rank holds the whole model. Units are gathered before they are used, and freed."""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mpitrain.collectives.engine.codecs import parse_wire
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.layers.base import Weights
from mpitrain.layers.flat import Bucket, Piece
from mpitrain.parallel.data.unsharded_buffers import UnshardedBuffers, buckets_used, shared_by_ties
from mpitrain.parallel.data.zero import ZeroShardedGradients
from mpitrain.parallel.replication.records import StepInput
from mpitrain.parallel.replication.state import StateBuffer


class ZeroThree(ZeroShardedGradients):
    """Stage 3: a bucket is a unit, gathered into one of two slots while the unit before it computes, forward and backward.

    A unit stays where it is until another one comes to its slot, or it is updated: the last two units are not gathered again for
    backward, nor the first two for the next micro-batch. A unit with a tied tensor, or of at most replication.zero_keep
    elements, has a slot of its own, and is gathered once a step.

    Of a model in several parts one part lies in the slots, while all micro-batches go through it. Its other units are gathered
    while its first one computes. A rank with v parts gathers 2 v - 1 of them, for the last one stays until it has gone back.

    With replication.gather units travel in that format, and all compute with what is decoded, the rank that has a piece too. It
    updates the piece itself, which stays as it is in float32: nothing that is lost on the way adds up.

    bytes sent  with m micro-batches at most 2 m all-gathers and m reduce-scatters by s ranks, and an all-reduce of 1/s of the
                gradient by h; of a model in several parts at most 2 all-gathers, 1 of the last part here, and 1 reduce-scatter
    parameters  1/s of them to the padding, two units or one part, and those with a slot of their own
    """

    @cached_property
    def _cut(self) -> Sequence[Bucket]:
        return self.replica.storage.buckets(0)

    def _hold_parameters(self) -> None:
        config, _, storage, *_ = self.replica
        buckets = list(self._pieces)
        self._divide_parameters()
        tied = shared_by_ties(storage, buckets)
        alone = [
            b
            for b in buckets
            if b in tied or _elements(storage.entries, b) <= config.replication.zero_keep
        ]
        self.slots = UnshardedBuffers(
            storage,
            buckets,
            alone,
            self.dividing.transport,
            self.replica.parts,
            self.replica.computed,
        )
        self._weights = storage.nested(self.slots.tensors)
        self._needed = buckets_used(storage, buckets)
        wire = parse_wire(config.replication.gather)
        self._gathers = self.slots.bind(
            self.dividing.bind_all_gather
            if wire.name == "none"
            else lambda unit: self.dividing.bind_coded_all_gather(unit, wire)
        )
        self._there: dict[int, Bucket] = {}
        self._under_way: list[Bucket] = []
        self._opened = 0

    def _beside(self) -> Sequence[Reduction]:
        return list(self._gathers.values())

    def _parameters_of(self, piece: Piece) -> Any:
        return self.parameters[piece.place : piece.place + piece.stop - piece.start]

    def open(self, unit: int, part: int) -> Weights:
        began = time.perf_counter()
        for bucket in self._needed[unit]:
            self._gather(bucket)
        for bucket in self._needed[unit]:
            self._wait(bucket)
        self._waited_s += time.perf_counter() - began
        if self._overlap:
            in_use = {self.slots.slot[bucket] for bucket in self._needed[unit]}
            for following in self._following(unit):
                for bucket in self._needed[following]:
                    if self.slots.slot[bucket] not in in_use:
                        self._gather(bucket)
        self._opened = unit
        return self._weights[unit]

    def _following(self, unit: int) -> Sequence[int]:
        """What is gathered while the unit computes: the next one, or of a model in several parts the rest of its part."""
        part = next((units for units in self.replica.parts if unit in units), None)
        if part is None:
            return [self._next(unit)]
        return part if unit == part.start else part[::-1]

    def _next(self, unit: int) -> int:
        """The unit that will be opened after this one: on in the direction in which units were opened last, back at the ends."""
        last = len(self._needed) - 1
        if unit in (0, last):
            return min(1, last) if unit == 0 else last - 1
        return unit + 1 if unit > self._opened else unit - 1

    def _gather(self, bucket: Bucket) -> None:
        """Start to gather a bucket that is not in its slot."""
        slot, piece = self.slots.slot[bucket], self._pieces[bucket]
        if self._there.get(slot) == bucket:
            return
        if slot in self._there:
            self._wait(self._there[slot])
        self._there[slot] = bucket
        start = piece.start - bucket.start
        mine = self.slots.views[bucket][start : start + piece.stop - piece.start]
        if self.replica.device.mirror:
            self.replica.device.mirror(self._parameters_of(piece), mine, self.replica.arena)
        else:
            mine[...] = self._parameters_of(piece)
        self.buckets.mover.start(self._gathers[bucket])
        self._under_way.append(bucket)

    def _wait(self, bucket: Bucket) -> None:
        if bucket in self._under_way:
            self.buckets.mover.wait(self._gathers[bucket])
            self._under_way.remove(bucket)

    def settle(self) -> None:
        for bucket in [*self._under_way]:
            self._wait(bucket)

    def _update(self, scale: float, mine: StepInput) -> None:
        super()._update(scale, mine)
        self._there.clear()

    def held(self) -> int:
        return super().held() + self.slots.nbytes

    def kept(self) -> list[StateBuffer]:
        self._there.clear()  # what is loaded goes to this rank's pieces
        return super().kept()

    def _places(self) -> Sequence[Piece]:
        return self._owned()

    def _write_mirror(self) -> None:
        """Units are rounded when they are gathered."""


def _elements(entries: Sequence[Any], bucket: Bucket) -> int:
    """Of the tensors in a bucket, padding left out."""
    return sum(
        entry.stop - entry.start for entry in entries if bucket.start <= entry.start < bucket.stop
    )
