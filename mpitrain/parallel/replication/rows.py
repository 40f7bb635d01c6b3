"""The rows of the global batch that a rank computes, their loss, and its divisor."""

from typing import Any

import numpy as np

from mpitrain.data import Source
from mpitrain.parallel.grid import share
from mpitrain.parallel.replication.protocol import ReplicationContext


class ReplicaRows:
    """The dp-th of nearly equal runs of the global batch, for an update from all of its rows."""

    def __init__(self, replica: ReplicationContext):
        self._replica = replica
        self._size = replica.config.batch.size

    def share(self, rows: int) -> range:
        grid = self._replica.grid
        return share(rows, grid.place.dp, grid.axes.dp)

    def batch(self, source: Source, step: int, before: int | None) -> tuple[np.ndarray, np.ndarray]:
        seed = self._replica.config.run.seed
        return source.batch(seed, step, self._size, self.share(self._size), before)

    def of_update(self, part: int) -> int:
        return self._size

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        return self._replica.loss.gradient(logits, targets, scale, self._replica.arena)


class OwnRows(ReplicaRows):
    """The same rows, for an update from them alone."""

    def of_update(self, part: int) -> int:
        return len(self.share(self._size))
