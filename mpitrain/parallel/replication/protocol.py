"""The Replication protocol: how data-parallel replicas of one model stay equal.

`ReplicationContext` is the argument from which every mode is constructed. `Replication` lists the
calls of the training step.
"""

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
    """The constructor argument of every replication mode: the context of one rank.

    storage  layout of this rank's tensors in a flat buffer
    wire     wire format of the gradients
    loss     the loss of this rank's logits
    parts    with several model chunks on this stage: the units of each chunk, numbered as in
             `storage`; otherwise empty
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
        """The dtype in which layers compute, and the dtype of activations."""
        return self.device.half or self.storage.dtype

    def gradient_stats(
        self, mine: StepInput | None, gradients: Sequence[np.ndarray]
    ) -> tuple[float, float, int]:
        """Return a step's loss, the sum of squares of the arrays, and their number of non-finite
        elements.

        All these numbers are copied from the device in one read, the only blocking read of a step.
        The host combines them with the numbers of other ranks. A skipped update therefore launches
        no kernel.

        mine       None if the step has no loss on this rank
        gradients  flat arrays on the device, of any lengths
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
    """The strategy that keeps replicas equal (as DDP's reducer, or FSDP's runtime).

    The training step calls it unit by unit. Units are numbered within this rank's list. The
    argument `part` is the index of the micro-batch. The default methods serve one replica, with all
    parameters on each of its ranks; they never update it.

    Attributes
    ----------
    parameters, gradient_buffer : array
        Flat, 1-D. A mode that shards them stores this rank's pieces concatenated.
    mirror : array or None
        Flat. In half precision: the rounded parameters, with which layers compute. None in full
        precision, and in ZeRO stage 3, where units are gathered before each use.

    Notes
    -----
    The calls of one step, in their order:

        begin
        each micro-batch, unit by unit   forward: open, close, poll
        at the end of the model          loss
        each micro-batch, unit by unit   backward: open, gradients, close, gradient_ready, poll
        finish
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
        """Reset the loss scale and the number of skipped updates."""
        self._scale = loss_scale_for(self.replica.config.precision.compute)
        self._skipped = 0  # AdamW's step count leaves skipped updates out

    def _hold_parameters(self) -> None:
        """Allocate and initialise the parameters, and their mirror in half precision."""
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
        """The flat buffer with which layers compute: the mirror if there is one."""
        return self.parameters if self.mirror is None else self.mirror

    def _write_mirror(self) -> None:
        """Round the parameters into the mirror, if there is one; collective."""
        if self.replica.device.mirror and self.mirror is not None:
            self.replica.device.mirror(self.parameters, self.mirror, self.replica.arena)

    def _hold_gradients(self) -> None:
        """Allocate the gradients."""
        storage = self.replica.storage
        self.gradient_buffer = self.replica.grid.world.transport.allocate(
            storage.length, storage.dtype
        )
        self._gradients, self._leaves = storage.gradients(self.gradient_buffer)

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        """Yield the steps that this rank must compute until step `step` is finished.

        Parameters
        ----------
        step : int
            The step that the caller waits for, from 0.
        stop_requested : callable
            () -> bool: whether this rank has received a request to stop. A rank that computes rows
            passes the same fact to `finish`.

        Returns
        -------
        iterator of int
            The caller computes each step before it takes the next one. By default `step` alone.
            Asynchronous workers may compute several other steps first; servers compute none.
        """
        return iter((step,))

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        """Return the result of a finished step.

        Parameters
        ----------
        step : int
            A step that `steps` has finished.
        own : StepResult or None
            The result of `finish` for the last step that this rank computed; None if it computed
            none.

        Returns
        -------
        StepResult
        """
        assert own is not None
        return own

    def share(self, rows: int) -> range:
        """Return this rank's rows of a batch.

        Parameters
        ----------
        rows : int
            Rows of the batch, over all replicas.

        Returns
        -------
        range
            By default the dp-th of nearly equal runs; empty on a server.
        """
        grid = self.replica.grid
        return share(rows, grid.place.dp, grid.axes.dp)

    def batch(
        self, source: Source, step: int, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's rows of the global batch of a step.

        Parameters
        ----------
        source : Source
            The training data.
        step : int
            From 0.
        before : int, optional
            As in `Source.batch`: the number of samples in the batches of all earlier steps.

        Returns
        -------
        inputs, targets : ndarray
            On the host; the first dim is the row.
        """
        config = self.replica.config
        return source.batch(
            config.run.seed, step, config.batch.size, self.share(config.batch.size), before
        )

    def scale(self, predictions: int, part: int) -> float:
        """Return the factor of a micro-batch's summed loss, which makes the gradient that of a
        mean.

        No other code divides by the number of rows: the reductions of gradients are plain sums.

        Parameters
        ----------
        predictions : int
            Targets in one row.
        part : int
            The micro-batch of this loss.

        Returns
        -------
        float
            1 / (rows of one update x predictions). By default the rows are the global batch.
        """
        return 1 / (self.replica.config.batch.size * predictions)

    def begin(self, step: int) -> None:
        """Begin a step: mark all gradients as empty.

        Parameters
        ----------
        step : int
            From 0.
        """
        for leaf in chain.from_iterable(self._leaves):
            leaf.filled = False

    def open(self, unit: int, part: int) -> Weights:
        """Return a unit's parameters, and wait for them if they are still being gathered.

        Parameters
        ----------
        unit : int
            Index in this rank's list.
        part : int
            The micro-batch.

        Returns
        -------
        Weights
            Views, valid until `close`.
        """
        return self._weights[unit]

    def close(self, unit: int, part: int) -> None:
        """End the use of a unit's parameters that `open` returned.

        Parameters
        ----------
        unit, part : int
            As in `open`.
        """

    def loss(self, logits: np.ndarray, targets: np.ndarray, scale: float) -> tuple[Any, np.ndarray]:
        """Return a micro-batch's summed loss and the gradient of its logits, as `Loss.gradient`.

        Parameters
        ----------
        logits : array
            (N, V). The gradient may overwrite them.
        targets : array
            (N,)
        scale : float
            The result of `Replication.scale`. The current loss scale multiplies the gradient as
            well.

        Returns
        -------
        loss : number or array without dims
            The sum over the N rows, unscaled.
        gradient : array
            (N, V)
        """
        return self.replica.loss.gradient(
            logits, targets, scale * self.loss_scale, self.replica.arena
        )

    @property
    def loss_scale(self) -> float:
        """The factor of all gradients until the update divides by it."""
        return self._scale.value

    def _concluded(self, outcome: StepResult) -> StepResult:
        """Count a skipped update, and adapt the loss scale. All ranks must pass the same result."""
        self._skipped += not outcome.updated
        return self._scale.after(outcome)

    def gradients(self, unit: int, part: int) -> Gradients:
        """Return the buffers in which a unit's gradients are summed.

        Parameters
        ----------
        unit : int
            Index in this rank's list.
        part : int
            The micro-batch.

        Returns
        -------
        Gradients
            Nested as the weights of `open`; each leaf is a `Gradient`.
        """
        return self._gradients[unit]

    def gradient_ready(self, unit: int, is_last: bool) -> None:
        """Report a unit's gradient of one micro-batch as complete on this rank (as DDP's autograd
        hook).

        Parameters
        ----------
        unit : int
            Index in this rank's list.
        is_last : bool
            Whether this is the unit's last micro-batch of the step. Its reduction may then start.

        Notes
        -----
        With the last micro-batch, tensors that no layer has written in this step are set to zero.
        Otherwise the gradient of the previous step would remain there.
        """
        if is_last:
            for leaf in self._leaves[unit]:
                if not leaf.filled:
                    leaf.array.fill(0)

    def poll(self) -> None:
        """Progress the non-blocking communication; called between layers."""

    def total(self, *numbers: float) -> list[float]:
        """Sum four numbers over all ranks, in one small all-reduce; collective.

        Parameters
        ----------
        *numbers : float
            Four numbers of this rank.

        Returns
        -------
        list of float
            The four sums, equal on all ranks.
        """
        return list(numbers)

    def finish(self, mine: StepInput) -> StepResult:
        """Wait for the gradients, agree on the result, and update the parameters; collective.

        Parameters
        ----------
        mine : StepInput
            This rank's losses, learning rate and stop request.

        Returns
        -------
        StepResult
            Equal on all ranks, but for the fields that `StepResult` excepts.
        """
        return StepResult(mine.loss, 0.0, 0, mine.lr, False, mine.stop)

    def sync_parameters(self) -> None:
        """Make the parameters current on all ranks; collective.

        Evaluations, checkpoints and comparisons of replicas call this first.
        """

    def kept(self) -> list[StateBuffer]:
        """Return the state that checkpoints save. The caller must call `sync_parameters` first.

        Returns
        -------
        list of StateBuffer
            Loading a checkpoint writes into their arrays.
        """
        return [StateBuffer("parameters", self.parameters, self._places())]

    def _places(self) -> Sequence[Piece]:
        """Return the pieces of the flat buffer in `parameters`, with their offsets there."""
        return [Piece(0, self.replica.storage.length, 0)]

    def scalars(self) -> dict[str, float]:
        """Return the numbers that checkpoints save besides arrays; collective.

        Returns
        -------
        dict
            {name: number}, equal on all ranks.
        """
        return {"skipped_updates": self._skipped, **self._scale.numbers()}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Continue from a checkpoint; collective.

        The arrays that `kept` lists have already been filled.

        Parameters
        ----------
        scalars : mapping
            The result of `scalars` when the checkpoint was saved.
        """
        self._skipped = int(scalars.get("skipped_updates", 0))
        self._scale.restore(scalars)
        self._write_mirror()

    def held(self) -> int:
        """Return this rank's bytes of parameters, gradients, optimizer state and reduction scratch.

        Returns
        -------
        int
            Includes buffers of running reductions, but no activations. The caller must call
            `sync_parameters` first.
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
