"""The shards of ZeRO, and gradients that each micro-batch reduce-scatters out of full-size buffers."""

from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.engine.progress import mover
from mpitrain.layers.base import Gradient, Gradients
from mpitrain.layers.flat import Bucket, Storage, shard
from mpitrain.parallel.data.buckets import tied_sums
from mpitrain.parallel.data.unsharded_buffers import (
    UnshardedBuffers,
    buckets_used,
    shared_by_ties,
    users,
)
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.replication.components import GradientReducer
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.state import compact
from mpitrain.regions import Piece


class Shards:
    """This rank's shard of every bucket.

    With replication.shard "all", s is the number n of replicas. With "host" it is the number of
    replicas on a host (as FSDP's hybrid sharding). Parameters then never travel between hosts. The
    h = n/s replicas with the same shard all-reduce its gradient once a step. They do so after the
    reduce-scatter on each host.

    dividing  the sharding group of s replicas
    alike     the replication group of h replicas
    buckets   in the order of their reduction
    pieces    this rank's shard of each bucket, in order of storage
    owned     the same shards
    length    elements of all shards
    source    Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel,
              VLDB 16(12)
    """

    def __init__(self, replica: ReplicationContext, buckets: Sequence[Bucket]):
        """Split the groups; collective."""
        self.dividing, self.alike = replica.grid.shard_groups(replica.config.replication.shard)
        self.buckets = buckets
        self.owned = shard(buckets, self.dividing.rank, self.dividing.size)
        self.pieces = dict(zip(sorted(buckets), self.owned, strict=True))
        self.length = sum(piece.stop - piece.start for piece in self.owned)

    def counted(self, grid: Grid) -> list[Piece]:
        """Return the pieces that this rank squares for the norm.

        The replication group divides the squaring of its shards evenly.
        """
        squared = []
        for bucket, (start, stop, offset) in self.pieces.items():
            if grid.counts(bucket.holders):
                run = share(stop - start, self.alike.rank, self.alike.size)
                squared.append(Piece(start + run.start, start + run.stop, offset + run.start))
        return squared

    def parameters(self, replica: ReplicationContext) -> Any:
        """Allocate and initialise the parameters of all shards, concatenated."""
        backend = replica.device.backend
        flat = backend.zeros(self.length, replica.storage.dtype)
        replica.storage.initialize(flat, replica.config.run.seed, backend, self.owned)
        return flat


def within(pieces: Mapping[Bucket, Piece], views: Mapping[Bucket, Any]) -> dict[Bucket, Any]:
    """Return the shards of a rank in full-size views of buckets."""
    return {
        bucket: views[bucket][piece.start - bucket.start : piece.stop - bucket.start]
        for bucket, piece in pieces.items()
    }


class ShardedGradients(GradientReducer):
    """Reduce-scattered gradients in a few full-size buffers (as FSDP's post-backward hook).

    Each micro-batch reduce-scatters each bucket and adds this rank's chunk to a compact buffer. The
    last micro-batch also sums that chunk over the replication group. With several model chunks a
    bucket is reduce-scattered once a step. This is possible because all micro-batches finish the
    backward of one chunk before the next chunk begins.

    A bucket with a tied tensor has a full-size buffer of its own. It waits for all units that use
    the tensor. Partial gradients are summed over their tied group at the end, in the compact
    buffer.

    buffer  this rank's shards of the summed gradient, concatenated
    engine  the progress engine of these reductions and of the constructor's `others`
    """

    delayed = False

    def __init__(
        self, replica: ReplicationContext, shards: Shards, others: Sequence[Reduction] = ()
    ):
        """Allocate the slots and bind the reductions; collective.

        others  other reductions for the same progress engine
        """
        pieces, storage, config = shards.pieces, replica.storage, replica.config.replication
        buckets = list(pieces)
        self._is_once, self._overlap = bool(replica.chunks), config.overlap
        self._exposed = replica.exposed
        self.members: Sequence[int] = replica.grid.dp.transport.members
        self.shards = shards
        self.buffer = replica.device.backend.zeros(shards.length, storage.dtype)
        self.slots = slots = UnshardedBuffers(
            storage,
            buckets,
            shared_by_ties(storage, buckets),
            shards.dividing.transport,
            replica.chunks,
        )
        self.arrays = [self.buffer, slots.flat]
        self.summed = dict(zip(shards.owned, compact(self.buffer, shards.owned), strict=True))
        self.squared = compact(self.buffer, shards.counted(replica.grid))
        self._tied = tied_sums(
            replica.grid,
            self.buffer,
            [
                (b.holders, b.partial, p.offset, p.offset + p.stop - p.start)
                for b, p in pieces.items()
            ],
        )
        self._used = buckets_used(storage, buckets)
        self._writers = users(storage, buckets)
        leaves = {name: Gradient(tensor) for name, tensor in slots.tensors.items()}
        self._trees = storage.nested(leaves)
        self._leaves = {
            bucket: [leaves[entry.name] for entry in storage.within(bucket)] for bucket in buckets
        }
        self._padding = {b: _padding(storage, b, view) for b, view in slots.views.items()}
        self._own_views = within(pieces, slots.views)
        self._sums = {bucket: self.summed[piece] for bucket, piece in pieces.items()}
        self._add = shards.dividing.arithmetic.combining(self.buffer, "add")
        self._reductions = slots.bind(shards.dividing.bind_reduce_scatter)
        self._totals = {bucket: shards.alike.bind(part) for bucket, part in self._sums.items()}
        self.engine = mover(
            replica.grid.dp.transport,
            [*self._reductions.values(), *self._totals.values(), *others],
        )
        # The key is the index of a full-size buffer. The flag says whether this is the step's last
        # micro-batch.
        self._under_way: dict[int, tuple[Bucket, bool]] = {}
        self._totalled: list[Reduction] = []
        self.begin(0)

    def begin(self, step: int) -> None:
        self._summed: set[Bucket] = set()
        self._missing: dict[Bucket, set[int]] = {}

    def gradients(self, unit: int) -> Gradients:
        """Return the leaves in which a unit writes its gradients, and wait until their slots are
        free.

        Leaves of a tied tensor stay claimed if another unit has written there in this micro-batch.
        """
        with self._exposed:
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
        for bucket in self._used[unit] if is_last or not self._is_once else ():
            self._missing[bucket].remove(unit)
            if not self._missing[bucket]:
                del self._missing[bucket]
                for leaf in self._leaves[bucket]:
                    if not leaf.filled:
                        leaf.array.fill(0)
                self.engine.start(self._reductions[bucket])
                self._under_way[self.slots.slot[bucket]] = bucket, is_last
        if not self._overlap:
            with self._exposed:
                self._end_all()

    def _end(self, slot: int) -> None:
        """Wait for the running reduction in a slot, if there is one, and add its result to the
        sums.
        """
        if slot not in self._under_way:
            return
        bucket, is_last = self._under_way.pop(slot)
        self.engine.wait(self._reductions[bucket])
        if bucket in self._summed:
            self._add(self._sums[bucket], self._own_views[bucket])
        else:
            self._sums[bucket][...] = self._own_views[bucket]
            self._summed.add(bucket)
        if is_last:
            self.engine.start(self._totals[bucket])
            self._totalled.append(self._totals[bucket])

    def poll(self) -> None:
        self.engine.poll()

    def _end_all(self) -> None:
        for slot in [*self._under_way]:
            self._end(slot)
        while self._totalled:
            self.engine.wait(self._totalled.pop(0))

    def wait(self) -> None:
        self._end_all()
        for reduction in self._tied:
            reduction.run()


def _padding(storage: Storage, bucket: Bucket, view: Any) -> list[Any]:
    """Return the views of the padding between a bucket's tensors, which other buckets of the slot
    overwrite.
    """
    gaps, end = [], bucket.start
    for start, stop in [
        *((entry.start, entry.stop) for entry in storage.within(bucket)),
        (bucket.stop, bucket.stop),
    ]:
        if end < start:
            gaps.append(view[end - bucket.start : start - bucket.start])
        end = stop
    return gaps
