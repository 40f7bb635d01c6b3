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

from mpitrain import config
from mpitrain.layers.base import Weights
from mpitrain.parallel.replica import Replica, Sizes, StepResult
from mpitrain.regions import Piece, share
from mpitrain.trace.recorder import UPDATE


class PipeDream(Replica):
    """A stage of a pipeline that updates by itself after each micro-batch, with several versions of
    its parameters (Narayanan et al. 2019).

    A micro-batch that has begun keeps its version. Micro-batches and versions are counted from the
    last time when the pipeline was empty. After each `every` micro-batches an update makes the next
    version. Micro-batch i uses version i // every - (versions - 1), or 0 if this is negative.

    every       micro-batches of one update
    versions    number of versions
    begun       the steps that have begun since the pipeline was last empty
    memory      `versions` times the parameters with which layers compute
    bytes sent  for each micro-batch an all-reduce of 40 bytes over all ranks; for each update an
                all-reduce of 8 bytes over the replicas of the stage
    """

    help = "(PipeDream) updates after every micro-batch"
    needs = {
        "replication.mode": "all-reduce",
        "replication.zero": 0,
        "replication.wire": "none",
        "layout.cp": 1,
    }

    @property
    def every(self) -> int:
        return 1

    @property
    def versions(self) -> int:
        return self.grid.axes.pp - self.grid.coords.pp

    @staticmethod
    def memory(sizes: Sizes) -> float:
        # Stage s of p stores p - s versions of the parameters with which layers compute.
        return sizes.replica + (sizes.axes.pp - 1) / 2 * sizes.computed * sizes.length

    @staticmethod
    def updates_early(settings: config.Replication) -> bool:
        return True

    def build(self, optimizer: config.Optimizer) -> None:
        super().build(optimizer)
        # The calls of the optimizer that update each version, bound once.
        self._bound = [
            self.optimizer.bind(
                {
                    piece: (version, gradients, None)
                    if self.mirror is None
                    else (self.parameters, gradients, version)
                    for piece, gradients in self.summed.items()
                }
            )
            for version in self._versions
        ]
        grid, recorder, m = self.grid, self.recorder, self.micro_batches
        self._stages = stages = grid.axes.pp
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
            self._telling = [grid.world.bind(message) for message in self._messages]
        self._control_name = recorder.name("what all are told", grid.world.transport.members)
        self._newest_result = StepResult(math.nan, math.nan, 0, 0.0, True, False)
        self._known: dict[int, StepResult] = {}
        # The value is the time at which the last backward of a step had ended.
        self._ended: dict[int, float] = {}
        self._wish = False
        self._reset_counts()

    def make_parameters(self) -> None:
        super().make_parameters()
        storage, zeros = self.storage, self.device.backend.zeros
        self._versions = [
            self.used,
            *(zeros(storage.length, self.computed) for _ in range(self.versions - 1)),
        ]
        self.parameter_arrays += self._versions[1:]
        self._views = [storage.weights(version, self.frozen) for version in self._versions]
        self.begun = self._made = 0

    def counted(self) -> Sequence[Piece]:
        return [
            run for _, run in self.counted_runs()
        ]  # every replica of a stage clips by the stage's own norm

    def _newest(self) -> Any:
        return self._versions[self._made % len(self._versions)]

    def open(self, unit: int, micro: int) -> Weights:
        """Return the parameters of a micro-batch, for its forward and its backward.

        micro  number of the micro-batch, modulo twice the micro-batches of a step (as in
               pipeline/async_pipeline.py)
        """
        last = max(1, self.begun) * self.micro_batches - 1
        running = last - (last - micro) % (2 * self.micro_batches)
        version = max(0, running // self.every - (len(self._versions) - 1))
        return self._views[version % len(self._versions)][unit]

    def advance(self) -> None:
        """Make the next version, a copy of the newest one."""
        source = self._newest()
        self._made += 1
        if self._newest() is not source:
            self._newest()[...] = source
        self.optimizer.bound = self._bound[self._made % len(self._bound)]

    def drain_versions(self) -> None:
        """Make the newest version version 0. The pipeline must be empty."""
        if self._newest() is not self.used:
            self.used[...] = self._newest()
        self.begun = self._made = 0

    def _reset_counts(self) -> None:
        # `_begun` has (step, lr, ignored targets by micro-batch, predictions) of each step begun.
        # `_stop_after` is the index of the last one, if known.
        # `_turns` counts the backwards begun, `_released` the known results.
        # `_received` contains the control messages of all steps that have no known result yet.
        # `_unread` lists the micro-batches that have a running control message.
        self._begun: list[tuple[int, float, Sequence[int], int]] = []
        self._turns = 0
        self._received: deque[list[float]] = deque()
        self._released = 0
        self._unread: deque[int] = deque()
        self._stop_after: int | None = None

    @property
    def _updates_per_step(self) -> int:
        return self.micro_batches // self.every

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        while step not in self._known:
            yield self._begun[-1][0] + 1 if self._begun else step

    def begin(
        self, step: int, lr: float = 0.0, ignored: Sequence[int] = (), predictions: int = 1
    ) -> None:
        super().begin(step, lr, ignored, predictions)
        micros = range(self.micro_batches)
        self.weights = [1 / (self.of_update(micro) * predictions) for micro in micros]
        self._begun.append((step, lr, self.ignored, predictions))
        self.begun = len(self._begun)

    def prepare(self) -> None:
        """Do nothing: `turn` marks gradients as empty, before a first backward."""

    def of_update(self, micro: int) -> int:
        """Return the rows, over all ranks, of the update that micro-batch `micro` belongs to."""
        n, first = self.grid.axes.dp, self._first_of(micro)
        return sum(
            len(share(len(share(self.size, replica, n)), at, self.micro_batches))
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
        here, asked = len(self._begun) - 1, self._stop_after
        return self._begun[-1][0] + 1 >= self.next_pause(self._begun[0][0]) or (
            asked is not None and here >= asked
        )

    def turn(self) -> bool:
        """Begin the backward of the next micro-batch, and read the control message that is due.

        returns  whether a new gradient begins with this micro-batch
        """
        if self._turns >= self._stages:
            self._read_control_message()
        is_new = self._turns % self.every == 0
        if is_new:
            super().prepare()
        return is_new

    def turned(self) -> None:
        """End the backward of a micro-batch: update if a gradient is complete, and start the
        control message.
        """
        micro, self._turns = self._turns, self._turns + 1
        grid, at, squares, nonfinite = self.grid, micro % self.micro_batches, 0.0, 0.0
        step, _, ignored, predictions = self._begun[micro // self.micro_batches]
        losses, loss = list[float](), 0.0
        if self._turns % self.every == 0:
            losses, squares, nonfinite = self._make(micro)
        elif grid.reports_loss:
            losses = self.device.backend.to_host(self.losses).tolist()
        if grid.reports_loss:
            loss = 1 / (self.size * predictions) * float(losses[at])
        message = self._messages[micro % self._stages]
        message[:] = loss, 0, 0, 0, ignored[at] if grid.reports_loss else 0
        if grid.coords.tp == grid.coords.dp == 0:
            message[1:3] = squares, nonfinite
        message[3] = self._wish
        self._telling[micro % self._stages].start()
        self._unread.append(micro)
        if self._turns % self.micro_batches == 0:
            self._ended[step] = time.perf_counter()

    def _make(self, micro: int) -> tuple[list[float], float, float]:
        """Make the next version of the parameters.

        returns  this rank's loss of each micro-batch, and the squares and non-finite elements of the
                 stage's gradient
        """
        step, lr, ignored, predictions = self._begun[micro // self.micro_batches]
        losses, *of_stage = super().sum()
        self._of_stage[:] = of_stage
        self._sum_of_stage.run()
        # These are sums over the stage's tensor-parallel group.
        squares, nonfinite = self._of_stage.tolist()
        targets = self.of_update(micro % self.micro_batches) * predictions
        totals = 0.0, squares, nonfinite, 0, self._ignored_by_all(micro, ignored)
        result, scale = self.result_of(totals, targets)
        squares = squares / result.counted**2 if result.counted else 0.0
        span = self.recorder.compute(self._update_name, UPDATE)
        self.advance()
        if result.counted and math.isfinite(squares):
            earlier = step * self._updates_per_step + micro % self.micro_batches // self.every
            self.apply(scale, lr, earlier + 1)
        self.recorder.end(span)
        return losses, squares, nonfinite

    def _ignored_by_all(self, micro: int, ignored: Sequence[int]) -> float:
        """Return the ignored targets of an update; collective over the replicas.

        micro    the last micro-batch of the update
        ignored  of this rank, by micro-batch of the step
        """
        first = self._first_of(micro % self.micro_batches)
        self._ignored[0] = sum(ignored[first : first + self.every])
        self._sum_of_ignored.run()
        return float(self._ignored[0])

    def _read_control_message(self) -> None:
        micro = self._unread.popleft()
        wait = self.recorder.wait(self._control_name)
        with self.exposed:
            self._telling[micro % self._stages].wait()
        self.recorder.go_on(wait)
        self._received.append(self._messages[micro % self._stages].tolist())
        if self._received[-1][3] and self._stop_after is None:
            self._stop_after = (micro + 2 * self._stages - 1) // self.micro_batches

    def poll(self) -> None:
        super().poll()
        for micro in self._unread:
            self._telling[micro % self._stages].poll()

    def sum(self) -> tuple[list[float], float, int]:
        return [], 0.0, 0  # `turned` has summed

    def agree(self, *numbers: float) -> Sequence[float]:
        self._wish |= bool(numbers[3])  # the message of the next micro-batch says so
        return numbers

    def finish(self, totals: Sequence[float]) -> StepResult:
        """Return the newest known result, which belongs to an earlier step until the pipeline is
        drained.
        """
        self._release(len(self._begun) - self._late)
        for late in (self._known, self._ended):
            for known in [known for known in late if known < self.step - self._late]:
                del late[known]
        return self._newest_result

    def _release(self, steps: int, is_end: bool = False) -> None:
        """Compute the results of the first `steps` steps, unless they are known already.

        is_end  whether the pipeline is drained after these steps; the last of them then reports a
                stop request
        """
        m = self.micro_batches
        for at in range(self._released, steps):
            step, lr, _, predictions = self._begun[at]
            messages = [self._received.popleft() for _ in range(m)]
            losses, squares, nonfinite, _, ignored = (
                sum(column) for column in zip(*messages, strict=True)
            )
            stops = is_end and at == steps - 1 and self._stop_after is not None
            totals = losses, 0.0, nonfinite, stops, ignored
            result, _ = self.result_of(totals, self.size * predictions)
            norm = math.sqrt(squares / self._updates_per_step) if squares >= 0 else math.nan
            is_finite = math.isfinite(result.loss) and math.isfinite(norm)
            self._newest_result = self._known[step] = result._replace(
                grad_norm=norm, lr=lr, updated=is_finite
            )
        self._released = max(self._released, steps)

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        waited = self.exposed.take()
        return self._known.pop(step)._replace(
            comm_s=waited, extras={"ended": self._ended.pop(step)}
        )

    def sync(self) -> None:
        """Read all remaining control messages, and make the newest version version 0.

        The pipeline must be empty.
        """
        if not self._begun:
            return
        while self._unread:
            self._read_control_message()
        self._release(len(self._begun), is_end=True)
        self.drain_versions()
        self._reset_counts()


class PipeDream2BW(PipeDream):
    """PipeDream-2BW (Narayanan et al. 2021): an update after each batch.

    Without momentum it is W(t+1) = W(t) - lr * g(W(t-1)), with g the gradient of batch t. Every
    stage keeps two versions. The first two batches after the pipeline was empty both use W(0).
    """

    help = (
        "(PipeDream-2BW) updates once a step, with gradients at the parameters of the step before"
    )

    @property
    def every(self) -> int:
        return self.micro_batches

    @property
    def versions(self) -> int:
        return 2

    @staticmethod
    def memory(sizes: Sizes) -> float:
        return sizes.replica + sizes.computed * sizes.length
