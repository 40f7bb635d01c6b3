"""Full-size buffers for sharded buckets, and the gradients that are summed in them.

A model has more buckets than buffers. A buffer is called a slot, and its buckets use it in turn.
"""

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
"""Slots for alternating buckets (double buffering): one bucket computes while the other one is
communicated.
"""


class UnshardedBuffers:
    """Full-size buffers for sharded buckets (as FSDP's unsharded flat parameter).

    A bucket always uses the same slot, so its bound collectives stay valid. With one model chunk,
    consecutive buckets alternate. With several chunks, one chunk is unsharded at a time: the n-th
    buckets of all chunks share the n-th slot. Buckets of different kinds (holders, `partial`) never
    share a slot, since one unit may need both. Each bucket of `alone` has its own slot.

    slot     {bucket: number of its slot}
    views    {bucket: its elements in the slot}
    tensors  {full name: the tensor in the slot}
    nbytes   bytes of all slots
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
        """Allocate the slots; collective, since shared-memory transports allocate them in windows.

        alone  buckets with a slot of their own
        parts  as in `ReplicationContext`; no bucket has units of two chunks
        dtype  None: the dtype of the storage
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
        """Bind a reduction for each bucket; collective.

        Buckets of equal length in one slot share a reduction and its scratch.
        """
        bound: dict[tuple[int, int], Reduction] = {}
        for bucket, view in self.views.items():
            key = self.slot[bucket], view.size
            if key not in bound:
                bound[key] = bind(view)
        return {bucket: bound[self.slot[bucket], view.size] for bucket, view in self.views.items()}


def buckets_used(storage: Storage, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Return, for each unit, the buckets of its tensors in order of storage. Tied tensors count."""
    starts = [[entry.start for entry in storage.used(unit)] for unit in range(len(storage.units))]
    return [
        [b for b in sorted(buckets) if any(b.start <= start < b.stop for start in mine)]
        for mine in starts
    ]


def users(storage: Storage, buckets: Sequence[Bucket]) -> dict[Bucket, set[int]]:
    """Return, for each bucket, the units that compute with its tensors.

    Units that only use a tied tensor of the bucket count as well.
    """
    used = buckets_used(storage, buckets)
    return {
        bucket: {unit for unit, mine in enumerate(used) if bucket in mine} for bucket in buckets
    }


def shared_by_ties(storage: Storage, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets with tensors that units of other buckets use as well."""
    return [
        bucket for bucket, units in users(storage, buckets).items() if not units <= {*bucket.units}
    ]


class ShardedGradients:
    """Reduce-scattered gradients in a few full-size buffers (as FSDP's post-backward hook).

    Each micro-batch reduce-scatters each bucket and adds this rank's chunk to a compact buffer. The
    last micro-batch also sums that chunk over the replication group. With several model chunks a
    bucket is reduce-scattered once a step. This is possible because all micro-batches finish the
    backward of one chunk before the next chunk begins.

    A bucket with a tied tensor has a slot of its own. It waits for all units that use the tensor.
    Partial gradients are summed over their tied group at the end, in the compact buffer.

    mover  the progress engine of these reductions and of those in the argument `beside`
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
        """Allocate the slots and bind the reductions; collective.

        dividing  the sharding group: each rank has one chunk of every bucket
        alike     the replication group: all ranks have the same chunks
        pieces    this rank's chunk of each bucket, and its offset in `compact`
        beside    other reductions for the same progress engine
        held      sums over tied groups, in `compact`
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
        )
        # The key is the slot; the flag tells whether this is the last micro-batch of a step.
        self._under_way: dict[int, tuple[Bucket, bool]] = {}
        self._totalled: list[Reduction] = []
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin a step: mark all sums as empty."""
        self._summed: set[Bucket] = set()
        self._missing: dict[Bucket, set[int]] = {}

    def gradients(self, unit: int) -> Gradients:
        """Return the leaves in which a unit writes its gradients, and wait until their slots are
        free.

        Leaves of a tied tensor stay claimed if another unit has written there in this micro-batch.
        """
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
        """Report a unit's gradient of one micro-batch, and start each bucket that it completes."""
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
        """Wait for the running reduction in a slot, if there is one, and add its result to the
        sums.
        """
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
        """Progress the started reductions."""
        self.mover.poll()

    def settle(self) -> None:
        """Block until all started reductions are summed."""
        for slot in [*self._under_way]:
            self._end(slot)
        while self._totalled:
            self.mover.wait(self._totalled.pop(0))

    def wait(self) -> None:
        """Block until all gradients are reduced; all units must have been reported as ready."""
        self.settle()
        for reduction in self._held:
            reduction.run()

    run = wait

    def kept(self) -> list[StateBuffer]:
        """Return no state: a step leaves nothing to later steps."""
        return []


def _padding(storage: Storage, bucket: Bucket, view: Any) -> list[Any]:
    """Return the views of the padding between a bucket's tensors, which other buckets of the slot
    overwrite.
    """
    gaps, end = [], bucket.start
    for start, stop in [
        *((e.start, e.stop) for e in storage.entries if bucket.start <= e.start < bucket.stop),
        (bucket.stop, bucket.stop),
    ]:
        if end < start:
            gaps.append(view[end - bucket.start : start - bucket.start])
        end = stop
    return gaps
