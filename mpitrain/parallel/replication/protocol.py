"""The Replication face: the calls by which the training step drives a mode of replication.

`ReplicationContext` is the argument from which every mode is constructed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain.collectives.engine.arithmetic import Wire
from mpitrain.config import Config
from mpitrain.data import Source, read_rows
from mpitrain.layers.base import Gradients, Loss, Weights
from mpitrain.layers.flat import Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.copies import copy_rows
from mpitrain.ops.device import Device
from mpitrain.parallel.grid import Grid
from mpitrain.parallel.replication.components import Rows, StepEnd
from mpitrain.parallel.replication.records import ExposedTime, StepInput, StepResult
from mpitrain.parallel.replication.state import StateBuffer


@dataclass(frozen=True)
class ReplicationContext:
    """The constructor argument of every replication mode: the context of one rank.

    storage  layout of this rank's tensors in a flat buffer
    wire     wire format of the gradients
    loss     the loss of this rank's logits
    chunks   with several model chunks on this stage: the units of each chunk, numbered as in
             `storage`; otherwise empty
    first    the first unit of this rank with a backward: all units before are frozen
    exposed  the time that this rank has been blocked on communication in the current step
    """

    config: Config
    grid: Grid
    storage: Storage
    wire: Wire
    device: Device
    arena: Arena
    loss: Loss
    chunks: Sequence[range] = ()
    first: int = 0
    exposed: ExposedTime = field(default_factory=ExposedTime)

    @property
    def computed(self) -> np.dtype:
        """The dtype in which layers compute, and the dtype of activations."""
        return self.device.half or self.storage.dtype

    def gradient_stats(
        self, step_input: StepInput | None, gradients: Sequence[np.ndarray]
    ) -> tuple[float, float, int]:
        """Return a step's loss, the sum of squares of the arrays, and their number of non-finite
        elements.

        All these numbers are copied from the device in one read, the only blocking read of a step.
        The host combines them with the numbers of other ranks. A skipped update therefore launches
        no kernel.

        step_input  None if the step has no loss on this rank
        gradients   flat arrays on the device, of any lengths
        """
        ops, losses = self.device.ops, step_input.losses if step_input else ()
        if not len(losses) and not len(gradients):
            return 0.0, 0.0, 0
        numbers = self.arena.take((len(losses) + 2 * len(gradients),), np.float64)
        if len(losses):
            copy_rows(numbers[: len(losses)], losses)
        for place, gradient in enumerate(gradients):
            at = len(losses) + 2 * place
            numbers[at : at + 2] = ops.gradient_facts(gradient, self.arena)
        read = self.device.backend.to_host(numbers).tolist()
        loss = step_input._replace(losses=read[: len(losses)]).loss if step_input else 0.0
        return loss, sum(read[len(losses) :: 2]), int(sum(read[len(losses) + 1 :: 2]))


class Replication:
    """A mode of replication (as DDP, or FSDP's runtime): a store, a reducer, a step end and rows.

    The training step calls it unit by unit. A mode is a choice of four components; their protocols
    are in `components.py`. Every method delegates to one of them. In all methods `unit` is an index
    in this rank's list of units, `micro` the index of a micro-batch, `step` the number of a step
    from 0, and `predictions` the number of targets in one row.

    Parameters
    ----------
    replica : ReplicationContext
        The context of this rank.
    step_end : StepEnd
        Ends a step: agrees on its result and updates the parameters. Its `store` has the
        parameters, its `reducer` sums the gradients.
    rows : Rows
        Chooses the rows of this rank, and computes their loss.

    Notes
    -----
    The calls of one step, in their order:

        begin, ignore
        each micro-batch, unit by unit   forward: open, close, poll
        at the end of the model          loss
        each micro-batch, unit by unit   backward: open, gradients, close, gradient_ready, poll
        finish
    """

    def __init__(self, replica: ReplicationContext, step_end: StepEnd, rows: Rows):
        self.replica, self.step_end, self.rows = replica, step_end, rows
        self.store, self.reducer = step_end.store, step_end.reducer

    @property
    def parameters(self) -> Any:
        """The flat trained parameters of this rank, 1-D; if sharded, this rank's pieces
        concatenated.
        """
        return self.store.parameters

    @property
    def gradient_buffer(self) -> Any:
        """The flat gradients of this rank, 1-D; if sharded, this rank's pieces concatenated."""
        return self.reducer.buffer

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        """Yield the steps that this rank must compute until step `step` is finished.

        Parameters
        ----------
        step : int
            The step that the caller waits for.
        stop_requested : callable
            () -> bool: whether this rank has received a request to stop. A rank that computes rows
            passes the same fact to `finish`.

        Returns
        -------
        iterator of int
            The caller computes each step before it takes the next one. By default only `step`.
            Asynchronous workers may compute several other steps first; servers compute none.
        """
        return self.step_end.steps(step, stop_requested)

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        """Return the result of a step that `steps` has finished.

        Parameters
        ----------
        own : StepResult or None
            The result of `finish` for the last step that this rank computed; None if it computed
            none.
        """
        return self.step_end.outcome(step, own)

    def share(self, rows: int) -> range:
        """Return this rank's rows of a batch of `rows` over all replicas.

        Returns
        -------
        range
            By default the dp-th of nearly equal runs; empty on a server.
        """
        return self.rows.share(rows)

    def batch(
        self, source: Source, step: int, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of this rank's rows of a step's global batch, on the host.

        The first dim is the row; `before` is as in `Source.batch`. ConfigError if the source of a
        plugin gives anything else.
        """
        config = self.replica.config
        return read_rows(
            config.data.source,
            source,
            len(self.share(config.batch.size)),
            lambda: self.rows.batch(source, step, before),
        )

    def scale(self, predictions: int, micro: int) -> float:
        """Return the factor of a micro-batch's summed loss, which makes the gradient that of a
        mean.

        No other code divides by the number of rows: the reductions of gradients are plain sums.

        Returns
        -------
        float
            1 / (rows of one update x predictions). By default the rows are the global batch.
        """
        return 1 / self.targets(predictions, micro)

    def targets(self, predictions: int, micro: int) -> int:
        """Return the number of targets of one update over all ranks, ignored targets included.

        Returns
        -------
        int
            Rows of the update of micro-batch `micro` x predictions. A rank alone cannot exclude the
            ignored targets of other ranks.
        """
        return self.rows.of_update(micro) * predictions

    def begin(self, step: int) -> None:
        """Begin a step: mark all gradients as empty."""
        self.step_end.begin(step)

    def ignore(self, targets: Sequence[int], predictions: int) -> None:
        """Report this rank's ignored targets of the step, by micro-batch.

        Modes with one update for each step ignore the call: `finish` reports the same number.
        """

    def open(self, unit: int, micro: int) -> Weights:
        """Return views of a unit's parameters, valid until `close`.

        Parameters that are being gathered are waited for.
        """
        return self.store.open(unit, micro)

    def close(self, unit: int, micro: int) -> None:
        """End the use of a unit's parameters that `open` returned."""

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
        return self.rows.loss(logits, targets, scale * self.loss_scale)

    @property
    def loss_scale(self) -> float:
        """The factor of all gradients until the update divides by it."""
        return self.step_end.skips.scale.value

    def gradients(self, unit: int, micro: int) -> Gradients:
        """Return the buffers in which a unit's gradients are summed.

        Returns
        -------
        Gradients
            Nested as the weights of `open`; each leaf is a `Gradient`.
        """
        return self.reducer.gradients(unit)

    def gradient_ready(self, unit: int, is_last: bool) -> None:
        """Report a unit's gradient of one micro-batch as complete on this rank (as DDP's autograd
        hook).

        `is_last` marks the unit's last micro-batch of the step. Its reduction may then start, and
        tensors that no layer has written in this step are set to zero. Otherwise the gradient of
        the previous step would remain there.
        """
        self.reducer.ready(unit, is_last)

    def poll(self) -> None:
        """Progress the non-blocking communication; called between layers."""
        self.store.poll()
        self.reducer.poll()

    def total(self, *numbers: float) -> list[float]:
        """Return the sum over all ranks of each of up to five numbers; collective."""
        return self.step_end.control.total(*numbers)

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
        return self.step_end.finish(mine)

    def sync_parameters(self) -> None:
        """Make the parameters current on all ranks; collective.

        Evaluations, checkpoints and comparisons of replicas call this first.
        """
        self.step_end.sync()

    def kept(self) -> list[StateBuffer]:
        """Return the state that checkpoints save. The caller must call `sync_parameters` first.

        Loading a checkpoint writes into the arrays of this list.
        """
        return [*self.store.state(), *self.step_end.state(), *self.reducer.state()]

    def scalars(self) -> dict[str, float]:
        """Return the numbers by name that checkpoints save, equal on all ranks; collective."""
        return self.step_end.skips.scalars()

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Continue from a checkpoint with these `scalars`; collective.

        The arrays that `kept` lists have already been filled.
        """
        self.step_end.skips.restore(scalars)
        if self.store.frozen:
            self.store.frozen.loaded()
        self.store.loaded()

    def held(self) -> int:
        """Return this rank's bytes of parameters, gradients, optimizer state and reduction scratch.

        They include buffers of running reductions, but no activations. The caller must call
        `sync_parameters` first.
        """
        return sum(self.held_by_kind().values())

    def held_by_kind(self) -> dict[str, int]:
        """Return the bytes of `held` as `parameters`, `gradients`, optimizer `state`, `scratch`."""
        counted = set[int]()

        def nbytes(arrays: Iterable[Any]) -> int:
            new = {id(array): array.nbytes for array in arrays if id(array) not in counted}
            counted.update(new)
            return sum(new.values())

        return {
            "parameters": nbytes(self.store.arrays),
            "gradients": nbytes(self.reducer.arrays),
            "state": nbytes(buffer.array for buffer in self.kept()),
            "scratch": self.replica.grid.scratch_bytes,
        }
