"""The reduction of a flat gradient buffer, bucket by bucket: whole numbers, or in a wire format after some first steps."""

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
"""In place of a unit: gradients of which holders had parts are whole."""

WITHIN_A_HOST = 4e6
"""Bytes of a bucket between ranks of one host, where a reduction is short beside the layers of its units."""


def bucket_bytes(config: Config, group: Group, storage: Storage) -> float:
    """Bytes of a bucket: as configured, or what suits where the ranks of the group are."""
    if config.replication.bucket_mb:
        return 1e6 * config.replication.bucket_mb
    hosts = group.transport.hosts
    if len(set(hosts)) == 1:
        return WITHIN_A_HOST
    return part_bytes(group.tuning, group.algorithm, hosts, storage.length, storage.dtype.itemsize)


class Buckets:
    """Reductions in place of buckets, each started when the gradients are ready of all units that have tensors there or use them.

    Ranks that reduce together make their units' gradients ready in one order.
    bytes sent  as the bound reductions say; in a wire format, as its formula does
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
        """Collective.

        bind   what sums a bucket, where it does not travel in the wire format
        parts  what sums the buckets that are `partial` over their holders, before they are reduced
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
        self._mover = mover(group.transport, bound, config.replication.progress_thread)
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
        """Choose the reductions of step `step`, from 0; no unit's gradient is ready."""
        first, second = (
            (self._dense, self._lossy) if step < self._dense_steps else (self._lossy, self._dense)
        )
        both = zip(first, second, strict=True)
        self._active: list[Reduction] = [one or other for one, other in both]  # type: ignore[misc]
        self._missing = [*map(set, self._writers)]

    @property
    def delay(self) -> bool:
        """Whether this step's reductions keep something for later ones."""
        return any(reduction.state for reduction in self._active)

    def ready(self, unit: int, is_last: bool) -> None:
        """A micro-batch's gradient of the unit is complete; with the last one start the buckets that waited for it alone."""
        for missing, reduction in zip(self._missing, self._active, strict=True):
            if is_last and unit in missing:
                missing.remove(unit)
                if not missing:
                    self._mover.start(reduction)

    def poll(self) -> None:
        """Move what is under way."""
        self._mover.poll()

    def wait(self) -> None:
        """Block until everything is reduced; every unit is ready."""
        self._sum_parts()
        self.ready(SUMMED, True)
        self._mover.wait()
        self._learn()

    def run(self) -> None:
        """Reduce everything now."""
        self._sum_parts()
        for reduction in self._active:
            reduction.run()
        self._learn()

    def _sum_parts(self) -> None:
        for reduction in self._parts:
            reduction.run()

    def _learn(self) -> None:
        """Whole sums teach the wire format that will follow what to expect."""
        for used, lossy, view in zip(self._active, self._lossy, self._views, strict=True):
            if lossy and used is not lossy and lossy.learn:
                lossy.learn(view)

    def kept(self) -> list[StateBuffer]:
        """What this rank's wire format still owes, what it expects, and its factors."""
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
