"""The base of model averaging: each worker updates its own parameters, and the model is their
average.
"""

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
    """Local updates with model averaging; subclasses define `_mix`.

    Each worker updates from the mean gradient of its own rows, clipped by its own norm. It skips an
    update if a number is not finite. `_mix` then combines the parameters of the workers.

    At the end of a period, and of the run, all ranks exchange skipped updates and stop requests. A
    period has replication.period steps. Only then does a step have the same result on all ranks.
    Its loss is the mean over the global batch, its norm the root mean square of the workers' norms.
    In all other steps loss and norm are this worker's own.

    Evaluations and checkpoints use the average, in a second buffer. Training continues from the
    workers' own parameters, also after the last step. So a finished run that is extended equals a
    run of the full length.

    In half precision the mirror follows the parameters in use. It is written at the start of each
    step and by `sync_parameters`.
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
        self._is_settled = True  # the second buffer contains the average
        # The first two of five numbers are the loss and squared norm of this step. The others are
        # sums since the last exchange: non-finite elements, skipped updates and stop requests.
        self._news = np.zeros(5)
        self._tell = grid.world.bind(self._news)

    def _peers(self) -> Group:
        """Return a group of one: gradients are not summed over workers. With tp 1 that is the tp
        group.
        """
        return self.replica.grid.tp

    def _add(self, a: Any, alpha: float, b: Any, beta: float, out: Any) -> None:
        """Write alpha a + beta b to `out`, as the operation `weighted_sum`."""
        self.replica.device.ops.weighted_sum(a, alpha, b, beta, out, self.replica.arena)

    def _counted(self) -> Sequence[Piece]:
        return self._owned()

    def _agreed(self, *numbers: float) -> list[float]:
        """Return the numbers unchanged: in this mode no all-reduce runs at every step."""
        return list(numbers)

    def scale(self, predictions: int, part: int) -> float:
        """Return the factor as in all modes, for an update from this worker's own rows."""
        return 1 / (len(self.share(self.replica.config.batch.size)) * predictions)

    def _weight(self) -> float:
        """Return this worker's weight in a mean over the rows of the global batch."""
        size = self.replica.config.batch.size
        return len(self.share(size)) / size

    def _weight_in_average(self) -> float:
        """Return the weight of this worker's parameters in the average."""
        return self._weight()

    def _is_end_of_period(self, step: int) -> bool:
        return (step + 1) % self.replica.config.replication.period == 0

    @abstractmethod
    def _mix(self, step: int) -> None:
        """Combine the parameters of all workers after their updates of step `step`, from 0."""

    def _mirror_of(self, piece: Piece) -> None:
        """Return None: `begin` writes the mirror, as parameters change after the update."""

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
        """Sum this step's loss and the counts since the last exchange over all ranks; collective.

        The counts are non-finite elements, skipped updates and stop requests.
        returns  the step's result, equal on all ranks
        """
        self._news[:2] = self._weight() * own.loss, self._weight() * own.grad_norm**2
        self._tell.run()
        loss, squares, nonfinite, left_out, stops = self._news.tolist()
        self._news[:] = 0
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        return StepResult(loss, norm, int(nonfinite), own.lr, left_out == 0, stops > 0)

    def sync_parameters(self) -> None:
        if not self._is_settled:
            self._add(self._own, self._weight_in_average(), None, 0.0, self._average)
            self._sum_of_all.run()
            self._is_settled = True
        self.parameters, self._weights = self._average, self._average_weights
        self._write_mirror()

    def scalars(self) -> dict[str, float]:
        """Return the skipped updates of each worker, and their mean; collective."""
        told = self.replica.grid.dp.transport.gather_text(self._skipped)
        return {
            "skipped_updates": sum(told) // len(told),
            **{_skipped_by(worker): count for worker, count in enumerate(told)},
        }

    def restore(self, scalars: Mapping[str, float]) -> None:
        super().restore(scalars)
        workers, me = self.replica.grid.dp.size, self.replica.grid.dp.rank
        # This is true if the checkpoint has as many workers as this run.
        if [_skipped_by(worker) in scalars for worker in (workers - 1, workers)] == [
            True,
            False,
        ]:
            self._skipped = int(scalars[_skipped_by(me)])

    def kept(self) -> list[StateBuffer]:
        """Return the average, each worker's own parameters, and each worker's optimizer state.

        Another layout starts all workers from the average.
        """
        self.sync_parameters()
        average, *state = super().kept()
        own = StateBuffer("own_parameters", self._own, average.pieces, "bound", like=average.name)
        return [average, own, *(buffer._replace(kind="mean") for buffer in state)]


def _skipped_by(worker: int) -> str:
    return f"skipped_updates.{worker}"
