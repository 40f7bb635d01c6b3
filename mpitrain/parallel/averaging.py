"""Model averaging: each worker updates its own parameters, and the model is their average."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.group import Group
from mpitrain.collectives.plans.steps import Plan, Step, Transfer
from mpitrain.parallel.mode import has_outer
from mpitrain.parallel.replication.protocol import (
    Replication,
    ReplicationContext,
    StateBuffer,
    StepInput,
    StepResult,
)
from mpitrain.parallel.replication.step_end import AgreeAndUpdate, SkippedUpdates, mean_of
from mpitrain.parallel.replication.whole import LocalGradients, OwnRows, WholeParameters, whole
from mpitrain.regions import Piece


class AveragedParameters(WholeParameters):
    """A worker's own parameters, and a second buffer with the average of all workers' parameters.

    Evaluations and checkpoints use the average. Training continues from each worker's own
    parameters, also after the last step. So a finished run that is extended equals a run of the
    full length. In half precision the mirror has the values of the buffer in use.

    own         this worker's parameters
    average     the average that the last `sync` computed; between updates also scratch memory
    is_current  whether `average` is the average of the present parameters
    """

    def __init__(self, replica: ReplicationContext, weight: float):
        """Allocate the second buffer, and bind the sum over all workers; collective.

        weight  of this worker's parameters in the average
        """
        super().__init__(replica, whole(replica.storage))
        storage, grid = replica.storage, replica.grid
        self.own, self._own_weights, self._weight = self.parameters, self.weights, weight
        self.average = grid.world.transport.allocate(storage.length, storage.dtype)
        self.average[:] = self.own
        self._average_weights = (
            storage.weights(self.average, self.frozen.flat) if self.mirror is None else self.weights
        )
        self.arrays.append(self.average)
        self._sum_of_all = grid.copies.bind(self.average)
        self.is_current = True

    def add(self, a: Any, alpha: float, b: Any, beta: float, out: Any) -> None:
        self._replica.device.ops.weighted_sum(a, alpha, b, beta, out, self._replica.arena)

    def resume(self) -> None:
        self.parameters, self.weights = self.own, self._own_weights
        self.loaded()

    def update(self, apply: Callable[[Piece, Any, Any], None]) -> None:
        for piece, own in self.owned.items():
            apply(piece, own, None)
        self.is_current = False

    def sync(self) -> None:
        if not self.is_current:
            self.add(self.own, self._weight, None, 0.0, self.average)
            self._sum_of_all.run()
            self.is_current = True
        self.parameters, self.weights = self.average, self._average_weights
        self.loaded()

    def state(self) -> list[StateBuffer]:
        """Return the average and each worker's own parameters.

        Another layout starts all workers from the average.
        """
        self.sync()
        average, *frozen = super().state()
        own = StateBuffer("own_parameters", self.own, average.pieces, "bound", like=average.name)
        return [average, *frozen, own]


class SkippedByWorker(SkippedUpdates):
    """The count of this worker's skipped updates. Checkpoints save the counts of all workers."""

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica.config.precision.compute)
        self._workers: Group = replica.grid.copies

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


class Mixer(Protocol):
    """The way in which workers combine their parameters after each has updated its own."""

    def mix(self, step: int, is_end_of_period: bool) -> None:
        """Combine the parameters of all workers after step `step`, from 0; collective."""

    def state(self) -> list[StateBuffer]:
        """Return the buffers that checkpoints save, besides parameters and optimizer state."""


class LocalUpdate(AgreeAndUpdate):
    """Each worker updates from its own rows; then a `Mixer` combines the workers' parameters.

    The gradient of a worker is the mean over its own rows, clipped by its own norm. A worker skips
    its update if its loss or its norm is not finite.

    A period has replication.period steps. At the end of each period and of the run, all ranks
    exchange skipped updates and stop requests. Only these steps have the same result on all ranks:
    the loss is the mean over the global batch, the norm the root mean square of the workers' norms.
    In all other steps loss and norm are this worker's own.
    """

    store: AveragedParameters

    def __init__(
        self,
        replica: ReplicationContext,
        mixer: Callable[[ReplicationContext, AveragedParameters], Mixer],
        weight: float,
        weight_in_average: float,
    ):
        """Bind the all-reduce of losses, skipped updates and stop requests; collective.

        weight             weight of this worker's loss: its fraction of the global batch
        weight_in_average  weight of this worker's parameters in the average
        """
        owned, store = whole(replica.storage), AveragedParameters(replica, weight_in_average)
        super().__init__(replica, store, LocalGradients(replica, owned, owned))
        self.skips, self._weight = SkippedByWorker(replica), weight
        self._mixer = mixer(replica, store)
        # The first three of six numbers are loss, squared norm and ignored targets of this step.
        # The others are sums since the last exchange: non-finite elements, skipped updates and stop
        # requests.
        self._numbers = np.zeros(6)
        self._sum_numbers = replica.grid.world.bind(self._numbers)

    def begin(self, step: int) -> None:
        super().begin(step)
        self.store.resume()

    def finish(self, step_input: StepInput) -> StepResult:
        # Most steps have no all-reduce: the sums of `agree` are this rank's own numbers.
        own = self.update(step_input, lambda *numbers: numbers)
        config = self.replica.config
        with self.replica.exposed:
            is_end_of_period = (step_input.number + 1) % config.replication.period == 0
            self.store.is_current = False
            self._mixer.mix(step_input.number, is_end_of_period)
            is_bad = not own.updated and own.counted > 0
            self._numbers[3:] += own.nonfinite, is_bad, own.stop
            result = own._replace(nonfinite=0, updated=True, stop=False)
            if is_end_of_period or step_input.number + 1 == config.run.steps:
                result = self._exchange(step_input, own)
        return result._replace(comm_s=own.comm_s + self.replica.exposed.take())

    def _exchange(self, step_input: StepInput, own: StepResult) -> StepResult:
        """Return the result of a step that is equal on all ranks; collective."""
        weight = self._weight
        self._numbers[:3] = (
            (weight * (own.loss * own.counted), weight * own.grad_norm**2, step_input.ignored)
            if own.counted
            else (0.0, 0.0, step_input.ignored)
        )
        self._sum_numbers.run()
        loss, squares, ignored, nonfinite, left_out, stops = self._numbers.tolist()
        self._numbers[:] = 0
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        mean = mean_of(loss, 0.0, ignored, round(step_input.targets / weight))
        return StepResult(
            mean.loss,
            norm,
            int(nonfinite),
            own.lr,
            left_out == 0 and mean.counted > 0,
            stops > 0,
            counted=mean.counted,
        )

    def state(self) -> list[StateBuffer]:
        own = [buffer._replace(kind="mean") for buffer in super().state()]
        return [*own, *self._mixer.state()]


def averaging(
    replica: ReplicationContext,
    mixer: Callable[[ReplicationContext, AveragedParameters], Mixer],
    weight_in_average: float | None = None,
) -> Replication:
    """Return a mode of model averaging; collective.

    weight_in_average  of this worker's parameters; None: the worker's fraction of the rows
    """
    rows, size = OwnRows(replica), replica.config.batch.size
    weight = len(rows.share(size)) / size
    step_end = LocalUpdate(replica, mixer, weight, weight_in_average or weight)
    return Replication(replica, step_end, rows)


class PeriodicAverage:
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

    def __init__(self, replica: ReplicationContext, store: AveragedParameters):
        self._replica, self._store = replica, store
        storage, self._outer = replica.storage, dict[str, Any]()
        if has_outer(replica.config.replication):
            self._outer = {
                name: replica.device.backend.zeros(storage.length, storage.dtype)
                for name in ("outer_start", "outer_momentum")
            }
            self._outer["outer_start"][:] = store.own

    def mix(self, step: int, is_end_of_period: bool) -> None:
        if is_end_of_period:
            self._store.sync()
            if self._outer:
                self._propose(self._store.average)
            self._store.own[:] = self._store.average

    def _propose(self, average: np.ndarray) -> None:
        settings, ops, arena = (
            self._replica.config.replication,
            self._replica.device.ops,
            self._replica.arena,
        )
        start, momentum = self._outer.values()
        lr, beta, delta = settings.outer_lr, settings.outer_momentum, average
        self._store.add(start, 1.0, average, -1.0, delta)
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

    def state(self) -> list[StateBuffer]:
        pieces, like = whole(self._replica.storage), {"outer_start": "parameters"}
        return [
            StateBuffer(name, buffer, pieces, needed=False, like=like.get(name, ""))
            for name, buffer in self._outer.items()
        ]


def local_sgd(replica: ReplicationContext) -> Replication:
    return averaging(replica, PeriodicAverage)


def distances(n: int) -> list[int]:
    """Return the distances between neighbours in successive steps: 1, 2, 4 ... below n.

    After the last distance the first one follows. If n is a power of two and no worker updates, all
    n workers have the global average after one round of distances.
    """
    return [1 << bit for bit in range(max(1, (n - 1).bit_length()))]


class NeighbourAverage:
    """Gossip averaging over an exponential graph: in each step a worker averages with one other.

    In step k the distance d is 2^(k mod ceil(lg n)). Worker r sends its parameters to worker r + d,
    and averages its own with those of worker r - d. All workers have equal weight, whatever their
    rows, so the mean over all workers does not change.

    bytes sent  the parameters' bytes in each step; at the end of a period an all-reduce of 48 bytes
    memory      twice the parameters
    source      Ying et al. 2021, Exponential Graph is Provably Efficient for Decentralized Deep
                Training, NeurIPS 34
    """

    def __init__(self, replica: ReplicationContext, store: AveragedParameters):
        self._store = store
        transport, length = replica.grid.copies.transport, replica.storage.length
        n, rank = transport.size, transport.rank
        with transport.recorder.called("parameters of a neighbour"):
            self._shifts = [
                Execution(
                    transport,
                    store.average,
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
                    outgoing=store.own,
                )
                for distance in distances(n)
            ]

    def mix(self, step: int, is_end_of_period: bool) -> None:
        # The second buffer receives the neighbour's parameters.
        self._shifts[step % len(self._shifts)].run()
        own = self._store.own
        self._store.add(own, 0.5, self._store.average, 0.5, own)

    def state(self) -> list[StateBuffer]:
        return []


def gossip(replica: ReplicationContext) -> Replication:
    return averaging(replica, NeighbourAverage, 1 / replica.grid.copies.size)
