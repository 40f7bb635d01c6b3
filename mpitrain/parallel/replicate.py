"""How replicas of one model stay equal: the Replication protocol, and data parallelism by all-reduce."""

import math
import time
from typing import NamedTuple

import numpy as np

from mpitrain import config
from mpitrain.collectives.group import Group
from mpitrain.layers.flat import Storage
from mpitrain.machine.arena import Arena
from mpitrain.ops import Ops
from mpitrain.optim import Optimizer
from mpitrain.parallel.buckets import Buckets
from mpitrain.parallel.grid import share


class Contribution(NamedTuple):
    """What a rank brings to the end of a step, when its backward pass is done.

    number of the step, from 0
    loss   this rank's part of the mean loss over the global batch
    lr     learning rate
    stop   whether this rank was asked to stop
    """

    number: int
    loss: float
    lr: float
    stop: bool = False


class Outcome(NamedTuple):
    """What every rank knows after a step: the same values on all of them, but for the last.

    loss       mean over the global batch
    grad_norm  global 2-norm of the gradient, before clipping
    nonfinite  gradient elements that are infinite or NaN
    lr         learning rate of the step
    updated    whether the parameters were updated
    stop       whether any rank was asked to stop
    comm_s     seconds this rank stood still for messages at the end of the step: communication that nothing hid
    """

    loss: float
    grad_norm: float
    nonfinite: int
    lr: float
    updated: bool
    stop: bool
    comm_s: float = 0.0


class Replication:
    """What the training step calls, unit by unit. The defaults do nothing: one replica whose parameters lie whole."""

    def __init__(self, ops: Ops, arena: Arena):
        self._ops, self._arena = ops, arena

    def share(self, rows: int) -> range:
        """The rows of a global batch that this rank computes."""
        return range(rows)

    def begin(self, step: int) -> None:
        """Step `step`, from 0, is about to be computed."""

    def open(self, unit: int) -> None:
        """The unit's parameters are about to be used."""

    def close(self, unit: int) -> None:
        """They have been used."""

    def loss(self, logits: np.ndarray, targets: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
        """Summed cross-entropy of (N, V) logits and (N,) targets, and the gradient of scale x that sum."""
        return self._ops.cross_entropy(logits, targets, scale, self._arena)

    def gradient_ready(self, unit: int) -> None:
        """The unit's gradient is complete on this rank; it may be communicated from now on."""

    def poll(self) -> None:
        """Move communication along; called between layers."""

    def total(self, a: float, b: float, c: float, d: float) -> list[float]:
        """Four numbers summed over the replicas, in one small message; collective."""
        return [a, b, c, d]

    def finish(self, mine: Contribution) -> Outcome:
        """Wait for the gradients, agree on the outcome, update the parameters."""
        return Outcome(mine.loss, 0.0, 0, mine.lr, False, mine.stop)

    def serve(self) -> None:
        """The loop of a rank that holds no model."""


class AllReduce(Replication):
    """Data parallelism without a master: every rank computes its rows, gradients are summed by an all-reduce.

    Buckets of whole units lie in the flat gradient buffer; each is reduced in place, from the last unit to the first,
    while earlier layers still compute. With a lossy wire format replicas still end equal, bit for bit.
    source  Li et al. 2020, PyTorch Distributed, VLDB 13(12)
    """

    def __init__(self, group: Group, storage: Storage, parameters: np.ndarray, gradients: np.ndarray, optimizer: Optimizer,
                 ops: Ops, arena: Arena, settings: config.Replication, dense_steps: int, clip: float):
        super().__init__(ops, arena)
        self._group, self._optimizer = group, optimizer
        self._parameters, self._gradients = parameters, gradients
        self._overlap, self._clip = settings.overlap, clip
        self.buckets = Buckets(group, storage, gradients, settings, dense_steps)
        self._control = np.zeros(4)  # on the host
        self._agree = group.bind(self._control)
        # The norm is computed once: each rank squares its share of the reduced gradient.
        own = share(storage.length, group.rank, group.size)
        self._own = gradients[own.start:own.stop]

    def share(self, rows: int) -> range:
        return share(rows, self._group.rank, self._group.size)

    def begin(self, step: int) -> None:
        self.buckets.begin(step)

    def gradient_ready(self, unit: int) -> None:
        if self._overlap:
            self.buckets.start(unit)

    def poll(self) -> None:
        self.buckets.poll()

    def total(self, a: float, b: float, c: float, d: float) -> list[float]:
        self._control[:] = a, b, c, d
        self._agree.run()
        return self._control.tolist()

    def finish(self, mine: Contribution) -> Outcome:
        began = time.perf_counter()
        if self._overlap:
            self.buckets.wait()
        else:
            self.buckets.run()
        comm_s = time.perf_counter() - began
        squares = float(self._ops.square_sum(self._own, self._arena))  # waits for the device
        nonfinite: float = 0 if math.isfinite(squares) else int(self._ops.count_nonfinite(self._own, self._arena))
        began = time.perf_counter()
        loss, squares, nonfinite, stop = self.total(mine.loss, squares, nonfinite, mine.stop)
        comm_s += time.perf_counter() - began
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        updated = math.isfinite(loss) and math.isfinite(norm)
        if updated:
            scale = self._clip / norm if 0 < self._clip < norm else 1.0
            self._optimizer.update(self._parameters, self._gradients, scale, mine.lr, mine.number, delayed=self.buckets.delay)
        return Outcome(loss, norm, int(nonfinite), mine.lr, updated, stop > 0, comm_s)
