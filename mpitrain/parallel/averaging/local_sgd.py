"""Local steps: every so many of them the workers meet, and all go on from the average of their parameters."""

import numpy as np

from mpitrain.config import Replication as Settings
from mpitrain.parallel.averaging.base import ModelAveraging
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.state import StateBuffer


def has_outer(settings: Settings) -> bool:
    """Whether the average is a proposal, for which two more buffers of the parameters' length are held."""
    return settings.outer_lr != 1 or settings.outer_momentum != 0


class LocalSGD(ModelAveraging):
    """After each full period all parameters become their average, which weighs each worker by its rows.

    Where a run ends within a period, its model is the plain average, and no worker takes it over: the run may be extended.
    An outer momentum takes that average for a proposal. With `start`, which all had before the period, and zero for m:
    delta = start - average;  m = outer_momentum m + delta;  all go on from start - outer_lr (delta + outer_momentum m).
    The default, outer_lr 1 and outer_momentum 0, is the average itself.

    bytes sent  at the end of a period an all-reduce of the parameters' bytes, and one of 40; in other steps none but for the
                average of a checkpoint or an evaluation
    memory      twice the parameters; four times with an outer momentum
    source      Stich 2019, Local SGD Converges Fast and Communicates Little, ICLR; for the outer momentum, which is
                Nesterov's, Douillard et al. 2023, DiLoCo, arXiv:2311.08105
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
            self.settle()
            if self._outer:
                self._propose(self._average)
            self._own[:] = self._average

    def _propose(self, average: np.ndarray) -> None:
        """Make of an average what the outer momentum makes of it, in place."""
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
