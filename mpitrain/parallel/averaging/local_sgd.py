"""Local SGD and DiLoCo: after each period all workers continue from the average of their
parameters.
"""

import numpy as np

from mpitrain.config import Replication as Settings
from mpitrain.parallel.averaging.base import ModelAveraging
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.state import StateBuffer


def has_outer(settings: Settings) -> bool:
    """Return whether there is an outer optimizer, which needs two more buffers of the parameters'
    length.
    """
    return settings.outer_lr != 1 or settings.outer_momentum != 0


class LocalSGD(ModelAveraging):
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

    bytes sent  at the end of a period an all-reduce of the parameters' bytes and one of 40; in
                other steps an all-reduce of the parameters' bytes for a checkpoint or an
                evaluation, otherwise none
    memory      twice the parameters; four times with an outer optimizer
    source      Stich 2019, Local SGD Converges Fast and Communicates Little, ICLR; for the outer
                Nesterov momentum Douillard et al. 2023, DiLoCo, arXiv:2311.08105
    """

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica)
        settings, backend, length = (
            replica.config.replication,
            replica.device.backend,
            replica.storage.length,
        )
        self._outer = {}
        if has_outer(settings):
            self._outer = {
                name: backend.zeros(length, replica.storage.dtype)
                for name in ("outer_start", "outer_momentum")
            }
            self._outer["outer_start"][:] = self._own

    def _mix(self, step: int) -> None:
        if self._is_end_of_period(step):
            self.sync_parameters()
            if self._outer:
                self._propose(self._average)
            self._own[:] = self._average

    def _propose(self, average: np.ndarray) -> None:
        """Apply the outer optimizer to an average, in place."""
        settings, ops, arena = (
            self.replica.config.replication,
            self.replica.device.ops,
            self.replica.arena,
        )
        start, momentum = self._outer.values()
        lr, beta, delta = settings.outer_lr, settings.outer_momentum, average
        self._add(start, 1.0, average, -1.0, delta)
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

    def kept(self) -> list[StateBuffer]:
        average, *others = super().kept()
        outer = [
            StateBuffer(
                name,
                buffer,
                average.pieces,
                needed=False,
                like=average.name if name == "outer_start" else "",
            )
            for name, buffer in self._outer.items()
        ]
        return [average, *others, *outer]
