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

from mpitrain.collectives.engine.arithmetic import Wire
from mpitrain.collectives.engine.executor import Reduction, mover
from mpitrain.collectives.group import Group
from mpitrain.collectives.selection.cost_model import part_bytes
from mpitrain.layers.flat import Bucket, FlatLayout, Span, Storage
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.parallel.grid import Grid
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


def best_bytes(layout: FlatLayout, group: Group, bucket_mb: float) -> float:
    """Return the bytes of a bucket of this layout.

    group      whose ranks reduce
    bucket_mb  as in `bucket_bytes`
    """
    ends, length, itemsize = group.transport, layout.length, layout.dtype.itemsize
    return bucket_bytes(
        bucket_mb,
        ends.hosts,
        isinstance(ends, DeviceTransport),
        lambda: part_bytes(group.tuning, group.algorithm, ends.hosts, length, itemsize),
    )


def users(storage: Storage, buckets: Sequence[Bucket]) -> dict[Bucket, set[int]]:
    """Return, for each bucket, the units that compute with its tensors.

    They include units of other buckets that use a tied tensor of this bucket.
    """
    used = [{unit.full_name(p) for p in unit.layer.parameters()} for unit in storage.units]
    found: dict[Bucket, set[int]] = {}
    for bucket in buckets:
        stored = {entry.name for entry in storage.within(bucket)}
        found[bucket] = {unit for unit, names in enumerate(used) if names & stored}
    return found


def buckets_used(storage: Storage, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Return, for each unit, the buckets of which it is among the `users`, in order of storage."""
    of_buckets = sorted(users(storage, buckets).items())
    return [
        [bucket for bucket, units in of_buckets if unit in units]
        for unit in range(len(storage.units))
    ]


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


def tied_sums(grid: Grid, flat: Any, runs: Iterable[Span | Bucket]) -> list[Reduction]:
    """Bind an all-reduce per tied group whose ranks have summands of gradients; collective.

    The caller runs them once a step.

    runs  adjacent runs of `flat`
    """
    sums = []
    for holders, group in groupby((run for run in runs if run.partial), lambda run: run.holders):
        own = list(group)
        # Tensors that other ranks lack may come before.
        part = flat[own[0].start : own[-1].stop]
        sums.append(grid.holders[holders].bind(part, is_alike=False))
    return sums


class Buckets:
    """The in-place sums of all buckets of a flat buffer over one group, each started when its
    gradients are ready (as DDP's reducer).

    A bucket is ready when all its writers are. They must become ready in the same order on all
    ranks of the group. Without `overlap` all buckets are reduced in `wait`.

    buckets  in the order of their reduction
    delayed  whether the reductions of this step leave errors to later steps (error feedback)
    """

    delayed = False

    def __init__(
        self,
        group: Group,
        flat: Any,
        buckets: Sequence[Bucket],
        writers: Sequence[set[int]],
        overlap: bool = True,
        bind: Callable[[Bucket, Any], Reduction] | None = None,
        tied: Sequence[Reduction] = (),
    ):
        """Bind all reductions over the group; collective.

        flat     1-D
        writers  for each bucket, the numbers of all that write to it
        bind     binds the exact reduction of a bucket; None: as the group
        tied     sums over tied groups, which run before the buckets with `partial` are reduced
        """
        self.buckets, self._overlap, self._tied = buckets, overlap, tied
        self._writers = [
            {*own, SUMMED} if bucket.partial else own
            for bucket, own in zip(buckets, writers, strict=True)
        ]
        self._views = [flat[bucket.start : bucket.stop] for bucket in buckets]
        # The function may be a method of the replica that has these buckets, so no attribute keeps it.
        self._active = self.bound(group, bind or (lambda bucket, view: group.bind(view)))
        self._mover = mover(group.transport, self._active)
        self.begin(0)

    def bound(self, group: Group, bind: Callable[[Bucket, Any], Reduction]) -> Sequence[Reduction]:
        """Bind and return all reductions; collective.    bind: of a bucket and its view"""
        reductions = list[Reduction]()
        for number, (bucket, view) in enumerate(zip(self.buckets, self._views, strict=True)):
            with group.transport.recorder.called(f"bucket {number}"):
                reductions.append(bind(bucket, view))
        return reductions

    def __len__(self) -> int:
        return len(self.buckets)

    def begin(self, step: int) -> None:
        """Begin a step, counted from 0: nothing is ready."""
        self._missing = [*map(set, self._writers)]

    def ready(self, writer: int) -> None:
        """Report that a writer has written all its gradients of this step."""
        for missing, reduction in zip(self._missing, self._active, strict=True):
            if self._overlap and writer in missing:
                missing.remove(writer)
                if not missing:
                    self._mover.start(reduction)

    def poll(self) -> None:
        """Progress the started reductions."""
        self._mover.poll()

    def wait(self) -> None:
        """Block until all buckets are reduced; all writers must have been reported as ready."""
        for reduction in (*self._tied, *(() if self._overlap else self._active)):
            reduction.run()
        self.ready(SUMMED)
        self._mover.wait()

    def state(self) -> list[StateBuffer]:
        """Return the state that wire formats keep between steps, for checkpoints."""
        return []


class LossyBuckets(Buckets):
    """Buckets in a wire format, except in the first steps; buckets of tensors that other ranks hold are exact."""

    def __init__(self, *of_buckets: Any, wire: Wire, layout: FlatLayout, dense_steps: int = 0):
        """Bind all reductions over the group; collective.

        of_buckets   the arguments of `Buckets`
        layout       of the tensors in the flat buffer
        dense_steps  first steps without the wire format
        """
        self._wire, self._layout, self._dense_steps = wire, layout, dense_steps
        super().__init__(*of_buckets)

    def bound(self, group: Group, bind: Callable[[Bucket, Any], Reduction]) -> Sequence[Reduction]:
        # The reductions of the first `dense_steps` steps, and of all others; equal for an exact bucket.
        self._dense: list[Reduction] = []
        self._lossy: list[Reduction] = []
        for number, (bucket, view) in enumerate(zip(self.buckets, self._views, strict=True)):
            own = list[Reduction]()
            with group.transport.recorder.called(f"bucket {number}"):
                if self._dense_steps or bucket.holders:
                    own.append(bind(bucket, view))
                if not bucket.holders:
                    matrices = matrices_in(self._layout, bucket)
                    own.append(group.bind_lossy(view, self._wire, matrices))
            self._dense.append(own[0])
            self._lossy.append(own[-1])
        return [*self._dense, *self._lossy]

    def begin(self, step: int) -> None:
        super().begin(step)
        self._active = self._dense if step < self._dense_steps else self._lossy
        self.delayed = any(reduction.state for reduction in self._active)

    def wait(self) -> None:
        """Block until all buckets are reduced; after a step without the wire format, it learns from
        the exact sums.
        """
        super().wait()
        for used, lossy, view in zip(self._active, self._lossy, self._views, strict=True):
            if used is not lossy and lossy.learn:
                lossy.learn(view)

    def state(self) -> list[StateBuffer]:
        buffers = []
        for number, (bucket, reduction) in enumerate(zip(self.buckets, self._lossy, strict=True)):
            whole = [Piece(bucket.start, bucket.stop, 0)]
            for name, array in (reduction.state or {}).items():
                if name == "factors":
                    if array.size:
                        buffers.append(StateBuffer(f"factors/{number}", array, (), "bound"))
                elif name == "residual":
                    buffers.append(StateBuffer(name, array, whole, "own"))
                else:
                    buffers.append(StateBuffer(name, array, whole, needed=False))
        return buffers


def matrices_in(layout: FlatLayout, bucket: Bucket) -> list[Any]:
    """Return the matrices of a bucket as PowerSGD compresses them, as offsets in the bucket."""
    from mpitrain.collectives.compression import tiles

    return [
        tile
        for entry in layout.entries
        if bucket.start <= entry.start < bucket.stop and len(entry.parameter.local_shape) == 2
        for tile in tiles(entry.start - bucket.start, *entry.parameter.local_shape)
    ]
