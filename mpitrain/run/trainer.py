"""The trainer: the distributed training step, logits and evaluation of a list of units."""

from __future__ import annotations  # help() prints signatures as they are written here.

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpitrain.collectives.engine.arithmetic import arithmetic_of
from mpitrain.config import Config, Run
from mpitrain.config.faults import delay_s, delays
from mpitrain.data import Source, positions_of, read_rows, without_ends
from mpitrain.errors import DataError, MpitrainError, TrainingError, on_every_rank
from mpitrain.layers.base import Documents, Loss, Unit
from mpitrain.layers.chunked_logits import ChunkedLogits, computed, sliced
from mpitrain.layers.flat import Storage
from mpitrain.ops.int8_rows import Coded
from mpitrain.optim import check_groups, learning_rate
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.modes import replication_for
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.records import StepInput, StepResult
from mpitrain.parallel.tensor.layer_factory import (
    LayerFactory,
    check_documents,
    check_rates,
    layers_for,
    loss_for,
)
from mpitrain.pipeline.async_pipeline import pipeline_for
from mpitrain.pipeline.chunks import Chunks, cut_in_chunks
from mpitrain.pipeline.decoder import Decoder, can_decode
from mpitrain.pipeline.pipeline import own
from mpitrain.regions import Piece, moved, overlap, within
from mpitrain.run.checkpoint.digests import digests, gradients
from mpitrain.run.counting import StepCounts
from mpitrain.run.indices import Indices
from mpitrain.run.inference import Reader
from mpitrain.run.resolve import Resolved, resolve
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
        The loss function. None: softmax cross-entropy.

    Attributes
    ----------
    units : list of Unit
        The units on this rank; with layout.pp above 1 those of its pipeline stage.
    storage : Storage
        The offset of each tensor in the flat buffers.
    replication : Replication
        The mode of data parallelism.
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
        config: Config | Resolved,
        loss: Loss | None = None,
    ):
        # Activations and FLOPs of a step on this rank, as `build` counts them beforehand.
        self.counted = StepCounts()
        # Folder and digests of the initial parameters, if `build` read them from run.init_from.
        self.begun_from: dict[str, Any] = {}
        self.resolved = resolved = (
            config if isinstance(config, Resolved) else resolve(transport, config)
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
            self._build(units, loss)
        except MpitrainError as error:
            if error.agreed:
                self.grid.close()
                endpoint.close()
            raise
        # This line comes last, because `close` would fail for a half-built trainer.
        transport.tenants.add(self.close)

    def _build(
        self, units: Sequence[Unit] | Callable[[LayerFactory], Sequence[Unit]], loss: Loss | None
    ) -> None:
        """Make the units, their storage, the replication and the pipeline; collective."""
        resolved, grid = self.resolved, self.grid
        ops, memory, stage_of = resolved.device.ops, self.config.memory, resolved.plan.stage_of
        self._layers = layers = layers_for(ops, grid.tp, self.config.layout)
        layers.memory, layers.seed = memory, self.config.run.seed
        layers.itemsize = resolved.device.itemsize(self.config.precision.stored)

        def assigned() -> Chunks:
            config = self.config
            cut = cut_in_chunks(
                units,
                layers,
                stage_of,
                config.pipeline.partition,
                config.model.freeze,
                config.lora,
            )
            check_rates(layers, config.model)
            check_documents(layers, config.data)
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

        cut = on_all_ranks(self.transport, assigned)
        model, chunks, tied = cut
        self._decoded: tuple[Sequence[Sequence[Unit]], LayerFactory] = (chunks, layers)
        if layers.rows.partial:
            # A single new token has no rows to divide, so text is generated with whole rows.
            layout = self.config.layout.model_copy(update={"sequence_parallel": False})
            whole = layers_for(ops, grid.tp, layout)
            whole.memory = memory
            freeze = self.config.model.freeze
            again = cut_in_chunks(units, whole, stage_of, self.config.pipeline.partition, freeze)
            self._decoded = again.chunks, whole
        self.parameter_count, self.frozen_count = parameter_count(model), frozen_count(model)
        grid.place_model(stage_of, tied)
        if tied:
            on_all_ranks(self.transport, grid.check)
        own_chunks = [chunks[chunk] for chunk in own(stage_of, grid.coords.pp)]
        self.units = [unit for chunk in own_chunks for unit in chunk]
        firsts = [0, *accumulate(map(len, own_chunks))] if len(chunks) > 1 else []
        self._loss = loss_for(layers, loss)
        self.storage = Storage(self.units, self.config.precision.stored, resolved.axes.dp)
        self.replication = replication_for(
            ReplicationContext(
                self.config,
                grid,
                self.storage,
                resolved.wire,
                resolved.device,
                self.arena,
                self._loss,
                [range(first, end) for first, end in pairwise(firsts)],
                cut.first(self.units),
            )
        )
        if self.config.run.inject:
            from mpitrain.run.injection import failing

            self.replication = failing(
                self.replication, self.config.run.inject, self.transport, self.backend
            )
        micro_batches = self.config.batch.micro_batches
        dtype = resolved.device.half or self.storage.dtype
        self.pipe = pipeline_for(self.config.pipeline.schedule)(
            resolved.plan,
            chunks,
            grid.pp.transport,
            self.replication,
            self.arena,
            dtype,
            layers.now,
        )
        self._indices = Indices(self.transport, getattr(model[0].layer, "vocab", 0), loss is None)
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
        del self.pipe, self.replication  # They own arrays in windows.
        self.grid.close()
        self._own.close()
        self._own = None

    @property
    def parameters(self) -> np.ndarray:
        """The flat buffer of this rank's trained parameters, 1-D; its shard with replication.zero
        3.
        """
        return self.replication.parameters

    @property
    def gradients(self) -> np.ndarray:
        """The flat gradient buffer of this rank, 1-D.

        After a step it holds the sum over replicas, before clipping, if it is not sharded.
        """
        return self.replication.gradient_buffer

    def tensors(self) -> dict[str, np.ndarray]:
        """Copy this rank's parameters, by full name, to host memory; call `sync_parameters` before.

        In half precision these are the rounded parameters, not the float32 masters.
        """
        arrays = {}
        for index, unit in enumerate(self.units):
            weights = self.replication.open(index, 0)
            for parameter in unit.layer.parameters():
                tensor: Any = weights
                for chunk in parameter.name.split("."):
                    tensor = tensor[chunk]
                arrays[unit.full_name(parameter)] = (
                    Coded(*map(self.backend.to_host, tensor)).numbers()
                    if parameter.coded
                    else self.backend.to_host(tensor).copy()
                )
            self.replication.close(index, 0)
        return {entry.name: arrays[entry.name] for entry in self.storage.tensors}

    def share(self) -> range:
        """Return the rows of the global batch that this rank computes: a range within batch.size.

        It is empty on a parameter server.
        """
        return self.replication.share(self.config.batch.size)

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
            (rows, T). A parameter server passes 0 rows.
        targets : ndarray
            The classes of these rows: (rows,) or (rows, T) integers. A target of -100 does not
            count, as PyTorch's `ignore_index`. With data.attend=document, -101 ends a document.
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
        where = f"step {index + 1}"
        targets, starts = self._cut(targets)
        inputs = self._indices.tokens(inputs, where)
        self._indices.rows(inputs, self.share(), where)
        targets = self._indices.targets(targets, inputs.shape, self._logits_shape, where)
        rows, micro_batches = len(inputs), self.config.batch.micro_batches
        predictions = math.prod(targets.shape[1:])
        scales = [self.replication.scale(predictions, micro) for micro in range(micro_batches)]
        shares = [share(rows, micro, micro_batches) for micro in range(micro_batches)]
        ignored = [self._indices.ignored(targets[part.start : part.stop]) for part in shares]

        def of(micro: int, array: np.ndarray) -> Any:
            """Return the rows of a micro-batch, in the memory of the backend."""
            return self.placed(array[shares[micro].start : shares[micro].stop])

        def loss(micro: int, logits: Any) -> Any:
            span = self._recorder.compute(self._loss_name, micro=micro)
            right = of(micro, targets).reshape(-1)
            value, gradient = self.replication.loss(
                logits.reshape(len(right), -1), right, scales[micro]
            )
            # Arrays without dims are copied on the device. For others CuPy would compile a kernel.
            self._loss_sums[micro, ...] = value.reshape(()) if hasattr(value, "reshape") else value
            self._recorder.end(span)
            return gradient.reshape(logits.shape)

        self.arena.rewind()
        self.replication.begin(index)
        self.replication.ignore(ignored, predictions)
        if rows:  # A parameter server has no rows.
            self._straggle(index)
            start, documents = self.share().start, self._documents(starts)
            self.pipe.train(
                [
                    (
                        *(index, start + part.start, len(part), True),
                        documents and documents.of(part),
                    )
                    for part in shares
                ],
                [(len(part), *inputs.shape[1:]) for part in shares],
                lambda micro: of(micro, inputs),
                loss,
            )
        lr = learning_rate(self.config.optimizer, index, self.config.run.steps)
        reports = self.grid.reports_loss
        outcome = self.replication.finish(
            StepInput(
                index,
                self._loss_sums if reports else (),
                lr,
                bool(stop_requested and stop_requested()),
                scales,
                sum(ignored) if reports else 0,
                self.replication.targets(predictions, 0),
            )
        )
        every = self.config.memory.release_every
        if every and (index + 1) % every == 0:
            self.arena.release()
        return outcome

    def spoilt_ranks(self) -> list[int]:
        """Return the ranks whose own loss was not finite in the last step; collective."""
        own = bool(np.isfinite(self.backend.to_host(self._loss_sums)).all())
        return [rank for rank, fine in enumerate(self.transport.gather_text(own)) if not fine]

    def _cut(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the targets without the ends of documents, and the documents' first tokens.

        These are None unless data.attend is document.
        """
        is_cut = self.config.data.attend == "document" and targets.ndim == 2
        return without_ends(targets) if is_cut else (targets, None)

    def _documents(self, starts: np.ndarray | None) -> Documents | None:
        """Return the documents of some rows, in the memory of the backend.    starts: (B, T)"""
        if starts is None:
            return None
        return Documents(self.placed(starts), self.placed(positions_of(starts)))

    def sync_parameters(self) -> None:
        """Finish all operations in flight, and make the parameters current on all ranks."""
        self.pipe.drain()
        self.replication.sync_parameters()

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
        logits = self._asked(inputs)
        return (
            None if logits is None else self._layers.whole(computed(logits, self.arena), self.arena)
        )

    def _asked(self, inputs: np.ndarray, starts: np.ndarray | None = None) -> Any:
        """Return the logits, with only the columns of this tensor-parallel rank.

        If sequence parallelism cannot divide the rows, the inputs are padded with zeros. The
        padding comes after all rows or to the right of them. The causal mask hides it.
        """
        inputs = self._indices.tokens(inputs, "an input")
        filled = np.zeros(self._layers.rows.filled(inputs.shape), inputs.dtype)
        filled[tuple(map(slice, inputs.shape))] = inputs
        if starts is not None:
            # Padding to the right belongs to the last document.
            more = [(0, most - own) for most, own in zip(filled.shape, inputs.shape, strict=True)]
            starts = np.maximum.accumulate(np.pad(starts, more), axis=1)
        documents = self._documents(starts)
        logits = self.pipe.ask(filled.shape, lambda: self.placed(filled), documents)
        if logits is None:
            return None
        lengths = inputs.shape[: logits.ndim - 1]
        if isinstance(logits, ChunkedLogits):
            return logits.cut(lengths, self.arena)
        return logits[tuple(map(slice, lengths))]

    def placed(self, rows: np.ndarray) -> Any:
        """Copy rows to the device; features are rounded where activations are stored in 16 bits."""
        half = self.resolved.device.half
        return self.backend.from_host(
            rows.astype(half) if half and rows.dtype.kind == "f" else rows, self.arena
        )

    def reader(self, sequences: int, room: int) -> Reader:
        """Return a reader of `sequences` windows, of at most `room` tokens each; collective."""
        chunks, layers = self._decoded
        decoder = None
        if can_decode(chunks):
            decoder = Decoder(
                self.resolved.plan.stage_of,
                chunks,
                self.grid.pp.transport,
                self.replication,
                self.arena,
                self.resolved.device.half or self.storage.dtype,
                layers.now,
                self.placed,
                sequences,
                room,
            )
        return Reader(decoder, self._asked, self._row)

    def _row(self, logits: Any, token: int) -> np.ndarray:
        """Return whole rows of logits, (rows, classes) float64 in host memory, of one token each.

        logits  this rank's columns, (rows, T, columns)
        """
        rows = computed(logits, self.arena)[:, token]
        whole = self._layers.whole(rows, self.arena)
        return np.asarray(self.backend.to_host(whole), np.float64)

    def _logits_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole logits for an input of this shape, without padding rows."""
        *rows, columns = self.pipe.output_shape(self._layers.rows.filled(shape))
        return *map(min, rows, shape), self._layers.columns(columns)

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
            Mean loss in nats per prediction that counts, and accuracy from 0 to 1. None after a
            stop.

        Raises
        ------
        DataError
            On every rank, if no target of these rows counts.
        """
        # On each rank a batch has at most the rows of a micro-batch of training. All ranks compute
        # the same number of batches. A rank without rows computes one row that does not count.
        self.sync_parameters()
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
            *sums, stop = self.replication.total(
                *(measured if does_count else (0.0, 0, 0)), is_asked
            )
            if stop:
                return None
            totals += sums
        loss, right, count = totals.tolist()
        if not count:
            raise on_every_rank(
                DataError(
                    f"An evaluation needs a target that counts, but {rows} of {source.held_out} held-out rows have none.",
                    "Raise run.eval_rows, name other held-out data, or leave the evaluation out with run.eval_every=-1.",
                )
            )
        return loss / count, right / count

    def row_losses(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the summed loss of each row, (rows,) float64, on ranks that report it; collective."""
        targets = self._indices.targets(targets, inputs.shape, self._logits_shape, "a batch")
        flat = self.backend.from_host(targets).reshape(-1)
        losses, length = np.zeros(len(inputs)), inputs.shape[1]
        logits = self._asked(inputs)
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

    def _losses(self, source: Source, rows: Sequence[int]) -> tuple[float, int, int]:
        """Return summed loss, correct predictions and predictions that count, of held-out rows."""
        inputs, targets = read_rows(
            self.config.data.source, source, len(rows), lambda: source.held_out_rows(rows)
        )
        targets, starts = self._cut(targets)
        targets = self._indices.targets(
            targets, inputs.shape, self._logits_shape, "a held-out batch"
        )
        counted = targets.size - self._indices.ignored(targets)
        flat = self.backend.from_host(targets).reshape(-1)
        logits = self._asked(inputs, starts)
        if logits is None:
            return 0.0, 0, 0
        total, right = 0.0, 0
        for place, some in sliced(logits, self.arena):
            right += int(self._loss.correct(some, flat[place], self.arena))
            total += float(self._loss.value(some, flat[place], self.arena))
        return total, right, counted


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


def evaluated_rows(run: Run, source: Source) -> int:
    """Return the number of held-out rows in an evaluation."""
    return min(source.held_out, run.eval_rows or source.held_out)


def diverged() -> TrainingError:
    """Return the error that every rank raises for logits that are not finite."""
    return on_every_rank(
        TrainingError(
            "The model's output is not finite: its training has diverged.",
            "Train again with a lower optimizer.lr.",
        )
    )


def state_digests(trainer: Trainer) -> dict[str, str]:
    """Return {buffer/tensor: digest} of this rank's state and summed gradients; collective."""
    trainer.sync_parameters()
    kept = [*gradients(trainer.replication.reducer.summed), *trainer.replication.kept()]
    return digests(trainer.storage, kept, trainer.backend)


def replicas_equal(trainer: Trainer) -> bool:
    """Return whether every replicated tensor has the same bits on all its ranks; collective.

    Parameters
    ----------
    trainer : Trainer
        The trainer; it is settled first.

    Returns
    -------
    bool
        The same on every rank.
    """
    trainer.sync_parameters()
    grid = trainer.grid
    parameters, *others = [k for k in trainer.replication.kept() if k.name == "parameters"]
    flat = trainer.backend.to_host(parameters.array)
    equal = _same_bits(grid.dp.transport, parameters.pieces, flat)
    for frozen in others:
        equal &= _same_bits(grid.dp.transport, frozen.pieces, trainer.backend.to_host(frozen.array))
    for name, holders in sorted(grid.holders.items()):
        for span in trainer.storage.spans:
            if span.holders == name:
                own = list(within(parameters.pieces, span.start, span.stop))
                equal &= _same_bits(holders.transport, own, flat, span.start)
    if grid.axes.servers:
        served = trainer.transport.gather_text(parameters.pieces)[-grid.axes.servers :]
        # A worker's buffer is not sharded. So a piece [start, stop) of the flat parameter buffer
        # is at offset `start` of the worker's array.
        whole = [Piece(start, stop, start) for pieces in served for start, stop, _ in pieces]
        equal &= _same_bits(trainer.transport, parameters.pieces if grid.is_server else whole, flat)
    return all(trainer.transport.gather_text(equal))


def _same_bits(
    transport: Transport, pieces: Sequence[Piece], array: np.ndarray, origin: int = 0
) -> bool:
    """Return whether equal pieces have equal bits on all ranks; collective.

    pieces  the elements of the flat buffer, and their offsets in `array`
    origin  subtracted from `start` and `stop` of each piece before ranks compare them
    """
    held = [
        (
            start - origin,
            stop - origin,
            hashlib.sha256(array[offset : offset + stop - start].tobytes()).hexdigest(),
        )
        for start, stop, offset in pieces
    ]
    distinct = {tuple(entry) for entries in transport.gather_text(held) for entry in entries}
    return len(distinct) == len({(start, stop) for start, stop, _ in distinct})
