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
from mpitrain.data import IGNORED, Source, read_rows, without_ends, without_padding
from mpitrain.errors import ConfigError, DataError, MpitrainError
from mpitrain.layers.base import Loss, Now, Places, Unit
from mpitrain.layers.chunked_logits import ChunkedLogits, computed, sliced
from mpitrain.layers.experts import Loads
from mpitrain.layers.flat import Storage
from mpitrain.layers.plain import LOSSES
from mpitrain.optim import check_groups, learning_rate
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.modes import class_of
from mpitrain.parallel.replica import StepResult, weight_of
from mpitrain.parallel.tensor.context import all_tokens
from mpitrain.parallel.tensor.layer_factory import (
    LayerFactory,
    check_used,
    layers_for,
    loss_for,
    settings_of,
)
from mpitrain.pipeline.async_pipeline import pipeline_for
from mpitrain.pipeline.partition import Chunks, cut_in_chunks
from mpitrain.regions import moved, overlap
from mpitrain.run.inference import Indices, Reader, Shape, evaluated_rows, places_of
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

        def assigned() -> Chunks:
            if opened:
                self.resolved = opened()
                self.config = self.resolved.config
            config = self.config
            self._layers = layers = layers_for(
                ops, grid.tp, config.layout, grid.cp, ep=grid.ep, **settings_of(config)
            )
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
        (model, chunks, tied), layers = cut, self._layers
        self._decoded = chunks
        if layers.rows.partial or layers.context:
            # A single new token cannot be divided, so text is generated with whole rows.
            layout = self.config.layout.model_copy(update={"sequence_parallel": False})
            whole = layers_for(ops, grid.tp, layout, ep=grid.ep, **settings_of(self.config))
            config = self.config
            again = cut_in_chunks(
                units, whole, stage_of, config.pipeline.partition, config.model.freeze, config.lora
            )
            self._decoded = again.chunks
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
        if layers.loads:
            self._expert_loads = np.zeros(1 + self.config.model.experts)
            self._sum_of_loads = grid.world.bind(self._expert_loads)
        micro_batches = self.config.batch.micro_batches
        dtype = resolved.device.half or self.storage.dtype
        self.pipe = pipeline_for(self.config.pipeline.schedule)(
            resolved.plan, chunks, grid.pp.transport, self.replica, self.arena, dtype
        )
        takes = LOSSES[self.config.model.loss].takes if loss is None else None
        vocabulary, stored = getattr(model[0].layer, "vocab", 0), self.storage.dtype
        self._indices = Indices(self.transport, vocabulary, takes, stored)
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
        del self.pipe, self.replica  # They own arrays in windows.
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
                arrays[unit.full_name(parameter)] = self.backend.to_host(tensor).copy()
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
        inputs, targets, *marks = self._cut(inputs, targets)
        inputs = indices.tokens(inputs, where)
        indices.rows(inputs, self.share(), where)
        targets = indices.targets(targets, inputs.shape, self._logits_shape, where)
        unpadded, micro_batches = inputs.shape, self.config.batch.micro_batches
        rows = len(inputs)
        inputs, targets = self._own_tokens(inputs, 0), self._own_tokens(targets, IGNORED)
        # A row has the tokens of all ranks that divide it, padding included.
        count, *lengths = inputs.shape
        shape = count, *(length * self._layers.tokens.ranks for length in lengths)
        predictions = math.prod(targets.shape[1:]) * self._layers.tokens.ranks
        replica, of_update = self.replica, self.replica.of_update
        weights = [weight_of(of_update(micro) * predictions) for micro in range(micro_batches)]
        loss_scale = replica.skips.scale.value
        shares = [share(rows, micro, micro_batches) for micro in range(micro_batches)]
        ignored = [indices.ignored(targets[part.start : part.stop]) for part in shares]

        def rows_of(micro: int) -> Any:
            """Return the inputs of a micro-batch, in the memory of the backend."""
            return self.placed(inputs[shares[micro].start : shares[micro].stop])

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
            start, places = self.share().start, self._places(shape, unpadded, *marks)
            self.pipe.train(
                [
                    Now(
                        index,
                        start + part.start,
                        len(part),
                        True,
                        places and places.of(part),
                        weight=weight * loss_scale,
                    )
                    for part, weight in zip(shares, weights, strict=True)
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
        if self._layers.loads:
            result = result._replace(extras={**result.extras, **self._loads(self._layers.loads)})
        every = self.config.memory.release_every
        if every and (index + 1) % every == 0:
            self.arena.release()
        return result

    def _loads(self, loads: Loads) -> dict[str, Any]:
        """Return the tokens of each expert in a step, over all layers and ranks; collective."""
        numbers = self._expert_loads
        numbers[:-1], numbers[-1] = loads.tokens, loads.dropped
        loads.tokens[:], loads.dropped = 0, 0.0
        self._sum_of_loads.run()
        tokens = numbers[:-1]
        return {
            "expert_tokens": [int(count) for count in tokens],
            "dropped": numbers[-1] / max(1.0, tokens.sum()),
            "imbalance": tokens.max() / max(1.0, tokens.mean()),
        }

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
        logits = self.infer(*self._texts(inputs))
        return (
            None if logits is None else self._layers.whole(computed(logits, self.arena), self.arena)
        )

    def placed(self, rows: np.ndarray) -> Any:
        """Copy rows to the device; features are rounded where activations are stored in 16 bits."""
        half = self.resolved.device.half
        return self.backend.from_host(
            rows.astype(half) if half and rows.dtype.kind == "f" else rows, self.arena
        )

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
        # On each rank a batch has at most the rows of a micro-batch of training. All ranks compute
        # the same number of batches. A rank without rows computes one row that does not count.
        rows, replicas = evaluated_rows(self.config.run, source), self.grid.axes.dp
        together = replicas * max(
            1, self.config.batch.size // (replicas * self.config.batch.micro_batches)
        )
        totals = np.zeros(3)
        for start in range(0, rows, together):
            own_rows = share(min(together, rows - start), self.grid.coords.dp, replicas)
            is_asked = stop_requested is not None and stop_requested()
            numbers = [(start + i) * source.held_out // rows for i in own_rows] or [0]
            measured = (0.0, 0, 0) if self.grid.is_server else self._losses(source, numbers)
            does_count = bool(own_rows) and self.grid.reports_loss
            *sums, stop = self.replica.total(*(measured if does_count else (0.0, 0, 0)), is_asked)
            if stop:
                return None
            totals += sums
        loss, right, count = totals.tolist()
        if not count:
            raise DataError(
                f"An evaluation needs a target that counts, but {rows} of {source.held_out} held-out rows have none.",
                "Raise run.eval_rows, name other held-out data, or leave the evaluation out with run.eval_every=-1.",
            ).on_every_rank()
        has_classes = self._indices.takes in ("classes", None)
        return loss / count, right / count if has_classes else math.nan

    def row_losses(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the summed loss of each row, (rows,) float64, on ranks that report it; collective.

        With layout.cp each of these ranks sums the losses of its tokens.
        """
        self._check_causal(
            "A choice has the probability of its tokens, each after the earlier ones"
        )
        targets = self._indices.targets(targets, inputs.shape, self._logits_shape, "a batch")
        targets = self._own_tokens(targets, IGNORED)
        flat = self.backend.from_host(targets).reshape(-1)
        losses, length = np.zeros(len(inputs)), targets.shape[1]
        logits = self._own_logits(inputs)
        if logits is None:
            return losses
        for place, some in sliced(logits, self.arena):
            first = place.start or 0
            stop = first + len(some)
            # A slice may begin or end within a row.
            for row in range(first // length, -(-stop // length)):
                both = overlap(range(first, stop), range(row * length, (row + 1) * length))
                part = some[moved(both, -first)]
                losses[row] += float(self._loss.value(part, flat[moved(both, 0)], self.arena))
        return losses

    def reader(self, sequences: int, room: int) -> Reader:
        """Return a reader of `sequences` windows, of at most `room` tokens each; collective."""
        from mpitrain.pipeline.decoder import Decoder, can_decode

        self._check_causal("Text is generated token by token")
        chunks = self._decoded
        decoder = None
        if can_decode(chunks):
            decoder = Decoder(
                self.resolved.plan.stage_of,
                chunks,
                self.grid.pp.transport,
                self.replica,
                self.arena,
                self.resolved.device.half or self.storage.dtype,
                self.placed,
                sequences,
                room,
            )
        return Reader(decoder, self.infer, self._row)

    def _cut(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Any, ...]:
        """Return inputs without padding, targets without marks of document ends, `starts`, `types`.

        starts  (B, T) int32, the index in the row where each token's document begins; None unless
                rows are texts or data.attend is document
        types   (B, T) int32, the token types; None unless rows are texts
        """
        if self.config.data.attend == "document" and targets.ndim == 2:
            return inputs, *without_ends(targets), None
        inputs, *marks = self._texts(inputs)
        return inputs, targets, *marks

    def _texts(self, inputs: np.ndarray) -> tuple[Any, ...]:
        """Return inputs without padding, and `starts` and `types` as of `_cut`."""
        if self._indices.vocabulary and inputs.ndim == len(self._logits_shape(inputs.shape)):
            return without_padding(inputs)
        return inputs, None, None

    def _places(
        self,
        shape: Shape,
        unpadded: Shape,
        starts: np.ndarray | None,
        types: np.ndarray | None = None,
    ) -> Places | None:
        """Return the places of the tokens of rows.

        shape, unpadded   of the rows, (B, T), with and without padding
        starts, types  from `_cut`
        """
        if starts is None and shape[1:] != unpadded[1:] and not self._is_causal:
            starts = np.zeros(unpadded, np.int32)
        return places_of(self._layers, shape, starts, self.placed, types)

    def _own_tokens(self, rows: np.ndarray, fill: int) -> np.ndarray:
        """Return this rank's tokens of rows (B, T), or of their targets.

        fill  the value after the ends of rows, if their tokens do not divide among the ranks
        """
        share = self._layers.tokens
        if share.ranks == 1:
            return rows
        missing = self._layers.filled(rows.shape)[1] - rows.shape[1]
        filled = np.pad(rows, ((0, 0), (0, missing)), constant_values=fill)
        return share.cut(filled)

    def infer(
        self, inputs: np.ndarray, starts: np.ndarray | None = None, types: np.ndarray | None = None
    ) -> Any:
        """Return the logits of all tokens, with this tensor-parallel rank's columns.

        None except on the last stage.    starts, types: from `_cut`
        """
        logits = self._own_logits(inputs, starts, types)
        if logits is None or not self._layers.context:
            return logits
        context, share = self._layers.context, self._layers.tokens
        whole = all_tokens(computed(logits, self.arena), context, share, self.arena)
        return whole[:, : inputs.shape[1]]

    def _own_logits(
        self, inputs: np.ndarray, starts: np.ndarray | None = None, types: np.ndarray | None = None
    ) -> Any:
        """Return the logits of this rank's tokens, with this tensor-parallel rank's columns.

        None except on the last stage. If the ranks cannot divide the rows or their tokens, the
        inputs are padded with zeros. The padding comes after all rows or to the right of them. The
        causal mask hides it; without that mask it is a document of its own.
        """
        inputs = self._indices.tokens(inputs, "an input")
        filled = np.zeros(self._layers.filled(inputs.shape), inputs.dtype)
        filled[tuple(map(slice, inputs.shape))] = inputs
        own = self._own_tokens(filled, 0)
        places = self._places(filled.shape, inputs.shape, starts, types)
        logits = self.pipe.infer(own.shape, lambda: self.placed(own), places)
        if logits is None:
            return None
        lengths = self._own_tokens(inputs, 0).shape[: logits.ndim - 1]
        if isinstance(logits, ChunkedLogits):
            return logits.cut(lengths, self.arena)
        return logits[tuple(map(slice, lengths))]

    def _logits_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole logits for an input of this shape, without padding rows."""
        ranks, (count, *lengths) = self._layers.tokens.ranks, self._layers.filled(shape)
        *rows, columns = self.pipe.output_shape((count, *(each // ranks for each in lengths)))
        rows[1:] = [each * ranks for each in rows[1:]]
        return *map(min, rows, shape), self._layers.columns(columns)

    def _losses(self, source: Source, rows: Sequence[int]) -> tuple[float, int, int]:
        """Return of held-out rows the summed loss, and the correct and the counted predictions."""
        inputs, targets = read_rows(
            self.config.data.source, source, len(rows), lambda: source.held_out_rows(rows)
        )
        inputs, targets, *marks = self._cut(inputs, targets)
        targets = self._indices.targets(
            targets, inputs.shape, self._logits_shape, "a held-out batch"
        )
        targets = self._own_tokens(targets, IGNORED)
        counted = targets.size - self._indices.ignored(targets)
        flat = self.backend.from_host(targets).reshape(-1)
        logits = self._own_logits(inputs, *marks)
        if logits is None:
            return 0.0, 0, 0
        total, right = 0.0, 0
        for place, some in sliced(logits, self.arena):
            right += int(self._loss.correct(some, flat[place], self.arena))
            total += float(self._loss.value(some, flat[place], self.arena))
        return total, right, counted

    @property
    def _is_causal(self) -> bool:
        return "attention to later tokens" not in self._layers.made

    def _check_causal(self, why: str) -> None:
        if not self._is_causal:
            raise ConfigError(
                f"{why}, but attention of this model has no causal mask: tokens see later ones.",
                "Use a model with the causal mask.",
            ).on_every_rank()

    def _row(self, logits: Any, token: int) -> np.ndarray:
        """Return the logits at one token of each row, (rows, classes) float64 in host memory."""
        rows = computed(logits, self.arena)[:, token]
        whole = self._layers.whole(rows, self.arena)
        return np.asarray(self.backend.to_host(whole), np.float64)


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
