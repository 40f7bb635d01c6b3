"""The training step over a list of units, and what else a trained list of units can do."""

import hashlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mpitrain.collectives.cost import Tuning
from mpitrain.collectives.group import Group
from mpitrain.collectives.on_kernels import arithmetic_of
from mpitrain.collectives.tuning import DEFAULT
from mpitrain.config import Config
from mpitrain.data import Source
from mpitrain.layers.base import Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import backend_for
from mpitrain.ops import ops_for
from mpitrain.optim import Optimizer, learning_rate
from mpitrain.parallel.grid import share, topology
from mpitrain.parallel.replicate import AllReduce, Contribution, Outcome
from mpitrain.transport.base import Transport
from mpitrain.transport.cuda_aware import over_device


class Trainer:
    """A list of units with its parameters, gradients and optimizer state, and the step that trains it.

    transport    the one passed in, or one around it that also carries the arrays of config.device.kind
    storage      where each tensor lies in the flat buffers
    parameters   flat buffer, equal on all replicas
    gradients    flat buffer; after a step the sum over all replicas, not clipped
    group        the replicas, and how they reduce: `tuning` is for algorithm auto
    optimizer    its `state` maps names to buffers like `parameters`
    arena        where activations come from
    """

    def __init__(self, transport: Transport, units: Sequence[Unit], config: Config, tuning: Tuning = DEFAULT):
        grid = topology(config, transport.size)
        self.config, self.units = config, list(units)
        assert self.units[-1].layer.output_is_free, "the loss writes its gradient over the logits"
        self.backend = backend_for(config.device.kind)
        self.transport = transport = over_device(transport, self.backend, config.device.cuda_aware)
        self._ops = ops_for(self.backend.kind, config.device.gemm, config.device.tiles)
        self.arena = self.backend.arena()
        self.storage = Storage(self.units, config.precision.compute, grid.dp)
        self.parameters = transport.allocate(self.storage.length, self.storage.dtype)
        self.storage.initialize(self.parameters, config.run.seed, self.backend)
        self.gradients = transport.allocate(self.storage.length, self.storage.dtype)
        self._weights = self.storage.weights(self.parameters)
        self._gradients, self._leaves = self.storage.gradients(self.gradients)
        self.optimizer = Optimizer(config.optimizer, self.storage, self._ops, self.backend, self.arena)
        # With an arena of its own: a thread may reduce while this one computes.
        self.group = Group(transport, config.replication.algorithm, tuning, arithmetic_of(self.backend, self.backend.arena()))
        self.replication = AllReduce(
            self.group, self.storage, self.parameters, self.gradients, self.optimizer, self._ops, self.arena,
            config.replication, config.dense_steps, config.optimizer.clip,
        )

    def share(self) -> range:
        """The rows of the global batch that this rank computes."""
        return self.replication.share(self.config.batch.size)

    def step(self, index: int, inputs: np.ndarray, targets: np.ndarray, stop: bool = False) -> Outcome:
        """One optimizer step; collective.

        index    number of the step, from 0
        inputs   this rank's rows (see `share`) of the global batch
        targets  their classes: (rows,) or (rows, tokens)
        stop     ask all ranks to stop after this step; the outcome tells them
        """
        rows, parts = len(inputs), self.config.batch.micro_batches
        scale = 1 / (self.config.batch.size * targets[0].size)
        self.replication.begin(index)
        for leaf in chain.from_iterable(self._leaves):
            leaf.filled = False
        loss = 0.0
        for part in range(parts):
            mine = share(rows, part, parts)
            here = slice(mine.start, mine.stop)
            loss += scale * self._forward_backward(inputs[here], targets[here], scale, is_last=part == parts - 1)
        lr = learning_rate(self.config.optimizer, index, self.config.run.steps)
        return self.replication.finish(Contribution(index, loss, lr, stop))

    def _forward_backward(self, inputs: np.ndarray, targets: np.ndarray, scale: float, is_last: bool) -> float:
        """Add one micro-batch's gradients; returns its summed loss."""
        replication, arena = self.replication, self.arena
        saved = []
        x = self.backend.from_host(inputs)
        for index, unit in enumerate(self.units):
            replication.open(index)
            x, kept = unit.layer.forward(self._weights[index], x, arena)
            replication.close(index)
            saved.append(kept)
        flat = self.backend.from_host(targets).reshape(-1)
        dy: Any  # None in the end: the first unit's input has no gradient
        loss, dy = replication.loss(x.reshape(len(flat), -1), flat, scale)
        dy = dy.reshape(x.shape)
        del x, kept
        for index in reversed(range(len(self.units))):
            layer = self.units[index].layer
            replication.open(index)
            dy, pending = layer.backward_input(self._weights[index], dy, saved.pop(), arena)
            replication.close(index)
            layer.backward_weight(pending, self._gradients[index])
            del pending
            if is_last:
                for leaf in self._leaves[index]:  # what nobody wrote has no gradient, and not the one of the last step
                    if not leaf.filled:
                        leaf.array.fill(0)
                replication.gradient_ready(index)
            replication.poll()
        return float(loss)

    def logits(self, inputs: np.ndarray) -> np.ndarray:
        """What the model says of these rows: (rows, [tokens,] classes), in this backend's memory. Local."""
        x = self.backend.from_host(inputs)
        for weights, unit in zip(self._weights, self.units, strict=True):
            x, _ = unit.layer.forward(weights, x, self.arena)
        return x

    def evaluate(self, source: Source, stop_requested: Callable[[], bool] = lambda: False) -> tuple[float, float] | None:
        """Mean loss (nats per prediction) and share of right predictions over held-out rows; collective.

        The rows are `evaluated_rows` of them, spread evenly; a batch has no more on a rank than a micro-batch of training.

        stop_requested  asked before every batch; a True on any rank ends the evaluation on all, which then return None
        """
        rows, ranks = evaluated_rows(self.config, source), self.group.size
        together = ranks * max(1, self.config.batch.size // (ranks * self.config.batch.micro_batches))
        totals = np.zeros(3)
        for start in range(0, rows, together):
            mine = share(min(together, rows - start), self.group.rank, ranks)
            is_asked = stop_requested()
            batch = [] if is_asked else [(start + i) * source.held_out // rows for i in mine]
            *sums, stop = self.replication.total(*(self._losses(source, batch) if batch else (0.0, 0, 0)), is_asked)
            if stop:
                return None
            totals += sums
        loss, right, count = totals.tolist()
        return loss / count, right / count

    def _losses(self, source: Source, rows: Sequence[int]) -> tuple[float, int, int]:
        """Summed loss, right predictions and number of predictions over these held-out rows. Local."""
        inputs, targets = source.held_out_rows(rows)
        flat = self.backend.from_host(targets).reshape(-1)
        logits = self.logits(inputs).reshape(len(flat), -1)
        right = self._ops.count_correct(logits, flat, self.arena)
        return float(self._ops.cross_entropy_loss(logits, flat, self.arena)), int(right), len(flat)


def evaluated_rows(config: Config, source: Source) -> int:
    """How many of the held-out rows an evaluation takes."""
    return min(source.held_out, config.run.eval_rows or source.held_out)


def replicas_equal(trainer: Trainer) -> bool:
    """Whether the parameters are bitwise equal on all replicas; collective."""
    digest = hashlib.sha256(trainer.backend.to_host(trainer.parameters).tobytes()).hexdigest()
    return len(set(trainer.transport.gather_text(digest))) == 1
