"""The end of a step in which all ranks agree on a result, and update the pieces that they own."""

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.layers.flat import Piece
from mpitrain.optim import Optimizer
from mpitrain.parallel.replication.components import (
    ControlMessage,
    GradientReducer,
    ParameterStore,
    StepEnd,
)
from mpitrain.parallel.replication.loss_scale import SkippedUpdates
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.records import StepInput, StepResult, clipping, outcome_of
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.trace.ring_buffer import UPDATE


class OptimizerStep:
    """One update of a store's parameters from a reducer's gradients.

    All modes update here. A rule that needs sums over a whole tensor reduces them in `apply`.

    skips  of this rank, or agreed by all ranks
    """

    def __init__(
        self,
        replica: ReplicationContext,
        store: ParameterStore,
        reducer: GradientReducer,
        skips: SkippedUpdates | None = None,
    ):
        config = replica.config
        self._replica, self._store, self._reducer = replica, store, reducer
        self.skips = skips or SkippedUpdates(config.precision.compute)
        self.optimizer = Optimizer(
            config.optimizer,
            replica.storage,
            list(reducer.summed),
            replica.device.ops,
            replica.device.backend,
            replica.arena,
        )
        self.recorder = recorder = replica.grid.transport.recorder
        self._gradients_name = recorder.name("the sums of gradients", reducer.members)
        self._norm_name = recorder.name("the norm")
        self.update_name = recorder.name("the parameters")
        self._exchanged_s = 0.0  # `begin` copies tp.exchanged_s to here
        # Padding may contain non-finite numbers: blocks of wire formats include it.
        self._is_spoiled = False

    def begin(self, step: int) -> None:
        """Begin to sum the gradients of an update in step `step`."""
        self._exchanged_s = self._replica.grid.tp.exchanged_s
        if self._is_spoiled:
            self._reducer.buffer.fill(0)
            self._is_spoiled = False
        self._reducer.begin(step)

    def sum(self, mine: StepInput) -> tuple[float, float, int]:
        """Wait for the summed gradients; the exposed time includes that of activations.

        returns  this rank's loss, its squares and its non-finite elements for the norm
        """
        exposed, grid = self._replica.exposed, self._replica.grid
        wait = self.recorder.wait(self._gradients_name)
        with exposed:
            self._reducer.wait()
        self.recorder.go_on(wait)
        exposed.seconds += grid.tp.exchanged_s - self._exchanged_s
        span = self.recorder.compute(self._norm_name)
        found = self._replica.gradient_stats(mine, self._reducer.squared)
        self.recorder.end(span)
        return found

    def factor(self, norm: float) -> float:
        """Return the factor that clips a gradient of this norm and divides by the loss scale."""
        return clipping(self._replica.config.optimizer.clip, norm) / self.skips.scale.value

    def apply(self, scale: float, lr: float, number: int) -> None:
        """Update this rank's pieces from `scale` times their gradients.

        number  of earlier updates
        """
        gradients, delayed = self._reducer.summed, self._reducer.delayed

        def update(piece: Piece, parameters: Any, mirror: Any) -> None:
            self.optimizer.update(
                piece, parameters, gradients[piece], scale, lr, number, delayed, mirror
            )

        self._store.update(update)

    def finish(self, mine: StepInput, agree: Callable[..., Sequence[float]]) -> StepResult:
        """Sum, agree, and update if the result is finite.

        agree  (loss, squares, non-finite elements, stop requests) -> their sums over the ranks
               that update alike
        """
        exposed = self._replica.exposed
        loss, squares, nonfinite = self.sum(mine)
        with exposed:
            totals = agree(loss, squares / self.skips.scale.value**2, nonfinite, mine.stop)
        outcome = outcome_of(mine, totals)
        if outcome.updated:
            span = self.recorder.compute(self.update_name, UPDATE)
            number = mine.number - self.skips.number
            self.apply(self.factor(outcome.grad_norm), mine.lr, number)
            self.recorder.end(span)
        self._is_spoiled = not outcome.updated
        return self.skips.conclude(outcome._replace(comm_s=exposed.take()))

    def state(self) -> list[StateBuffer]:
        """Return the optimizer's buffers of the pieces that this rank updates, if there are any."""
        state: dict[str, Any] = self.optimizer.state if self.optimizer.pieces else {}
        return [StateBuffer(name, array, self.optimizer.pieces) for name, array in state.items()]


class AgreeAndUpdate(StepEnd):
    """All ranks agree on loss, norm and stop requests; then each rank updates its own pieces."""

    def __init__(
        self, replica: ReplicationContext, store: ParameterStore, reducer: GradientReducer
    ):
        self.replica, self._store = replica, store
        self._step = OptimizerStep(replica, store, reducer)
        self.skips, self.optimizer = self._step.skips, self._step.optimizer
        with replica.grid.transport.recorder.called("the control message"):
            self.control = ControlMessage(replica.grid.world)

    def begin(self, step: int) -> None:
        self._step.begin(step)

    def finish(self, mine: StepInput) -> StepResult:
        self._store.sync()
        return self._step.finish(mine, self.control.total)

    def sync(self) -> None:
        self._store.sync()

    def state(self) -> list[StateBuffer]:
        return self._step.state()
