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

In stage 2 gradients in full size exist for a few buckets at a time (`Zero2`). In half
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

from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.engine.compose import Chain
from mpitrain.collectives.engine.executor import Reduction, mover
from mpitrain.collectives.group import Group
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.layers.base import Gradient, Gradients, Weights
from mpitrain.layers.flat import Bucket, Storage, shard
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.parallel.buckets import Buckets, buckets_used, kept_apart, slots_of, tied_sums, users
from mpitrain.parallel.grid import EXPERTS, Grid
from mpitrain.parallel.replica import Replica, Sizes, compact, spread, whole
from mpitrain.regions import Piece, share
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
        chunks  as in `Replica`; no bucket has units of two chunks
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

    def bind(self, bind: Callable[[Bucket, Any], Reduction]) -> dict[Bucket, Reduction]:
        """Bind a reduction for each bucket; collective.    bind: (bucket, view) -> its reduction

        Buckets of equal length in one slot share a reduction and its scratch.
        """
        bound: dict[tuple[int, int], Reduction] = {}
        for bucket, view in self.views.items():
            key = self.slot[bucket], view.size
            if key not in bound:
                bound[key] = bind(bucket, view)
        return {bucket: bound[self.slot[bucket], view.size] for bucket, view in self.views.items()}


class Shards:
    """This rank's shard of every bucket.

    A sharding group has s of the n replicas. With replication.shard "all", s is n. With "host", s
    is the number of replicas on a host (as FSDP's hybrid sharding), and parameters never travel
    between hosts. After the reduce-scatters on each host, the h = n/s replicas with the same shard
    all-reduce the shard's gradient, once a step.

    dividing  the sharding group, s replicas
    groups    {`Parameter.holders`: (the sharding group, the replication group of the h replicas with
              the same shard)}; those of experts have fewer ranks
    buckets   in the order of their reduction
    pieces    {bucket: this rank's shard}, in order of storage
    owned     the shards of `pieces`, in the same order
    length    elements of all shards
    source    Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel,
              VLDB 16(12)
    """

    def __init__(self, grid: Grid, how: str, buckets: Sequence[Bucket]):
        """Make the groups; collective.    how: as replication.shard"""
        usual = grid.shard_groups(how)
        own = grid.shard_groups(how, EXPERTS) if grid.ep else usual
        self.groups = {EXPERTS: own, "": usual}
        self.dividing = usual[0]
        self.buckets = buckets
        self.owned = self.of(buckets)
        self.pieces = dict(zip(sorted(buckets), self.owned, strict=True))
        self.length = sum(piece.stop - piece.start for piece in self.owned)

    def of(self, buckets: Sequence[Bucket]) -> list[Piece]:
        """Return this rank's shards of buckets, in order of storage."""
        pieces, offset = [], 0
        for bucket in sorted(buckets):
            dividing = self.groups_of(bucket)[0]
            (piece,) = shard([bucket], dividing.rank, dividing.size)
            pieces.append(piece._replace(offset=offset))
            offset += piece.stop - piece.start
        return pieces

    def groups_of(self, bucket: Bucket) -> tuple[Group, Group]:
        return self.groups[EXPERTS if bucket.holders == EXPERTS else ""]

    def gather(self, bucket: Bucket, whole: Any) -> Reduction:
        """Bind the all-gather of a bucket, from the shards of all ranks that divide it."""
        return self.groups_of(bucket)[0].bind_all_gather(whole)

    def scatter(self, bucket: Bucket, whole: Any) -> Reduction:
        """Bind the reduce-scatter of a bucket."""
        return self.groups_of(bucket)[0].bind_reduce_scatter(whole)

    def counted(self, grid: Grid) -> list[Piece]:
        """Return the pieces that this rank squares for the norm.

        The replication group divides the squaring of its shards evenly.
        """
        squared = []
        for bucket, (start, stop, offset) in self.pieces.items():
            if grid.counts(bucket.holders):
                alike = self.groups_of(bucket)[1]
                run = share(stop - start, alike.rank, alike.size)
                squared.append(Piece(start + run.start, start + run.stop, offset + run.start))
        return squared


def within(pieces: Mapping[Bucket, Piece], views: Mapping[Bucket, Any]) -> dict[Bucket, Any]:
    """Return {bucket: the view of this rank's shard}, from full-size views of the buckets."""
    return {
        bucket: views[bucket][piece.start - bucket.start : piece.stop - bucket.start]
        for bucket, piece in pieces.items()
    }


class Zero1(Replica):
    """Stage 1: each rank updates its shard of each bucket; parameters are all-gathered after that.

    The all-gather overlaps with the next forward: `open` waits for the buckets of its unit. In half
    precision the float32 parameters are sharded, and the all-gather sends their mirror.

    Each bucket is reduce-scattered once a step. A reduction in a lossy wire format is an all-reduce,
    so each rank receives all sums.

    bytes sent  a reduce-scatter over the s ranks of the sharding group, and an all-reduce of 1/s of
                the gradient over the replication group; an all-gather by s ranks. If all n replicas
                shard, the reduce-scatter and the all-gather together send as much as one all-reduce
    """

    help = "the optimizer state"

    @staticmethod
    def memory(sizes: Sizes) -> float:
        # In half precision the float32 parameters are sharded from stage 1 on.
        of = sizes
        return (
            (of.master / (of.shards if of.mirror else 1) + of.master + of.mirror)
            + of.state / of.shards
        ) * of.length + of.fixed

    @classmethod
    def kept(cls, sizes: Sizes) -> float:
        """In half precision, and in stage 3, ranks shard the parameters."""
        shards = sizes.shards if sizes.mirror or cls.is_sharded else 1
        return super().kept(sizes) - sizes.master * sizes.length * (1 - 1 / shards)

    _open: list[Reduction]

    def pieces(self) -> Sequence[Piece]:
        return self.shards.owned

    def counted(self) -> Sequence[Piece]:
        return self.shards.counted(self.grid)

    def bind(self, bucket: Bucket, gradients: Any) -> Reduction:
        if self.wire.name != "none":
            return super().bind(bucket, gradients)
        dividing, alike = self.shards.groups_of(bucket)
        start, stop = chunk_bounds(gradients.size, dividing.size)[dividing.rank]
        scatter = dividing.bind_reduce_scatter(gradients)
        return Chain((scatter, alike.bind(gradients[start:stop])))

    def divide(self) -> None:
        """Divide all buckets among the ranks of the sharding group; collective."""
        self.shards = Shards(self.grid, self.settings.shard, self.cuts)
        self.sharing = [self.shards.dividing]
        self._open = []

    def make_parameters(self) -> None:
        self.divide()
        device, storage, shards = self.device, self.storage, self.shards
        self.parameters = self.used = used = self.grid.world.transport.allocate(
            storage.length, self.computed
        )
        views = spread(used, shards.owned)
        self.owned, self.mirrors = dict(zip(shards.owned, views, strict=True)), {}
        if device.mirror:
            self.mirror, self.mirrors = used, self.owned
            self.make_shards()
        self.make_frozen(whole(storage.frozen))
        self.parameter_arrays = [self.parameters, used, self.frozen]
        self._weights = storage.weights(used, self.frozen)
        gathers = [shards.gather(b, used[b.start : b.stop]) for b in shards.pieces]
        self._gathers: dict[Any, Reduction] = dict(zip(shards.owned, gathers, strict=True))
        self._needed: list[list[Any]] = [
            [
                gather
                for gather, bucket in zip(gathers, shards.pieces, strict=True)
                if unit in bucket.units
            ]
            for unit in range(len(storage.units))
        ]
        self._gathering = mover(shards.dividing.transport, gathers)

    def make_shards(self) -> None:
        """Allocate the parameters of this rank's shards, concatenated."""
        owned, zeros = self.shards.owned, self.device.backend.zeros
        self.parameters = zeros(self.shards.length, self.storage.dtype)
        self.owned = dict(zip(owned, compact(self.parameters, owned), strict=True))

    def open(self, unit: int, micro: int) -> Weights:
        if self._open:
            with self.exposed:
                for gather in self._needed[unit]:
                    self._finish(gather)
        return self._weights[unit]

    def _start(self, gather: Reduction) -> None:
        self._open.append(gather)
        self._gathering.start(gather)

    def _finish(self, gather: Reduction) -> None:
        if gather in self._open:
            self._gathering.wait(gather)
            self._open.remove(gather)

    def apply(self, scale: float, lr: float, step: int) -> None:
        """Update this rank's shards, and start the all-gather of each."""
        self.optimizer.update(
            scale,
            lr,
            step,
            self.buckets.delayed,
            updated=lambda piece: self._start(self._gathers[piece]),
        )
        if not self.settings.overlap:
            with self.exposed:
                self.sync()

    def poll(self) -> None:
        super().poll()
        if self._open:
            self._gathering.poll()

    def wait(self) -> None:
        self.sync()
        super().wait()

    def sync(self) -> None:
        for gather in [*self._open]:
            self._finish(gather)

    def loaded(self) -> None:
        if self.device.mirror:
            for piece, parameters in self.owned.items():
                self.device.mirror(parameters, self.mirrors[piece], self.arena)
                self._start(self._gathers[piece])

    def parameter_state(self) -> list[StateBuffer]:
        self.sync()
        pieces = self.shards.owned if self.device.mirror else whole(self.storage)
        return [StateBuffer("parameters", self.parameters, pieces), *self.frozen_state]


class Zero2(Zero1):
    """Stage 2: gradients are reduce-scattered in a few full-size buffers (as FSDP's post-backward
    hook).

    Each micro-batch reduce-scatters each bucket, and adds this rank's shard of the sum to
    `gradient_buffer`. The last micro-batch also sums the shard over the replication group. With
    several model chunks a bucket is reduce-scattered once a step, because all micro-batches finish
    the backward of one chunk before that of the next chunk begins.

    A bucket with a tied tensor has a full-size buffer of its own, and is reduced when all units
    that use the tensor are ready. If each rank of a tied group has a summand of a gradient, the
    group sums its shards of `gradient_buffer` at the end of the step.

    gradient_buffer  this rank's shards of the summed gradient, concatenated
    bytes sent       with m micro-batches m reduce-scatters by s ranks, and an all-reduce of 1/s of
                     the gradient by h ranks; with several model chunks one reduce-scatter
    memory           1/s of the gradients up to padding, two buckets in full size, and each bucket
                     with a tied tensor; with several model chunks one chunk instead of the two
                     buckets
    """

    help = "also gradients"

    @staticmethod
    def memory(sizes: Sizes) -> float:
        of = sizes
        return (
            (
                (of.master / (of.shards if of.mirror else 1) + of.mirror)
                + (of.master + of.state) / of.shards
            )
            * of.length
            + of.master * of.largest
            + of.fixed
        )

    def cut(self, firsts: Sequence[int] = ()) -> Sequence[Bucket]:
        return super().cut([chunk.start for chunk in self.chunks])

    def make_gradients(self) -> None:
        shards, storage, copies = self.shards, self.storage, self.grid.copies
        pieces = shards.pieces
        self._is_once = bool(self.chunks)
        self.members = copies.transport.members
        self.gradient_buffer = self.device.backend.zeros(shards.length, storage.dtype)
        self.gradient_slots = slots = UnshardedBuffers(
            storage,
            list(pieces),
            kept_apart(storage, list(pieces)),
            shards.dividing.transport,
            self.chunks,
        )
        self.gradient_arrays = [self.gradient_buffer, slots.flat]
        owned = compact(self.gradient_buffer, shards.owned)
        self.summed = dict(zip(shards.owned, owned, strict=True))
        self.squared = compact(self.gradient_buffer, shards.counted(self.grid))
        self._tied = tied_sums(
            self.grid,
            self.gradient_buffer,
            [
                b._replace(start=p.offset, stop=p.offset + p.stop - p.start)
                for b, p in pieces.items()
            ],
        )
        self._used = buckets_used(storage, list(pieces))
        self._writers = users(storage, list(pieces))
        leaves = {name: Gradient(tensor) for name, tensor in slots.tensors.items()}
        self._gradients = storage.nested(leaves)
        self._leaves = []  # `gradients` marks those of a bucket as empty
        self._in_bucket = {
            bucket: [leaves[entry.name] for entry in storage.within(bucket)] for bucket in pieces
        }
        self._padding = {b: _padding(storage, b, view) for b, view in slots.views.items()}
        self._own_views = within(pieces, slots.views)
        self._sums = {bucket: self.summed[piece] for bucket, piece in pieces.items()}
        self._add = shards.dividing.arithmetic.combining(self.gradient_buffer, "add")
        self._reductions = slots.bind(shards.scatter)
        self._totals = {
            bucket: shards.groups_of(bucket)[1].bind(part) for bucket, part in self._sums.items()
        }
        self.engine = mover(
            copies.transport,
            [*self._reductions.values(), *self._totals.values(), *self.gathers_in_backward()],
        )
        self.buckets = Buckets(copies, self.gradient_buffer, (), ())  # none is whole
        # The key is the index of a full-size buffer. The flag says whether this is the step's last
        # micro-batch.
        self._under_way: dict[int, tuple[Bucket, bool]] = {}
        self._totalled: list[Reduction] = []
        self._summed: set[Bucket] = set()
        self._missing: dict[Bucket, set[int]] = {}

    def gathers_in_backward(self) -> Sequence[Reduction]:
        """Return the all-gathers that the progress engine of the gradients drives, too."""
        return ()

    def prepare(self) -> None:
        super().prepare()
        self._summed, self._missing = set(), {}

    def gradients(self, unit: int) -> Gradients:
        """Return the leaves into which a unit writes its gradients, after waiting for their slots.

        If another unit has written a tied tensor's leaf in this micro-batch, this unit adds to it.
        """
        with self.exposed:
            for bucket in self._used[unit]:
                if bucket not in self._missing:
                    self._end(self.gradient_slots.slot[bucket])
                    self._missing[bucket] = set(self._writers[bucket])
                    for leaf in self._in_bucket[bucket]:
                        leaf.filled = False
                    for gap in self._padding[bucket]:
                        gap.fill(0)
        return self._gradients[unit]

    def ready(self, unit: int, is_last: bool) -> None:
        for bucket in self._used[unit] if is_last or not self._is_once else ():
            self._missing[bucket].remove(unit)
            if not self._missing[bucket]:
                del self._missing[bucket]
                for leaf in self._in_bucket[bucket]:
                    if not leaf.filled:
                        leaf.array.fill(0)
                self.engine.start(self._reductions[bucket])
                self._under_way[self.gradient_slots.slot[bucket]] = bucket, is_last
        if not self.settings.overlap:
            with self.exposed:
                self._end_all()

    def _end(self, slot: int) -> None:
        """Wait for the running reduction in a slot, if any, and add its result to the gradient."""
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
        if self._open:
            self._gathering.poll()
        self.engine.poll()

    def _end_all(self) -> None:
        for slot in [*self._under_way]:
            self._end(slot)
        while self._totalled:
            self.engine.wait(self._totalled.pop(0))

    def wait(self) -> None:
        self.sync()
        self._end_all()
        for reduction in self._tied:
            reduction.run()


class Zero3(Zero2):
    """Stage 3: parameters are sharded, too; each unit is gathered while the previous unit computes,
    in forward and in backward. Buckets are units.

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
    engine      drives the all-gathers of parameters and the reductions of gradients
    """

    help = "also parameters"
    is_sharded = True

    @staticmethod
    def memory(sizes: Sizes) -> float:
        of = sizes
        return (
            (2 * of.master + of.state) / of.shards * of.length
            + (of.master + of.computed) * of.largest
            + of.fixed / of.shards
            + of.computed * of.slot
        )

    def cut(self, firsts: Sequence[int] = ()) -> Sequence[Bucket]:
        return self.storage.buckets(0)

    def make_parameters(self) -> None:
        self.divide()
        storage, shards, dividing = self.storage, self.shards, self.shards.dividing
        self.make_shards()
        self.mirrors = {}  # `_gather` rounds the parameters of each unit
        frozen = sorted(storage.frozen_buckets())
        pieces = shards.of(frozen)
        self.make_frozen(pieces)
        buckets = [*shards.pieces, *frozen]
        self.parameter_slots = UnshardedBuffers(
            storage,
            buckets,
            kept_apart(storage, buckets, self.settings.zero_keep),
            dividing.transport,
            self.chunks,
            self.computed,
        )
        self.parameter_arrays = [self.parameters, self.frozen, self.parameter_slots.flat]
        self._weights = storage.nested(self.parameter_slots.tensors)
        self._needed = buckets_used(storage, buckets)
        wire = parse_wire(self.settings.gather)
        self._gathers = self.parameter_slots.bind(
            shards.gather
            if wire.name == "none"
            else lambda bucket, unit: shards.groups_of(bucket)[0].bind_coded_all_gather(unit, wire)
        )
        held = [*self.owned.values(), *compact(self.frozen, pieces)]
        self._master = dict(zip(buckets, held, strict=True))
        self._in_slot = within(
            shards.pieces | dict(zip(frozen, pieces, strict=True)), self.parameter_slots.views
        )
        # The key is the slot. `_there` has the bucket that it contains or will contain.
        self._there: dict[int, Bucket] = {}
        self._arriving: list[Bucket] = []
        self._opened = 0
        # {whether the pass is forward: for each unit, the buckets to gather while it computes}
        self._ahead = {
            is_forward: [
                self._buckets_ahead(unit, is_forward) if self.settings.overlap else []
                for unit in range(len(storage.units))
            ]
            for is_forward in (True, False)
        }

    def gathers_in_backward(self) -> Sequence[Reduction]:
        return list(self._gathers.values())

    def open(self, unit: int, micro: int) -> Weights:
        with self.exposed:
            for bucket in self._needed[unit]:
                self._gather(bucket)
            for bucket in self._needed[unit]:
                self._arrived(bucket)
        is_forward = unit > self._opened or unit == 0
        for bucket in self._ahead[is_forward][unit]:
            self._gather(bucket)
        self._opened = unit
        return self._weights[unit]

    def _buckets_ahead(self, unit: int, is_forward: bool) -> list[Bucket]:
        """Return the buckets to gather while this unit computes; not those in its own slots."""
        slot = self.parameter_slots.slot
        in_use = {slot[bucket] for bucket in self._needed[unit]}
        return [
            bucket
            for following in self._following(unit, is_forward)
            for bucket in self._needed[following]
            if slot[bucket] not in in_use
        ]

    def _following(self, unit: int, is_forward: bool) -> Sequence[int]:
        """Return the units to gather while this unit computes.

        With several chunks these are all units of its chunk, and with one the next unit. The order
        turns back at the last unit, and at the first unit that has a backward.
        """
        first, last = self.first, len(self._needed) - 1
        for chunk in self.chunks:
            if unit in chunk:
                return chunk if unit == chunk.start else chunk[max(0, first - chunk.start) :][::-1]
        if is_forward and unit < last:
            return [unit + 1]
        return [unit - 1 if unit > first else 0]

    def _gather(self, bucket: Bucket) -> None:
        slot = self.parameter_slots.slot[bucket]
        if self._there.get(slot) == bucket:
            return
        if slot in self._there:
            self._arrived(self._there[slot])
        self._there[slot] = bucket
        master, in_slot = self._master[bucket], self._in_slot[bucket]
        if self.device.mirror and not bucket.frozen:
            self.device.mirror(master, in_slot, self.arena)
        else:
            in_slot[...] = master
        self.engine.start(self._gathers[bucket])
        self._arriving.append(bucket)

    def _arrived(self, bucket: Bucket) -> None:
        """Wait until a bucket has been gathered, if its gather has started."""
        if bucket in self._arriving:
            self.engine.wait(self._gathers[bucket])
            self._arriving.remove(bucket)

    def apply(self, scale: float, lr: float, step: int) -> None:
        """Update this rank's shards; the next step gathers them."""
        self.optimizer.update(scale, lr, step, self.buckets.delayed)
        self._there = {slot: bucket for slot, bucket in self._there.items() if bucket.frozen}

    def sync(self) -> None:
        for bucket in [*self._arriving]:
            self._arrived(bucket)

    def loaded(self) -> None:
        """Do nothing: `parameter_state` has emptied the slots."""

    def parameter_state(self) -> list[StateBuffer]:
        self._there.clear()  # a checkpoint may be loaded into this rank's shards
        self.sync()
        own = StateBuffer("parameters", self.parameters, list(self.owned))
        return [own, *self.frozen_state]


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
