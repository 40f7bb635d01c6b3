"""The end of a step in which all ranks agree on a result, and update the pieces that they own."""

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.optim import Optimizer
from mpitrain.parallel.replication.components import (
    GradientReducer,
    ParameterStore,
    StepEnd,
)
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.records import (
    ControlMessage,
    SkippedUpdates,
    StepInput,
    StepResult,
    outcome_of,
)
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.regions import Piece
from mpitrain.trace.recorder import UPDATE


class AgreeAndUpdate(StepEnd):
    """All ranks agree on loss, norm and stop requests; then each rank updates its own pieces.

    The other step ends inherit from it and replace public methods. All modes call the optimizer in
    `apply`. A rule that needs sums over a whole tensor reduces them there.

    optimizer  of the pieces in `reducer.summed`; perhaps none
    """

    def __init__(
        self, replica: ReplicationContext, store: ParameterStore, reducer: GradientReducer
    ):
        """Allocate the optimizer state, and bind the control message; collective."""
        config, device = replica.config, replica.device
        self.replica, self.store, self.reducer = replica, store, reducer
        self.skips = SkippedUpdates(config.precision.compute)
        self.optimizer = Optimizer(
            config.optimizer,
            replica.storage,
            list(reducer.summed),
            device.ops,
            device.backend,
            replica.arena,
            replica.grid.fact_sums(*store.sharing, replica.grid.tp),
        )
        self.recorder = recorder = replica.grid.transport.recorder
        with recorder.called("the control message"):
            self.control = ControlMessage(replica.grid.world)
        self._gradients_name = recorder.name("the sums of gradients", reducer.members)
        self._norm_name = recorder.name("the norm")
        self.update_name = recorder.name("the parameters")
        self._exchanged_s = 0.0  # `begin` copies tp.exchanged_s to here
        # Padding may contain non-finite numbers: blocks of wire formats include it.
        self._is_spoiled = False

    def begin(self, step: int) -> None:
        self._exchanged_s = self.replica.grid.tp.exchanged_s
        if self._is_spoiled:
            self.reducer.buffer.fill(0)
            self._is_spoiled = False
        self.reducer.begin(step)

    def sum(self, step_input: StepInput) -> tuple[float, float, int]:
        """Wait for the summed gradients; the exposed time includes that of activations.

        returns  this rank's loss, its squares and its non-finite elements for the norm
        """
        exposed = self.replica.exposed
        wait = self.recorder.wait(self._gradients_name)
        with exposed:
            self.reducer.wait()
        self.recorder.go_on(wait)
        exposed.seconds += self.replica.grid.tp.exchanged_s - self._exchanged_s
        span = self.recorder.compute(self._norm_name)
        stats = self.replica.gradient_stats(step_input, self.reducer.squared)
        self.recorder.end(span)
        return stats

    def divided(self, step_input: StepInput, totals: Sequence[float]) -> tuple[StepResult, float]:
        """Return `outcome_of` these totals."""
        return outcome_of(step_input, totals, self.skips, self.replica.config.optimizer.clip)

    def apply(self, scale: float, lr: float, number: int) -> None:
        """Update this rank's pieces from `scale` times their gradients.

        number  of earlier updates
        """
        gradients, delayed = self.reducer.summed, self.reducer.delayed
        owned = self.store.owned
        self.optimizer.sum_facts(
            lambda piece: (owned[piece], gradients[piece]), scale, lr, number, delayed
        )

        def update(piece: Piece, parameters: Any, mirror: Any) -> None:
            self.optimizer.update(
                piece, parameters, gradients[piece], scale, lr, number, delayed, mirror
            )

        self.store.update(update)

    def update(self, step_input: StepInput, agree: Callable[..., Sequence[float]]) -> StepResult:
        """Sum, agree, and update if the result is finite.

        agree  (loss, squares, non-finite elements, stop requests, ignored targets) -> their sums
               over the ranks that update alike
        """
        exposed, skips = self.replica.exposed, self.skips
        loss, squares, nonfinite = self.sum(step_input)
        with exposed:
            totals = agree(loss, squares, nonfinite, step_input.stop, step_input.ignored)
        outcome, factor = self.divided(step_input, totals)
        if outcome.updated:
            span = self.recorder.compute(self.update_name, UPDATE)
            self.apply(factor, step_input.lr, step_input.number - skips.number)
            self.recorder.end(span)
        self._is_spoiled = not outcome.updated
        return skips.conclude(outcome._replace(comm_s=exposed.take()))

    def finish(self, mine: StepInput) -> StepResult:
        self.store.sync()
        return self.update(mine, self.control.total)

    def sync(self) -> None:
        self.store.sync()

    def state(self) -> list[StateBuffer]:
        """Return the optimizer's buffers of the pieces that this rank updates, if there are any."""
        arrays = self.optimizer.arrays() if self.optimizer.pieces else []
        return [StateBuffer.of(array) for array in arrays]
