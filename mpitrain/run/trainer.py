"""The trainer: the distributed training step of a list of units."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.collectives.engine.arithmetic import arithmetic_of
from mpitrain.config import Config
from mpitrain.config.faults import delay_s, delays
from mpitrain.data import IGNORED, Source
from mpitrain.errors import MpitrainError
from mpitrain.layers.base import Loss, Unit
from mpitrain.layers.flat import Storage
from mpitrain.layers.plain import LOSSES
from mpitrain.ops.int8_rows import Coded
from mpitrain.optim import check_groups, learning_rate
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.modes import class_of
from mpitrain.parallel.replica import StepResult, weight_of
from mpitrain.parallel.tensor.layer_factory import (
    LayerFactory,
    check_used,
    layers_for,
    loss_for,
    settings_of,
)
from mpitrain.pipeline.async_pipeline import pipeline_for
from mpitrain.pipeline.partition import Chunks, cut_in_chunks
from mpitrain.run.inference import Indices, Inference, Reader
from mpitrain.run.job import FILES, Job, agree_on
from mpitrain.run.memory import StepCounts
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device import over_device


class Trainer:
    """A trainer: a list of units with their training state, on a mesh of ranks.

    In PyTorch, DDP or FSDP, a pipeline and an optimizer share these tasks.

    Parameters
    ----------
    transport : Transport
        The transport that connects all ranks. The trainer splits its own from it.
    units : sequence of Unit, or callable
        The whole model: the same list on every rank. A callable receives a layer factory, a
        `Plain` that divides layers over the ranks of layout.tp, and returns the list.
    config : Config
        The configuration, from `parse`.
    loss : Loss, optional
        The loss function. None: that of model.loss.
    opened : callable, optional
        Returns the job with what its data determine. It is called on each rank before `units`, and
        an error of one rank is raised on all.

    Attributes
    ----------
    units : list of Unit
        The units on this rank; with layout.pp above 1 those of its pipeline stage.
    storage : Storage
        The offset of each tensor in the flat buffers.
    replica : Replica
        The replica on this rank, of the mode of data parallelism.
    grid : Grid
        The device mesh: this rank's coordinates, and a group of ranks along each axis.

    Raises
    ------
    ConfigError
        On every rank, if the configuration, the ranks and the units do not fit together.

    Notes
    -----
    Construction is collective, and so are all methods except `share` and `placed`.
    """

    def __init__(
        self,
        transport: Transport,
        units: Sequence[Unit] | Callable[[LayerFactory], Sequence[Unit]],
        config: Config | Job,
        loss: Loss | None = None,
        opened: Callable[[], Job] | None = None,
    ):
        # Activations and FLOPs of a step on this rank, as `build` counts them beforehand.
        self.counted = StepCounts()
        # Bytes of snapshots and copies in host memory, which `check_copies` counts.
        self.snapshot_bytes = 0
        # Folder and digests of the initial parameters, if `build` read them from run.init_from.
        self.begun_from: dict[str, Any] = {}
        self.resolved = resolved = (
            config if isinstance(config, Job) else agree_on(transport, lambda: config)
        )
        self.config = resolved.config
        self.backend, self.arena = resolved.device.backend, resolved.device.arena()
        endpoint = transport.split(0)
        assert endpoint is not None
        self._own: Transport | None = endpoint
        if self.config.replication.progress_thread == "no":
            endpoint.admits_threads = False
        self.transport = over_device(endpoint, self.backend, self.config.device.cuda_aware)
        self.grid = Grid(
            self.transport,
            resolved.axes,
            self.config.replication.algorithm,
            resolved.tuning,
            arithmetic_of(resolved.device),
            arena=self.arena,
            tp_algorithm=self.config.layout.algorithm,
        )
        try:
            self._build(units, loss, opened)
        except MpitrainError as error:
            if error.agreed:
                self.grid.close()
                endpoint.close()
            raise
        # This line comes last, because `close` would fail for a half-built trainer.
        transport.tenants.add(self.close)

    def _build(
        self,
        units: Sequence[Unit] | Callable[[LayerFactory], Sequence[Unit]],
        loss: Loss | None,
        opened: Callable[[], Job] | None,
    ) -> None:
        """Make the units, their storage, the replica and the pipeline; collective."""
        resolved, grid = self.resolved, self.grid
        ops, stage_of = resolved.device.ops, resolved.plan.stage_of
        settings = settings_of(self.config, resolved.device)
        self._layers = layers = layers_for(ops, grid.tp, self.config.layout, grid.cp, **settings)

        def assigned() -> Chunks:
            if opened:
                self.resolved = opened()
                self.config = self.resolved.config
                layers.keys = self.config.model
            config = self.config
            cut = cut_in_chunks(
                units, layers, stage_of, config.pipeline.partition, config.model.freeze, config.lora
            )
            check_used(layers, config)
            check_groups(
                config.optimizer,
                [
                    unit.full_name(parameter)
                    for unit in cut.model
                    for parameter in unit.layer.parameters()
                ],
            )
            grid.check()
            return cut

        cut = on_all_ranks(self.transport, assigned, FILES, lambda cut: self.resolved.facts)
        model, chunks, tied = cut
        decoded: tuple[Sequence[Sequence[Unit]], LayerFactory] = (chunks, layers)
        if layers.rows.partial or layers.context:
            # A single new token cannot be divided, so text is generated with whole rows.
            layout = self.config.layout.model_copy(update={"sequence_parallel": False})
            whole = layers_for(ops, grid.tp, layout, **settings)
            freeze = self.config.model.freeze
            again = cut_in_chunks(units, whole, stage_of, self.config.pipeline.partition, freeze)
            decoded = again.chunks, whole
        self.parameter_count, self.frozen_count = parameter_count(model), frozen_count(model)
        grid.place_model(stage_of, tied)
        if tied:
            on_all_ranks(self.transport, grid.check)
        self.units, numbers = cut.of_stage(stage_of, grid.coords.pp)
        self._loss = loss_for(layers, loss)
        self.storage = Storage(self.units, self.config.precision.stored, resolved.axes.copies)
        config, kind = self.config, class_of(self.config, grid)
        if config.run.inject:
            from mpitrain.run.injection import failing

            kind = failing(kind, config.run.inject, self.transport, self.backend)
        self.replica = kind(
            grid,
            self.storage,
            resolved.device,
            self.arena,
            self._loss,
            settings=config.replication,
            optimizer=config.optimizer,
            batch=config.batch,
            run=config.run,
            wire=resolved.wire,
            compute=config.precision.compute,
            source=config.data.source,
            dense_steps=config.dense_steps,
            next_pause=config.next_pause,
            chunks=numbers,
            first=cut.first(self.units),
        )
        micro_batches = self.config.batch.micro_batches
        dtype = resolved.device.half or self.storage.dtype
        self.pipe = pipeline_for(self.config.pipeline.schedule)(
            resolved.plan, chunks, grid.pp.transport, self.replica, self.arena, dtype, layers.now
        )
        takes = LOSSES[self.config.model.loss].takes if loss is None else None
        vocabulary, stored = getattr(model[0].layer, "vocab", 0), self.storage.dtype
        self._indices = Indices(self.transport, vocabulary, takes, stored)
        self.inference = Inference(
            resolved,
            grid,
            layers,
            self._loss,
            self.pipe,
            self.replica,
            self._indices,
            decoded,
            self.arena,
            self.storage.dtype,
        )
        self._recorder = recorder = self.transport.recorder
        recorder.computes_on(self.backend.mark)
        self._loss_name, self._delay_name = recorder.name("the loss"), recorder.name("run.delay")
        # The summed loss of each micro-batch. The host reads them at the end of a step.
        self._loss_sums = self.backend.zeros(micro_batches, np.float64)

    def close(self) -> None:
        """Free the communicators and windows of this trainer, which cannot be used afterwards.

        Closing the transport of the constructor does the same.
        """
        if self._own is None:
            return
        self.sync_parameters()  # No operation may be in flight.
        del self.pipe, self.replica, self.inference  # They own arrays in windows.
        self.grid.close()
        self._own.close()
        self._own = None

    @property
    def parameters(self) -> np.ndarray:
        """The flat buffer of this rank's trained parameters, 1-D; with ZeRO 3 its shard."""
        return self.replica.parameters

    @property
    def gradients(self) -> np.ndarray:
        """The flat gradient buffer of this rank, 1-D.

        After a step it holds the sum over replicas, before clipping, if it is not sharded.
        """
        return self.replica.gradient_buffer

    def tensors(self) -> dict[str, np.ndarray]:
        """Copy this rank's parameters, by full name, to host memory; call `sync_parameters` before.

        In half precision these are the rounded parameters, not the float32 masters.
        """
        arrays = {}
        for index, unit in enumerate(self.units):
            weights = self.replica.open(index, 0)
            for parameter in unit.layer.parameters():
                tensor: Any = weights
                for key in parameter.name.split("."):
                    tensor = tensor[key]
                arrays[unit.full_name(parameter)] = (
                    Coded(*map(self.backend.to_host, tensor)).numbers()
                    if parameter.coded
                    else self.backend.to_host(tensor).copy()
                )
        return {entry.name: arrays[entry.name] for entry in self.storage.tensors}

    def share(self) -> range:
        """Return the rows of the global batch that this rank computes: a range within batch.size.

        It is empty on a parameter server.
        """
        return self.replica.share(self.config.batch.size)

    def step(
        self,
        index: int,
        inputs: np.ndarray,
        targets: np.ndarray,
        stop_requested: Callable[[], bool] | None = None,
    ) -> StepResult:
        """Run one training step: forward, backward, reduction of gradients and update; collective.

        Parameters
        ----------
        index : int
            Number of the step, from 0.
        inputs : ndarray
            This rank's rows of the global batch, see `share`: (rows, features), or tokens
            (rows, T).
        targets : ndarray
            The classes of these rows: (rows,) or (rows, T) integers. -100 does not count,
            as PyTorch's `ignore_index`. With data.attend=document, -101 ends a document. Else floats
            (rows, ...); NaN does not count.
        stop_requested : callable, optional
            Returns whether this rank wants all ranks to stop after this step. It is called after
            the backward pass, so a signal during the step counts in the same step.

        Returns
        -------
        StepResult
            `loss` is the mean in nats over the targets of the global batch that count, `grad_norm` the 2-norm of the
            gradient before clipping, `stop` whether any rank wants to stop. These are equal on
            all ranks in synchronous training; `comm_s` and `ended` are this rank's own.

        Raises
        ------
        DataError
            If a token or a target is out of range, if there are more rows than this rank's share, or
            if a prediction has no target. With several ranks the job is aborted.
        """
        where, indices = f"step {index + 1}", self._indices
        inputs, targets, *marks = self.inference.cut(inputs, targets)
        inputs = indices.tokens(inputs, where)
        indices.rows(inputs, self.share(), where)
        targets = indices.targets(targets, inputs.shape, self.inference.logits_shape, where)
        given, micro_batches = inputs.shape, self.config.batch.micro_batches
        rows = len(inputs)
        inputs, targets = self.inference.own(inputs, 0), self.inference.own(targets, IGNORED)
        # A row has the tokens of all ranks that divide it, padding included.
        count, *lengths = inputs.shape
        shape = count, *(length * self._layers.now.tokens.ranks for length in lengths)
        predictions = math.prod(targets.shape[1:]) * self._layers.now.tokens.ranks
        replica, of_update = self.replica, self.replica.of_update
        weights = [weight_of(of_update(micro) * predictions) for micro in range(micro_batches)]
        loss_scale = replica.skips.scale.value
        shares = [share(rows, micro, micro_batches) for micro in range(micro_batches)]
        ignored = [indices.ignored(targets[part.start : part.stop]) for part in shares]

        def rows_of(micro: int) -> Any:
            """Return the inputs of a micro-batch, in the memory of the backend."""
            return self.inference.placed(inputs[shares[micro].start : shares[micro].stop])

        def loss(micro: int, logits: Any) -> Any:
            span = self._recorder.compute(self._loss_name, micro=micro)
            part = targets[shares[micro].start : shares[micro].stop]
            right = self.backend.from_host(part, self.arena).reshape(-1)
            value, gradient = replica.loss(
                logits.reshape(len(right), -1), right, weights[micro] * loss_scale
            )
            # Arrays without dims are copied on the device. For others CuPy would compile a kernel.
            self._loss_sums[micro, ...] = value.reshape(()) if hasattr(value, "reshape") else value
            self._recorder.end(span)
            return gradient.reshape(logits.shape)

        self.arena.rewind()
        replica.begin(index, ignored, predictions)
        if rows:  # A parameter server has no rows.
            self._straggle(index)
            start, places = self.share().start, self.inference.places(shape, given, *marks)
            self.pipe.train(
                [
                    (*(index, start + part.start, len(part), True), places and places.of(part))
                    for part in shares
                ],
                [(len(part), *inputs.shape[1:]) for part in shares],
                rows_of,
                loss,
            )
        reports = self.grid.reports_loss
        result = replica.finish(
            index,
            self._loss_sums if reports else (),
            weights,
            learning_rate(self.config.optimizer, index, self.config.run.steps),
            bool(stop_requested and stop_requested()),
            sum(ignored) if reports else 0,
            of_update(0) * predictions,
        )
        every = self.config.memory.release_every
        if every and (index + 1) % every == 0:
            self.arena.release()
        return result

    def loss_sums(self) -> np.ndarray:
        """Return this rank's summed loss of each micro-batch of the last step: (micro-batches,)."""
        return self.backend.to_host(self._loss_sums)

    def sync_parameters(self) -> None:
        """Finish all operations in flight, and make the parameters current on all ranks."""
        self.pipe.drain()
        self.replica.sync()

    def _straggle(self, step: int) -> None:
        run, coords = self.config.run, self.grid.coords
        if run.delay:
            span = self._recorder.compute(self._delay_name)
            time.sleep(
                delay_s(
                    delays(run.delay),
                    self.transport.rank,
                    run.seed,
                    step,
                    self.share().start,
                    coords.tp,
                    coords.pp,
                )
            )
            self._recorder.end(span)

    def logits(self, inputs: np.ndarray) -> np.ndarray | None:
        """Compute the logits of some rows; collective over all ranks but parameter servers.

        Parameters
        ----------
        inputs : ndarray
            (rows, features), or tokens (rows, T). All ranks of a replica pass the same rows.

        Returns
        -------
        array or None
            (rows, classes) or (rows, T, classes) on the device; None except on the last stage.
        """
        return self.inference.logits(inputs)

    def placed(self, rows: np.ndarray) -> Any:
        """Copy rows to the device; features are rounded where activations are stored in 16 bits."""
        return self.inference.placed(rows)

    def evaluate(
        self, source: Source, stop_requested: Callable[[], bool] | None = None
    ) -> tuple[float, float] | None:
        """Evaluate the model on run.eval_rows held-out rows, spread evenly; collective.

        Parameters
        ----------
        source : Source
            The data source with the held-out rows.
        stop_requested : callable, optional
            Called before every batch. If it returns True on any rank, all ranks stop evaluating.

        Returns
        -------
        (float, float) or None
            Mean loss per target that counts, and accuracy from 0 to 1 (NaN without classes). None
            after a stop.

        Raises
        ------
        DataError
            On every rank, if no target of these rows counts.
        """
        self.sync_parameters()
        return self.inference.evaluate(source, stop_requested)

    def row_losses(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the summed loss of each row, (rows,) float64, on ranks that report it; collective."""
        return self.inference.row_losses(inputs, targets)

    def reader(self, sequences: int, room: int) -> Reader:
        """Return a reader of `sequences` windows, of at most `room` tokens each; collective."""
        return self.inference.reader(sequences, room)


def parameter_count(units: Sequence[Unit]) -> int:
    """Count the parameters of a model; a tied tensor counts once."""
    return sum(
        math.prod(p.shape)
        for unit in units
        for p in unit.layer.parameters()
        if p.name not in unit.tied
    )


def frozen_count(units: Sequence[Unit]) -> int:
    """Count the frozen parameters among those of `parameter_count`."""
    return sum(
        math.prod(p.shape)
        for unit in units
        for p in unit.layer.parameters()
        if p.name not in unit.tied and p.name in unit.frozen
    )
