"""The topic of asynchronous parameter servers: workers of unequal speed, in virtual time.

Workers compute without sleeping, and push in the order of a virtual clock. So frames are the same
on a busy and on an idle machine. The last worker is slower than the others.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpitrain.errors import Sentence
from mpitrain.parallel.async_servers import AsyncServer, AsyncWorker, WorkQueue
from mpitrain.run.trainer import Trainer
from mpitrain.tools.textbook.explain import toy
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Topic,
    TopicSetting,
)
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

STEPS = 2
"""Steps of training. The rows of a step are divided into as many tickets as there are workers."""
USUAL, SLOW = 1.0, 2.5
"""Virtual seconds of a gradient."""


class _Push(NamedTuple):
    worker: int
    weights: dict[int, str]
    gradient: str


class Conductor:
    """The virtual clock. It lets one worker push at a time: the one whose gradient is due next.

    A worker draws a ticket (its next rows), pulls parameters, computes, and pushes a gradient.
    """

    def __init__(self, workers: int):
        self._workers, self._tickets, self._pulled = workers, STEPS * workers, 0
        self._clock, self._due = [0.0] * workers, dict[int, float]()
        self._weights: dict[int, str] = {}
        self._changed = threading.Condition()
        self.pushes: list[_Push] = []

    def draw(self, worker: int) -> None:
        """Wait until all workers with lower numbers have drawn their first ticket."""
        with self._changed:
            self._changed.wait_for(lambda: self._pulled >= worker)

    def pulled(self, worker: int, weights: str) -> None:
        with self._changed:
            self._pulled += 1
            self._weights[worker] = weights
            seconds = SLOW if worker == self._workers - 1 else USUAL
            self._due[worker] = self._clock[worker] + seconds
            self._changed.notify_all()

    def push(self, worker: int, gradient: str) -> None:
        """Wait until the gradient of this worker is the next one, and record it."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_next(worker))
            self.pushes.append(_Push(worker, dict(self._weights), gradient))

    def _is_next(self, worker: int) -> bool:
        are_all_here = len(self._due) == self._workers or self._pulled == self._tickets
        first = min(self._due, key=lambda other: (self._due[other], other))
        return are_all_here and first == worker

    def pushed(self, worker: int) -> None:
        with self._changed:
            self._clock[worker] = self._due.pop(worker)
            self._changed.notify_all()


def record(setting: TopicSetting) -> Explanation:
    n, workers = setting.ranks, setting.ranks - 1
    conductor = Conductor(workers)
    results = run_ranks(n, _run, conductor)
    served, staleness = results[-1].parameters, max(result.staleness for result in results)
    frames = [Frame("start", (*(("w", "") for _ in range(workers)), ("w", "")))]
    pulled, stalest = [0] * workers, 0
    for number, push in enumerate(conductor.pushes):
        late = number - pulled[push.worker]
        stalest, pulled[push.worker] = max(stalest, late), number + 1
        frames.append(
            Frame(
                Sentence(
                    "worker {r} pushes; {s} other updates since its pull", r=push.worker, s=late
                ),
                (
                    *(
                        (push.weights[rank], push.gradient if rank == push.worker else "")
                        for rank in range(workers)
                    ),
                    (served[number], ""),
                ),
            )
        )
    return Explanation(
        [
            "The server updates with each gradient at once, and waits for no other.",
            "A worker pulls, computes, and pushes. Then it takes its next rows (a ticket).",
            Sentence(
                "The last worker takes {slow} times as long here, so others overtake it.", slow=SLOW
            ),
            "Its gradient is from old weights. The staleness is the number of updates since its pull.",
        ],
        (
            "w: initial parameters; g1: gradient of row 1 in step 1, h1 in step 2. Workers: the weights "
            "that they compute with; server: after the update."
        ),
        [
            *(Sentence("rank {r}", r=rank) for rank in range(workers)),
            Sentence("server {r}", r=workers),
        ],
        [Columns("buffers", ("weights", "pushed"))],
        frames,
        [
            CountedFormula(
                "largest staleness, in updates", stalest, "StepResult.staleness", staleness
            ),
            CountedFormula("updates", len(served), "steps x workers", STEPS * workers),
        ],
        [SourceLines.of(source) for source in (AsyncWorker, AsyncServer, WorkQueue)],
        f"mpitrain launch -n {n} -- train --set replication.mode=server --set replication.update=async",
        ("tests/ranks/parallel/test_training.py",),
    )


class _ServerResult(NamedTuple):
    """What a rank returns: a server its parameters after each update, any rank the largest
    staleness.
    """

    parameters: list[str]
    staleness: int


def _run(transport: Transport, conductor: Conductor) -> _ServerResult:
    workers, me = transport.size - 1, transport.rank
    symbols = toy.basis(STEPS, workers)

    def seen(layer_pass: toy.Pass) -> None:
        if layer_pass.kind == "forward":
            conductor.pulled(me, symbols.read(layer_pass.array))
        elif layer_pass.kind == "weight":
            conductor.push(me, symbols.read(layer_pass.array))

    config = toy.configured(
        "replication.mode=server",
        "replication.update=async",
        "replication.async_lr=1",
        f"batch.size={workers}",
        "batch.micro_batches=1",
        f"run.steps={STEPS}",
    )
    units = toy.units(1, workers * toy.VECTOR, symbols, seen)
    trainer = Trainer(transport, units, config, toy.SymbolLoss())
    served = _watched(trainer, symbols.read) if me == workers else []
    if me < workers:
        conductor.draw(me)
    source, staleness = toy.SymbolSource(symbols), 0
    for step in range(STEPS):
        own = None
        for number in trainer.replica.steps(step, lambda: False):
            own = trainer.step(number, *trainer.replica.batch(source, number))
            conductor.pushed(me)
        staleness = max(staleness, trainer.replica.outcome(step, own).extras["staleness"])
    trainer.sync_parameters()
    return _ServerResult(served, staleness)


def _watched(trainer: Trainer, read: Callable[[np.ndarray], str]) -> list[str]:
    """Return a list to which the server's parameters are appended after each update."""
    replica, contents = trainer.replica, list[str]()
    apply = replica.apply

    def watched(scale: float, lr: float, step: int) -> None:
        apply(scale, lr, step)
        contents.append(read(np.asarray(trainer.parameters)))

    replica.apply = watched  # type: ignore[method-assign]
    return contents


TOPICS = {
    "async-server": Topic(
        "Parameter server, asynchronous: gradients are applied as they come",
        record,
        ranks=3,
        least=2,
        most=6,
    )
}
