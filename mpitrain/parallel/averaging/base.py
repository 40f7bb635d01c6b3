"""Workers that train apart: each updates parameters of its own, and their average is the model."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.collectives.group import Group
from mpitrain.layers.flat import Piece
from mpitrain.parallel.data.allreduce import AllReduce
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.records import StepInput, StepResult
from mpitrain.parallel.replication.state import StateBuffer


class ModelAveraging(AllReduce, ABC):
    """Each worker updates from the mean gradient of its own rows, clipped by its own norm; `_mix` brings workers together.

    A worker leaves out an update from numbers that are not finite. The others hear of that, and of a request to stop, at the
    end of a period, of replication.period steps, or of the run. Then the outcome of a step is the same on all ranks: the mean
    loss over the global batch, and the root of the mean square of the workers' norms. In every other step loss and norm are
    this worker's own, and nothing else is told.

    Evaluations and checkpoints use an average in a second buffer, and training goes on from the workers' own parameters. This
    holds at the end of a run, too: a finished run that is extended equals a run that was planned that long. In half
    precision the mirror is of what is used: it is written before each step, and once settled.
    """

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica)
        grid, storage = replica.grid, replica.storage
        self._own, self._own_weights = self.parameters, self._weights
        self._average = grid.world.transport.allocate(storage.length, storage.dtype)
        self._average[:] = self._own
        self._average_weights = (
            storage.weights(self._average) if self.mirror is None else self._weights
        )
        self._sum_of_all = grid.dp.bind(self._average)
        self._is_settled = True  # whether the second buffer holds the average
        self._news = np.zeros(
            5
        )  # loss, square of the norm; since the last: elements not finite, updates left out, stops
        self._tell = grid.world.bind(self._news)

    def _peers(self) -> Group:
        """Nobody else's gradients are summed: where tp is 1, the ranks along it are this one alone."""
        return self.replica.grid.tp

    def _add(self, a: Any, alpha: float, b: Any, beta: float, out: Any) -> None:
        """As `weighted_sum` of the operations."""
        self.replica.device.ops.weighted_sum(a, alpha, b, beta, out, self.replica.arena)

    def _counted(self) -> Sequence[Piece]:
        return self._owned()

    def _agreed(self, *numbers: float) -> list[float]:
        """This worker's own."""
        return list(numbers)

    def scale(self, predictions: int, part: int) -> float:
        """As of all modes, but one update uses this worker's own rows alone."""
        return 1 / (len(self.share(self.replica.config.batch.size)) * predictions)

    def _weight(self) -> float:
        """What this worker counts in a mean over the rows of the global batch."""
        size = self.replica.config.batch.size
        return len(self.share(size)) / size

    def _weight_in_average(self) -> float:
        """What this worker's parameters count in their average."""
        return self._weight()

    def _is_end_of_period(self, step: int) -> bool:
        return (step + 1) % self.replica.config.replication.period == 0

    @abstractmethod
    def _mix(self, step: int) -> None:
        """Bring workers together after their updates of step `step`, from 0."""

    def _mirror_of(self, piece: Piece) -> None:
        """Not written with an update, after which workers mix."""

    def begin(self, step: int) -> None:
        super().begin(step)
        self.parameters, self._weights = self._own, self._own_weights
        self._write_mirror()

    def finish(self, mine: StepInput) -> StepResult:
        own = super().finish(mine)
        began = time.perf_counter()
        self._is_settled = False
        self._mix(mine.number)
        self._news[2:] += own.nonfinite, not own.updated, own.stop
        told = own._replace(nonfinite=0, updated=True, stop=False)
        if self._is_end_of_period(mine.number) or mine.number + 1 == self.replica.config.run.steps:
            told = self._told(own)
        return told._replace(comm_s=own.comm_s + time.perf_counter() - began)

    def _told(self, own: StepResult) -> StepResult:
        """What all ranks agree on."""
        self._news[:2] = self._weight() * own.loss, self._weight() * own.grad_norm**2
        self._tell.run()
        loss, squares, nonfinite, left_out, stops = self._news.tolist()
        self._news[:] = 0
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        return StepResult(loss, norm, int(nonfinite), own.lr, left_out == 0, stops > 0)

    def settle(self) -> None:
        if not self._is_settled:
            self._add(self._own, self._weight_in_average(), None, 0.0, self._average)
            self._sum_of_all.run()
            self._is_settled = True
        self.parameters, self._weights = self._average, self._average_weights
        self._write_mirror()

    def scalars(self) -> dict[str, float]:
        """What each worker has skipped, for it skips by itself, and the mean; collective."""
        told = self.replica.grid.dp.transport.gather_text(self._skipped)
        return {
            "skipped_updates": sum(told) // len(told),
            **{_skipped_by(worker): count for worker, count in enumerate(told)},
        }

    def restore(self, scalars: Mapping[str, float]) -> None:
        super().restore(scalars)
        workers, me = self.replica.grid.dp.size, self.replica.grid.dp.rank
        if [_skipped_by(worker) in scalars for worker in (workers - 1, workers)] == [
            True,
            False,
        ]:  # as many as there were
            self._skipped = int(scalars[_skipped_by(me)])

    def kept(self) -> list[StateBuffer]:
        """The average, which any other layout starts from, each worker's own parameters, and its optimizer's state."""
        self.settle()
        average, *state = super().kept()
        own = StateBuffer("own_parameters", self._own, average.pieces, "bound", like=average.name)
        return [average, own, *(buffer._replace(kind="mean") for buffer in state)]


def _skipped_by(worker: int) -> str:
    return f"skipped_updates.{worker}"
