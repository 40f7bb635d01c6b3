"""Asynchronous pipelines by weight stashing: each stage keeps several versions of its parameters.

Each stage updates its parameters by itself, and the pipeline is not drained after a step. A
micro-batch uses the same version in forward and backward. A step is one batch, as in every mode,
with one learning rate and one line of metrics. With `async` an update uses one micro-batch, as a
mean over its rows in all replicas. With `async-2bw` an update uses the whole batch. A stage clips
by the norm of its own gradient, and skips an update with a non-finite gradient. AdamW's step count
includes skipped updates.

Each micro-batch has its own control message, a non-blocking all-reduce. A stage starts it after the
backward of the micro-batch. With p stages, a stage reads it just before the backward p
micro-batches later. So ranks learn the result of a step some steps later. A stop request ends
training after a later step, which is the same on all ranks. All ranks have read the request before
the first stage begins the last backward of that step.

source  Narayanan et al. 2019, PipeDream, SOSP; Narayanan et al. 2021, Memory-Efficient
        Pipeline-Parallel DNN Training, ICML (2BW)
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.layers.base import Weights
from mpitrain.optim import learning_rate
from mpitrain.parallel.buckets import Buckets, common_buckets, counted_runs
from mpitrain.parallel.grid import share
from mpitrain.parallel.replication.protocol import (
    Replication,
    ReplicationContext,
    StepInput,
    StepResult,
)
from mpitrain.parallel.replication.step_end import AgreeAndUpdate, mean_of, weight_of
from mpitrain.parallel.replication.whole import ReplicaRows, WholeParameters, whole
from mpitrain.regions import Piece
from mpitrain.trace.recorder import UPDATE


class StashedParameters(WholeParameters):
    """Several versions of a stage's parameters; a micro-batch that has begun keeps its version.

    Micro-batches and versions are counted from the last time when the pipeline was empty. After
    each `every` micro-batches an update makes the next version. Micro-batch i uses version
    i // every - (versions - 1), or 0 if this is negative.

    steps   the steps that have begun since the pipeline was last empty
    memory  `versions` times the parameters with which layers compute
    """

    def __init__(self, replica: ReplicationContext, every: int, versions: int):
        super().__init__(replica, whole(replica.storage))
        storage, zeros = replica.storage, replica.device.backend.zeros
        self._every, self._micro_batches = every, replica.config.batch.micro_batches
        self._versions = [
            self.computed,
            *(zeros(storage.length, replica.computed) for _ in range(versions - 1)),
        ]
        self.arrays += self._versions[1:]
        self._views = [storage.weights(version, self.frozen.flat) for version in self._versions]
        self.steps = self._made = 0

    def _newest(self) -> Any:
        return self._versions[self._made % len(self._versions)]

    def open(self, unit: int, micro: int) -> Weights:
        """Return the parameters of a micro-batch, for its forward and its backward.

        micro  number of the micro-batch, modulo twice the micro-batches of a step (as in
               pipeline/async_pipeline.py)
        """
        last = max(1, self.steps) * self._micro_batches - 1
        running = last - (last - micro) % (2 * self._micro_batches)
        version = max(0, running // self._every - (len(self._versions) - 1))
        return self._views[version % len(self._versions)][unit]

    def advance(self) -> None:
        """Make the next version, a copy of the newest one."""
        source = self._newest()
        self._made += 1
        if self._newest() is not source:
            self._newest()[...] = source
        if self.mirror is None:
            self.owned = dict.fromkeys(self.owned, self._newest())

    def update(self, apply: Callable[[Piece, Any, Any], None]) -> None:
        mirror = None if self.mirror is None else self._newest()
        for piece, masters in self.owned.items():
            apply(piece, masters, mirror)

    def drain(self) -> None:
        """Make the newest version version 0. The pipeline must be empty."""
        if self._newest() is not self.computed:
            self.computed[...] = self._newest()
        self.steps = self._made = 0


class StageUpdate(AgreeAndUpdate):
    """The end of each update on one pipeline stage, and of each step when all ranks know its result.

    bytes sent  for each micro-batch an all-reduce of 40 bytes over all ranks; for each update an
                all-reduce of 8 bytes over the replicas of the stage
    every       micro-batches of one update
    """

    store: StashedParameters

    def __init__(self, replica: ReplicationContext, every: int, versions: int):
        grid, backend, owned = replica.grid, replica.device.backend, whole(replica.storage)
        buckets, counted = common_buckets(replica), counted_runs(replica)
        store = StashedParameters(replica, every, versions)
        super().__init__(
            replica, store, Buckets(replica, buckets, grid.copies.bind, owned, counted)
        )
        world, self.every, self._stages = grid.world, every, grid.axes.pp
        stages, recorder = self._stages, self.recorder
        self._micro_batches = m = replica.config.batch.micro_batches
        # All ranks have computed this number of steps before they know the result of a step.
        self._late = -(-(2 * stages - 1) // m)
        # The two numbers are the stage's squares and its non-finite elements.
        self._of_stage = np.zeros(2)
        self._sum_of_stage = grid.tp.bind(self._of_stage)
        # The number of ignored targets in an update, of all replicas.
        self._ignored = np.zeros(1)
        self._sum_of_ignored = grid.copies.bind(self._ignored)
        with recorder.called("the control message"):
            self._messages = [np.zeros(5) for _ in range(stages)]
            self._telling = [world.bind(message) for message in self._messages]
        self._control_name = recorder.name("what all are told", world.transport.members)
        self._losses, self._parts_of_mean = backend.zeros(m, np.float64), [0.0] * m
        self._newest = StepResult(math.nan, math.nan, 0, 0.0, True, False)
        self._known: dict[int, StepResult] = {}
        # The value is the time at which the last backward of a step had ended.
        self._ended: dict[int, float] = {}
        self._wish = False
        self._reset_counts()

    def _reset_counts(self) -> None:
        # `_masks` has the arguments of `ignore` for each step begun.
        # `_numbers` lists the steps begun; `_stop_after` is the index of the last one, if known.
        # `_turns` counts the backwards begun, `_released` the known results.
        # `_received` contains the control messages of all steps that have no known result yet.
        # `_unread` lists the micro-batches that have a running control message.
        self._numbers: list[int] = []
        self._masks: list[tuple[Sequence[int], int]] = []
        self._turns = 0
        self._received: deque[list[float]] = deque()
        self._released = 0
        self._unread: deque[int] = deque()
        self._stop_after: int | None = None

    @property
    def _updates_per_step(self) -> int:
        return self._micro_batches // self.every

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        while step not in self._known:
            yield self._numbers[-1] + 1 if self._numbers else step

    def begin(self, step: int) -> None:
        self._numbers.append(step)
        self._masks.append(((0,) * self._micro_batches, 1))
        self.store.steps = len(self._numbers)

    def ignore(self, targets: Sequence[int], predictions: int) -> None:
        self._masks[-1] = targets, predictions

    def rows_of_update(self, micro: int) -> int:
        """Return the rows, over all replicas, of the update that micro-batch `micro` belongs to."""
        config, n, first = self.replica.config, self.replica.grid.axes.dp, self._first_of(micro)
        return sum(
            len(share(len(share(config.batch.size, replica, n)), at, self._micro_batches))
            for replica in range(n)
            for at in range(first, first + self.every)
        )

    def _first_of(self, micro: int) -> int:
        return micro // self.every * self.every

    @property
    def ends(self) -> bool:
        """Whether the pipeline is drained after the current step.

        The reason is a checkpoint, an evaluation, the end of the run, or a stop request.
        """
        here, asked = len(self._numbers) - 1, self._stop_after
        return self._numbers[-1] + 1 >= self.replica.config.next_pause(self._numbers[0]) or (
            asked is not None and here >= asked
        )

    def lost(self, loss: Any, targets: int, rows: int) -> None:
        """Record the summed loss of the micro-batch whose backward has begun.

        targets  number of targets in the micro-batch
        rows     number of rows of the global batch that this rank computes
        """
        # The last stage runs backward right after forward, so `_turns` numbers this micro-batch.
        at, size = self._turns % self._micro_batches, self.replica.config.batch.size
        self._losses[at] = loss.reshape(()) if hasattr(loss, "reshape") else loss
        predictions = targets // len(share(rows, at, self._micro_batches))
        self._parts_of_mean[at] = weight_of(size * predictions)

    def turn(self) -> bool:
        """Begin the backward of the next micro-batch, and read the control message that is due.

        returns  whether a new gradient begins with this micro-batch
        """
        if self._turns >= self._stages:
            self._read_control_message()
        is_new = self._turns % self.every == 0
        if is_new:
            super().begin(self._numbers[self._turns // self._micro_batches])
        return is_new

    def turned(self) -> None:
        """End the backward of a micro-batch: update if a gradient is complete, and start the
        control message.
        """
        micro, self._turns = self._turns, self._turns + 1
        grid, at, squares, nonfinite = self.replica.grid, micro % self._micro_batches, 0.0, 0.0
        step_input = StepInput(
            micro,
            self._losses[at : at + 1] if grid.reports_loss else (),
            0.0,
            weights=self._parts_of_mean[at : at + 1],
        )
        if self._turns % self.every == 0:
            loss, squares, nonfinite = self._make(micro, step_input)
        else:
            loss = self.replica.gradient_stats(step_input, ())[0]
        message = self._messages[micro % self._stages]
        ignored, _ = self._masks[micro // self._micro_batches]
        message[:] = loss, 0, 0, 0, ignored[at] if grid.reports_loss else 0
        if grid.coords.tp == grid.coords.dp == 0:
            message[1:3] = squares, nonfinite
        message[3] = self._wish
        self._telling[micro % self._stages].start()
        self._unread.append(micro)
        if self._turns % self._micro_batches == 0:
            self._ended[self._numbers[micro // self._micro_batches]] = time.perf_counter()

    def _make(self, micro: int, step_input: StepInput) -> tuple[float, float, float]:
        """Make the next version of the parameters.

        returns  this rank's loss, and the squares and non-finite elements of the stage's gradient
        """
        step, config = self._numbers[micro // self._micro_batches], self.replica.config
        loss, *of_stage = self.sum(step_input)
        self._of_stage[:] = of_stage
        self._sum_of_stage.run()
        # These are sums over the stage's tensor-parallel group.
        squares, nonfinite = self._of_stage.tolist()
        mean = mean_of(0.0, squares, *self._ignored_of(micro), clip=config.optimizer.clip)
        squares = squares / mean.counted**2 if mean.counted else 0.0
        span = self.recorder.compute(self.update_name, UPDATE)
        self.store.advance()
        if mean.counted and math.isfinite(squares):
            earlier = step * self._updates_per_step + micro % self._micro_batches // self.every
            lr = learning_rate(config.optimizer, step, config.run.steps)
            self.apply(mean.scale, lr, earlier + 1)
        self.recorder.end(span)
        return loss, squares, nonfinite

    def _ignored_of(self, micro: int) -> tuple[float, int]:
        """Return the ignored targets and all targets of an update; collective over the replicas.

        micro  the last micro-batch of the update
        """
        at = micro % self._micro_batches
        ignored, predictions = self._masks[micro // self._micro_batches]
        first = self._first_of(at)
        self._ignored[0] = sum(ignored[first : first + self.every])
        self._sum_of_ignored.run()
        return float(self._ignored[0]), self.rows_of_update(at) * predictions

    def _read_control_message(self) -> None:
        micro = self._unread.popleft()
        wait = self.recorder.wait(self._control_name)
        with self.replica.exposed:
            self._telling[micro % self._stages].wait()
        self.recorder.go_on(wait)
        self._received.append(self._messages[micro % self._stages].tolist())
        if self._received[-1][3] and self._stop_after is None:
            self._stop_after = (micro + 2 * self._stages - 1) // self._micro_batches

    def poll(self) -> None:
        for micro in self._unread:
            self._telling[micro % self._stages].poll()

    def finish(self, step_input: StepInput) -> StepResult:
        """Return the newest known result, which belongs to an earlier step until the pipeline is
        drained.
        """
        self._wish |= step_input.stop
        self._release(len(self._numbers) - self._late)
        for late in (self._known, self._ended):
            for step in [step for step in late if step < step_input.number - self._late]:
                del late[step]
        return self._newest

    def _release(self, steps: int, is_end: bool = False) -> None:
        """Compute the results of the first `steps` steps, unless they are known already.

        is_end  whether the pipeline is drained after these steps; the last of them then reports a
                stop request
        """
        config, m = self.replica.config, self._micro_batches
        for at in range(self._released, steps):
            step = self._numbers[at]
            messages = [self._received.popleft() for _ in range(m)]
            losses, squares, nonfinite, _, ignored = (
                sum(column) for column in zip(*messages, strict=True)
            )
            mean = mean_of(losses, 0.0, ignored, config.batch.size * self._masks[at][1])
            norm = math.sqrt(squares / self._updates_per_step) if squares >= 0 else math.nan
            stops = is_end and at == steps - 1 and self._stop_after is not None
            self._newest = self._known[step] = StepResult(
                mean.loss,
                norm,
                int(nonfinite),
                learning_rate(config.optimizer, step, config.run.steps),
                math.isfinite(mean.loss) and math.isfinite(norm),
                stops,
                counted=mean.counted,
            )
        self._released = max(self._released, steps)

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        waited = self.replica.exposed.take()
        return self._known.pop(step)._replace(comm_s=waited, ended=self._ended.pop(step))

    def sync(self) -> None:
        """Read all remaining control messages, and make the newest version version 0.

        The pipeline must be empty.
        """
        if not self._numbers:
            return
        while self._unread:
            self._read_control_message()
        self._release(len(self._numbers), is_end=True)
        self.store.drain()
        self._reset_counts()


class StashedRows(ReplicaRows):
    """The rows of a replica. An update uses `every` micro-batches of all replicas."""

    def __init__(self, replica: ReplicationContext, step_end: StageUpdate):
        super().__init__(replica)
        self._step_end = step_end

    def of_update(self, micro: int) -> int:
        return self._step_end.rows_of_update(micro)

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        value, gradient = super().loss(logits, targets, scale)
        self._step_end.lost(value, len(targets), len(self.share(self._size)))
        return value, gradient


def stashing(replica: ReplicationContext, every: int, versions: int) -> Replication:
    """Return weight stashing with an update after each `every` micro-batches; collective."""
    step_end = StageUpdate(replica, every, versions)
    return Replication(replica, step_end, StashedRows(replica, step_end))


def pipedream(replica: ReplicationContext) -> Replication:
    """Return PipeDream (Narayanan et al. 2019): an update after each micro-batch.

    Stage s of p keeps p - s versions.
    """
    return stashing(replica, 1, replica.grid.axes.pp - replica.grid.coords.pp)


def pipedream_2bw(replica: ReplicationContext) -> Replication:
    """Return PipeDream-2BW (Narayanan et al. 2021): an update after each batch.

    Without momentum it is W(t+1) = W(t) - lr * g(W(t-1)), with g the gradient of batch t. Every
    stage keeps two versions. The first two batches after the pipeline was empty both use W(0).
    """
    return stashing(replica, replica.config.batch.micro_batches, 2)
