"""Slots: a few buffers in which the buckets of a model take turns, and the gradients that are summed there."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import Any

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.engine.progress import mover
from mpitrain.collectives.group import Group
from mpitrain.layers.base import Gradient, Gradients
from mpitrain.layers.flat import Bucket, Piece, Storage
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.transport.base import Transport

TURNS = 2
"""Slots that neighbours take turns in: one is computed with while what lies in the other travels."""


class UnshardedBuffers:
    """Where buckets lie that no rank keeps whole. A bucket's slot is always the same: what is bound to it there stays bound.

    Of a model in one part neighbours take turns. Of one in several parts one part lies there at a time: the n-th buckets of all
    parts have the n-th slot. Buckets of different kinds, of which a unit may have one each (holders, `partial`), have different
    slots, and each of `alone` has one of its own.

    slot     {bucket: number of its slot}
    views    {bucket: its elements, there}
    tensors  {full name: the tensor, there}
    nbytes   of all slots
    """

    def __init__(
        self,
        storage: Storage,
        buckets: Collection[Bucket],
        alone: Collection[Bucket],
        transport: Transport,
        parts: Sequence[range] = (),
        dtype: Any = None,
    ):
        """Collective: slots lie in a window, where there are windows.

        parts  see `ReplicationContext`; no bucket has units of two
        dtype  None for that of the storage
        """
        numbers: dict[Any, int] = {}
        turns: dict[Any, count] = {}
        self.slot: dict[Bucket, int] = {}
        for bucket in sorted(set(buckets) - set(alone)):
            part = next(
                (number for number, units in enumerate(parts) if bucket.units[0] in units), None
            )
            kind = bucket.holders, bucket.partial
            turn = next(turns.setdefault((kind, part), count()))
            self.slot[bucket] = numbers.setdefault(
                (kind, turn if parts else turn % TURNS), len(numbers)
            )
        self.slot |= {bucket: number for number, bucket in enumerate(sorted(alone), len(numbers))}
        lengths = [
            max(b.stop - b.start for b, slot in self.slot.items() if slot == number)
            for number in range(len(numbers) + len(alone))
        ]
        flat = transport.allocate(sum(lengths), dtype or storage.dtype)
        self.nbytes = flat.nbytes
        self.views = {}
        self.tensors: dict[str, Any] = {}
        for bucket, slot in self.slot.items():
            start = sum(lengths[:slot])
            self.views[bucket] = view = flat[start : start + bucket.stop - bucket.start]
            for entry in storage.entries:
                if bucket.start <= entry.start < bucket.stop:
                    shape = entry.parameter.local_shape
                    self.tensors[entry.name] = view[
                        entry.start - bucket.start : entry.stop - bucket.start
                    ].reshape(shape)

    def bind(self, bind: Callable[[Any], Reduction]) -> dict[Bucket, Reduction]:
        """A reduction for each bucket; those of one length in one slot have one, and its scratch, in turn. Collective."""
        bound: dict[tuple[int, int], Reduction] = {}
        for bucket, view in self.views.items():
            key = self.slot[bucket], view.size
            if key not in bound:
                bound[key] = bind(view)
        return {bucket: bound[self.slot[bucket], view.size] for bucket, view in self.views.items()}


def buckets_used(storage: Storage, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """By unit: the buckets that hold its tensors, tied ones included; in order of storage."""
    starts = [[entry.start for entry in storage.used(unit)] for unit in range(len(storage.units))]
    return [
        [b for b in sorted(buckets) if any(b.start <= start < b.stop for start in mine)]
        for mine in starts
    ]


def users(storage: Storage, buckets: Sequence[Bucket]) -> dict[Bucket, set[int]]:
    """The units that compute with tensors of each bucket, those of other units that are tied to one included."""
    used = buckets_used(storage, buckets)
    return {
        bucket: {unit for unit, mine in enumerate(used) if bucket in mine} for bucket in buckets
    }


def shared_by_ties(storage: Storage, buckets: Sequence[Bucket]) -> list[Bucket]:
    """The buckets with tensors that units outside of them use too."""
    return [
        bucket for bucket, units in users(storage, buckets).items() if not units <= {*bucket.units}
    ]


class ShardedGradients:
    """Gradients of a few buckets at a time: each is reduce-scattered for every micro-batch, and this rank's part of the sum added
    to a compact buffer. With the last micro-batch that part is summed over those who have the same.

    Of a model in several parts a bucket is reduce-scattered once: all micro-batches go back through a part before the next.
    A bucket with a tied tensor waits for all units that use the tensor, in a slot of its own. Where holders have only parts of
    gradients, they sum what is left of these at the end.
    mover  moves these reductions, and those `beside` them
    """

    delay = False

    def __init__(
        self,
        replica: ReplicationContext,
        dividing: Group,
        alike: Group,
        pieces: Mapping[Bucket, Piece],
        compact: Any,
        beside: Sequence[Reduction],
        held: Sequence[Reduction],
    ):
        """Collective.

        dividing, alike  the ranks that have a part each of every bucket, and those that have the same
        pieces           what this rank has of each bucket, and its place in `compact`
        held             what sums there what is `partial` over its holders
        """
        buckets, storage = list(pieces), replica.storage
        self._is_once, self._held = bool(replica.parts), held
        self.slots = slots = UnshardedBuffers(
            storage, buckets, shared_by_ties(storage, buckets), dividing.transport, replica.parts
        )
        self._used = buckets_used(storage, buckets)
        self._writers = users(storage, buckets)
        leaves = {name: Gradient(tensor) for name, tensor in slots.tensors.items()}
        self._trees = storage.nested(leaves)
        self._leaves = {
            b: [leaves[e.name] for e in storage.entries if b.start <= e.start < b.stop]
            for b in buckets
        }
        self._padding = {b: _padding(storage, b, view) for b, view in slots.views.items()}
        self._mine, self._sums = {}, {}
        for bucket, piece in pieces.items():
            length = piece.stop - piece.start
            start = piece.start - bucket.start
            self._mine[bucket] = slots.views[bucket][start : start + length]
            self._sums[bucket] = compact[piece.place : piece.place + length]
        self._add = dividing.arithmetic.combining(compact, "add")
        self._reductions = slots.bind(dividing.bind_reduce_scatter)
        self._totals = {bucket: alike.bind(part) for bucket, part in self._sums.items()}
        self.mover = mover(
            replica.grid.dp.transport,
            [*self._reductions.values(), *self._totals.values(), *beside],
            replica.config.replication.progress_thread,
        )
        self._under_way: dict[
            int, tuple[Bucket, bool]
        ] = {}  # by slot; and whether it is the last of a step
        self._totalled: list[Reduction] = []
        self.begin(0)

    def begin(self, step: int) -> None:
        """Step `step` begins: nothing has been summed."""
        self._summed: set[Bucket] = set()
        self._missing: dict[Bucket, set[int]] = {}

    def gradients(self, unit: int) -> Gradients:
        """Where the unit writes; waits until the slot is free. What is tied was claimed, where another unit has written."""
        for bucket in self._used[unit]:
            if bucket not in self._missing:
                self._end(self.slots.slot[bucket])
                self._missing[bucket] = set(self._writers[bucket])
                for leaf in self._leaves[bucket]:
                    leaf.filled = False
                for gap in self._padding[bucket]:
                    gap.fill(0)
        return self._trees[unit]

    def ready(self, unit: int, is_last: bool) -> None:
        """The unit has written, in the last micro-batch or before: start the buckets that waited for it alone."""
        for bucket in self._used[unit] if is_last or not self._is_once else ():
            self._missing[bucket].remove(unit)
            if not self._missing[bucket]:
                del self._missing[bucket]
                for leaf in self._leaves[bucket]:
                    if not leaf.filled:
                        leaf.array.fill(0)
                self.mover.start(self._reductions[bucket])
                self._under_way[self.slots.slot[bucket]] = bucket, is_last

    def _end(self, slot: int) -> None:
        """Wait for the reduction in the slot, if any, and add what it leaves."""
        if slot not in self._under_way:
            return
        bucket, is_last = self._under_way.pop(slot)
        self.mover.wait(self._reductions[bucket])
        if bucket in self._summed:
            self._add(self._sums[bucket], self._mine[bucket])
        else:
            self._sums[bucket][...] = self._mine[bucket]
            self._summed.add(bucket)
        if is_last:
            self.mover.start(self._totals[bucket])
            self._totalled.append(self._totals[bucket])

    def poll(self) -> None:
        """Move what is under way."""
        self.mover.poll()

    def settle(self) -> None:
        """Block until all that was started is summed."""
        for slot in [*self._under_way]:
            self._end(slot)
        while self._totalled:
            self.mover.wait(self._totalled.pop(0))

    def wait(self) -> None:
        """Block until everything is reduced; every unit is ready."""
        self.settle()
        for reduction in self._held:
            reduction.run()

    run = wait

    def kept(self) -> list[StateBuffer]:
        """Nothing: a step leaves nothing to later ones."""
        return []


def _padding(storage: Storage, bucket: Bucket, view: Any) -> list[Any]:
    """What lies between the tensors of a bucket: other buckets write there."""
    gaps, end = [], bucket.start
    for start, stop in [
        *((e.start, e.stop) for e in storage.entries if bucket.start <= e.start < bucket.stop),
        (bucket.stop, bucket.stop),
    ]:
        if end < start:
            gaps.append(view[end - bucket.start : start - bucket.start])
        end = stop
    return gaps
