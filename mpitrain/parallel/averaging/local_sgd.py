"""Local SGD and DiLoCo: after each period all workers continue from the average of their
parameters.
"""

from typing import Any

import numpy as np

from mpitrain.config import Replication as Settings
from mpitrain.parallel.averaging.base import AveragedParameters, averaging
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.parallel.replication.whole import whole


def has_outer(settings: Settings) -> bool:
    """Return whether there is an outer optimizer, which needs two more buffers of the parameters'
    length.
    """
    return settings.outer_lr != 1 or settings.outer_momentum != 0


class PeriodicAverage:
    """Local SGD, or DiLoCo with an outer momentum: a full period ends with the average of all
    parameters.

    The average weighs each worker by its rows. A run that ends within a period saves the plain
    average as its model. If that run is extended, its workers continue from their own parameters.

    The outer optimizer takes the average for a proposal. With `start`, the parameters before the
    period, and m, at first 0:

        delta = start - average
        m     = outer_momentum m + delta
        start = start - outer_lr (delta + outer_momentum m)       all workers continue from here

    The defaults, outer_lr 1 and outer_momentum 0, give the average itself.

    bytes sent  at the end of a period an all-reduce of the parameters' bytes and one of 48; in
                other steps an all-reduce of the parameters' bytes for a checkpoint or an
                evaluation, otherwise none
    memory      twice the parameters; four times with an outer optimizer
    source      Stich 2019, Local SGD Converges Fast and Communicates Little, ICLR; for the outer
                Nesterov momentum Douillard et al. 2023, DiLoCo, arXiv:2311.08105
    """

    def __init__(self, replica: ReplicationContext, store: AveragedParameters):
        """Allocate the buffers of the outer optimizer, if there is one."""
        self._replica, self._store = replica, store
        storage, self._outer = replica.storage, dict[str, Any]()
        if has_outer(replica.config.replication):
            self._outer = {
                name: replica.device.backend.zeros(storage.length, storage.dtype)
                for name in ("outer_start", "outer_momentum")
            }
            self._outer["outer_start"][:] = store.own

    def mix(self, step: int, is_end_of_period: bool) -> None:
        if is_end_of_period:
            self._store.sync()
            if self._outer:
                self._propose(self._store.average)
            self._store.own[:] = self._store.average

    def _propose(self, average: np.ndarray) -> None:
        """Apply the outer optimizer to an average, in place."""
        settings, ops, arena = (
            self._replica.config.replication,
            self._replica.device.ops,
            self._replica.arena,
        )
        start, momentum = self._outer.values()
        lr, beta, delta = settings.outer_lr, settings.outer_momentum, average
        self._store.add(start, 1.0, average, -1.0, delta)
        ops.momentum(
            start,
            delta,
            momentum,
            scale=1.0,
            lr=lr * beta,
            beta=beta,
            weight_decay=0.0,
            arena=arena,
        )
        ops.sgd(start, delta, scale=1.0, lr=lr, weight_decay=0.0, arena=arena)
        average[:] = start

    def state(self) -> list[StateBuffer]:
        pieces, like = whole(self._replica.storage), {"outer_start": "parameters"}
        return [
            StateBuffer(name, buffer, pieces, needed=False, like=like.get(name, ""))
            for name, buffer in self._outer.items()
        ]


def local_sgd(replica: ReplicationContext) -> Replication:
    """Return local SGD, or DiLoCo; collective."""
    return averaging(replica, PeriodicAverage)
