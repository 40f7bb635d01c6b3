"""The all-reduce of a flat gradient buffer, bucket by bucket: whole numbers, or in a wire format after some first steps."""

from collections.abc import Mapping

import numpy as np

from mpitrain import config
from mpitrain.collectives.choose import part_bytes
from mpitrain.collectives.execute import Reduction
from mpitrain.collectives.group import Group
from mpitrain.collectives.matrices import Matrix, tiles
from mpitrain.collectives.moving import ByCaller, mover
from mpitrain.collectives.wire import parse_wire
from mpitrain.layers.flat import Bucket, Storage

WITHIN_A_HOST = 4e6
"""Bytes of a bucket between ranks of one host, where a reduction is short beside the layers of its units."""

AGREED = ("factors/", "prediction/")
"""How the names of state that is the same on all ranks begin."""


class Buckets:
    """Reductions in place of runs of whole units, each started when its first unit's gradient is ready.

    bytes sent  as the bound reductions say; in a wire format, as its formula does
    """

    def __init__(self, group: Group, storage: Storage, gradients: np.ndarray, settings: config.Replication,
                 dense_steps: int):
        self._storage, self._dense_steps = storage, dense_steps
        self._buckets = storage.buckets(1e6 * settings.bucket_mb or self._chosen_bytes(group, storage))
        self._views = views = [gradients[b.start:b.stop] for b in self._buckets]
        wire = parse_wire(settings.wire)
        is_lossy = wire.name != "none"
        needs_dense = not is_lossy or self._dense_steps > 0
        self._dense: list[Reduction] = [group.bind(view) for view in views] if needs_dense else []
        self._lossy: list[Reduction] = [
            group.bind_lossy(view, wire, self._matrices(bucket))
            for bucket, view in zip(self._buckets, views, strict=True)
        ] if is_lossy else []
        self._mover = ByCaller() if settings.progress_thread == "no" else mover(group.transport, [*self._dense, *self._lossy])
        self.begin(0)

    @staticmethod
    def _chosen_bytes(group: Group, storage: Storage) -> float:
        """Bytes of a bucket where none are given."""
        hosts = group.transport.hosts
        if len(set(hosts)) == 1:
            return WITHIN_A_HOST
        return part_bytes(group.tuning, group.algorithm, hosts, storage.length, storage.dtype.itemsize)

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
        """Choose the reductions of step `step`, from 0."""
        is_lossy = self._lossy and step >= self._dense_steps
        self._active = self._lossy if is_lossy else self._dense
        self._by_unit = {b.first_unit: r for b, r in zip(self._buckets, self._active, strict=True)}

    @property
    def delay(self) -> bool:
        """Whether this step's reductions keep something for later ones."""
        return any(reduction.state for reduction in self._active)

    def start(self, unit: int) -> None:
        """Start the bucket that was waiting for this unit, if any was."""
        if unit in self._by_unit:
            self._mover.start(self._by_unit[unit])

    def poll(self) -> None:
        """Move what is under way."""
        self._mover.poll()

    def wait(self) -> None:
        """Block until all that was started is reduced."""
        self._mover.wait()
        self._learn()

    def run(self) -> None:
        """Reduce everything now."""
        for reduction in self._active:
            reduction.run()
        self._learn()

    def _learn(self) -> None:
        """Whole sums teach the wire format that will follow what to expect."""
        if self._active is not self._lossy:
            for reduction, view in zip(self._lossy, self._views, strict=False):
                if reduction.learn:
                    reduction.learn(view)

    def residuals(self) -> dict[str, np.ndarray]:
        """What this rank's wire format still owes, by full parameter name; the rest of its state under AGREED and the name."""
        found = {}
        for number, (bucket, reduction) in enumerate(zip(self._buckets, self._lossy, strict=False)):
            for kind, kept in (reduction.state or {}).items():
                if kind == "factors":
                    if kept.size:
                        found[f"factors/{number}"] = kept
                    continue
                prefix = "" if kind == "residual" else f"{kind}/"
                for entry in self._storage.entries:
                    if bucket.start <= entry.start < bucket.stop:
                        found[prefix + entry.name] = kept[entry.start - bucket.start:entry.stop - bucket.start]
        return found

    def load_residuals(self, saved: Mapping[str, np.ndarray]) -> None:
        """Take over what `residuals` gave; what is not there, or has another size, starts as in a new run."""
        for name, view in self.residuals().items():
            if name in saved and saved[name].shape == view.shape:
                view[:] = saved[name]
