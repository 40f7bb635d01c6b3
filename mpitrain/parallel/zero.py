"""ZeRO: replicas shard optimizer state, gradients and parameters instead of replicating them.

The picture shows the memory of a sharding group of s = 3 ranks, for one bucket. Rank r updates the
r-th third of every bucket:

                               rank 0           rank 1           rank 2
    stage 1   parameters       [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]
              gradients        [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]
              optimizer state  [ 0 ]                [ 1 ]                [ 2 ]

    stage 2   parameters       [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]    [ 0 | 1 | 2 ]
              gradients        [ 0 ]                [ 1 ]                [ 2 ]
              optimizer state  [ 0 ]                [ 1 ]                [ 2 ]

    one step  reduce-scatter of gradients --> update of third r --> all-gather of parameters

In stage 2 gradients in full size exist for a few buckets at a time (`ShardedGradients`). In half
precision the picture has the rounded parameters, with which layers compute. The float32 parameters
are then sharded like the optimizer state.

Stage 3 (as FSDP) shards the parameters as well, and gathers each unit before its use. Consecutive
units alternate between two full-size slots:

    parameters        [ r ] of each unit: one s-th, float32
    gradients         [ r ] of each unit, summed over ranks and micro-batches
    optimizer state   [ r ] of each unit
    slot 0            [ 0 | ... | s - 1 ] of one even unit, whole
    slot 1            [ 0 | ... | s - 1 ] of one odd unit, whole

    forward, time -->
    compute      |          | unit 0   | unit 1   | unit 2   | unit 3   |
    slot 0       | gather 0 | unit 0   | gather 2 | unit 2   | gather 4 |
    slot 1       |          | gather 1 | unit 1   | gather 3 | unit 3   |

Backward runs in the opposite direction. Its full-size gradients have two more slots.

source  Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models, SC'20
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.engine.compose import Chain
from mpitrain.collectives.engine.executor import ProgressEngine, Reduction, mover
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.layers.base import Gradient, Gradients, Weights
from mpitrain.layers.flat import Bucket, Storage, shard
from mpitrain.parallel.buckets import (
    Buckets,
    buckets_used,
    common_buckets,
    kept_apart,
    slots_of,
    tied_sums,
    users,
)
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.replication.protocol import (
    GradientReducer,
    ParameterStore,
    Replication,
    ReplicationContext,
    StateBuffer,
    compact,
    spread,
)
from mpitrain.parallel.replication.step_end import AgreeAndUpdate
from mpitrain.parallel.replication.whole import FrozenParameters, ReplicaRows, whole
from mpitrain.regions import Piece
from mpitrain.transport.base import Transport


class UnshardedBuffers:
    """Full-size buffers, called slots, for sharded buckets (as FSDP's unsharded flat parameter).

    A bucket always uses the same slot, so its bound collectives stay valid. With one model chunk,
    consecutive buckets alternate between two slots. With several model chunks, one chunk is in the
    slots at a time: the n-th buckets of all chunks share the n-th slot. Buckets that differ in
    `holders`, `partial` or `frozen` never share a slot, since one unit may need both. Each bucket
    of `alone` has a slot of its own.

    slot     {bucket: number of its slot}
    views    {bucket: view of its elements in the slot}
    tensors  {full name: view of the tensor in its bucket's slot}
    flat     one array with all slots
    """

    def __init__(
        self,
        storage: Storage,
        buckets: Collection[Bucket],
        alone: Collection[Bucket],
        transport: Transport,
        chunks: Sequence[range] = (),
        dtype: Any = None,
    ):
        """Allocate the slots; collective, since shared-memory transports allocate them in windows.

        alone   buckets that get a slot of their own
        chunks  as in `ReplicationContext`; no bucket has units of two chunks
        dtype   dtype of the slots; None: the dtype of the storage
        """
        self.slot, lengths = slots_of(buckets, alone, chunks)
        self.flat = flat = transport.allocate(sum(lengths), dtype or storage.dtype)
        self.views = {}
        self.tensors: dict[str, Any] = {}
        for bucket, slot in self.slot.items():
            start = sum(lengths[:slot])
            self.views[bucket] = view = flat[start : start + bucket.stop - bucket.start]
            for entry in storage.within(bucket):
                in_bucket = entry._replace(start=entry.start - bucket.start)
                self.tensors[entry.name] = in_bucket.view(view)

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


class Shards:
    """This rank's shard of every bucket.

    A sharding group has s of the n replicas. With replication.shard "all", s is n. With "host", s
    is the number of replicas on a host (as FSDP's hybrid sharding), and parameters never travel
    between hosts. After the reduce-scatters on each host, the h = n/s replicas with the same shard
    all-reduce the shard's gradient, once a step.

    dividing  the sharding group, s replicas
    alike     the replication group, the h replicas with the same shard
    buckets   in the order of their reduction
    pieces    {bucket: this rank's shard}, in order of storage
    owned     the shards of `pieces`, in the same order
    length    elements of all shards
    source    Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel,
              VLDB 16(12)
    """

    def __init__(self, replica: ReplicationContext, buckets: Sequence[Bucket]):
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
    """Return {bucket: the view of this rank's shard}, from full-size views of the buckets."""
    return {
        bucket: views[bucket][piece.start - bucket.start : piece.stop - bucket.start]
        for bucket, piece in pieces.items()
    }


class ShardedGradients(GradientReducer):
    """Reduce-scattered gradients in a few full-size buffers (as FSDP's post-backward hook).

    Each micro-batch reduce-scatters each bucket, and adds this rank's shard of the sum to `buffer`.
    The last micro-batch also sums the shard over the replication group. With several model chunks a
    bucket is reduce-scattered once a step, because all micro-batches finish the backward of one
    chunk before that of the next chunk begins.

    A bucket with a tied tensor has a full-size buffer of its own, and is reduced when all units
    that use the tensor are ready. If each rank of a tied group has a summand of a gradient, the
    group sums its shards of `buffer` at the end of the step.

    buffer  this rank's shards of the summed gradient, concatenated
    engine  the progress engine of these reductions and of the constructor's `others`
    """

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
        self.members: Sequence[int] = replica.grid.copies.transport.members
        self.shards = shards
        self.buffer = replica.device.backend.zeros(shards.length, storage.dtype)
        self.slots = slots = UnshardedBuffers(
            storage,
            buckets,
            kept_apart(storage, buckets),
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
            replica.grid.copies.transport,
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
        """Return the leaves into which a unit writes its gradients, after waiting for their slots.

        If another unit has written a tied tensor's leaf in this micro-batch, this unit adds to it.
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
        """Wait for the running reduction in a slot, if any, and add its result to `buffer`."""
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
    """Return the views of a bucket's padding, which other buckets in the same slot overwrite."""
    gaps, end = [], bucket.start
    for start, stop in [
        *((entry.start, entry.stop) for entry in storage.within(bucket)),
        (bucket.stop, bucket.stop),
    ]:
        if end < start:
            gaps.append(view[end - bucket.start : start - bucket.start])
        end = stop
    return gaps


class GatheredOnUse(ParameterStore):
    """Parameters of ZeRO stage 3: each unit is gathered while the previous unit computes, in
    forward and in backward.

    A unit stays in its slot until another unit needs the slot, or until the unit is updated. So
    backward does not gather the last two units again, nor the next micro-batch the first two.
    Units with a tied tensor, and units of at most replication.zero_keep elements, have a slot of
    their own and are gathered once a step. Frozen tensors have other slots than the trained tensors
    of their unit, and stay valid after an update.

    With several model chunks the slots contain one whole chunk, while all micro-batches pass
    through it. The other units of a chunk are gathered while its first unit computes. A rank with v
    chunks gathers 2 v - 1 chunks a step, since the last chunk stays for its backward.

    With replication.gather units travel in a wire format. All ranks compute with the decoded
    values, also the owner of a shard. The owner updates its exact float32 shard, so rounding errors
    do not accumulate.

    bytes sent  with m micro-batches at most 2 * m all-gathers of the parameters by s ranks; with
                several model chunks at most 2, and 1 of this rank's last chunk
    memory      1/s of the parameters up to padding, two units or one chunk in full size, and all
                units with a slot of their own
    gathers     the bound all-gathers; `engine` drives them
    """

    mirror: Any = None  # `_gather` rounds the parameters of each unit
    is_sharded = True
    engine: ProgressEngine

    def __init__(self, replica: ReplicationContext, shards: Shards):
        config, storage, dividing = replica.config.replication, replica.storage, shards.dividing
        self._replica = replica
        self.parameters = shards.parameters(replica)
        frozen = sorted(storage.frozen_buckets())
        pieces = shard(frozen, dividing.rank, dividing.size)
        self.frozen = FrozenParameters(replica, pieces)
        buckets = [*shards.pieces, *frozen]
        self.slots = UnshardedBuffers(
            storage,
            buckets,
            kept_apart(storage, buckets, config.zero_keep),
            dividing.transport,
            replica.chunks,
            replica.computed,
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

        With one model chunk this is the next unit, with several chunks all units of this unit's
        chunk.
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

        The order of units continues as in the last two calls. It turns back at the last unit, and
        at the first unit that has a backward.
        """
        last, first = len(self._needed) - 1, self._replica.first
        is_forward = unit > self._opened or unit == 0
        if is_forward and unit < last:
            return unit + 1
        return unit - 1 if unit > first else 0

    def _gather(self, bucket: Bucket) -> None:
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


class GatheredAfterUpdate(ParameterStore):
    """Parameters of ZeRO stages 1 and 2: whole on each rank, all-gathered after each update.

    The all-gather overlaps with the next forward: `open` waits for the buckets of its unit. In half
    precision the float32 parameters are sharded, and the all-gather sends their mirror.

    bytes sent  an all-gather by s ranks a step
    """

    mirror: Any = None

    def __init__(self, replica: ReplicationContext, shards: Shards):
        device, storage, owned = replica.device, replica.storage, shards.owned
        config = replica.config
        self._replica = replica
        # Each rank initialises all that layers compute with, which saves an all-gather.
        self.parameters = computed = replica.grid.world.transport.allocate(
            storage.length, replica.computed
        )
        storage.initialize(computed, config.run.seed, device.backend)
        self._pieces, views = whole(storage), spread(computed, owned)
        self._updates: list[tuple[Piece, Any, Any]] = [
            (piece, view, None) for piece, view in zip(owned, views, strict=True)
        ]
        if device.mirror:
            if not device.half:
                device.mirror(computed, computed, replica.arena)
            self.mirror, self.parameters = computed, shards.parameters(replica)
            self._pieces = owned
            masters = compact(self.parameters, owned)
            self._updates = [*zip(owned, masters, views, strict=True)]
        self.owned = {piece: parameters for piece, parameters, _ in self._updates}
        self.sharing = [shards.dividing]
        self.frozen = FrozenParameters(replica)
        self.arrays = [self.parameters, computed, self.frozen.flat]
        self._weights = storage.weights(computed, self.frozen.flat)
        self._gathers = [
            shards.dividing.bind_all_gather(computed[b.start : b.stop]) for b in shards.pieces
        ]
        self._needed = [
            [
                gather
                for gather, bucket in zip(self._gathers, shards.pieces, strict=True)
                if unit in bucket.units
            ]
            for unit in range(len(storage.units))
        ]
        self._open: list[Reduction] = []
        self._engine = mover(shards.dividing.transport, self._gathers)

    def open(self, unit: int, micro: int) -> Weights:
        if self._open:
            with self._replica.exposed:
                for gather in self._needed[unit]:
                    self._finish(gather)
        return self._weights[unit]

    def _start(self, gather: Reduction) -> None:
        self._open.append(gather)
        self._engine.start(gather)

    def _finish(self, gather: Reduction) -> None:
        if gather in self._open:
            self._engine.wait(gather)
            self._open.remove(gather)

    def update(self, apply: Callable[[Piece, Any, Any], None]) -> None:
        for (piece, parameters, mirror), gather in zip(self._updates, self._gathers, strict=True):
            apply(piece, parameters, mirror)
            self._start(gather)
        if not self._replica.config.replication.overlap:
            with self._replica.exposed:
                self.sync()

    def poll(self) -> None:
        if self._open:
            self._engine.poll()

    def sync(self) -> None:
        for gather in [*self._open]:
            self._finish(gather)

    def loaded(self) -> None:
        if self._replica.device.mirror:
            for (_, parameters, mirror), gather in zip(self._updates, self._gathers, strict=True):
                self._replica.device.mirror(parameters, mirror, self._replica.arena)
                self._start(gather)

    def state(self) -> list[StateBuffer]:
        self.sync()
        return [StateBuffer("parameters", self.parameters, self._pieces), *self.frozen.state()]


def scattered_once(replica: ReplicationContext, shards: Shards) -> Buckets:
    """Return the reductions of stage 1: each bucket is reduce-scattered once a step.

    A reduction in a lossy wire format is an all-reduce, so each rank receives all sums.

    bytes sent  a reduce-scatter over the s ranks of the sharding group, and an all-reduce of 1/s of
                the gradient over the replication group. If all n replicas shard, the reduce-scatter
                and the all-gather of parameters together send as much as one all-reduce
    """

    def bind(gradients: np.ndarray) -> Reduction:
        start, stop = chunk_bounds(gradients.size, shards.dividing.size)[shards.dividing.rank]
        scatter = shards.dividing.bind_reduce_scatter(gradients)
        return Chain(
            replica.grid.copies.transport, (scatter, shards.alike.bind(gradients[start:stop]))
        )

    return Buckets(
        replica,
        shards.buckets,
        replica.grid.copies.bind if replica.wire.name != "none" else bind,
        shards.owned,
        shards.counted(replica.grid),
    )


def zero_1(replica: ReplicationContext) -> Replication:
    """Return stage 1 of ZeRO; collective."""
    shards = Shards(replica, common_buckets(replica))
    store = GatheredAfterUpdate(replica, shards)
    step_end = AgreeAndUpdate(replica, store, scattered_once(replica, shards))
    return Replication(replica, step_end, ReplicaRows(replica))


def zero_2(replica: ReplicationContext) -> Replication:
    """Return stage 2 of ZeRO; collective.

    bytes sent  with m micro-batches m reduce-scatters by s ranks, and an all-reduce of 1/s of the
                gradient by h ranks; with several model chunks one reduce-scatter
    memory      1/s of the gradients up to padding, two buckets in full size, and each bucket with a
                tied tensor; with several model chunks one chunk instead of the two buckets
    """
    shards = Shards(replica, common_buckets(replica, [chunk.start for chunk in replica.chunks]))
    store = GatheredAfterUpdate(replica, shards)
    step_end = AgreeAndUpdate(replica, store, ShardedGradients(replica, shards))
    return Replication(replica, step_end, ReplicaRows(replica))


def zero_3(
    replica: ReplicationContext, store_of: type[GatheredOnUse] = GatheredOnUse
) -> Replication:
    """Return stage 3 of ZeRO, whose buckets are units; collective.

    One progress engine drives the gathers of parameters and the reductions of stage 2.
    """
    shards = Shards(replica, replica.storage.buckets(0))
    store = store_of(replica, shards)
    reducer = ShardedGradients(replica, shards, store.gathers)
    store.engine = reducer.engine
    return Replication(replica, AgreeAndUpdate(replica, store, reducer), ReplicaRows(replica))
