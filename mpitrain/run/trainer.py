"""The training step over a list of units, and what else a trained list of units can do."""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpitrain.collectives.on_kernels import arithmetic_of
from mpitrain.config import Config
from mpitrain.config.delays import delay_s, delays
from mpitrain.data import Source
from mpitrain.errors import MpitrainError
from mpitrain.layers.base import Loss, Unit
from mpitrain.layers.flat import Piece, Storage
from mpitrain.optim import learning_rate
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.modes import replication_for
from mpitrain.parallel.replicate import Contribution, Outcome, Replica
from mpitrain.parallel.sharded import Alone, check_units, layers_for
from mpitrain.pipeline.partition import cut, dealt
from mpitrain.pipeline.pipe import own
from mpitrain.pipeline.stream import pipe_for
from mpitrain.run.indices import Indices
from mpitrain.run.pieces import within
from mpitrain.run.resolve import Resolved, resolve
from mpitrain.transport.agreed import agreed
from mpitrain.transport.base import Transport
from mpitrain.transport.cuda_aware import over_device


class Trainer:
    """A list of units with its parameters, gradients and optimizer state, and the step that trains it.

    units        those that lie on this rank
    transport    of its own, split off the one passed in; it also carries the arrays of config.device.kind
    grid         this rank's place among the others, and the groups along each axis
    storage      where each tensor lies in the flat buffers
    replication  how replicas are kept in step: it owns parameters, gradients and the state of the optimizer
    arena        where activations come from
    pipe         the parts of the model that lie here, and the programs that take micro-batches through them
    """

    def __init__(self, transport: Transport, units: Sequence[Unit] | Callable[[Alone], Sequence[Unit]],
                 config: Config | Resolved, loss: Loss | None = None):
        """Collective.

        units   or what makes them of a set of layers: that of the configured layout
        config  resolved here, where it is not yet
        loss    None: that of the set of layers
        """
        self.resolved = resolved = config if isinstance(config, Resolved) else resolve(transport, config)
        self.config = resolved.config
        self.backend, self.arena = resolved.device.backend, resolved.device.arena()
        mine = transport.split(0)
        assert mine is not None
        self._own: Transport | None = mine
        self.transport = over_device(mine, self.backend, self.config.device.cuda_aware)
        self.grid = Grid(self.transport, resolved.axes, self.config.replication.algorithm, resolved.tuning,
                         arithmetic_of(resolved.device), arena=self.arena, tp_algorithm=self.config.layout.algorithm,
                         progress_thread=self.config.replication.progress_thread)
        try:
            self._build(units, loss)
        except MpitrainError as error:
            if error.agreed:
                self.grid.close()
                mine.close()
            raise
        transport.tenants.add(self.close)    # not before: a trainer that could not be made has nothing to settle

    def _build(self, units: Sequence[Unit] | Callable[[Alone], Sequence[Unit]], loss: Loss | None) -> None:
        """What stands on the grid."""
        resolved, grid = self.resolved, self.grid
        self._layers = layers = layers_for(resolved.device.ops, grid.tp, self.config.layout)
        model = agreed(self.transport, lambda: list(units(layers) if callable(units) else units))
        agreed(self.transport, lambda: check_units(model, layers.rows))
        self.parameter_count = parameter_count(model)
        place = resolved.plan.place
        parts, tied = agreed(self.transport, lambda: dealt(model, cut(model, len(place), self.config.pipeline.partition), place))
        grid.deal(place, tied)
        agreed(self.transport, grid.check)
        mine = [parts[part] for part in own(place, grid.place.pp)]
        self.units = [unit for part in mine for unit in part]
        firsts = [0, *accumulate(map(len, mine))] if len(parts) > 1 else []
        self._loss = loss or layers.loss()
        self.storage = Storage(self.units, self.config.precision.stored, resolved.axes.dp)
        self.replication = replication_for(Replica(
            self.config, grid, self.storage, resolved.wire, resolved.device, self.arena, self._loss,
            [range(first, end) for first, end in pairwise(firsts)]))
        micro_batches = self.config.batch.micro_batches
        dtype = resolved.device.half or self.storage.dtype
        self.pipe = pipe_for(self.config)(resolved.plan, parts, grid.pp.transport, self.replication, self.arena, dtype)
        self._indices = Indices(self.transport, getattr(model[0].layer, "vocab", 0), loss is None)
        self._recorder = recorder = self.transport.recorder
        recorder.computes_on(self.backend.mark)
        self._loss_name, self._delay_name = recorder.name("the loss"), recorder.name("run.delay")
        self._loss_sums = self.backend.zeros(micro_batches, np.float64)  # of a step; read at its end, when the device is done

    def close(self) -> None:
        """Give back the communicators and windows it has taken; collective. Nothing of it may be used afterwards.

        The transport that it was made with does so when it is closed, if nobody has.
        """
        if self._own is None:
            return
        self.settle()  # nothing may be under way
        del self.pipe, self.replication  # and with them the arrays that lie in windows
        self.grid.close()
        self._own.close()
        self._own = None

    @property
    def parameters(self) -> np.ndarray:
        """The flat buffer, or with replication.zero 3 this rank's pieces; `tensors` has all of them."""
        return self.replication.parameters

    @property
    def gradients(self) -> np.ndarray:
        """The flat buffer; after a step, where every rank has all of it, the sum over all replicas, not clipped."""
        return self.replication.gradient_buffer

    def tensors(self) -> dict[str, np.ndarray]:
        """Copies of this rank's parameters in host memory, by full name, in order of storage. Collective, once settled.

        They are those that layers compute with: in half precision the rounded mirror, whose masters `replication.kept` has.
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
        """The rows of the global batch that this rank computes."""
        return self.replication.share(self.config.batch.size)

    def step(self, index: int, inputs: np.ndarray, targets: np.ndarray, stop: bool = False) -> Outcome:
        """One optimizer step; collective.

        index    number of the step, from 0
        inputs   this rank's rows (see `share`) of the global batch; none on a server
        targets  their classes: (rows,) or (rows, tokens), integers
        stop     ask all ranks to stop after this step; the outcome tells them
        raises   DataError for a token or a target that the model does not have; one of several ranks ends them all
        """
        where = f"step {index + 1}"
        inputs = self._indices.tokens(inputs, where)
        targets = self._indices.targets(targets, lambda: self._classes(inputs.shape), where)
        rows, micro_batches = len(inputs), self.config.batch.micro_batches
        scales = [self.replication.scale(math.prod(targets.shape[1:]), micro) for micro in range(micro_batches)]
        shares = [share(rows, micro, micro_batches) for micro in range(micro_batches)]

        def of(micro: int, array: np.ndarray) -> Any:
            """A micro-batch's rows, in this backend's memory."""
            return self.placed(array[shares[micro].start:shares[micro].stop])

        def loss(micro: int, logits: Any) -> Any:
            span = self._recorder.compute(self._loss_name, micro=micro)
            right = of(micro, targets).reshape(-1)
            value, gradient = self.replication.loss(logits.reshape(len(right), -1), right, scales[micro])
            self._loss_sums[micro:micro + 1] = value  # copied on the device; an element would be read first
            self._recorder.end(span)
            return gradient.reshape(logits.shape)

        self.arena.rewind()
        self.replication.begin(index)
        if rows:    # a server has none
            self._straggle(index)
            self.pipe.train([(len(mine), *inputs.shape[1:]) for mine in shares], lambda micro: of(micro, inputs), loss)
        lr = learning_rate(self.config.optimizer, index, self.config.run.steps)
        return self.replication.finish(Contribution(index, self._loss_sums if self.grid.speaks else (), lr, stop, scales))

    def settle(self) -> None:
        """Finish what is under way, and make the parameters current on all ranks, as evaluations and the like do; collective."""
        self.pipe.drain()
        self.replication.settle()

    def _straggle(self, step: int) -> None:
        """Sleep for as long as run.delay says that the step takes longer here: who computes other rows draws anew."""
        run, here = self.config.run, self.grid.place
        if run.delay:
            span = self._recorder.compute(self._delay_name)
            time.sleep(delay_s(delays(run.delay), self.transport.rank, run.seed, step, self.share().start, here.tp, here.pp))
            self._recorder.end(span)

    def logits(self, inputs: np.ndarray) -> np.ndarray | None:
        """What the model says of these rows: (rows, [tokens,] classes), in this backend's memory; None but on the last stage.

        Collective where parameters do not lie whole on every rank: all ranks but servers, which have no model, call it, each
        with rows of its own, ranks of a replica with the same.
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
        return None if logits is None else logits[tuple(map(slice, inputs.shape[:logits.ndim - 1]))]

    def placed(self, rows: np.ndarray) -> Any:
        """Rows in this backend's memory; those of features are rounded where activations are stored rounded."""
        half = self.resolved.device.half
        return self.backend.from_host(rows.astype(half) if half and rows.dtype.kind == "f" else rows, self.arena)

    def logits_of(self, inputs: np.ndarray, token: int) -> np.ndarray:
        """What the model says of one token of the first row: (classes,) float64 in host memory; good on the first stage.

        Collective as `logits`.
        """
        logits = self._asked(inputs)
        found = np.empty(self._classes(inputs.shape))
        if logits is not None:
            found[:] = self.backend.to_host(self._layers.whole(logits[0, token], self.arena))
        self.pipe.tell_first(found)
        return found

    def _classes(self, shape: tuple[int, ...]) -> int:
        """Columns of the whole logits, for an input of this shape."""
        return self._layers.columns(self.pipe.output_shape(shape)[-1])

    def evaluate(self, source: Source, stop_requested: Callable[[], bool] = lambda: False) -> tuple[float, float] | None:
        """Mean loss (nats per prediction) and share of right predictions over held-out rows; collective.

        The rows are `evaluated_rows` of them, spread evenly; a batch has no more on a rank than a micro-batch of training. All
        ranks compute equally many batches: one that has no row left computes one that does not count.

        stop_requested  asked before every batch; a True on any rank ends the evaluation on all, which then return None
        """
        self.settle()
        rows, replicas = evaluated_rows(self.config, source), self.grid.axes.dp
        together = replicas * max(1, self.config.batch.size // (replicas * self.config.batch.micro_batches))
        totals = np.zeros(3)
        for start in range(0, rows, together):
            mine = share(min(together, rows - start), self.grid.place.dp, replicas)
            is_asked = stop_requested()
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
        targets = self._indices.targets(targets, lambda: self._classes(inputs.shape), "a held-out batch")
        flat = self.backend.from_host(targets).reshape(-1)
        logits = self._asked(inputs)
        if logits is None:
            return 0.0, 0, 0
        logits = logits.reshape(len(flat), -1)
        right = self._loss.correct(logits, flat, self.arena)
        return float(self._loss.value(logits, flat, self.arena)), int(right), len(flat)


def parameter_count(units: Sequence[Unit]) -> int:
    """Elements of all tensors of a model, each counted once."""
    return sum(math.prod(p.shape) for unit in units for p in unit.layer.parameters() if p.name not in unit.tied)


def evaluated_rows(config: Config, source: Source) -> int:
    """How many of the held-out rows an evaluation takes."""
    return min(source.held_out, config.run.eval_rows or source.held_out)


def replicas_equal(trainer: Trainer) -> bool:
    """Whether every tensor that several ranks hold has the same bits on all of them; collective. True if none is."""
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
        served = trainer.transport.gather_text(parameters.pieces)[-grid.axes.servers:]
        whole = [Piece(start, stop, start) for pieces in served for start, stop, _ in pieces]    # as a worker holds them
        equal &= _same_bits(trainer.transport, parameters.pieces if grid.is_server else whole, flat)
    return all(trainer.transport.gather_text(equal))


def _same_bits(transport: Transport, pieces: Sequence[Piece], array: np.ndarray, origin: int = 0) -> bool:
    """Whether ranks that hold the same piece, counted from each one's `origin`, hold equal bits of it; collective."""
    held = [(start - origin, stop - origin, hashlib.sha256(array[place:place + stop - start].tobytes()).hexdigest())
            for start, stop, place in pieces]
    told = {tuple(one) for mine in transport.gather_text(held) for one in mine}
    return len(told) == len({(start, stop) for start, stop, _ in told})
