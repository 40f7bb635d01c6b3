"""ZeRO stage 3 (as FSDP): parameters are sharded as well, and units are gathered before each use.

This is the memory of rank r of s. Consecutive units alternate between two full-size slots:

    parameters        [ r ] of each unit: one s-th, float32
    gradients         [ r ] of each unit, summed over ranks and micro-batches
    optimizer state   [ r ] of each unit
    slot 0            [ 0 | ... | s - 1 ] of one even unit, whole
    slot 1            [ 0 | ... | s - 1 ] of one odd unit, whole

    forward, time -->
    compute      |          | unit 0   | unit 1   | unit 2   | unit 3   |
    slot 0       | gather 0 | unit 0   | gather 2 | unit 2   | gather 4 |
    slot 1       |          | gather 1 | unit 1   | gather 3 | unit 3   |

Backward runs in the opposite direction. Its full-size gradients have two more slots
(unsharded_buffers.py).
"""

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
    """ZeRO stage 3: each bucket is a unit, gathered while the previous unit computes, forward and
    backward.

    A unit stays in its slot until another unit needs the slot, or until it is updated. So backward
    does not gather the last two units again. The next micro-batch does not gather the first two
    again. Units with a tied tensor have a slot of their own, as do units of at most
    replication.zero_keep elements. They are gathered once a step.

    With several model chunks the slots contain one whole chunk, while all micro-batches pass
    through it. Its other units are gathered while its first unit computes. A rank with v chunks
    gathers 2 v - 1 chunks, since the last one stays for its backward.

    With replication.gather units travel in a wire format. All ranks compute with the decoded
    values, also the owner of a shard. The owner updates its exact float32 shard, so rounding errors
    do not accumulate.

    bytes sent  with m micro-batches at most 2 m all-gathers and m reduce-scatters by s ranks, and
                an all-reduce of 1/s of the gradient by h; with several model chunks at most 2
                all-gathers, 1 of this rank's last chunk, and 1 reduce-scatter
    parameters  1/s of them up to padding, two units or one chunk in full size, and all units with a
                slot of their own
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
        """Return the units to gather while this unit computes.

        They are the next unit, or with several model chunks the rest of its chunk.
        """
        part = next((units for units in self.replica.parts if unit in units), None)
        if part is None:
            return [self._next(unit)]
        return part if unit == part.start else part[::-1]

    def _next(self, unit: int) -> int:
        """Return the unit that `open` will receive next.

        It continues in the direction of the last two units, and turns back at both ends.
        """
        last = len(self._needed) - 1
        if unit in (0, last):
            return min(1, last) if unit == 0 else last - 1
        return unit + 1 if unit > self._opened else unit - 1

    def _gather(self, bucket: Bucket) -> None:
        """Start to gather a bucket, unless its slot already contains it."""
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

    def sync_parameters(self) -> None:
        for bucket in [*self._under_way]:
            self._wait(bucket)

    def _update(self, scale: float, mine: StepInput) -> None:
        super()._update(scale, mine)
        self._there.clear()

    def held(self) -> int:
        return super().held() + self.slots.nbytes

    def kept(self) -> list[StateBuffer]:
        self._there.clear()  # a checkpoint may be loaded into this rank's shards
        return super().kept()

    def _places(self) -> Sequence[Piece]:
        return self._owned()

    def _write_mirror(self) -> None:
        """Do nothing: `_gather` rounds the parameters of each unit."""


def _elements(entries: Sequence[Any], bucket: Bucket) -> int:
    """Return the number of elements of a bucket's tensors, without padding."""
    return sum(
        entry.stop - entry.start for entry in entries if bucket.start <= entry.start < bucket.stop
    )
