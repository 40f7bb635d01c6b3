"""The trainer: the distributed training step of a list of units."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from operator import mul
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpitrain.collectives.engine.arithmetic import arithmetic_of
from mpitrain.collectives.group import Group
from mpitrain.config import Config, Layout
from mpitrain.data import IGNORED, Source, positions_of, without_ends, without_padding
from mpitrain.errors import DataError, MpitrainError
from mpitrain.layers.base import Loss, Now, Places, Unit
from mpitrain.layers.experts import TokensOfExperts
from mpitrain.layers.flat import Storage
from mpitrain.layers.plain import LOSSES, Plain
from mpitrain.optim import learning_rate
from mpitrain.parallel.grid import Grid
from mpitrain.parallel.modes import is_synchronous, mode_of
from mpitrain.parallel.replica import StepResult
from mpitrain.parallel.tensor.layer_factory import filled_shape, layers_for, loss_for
from mpitrain.pipeline.async_pipeline import AsyncPipeline
from mpitrain.pipeline.pipeline import MicroBatch, Pipeline
from mpitrain.pipeline.schedules import STREAMS
from mpitrain.regions import shares
from mpitrain.run import inference
from mpitrain.run.checkpoint.regions import PARAMETERS
from mpitrain.run.job import Job, Units, agree_on
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device import over_device

if TYPE_CHECKING:
    from mpitrain.run.step_graph import StepGraph

Shape = tuple[int, ...]

WAYS_OUT = {
    "tokens": "Pass tokens of the model's vocabulary, or build the model with a larger one.",
    "targets": f"Pass the number of the right class, or {IGNORED} for a prediction that does not count.",
}


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of data on their way to the model, in training and inference: their checks, the tokens
    that this rank has of them, and the places of these tokens. Here targets are classes.

    logits_shape  (shape of inputs) -> shape of the whole logits, without padding rows
    vocabulary    tokens that the model takes; 0: it takes features, which are not checked
    dtype         of targets that are numbers
    attend        as data.attend
    placed        copies an array to the device
    """

    transport: Transport
    layers: Plain
    logits_shape: Callable[[Shape], Shape]
    vocabulary: int
    dtype: np.dtype
    attend: str
    placed: Callable[[np.ndarray], Any]
    has_classes = True

    def read(self, inputs: np.ndarray, targets: np.ndarray, where: str) -> tuple[Any, ...]:
        """Return checked rows: inputs without padding, targets, `starts`, `types`.

        Tokens and classes become int32 or int64, and numbers get the dtype of parameters.

        where   the origin of the rows, for messages
        starts  (B, T) int32, the index in the row where each token's document begins; None unless
                rows are texts or data.attend is document
        types   (B, T) int32, the token types; None unless rows are texts
        raises  as `refuse`
        """
        types = None
        if self.attend == "document" and targets.ndim == 2:
            targets, starts = without_ends(targets)
        else:
            inputs, starts, types = self.texts(inputs)
        inputs = self.tokens(inputs, where)
        return inputs, self.targets(targets, inputs.shape, where), starts, types

    def texts(self, inputs: np.ndarray) -> tuple[Any, ...]:
        """Return inputs without padding, and `starts` and `types` as of `read`."""
        if self.vocabulary and inputs.ndim == len(self.logits_shape(inputs.shape)):
            return without_padding(inputs)
        return inputs, None, None

    def tokens(self, inputs: np.ndarray, where: str) -> np.ndarray:
        """Return checked inputs without padding, as `read`."""
        return (
            self._integers(inputs, self.vocabulary, "tokens", where) if self.vocabulary else inputs
        )

    def targets(self, targets: np.ndarray, inputs: Shape, where: str) -> np.ndarray:
        """Return checked targets of inputs of this shape, without padding, as `read`."""
        *predictions, classes = self.logits_shape(inputs)
        if targets.shape != tuple(predictions) and (inputs[0] or targets.size):
            self.refuse(
                f"Targets must have the shape {tuple(predictions)}, one for each prediction, but those of {{}} have "
                f"{targets.shape}.",
                where,
                "Pass the number of the right class for each prediction.",
            )
        return self._integers(targets, classes, "targets", where)

    def counts(self, targets: np.ndarray) -> np.ndarray:
        """Return which targets count, as an array of booleans in their shape."""
        return targets != IGNORED

    def _integers(self, array: np.ndarray, count: int, what: str, where: str) -> np.ndarray:
        """Return integers as int32 or int64; refuse one outside 0 .. count - 1 that is no IGNORED target."""
        is_whole = array.dtype.kind in "iu"
        if not is_whole or (array.size and not (array.min() >= 0 and array.max() < count)):
            self._check_each(array, count, what, where)
        return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)

    def _check_each(self, array: np.ndarray, count: int, what: str, where: str) -> None:
        if array.dtype.kind not in "iu":
            self.refuse(
                f"{what.capitalize()} must be integers, but those of {{}} are {array.dtype}.",
                where,
                "Convert them, for example with array.astype(numpy.int64).",
            )
        is_wrong = (array < 0) | (array >= count)
        if what == "targets":
            is_wrong &= array != IGNORED
        if is_wrong.any():
            first = np.unravel_index(np.argmax(is_wrong), array.shape)
            place = ", ".join(map(str, first))
            self.refuse(
                f"{what.capitalize()} must lie in 0..{count - 1}, but {{}} has {array[first]} at [{place}].",
                where,
                WAYS_OUT[what],
            )

    def refuse(self, law: str, where: str, way_out: str) -> NoReturn:
        """Raise DataError; with several ranks end the job first: only this rank sees its rows.

        law  a format, with {} for the origin of the rows
        """
        rank = self.transport.rank
        error = DataError(
            law.format(f"{where} on rank {rank} ({self.transport.hosts[rank]})"), way_out
        )
        if self.transport.size == 1:
            raise error.on_every_rank()
        self.transport.abort(error.named())
        raise error

    def own_tokens(self, rows: np.ndarray, fill: int) -> np.ndarray:
        """Return this rank's tokens of rows (B, T), or of their targets.

        fill  the value after the ends of rows, if their tokens do not divide among the ranks
        """
        share = self.layers.tokens
        if share.ranks == 1:
            return rows
        missing = filled_shape(self.layers, rows.shape)[1] - rows.shape[1]
        filled = np.pad(rows, ((0, 0), (0, missing)), constant_values=fill)
        return share.cut(filled)

    def own_part(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        starts: np.ndarray | None,
        types: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray, Places | None]:
        """Return this rank's tokens of rows from `read`, their targets, and their places."""
        own = self.own_tokens(inputs, 0)
        places = self.places(own.shape, inputs.shape, starts, types) if len(own) else None
        return own, self.own_tokens(targets, IGNORED), places

    def places(
        self, own: Shape, unpadded: Shape, starts: np.ndarray | None, types: np.ndarray | None
    ) -> Places | None:
        """Return the places of the tokens of rows.

        own            shape of this rank's tokens of the rows, as of `own_tokens`
        unpadded       shape of the rows, (B, T), without padding
        starts, types  from `read`
        """
        # A row has the tokens of all ranks that divide it, padding included.
        shape = own[0], *(length * self.layers.tokens.ranks for length in own[1:])
        if starts is None and shape[1:] != unpadded[1:] and not self.is_causal:
            starts = np.zeros(unpadded, np.int32)
        return places_of(self.layers, shape, starts, self.placed, types)

    @property
    def is_causal(self) -> bool:
        """Whether no token sees a later one."""
        return "attention to later tokens" not in self.layers.made


class RowsOfNumbers(Rows):
    """Rows whose targets are floats, one for each output of the model; NaN does not count."""

    has_classes = False

    def targets(self, targets: np.ndarray, inputs: Shape, where: str) -> np.ndarray:
        rows, *_, width = self.logits_shape(inputs)
        is_whole = targets.shape[:1] == (rows,) and targets.size == rows * width
        if targets.dtype.kind != "f" or not is_whole:
            self.refuse(
                f"Targets must be floats, {width} for each of {rows} rows, but those of {{}} are {targets.dtype} of "
                f"shape {targets.shape}.",
                where,
                "Pass a float for each output of the model.",
            )
        return np.ascontiguousarray(targets.reshape(rows, width), self.dtype)

    def counts(self, targets: np.ndarray) -> np.ndarray:
        return ~np.isnan(targets)


class RowsForLoss(Rows):
    """Rows whose targets only a loss of the caller understands; they are not checked, and all count."""

    def targets(self, targets: np.ndarray, inputs: Shape, where: str) -> np.ndarray:
        return targets

    def counts(self, targets: np.ndarray) -> np.ndarray:
        return np.ones(targets.shape, bool)


class Trainer:
    """A trainer: a list of units with their training state, on a mesh of ranks.

    In PyTorch, DDP or FSDP, a pipeline and an optimizer share these tasks.

    Parameters
    ----------
    transport : Transport
        The transport that connects all ranks. The trainer splits its own from it.
    units : sequence of Unit, or callable
        The whole model: the same list on every rank. A callable receives a layer factory, a
        `Plain` that divides layers over the ranks of layout.tp, and returns the list. None: the
        model of the job.
    config : Config
        The configuration, from `parse`.
    loss : Loss, optional
        The loss function. None: that of model.loss.
    draws : bool
        Whether to draw the initial parameters.

    Attributes
    ----------
    job : Job
        What the ranks agreed on and resolved.
    units : list of Unit
        The units on this rank; with layout.pp above 1 those of its pipeline stage.
    storage : Storage
        The offset of each tensor in the flat buffers.
    replica : Replica
        The replica on this rank, of the mode of data parallelism.
    grid : Grid
        The device mesh: this rank's coordinates, and a group of ranks along each axis.
    placed : callable
        Copies rows to the device. Features are rounded where activations are stored in 16 bits.

    Raises
    ------
    ConfigError
        On every rank, if the configuration, the ranks and the units do not fit together.

    Notes
    -----
    Construction is collective, and so are all methods except `share`.
    """

    def __init__(
        self,
        transport: Transport,
        units: Units | None,
        config: Config | Job,
        loss: Loss | None = None,
        draws: bool = True,
    ):
        # Bytes of snapshots and copies in host memory, which `check_copies` counts.
        self.snapshot_bytes = 0
        # Folder and digests of the initial parameters, if `build` read them from run.init_from.
        self.begun_from: dict[str, Any] = {}
        self.job = job = config if isinstance(config, Job) else agree_on(transport, lambda: config)
        self.config = job.config
        self.backend, self.arena = job.device.backend, job.device.arena()
        endpoint = transport.split(0)
        assert endpoint is not None
        self._own: Transport | None = endpoint
        if self.config.replication.progress_thread == "no":
            endpoint.admits_threads = False
        self.transport = over_device(endpoint, self.backend, self.config.device.cuda_aware)
        self.grid = Grid(
            self.transport,
            job.axes,
            self.config.replication.algorithm,
            job.tuning,
            arithmetic_of(job.device),
            arena=self.arena,
            tp_algorithm=self.config.layout.algorithm,
        )
        try:
            self._build(units, loss)
            if draws:
                draw(self)
        except MpitrainError as error:
            if error.agreed:
                self.grid.close()
                endpoint.close()
            raise
        # This line comes last, because `close` would fail for a half-built trainer.
        transport.tenants.add(self.close)

    def _build(self, units: Units | None, loss: Loss | None) -> None:
        """Make the units, their storage, the replica and the pipeline; collective."""
        grid, job, config = self.grid, self.job, self.config
        stage_of = job.plan.stage_of
        self.layers = layers = self._layers(config.layout, grid.cp)
        # The ranks have cut the model of a job before; code of a caller may fail on one of them.
        cut = (
            job.cut(layers)
            if units is None and job.source is not None
            else on_all_ranks(self.transport, lambda: job.cut(layers, units))
        )
        self._made_from, self._cut = units, cut
        grid.place_model(stage_of, cut.tied)
        self.units, numbers = cut.of_stage(stage_of, grid.coords.pp)
        self.loss = loss_for(layers, loss)
        self.storage = Storage(self.units, config.precision.stored, job.axes.copies)
        mode = mode_of(config.replication, config.pipeline.schedule)
        kind = mode.of_rank(grid.is_server, config.replication)
        if config.run.inject or config.run.delay:
            from mpitrain.run.injection import disturbed

            kind = disturbed(kind, config.run, self.transport, self.backend)
        self.replica = kind(
            grid,
            self.storage,
            job.device,
            self.arena,
            self.loss,
            settings=config.replication,
            optimizer=config.optimizer,
            batch=config.batch,
            run=config.run,
            source=config.data.source,
            next_pause=config.next_pause,
            chunks=numbers,
            first=cut.first(self.units),
        )
        self._tokens_of_experts: TokensOfExperts | None = None
        # Without common steps no sum has all ranks.
        if layers.tally is not None and is_synchronous(
            config.replication, config.pipeline.schedule
        ):
            self._tokens_of_experts = TokensOfExperts(
                layers.tally, self.backend, grid.world.bind, grid.axes.tp
            )
        half = job.device.half
        self.placed = partial(self.backend.from_host, arena=self.arena)
        if half:
            self.placed = partial(placed_in, half, self.placed)
        self.pipe = (AsyncPipeline if config.pipeline.schedule in STREAMS else Pipeline)(
            job.plan,
            cut,
            grid.pp.transport,
            self.replica,
            self.arena,
            half or self.storage.dtype,
            self.placed,
        )
        output_shape = partial(self.pipe.input_shape, len(cut.chunks))
        takes_classes = LOSSES[config.model.loss].takes == "classes"
        kind_of_rows = Rows if takes_classes else RowsOfNumbers
        self.rows = (kind_of_rows if loss is None else RowsForLoss)(
            self.transport,
            layers,
            cache(partial(whole_shape, layers, output_shape)),
            getattr(cut.model[0].layer, "vocab", 0),
            self.storage.dtype,
            config.data.attend,
            self.placed,
        )
        self._recorder = recorder = self.transport.recorder
        recorder.computes_on(self.backend.mark)
        self._loss_name = recorder.name("the loss")
        # (rows of this rank) -> those of each micro-batch
        self._parts_of = cache(partial(shares, parts=config.batch.micro_batches))
        self._passes: Pipeline | StepGraph = self.pipe
        if config.device.graph != "no":
            from mpitrain.run.step_graph import with_graph

            self._passes = with_graph(self)

    def _layers(self, layout: Layout, context: Group | None) -> Plain:
        device, grid, settings = self.job.device, self.grid, self.job.layer_settings
        more = {"ep": grid.ep, "backend": self.backend, **settings}
        return layers_for(device.ops, grid.tp, layout, context, **more)

    @cached_property
    def decoded(self) -> Sequence[Sequence[Unit]]:
        """The units of each chunk with which text is generated."""
        if not self.layers.rows.partial and self.layers.tokens.ranks == 1:
            return self._cut.chunks
        # A single new token cannot be divided, so text is generated with whole rows.
        layout = self.config.layout.model_copy(update={"sequence_parallel": False})
        return self.job.cut(self._layers(layout, None), self._made_from).chunks

    def close(self) -> None:
        """Free the communicators and windows of this trainer, which cannot be used afterwards.

        Closing the transport of the constructor does the same.
        """
        if self._own is None:
            return
        self.sync_parameters()  # No operation may be in flight.
        del self.pipe, self.replica, self._passes  # They own arrays in windows.
        self.grid.close()
        self._own.close()
        self._own = None

    @property
    def parameter_count(self) -> int:
        """The number of parameters of the whole model; a tied tensor counts once."""
        return parameter_count(self._cut.model)

    @property
    def frozen_count(self) -> int:
        """The number of frozen parameters among those of `parameter_count`."""
        return frozen_count(self._cut.model)

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
        return self.replica.own_rows

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
            `loss`, `grad_norm` and `stop` are equal on all ranks in synchronous training.

        Raises
        ------
        DataError
            If a token or a target is out of range, if there are more rows than this rank's share, or
            if a prediction has no target. With several ranks the job is aborted.
        """
        replica, config, rows, own = self.replica, self.config, self.rows, self.replica.own_rows

        # This rank's tokens of the rows, checked and without padding, in micro-batches. A parameter
        # server has no rows.
        inputs, whole_targets, starts, types = rows.read(inputs, targets, f"step {index + 1}")
        if len(inputs) > len(own):
            self._refuse_rows(index, len(inputs))
        targets, places = whole_targets, None
        if starts is not None or self.layers.tokens.ranks > 1:
            inputs, targets, places = rows.own_part(inputs, whole_targets, starts, types)
        micros, ignored = list[MicroBatch](), list[int]()
        for number, part in enumerate(self._parts_of(len(inputs))):
            x, y = inputs[part.start : part.stop], targets[part.start : part.stop]
            own_places = places and places.of(part)
            now = Now(index, own.start + part.start, len(part), True, own_places)
            micros.append(MicroBatch(number, now, x, y))
            ignored.append(y.size - int(np.count_nonzero(rows.counts(y))))

        # The step begins: learning rate, weight of each target in the loss, empty gradients.
        self.arena.rewind()
        predictions = math.prod(targets.shape[1:]) * self.layers.tokens.ranks
        lr = learning_rate(config.optimizer, index, config.run.steps)
        replica.begin(index, lr, ignored, predictions)
        if config.model.experts:  # They add to the loss.
            micros = self._weighted(micros, whole_targets, predictions)

        def loss(micro: MicroBatch, logits: Any) -> Any:
            """Note the loss of a micro-batch, and return the gradient of its logits."""
            span = self._recorder.compute(self._loss_name, micro=micro.number)
            right = self.backend.from_host(micro.targets, self.arena).reshape(-1)
            scale = replica.weights[micro.number] * replica.skips.loss_scale
            value, gradient = replica.loss(logits.reshape(len(right), -1), right, scale)
            # Arrays without dims are copied on the device. For others CuPy would compile a kernel.
            value = value.reshape(()) if hasattr(value, "reshape") else value
            replica.losses[micro.number, ...] = value
            self._recorder.end(span)
            return gradient.reshape(logits.shape)

        # Forward and backward of all micro-batches; replicas sum gradients meanwhile.
        if len(inputs):
            self._passes.train(micros, loss)
        # This rank's losses, and its share of the gradient: squares, elements that are not finite.
        losses, squares, nonfinite = replica.sum()
        # The control message: the sums of all ranks, and whether one of them wants to stop.
        stop = bool(stop_requested and stop_requested())
        loss_sum, not_counted = 0.0, 0
        if self.grid.reports_loss:
            loss_sum, not_counted = sum(map(mul, replica.weights, losses)), sum(ignored)
        totals = replica.agree(loss_sum, squares, nonfinite, stop, not_counted)
        # The update, if loss and norm are finite.
        result = replica.finish(totals)
        if self._tokens_of_experts:
            extras = {**result.extras, **self._tokens_of_experts.extras()}
            result = result._replace(extras=extras)
        every = config.memory.release_every
        if every and (index + 1) % every == 0:
            self.arena.release()
        return result

    def _refuse_rows(self, index: int, count: int) -> NoReturn:
        self.rows.refuse(
            f"A rank computes at most its share of batch.size rows, {len(self.share())}, but {{}} has {count}.",
            f"step {index + 1}",
            "Pass the rows trainer.share() of the global batch.",
        )

    def _weighted(
        self, micros: Sequence[MicroBatch], targets: np.ndarray, predictions: int
    ) -> list[MicroBatch]:
        """Return the micro-batches with the weight of each of their rows in the losses that experts
        add, on the device.

        targets  of whole rows, also where this rank has a part of their tokens
        """
        replica, dtype = self.replica, self.storage.dtype
        counts = self.rows.counts(targets)
        counts = counts.sum(axis=tuple(range(1, targets.ndim))).reshape(-1, 1)  # of each row
        factor, start, weighted = replica.skips.loss_scale / predictions, 0, list[MicroBatch]()
        for weight, micro in zip(replica.weights, micros, strict=True):
            of_rows = (weight * factor * counts[start : start + micro.now.rows]).astype(dtype)
            now = micro.now._replace(weight=self.backend.from_host(of_rows, self.arena))
            weighted.append(micro._replace(now=now))
            start += micro.now.rows
        return weighted

    def loss_sums(self) -> np.ndarray:
        """Return this rank's summed loss of each micro-batch of the last step: (micro-batches,)."""
        return self.backend.to_host(self.replica.losses)

    def sync_parameters(self) -> None:
        """Finish all operations in flight, and make the parameters current on all ranks."""
        self.pipe.drain()
        self.replica.sync()

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
        return inference.logits(self, inputs)

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
        return inference.evaluate(self, source, stop_requested)


def placed_in(half: Any, placed: Callable[[Any], Any], rows: Any) -> Any:
    """Copy rows to the device; features are rounded to 16 bits, the dtype `half`."""
    return placed(rows.astype(half, copy=False) if rows.dtype.kind == "f" else rows)


def whole_shape(
    layers: Plain, output_shape: Callable[[Shape], Shape], shape: Shape
) -> tuple[int, ...]:
    """Return the shape of the whole logits for an input of this shape, without padding rows.

    output_shape  of the chunks of the model: (shape of this rank's input) -> of its logits
    """
    ranks, (count, *lengths) = layers.tokens.ranks, filled_shape(layers, shape)
    *rows, columns = output_shape((count, *(each // ranks for each in lengths)))
    rows[1:] = [each * ranks for each in rows[1:]]
    split = layers.split_loss
    return *map(min, rows, shape), split.vocab if split else columns


def places_of(
    layers: Plain,
    shape: Shape,
    starts: np.ndarray | None,
    placed: Callable[[np.ndarray], Any],
    types: np.ndarray | None = None,
) -> Places | None:
    """Return the places of the tokens of some rows.

    layers  the factory of the model's layers; this rank has its `tokens`
    shape   (B, T) of the rows
    starts  from `Rows.read`; padding to the right is a document of its own
    placed  copies an array to the backend's memory
    types   of tokens, from `Rows.read`, in the shape of `starts`
    """
    if starts is not None:
        return _places_in_documents(layers, shape, starts, placed, types)
    if layers.tokens.ranks == 1:
        return None
    own = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    firsts = _firsts(layers, np.zeros(shape, np.int32), layers.windows - {0}, placed)
    return Places(None, None, placed(layers.tokens.cut(own)), firsts=firsts)


def _places_in_documents(
    layers: Plain,
    shape: Shape,
    starts: np.ndarray,
    placed: Callable[[np.ndarray], Any],
    types: np.ndarray | None,
) -> Places:
    share = layers.tokens
    if starts.shape != shape:
        rows, tokens = starts.shape
        starts = np.pad(starts, ((0, shape[0] - rows), (0, 0)))
        starts = np.pad(starts, ((0, 0), (0, shape[1] - tokens)), constant_values=tokens)
    positions = positions_of(starts)
    whole = placed(positions)
    own = whole if share.ranks == 1 else placed(share.cut(positions))
    firsts = _firsts(layers, starts, layers.windows, placed)
    seen = None if share.is_ring else placed(starts)
    return Places(seen, whole, own, None if types is None else placed(types), firsts)


def _firsts(
    layers: Plain, starts: np.ndarray, windows: Iterable[int], placed: Callable[[np.ndarray], Any]
) -> dict[int, list[Any]]:
    """Return `Places.firsts` for these windows: empty without a ring."""
    share = layers.tokens
    return {
        window: [placed(each) for each in share.firsts(starts, window)]
        for window in windows
        if share.is_ring
    }


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


def draw(trainer: Trainer, is_drawn: Callable[[str], bool] = lambda name: True) -> None:
    """Begin with the initial parameters of run.seed; those that are not drawn become zero; collective.

    is_drawn  (full name) -> whether to draw a tensor
    """
    seed, trained = trainer.config.run.seed, None
    for name, array, pieces, *_, like, entries in trainer.replica.state():
        if name == PARAMETERS:
            layout = trainer.storage.frozen if entries else trainer.storage
            trained = array if trained is None else trained
            if any(is_drawn(entry.name) for entry in layout.entries):
                layout.initialize(array, seed, trainer.backend, pieces, is_drawn)
        elif like == PARAMETERS:
            array[:] = trained
    trainer.replica.restore({})
