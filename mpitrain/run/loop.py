"""The training loop of one run."""

from __future__ import annotations  # help() prints signatures as they are written here.

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitrain.config import Config, Run
from mpitrain.errors import CheckpointError, MpitrainError, PeerLost, TrainingError
from mpitrain.machine.process import gpu_identities
from mpitrain.parallel.replication.protocol import StepResult
from mpitrain.run.build import build
from mpitrain.run.hooks import (
    Digesting,
    Evaluating,
    Failing,
    GoingBack,
    Logging,
    RunState,
    Saving,
    Skipping,
    Tracing,
    Watching,
    check_copies,
)
from mpitrain.run.job import Job, agree_on
from mpitrain.run.metrics import METRICS, ResumeInfo, is_number, past, read_metrics
from mpitrain.run.replicas import replicas_equal
from mpitrain.run.run_dir import claim, look
from mpitrain.run.utilisation import utilisation
from mpitrain.run.watchdog import Watchdog
from mpitrain.run.watcher import Losses, Watcher, watchers_of
from mpitrain.trace.recorder import SILENT, Recorder
from mpitrain.transport.agreement import from_all_ranks, on_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device import DeviceTransport

if TYPE_CHECKING:
    from mpitrain.run.injection import Injector
    from mpitrain.run.recovery import Recovery


CLAIMED = 10
"""The largest number of files that rank 0 writes when it claims a run directory, or so."""


class Finished(NamedTuple):
    """The result of a run.

    stopped  whether it was stopped on request
    job      the job after training; its `step` is not advanced: it is still the step at which this
             run began
    folder   the run directory
    """

    stopped: bool
    job: Job
    folder: Path

    def __repr__(self) -> str:
        config = self.job.trainer.config
        losses = {
            name: f"{name} {record[key]:.4f} after step {record['step']}"
            for record in read_metrics(self.folder / METRICS)
            for name, key in (("loss", "loss"), ("validation loss", "val_loss"))
            if is_number(record.get(key))
        }
        run = f"{config.model.kind} with {self.job.trainer.parameter_count:,} parameters"
        return "; ".join([f"{self.folder}: {run}{', stopped' * self.stopped}", *losses.values()])


def train(
    transport: Transport,
    configured: Callable[[], Config],
    resume: str = "no",
    stop_requested: Callable[[], bool] | None = None,
    watchers: Sequence[Watcher] | None = None,
    begins: Callable[[], Any] | None = None,
    ends: Callable[[], float | None] | None = None,
) -> Finished:
    """Train a model in a run directory, as `mpitrain train` does; collective.

    Parameters
    ----------
    configured : callable
        Returns the configuration, on every rank. If one raises an MpitrainError, all do.
    resume : {"no", "yes", "auto"}
        As `--resume`.
    stop_requested : callable, optional
        Called once a step, and for each batch of an evaluation. If it returns True on a rank, the
        run saves a checkpoint and ends. A resume makes the evaluation that is due.
    watchers : sequence of Watcher, optional
        Called in this order, on rank 0. None: one that prints the losses.
    begins : callable, optional
        Called before there is anything to save. From then on a signal must not end the process.
    ends : callable, optional
        Returns the end of the batch job on rank 0, in seconds since 1970, or None.
    """
    starts = _Starts(transport, stop_requested, watchers, begins, ends)
    try:
        while True:
            try:
                return starts.next(configured, resume)
            except PeerLost as error:
                if not starts.recovery:
                    raise
                law = error.law
            except MpitrainError as error:
                if not (starts.recovery and starts.recovery.is_under_way and error.agreed):
                    raise
                raise starts.recovery.refused(error) from None
            configured, resume = starts.recovery.go_on(law), "auto"
    finally:
        if starts.recovery:
            starts.recovery.over()


class _Starts:
    """The starts of a run: one, and with run.on_failure=continue another one after each loss.

    recovery  what a start uses of those before it; None without that key
    """

    def __init__(
        self,
        transport: Transport,
        stop_requested: Callable[[], bool] | None,
        watchers: Sequence[Watcher] | None,
        begins: Callable[[], Any] | None,
        ends: Callable[[], float | None] | None,
    ):
        """Arguments as of `train`."""
        self._transport, self._watchers = transport, watchers
        self._stop_requested, self._begins, self._ends = stop_requested, begins, ends
        self.recovery: Recovery | None = None

    def next(self, configured: Callable[[], Config], resume: str) -> Finished:
        """Start the run on these ranks and train; PeerLost if a rank is lost."""
        transport = self._transport
        began = time.perf_counter()
        began = min(began, getattr(transport.recorder, "began", began))
        watchers: Sequence[Watcher] = ()
        if transport.rank == 0:
            watchers = [Losses()] if self._watchers is None else self._watchers
        # Where ranks may be lost, the launcher goes on when one exits.
        ending = [] if transport.needs_all else [partial(transport.abort, "ends the stalled job")]
        with (
            closing(
                Watchdog(transport.rank, Run().stall_seconds, transport.traffic, *ending)
            ) as watchdog,
            ExitStack() as closed,
        ):
            for watcher in watchers:
                closed.callback(watcher.close)

            injector: Injector | None = None  # of run.inject
            asked = Config()  # as this rank reads it: other ranks may resolve it otherwise

            def watched() -> Config:
                nonlocal injector, asked
                asked = config = configured()
                watchdog.patience(config.run.stall_seconds, config.run.on_stall)
                if config.run.inject:
                    from mpitrain.run.injection import Injector

                    injector = Injector(config.run.inject, transport)
                    injector.passes("start", 0)
                return config

            watchdog.alive("looking for the run directory")
            agreed = agree_on(
                transport,
                watched,
                lambda config: (
                    look(config, resume, transport.size) if transport.rank == 0 else None
                ),
            )
            if agreed.config.run.on_failure == "continue" and not self.recovery:
                from mpitrain.run.recovery import Recovery

                self.recovery = Recovery(asked, transport)
            recovery = self.recovery
            for watcher in watchers:
                watcher.on_agreed(agreed.config, transport.hosts)
            if agreed.config.run.trace and not transport.recorder.is_on:
                transport.record(Recorder())
                closed.callback(transport.record, SILENT)
            if injector:
                injector.loses_messages_of(transport)
            if agreed.config.run.watchers:
                own = on_all_ranks(
                    transport,
                    lambda: [] if transport.rank else watchers_of(agreed.config.run.watchers),
                )
                watchers = [*watchers, *own]
                for watcher in own:
                    closed.callback(watcher.close)
            watchdog.alive("building the model")
            with transport.recorder.pausing("building the model"):
                job = (recovery.built if recovery else build)(transport, agreed)
                check_copies(job.trainer, recovery.copied_bytes if recovery else 0)
            if self._begins:
                self._begins()

            def claiming() -> None:
                watchdog.alive("claiming the run directory")

            claiming()
            keys = agreed.config.run
            if transport.rank > 0:  # Rank 0 writes so many files while the others wait for it.
                watchdog.patience(CLAIMED * keys.stall_seconds, keys.on_stall)
            locks: list[int] = []
            closed.callback(lambda: [os.close(lock) for lock in locks])
            over = job.trainer.transport
            refusals = over.refusals if isinstance(over, DeviceTransport) else []
            claimed, reasons = zip(
                *from_all_ranks(
                    transport,
                    lambda: (_claimed(transport.rank, agreed, job, locks, claiming), refusals),
                ),
                strict=True,
            )
            watchdog.patience(keys.stall_seconds, keys.on_stall)
            if transport.rank == 0 and not refusals and any(reasons):
                from mpitrain.collectives.cuda_ipc import say_unshared

                say_unshared(next(filter(None, reasons))[0])
            folder, before, meant = Path(claimed[0][0]), ResumeInfo(*claimed[0][1]), claimed[0][2]
            if agreed.config.run.tensorboard and transport.rank == 0:
                from mpitrain.run.tensorboard import TensorBoard

                watchers = [*watchers, board := TensorBoard()]
                closed.callback(board.close)
            stops = self._stop_requested, self._ends
            run = RunState(job, agreed.location, folder, before, meant, *stops, watchers)
            closed.callback(run.close)
            if recovery:
                closed.enter_context(recovery.of_run(run))
            tracing = Tracing(run)
            watchdog.alive("measuring matrix products")
            places = gpu_identities(transport.hosts, job.trainer.resolved.gpus)
            rates = utilisation(job, places.count(places[transport.rank]))
            saving = Saving(run)
            run.hooks += [
                Watching(watchdog),
                *([Failing(injector.passes)] if injector else []),
                Logging(run, rates),
                *([GoingBack(run, saving)] if agreed.config.run.on_spike == "back" else []),
                *(recovery.hooks(run) if recovery else []),
                *([Digesting(run)] if agreed.config.run.digest_every else []),
                saving,
                Evaluating(run, saving),
                tracing,
                Skipping(run),
            ]
            facts = recovery.facts if recovery else {}
            run.begin(agreed.location, time.perf_counter() - began, facts)
            if transport.recorder.is_on:
                watchdog.traces(folder, transport.recorder)
            if recovery:
                recovery.over()
            return Finished(_loop(run), job, folder)


def _claimed(
    rank: int, agreed: Job, job: Job, locks: list[int], alive: Callable[[], None]
) -> tuple[str, ResumeInfo, dict[str, Any]] | None:
    """Claim the run directory on rank 0; return it with the earlier part of the run, and its meaning.

    locks   receives the descriptor of its lock, which the caller must close
    alive   called after each file
    """
    steps = job.trainer.config.run.steps
    if job.step > steps:
        raise CheckpointError(
            f"The checkpoint is at step {job.step}, past run.steps {steps}.",
            f"Set run.steps to at least {job.step}.",
        )
    if rank > 0:
        return None
    place, before = agreed.location, ResumeInfo()
    if place.has_run:  # Where a run begins anew, no line counts.
        before = past(Path(place.folder), job.step if place.saved or job.step else -1)
    folder, meant, lock = claim(agreed.location, job.trainer.resolved, job.source, job.step, alive)
    locks.append(lock)
    return str(folder), before, meant


# Each step counts values that are not finite, so NumPy need not warn of them.
@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def _loop(run: RunState) -> bool:
    """Run the remaining steps; return whether the run was stopped on request."""
    # A resumed run first makes an evaluation that was due at its end.
    is_stopped, index = _pause(run, run.first, stop=False), run.first
    while not is_stopped and index < run.steps:
        with run.recorder.stepping(index):
            outcome = _step(run, index)
            run.finished, run.loss = index + 1, outcome.loss
            for hook in run.hooks:
                hook.step_ends(index + 1, outcome)
        index += 1
        is_stopped = _pause(run, index, outcome.stop)
    if is_stopped:
        run.record({"event": "stopped", "step": run.saved_at, **run.limit.reason()})
    else:
        _end(run)
    return is_stopped


def _step(run: RunState, index: int) -> StepResult:
    began = time.perf_counter()
    run.reach("step", index + 1)
    trainer, own = run.trainer, None
    replication = trainer.replication
    for number in replication.step_end.steps(index, run.asks):
        run.reach("batch", number + 1)
        span = run.recorder.compute(run.batch_name)
        inputs, targets = replication.rows.batch(run.source, number, run.after(number).samples)
        run.recorder.end(span)
        own = trainer.step(number, inputs, targets, run.asks)
    outcome = replication.step_end.outcome(index, own)
    run.limit.stepped(time.perf_counter() - began)
    return outcome


def _pause(run: RunState, step: int, stop: bool) -> bool:
    """Let the hooks act between two steps, whose time does not count as training time."""
    began = time.perf_counter()
    for hook in run.hooks:
        stop = hook.pause(step, stop)
    run.paused_s += time.perf_counter() - began
    return stop


def _end(run: RunState) -> None:
    """Record the end; TrainingError on every rank if replicas differ."""
    equal, counted = replicas_equal(run.trainer), run.trainer.counted.peak
    run.record(
        {
            "event": "end",
            "step": run.steps,
            "replicas_equal": equal,
            "peak_activation_bytes": run.peak,
            "peak_activation_bytes_of_ranks": run.peaks,
            "held_activation_bytes": run.trainer.arena.held,
            **({"counted_activation_bytes": counted} if counted else {}),
        }
    )
    if not equal:
        raise TrainingError(
            "After the last step the parameters differ between replicas.",
            "This is a fault of mpitrain or of the machine's memory; please report it.",
        ).on_every_rank()
    run.reach("end", run.steps)
