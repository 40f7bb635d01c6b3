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
(sharded_gradients.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.engine.progress import ProgressEngine
from mpitrain.layers.base import Weights
from mpitrain.layers.flat import Bucket, Entry, shard
from mpitrain.parallel.data.sharded_gradients import Shards, within
from mpitrain.parallel.data.unsharded_buffers import UnshardedBuffers, buckets_used, shared_by_ties
from mpitrain.parallel.replication.components import ParameterStore
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.state import StateBuffer, compact
from mpitrain.parallel.replication.whole import FrozenParameters
from mpitrain.regions import Piece


class GatheredOnUse(ParameterStore):
    """Parameters of ZeRO stage 3: each bucket is a unit, gathered while the previous unit computes,
    forward and backward.

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

    bytes sent  with m micro-batches at most 2 m all-gathers by s ranks; with several model chunks
                at most 2, and 1 of this rank's last chunk
    memory      1/s of the parameters up to padding, two units or one chunk in full size, and all
                units with a slot of their own
    frozen      tensors of a unit have slots of their own, which stay valid after an update
    gathers     the bound all-gathers; `engine` drives them
    """

    mirror: Any = None  # `_gather` rounds the parameters of each unit
    is_sharded = True
    engine: ProgressEngine

    def __init__(self, replica: ReplicationContext, shards: Shards):
        """Allocate and initialise the shards, allocate the slots, bind the gathers; collective."""
        config, storage, dividing = replica.config.replication, replica.storage, shards.dividing
        self._replica = replica
        self.parameters = shards.parameters(replica)
        frozen = sorted(storage.frozen_buckets())
        pieces = shard(frozen, dividing.rank, dividing.size)
        self.frozen = FrozenParameters(replica, pieces)
        buckets = [*shards.pieces, *frozen]
        tied = shared_by_ties(storage, buckets)
        alone = [
            b for b in buckets if b in tied or _elements(storage.within(b)) <= config.zero_keep
        ]
        self.slots = UnshardedBuffers(
            storage, buckets, alone, dividing.transport, replica.chunks, replica.computed
        )
        self.arrays = [self.parameters, self.frozen.flat, self.slots.flat]
        self._weights = storage.nested(self.slots.tensors)
        self._needed = buckets_used(storage, buckets)
        wire = parse_wire(config.gather)
        self._gathers = self.slots.bind(
            dividing.bind_all_gather
            if wire.name == "none"
            else lambda unit: dividing.bind_coded_all_gather(unit, wire)
        )
        self.gathers = list(self._gathers.values())
        masters = compact(self.parameters, shards.owned)
        self.owned = dict(zip(shards.owned, masters, strict=True))
        self.sharing = [shards.dividing]
        held = [*masters, *compact(self.frozen.flat, pieces)]
        self._master = dict(zip(buckets, held, strict=True))
        self._in_slot = within(
            shards.pieces | dict(zip(frozen, pieces, strict=True)), self.slots.views
        )
        # The key is the slot. `_there` has the bucket that it contains or will contain.
        self._there: dict[int, Bucket] = {}
        self._under_way: list[Bucket] = []
        self._opened = 0

    def open(self, unit: int, micro: int) -> Weights:
        with self._replica.exposed:
            for bucket in self._needed[unit]:
                self._gather(bucket)
            for bucket in self._needed[unit]:
                self._wait(bucket)
        if self._replica.config.replication.overlap:
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
        chunk = next((units for units in self._replica.chunks if unit in units), None)
        if chunk is None:
            return [self._next(unit)]
        return (
            chunk
            if unit == chunk.start
            else chunk[max(0, self._replica.first - chunk.start) :][::-1]
        )

    def _next(self, unit: int) -> int:
        """Return the unit that `open` will receive next.

        It continues in the direction of the last two units. It turns back at the last unit, and at
        the first unit that has a backward.
        """
        last, first = len(self._needed) - 1, self._replica.first
        is_forward = unit > self._opened or unit == 0
        if is_forward and unit < last:
            return unit + 1
        return unit - 1 if unit > first else 0

    def _gather(self, bucket: Bucket) -> None:
        """Start to gather a bucket, unless its slot already contains it."""
        slot = self.slots.slot[bucket]
        if self._there.get(slot) == bucket:
            return
        if slot in self._there:
            self._wait(self._there[slot])
        self._there[slot] = bucket
        master, in_slot = self._master[bucket], self._in_slot[bucket]
        if self._replica.device.mirror and not bucket.frozen:
            self._replica.device.mirror(master, in_slot, self._replica.arena)
        else:
            in_slot[...] = master
        self.engine.start(self._gathers[bucket])
        self._under_way.append(bucket)

    def _wait(self, bucket: Bucket) -> None:
        if bucket in self._under_way:
            self.engine.wait(self._gathers[bucket])
            self._under_way.remove(bucket)

    def update(self, apply: Callable[[Piece, Any, Any], None]) -> None:
        for piece, master in self.owned.items():
            apply(piece, master, None)
        self._there = {slot: bucket for slot, bucket in self._there.items() if bucket.frozen}

    def sync(self) -> None:
        for bucket in [*self._under_way]:
            self._wait(bucket)

    def state(self) -> list[StateBuffer]:
        self._there.clear()  # a checkpoint may be loaded into this rank's shards
        self.sync()
        own = StateBuffer("parameters", self.parameters, list(self.owned))
        return [own, *self.frozen.state()]


def _elements(entries: Sequence[Entry]) -> int:
    return sum(entry.stop - entry.start for entry in entries)
