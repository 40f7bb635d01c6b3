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

from collections.abc import Callable, Sequence

import numpy as np

from mpitrain.collectives.compression.matrices import Matrix, tiles
from mpitrain.collectives.engine.codecs import Wire
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.engine.progress import mover
from mpitrain.collectives.group import Group
from mpitrain.collectives.selection.choose import part_bytes
from mpitrain.config import Config
from mpitrain.layers.flat import Bucket, Piece, Storage
from mpitrain.parallel.data.unsharded_buffers import users
from mpitrain.parallel.replication.state import StateBuffer

SUMMED = -1
"""An entry of `Buckets._missing` in place of a unit: the pending sum over a tied group."""

WITHIN_A_HOST = 4e6
"""Bytes of a bucket if all ranks share a host. Its reduction is short compared to the backward of
its units.
"""


def bucket_bytes(config: Config, group: Group, storage: Storage) -> float:
    """Return the bytes of a bucket: as configured, or the best size for the hosts of the group."""
    if config.replication.bucket_mb:
        return 1e6 * config.replication.bucket_mb
    hosts = group.transport.hosts
    if len(set(hosts)) == 1:
        return WITHIN_A_HOST
    return part_bytes(group.tuning, group.algorithm, hosts, storage.length, storage.dtype.itemsize)


class Buckets:
    """The in-place reductions of all buckets, each started when its gradients are ready (as DDP's
    reducer).

    A bucket is ready when all units with tensors in it, and all units that use these tensors, are
    ready. The units must become ready in the same order on all ranks of the group.

    bytes sent  as stated by the bound reductions; in a wire format, by the formula of the format
    """

    def __init__(
        self,
        group: Group,
        storage: Storage,
        buckets: Sequence[Bucket],
        gradients: np.ndarray,
        config: Config,
        wire: Wire,
        bind: Callable[[np.ndarray], Reduction],
        parts: Sequence[Reduction] = (),
    ):
        """Bind all reductions; collective.

        bind   binds the reduction of a bucket that has no wire format
        parts  sums over tied groups, which precede the reduction of `partial` buckets
        """
        self._parts = parts
        self._storage, self._buckets, self._dense_steps = storage, buckets, config.dense_steps
        self._writers = [
            {*bucket.units, *others, *((SUMMED,) if bucket.partial else ())}
            for bucket, others in users(storage, buckets).items()
        ]
        self._views = views = [gradients[b.start : b.stop] for b in buckets]
        needs_dense = [
            wire.name == "none" or config.dense_steps > 0 or bool(b.holders) for b in buckets
        ]
        self._dense: list[Reduction | None] = []
        self._lossy: list[Reduction | None] = []
        for number, (bucket, view, needed) in enumerate(
            zip(buckets, views, needs_dense, strict=True)
        ):
            with group.transport.recorder.called(f"bucket {number}"):
                self._dense.append(bind(view) if needed else None)
                is_lossy = wire.name != "none" and not bucket.holders
                self._lossy.append(
                    group.bind_lossy(view, wire, self._matrices(bucket)) if is_lossy else None
                )
        bound = [reduction for reduction in (*self._dense, *self._lossy) if reduction]
        self._mover = mover(group.transport, bound)
        self.begin(0)

    def _matrices(self, bucket: Bucket) -> list[Matrix]:
        return [
            tile
            for entry in self._storage.entries
            if bucket.start <= entry.start < bucket.stop and len(entry.parameter.local_shape) == 2
            for tile in tiles(entry.start - bucket.start, *entry.parameter.local_shape)
        ]

    def __len__(self) -> int:
        return len(self._buckets)

    def begin(self, step: int) -> None:
        """Choose exact or lossy reductions for step `step`, from 0, and mark all units as not
        ready.
        """
        first, second = (
            (self._dense, self._lossy) if step < self._dense_steps else (self._lossy, self._dense)
        )
        both = zip(first, second, strict=True)
        self._active: list[Reduction] = [one or other for one, other in both]  # type: ignore[misc]
        self._missing = [*map(set, self._writers)]

    @property
    def delay(self) -> bool:
        """Whether this step's reductions leave state for later steps, such as the residual of error
        feedback.
        """
        return any(reduction.state for reduction in self._active)

    def ready(self, unit: int, is_last: bool) -> None:
        """Report a unit's gradient of one micro-batch; the last one starts each bucket that it
        completes.
        """
        for missing, reduction in zip(self._missing, self._active, strict=True):
            if is_last and unit in missing:
                missing.remove(unit)
                if not missing:
                    self._mover.start(reduction)

    def poll(self) -> None:
        """Progress the started reductions."""
        self._mover.poll()

    def wait(self) -> None:
        """Block until all buckets are reduced. The caller must have reported all units as ready."""
        self._sum_parts()
        self.ready(SUMMED, True)
        self._mover.wait()
        self._learn()

    def run(self) -> None:
        """Reduce all buckets now, without overlap."""
        self._sum_parts()
        for reduction in self._active:
            reduction.run()
        self._learn()

    def _sum_parts(self) -> None:
        for reduction in self._parts:
            reduction.run()

    def _learn(self) -> None:
        """Pass the sums of exact steps to the wire format, before its lossy reductions begin.

        The format updates its prediction from them.
        """
        for used, lossy, view in zip(self._active, self._lossy, self._views, strict=True):
            if lossy and used is not lossy and lossy.learn:
                lossy.learn(view)

    def kept(self) -> list[StateBuffer]:
        """Return the state of the wire format: residuals, predictions, low-rank factors."""
        found = []
        for number, (bucket, reduction) in enumerate(zip(self._buckets, self._lossy, strict=True)):
            whole = [Piece(bucket.start, bucket.stop, 0)]
            for name, array in ((reduction.state or {}) if reduction else {}).items():
                if name == "factors":
                    if array.size:
                        found.append(StateBuffer(f"factors/{number}", array, (), "bound"))
                elif name == "residual":
                    found.append(StateBuffer(name, array, whole, "own"))
                else:
                    found.append(StateBuffer(name, array, whole, needed=False))
        return found
