"""Measured costs of a pipeline: seconds and bytes of its chunks, and times of messages between stages."""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpitrain.layers.base import Now
from mpitrain.pipeline.simulate import Cost
from mpitrain.run.trainer import Trainer
from mpitrain.transport.base import Request, Transport

REPEATS, TRIPS = 5, 21
"""Measured passes of each chunk, and measured trips of each message, after one for warm-up."""

LEAST_S = 2e-3
"""Smallest time in seconds that a receiver sleeps to measure how much of a transfer compute would hide."""


FAR = 2.0
"""Ratio of a chunk's median pass to its fastest; above it, other work disturbed the machine."""


class MessageTime(NamedTuple):
    """The time of a message between two stages, as arguments of `simulate`.

    transfer  seconds in which both stages may compute
    receive   seconds that the receiver itself spends
    is_eager  whether MPI sends the message before its receive is posted
    """

    transfer: float
    receive: float
    is_eager: bool = False

    @property
    def seconds(self) -> float:
        return self.transfer + self.receive


def slowest(ways: Iterable[tuple[float, float, bool]]) -> MessageTime:
    """Return the slowest of some messages, each a MessageTime or the list that `gather_text` makes
    of it.
    """
    return max((MessageTime(*each) for each in ways), key=lambda each: each.seconds)


class StageMeasurement(NamedTuple):
    """Measured costs of micro-batches of `rows` rows.

    costs   by chunk: seconds on the slowest of its ranks, bytes on the rank with the most
    way     time of the slowest message between two stages
    spread  largest ratio of a chunk's median time to its least
    """

    rows: int
    costs: tuple[Cost, ...]
    way: MessageTime
    spread: float = 1.0

    @property
    def is_spoilt(self) -> bool:
        """Whether other work ran most of the time, so that these costs are invalid."""
        return self.spread > FAR


def measure(
    trainer: Trainer, inputs: np.ndarray, targets: np.ndarray, sizes: Sequence[int]
) -> list[StageMeasurement]:
    """Measure micro-batches of each of these sizes, on all ranks at the same time. Collective.

    Each size is a step with learning rate 0, which leaves the parameters as they are but changes
    the state of the optimizer.

    inputs, targets  as a step takes them, with rows for the largest size
    sizes            rows of a micro-batch
    """
    measurements = []
    for step, rows in enumerate(sizes):
        trainer.transport.barrier()
        trainer.replica.begin(step)
        own = {
            chunk: _part(trainer, chunk, inputs[:rows], targets[:rows])
            for chunk in trainer.pipe.stages
        }
        _end(trainer)
        way = _way(trainer, (rows, *inputs.shape[1:]))
        gathered = trainer.transport.gather_text((own, way))
        costs = [
            Cost(
                *map(
                    max,
                    zip(
                        *(each[str(chunk)][:-1] for each, _ in gathered if str(chunk) in each),
                        strict=True,
                    ),
                )
            )
            for chunk in range(len(trainer.job.plan.stage_of))
        ]
        spread = max(spread for each, _ in gathered for *_, spread in each.values())
        measurements.append(
            StageMeasurement(rows, tuple(costs), slowest(way for _, way in gathered), spread)
        )
    return measurements


def end_s(trainer: Trainer, inputs: np.ndarray, targets: np.ndarray) -> float:
    """Measure seconds from the last gradient to the end of a step, on the slowest rank. Collective.

    The learning rate is 0. A training step hides some of this time: it overlaps reductions with its
    last weight halves, and they are counted here.

    inputs, targets  as a step takes them; a few rows suffice
    """
    replica, times = trainer.replica, []
    for step in range(1 + REPEATS):
        replica.begin(step)
        for chunk in reversed([*trainer.pipe.stages]):
            trainer.pipe.stages[chunk].left = 1
            _there_and_back(trainer, chunk, inputs, targets)
        trainer.backend.synchronize()
        trainer.transport.barrier()
        start = time.perf_counter()
        _end(trainer)
        trainer.backend.synchronize()
        times.append(time.perf_counter() - start)
    return max(trainer.transport.gather_text(median(times[1:])))


def _end(trainer: Trainer) -> None:
    """End a step as `Trainer.step` does: sums of gradients, control message, update."""
    replica = trainer.replica
    losses, squares, nonfinite = replica.sum()
    replica.finish(replica.agree(sum(losses), squares, nonfinite, False, 0))


def _part(trainer: Trainer, chunk: int, inputs: np.ndarray, targets: np.ndarray) -> list[float]:
    """Return the fields of a chunk's Cost on this rank, then the spread of its times."""
    trainer.pipe.stages[chunk].left = 2 + REPEATS
    kept = _kept(trainer, chunk, inputs, targets)
    times = [_there_and_back(trainer, chunk, inputs, targets) for _ in range(1 + REPEATS)][1:]
    passes = [*map(sum, times)]
    return [*map(median, zip(*times, strict=True)), *kept, median(passes) / min(passes)]


def _kept(trainer: Trainer, chunk: int, inputs: np.ndarray, targets: np.ndarray) -> list[int]:
    """Return the bytes in a chunk's Cost, in the order of its fields."""
    stage, arena = trainer.pipe.stages[chunk], trainer.arena
    before, most, peaks = arena.live, arena.peak, []

    def noted() -> int:
        """Return the bytes in use beyond the start, and record the peak since the last call."""
        peaks.append(arena.peak - before)
        arena.peak = arena.live
        return arena.live - before

    arena.peak = arena.live
    x = _input(trainer, chunk, inputs)
    y = stage.forward(0, _rows(inputs), x)
    del x
    shape = y.shape
    dy = _output_gradient(trainer, y, targets) if _is_last(trainer, chunk) else None
    del y
    # The last chunk computes its output gradient from the loss, so that is counted as saved. Other
    # chunks receive theirs in a message, so `_drawn` replaces it after this count.
    saved = noted()
    if dy is None:
        dy = _drawn(trainer, shape)
    dx = stage.backward_input(0, dy)
    del dx, dy
    pending = noted()
    stage.backward_weight(0)
    noted()
    arena.peak = most
    return [saved, pending, *peaks]


def _is_last(trainer: Trainer, chunk: int) -> bool:
    return chunk == len(trainer.job.plan.stage_of) - 1


def _output_gradient(trainer: Trainer, y: Any, targets: np.ndarray) -> Any:
    right = trainer.backend.from_host(targets).reshape(-1)
    replica = trainer.replica
    scale = replica.weights[0] * replica.skips.loss_scale
    _, gradient = replica.loss(y.reshape(len(right), -1), right, scale)
    return gradient.reshape(y.shape)


def _there_and_back(
    trainer: Trainer, chunk: int, inputs: np.ndarray, targets: np.ndarray
) -> tuple[float, float, float]:
    """Return the seconds of a chunk's forward, and of both halves of its backward.

    The last chunk's forward includes the loss.
    """
    stage, backend, clock = trainer.pipe.stages[chunk], trainer.backend, time.perf_counter
    x = _input(trainer, chunk, inputs)
    dy = (
        None
        if _is_last(trainer, chunk)
        else _drawn(trainer, trainer.pipe.input_shape(chunk + 1, inputs.shape))
    )
    backend.synchronize()
    times = [clock()]
    y = stage.forward(0, _rows(inputs), x)
    if dy is None:
        dy = _output_gradient(trainer, y, targets)
    del x, y
    backend.synchronize()
    times.append(clock())
    dx = stage.backward_input(0, dy)
    del dx, dy
    backend.synchronize()
    times.append(clock())
    stage.backward_weight(0)
    backend.synchronize()
    times.append(clock())
    forward, backward_input, backward_weight = (after - before for before, after in pairwise(times))
    return forward, backward_input, backward_weight


def _rows(inputs: np.ndarray) -> Now:
    return Now(0, 0, len(inputs), True)


def _input(trainer: Trainer, chunk: int, inputs: np.ndarray) -> Any:
    if chunk == 0:
        return trainer.placed(inputs)
    return _drawn(trainer, trainer.pipe.input_shape(chunk, inputs.shape))


def _drawn(trainer: Trainer, shape: tuple[int, ...]) -> Any:
    """Return random numbers in place of activations.

    Arithmetic with what uninitialized memory holds could take far longer.
    """
    array = trainer.arena.take(shape, trainer.replica.computed)
    array[...] = trainer.backend.from_host(
        np.random.default_rng(0).standard_normal(shape, np.float32).astype(array.dtype)
    )
    return array


def _way(trainer: Trainer, shape: tuple[int, ...]) -> MessageTime:
    """Measure the slowest message between this rank's stage and its neighbours. Collective.

    shape  of the model's input
    """
    stage_of, transport = trainer.job.plan.stage_of, trainer.grid.pp.transport
    longest = MessageTime(0.0, 0.0)
    for chunk, (sender, receiver) in enumerate(pairwise(stage_of), 1):
        trainer.transport.barrier()  # Only one boundary is measured at a time.
        if sender != receiver and transport.rank in (sender, receiver):
            array = _drawn(trainer, trainer.pipe.input_shape(chunk, shape))
            trainer.backend.synchronize()
            slices = max(1, len(trainer.units))
            longest = slowest((longest, way(transport, array, sender, receiver, slices)))
    return longest


def way(transport: Transport, array: Any, sender: int, receiver: int, slices: int) -> MessageTime:
    """Measure the time of an array's message from one rank to another. Both ranks call this.

    The receiver posts its receive and then sleeps in slices. Between two slices it polls, as it
    does between two layers in training. Its time beyond the sleep is `receive`. The rest of the
    fastest trip is `transfer`.

    sender, receiver  ranks of `transport`
    slices            number of polls
    returns           the measured times on the receiver, zeros on the sender
    """
    hops, own = [], []
    peer = receiver if transport.rank == sender else sender
    is_eager = _is_eager(transport, array, sender, peer)
    for _ in range(1 + TRIPS):
        start = time.perf_counter()
        if transport.rank == sender:
            transport.send(array, peer)
            transport.recv(array, peer)
        else:
            transport.recv(array, peer)
            transport.send(array, peer)
        hops.append((time.perf_counter() - start) / 2)
    pause = max(2 * median(hops[1:]), LEAST_S) / slices
    ready = np.zeros(1)
    for _ in range(1 + TRIPS):
        if transport.rank == sender:
            transport.recv(ready, peer)
            _slept(transport.start_send(array, peer), pause, slices)
        else:
            request = transport.start_recv(array, peer)
            transport.send(ready, peer)
            own.append(_slept(request, pause, slices))
    if not own:
        return MessageTime(0.0, 0.0)
    receive = max(0.0, median(own[1:]))
    return MessageTime(max(0.0, min(hops) - receive), receive, is_eager)


def _is_eager(transport: Transport, array: Any, sender: int, peer: int) -> bool:
    """Return on both ranks whether the send of an array completes before its receive is posted.

    The sender starts a short message after the array, and the receiver answers it. The answer shows
    that the receiver has processed everything that arrived.
    """
    flag = np.zeros(1)
    if transport.rank != sender:
        transport.recv(flag, peer, 1)
        transport.send(flag, peer, 1)
        transport.recv(flag, peer, 1)
        # The receive of the array is posted only now.
        transport.recv(array, peer)
        return bool(flag[0])
    request = transport.start_send(array, peer)
    transport.send(flag, peer, 1)
    transport.recv(flag, peer, 1)
    until = time.perf_counter() + LEAST_S
    while not (is_done := request.test()) and time.perf_counter() < until:
        pass
    flag[0] = is_done
    transport.send(flag, peer, 1)
    request.wait()
    return is_done


def _slept(request: Request, pause: float, slices: int) -> float:
    """Sleep and poll `slices` times, then wait for the request; return the seconds beyond the sleep.

    pause  seconds of one sleep
    """
    start, slept = time.perf_counter(), 0.0
    for _ in range(slices):
        before = time.perf_counter()
        time.sleep(pause)
        slept += time.perf_counter() - before
        request.test()
    request.wait()
    return time.perf_counter() - start - slept
