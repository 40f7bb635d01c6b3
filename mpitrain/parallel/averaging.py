"""Model averaging: each worker updates its own parameters, and the model is their average."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain import config
from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.group import Group
from mpitrain.collectives.plans.steps import Plan, Step, Transfer
from mpitrain.layers.flat import Bucket
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.parallel.replica import (
    SINGLE_RANKS,
    Replica,
    Sizes,
    SkippedUpdates,
    StepResult,
    whole,
)
from mpitrain.regions import Piece


def has_outer(settings: config.Replication) -> bool:
    """Return whether local SGD has an outer optimizer (DiLoCo), which keeps two more buffers."""
    return settings.outer_lr != 1 or settings.outer_momentum != 0


class SkippedByWorker(SkippedUpdates):
    """The count of this worker's skipped updates. Checkpoints save the counts of all workers."""

    def __init__(self, workers: Group):
        super().__init__()
        self._workers = workers

    def scalars(self) -> dict[str, float]:
        """Return the skipped updates of each worker, and their mean; collective."""
        counts = self._workers.transport.gather_text(self.number)
        return {
            "skipped_updates": sum(counts) // len(counts),
            **{_skipped_by(worker): count for worker, count in enumerate(counts)},
        }

    def restore(self, scalars: Mapping[str, float]) -> None:
        super().restore(scalars)
        workers, me = self._workers.size, self._workers.rank
        # The condition is true if the checkpoint has as many workers as this run.
        if _skipped_by(workers - 1) in scalars and _skipped_by(workers) not in scalars:
            self.number = int(scalars[_skipped_by(me)])


def _skipped_by(worker: int) -> str:
    return f"skipped_updates.{worker}"


class Averaging(Replica):
    """A worker that updates its own parameters from its own rows; `mix` combines those of all.

    The gradient of a worker is the mean over its own rows, clipped by its own norm. A worker skips
    its update if its loss or its norm is not finite.

    Evaluations and checkpoints use the average of all workers' parameters, in a second buffer.
    Training continues from each worker's own parameters, also after the last step. So a finished
    run that is extended equals a run of the full length. In half precision the mirror has the
    values of the buffer in use.

    A period has replication.period steps. At the end of each period and of the run, all ranks
    exchange skipped updates and stop requests. Only these steps have the same result on all ranks:
    the loss is the mean over the global batch, the norm the root mean square of the workers' norms.
    In all other steps loss and norm are this worker's own.

    own                this worker's parameters
    average            the average that the last `sync` computed; between updates also scratch memory
    is_current         whether `average` is the average of the present parameters
    weight             of this worker's loss: its fraction of the global batch
    weight_in_average  of this worker's parameters
    """

    needs = SINGLE_RANKS

    @staticmethod
    def updates_early(settings: config.Replication) -> bool:
        return True

    @staticmethod
    def exchange(settings: config.Replication) -> int:
        return settings.period

    def build(self, optimizer: config.Optimizer) -> None:
        self.rows_of_update = len(self.own_rows)
        self.weight = self.weight_in_average = self.rows_of_update / self.size
        super().build(optimizer)
        self.skips = SkippedByWorker(self.grid.copies)
        # The first three of six numbers are loss, squared norm and ignored targets of this step.
        # The others are sums since the last exchange: non-finite elements, skipped updates and stop
        # requests.
        self._exchanged = np.zeros(6)
        self._sum_of_exchanged = self.grid.world.bind(self._exchanged)

    def make_parameters(self) -> None:
        super().make_parameters()
        storage, grid = self.storage, self.grid
        self.own, self._own_weights = self.parameters, self._weights
        self.average = grid.world.transport.allocate(storage.length, storage.dtype)
        self._average_weights = (
            storage.weights(self.average, self.frozen) if self.mirror is None else self._weights
        )
        self.mirrors = {}  # `begin` and `sync` write the mirror
        self.parameter_arrays.append(self.average)
        self._sum_of_all = grid.copies.bind(self.average)
        self.is_current = True

    def make_gradients(self) -> None:
        super().make_gradients()
        self.members = self.grid.tp.transport.members

    def cut(self, firsts: Sequence[int] = ()) -> Sequence[Bucket]:
        return ()

    def counted(self) -> Sequence[Piece]:
        return whole(self.storage)

    def add(self, a: Any, alpha: float, b: Any, beta: float, out: Any) -> None:
        self.device.ops.weighted_sum(a, alpha, b, beta, out, self.arena)

    def prepare(self) -> None:
        super().prepare()
        self.parameters, self._weights = self.own, self._own_weights
        self.loaded()

    def agree(self, *numbers: float) -> Sequence[float]:
        return numbers  # most steps have no all-reduce

    def finish(self, totals: Sequence[float]) -> StepResult:
        own = super().finish(totals)
        with self.exposed:
            is_end_of_period = (self.step + 1) % self.settings.period == 0
            self.is_current = False
            self.mix(self.step, is_end_of_period)
            is_bad = not own.updated and own.counted > 0
            self._exchanged[3:] += own.nonfinite, is_bad, own.stop
            result = own._replace(nonfinite=0, updated=True, stop=False)
            if is_end_of_period or self.step + 1 == self.run.steps:
                result = self._exchange(own)
        return result._replace(comm_s=own.comm_s + self.exposed.take())

    @abstractmethod
    def mix(self, step: int, is_end_of_period: bool) -> None:
        """Combine the parameters of all workers after step `step`, from 0; collective."""

    def _exchange(self, own: StepResult) -> StepResult:
        """Return the result of a step that is equal on all ranks; collective."""
        weight, ignored = self.weight, sum(self.ignored)
        self._exchanged[:3] = (
            (weight * (own.loss * own.counted), weight * own.grad_norm**2, ignored)
            if own.counted
            else (0.0, 0.0, ignored)
        )
        self._sum_of_exchanged.run()
        loss, squares, ignored_by_all, nonfinite, left_out, stops = self._exchanged.tolist()
        self._exchanged[:] = 0
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        totals = loss, 0.0, nonfinite, stops, ignored_by_all
        result, _ = self.result_of(totals, round(self.targets / weight))
        return result._replace(grad_norm=norm, updated=left_out == 0 and result.counted > 0)

    def apply(self, scale: float, lr: float, step: int) -> None:
        super().apply(scale, lr, step)
        self.is_current = False

    def sync(self) -> None:
        if not self.is_current:
            self.add(self.own, self.weight_in_average, None, 0.0, self.average)
            self._sum_of_all.run()
            self.is_current = True
        self.parameters, self._weights = self.average, self._average_weights
        self.loaded()

    def parameter_state(self) -> list[StateBuffer]:
        """Return the average and each worker's own parameters.

        Another layout starts all workers from the average.
        """
        self.sync()
        average, *frozen = super().parameter_state()
        own = StateBuffer("own_parameters", self.own, average.pieces, "bound", like=average.name)
        return [average, *frozen, own]

    def optimizer_state(self) -> list[StateBuffer]:
        return [buffer._replace(kind="mean") for buffer in super().optimizer_state()]


class LocalSGD(Averaging):
    """Local SGD, and DiLoCo: after each period all workers continue from the same parameters.

    In local SGD these are the average of all workers' parameters, weighted by their rows. A run
    that ends within a period saves this average as its model. If the run is extended, each worker
    continues from its own parameters.

    DiLoCo has an outer optimizer, which takes the average as a proposal. `start` is the parameters
    at the beginning of the period, and m is 0 at first:

        delta = start - average
        m     = outer_momentum m + delta
        start = start - outer_lr (delta + outer_momentum m)       all workers continue from here

    The defaults outer_lr 1 and outer_momentum 0 give the average itself, and so local SGD.

    bytes sent  at the end of a period an all-reduce of the parameters' bytes and one of 48; in
                other steps an all-reduce of the parameters' bytes for a checkpoint or an
                evaluation, otherwise none
    memory      twice the parameters; four times with an outer optimizer
    source      Stich 2019, Local SGD Converges Fast and Communicates Little, ICLR; for the outer
                Nesterov momentum Douillard et al. 2023, DiLoCo, arXiv:2311.08105
    """

    help = (
        "local SGD; workers update by themselves and average parameters every "
        "replication.period steps"
    )

    @staticmethod
    def memory(sizes: Sizes) -> float:
        more = 3 if has_outer(sizes.settings) else 1
        return sizes.replica + more * sizes.master * sizes.length

    def make_parameters(self) -> None:
        super().make_parameters()
        self._outer = dict[str, Any]()
        if has_outer(self.settings):
            self._outer = {
                name: self.device.backend.zeros(self.storage.length, self.storage.dtype)
                for name in ("outer_start", "outer_momentum")
            }

    def mix(self, step: int, is_end_of_period: bool) -> None:
        if is_end_of_period:
            self.sync()
            if self._outer:
                self._propose(self.average)
            self.own[:] = self.average

    def _propose(self, average: np.ndarray) -> None:
        settings, ops, arena = self.settings, self.device.ops, self.arena
        start, momentum = self._outer.values()
        lr, beta, delta = settings.outer_lr, settings.outer_momentum, average
        self.add(start, 1.0, average, -1.0, delta)
        ops.momentum(
            start,
            delta,
            momentum,
            scale=1.0,
            lr=lr * beta,
            beta=beta,
            weight_decay=0.0,
            arena=arena,
        )
        ops.sgd(start, delta, scale=1.0, lr=lr, weight_decay=0.0, arena=arena)
        average[:] = start

    def optimizer_state(self) -> list[StateBuffer]:
        pieces, like = whole(self.storage), {"outer_start": "parameters"}
        outer = [
            StateBuffer(name, buffer, pieces, needed=False, like=like.get(name, ""))
            for name, buffer in self._outer.items()
        ]
        return [*super().optimizer_state(), *outer]


def distances(n: int) -> list[int]:
    """Return the distances between neighbours in successive steps: 1, 2, 4 ... below n.

    After the last distance the first one follows. If n is a power of two and no worker updates, all
    n workers have the global average after one round of distances.
    """
    return [1 << bit for bit in range(max(1, (n - 1).bit_length()))]


class Gossip(Averaging):
    """Gossip averaging over an exponential graph: in each step a worker averages with one other.

    In step k the distance d is 2^(k mod ceil(lg n)). Worker r sends its parameters to worker r + d,
    and averages its own with those of worker r - d. All workers have equal weight, whatever their
    rows, so the mean over all workers does not change.

    bytes sent  the parameters' bytes in each step; at the end of a period an all-reduce of 48 bytes
    memory      twice the parameters
    source      Ying et al. 2021, Exponential Graph is Provably Efficient for Decentralized Deep
                Training, NeurIPS 34
    """

    help = "workers update by themselves and average with one neighbour after each step"

    @staticmethod
    def memory(sizes: Sizes) -> float:
        return sizes.replica + sizes.master * sizes.length

    def build(self, optimizer: config.Optimizer) -> None:
        super().build(optimizer)
        self.weight_in_average = 1 / self.grid.copies.size
        transport, length = self.grid.copies.transport, self.storage.length
        n, rank = transport.size, transport.rank
        with transport.recorder.called("parameters of a neighbour"):
            self._shifts = [
                Execution(
                    transport,
                    self.average,
                    "add",
                    Plan(
                        (
                            Step(
                                (Transfer((rank + distance) % n, 0, length),),
                                (Transfer((rank - distance) % n, 0, length),),
                            ),
                        )
                    ),
                    transport.claim_tag(),
                    outgoing=self.own,
                )
                for distance in distances(n)
            ]

    def mix(self, step: int, is_end_of_period: bool) -> None:
        # The second buffer receives the neighbour's parameters.
        self._shifts[step % len(self._shifts)].run()
        self.add(self.own, 0.5, self.average, 0.5, self.own)
