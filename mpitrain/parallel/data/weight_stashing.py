"""Asynchronous pipelines by weight stashing: a micro-batch uses one version of the parameters.

Each stage updates its parameters by itself, and no step drains the pipeline. A micro-batch uses the
same version in forward and backward. A step is one batch, as in every mode. It has one learning
rate, one line of metrics, and its micro-batches. In `async` an update uses one micro-batch, as a
mean over its rows in all replicas. In `async-2bw` it uses the whole batch. A stage clips by the
norm of its own gradient, and skips an update with a non-finite gradient. AdamW's step count
includes skipped updates.

The control all-reduce of each micro-batch is asynchronous. A stage starts it after the backward of
the micro-batch. It reads the result as many micro-batches later as there are stages, before their
backward. So ranks learn the result of a step some steps later. A stop request ends training after a
later step, which all ranks choose alike. All of them have read the request before the first stage
begins the last backward of that step.

source  Narayanan et al. 2019, PipeDream, SOSP; Narayanan et al. 2021, Memory-Efficient
        Pipeline-Parallel DNN Training, ICML (2BW)
"""

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.layers.base import Weights
from mpitrain.layers.flat import Piece
from mpitrain.optim import learning_rate
from mpitrain.parallel.data.allreduce import AllReduce
from mpitrain.parallel.grid import share
from mpitrain.parallel.replication.protocol import ReplicationContext
from mpitrain.parallel.replication.records import StepInput, StepResult, clipping
from mpitrain.trace.ring_buffer import UPDATE


class WeightStashing(AllReduce):
    """The base of PipeDream and PipeDream-2BW. Micro-batches and versions are counted from the last
    drained pipeline.

    bytes sent  for each update as all-reduce; for each micro-batch an all-reduce of 32 bytes over
                all ranks
    memory      `versions` times the parameters, in half precision the rounded ones
    """

    @property
    @abstractmethod
    def every(self) -> int:
        """Micro-batches of one update."""

    @property
    @abstractmethod
    def versions(self) -> int:
        """Versions of the parameters in memory: micro-batches between forward and backward use old
        ones.
        """

    @abstractmethod
    def _version_of(self, micro: int) -> int:
        """Return the version of the parameters that a micro-batch uses."""

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica)
        config, grid, storage, *_ = replica
        world, backend, self._stages = grid.world, replica.device.backend, grid.axes.pp
        self._micro_batches = m = config.batch.micro_batches
        # All ranks have computed this number of steps before they know the result of a step.
        self._late = -(-(2 * self._stages - 1) // m)
        self._held = [
            self._computed,
            *(backend.zeros(storage.length, replica.computed) for _ in range(self.versions - 1)),
        ]
        self._views = [storage.weights(version) for version in self._held]
        # The two numbers are the stage's squares and its non-finite elements.
        self._of_stage = np.zeros(2)
        self._sum_of_stage = grid.tp.bind(self._of_stage)
        with self._recorder.called("the control message"):
            self._messages = [np.zeros(4) for _ in range(self._stages)]
            self._telling = [world.bind(message) for message in self._messages]
        self._control_name = self._recorder.name("what all are told", world.transport.members)
        self._losses, self._parts_of_mean = backend.zeros(m, np.float64), [0.0] * m
        self._newest = StepResult(math.nan, math.nan, 0, 0.0, True, False)
        self._known: dict[int, StepResult] = {}
        # The value is the time at which the last backward of a step had ended.
        self._ended: dict[int, float] = {}
        self._waited_s, self._wish = 0.0, False
        self._empty()

    def _empty(self) -> None:
        """Restart all counts; the pipeline is empty."""
        # `_numbers` lists the steps begun; `_stop_after` is the index of the last one, if known.
        # `_turns` counts the backwards begun, `_made` the versions, `_released` the known results.
        # `_told` contains the control messages of all steps that have no known result yet.
        # `_unread` lists the micro-batches that have a running control message.
        self._numbers: list[int] = []
        self._turns = 0
        self._made = 0
        self._told: deque[list[float]] = deque()
        self._released = 0
        self._unread: deque[int] = deque()
        self._stop_after: int | None = None

    def _counted(self) -> Sequence[Piece]:
        return self._runs()

    def _rows(self, part: int) -> int:
        """Return the rows of a micro-batch, over all replicas."""
        size, n = self.replica.config.batch.size, self.replica.grid.axes.dp
        return sum(
            len(share(len(share(size, replica, n)), part, self._micro_batches))
            for replica in range(n)
        )

    def _updates(self) -> int:
        """Return the updates of a step."""
        return self._micro_batches // self.every

    # The training step calls the following methods.

    def steps(self, step: int, stop_requested: Callable[[], bool]) -> Iterator[int]:
        while step not in self._known:
            yield self._numbers[-1] + 1 if self._numbers else step

    def begin(self, step: int) -> None:
        self._numbers.append(step)

    @property
    def ends(self) -> bool:
        """Whether the current step ends with an empty pipeline: for a checkpoint, an evaluation,
        the end or a stop request.
        """
        here, asked = len(self._numbers) - 1, self._stop_after
        return self._numbers[-1] + 1 >= self.replica.config.next_pause(self._numbers[0]) or (
            asked is not None and here >= asked
        )

    def open(self, unit: int, part: int) -> Weights:
        """Return the parameters of a micro-batch, for its forward and its backward.

        part  the micro-batch, modulo twice the micro-batches of a step (as in
              pipeline/async_pipeline.py)
        """
        last = max(1, len(self._numbers)) * self._micro_batches - 1
        return self._views[
            self._version_of(last - (last - part) % (2 * self._micro_batches)) % self.versions
        ][unit]

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        value, gradient = super().loss(logits, targets, scale)
        # The last stage runs backward right after forward, so `_turns` numbers this micro-batch.
        at, size = self._turns % self._micro_batches, self.replica.config.batch.size
        self._losses[at : at + 1] = value
        self._parts_of_mean[at] = len(share(len(self.share(size)), at, self._micro_batches)) / (
            size * len(targets)
        )
        return value, gradient

    def turn(self) -> bool:
        """Begin the backward of the next micro-batch, and read the control message that is due.

        returns  whether a new gradient begins with this micro-batch
        """
        if self._turns >= self._stages:
            self._read()
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
        mine = StepInput(
            micro,
            self._losses[at : at + 1] if grid.reports_loss else (),
            0.0,
            weights=self._parts_of_mean[at : at + 1],
        )
        if self._turns % self.every == 0:
            loss, squares, nonfinite = self._make(micro, mine)
        else:
            loss = self.replica.gradient_stats(mine, ())[0]
        message = self._messages[micro % self._stages]
        message[:] = loss, 0, 0, 0
        if grid.place.tp == grid.place.dp == 0:
            message[1:3] = squares, nonfinite
        message[3] = self._wish
        self._telling[micro % self._stages].start()
        self._unread.append(micro)
        if self._turns % self._micro_batches == 0:
            self._ended[self._numbers[micro // self._micro_batches]] = time.perf_counter()

    def _make(self, micro: int, mine: StepInput) -> tuple[float, float, float]:
        """Make the next version of the parameters.

        returns  this rank's loss, and the squares and non-finite elements of the stage's gradient
        """
        step, config = self._numbers[micro // self._micro_batches], self.replica.config
        loss, squares, nonfinite, waited = self._sum_gradients(mine)
        self._of_stage[:] = squares, nonfinite
        self._waited_s += waited
        self._sum_of_stage.run()
        found = self._of_stage.tolist()  # these are sums over the stage's tensor-parallel group
        span = self._recorder.compute(self._update_name, UPDATE)
        source, target = (
            self._held[version % self.versions] for version in (self._made, self._made + 1)
        )
        if source is not target:
            target[...] = source
        self._made += 1
        if math.isfinite(found[0]):
            count = step * self._updates() + micro % self._micro_batches // self.every
            lr = learning_rate(config.optimizer, step, config.run.steps)
            self._update(clipping(self._clip, math.sqrt(found[0])), StepInput(count, (), lr))
        self._recorder.end(span)
        return loss, found[0], found[1]

    def _parameters_of(self, piece: Piece) -> Any:
        newest = (
            self.parameters if self.mirror is not None else self._held[self._made % self.versions]
        )
        return newest[piece.start : piece.stop]

    def _mirror_of(self, piece: Piece) -> Any:
        return (
            None
            if self.mirror is None
            else self._held[self._made % self.versions][piece.start : piece.stop]
        )

    def _read(self) -> None:
        """Wait for the oldest running control message."""
        micro = self._unread.popleft()
        began, wait = time.perf_counter(), self._recorder.wait(self._control_name)
        self._telling[micro % self._stages].wait()
        self._recorder.go_on(wait)
        self._waited_s += time.perf_counter() - began
        self._told.append(self._messages[micro % self._stages].tolist())
        if self._told[-1][3] and self._stop_after is None:
            self._stop_after = (micro + 2 * self._stages - 1) // self._micro_batches

    def poll(self) -> None:
        super().poll()
        for micro in self._unread:
            self._telling[micro % self._stages].poll()

    def finish(self, mine: StepInput) -> StepResult:
        """Return the newest known result. It belongs to an earlier step, unless the pipeline is
        empty.
        """
        self._wish |= mine.stop
        self._release(len(self._numbers) - self._late)
        for late in (self._known, self._ended):
            for step in [step for step in late if step < mine.number - self._late]:
                del late[step]
        return self._newest

    def _release(self, steps: int, is_end: bool = False) -> None:
        """Compute the results of the first `steps` steps, as far as they are not known yet.

        is_end  whether the pipeline is drained after these steps; the last one then reports a stop
        """
        config, m = self.replica.config, self._micro_batches
        for at in range(self._released, steps):
            step = self._numbers[at]
            told = [self._told.popleft() for _ in range(m)]
            losses, squares, nonfinite, _ = (sum(column) for column in zip(*told, strict=True))
            norm = math.sqrt(squares / self._updates()) if squares >= 0 else math.nan
            stops = is_end and at == steps - 1 and self._stop_after is not None
            self._newest = self._known[step] = StepResult(
                losses,
                norm,
                int(nonfinite),
                learning_rate(config.optimizer, step, config.run.steps),
                math.isfinite(losses) and math.isfinite(norm),
                stops,
            )
        self._released = max(self._released, steps)

    def outcome(self, step: int, own: StepResult | None) -> StepResult:
        waited, self._waited_s = self._waited_s, 0.0
        return self._known.pop(step)._replace(comm_s=waited, ended=self._ended.pop(step))

    def sync_parameters(self) -> None:
        """Read all remaining control messages, and make the newest version the first; the pipeline
        is empty.
        """
        if not self._numbers:
            return
        while self._unread:
            self._read()
        self._release(len(self._numbers), is_end=True)
        if self._made % self.versions:
            self._held[0][...] = self._held[self._made % self.versions]
        self._empty()

    def held(self) -> int:
        return super().held() + sum(version.nbytes for version in self._held[1:])


class PipeDream(WeightStashing):
    """PipeDream (Narayanan et al. 2019): one update for each micro-batch; stage s of p has p - s
    versions.
    """

    @property
    def every(self) -> int:
        return 1

    @property
    def versions(self) -> int:
        return self.replica.grid.axes.pp - self.replica.grid.place.pp

    def scale(self, predictions: int, part: int) -> float:
        return 1 / (self._rows(part) * predictions)

    def _version_of(self, micro: int) -> int:
        return max(0, micro - (self.versions - 1))


class PipeDream2BW(WeightStashing):
    """PipeDream-2BW (Narayanan et al. 2021): one update for each batch, W(t+1) = W(t) - lr
    g(W(t-1)).

    Every stage has two versions. After a drained pipeline, the first two batches both use W(0).
    """

    @property
    def every(self) -> int:
        return self.replica.config.batch.micro_batches

    @property
    def versions(self) -> int:
        return 2

    def _version_of(self, micro: int) -> int:
        return max(0, micro // self.every - 1)
