"""The bucketed reduction of a flat gradient buffer, exact or in a lossy wire format.

A bucket is a run of whole units (as in DDP). Buckets are filled from the last unit to the first, in
the order of backward. A bucket's all-reduce starts when all its units have their gradients. It
overlaps with the backward of earlier units:

    flat buffer            | unit 0 | unit 1 |   unit 2    | unit 3 | unit 4 |
    buckets                |    bucket 2     |  bucket 1   |    bucket 0     |

    backward, time -->     | unit 4 | unit 3 |   unit 2    | unit 1 | unit 0 |
    all-reduce, bucket 0                     |=======|
    all-reduce, bucket 1                                   |=====|
    all-reduce, bucket 2                                                     |=======|
                                                                             ^ wait

Gradients of earlier micro-batches are added to the buffer; the last micro-batch starts the
reductions. A bucket with a tied tensor also waits for the other units that use this tensor.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, groupby
from typing import Any

import numpy as np

from mpitrain.collectives.engine.executor import Reduction, mover
from mpitrain.collectives.selection.cost_model import part_bytes
from mpitrain.layers.flat import Bucket, Storage
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext, StateBuffer
from mpitrain.parallel.replication.step_end import AgreeAndUpdate
from mpitrain.parallel.replication.whole import LocalGradients, ReplicaRows, WholeParameters, whole
from mpitrain.regions import Piece
from mpitrain.transport.device import DeviceTransport

SUMMED = -1
"""An entry of `Buckets._missing` in place of a unit: the sum over a tied group has not run yet."""

TURNS = 2
"""Number of buffers that consecutive buckets share in turns (double buffering): layers compute with
one bucket while the next one is communicated.
"""

WITHIN_A_HOST = 4e6
"""Bytes of a bucket if all ranks share a host. Its reduction is short compared to the backward of
its units.
"""

ON_GPUS = 25e6
"""Bytes of a bucket in GPU memory if all ranks share a host, as in DDP. A reduction there takes few
calls for many bytes, and each call costs a latency.
"""


def bucket_bytes(
    bucket_mb: float, hosts: Sequence[str], is_on_device: bool, best: Callable[[], float]
) -> float:
    """Return the bytes of a bucket.

    bucket_mb  as configured; 0: chosen here
    hosts      of the ranks that reduce
    best       () -> the best size between hosts, as `part_bytes`
    """
    if bucket_mb:
        return 1e6 * bucket_mb
    if len(set(hosts)) == 1:
        return ON_GPUS if is_on_device else WITHIN_A_HOST
    return best()


def common_buckets(replica: ReplicationContext, firsts: Sequence[int] = ()) -> list[Bucket]:
    """Return the buckets of the flat buffer, in the order of their reduction; collective.

    The ranks of a tensor-parallel group agree on the bytes of a bucket. So a tensor that all of
    them store is in the same bucket on each, and all sum it in the same order.

    firsts  units at which a bucket must start
    """
    group, storage = replica.grid.copies, replica.storage
    ends, length, itemsize = group.transport, storage.length, storage.dtype.itemsize
    nbytes = bucket_bytes(
        replica.config.replication.bucket_mb,
        ends.hosts,
        isinstance(ends, DeviceTransport),
        lambda: part_bytes(group.tuning, group.algorithm, ends.hosts, length, itemsize),
    )
    return storage.buckets(max(replica.grid.tp.transport.gather_text(nbytes)), firsts)


def buckets_used(storage: Storage, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Return, for each unit, the buckets with tensors that the unit uses, in order of storage.

    Several units may use a tied tensor.
    """
    names = {bucket: {entry.name for entry in storage.within(bucket)} for bucket in sorted(buckets)}
    used = [{entry.name for entry in storage.used(unit)} for unit in range(len(storage.units))]
    return [[bucket for bucket, stored in names.items() if stored & tensors] for tensors in used]


def users(storage: Storage, buckets: Sequence[Bucket]) -> dict[Bucket, set[int]]:
    """Return, for each bucket, the units that compute with its tensors.

    They include units of other buckets that use a tied tensor of this bucket.
    """
    used = buckets_used(storage, buckets)
    return {
        bucket: {unit for unit, of_unit in enumerate(used) if bucket in of_unit}
        for bucket in buckets
    }


def kept_apart(storage: Storage, buckets: Sequence[Bucket], most: int = -1) -> list[Bucket]:
    """Return the buckets with a slot of their own: those with tensors that units of other buckets use
    as well, and those of at most `most` elements.
    """
    shared = [
        bucket for bucket, units in users(storage, buckets).items() if units - {*bucket.units}
    ]
    return [
        bucket
        for bucket in buckets
        if bucket in shared or sum(e.stop - e.start for e in storage.within(bucket)) <= most
    ]


def slots_of(
    buckets: Collection[Bucket], alone: Collection[Bucket], chunks: Sequence[range]
) -> tuple[dict[Bucket, int], list[int]]:
    """Return {bucket: number of its full-size buffer}, and the elements of each such buffer.

    The rules are those of `UnshardedBuffers`, whose parameters these are.
    """
    numbers: dict[Any, int] = {}
    turns: dict[Any, count] = {}
    slots: dict[Bucket, int] = {}
    for bucket in sorted({*buckets} - {*alone}):
        chunk = next((n for n, units in enumerate(chunks) if bucket.units[0] in units), None)
        kind = bucket.holders, bucket.partial, bucket.frozen
        turn = next(turns.setdefault((kind, chunk), count()))
        slots[bucket] = numbers.setdefault((kind, turn if chunks else turn % TURNS), len(numbers))
    slots |= {bucket: number for number, bucket in enumerate(sorted(alone), len(numbers))}
    lengths = [0] * (len(numbers) + len(alone))
    for bucket, slot in slots.items():
        lengths[slot] = max(lengths[slot], bucket.stop - bucket.start)
    return slots, lengths


def tied_sums(grid: Grid, flat: Any, runs: Iterable[tuple[str, bool, int, int]]) -> list[Reduction]:
    """Bind an all-reduce per tied group whose ranks have summands of gradients; collective.

    The caller runs them once a step.

    runs  (holders, partial, start, stop) of adjacent runs of `flat`, with the names of `Span`
    """
    sums = []
    for (holders, partial), group in groupby(runs, lambda run: run[:2]):
        if partial:
            spans = list(group)
            sums.append(grid.holders[holders].bind(flat[spans[0][2] : spans[-1][3]]))
    return sums


class Buckets(LocalGradients):
    """The in-place reductions of all buckets, each started when its gradients are ready (as DDP's
    reducer).

    A bucket is ready when all units that use its tensors are ready. The units must become ready in
    the same order on all ranks of the group. Without `replication.overlap` all buckets are reduced
    in `wait`.

    buckets  in the order of their reduction
    """

    def __init__(
        self,
        replica: ReplicationContext,
        buckets: Sequence[Bucket],
        bind: Callable[[np.ndarray], Reduction],
        owned: Sequence[Piece],
        counted: Sequence[Piece],
    ):
        """Bind all reductions over the replicas; collective.

        bind            binds the reduction of a bucket that has no wire format
        owned, counted  as in `LocalGradients`
        """
        super().__init__(replica, owned, counted)
        config, wire, group = replica.config, replica.wire, replica.grid.copies
        self._storage = storage = replica.storage
        self.members = group.transport.members
        self._overlap, self._dense_steps = config.replication.overlap, config.dense_steps
        runs = [(span.holders, span.partial, span.start, span.stop) for span in storage.spans]
        self._tied = tied_sums(replica.grid, self.buffer, runs)
        self.buckets = buckets
        self._writers = [
            {
                *(unit for unit in (*bucket.units, *others) if unit >= replica.first),
                *((SUMMED,) if bucket.partial else ()),
            }
            for bucket, others in users(storage, buckets).items()
        ]
        self._views = [self.buffer[b.start : b.stop] for b in buckets]
        self._dense: list[Reduction | None] = []
        self._lossy: list[Reduction | None] = []
        for number, (bucket, view) in enumerate(zip(buckets, self._views, strict=True)):
            is_lossy = wire.name != "none" and not bucket.holders
            needs_dense = not is_lossy or config.dense_steps > 0
            with group.transport.recorder.called(f"bucket {number}"):
                self._dense.append(bind(view) if needs_dense else None)
                self._lossy.append(
                    group.bind_lossy(view, wire, self._matrices(bucket)) if is_lossy else None
                )
        bound = [reduction for reduction in (*self._dense, *self._lossy) if reduction]
        self._mover = mover(group.transport, bound)
        self.begin(0)

    def _matrices(self, bucket: Bucket) -> list[Any]:
        from mpitrain.collectives.compression import tiles

        return [
            tile
            for entry in self._storage.entries
            if bucket.start <= entry.start < bucket.stop and len(entry.parameter.local_shape) == 2
            for tile in tiles(entry.start - bucket.start, *entry.parameter.local_shape)
        ]

    def __len__(self) -> int:
        return len(self.buckets)

    def begin(self, step: int) -> None:
        super().begin(step)
        first, second = (
            (self._dense, self._lossy) if step < self._dense_steps else (self._lossy, self._dense)
        )
        both = zip(first, second, strict=True)
        self._active: list[Reduction] = [preferred or fallback for preferred, fallback in both]  # type: ignore[misc]
        self._missing = [*map(set, self._writers)]
        self.delayed = any(reduction.state for reduction in self._active)

    def ready(self, unit: int, is_last: bool) -> None:
        super().ready(unit, is_last)
        if self._overlap and is_last:
            self._start_completed(unit)

    def _start_completed(self, unit: int) -> None:
        for missing, reduction in zip(self._missing, self._active, strict=True):
            if unit in missing:
                missing.remove(unit)
                if not missing:
                    self._mover.start(reduction)

    def poll(self) -> None:
        self._mover.poll()

    def wait(self) -> None:
        if not self._overlap:
            self.run()
            return
        for reduction in self._tied:
            reduction.run()
        self._start_completed(SUMMED)
        self._mover.wait()
        self._learn()

    def run(self) -> None:
        for reduction in (*self._tied, *self._active):
            reduction.run()
        self._learn()

    def _learn(self) -> None:
        """After a step without a wire format, let the format learn from the exact sums."""
        for used, lossy, view in zip(self._active, self._lossy, self._views, strict=True):
            if lossy and used is not lossy and lossy.learn:
                lossy.learn(view)

    def state(self) -> list[StateBuffer]:
        buffers = []
        for number, (bucket, reduction) in enumerate(zip(self.buckets, self._lossy, strict=True)):
            whole = [Piece(bucket.start, bucket.stop, 0)]
            for name, array in ((reduction.state or {}) if reduction else {}).items():
                if name == "factors":
                    if array.size:
                        buffers.append(StateBuffer(f"factors/{number}", array, (), "bound"))
                elif name == "residual":
                    buffers.append(StateBuffer(name, array, whole, "own"))
                else:
                    buffers.append(StateBuffer(name, array, whole, needed=False))
        return buffers


def all_reduce(replica: ReplicationContext) -> Replication:
    """Return data parallelism by all-reduce (as torch's DistributedDataParallel); collective.

    Each rank computes its rows. `Buckets` reduces the flat gradient buffer in place, bucket by
    bucket from the last unit to the first, while earlier layers still compute. After a step all
    replicas are equal bit for bit, also with a lossy wire format.

    source  Li et al. 2020, PyTorch Distributed, VLDB 13(12)
    """
    owned, grid = whole(replica.storage), replica.grid
    # The replicas divide the squaring evenly: each element is squared on one rank.
    shares = [
        (start, share(stop - start, grid.copies.rank, grid.copies.size))
        for start, stop, _ in counted_runs(replica)
    ]
    counted = [Piece(start + own.start, start + own.stop, 0) for start, own in shares]
    store = WholeParameters(replica, owned)
    reducer = Buckets(replica, common_buckets(replica), grid.copies.bind, owned, counted)
    return Replication(replica, AgreeAndUpdate(replica, store, reducer), ReplicaRows(replica))


def counted_runs(replica: ReplicationContext) -> list[Piece]:
    """Return the runs of the flat buffer that this rank squares for the norm.

    No two ranks of a replica square the same element.
    """
    runs: list[Piece] = []
    for span in replica.storage.spans:
        if not replica.grid.counts(span.holders):
            continue
        if runs and runs[-1].stop == span.start:
            runs[-1] = runs[-1]._replace(stop=span.stop)
        else:
            runs.append(Piece(span.start, span.stop, 0))
    return runs
