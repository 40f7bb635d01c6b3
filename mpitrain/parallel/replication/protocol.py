"""The Replication protocol: how replicas of one model stay equal, and the context that every mode is made from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.codecs import Wire
from mpitrain.config import Config
from mpitrain.data import Source
from mpitrain.layers.base import Gradients, Loss, Weights
from mpitrain.layers.flat import Piece, Storage
from mpitrain.machine.arena import Arena
from mpitrain.ops.device import Device
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.replication.loss_scale import LossScale, loss_scale_for
from mpitrain.parallel.replication.records import StepInput, StepResult
from mpitrain.parallel.replication.state import StateBuffer


class ReplicationContext(NamedTuple):
    """One rank's part of a replica: what every mode of replication is made from.

    storage  where its tensors lie in a flat buffer
    wire     in which format gradients travel
    loss     of this rank's logits
    parts    of a model in several parts: the units of each part that lies here, numbered as in `storage`
    """

    config: Config
    grid: Grid
    storage: Storage
    wire: Wire
    device: Device
    arena: Arena
    loss: Loss
    parts: Sequence[range] = ()

    @property
    def computed(self) -> np.dtype:
        """The dtype of what layers compute with, and of activations."""
        return self.device.half or self.storage.dtype

    def facts(
        self, mine: StepInput | None, gradients: Sequence[np.ndarray]
    ) -> tuple[float, float, int]:
        """A step's loss, the sum of these arrays' squares and how many of their elements are not finite.

        What the device knows of all this is read at once. In a step nothing else is, and nobody else waits for it: from this
        and what other ranks say the host knows whether there is an update, and a step that is skipped launches none.
        mine  None for one without a loss
        """
        ops, losses = self.device.ops, mine.losses if mine else ()
        if not len(losses) and not len(gradients):
            return 0.0, 0.0, 0
        found = self.arena.take((len(losses) + 2 * len(gradients),), np.float64)
        if len(losses):
            found[: len(losses)] = losses
        for place, gradient in enumerate(gradients):
            at = len(losses) + 2 * place
            found[at : at + 2] = ops.gradient_facts(gradient, self.arena)
        read = self.device.backend.to_host(found).tolist()
        loss = mine._replace(losses=read[: len(losses)]).loss if mine else 0.0
        return loss, sum(read[len(losses) :: 2]), int(sum(read[len(losses) + 1 :: 2]))


class Replication:
    """What the training step calls, unit by unit; units count within this rank's list, `part` is the micro-batch.

    Every method has a default: one replica whose parameters lie whole on each of its ranks, and which is not trained.

    parameters, gradient_buffer  flat; in a mode that divides them what this rank has of them, one piece behind the other
    mirror                       flat: in half precision the parameters, rounded, which layers compute with; None elsewhere, and
                                 where units are gathered before they are used
    """

    mirror: Any = None

    _scale: LossScale
    _skipped: int

    def __init__(self, replica: ReplicationContext):
        self.replica = replica
        self._count_from_zero()
        self._hold_parameters()
        self._hold_gradients()

    def _count_from_zero(self) -> None:
        """No update was made or skipped, and no gradient was beyond its type."""
        self._scale = loss_scale_for(self.replica.config.precision.compute)
        self._skipped = 0  # updates, which AdamW does not count

    def _hold_parameters(self) -> None:
        """Make room for the parameters, and let them begin."""
        storage = self.replica.storage
        self.parameters = self.replica.grid.world.transport.allocate(storage.length, storage.dtype)
        storage.initialize(
            self.parameters, self.replica.config.run.seed, self.replica.device.backend
        )
        if self.replica.device.mirror:
            self.mirror = self.replica.grid.world.transport.allocate(
                storage.length, self.replica.computed
            )
            self._write_mirror()
        self._weights = storage.weights(self._computed)

    @property
    def _computed(self) -> Any:
        """Flat: what layers compute with."""
        return self.parameters if self.mirror is None else self.mirror

    def _write_mirror(self) -> None:
        """Round the parameters into the mirror, if there is one; collective."""
        if self.replica.device.mirror and self.mirror is not None:
            self.replica.device.mirror(self.parameters, self.mirror, self.replica.arena)

    def _hold_gradients(self) -> None:
        """Make room for the gradients."""
        storage = self.replica.storage
        self.gradient_buffer = self.replica.grid.world.transport.allocate(
            storage.length, storage.dtype
        )
        self._gradients, self._leaves = storage.gradients(self.gradient_buffer)

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        """The steps in which this rank computes rows until step `step` is finished; the next is asked for when one is computed.

        stop_requested  whether this rank is asked to stop; who computes in a step brings it to `finish`
        """
        return iter((step,))

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        """The outcome of a finished step. own: what `finish` made of the last step that this rank computed, if any."""
        assert own is not None
        return own

    def share(self, rows: int) -> range:
        """Which of so many rows of all replicas this rank computes."""
        grid = self.replica.grid
        return share(rows, grid.place.dp, grid.axes.dp)

    def batch(
        self, source: Source, step: int, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and targets of this rank in step `step`, from 0; before: see `Source.batch`."""
        config = self.replica.config
        return source.batch(
            config.run.seed, step, config.batch.size, self.share(config.batch.size), before
        )

    def scale(self, predictions: int, part: int) -> float:
        """What the gradient of a summed loss is multiplied by: the mean over the rows that one update uses is taken here alone.

        predictions  in a row
        part         the micro-batch that the loss is of
        """
        return 1 / (self.replica.config.batch.size * predictions)

    def begin(self, step: int) -> None:
        """Step `step`, from 0, is about to be computed: nobody has written a gradient."""
        for leaf in chain.from_iterable(self._leaves):
            leaf.filled = False

    def open(self, unit: int, part: int) -> Weights:
        """The unit's parameters, about to be used; good until `close`."""
        return self._weights[unit]

    def close(self, unit: int, part: int) -> None:
        """They have been used."""

    def loss(self, logits: np.ndarray, targets: np.ndarray, scale: float) -> tuple[Any, np.ndarray]:
        """As `Loss.gradient`: the summed loss of a micro-batch, and the gradient of scale x that sum; x the loss scale, too."""
        return self.replica.loss.gradient(
            logits, targets, scale * self.loss_scale, self.replica.arena
        )

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by until parameters are updated from them."""
        return self._scale.value

    def _concluded(self, outcome: StepResult) -> StepResult:
        """A step's outcome, known to all ranks alike: whether its update counts, and what becomes of the loss scale."""
        self._skipped += not outcome.updated
        return self._scale.after(outcome)

    def gradients(self, unit: int, part: int) -> Gradients:
        """Where the unit's gradient is summed."""
        return self._gradients[unit]

    def gradient_ready(self, unit: int, is_last: bool) -> None:
        """A micro-batch's gradient of the unit is complete on this rank; with the last one, the step's.

        What nobody wrote in the step has no gradient, and not the one of the step before.
        """
        if is_last:
            for leaf in self._leaves[unit]:
                if not leaf.filled:
                    leaf.array.fill(0)

    def poll(self) -> None:
        """Move communication along; called between layers."""

    def total(self, *numbers: float) -> list[float]:
        """Four numbers summed over all ranks, in one small message; collective."""
        return list(numbers)

    def finish(self, mine: StepInput) -> StepResult:
        """Wait for the gradients, agree on the outcome, update the parameters."""
        return StepResult(mine.loss, 0.0, 0, mine.lr, False, mine.stop)

    def settle(self) -> None:
        """Make the parameters current on all ranks: before evaluations, checkpoints and comparisons. Collective."""

    def kept(self) -> list[StateBuffer]:
        """What checkpoints keep, once settled."""
        return [StateBuffer("parameters", self.parameters, self._places())]

    def _places(self) -> Sequence[Piece]:
        """Which elements of the flat buffer lie where in `parameters`."""
        return [Piece(0, self.replica.storage.length, 0)]

    def scalars(self) -> dict[str, float]:
        """Numbers by name, alike on all ranks, that checkpoints keep; collective."""
        return {"skipped_updates": self._skipped, **self._scale.numbers()}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """What `kept` lists was filled from a checkpoint with these scalars: go on from there. Collective."""
        self._skipped = int(scalars.get("skipped_updates", 0))
        self._scale.restore(scalars)
        self._write_mirror()

    def held(self) -> int:
        """Bytes of parameters, gradients and optimizer state on this rank, once settled, and of the scratch of reductions.

        What is on its way is included; activations are not.
        """
        arrays = [
            self.parameters,
            self._computed,
            self.gradient_buffer,
            *(kept.array for kept in self.kept()),
        ]
        return (
            sum({id(array): array.nbytes for array in arrays}.values())
            + self.replica.grid.scratch_bytes
        )
