"""The training step over a list of units, and what else a trained list of units can do."""

from __future__ import annotations  # so that help() prints signatures as they are written here

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpitrain.collectives.engine.device_arithmetic import arithmetic_of
from mpitrain.config import Config
from mpitrain.config.delays import delay_s, delays
from mpitrain.data import Source
from mpitrain.errors import MpitrainError
from mpitrain.layers.base import Loss, Unit
from mpitrain.layers.flat import Piece, Storage
from mpitrain.optim import learning_rate
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.modes import replication_for
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.records import StepInput, StepResult
from mpitrain.parallel.tensor.layer_factory import LayerFactory, check_units, layers_for
from mpitrain.pipeline.async_pipeline import pipeline_for
from mpitrain.pipeline.partition import assign_units, cut
from mpitrain.pipeline.pipeline import own
from mpitrain.run.checkpoint.regions import within
from mpitrain.run.indices import Indices
from mpitrain.run.resolve import Resolved, resolve
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device.cuda_aware import over_device


class Trainer:
    """A list of units with its parameters, gradients and optimizer state, and the step that trains it.

    Making one is collective, and so are its methods but `share` and `placed`.

    Parameters
    ----------
    transport : Transport
        The ranks.
    units : sequence of Unit, or callable
        The model: the same list on every rank, or what makes it of a set of layers, a `Plain` that splits
        layers over the ranks of layout.tp.
    config : Config
        As `parse` returns it.
    loss : Loss, optional
        None: softmax cross-entropy.

    Attributes
    ----------
    units : list of Unit
        Those on this rank; with layout.pp above 1 some of the model's.
    storage : Storage
        Where each tensor lies in the flat buffers.
    replication, grid, pipe, arena
        The replicas' mode, the mesh of ranks, the pipeline, and the memory of activations.

    Raises
    ------
    ConfigError
        On every rank, if the configuration, the ranks and the units do not fit together.
    """

    def __init__(
        self,
        transport: Transport,
        units: Sequence[Unit] | Callable[[LayerFactory], Sequence[Unit]],
        config: Config | Resolved,
        loss: Loss | None = None,
    ):
        self.resolved = resolved = (
            config if isinstance(config, Resolved) else resolve(transport, config)
        )
        self.config = resolved.config
        self.backend, self.arena = resolved.device.backend, resolved.device.arena()
        mine = transport.split(0)
        assert mine is not None
        self._own: Transport | None = mine
        self.transport = over_device(mine, self.backend, self.config.device.cuda_aware)
        self.grid = Grid(
            self.transport,
            resolved.axes,
            self.config.replication.algorithm,
            resolved.tuning,
            arithmetic_of(resolved.device),
            arena=self.arena,
            tp_algorithm=self.config.layout.algorithm,
            progress_thread=self.config.replication.progress_thread,
        )
        try:
            self._build(units, loss)
        except MpitrainError as error:
            if error.agreed:
                self.grid.close()
                mine.close()
            raise
        transport.tenants.add(
            self.close
        )  # not before: a trainer that could not be made has nothing to settle

    def _build(
        self, units: Sequence[Unit] | Callable[[LayerFactory], Sequence[Unit]], loss: Loss | None
    ) -> None:
        """What stands on the grid."""
        resolved, grid = self.resolved, self.grid
        self._layers = layers = layers_for(resolved.device.ops, grid.tp, self.config.layout)
        model = on_all_ranks(
            self.transport, lambda: list(units(layers) if callable(units) else units)
        )
        on_all_ranks(self.transport, lambda: check_units(model, layers.rows))
        self.parameter_count = parameter_count(model)
        place = resolved.plan.place
        parts, tied = on_all_ranks(
            self.transport,
            lambda: assign_units(
                model, cut(model, len(place), self.config.pipeline.partition), place
            ),
        )
        grid.deal(place, tied)
        on_all_ranks(self.transport, grid.check)
        mine = [parts[part] for part in own(place, grid.place.pp)]
        self.units = [unit for part in mine for unit in part]
        firsts = [0, *accumulate(map(len, mine))] if len(parts) > 1 else []
        self._loss = loss or layers.loss()
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
            )
        )
        micro_batches = self.config.batch.micro_batches
        dtype = resolved.device.half or self.storage.dtype
        self.pipe = pipeline_for(self.config)(
            resolved.plan, parts, grid.pp.transport, self.replication, self.arena, dtype
        )
        self._indices = Indices(self.transport, getattr(model[0].layer, "vocab", 0), loss is None)
        self._recorder = recorder = self.transport.recorder
        recorder.computes_on(self.backend.mark)
        self._loss_name, self._delay_name = recorder.name("the loss"), recorder.name("run.delay")
        self._loss_sums = self.backend.zeros(
            micro_batches, np.float64
        )  # of a step; read at its end, when the device is done

    def close(self) -> None:
        """Free the communicators and windows of this trainer, as closing its transport does; then use it no more."""
        if self._own is None:
            return
        self.settle()  # nothing may be under way
        del self.pipe, self.replication  # and with them the arrays that lie in windows
        self.grid.close()
        self._own.close()
        self._own = None

    @property
    def parameters(self) -> np.ndarray:
        """The flat buffer of this rank, one dim; with replication.zero 3 this rank's pieces of it."""
        return self.replication.parameters

    @property
    def gradients(self) -> np.ndarray:
        """The flat buffer; after a step, where every rank has all of it, the sum over replicas, not clipped."""
        return self.replication.gradient_buffer

    def tensors(self) -> dict[str, np.ndarray]:
        """Copies of this rank's parameters in host memory, by full name; call `settle` before.

        In half precision these are the rounded parameters that layers compute with, not the float32 masters.
        """
        found = {}
        for index, unit in enumerate(self.units):
            weights = self.replication.open(index, 0)
            for parameter in unit.layer.parameters():
                tensor: Any = weights
                for part in parameter.name.split("."):
                    tensor = tensor[part]
                found[unit.full_name(parameter)] = self.backend.to_host(tensor).copy()
            self.replication.close(index, 0)
        return {entry.name: found[entry.name] for entry in self.storage.entries}

    def share(self) -> range:
        """The rows of the global batch of batch.size rows that this rank computes; none on a server."""
        return self.replication.share(self.config.batch.size)

    def step(
        self,
        index: int,
        inputs: np.ndarray,
        targets: np.ndarray,
        stop_requested: Callable[[], bool] | None = None,
    ) -> StepResult:
        """One optimizer step; collective.

        Parameters
        ----------
        index : int
            Number of the step, from 0.
        inputs : ndarray
            This rank's rows (see `share`) of the global batch: (rows, features) or tokens (rows, T). A server has none.
        targets : ndarray
            Their classes: (rows,) or (rows, T), whole numbers.
        stop_requested : callable, optional
            Whether all ranks shall stop after this step. It is called when this rank has computed, so that a request which
            comes meanwhile does not wait for another step.

        Returns
        -------
        Outcome
            The same on every rank; `loss` is the mean in nats, `grad_norm` the 2-norm of the
            gradient before clipping, `stop` whether any rank has asked.

        Raises
        ------
        DataError
            For a token or a target that the model does not have, more rows than this rank's share, or targets that are
            not one for each prediction; one of several ranks ends them all.
        """
        where = f"step {index + 1}"
        inputs = self._indices.tokens(inputs, where)
        self._indices.rows(inputs, self.share(), where)
        targets = self._indices.targets(targets, inputs.shape, self._logits_shape, where)
        rows, micro_batches = len(inputs), self.config.batch.micro_batches
        scales = [
            self.replication.scale(math.prod(targets.shape[1:]), micro)
            for micro in range(micro_batches)
        ]
        shares = [share(rows, micro, micro_batches) for micro in range(micro_batches)]

        def of(micro: int, array: np.ndarray) -> Any:
            """A micro-batch's rows, in this backend's memory."""
            return self.placed(array[shares[micro].start : shares[micro].stop])

        def loss(micro: int, logits: Any) -> Any:
            span = self._recorder.compute(self._loss_name, micro=micro)
            right = of(micro, targets).reshape(-1)
            value, gradient = self.replication.loss(
                logits.reshape(len(right), -1), right, scales[micro]
            )
            self._loss_sums[micro : micro + 1] = (
                value  # copied on the device; an element would be read first
            )
            self._recorder.end(span)
            return gradient.reshape(logits.shape)

        self.arena.rewind()
        self.replication.begin(index)
        if rows:  # a server has none
            self._straggle(index)
            self.pipe.train(
                [(len(mine), *inputs.shape[1:]) for mine in shares],
                lambda micro: of(micro, inputs),
                loss,
            )
        lr = learning_rate(self.config.optimizer, index, self.config.run.steps)
        losses = self._loss_sums if self.grid.speaks else ()
        return self.replication.finish(
            StepInput(index, losses, lr, bool(stop_requested and stop_requested()), scales)
        )

    def settle(self) -> None:
        """Finish what is under way, and make the parameters current on all ranks."""
        self.pipe.drain()
        self.replication.settle()

    def _straggle(self, step: int) -> None:
        """Sleep for as long as run.delay says that the step takes longer here: who computes other rows draws anew."""
        run, here = self.config.run, self.grid.place
        if run.delay:
            span = self._recorder.compute(self._delay_name)
            time.sleep(
                delay_s(
                    delays(run.delay),
                    self.transport.rank,
                    run.seed,
                    step,
                    self.share().start,
                    here.tp,
                    here.pp,
                )
            )
            self._recorder.end(span)

    def logits(self, inputs: np.ndarray) -> np.ndarray | None:
        """The logits of these rows: (rows, [T,] classes), on the device; None except on the last stage.

        All ranks except servers call it. Each replica has rows of its own, the ranks of a replica the same.
        """
        logits = self._asked(inputs)
        return None if logits is None else self._layers.whole(logits, self.arena)

    def _asked(self, inputs: np.ndarray) -> Any:
        """As `logits`, but of these this rank's columns.

        Filled up with tokens where ranks could not divide the rows: of the logits these come after all others, or right of them,
        and no token sees what is right of it.
        """
        inputs = self._indices.tokens(inputs, "an input")
        filled = np.zeros(self._layers.rows.filled(inputs.shape), inputs.dtype)
        filled[tuple(map(slice, inputs.shape))] = inputs
        logits = self.pipe.ask(filled.shape, lambda: self.placed(filled))
        return (
            None if logits is None else logits[tuple(map(slice, inputs.shape[: logits.ndim - 1]))]
        )

    def placed(self, rows: np.ndarray) -> Any:
        """Rows, copied to the device; features are rounded where activations are stored rounded."""
        half = self.resolved.device.half
        return self.backend.from_host(
            rows.astype(half) if half and rows.dtype.kind == "f" else rows, self.arena
        )

    def logits_of(self, inputs: np.ndarray, token: int) -> np.ndarray:
        """The logits of one token of the first row: (classes,) float64 in host memory; valid on the first stage."""
        logits = self._asked(inputs)
        found = np.empty(self._logits_shape(inputs.shape)[-1])
        if logits is not None:
            found[:] = self.backend.to_host(self._layers.whole(logits[0, token], self.arena))
        self.pipe.tell_first(found)
        return found

    def _logits_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the whole logits, for an input of this shape; what it is filled up with does not count."""
        *rows, columns = self.pipe.output_shape(self._layers.rows.filled(shape))
        return *map(min, rows, shape), self._layers.columns(columns)

    def evaluate(
        self, source: Source, stop_requested: Callable[[], bool] | None = None
    ) -> tuple[float, float] | None:
        """Evaluate the model on held-out rows: run.eval_rows of them, spread evenly.

        Parameters
        ----------
        source : Source
            Where the rows come from.
        stop_requested : callable, optional
            Called before every batch; a True on any rank ends the evaluation on all.

        Returns
        -------
        (float, float) or None
            Mean loss in nats per prediction, and the share of right predictions; None if it was ended.
        """
        # A batch has at most the rows of a micro-batch of training on each rank. All ranks compute equally many batches: a rank
        # without rows computes one that does not count.
        self.settle()
        rows, replicas = evaluated_rows(self.config, source), self.grid.axes.dp
        together = replicas * max(
            1, self.config.batch.size // (replicas * self.config.batch.micro_batches)
        )
        totals = np.zeros(3)
        for start in range(0, rows, together):
            mine = share(min(together, rows - start), self.grid.place.dp, replicas)
            is_asked = stop_requested is not None and stop_requested()
            numbers = [(start + i) * source.held_out // rows for i in mine] or [0]
            found = (0.0, 0, 0) if self.grid.is_server else self._losses(source, numbers)
            does_count = bool(mine) and self.grid.speaks
            *sums, stop = self.replication.total(*(found if does_count else (0.0, 0, 0)), is_asked)
            if stop:
                return None
            totals += sums
        loss, right, count = totals.tolist()
        return loss / count, right / count

    def _losses(self, source: Source, rows: Sequence[int]) -> tuple[float, int, int]:
        """Summed loss, right predictions and number of predictions over these held-out rows."""
        inputs, targets = source.held_out_rows(rows)
        targets = self._indices.targets(
            targets, inputs.shape, self._logits_shape, "a held-out batch"
        )
        flat = self.backend.from_host(targets).reshape(-1)
        logits = self._asked(inputs)
        if logits is None:
            return 0.0, 0, 0
        logits = logits.reshape(len(flat), -1)
        right = self._loss.correct(logits, flat, self.arena)
        return float(self._loss.value(logits, flat, self.arena)), int(right), len(flat)


def parameter_count(units: Sequence[Unit]) -> int:
    """Elements of all tensors of a model, each counted once."""
    return sum(
        math.prod(p.shape)
        for unit in units
        for p in unit.layer.parameters()
        if p.name not in unit.tied
    )


def evaluated_rows(config: Config, source: Source) -> int:
    """How many of the held-out rows an evaluation takes."""
    return min(source.held_out, config.run.eval_rows or source.held_out)


def replicas_equal(trainer: Trainer) -> bool:
    """Whether every tensor that several ranks hold has the same bits on all of them; collective."""
    trainer.settle()
    grid = trainer.grid
    parameters = next(kept for kept in trainer.replication.kept() if kept.name == "parameters")
    flat = trainer.backend.to_host(parameters.array)
    equal = _same_bits(grid.dp.transport, parameters.pieces, flat)
    for name, holders in sorted(grid.holders.items()):
        for span in trainer.storage.spans:
            if span.holders == name:
                own = list(within(parameters.pieces, span.start, span.stop))
                equal &= _same_bits(holders.transport, own, flat, span.start)
    if grid.axes.servers:
        served = trainer.transport.gather_text(parameters.pieces)[-grid.axes.servers :]
        whole = [
            Piece(start, stop, start) for pieces in served for start, stop, _ in pieces
        ]  # as a worker holds them
        equal &= _same_bits(trainer.transport, parameters.pieces if grid.is_server else whole, flat)
    return all(trainer.transport.gather_text(equal))


def _same_bits(
    transport: Transport, pieces: Sequence[Piece], array: np.ndarray, origin: int = 0
) -> bool:
    """Whether ranks that hold the same piece, counted from each one's `origin`, hold equal bits of it; collective."""
    held = [
        (
            start - origin,
            stop - origin,
            hashlib.sha256(array[place : place + stop - start].tobytes()).hexdigest(),
        )
        for start, stop, place in pieces
    ]
    told = {tuple(one) for mine in transport.gather_text(held) for one in mine}
    return len(told) == len({(start, stop) for start, stop, _ in told})
