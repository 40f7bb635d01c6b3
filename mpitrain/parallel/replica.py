"""One replica of the model on a rank: its rows, its flat buffers, and the end of a step (as DDP).

`Replica` is also the mode `all-reduce`; every other mode is a subclass that overrides a few of its
methods. The tables of modes are in modes.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np

from mpitrain import config
from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.engine.executor import ExposedTime, Reduction
from mpitrain.collectives.group import Group
from mpitrain.data import Source, read_rows
from mpitrain.layers.base import Gradients, Loss, Weights
from mpitrain.layers.flat import Bucket, FlatLayout, Storage
from mpitrain.machine.backend import Arena
from mpitrain.ops.device import Device
from mpitrain.optim import RULES
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.parallel.buckets import Buckets, LossyBuckets, best_bytes, tied_sums, users
from mpitrain.parallel.grid import Axes, Grid
from mpitrain.regions import Piece, share
from mpitrain.trace.recorder import UPDATE


class StepResult(NamedTuple):
    """The result of a training step, equal on all ranks except for `comm_s` and `ended`.

    With local SGD and gossip, loss and grad_norm are the worker's own until the end of a period.

    loss        mean in nats over the targets of the global batch that count
    grad_norm   2-norm of the global gradient, before clipping
    nonfinite   gradient elements that are infinite or NaN
    lr          learning rate of the step
    updated     False if an update was skipped; with local SGD and gossip, by any worker in the period
    stop        whether any rank has received a request to stop
    comm_s      seconds of the step in which this rank was blocked on communication
    counted     the targets that count, as a fraction of all targets of the update; the update is
                skipped if it is 0
    extras      what only some modes and precisions have:
        lead        asynchronous servers: the largest number of steps by which a worker was ahead of
                    the slowest worker when it began the step
        staleness   asynchronous servers: the largest number of updates between a worker's pull of
                    the parameters and the push of the gradient from them
        loss_scale  float16: factor of this step's loss
        overflows   float16: consecutive skipped steps, this one included, whose gradients
                    overflowed under a finite loss
        ended       asynchronous pipelines: this rank's `perf_counter` at the end of the step, which
                    all ranks learn some steps later
        expert_tokens, dropped, imbalance
                    models with experts, in common steps: tokens of each expert over all layers,
                    dropped ones included; the fraction that was dropped; the most tokens of an
                    expert over their mean
        is_spike    True: the update was skipped because of a spike of the loss, as run.on_spike
    """

    loss: float
    grad_norm: float
    nonfinite: int
    lr: float
    updated: bool
    stop: bool
    comm_s: float = 0.0
    counted: float = 1.0
    extras: Mapping[str, Any] = {}


class RecentLosses:
    """The mean and the standard deviation of recent losses, weighted as the last WINDOW steps.

    The weights of older losses decay exponentially. A spike is a loss more than `most` standard
    deviations above the mean of at least LEAST losses. It does not count as a recent loss.
    """

    WINDOW, LEAST = 50, 10

    def __init__(self, most: float):
        self.most, self.count, self.mean, self.variance = most, 0, 0.0, 0.0

    def accepts(self, loss: float) -> bool:
        """Return whether a loss is finite and no spike, and count it if so.

        All ranks must pass the same loss.
        """
        above = loss - self.mean
        is_spike = above > 0 and above * above > self.most * self.most * self.variance
        if not math.isfinite(loss) or (is_spike and self.count >= self.LEAST):
            return False
        self.count += 1
        weight = 1 / min(self.count, self.WINDOW)
        self.mean += weight * above
        self.variance = (1 - weight) * (self.variance + weight * above * above)
        return True

    def numbers(self) -> dict[str, float]:
        return {f"losses_{name}": getattr(self, name) for name in ("count", "mean", "variance")}

    def restore(self, numbers: Mapping[str, float]) -> None:
        self.count = int(numbers.get("losses_count", 0))
        self.mean = numbers.get("losses_mean", 0.0)
        self.variance = numbers.get("losses_variance", 0.0)


class SkippedUpdates:
    """The count of skipped updates, and which losses skip one.

    number      skipped updates so far; AdamW's step count leaves them out
    accepts     (loss) -> whether it is finite and, unless run.on_spike is ignore, no spike
    loss_scale  the factor of the loss in the current step; only float16 has another than 1
    """

    loss_scale = 1.0

    def __init__(self, most: float = 0.0):
        """most: run.spike; 0: there are no spikes"""
        self.number = 0
        self._losses = RecentLosses(most) if most else None
        self.accepts = self._losses.accepts if self._losses else math.isfinite

    def conclude(self, result: StepResult) -> StepResult:
        """Count a skipped update. All ranks must pass the same result."""
        self.number += not result.updated
        return result

    def numbers(self) -> dict[str, float]:
        return {"skipped_updates": self.number}

    def scalars(self) -> dict[str, float]:
        return self.numbers() | (self._losses.numbers() if self._losses else {})

    def restore(self, scalars: Mapping[str, float]) -> None:
        self.number = int(scalars.get("skipped_updates", 0))
        if self._losses:
            self._losses.restore(scalars)


class DynamicLossScale(SkippedUpdates):
    """The dynamic loss scale of float16: it doubles after GOOD steps without an overflow, and
    halves after an overflow.

    An overflow is a gradient that is not finite although the loss is finite. Its update is skipped,
    and the run continues.

    good       steps without an overflow since the last change of `loss_scale` or the last overflow
    overflows  consecutive steps with an overflow
    source     Micikevicius et al. 2018, Mixed Precision Training, ICLR, section 3.2
    """

    FIRST, LEAST, MOST, GOOD = 2.0**16, 1.0, 2.0**24, 200

    def __init__(self, most: float = 0.0):
        super().__init__(most)
        self.loss_scale, self.good, self.overflows = self.FIRST, 0, 0

    def conclude(self, result: StepResult) -> StepResult:
        """Adapt the scale to a step's result; add the extras `loss_scale` and `overflows`."""
        result, scale = super().conclude(result), self.loss_scale
        extras = {**result.extras, "loss_scale": scale}
        if not math.isfinite(result.loss) or result.extras.get("is_spike"):
            return result._replace(extras=extras)
        if result.updated:
            self.good, self.overflows = self.good + 1, 0
            if self.good == self.GOOD:
                self.loss_scale, self.good = min(2 * scale, self.MOST), 0
        else:
            self.loss_scale = max(scale / 2, self.LEAST)
            self.good, self.overflows = 0, self.overflows + 1
        return result._replace(extras={**extras, "overflows": self.overflows})

    def numbers(self) -> dict[str, float]:
        return {
            **super().numbers(),
            "loss_scale": self.loss_scale,
            "loss_scale_good": self.good,
            "loss_scale_overflows": self.overflows,
        }

    def restore(self, scalars: Mapping[str, float]) -> None:
        super().restore(scalars)
        self.loss_scale = scalars.get("loss_scale", self.FIRST)
        self.good, self.overflows = (
            int(scalars.get(f"loss_scale_{name}", 0)) for name in ("good", "overflows")
        )


def whole(layout: FlatLayout) -> list[Piece]:
    """Return the one piece that is the whole flat buffer of a layout."""
    return [Piece(0, layout.length, 0)]


def spread(flat: Any, pieces: Sequence[Piece]) -> list[Any]:
    """Return the view of each piece in a flat buffer of all elements: from its `start` on."""
    return [flat[piece.start : piece.stop] for piece in pieces]


def compact(flat: Any, pieces: Sequence[Piece]) -> list[Any]:
    """Return the view of each piece in its owner's buffer of pieces alone: from its `offset` on."""
    return [flat[piece.offset : piece.offset + piece.stop - piece.start] for piece in pieces]


class Sizes(NamedTuple):
    """The arguments of a memory formula.

    settings  the section `replication` of the configuration
    axes      the number of ranks along each axis
    shards    ranks that divide a replica's state: ZeRO's sharding group
    length    elements of the flat parameter buffer of a stage, as the mean over the stages
    largest   elements of the largest unit, or of the mean chunk of several on a stage
    master    bytes of a parameter, which are those of its gradient, too
    mirror    bytes of the rounded copy of a parameter; 0 in full precision
    state     bytes of optimizer state per parameter, as the mean over trained parameters
    frozen    elements of the frozen parameters of a stage, which are not part of `length`
    slot      as `largest`, for frozen parameters
    """

    settings: config.Replication
    axes: Axes
    shards: int
    length: float
    largest: float
    master: int
    mirror: int
    state: float
    frozen: float = 0
    slot: float = 0

    @property
    def replica(self) -> float:
        """The bytes of a replica that is not sharded: parameters, mirror, gradients and state."""
        return (2 * self.master + self.mirror + self.state) * self.length + self.fixed

    @property
    def fixed(self) -> float:
        """The bytes of all frozen parameters, in the dtype with which layers compute."""
        return self.computed * self.frozen

    @property
    def computed(self) -> int:
        """Bytes of a parameter in the dtype with which layers compute."""
        return self.mirror or self.master


SINGLE_RANKS: Mapping[str, Any] = {
    "replication.wire": "none",
    "replication.zero": 0,
    "layout.tp": 1,
    "layout.pp": 1,
    "layout.cp": 1,
    "layout.ep": 1,
}
"""{key: value} that all modes need whose replicas are single ranks with whole gradients."""


class Replica:
    """A rank's replica of the model, with the update of its parameters (as torch's DDP with its
    optimizer). This class is the mode `all-reduce`: each rank updates from the sum of all gradients.

    The calls of one step, in their order:

        begin
        each micro-batch, unit by unit   forward: open
        at the end of the model          loss
        each micro-batch, unit by unit   backward: open, gradients, ready
        sum, agree, finish

    Between units, `poll`. In all calls `unit` is an index in this rank's list of units, `micro` the
    index of a micro-batch, and `step` the number of a step from 0. After a step all replicas are
    equal bit for bit, also with a lossy wire format.

    A mode is a subclass. `MODES` (modes.py) has its name. It says what it needs by the attributes
    and static methods in the first part of this class, and overrides methods of the second part.

    help         phrase about the mode, for the help of its key
    variants     {suffix of the mode's name in `mpitrain compare`: setting}; empty: no variants
    is_sharded   whether `open` gathers the parameters of a unit from other ranks

    parameters   1-D, of all trained tensors, in the storage's dtype; if the mode shards, this rank's
                 pieces concatenated
    mirror       1-D; in half precision the rounded parameters, with which layers compute; else None
    gradient_buffer   1-D, as `parameters`
    owned        {piece: its parameters}, for the pieces that this rank updates
    mirrors      {piece: its mirror}, for those of these pieces whose update writes the mirror too
    summed       {piece: its summed gradient}, for the same pieces, after `wait`
    squared      views of the sum which this rank squares for the norm. No other rank squares the
                 same element
    members      the ranks whose gradients are summed
    sharing      the groups over which elements of a tensor are divided, besides tp
    frozen       1-D, the parameters that are not trained, in the dtype with which layers compute; if the
                 mode shards, this rank's pieces concatenated. They have no masters, gradients, state or
                 messages. A server has none
    frozen_state  `frozen` for checkpoints; empty if there are none
    parameter_arrays, gradient_arrays   all arrays that were allocated for them
    optimizer    updates the pieces of `owned`, which may be none
    skips        the count of skipped updates, and the loss scale
    losses       (micro-batches,) float64: the summed loss of each, on the device; the caller of
                 `loss` writes them, and the host reads them at the end of a step
    step, lr     of the step that has begun, as are
    ignored      targets of this rank's rows that do not count, by micro-batch
    predictions  number of targets in one row
    own_rows     the rows of the global batch that this rank computes in a step; a server has none
    rows_of_update   the rows, over all ranks, of one update; a worker that updates alone has its own.
                 Asynchronous pipelines have several updates in a step, with `PipeDream.of_update` rows
    targets      number of all targets of the update, over all ranks
    weights      weight of a target in the mean loss, by micro-batch
    exposed      the time that this rank has been blocked on communication in the current step
    source       Li et al. 2020, PyTorch Distributed, VLDB 13(12)
    """

    help = "each rank updates from the sum of all gradients"
    needs: Mapping[str, Any] = {}
    """{key: the value that the mode needs}; other values are refused"""
    variants: Mapping[str, str] = {}
    is_sharded = False

    mirror: Any = None
    sharing: Sequence[Group] = ()

    # What the mode says of itself.

    @staticmethod
    def memory(sizes: Sizes) -> float:
        """Return the bytes of parameters, gradients and optimizer state on a rank, as the mean over
        the ranks; without scratch of reductions.
        """
        return sizes.replica

    @classmethod
    def kept(cls, sizes: Sizes) -> float:
        """Return those bytes of `memory` that a checkpoint or a snapshot saves, as the mean over the
        ranks: trained parameters, optimizer state, and buffers of the mode's own.

        Only for modes in which all ranks take steps together.
        """
        state = cls.memory(sizes) - cls.memory(sizes._replace(state=0))
        return state + sizes.master * sizes.length

    @staticmethod
    def updates_early(settings: config.Replication) -> bool:
        """Return whether a rank may update before all ranks have finished the step."""
        return False

    @staticmethod
    def servers(settings: config.Replication) -> int:
        """Return the number of the last ranks, which compute no rows."""
        return 0

    @staticmethod
    def records(settings: config.Replication) -> Sequence[str]:
        """Return the extras of a StepResult that metrics.jsonl has in this mode."""
        return ()

    @staticmethod
    def exchange(settings: config.Replication) -> int:
        """Return the steps between two exchanges of stop requests."""
        return 1

    @classmethod
    def of_rank(cls, is_server: bool, settings: config.Replication) -> type["Replica"]:
        """Return the class of a rank in this mode: servers and workers have different ones."""
        return cls

    # The construction; collective.

    def __init__(
        self,
        grid: Grid,
        storage: Storage,
        device: Device,
        arena: Arena,
        loss: Loss,
        settings: config.Replication,
        optimizer: config.Optimizer,
        batch: config.Batch,
        run: config.Run,
        source: str,
        next_pause: Callable[[int], int] = lambda step: step + 1,
        chunks: Sequence[range] = (),
        first: int = 0,
    ):
        """Allocate all buffers and bind all reductions; collective.

        storage      layout of this rank's tensors in a flat buffer
        loss         the loss of this rank's logits
        source       data.source, for messages
        next_pause   (finished steps) -> the number of finished steps at the next checkpoint or
                     evaluation, or at the end
        chunks       with several model chunks on this stage: the units of each chunk, numbered as
                     in `storage`; otherwise empty
        first        the first unit of this rank with a backward: all units before are frozen
        """
        self.grid, self.storage, self.device, self.arena = grid, storage, device, arena
        self.settings, self.run, self.wire = settings, run, parse_wire(settings.wire)
        self.chunks, self.first = chunks, first
        self.size = self.rows_of_update = batch.size
        self.own_rows = share(batch.size, grid.coords.dp, grid.axes.dp)
        self.micro_batches = batch.micro_batches
        self.next_pause = next_pause
        self.computed: np.dtype = device.half or storage.dtype  # of activations and of layers
        self._loss, self._source = loss, source
        self.exposed, self.recorder = ExposedTime(), grid.transport.recorder
        # Padding may contain non-finite numbers: blocks of wire formats include it.
        self._is_spoiled = False
        most = run.spike if run.on_spike != "ignore" else 0.0
        kind = DynamicLossScale if device.compute == "float16" else SkippedUpdates
        self.skips: SkippedUpdates = kind(most)
        self._control = np.zeros(5)
        self.build(optimizer)

    def build(self, optimizer: config.Optimizer) -> None:
        """Allocate and bind what `__init__` has not yet; collective."""
        grid, device, recorder = self.grid, self.device, self.recorder
        self.cuts = self.cut()
        self.make_parameters()
        self.make_gradients()
        # All that the host reads at the end of a step: losses, then two facts of each gradient.
        count = self.micro_batches
        self._numbers = device.backend.zeros(count + 2 * len(self.squared), np.float64)
        self.losses, facts = self._numbers[:count], self._numbers[count:]
        self._facts = [facts[2 * place : 2 * place + 2] for place in range(len(self.squared))]
        rule = RULES[optimizer.name]
        self.optimizer = rule.step.optimizer(
            rule,
            optimizer,
            self.storage,
            {
                piece: (self.owned[piece], gradients, self.mirrors.get(piece))
                for piece, gradients in self.summed.items()
            },
            device.ops,
            device.backend,
            self.arena,
            partial(grid.fact_sums, *self.sharing, grid.tp),
        )
        with recorder.called("the control message"):
            self._sum_of_control = grid.world.bind(self._control)
        self._gradients_name = recorder.name("the sums of gradients", self.members)
        self._norm_name = recorder.name("the norm")
        self._update_name = recorder.name("the parameters")

    def make_parameters(self) -> None:
        """Allocate the parameters; they have values at the first `restore`. Collective."""
        storage, allocate = self.storage, self.grid.world.transport.allocate
        self.parameters = self.used = allocate(storage.length, storage.dtype)
        if self.device.mirror:
            self.mirror = self.used = allocate(storage.length, self.computed)
        self.make_frozen(whole(storage.frozen))
        self._weights = storage.weights(self.used, self.frozen)
        self.parameter_arrays: list[Any] = [self.parameters, self.used, self.frozen]
        pieces = self.pieces()
        self.owned = dict(zip(pieces, spread(self.parameters, pieces), strict=True))
        self.mirrors: Mapping[Piece, Any] = (
            {}
            if self.mirror is None
            else dict(zip(pieces, spread(self.mirror, pieces), strict=True))
        )

    def make_frozen(self, pieces: Sequence[Piece]) -> None:
        """Allocate these pieces of the flat buffer of frozen tensors."""
        length = sum(piece.stop - piece.start for piece in pieces)
        self.frozen = self.device.backend.zeros(length, self.computed)
        entries = self.storage.frozen.entries
        own = StateBuffer("parameters", self.frozen, pieces, entries=entries)
        self.frozen_state = [own] if entries else []

    def make_gradients(self) -> None:
        """Allocate the gradients, and bind their sums; collective."""
        storage, copies = self.storage, self.grid.copies
        self.gradient_buffer = self.grid.world.transport.allocate(storage.length, storage.dtype)
        self._gradients, self._leaves = storage.gradients(self.gradient_buffer)
        self.gradient_arrays = [self.gradient_buffer]
        self.members: Sequence[int] = copies.transport.members
        pieces = self.pieces()
        self.summed = dict(zip(pieces, spread(self.gradient_buffer, pieces), strict=True))
        self.squared = spread(self.gradient_buffer, self.counted())
        writers = [
            {unit for unit in (*bucket.units, *others) if unit >= self.first}
            for bucket, others in users(storage, self.cuts).items()
        ]
        tied = tied_sums(self.grid, self.gradient_buffer, storage.spans)
        kind: Callable[..., Buckets] = Buckets
        if self.wire.name != "none":
            dense_steps = self.settings.exact_steps(self.run.steps)
            kind = partial(LossyBuckets, wire=self.wire, layout=storage, dense_steps=dense_steps)
        self.buckets = kind(
            copies, self.gradient_buffer, self.cuts, writers, self.settings.overlap, self.bind, tied
        )

    def cut(self, firsts: Sequence[int] = ()) -> Sequence[Bucket]:
        """Return the buckets, in the order of their reduction; empty: the gradients stay local.

        The buckets of a tensor-parallel group have the same bytes. So a tensor that all of its ranks
        store is in the same bucket on each, and all sum it in the same order. Between hosts the bytes
        depend on the length of a rank's buffer, so there the ranks agree on them.

        firsts  units at which a bucket must start
        """
        nbytes = best_bytes(self.storage, self.grid.copies, self.settings.bucket_mb)
        if not self.settings.bucket_mb and len({*self.grid.world.transport.hosts}) > 1:
            nbytes = max(self.grid.tp.transport.gather_text(nbytes))
        return self.storage.buckets(nbytes, firsts)

    def bind(self, bucket: Bucket, gradients: Any) -> Reduction:
        """Return the sum over the replicas, bound to a bucket's gradients; wire formats bind their own."""
        return self.grid.summing(bucket.holders).bind(gradients)

    def pieces(self) -> Sequence[Piece]:
        """Return the pieces of the flat buffer that this rank updates."""
        return whole(self.storage)

    def counted(self) -> Sequence[Piece]:
        """Return the pieces that this rank squares for the norm.

        The replicas divide the squaring evenly: each element is squared on one rank.
        """
        counted = []
        for summing, (start, stop, _) in self.counted_runs():
            own = share(stop - start, summing.rank, summing.size)
            counted.append(Piece(start + own.start, start + own.stop, 0))
        return counted

    def counted_runs(self) -> list[tuple[Group, Piece]]:
        """Return the runs of the flat buffer that no other rank of this replica squares, with the
        groups that sum them.
        """
        grid, runs = self.grid, list[tuple[Group, Piece]]()
        for summing, spans in groupby(
            self.storage.spans,
            lambda span: grid.summing(span.holders) if grid.counts(span.holders) else None,
        ):
            own = [*spans]
            if summing:
                runs.append((summing, Piece(own[0].start, own[-1].stop, 0)))
        return runs

    # The rows of a step.

    def batch(
        self, source: Source, step: int, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of this rank's rows of a step's global batch, on the host.

        The first dim is the row; `before` is as in `Source.batch`. It raises ConfigError if a
        plugin's source returns anything else.
        """
        rows = self.own_rows
        return read_rows(
            self._source, source, len(rows), lambda: self.read(source, step, rows, before)
        )

    def read(
        self, source: Source, step: int, rows: range, before: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        return source.batch(self.run.seed, step, self.size, rows, before)

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        """Return the summed loss of a micro-batch, and `scale` times the gradient of its logits.

        logits   (N, V); the gradient may overwrite them
        targets  (N,)
        returns  the unscaled sum over the N rows, a number or an array without dims; (N, V)
        """
        return self._loss.gradient(logits, targets, scale, self.arena)

    # A step.

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        """Yield the steps that this rank must compute until step `step` is finished.

        The caller computes each step before it takes the next one. Here only `step`. Asynchronous
        workers may compute several other steps first; servers compute none.

        stop_requested  () -> whether this rank has received a request to stop. A rank that computes
                        rows passes the same fact to `agree`.
        """
        return iter((step,))

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        """Return the result of a step that `steps` has finished; here that of `finish`.

        own  what `finish` returned for the last step that this rank computed; None if it computed
             none
        """
        assert own is not None
        return own

    def begin(
        self, step: int, lr: float = 0.0, ignored: Sequence[int] = (), predictions: int = 1
    ) -> None:
        """Begin a step.

        lr  learning rate of its update; the others are attributes of the class
        """
        self.step, self.lr, self.predictions = step, lr, predictions
        self.ignored = ignored or (0,) * self.micro_batches
        self.targets = self.rows_of_update * predictions
        # The division of every average: the loss multiplies its gradient by this weight, and later
        # reductions only add. `result_of` corrects for ignored targets, which no rank knows alone.
        self.weights = [1 / self.targets] * self.micro_batches
        self.prepare()

    def prepare(self) -> None:
        """Mark all gradients as empty, and make the parameters current."""
        self.grid.exchanged.take()  # that of other steps, or of an evaluation
        if self._is_spoiled:
            self.gradient_buffer.fill(0)
            self._is_spoiled = False
        for leaf in chain.from_iterable(self._leaves):
            leaf.filled = False
        self.buckets.begin(self.step)

    def open(self, unit: int, micro: int) -> Weights:
        """Return views of a unit's parameters for micro-batch `micro`, valid until the next `poll`.

        The call waits for parameters that are being gathered.
        """
        return self._weights[unit]

    def gradients(self, unit: int) -> Gradients:
        """Return the leaves in which a unit's gradients of one micro-batch are summed."""
        return self._gradients[unit]

    def ready(self, unit: int, is_last: bool) -> None:
        """Report a unit's gradient of one micro-batch as complete on this rank (as DDP's autograd
        hook).

        `is_last` marks the unit's last micro-batch of the step. Its reduction may then start, and
        tensors that no layer has written in this step are set to zero. Otherwise the gradient of
        the previous step would remain there.
        """
        if is_last:
            for leaf in self._leaves[unit]:
                if not leaf.filled:
                    leaf.array.fill(0)
            self.buckets.ready(unit)

    def poll(self) -> None:
        """Progress all messages in flight."""
        self.buckets.poll()

    def wait(self) -> None:
        """Block until all gradients are summed; all units must have been reported as ready."""
        self.buckets.wait()

    def sum(self) -> tuple[list[float], float, int]:
        """Wait for the summed gradients; return `losses`, and the sum of squares and the non-finite
        elements of the gradients in `squared`.

        These numbers are copied from the device in one read, the only blocking read of a step. The
        host adds those of other ranks and decides about the update, so a skipped update launches no
        kernel. Exposed time includes the exchange of activations.
        """
        wait = self.recorder.wait(self._gradients_name)
        with self.exposed:
            self.wait()
        self.recorder.go_on(wait)
        self.exposed.seconds += self.grid.exchanged.take()
        span = self.recorder.compute(self._norm_name)
        for gradient, pair in zip(self.squared, self._facts, strict=True):
            pair[:] = self.device.ops.gradient_facts(gradient, self.arena)
        read = self.device.backend.to_host(self._numbers).tolist()
        self.recorder.end(span)
        losses, facts = read[: self.micro_batches], read[self.micro_batches :]
        return losses, sum(facts[::2]), int(sum(facts[1::2]))

    def agree(self, *numbers: float) -> Sequence[float]:
        """Return the sums of five numbers over all ranks that make the same update; collective.

        numbers  loss, squares, non-finite elements, stop requests, ignored targets: always these five
        """
        self._control[:] = numbers
        with self.exposed:
            self._sum_of_control.run()
        return self._control.tolist()

    def total(self, *numbers: float) -> list[float]:
        """Return the sums of up to five numbers over all ranks, outside of a step; collective."""
        self._control[:] = 0
        self._control[: len(numbers)] = numbers
        self._sum_of_control.run()
        return self._control[: len(numbers)].tolist()

    def finish(self, totals: Sequence[float]) -> StepResult:
        """Update the parameters if loss and norm are finite, and the loss is no spike.

        totals  as from `agree`
        """
        result, scale = self.result_of(totals, self.targets)
        if not self.skips.accepts(result.loss) and result.updated:
            result = result._replace(updated=False, extras={"is_spike": True})
        if result.updated:
            span = self.recorder.compute(self._update_name, UPDATE)
            self.apply(scale, self.lr, self.step + 1 - self.skips.number)
            self.recorder.end(span)
        self._is_spoiled = not result.updated
        return self.skips.conclude(result._replace(comm_s=self.exposed.take()))

    def result_of(self, totals: Sequence[float], targets: int) -> tuple[StepResult, float]:
        """Return the result of an update, whose loss and gradient are means over the targets that
        count, and the factor of the summed gradient that makes it this mean, clipped (as
        torch.nn.utils.clip_grad_norm_).

        totals   as from `agree`; in them each target has the weight 1 / targets
        targets  of the update, over all ranks
        """
        loss, squares, nonfinite, stop, ignored = totals
        counted = (targets - ignored) / targets if ignored else 1.0
        norm, scale = math.nan, self.skips.loss_scale
        if counted and squares >= 0:
            norm = math.sqrt(squares) / scale / counted
        loss = loss / counted if counted else math.nan
        clip = self.optimizer.settings.clip
        factor = (clip / norm if 0 < clip < norm else 1.0) / scale / counted if counted else 0.0
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        facts = loss, norm, int(nonfinite), self.lr, is_finite, stop > 0
        return StepResult(*facts, counted=counted), factor

    def apply(self, scale: float, lr: float, step: int) -> None:
        """Update this rank's pieces from `scale` times their gradients, which `build` has bound to the
        optimizer.

        step  number of this update, from 1; skipped updates do not count
        """
        self.optimizer.update(scale, lr, step, self.buckets.delayed)

    # Between steps.

    def sync(self) -> None:
        """Make the parameters current on all ranks; collective."""

    def loaded(self) -> None:
        """Continue from new contents of `parameters`, which the caller has written; collective."""
        if self.device.mirror:
            self.device.mirror(self.parameters, self.mirror, self.arena)

    def state(self) -> list[StateBuffer]:
        """Return the state that checkpoints save. The caller must call `sync` first.

        Loading a checkpoint writes into the arrays of this list.
        """
        return [*self.parameter_state(), *self.optimizer_state(), *self.buckets.state()]

    def parameter_state(self) -> list[StateBuffer]:
        """Return the parameters for checkpoints, current on all ranks; collective."""
        own = StateBuffer("parameters", self.parameters, whole(self.storage))
        return [own, *self.frozen_state]

    def optimizer_state(self) -> list[StateBuffer]:
        return self.optimizer.buffers() if self.optimizer.pieces else []

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Continue from values that the arrays of `state` already have, such as a checkpoint's; collective.

        scalars  `skips.scalars()` of that checkpoint; {}: of a new run
        """
        self.skips.restore(scalars)
        device = self.device
        if device.mirror and not device.half and self.frozen.size:
            device.mirror(self.frozen, self.frozen, self.arena)
        self.loaded()

    def held_by_kind(self) -> dict[str, int]:
        """Return this rank's bytes of `parameters`, `gradients`, optimizer `state`, and `scratch`
        of reductions.

        Activations do not count. The caller must call `sync` first.
        """
        counted = set[int]()

        def nbytes(arrays: Iterable[Any]) -> int:
            new = {id(array): array.nbytes for array in arrays if id(array) not in counted}
            counted.update(new)
            return sum(new.values())

        return {
            "parameters": nbytes(self.parameter_arrays),
            "gradients": nbytes(self.gradient_arrays),
            "state": nbytes(buffer.array for buffer in self.state()),
            "scratch": self.grid.scratch_bytes,
        }
