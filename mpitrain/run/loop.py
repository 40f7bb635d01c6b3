"""One run: its start, its steps, the pauses between them, and its end."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitrain import __version__
from mpitrain.config import Config
from mpitrain.config import Run as RunKeys
from mpitrain.data import Prefetched, Source, amounts, bits_per_byte
from mpitrain.errors import (
    CheckpointError,
    ConfigError,
    MpitrainError,
    PeerLost,
    TrainingError,
    say,
)
from mpitrain.files import mend
from mpitrain.machine import process
from mpitrain.machine.meters import energy_of
from mpitrain.machine.process import gpu_identities, own_id
from mpitrain.machine.time_limit import TimeLimit
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.replica import StepResult
from mpitrain.run.build import build, opened
from mpitrain.run.checkpoint import saving
from mpitrain.run.checkpoint.copies import check_copies, copying, room_for_copies, state_to_save
from mpitrain.run.checkpoint.manifest import CHECKPOINTS, Done, Manifest, drop_old
from mpitrain.run.job import Job, agree_on
from mpitrain.run.metrics import CLOSING, METRICS, Best, MetricsFile, ResumeInfo, past
from mpitrain.run.replicas import digest_record, replicas_equal, state_digests
from mpitrain.run.run_dir import claim, look
from mpitrain.run.slow_ranks import SlowRanks, alike
from mpitrain.run.trainer import Trainer
from mpitrain.run.utilisation import utilisation
from mpitrain.run.watchdog import Watchdog
from mpitrain.run.watcher import Losses, Watcher, watchers_of
from mpitrain.trace.recorder import ROWS, SILENT, Recorder
from mpitrain.trace.timeline import trace_file
from mpitrain.transport.agreement import from_all_ranks, on_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.clocks import Clocks
from mpitrain.transport.device import DeviceTransport

if TYPE_CHECKING:
    from mpitrain.run.checkpoint.snapshot import Snapshots
    from mpitrain.run.injection import Injector
    from mpitrain.run.recovery import Recovery

CLAIMED = 10
"""The largest number of files that rank 0 writes when it claims a run directory, or so."""
PUBLISHED = 10
"""Times of run.stall_seconds that a rank without a trace waits for others to write a checkpoint."""
SKIPS = 10
"""Number of consecutive skipped steps that ends a run."""
OVERFLOWS = 20
"""Number of consecutive steps with gradients beyond float16 that ends a run."""
TOGETHER = ("all-reduce", "master")
"""The modes in which all ranks can repeat a step together."""
WORTH_COPYING = 1 << 20
"""Bytes of a rank from which checkpoint.background=auto saves in the background."""
GROWING = 3
"""Number of steps after which the process has touched all of its memory."""
DOING = {
    "step": "step {}",
    "batch": "step {}",
    "save": "the checkpoint of step {}",
    "piece": "the checkpoint of step {}",
    "evaluation": "the evaluation after step {}",
    "digests": "the digests of step {}",
}
"""{point of a run: what begins there}, for the watchdog."""


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

    configured      returns the configuration, on every rank; if one raises an MpitrainError, all do
    resume, stop_requested, watchers
                    as of `mpitrain.train`
    begins          called before there is anything to save; from then on a signal must not end the
                    process
    ends            returns the end of the batch job on rank 0, in seconds since 1970, or None
    """
    recovery: Recovery | None = None
    if transport.joins:  # This rank has waited as a spare.
        from mpitrain.run.recovery import Recovery

        recovery = Recovery(configured(), transport)
        configured, resume = recovery.go_on(), "auto"
    try:
        while True:  # Another start after each loss of ranks, with run.on_failure=continue.
            run = Run(transport, stop_requested, watchers, ends, recovery)
            try:
                with run:
                    run.start(configured, resume, begins)
                    # A resumed run first makes an evaluation that was due at its end.
                    stop = run.pause(stop=False)
                    while not stop and run.finished < run.steps:
                        stop = run.pause(run.step().stop)
                    run.end(stop)
                    return Finished(stop, run.job, run.folder)
            except PeerLost as error:
                if not run.recovery:
                    raise
                recovery, law = run.recovery, error.law
            except MpitrainError as error:
                if not (run.recovery and run.recovery.is_under_way and error.agreed):
                    raise
                raise run.recovery.refused(error) from None
            del run  # Its state is to be freed, or handed to the next start.
            configured, resume = recovery.go_on(law), "auto"
    finally:
        if recovery:
            recovery.over()


class Run:
    """One start of a run; only rank 0 writes metrics and has watchers.

    job       the job of this start; its `step` is the one at which it begins
    before    the earlier part of the run
    meaning   of the parameters, as `run_dir.meaning`
    source    the data, perhaps read ahead by a thread
    steps     the last step; an evaluation may end the run before run.steps
    finished  number of steps that have ended on this rank; `stepped` of them in this start
    loss      of the last of these; None: it was before this start
    limit     the time limit of the batch job
    met_at    the last step after which the ranks saved or evaluated together
    best      the best evaluation so far
    skipped   number of updates that were skipped because of loss or gradients, or undone
    recovery  what a start uses of those before it; None without run.on_failure=continue
    """

    # `start` sets these.
    job: Job
    trainer: Trainer
    config: Config
    folder: Path
    before: ResumeInfo
    meaning: Mapping[str, Any]
    source: Source
    checkpoints: Checkpoints
    steps: int
    finished: int
    loss: float | None
    limit: TimeLimit
    met_at: int
    best: Best
    skipped: int

    def __init__(
        self,
        transport: Transport,
        stop_requested: Callable[[], bool] | None,
        watchers: Sequence[Watcher] | None,
        ends: Callable[[], float | None] | None,
        recovery: Recovery | None,
    ):
        """Arguments as of `train`; recovery: of the start before."""
        self.transport, self.recovery = transport, recovery
        self._stop_requested, self._ends = stop_requested, ends
        self.watchers: list[Watcher] = []
        if transport.rank == 0:
            self.watchers += [Losses()] if watchers is None else watchers
        self._closed = ExitStack()
        self._injector: Injector | None = None
        self._metrics: MetricsFile | None = None
        self._slow: SlowRanks | None = None
        self._snapshots: Snapshots | None = None
        self._clocks: Clocks | None = None
        self.stepped, self._paused_s = 0, 0.0  # seconds of this start that pauses took
        self._is_spike, self._batch_name = False, 0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.recovery and self.stepped and isinstance(error[1], PeerLost):
            scalars = self.trainer.replica.skips.scalars()
            self.recovery.note(self.after(self.finished), scalars, self.loss)
        self._closed.__exit__(*error)

    def start(
        self, configured: Callable[[], Config], resume: str, begins: Callable[[], Any] | None
    ) -> None:
        """Agree, build the job, claim the run directory, and record the start; collective.

        Arguments as of `train`.
        """
        began = time.perf_counter()
        began = min(began, getattr(self.transport.recorder, "began", began))
        # Where ranks may be lost, the launcher goes on when one exits.
        needs_all, abort = self.transport.needs_all, self.transport.abort
        ending = [] if needs_all else [partial(abort, "ends the stalled job")]
        rank, traffic = self.transport.rank, self.transport.traffic
        self._watchdog = Watchdog(rank, RunKeys().stall_seconds, traffic, *ending)
        self._closed.callback(self._watchdog.close)
        for watcher in self.watchers:
            self._closed.callback(watcher.close)
        agreed = self._agreed(configured, resume)
        self._watchdog.alive("building the model")
        with self.recorder.pausing("building the model"):
            job = (self.recovery.built if self.recovery else build)(self.transport, agreed)
            check_copies(job.trainer, self.recovery.copied_bytes if self.recovery else 0)
        if begins:
            begins()
        self._claim(agreed, job)
        self._trace()
        self._watchdog.alive("measuring matrix products")
        places = gpu_identities(self.transport.hosts, job.trainer.job.gpus)
        self._rates = utilisation(job, places.count(places[rank]))
        self._energy = None if rank else energy_of(places)
        if self.config.run.on_spike == "back":
            from mpitrain.run.checkpoint.snapshot import Snapshots

            self._snapshots = Snapshots(job.trainer)
        self._note_start(agreed, time.perf_counter() - began)
        if self.recorder.is_on:
            self._watchdog.traces(self.folder, self.recorder)
        if self.recovery:
            self.recovery.over()

    # Each step counts values that are not finite, so NumPy need not warn of them.
    @np.errstate(divide="ignore", over="ignore", invalid="ignore")
    def step(self) -> StepResult:
        """Run the next step, and log it; collective.

        raises  TrainingError if the run skips too many updates: on every rank if the ranks end a
                step together
        """
        index, trainer = self.finished, self.trainer
        with self.recorder.stepping(index):
            began = time.perf_counter()
            self.reach("step", index + 1)
            replica, own = trainer.replica, None
            for number in replica.steps(index, self.asks):
                self.reach("batch", number + 1)
                span = self.recorder.compute(self._batch_name)
                samples = self.after(number).samples
                inputs, targets = replica.batch(self.source, number, samples)
                self.recorder.end(span)
                own = trainer.step(number, inputs, targets, self.asks)
            result = replica.outcome(index, own)
            self.limit.stepped(time.perf_counter() - began)
            self.finished, self.stepped = index + 1, self.stepped + 1
            self.loss, self._is_spike = result.loss, result.extras.get("is_spike", False)
            self._log(result)
            self._note_memory()
            self._check_skips(result)
        return result

    @np.errstate(divide="ignore", over="ignore", invalid="ignore")
    def pause(self, stop: bool) -> bool:
        """Do what is due between two steps, which does not count as time of training; collective.

        stop     whether a rank asks to stop
        returns  whether the run stops here, the same on all ranks
        """
        began, step = time.perf_counter(), self.finished
        if self._snapshots:
            self._go_back_or_on(step)
        every = self.config.run.copies_every
        if self.recovery and every and (not self.stepped or step % every == 0):
            self.recovery.copy(self.after(step))
        every = self.config.run.digest_every
        if every and step % every == 0 and (step > self.job.step or not step):
            self._record_digests(step)
        self.checkpoints.pause(step, stop)
        stop = self._evaluate_if_due(step, stop)
        if self.met_at == step:
            with self.recorder.pausing("the clocks"):
                if self._clocks:
                    # Readers of the trace interpolate the drift linearly between measurements.
                    self.recorder.facts(clock=self._clocks.measure())
                self._peaks = self.transport.gather_text(self.trainer.arena.peak)
        self._paused_s += time.perf_counter() - began
        return stop

    def end(self, is_stopped: bool) -> None:
        """Record the end, or the stop; TrainingError on every rank if replicas differ at the end."""
        if is_stopped:
            newest = self.checkpoints.newest
            self.record({"event": "stopped", "step": newest, **self.limit.reason()})
            return
        equal, counted = replicas_equal(self.trainer), self.trainer.job.counts.peak
        self.record(
            {
                "event": "end",
                "step": self.steps,
                "replicas_equal": equal,
                "peak_activation_bytes": self.peak,
                "peak_activation_bytes_of_ranks": self._peaks,
                "held_activation_bytes": self.trainer.arena.held,
                **({"counted_activation_bytes": counted} if counted else {}),
            }
        )
        if not equal:
            raise TrainingError(
                "After the last step the parameters differ between replicas.",
                "This is a fault of mpitrain or of the machine's memory; please report it.",
            ).on_every_rank()
        self.reach("end", self.steps)

    @property
    def recorder(self) -> Recorder:
        return self.transport.recorder

    @property
    def peak(self) -> int:
        """Peak activation memory of all ranks in bytes; for other ranks as of `met_at`."""
        return max(self.trainer.arena.peak, *self._peaks)

    @property
    def written(self) -> Sequence[int]:
        """Bytes of the metrics up to now, and their CRC-32, on rank 0."""
        return self._metrics.written if self._metrics else ()

    def asks(self) -> bool:
        """Return whether this rank wants all ranks to stop.

        One that could not write a checkpoint does: as they stop, all ranks learn of the failure.
        """
        requested = self._stop_requested
        is_requested = requested is not None and requested()
        return self.checkpoints.has_failed or is_requested or self.limit.is_near()

    def reach(self, point: str, step: int) -> None:
        """Tell the watchdog that the run moves, and fail here if run.inject says so.

        point  what begins here: step, batch (one of a step), save, evaluation, digests or end; in a
               save piece (another block or file); in one that is copied also snapshot (the copies
               are made), and in its thread thread (the files are written) and publish
        """
        if text := DOING.get(point):
            self._watchdog.alive(text.format(step))
        if self._injector:
            self._injector.passes(point, step)

    @contextmanager
    def patience(self, times: int) -> Iterator[None]:
        """A context in which others work while this rank waits: without traces none can see that they do."""
        keys = self.config.run
        if not self.recorder.is_on:
            self._watchdog.patience(times * keys.stall_seconds, keys.on_stall)
        yield
        if not self.recorder.is_on:
            self._watchdog.patience(keys.stall_seconds, keys.on_stall)

    def after(self, step: int) -> Done:
        """Return the progress of the run after a step."""
        done = self.job.done
        return Done(step, done.samples + (step - done.step) * self.config.batch.size, done.run)

    def take_snapshot(self, step: int) -> None:
        """Take a snapshot of this step for run.on_spike=back; collective."""
        if self._snapshots:
            way_out = "Set run.on_spike to skip, which needs none."
            with copying(f"the snapshot of step {step} for run.on_spike=back", way_out):
                self._snapshots.take(step)

    def record(self, record: dict[str, Any]) -> None:
        """Append a line to the metrics, and pass it to the watchers."""
        if not self._metrics:
            return
        record = {**record, "wall_s": time.perf_counter() - self._began}
        try:
            self._metrics.write(record)
        except OSError as error:
            is_saved = self.checkpoints.newest is not None
            way_on = "go on with --resume" if is_saved else "start again with --resume=auto"
            raise TrainingError(
                f"{self.folder / METRICS} cannot be written: {error.strerror or error}.",
                f"{mend(error)}, then {way_on}.",
            ) from None
        for watcher in self.watchers:
            if record.get("event") in CLOSING:
                watcher.on_end(record)
            elif record.get("event") in ("start", "resume"):
                watcher.on_begin(self.config, self.folder, record)
            elif "val_loss" in record:
                watcher.on_evaluation(record)
            elif "event" not in record:  # `Checkpoints` calls on_checkpoint.
                watcher.on_log(record)

    # Parts of a start.

    def _agreed(self, configured: Callable[[], Config], resume: str) -> Job:
        """Agree on the configuration, and make what it asks for before there is a job; collective."""
        transport, watchdog = self.transport, self._watchdog
        asked = Config()  # as this rank reads it: other ranks may resolve it otherwise

        def watched() -> Config:
            nonlocal asked
            asked = config = configured()
            watchdog.patience(config.run.stall_seconds, config.run.on_stall)
            if config.run.inject:
                from mpitrain.run.injection import Injector

                self._injector = Injector(config.run.inject, transport)
                self._injector.passes("start", 0)
            return config

        watchdog.alive("looking for the run directory")
        # A resumed run opens its data when all ranks know what it has read so far.
        begins = resume == "no" and not self.recovery
        agreed = agree_on(
            transport,
            watched,
            lambda config: look(config, resume, transport.size) if transport.rank == 0 else {},
            partial(opened, transport) if begins else lambda job: job,
        )
        keys = agreed.config.run
        if keys.on_failure == "continue" and not self.recovery:
            from mpitrain.run.recovery import Recovery

            self.recovery = Recovery(asked, transport)
        elif not self.recovery and transport.spares:
            raise ConfigError(
                f"Spares wait for run.on_failure=continue, but {transport.spares} wait(s), and run.on_failure is end.",
                "Add --set run.on_failure=continue, or start without --spares.",
            ).on_every_rank()
        for watcher in self.watchers:
            watcher.on_agreed(agreed.config, transport.hosts)
        if keys.trace and not transport.recorder.is_on:
            transport.record(Recorder())
            self._closed.callback(transport.record, SILENT)
        if self._injector:
            self._injector.loses_messages_of(transport)
        if keys.watchers:
            own = on_all_ranks(
                transport, lambda: [] if transport.rank else watchers_of(keys.watchers)
            )
            self._watch(*own)
        return agreed

    def _watch(self, *watchers: Watcher) -> None:
        for watcher in watchers:
            self.watchers.append(watcher)
            self._closed.callback(watcher.close)

    def _claim(self, agreed: Job, job: Job) -> None:
        """Claim the run directory on rank 0, and take up the state of the run; collective."""
        watchdog, rank, keys = self._watchdog, self.transport.rank, agreed.config.run

        def claiming() -> None:
            watchdog.alive("claiming the run directory")

        claiming()
        if rank > 0:  # Rank 0 writes so many files while the others wait for it.
            watchdog.patience(CLAIMED * keys.stall_seconds, keys.on_stall)
        locks: list[int] = []
        self._closed.callback(lambda: [os.close(lock) for lock in locks])
        is_resumed = agreed.saved or (self.recovery and self.recovery.facts)
        begun = job.step if is_resumed else -1
        over = job.trainer.transport
        refusals = over.refusals if isinstance(over, DeviceTransport) else []
        claimed, reasons = zip(
            *from_all_ranks(
                self.transport,
                lambda: (_claimed(rank, agreed, job, begun, locks, claiming), refusals),
            ),
            strict=True,
        )
        watchdog.patience(keys.stall_seconds, keys.on_stall)
        if rank == 0 and not refusals and any(reasons):
            from mpitrain.collectives.cuda_ipc import say_unshared

            say_unshared(next(filter(None, reasons))[0])
        self.folder, self.before = Path(claimed[0][0]), ResumeInfo(*claimed[0][1])
        self.meaning = claimed[0][2]
        if keys.tensorboard and rank == 0:
            from mpitrain.run.tensorboard import TensorBoard

            self._watch(TensorBoard())
        self.job, self.trainer, self.config = job, job.trainer, job.trainer.config
        self.transport = job.trainer.transport
        self.finished, self.steps = job.step, self.config.run.steps
        self.loss, self.source = None, job.data
        exchange = mode_of(self.config.replication, self.config.pipeline.schedule).exchange(
            self.config.replication
        )
        seconds = 3600 * keys.max_hours * (rank == 0)
        self.limit = TimeLimit(self._ends, self.before.checkpoint_s, exchange, seconds)
        self.met_at, self._peaks = -1, [0]
        self.best, self.skipped = Best(*self.before.best), self.before.skipped
        self._in_a_row = self.before.in_a_row  # steps with a skipped update up to now
        self._evaluated_at = job.step if self.before.is_evaluated else None
        self._batch_name = self.recorder.name(ROWS)
        self.checkpoints = Checkpoints(self, job.step if agreed.saved else None)
        if rank == 0:
            self._metrics = MetricsFile(self.folder / METRICS)
        self._closed.callback(self._close)
        if self.recovery:
            self.limit.shorten(self.recovery.seconds)
            self.checkpoints.newest = self.recovery.begins(self.folder, self.checkpoints.newest)

    def _close(self) -> None:
        if isinstance(self.source, Prefetched):
            self.source.close()
        if self._slow:
            self._slow.close()
        self.checkpoints.close()
        if self._metrics:
            self._metrics.close()

    def _trace(self) -> None:
        """Keep this rank's trace in the run directory, with facts about the rank; collective.

        If the file cannot be written, the rank prints a warning, and the run continues.
        """
        recorder, transport, trainer = self.recorder, self.transport, self.trainer
        self._peak_noted, self._released_noted = -1, 0
        self._memory_before = process.peak_memory()
        if not recorder.is_on:
            return
        rank, grid, replica = transport.rank, trainer.grid, trainer.replica
        self._clocks = Clocks(transport, recorder.clock)
        at = grid.coords._asdict()
        recorder.facts(
            run=self.job.done.run,
            rank=rank,
            number=self.recovery.number if self.recovery else rank,
            ranks=transport.size,
            host=transport.hosts[rank],
            process=os.getpid(),
            process_id=own_id(),
            time=time.time(),
            clock_then=recorder.clock(),
            device=trainer.backend.kind,
            place=None
            if grid.is_server
            else {axis: at[axis] for axis in grid.axes.sizes if axis in at},
        )
        if counted := trainer.job.counts.peak:
            # Gradients and optimizer state are zeros whose pages the first step touches.
            state = sum(replica.held_by_kind().values()) - replica.parameters.nbytes
            recorder.facts(counted_activation_bytes=counted, counted_growth_bytes=counted + state)
        recorder.facts(clock=self._clocks.measure())
        try:
            recorder.keep(trace_file(self.folder, rank))
        except OSError as error:
            say(f"warning: rank {rank} cannot keep a trace in {self.folder}: {error.strerror}.")

    def _note_start(self, agreed: Job, startup_s: float) -> None:
        """Start the clock and the thread that reads ahead, and record the start."""
        # The next line of a step covers the time since `_since` and the steps since `_logged_at`.
        self._since, self._logged_at = time.perf_counter(), self.finished
        self._comm_s, self._paused_then = 0.0, self._paused_s
        # In mode master only rank 0 updates, so no other rank has equal work.
        without = (0,) if self.config.replication.mode == "master" else ()
        groups = alike(self.trainer.grid.axes, self.config.batch.size, without)
        if self.transport.rank == 0 and self.recorder.is_on and groups:
            self._slow = SlowRanks(self.folder, self.transport.hosts, groups)
        self._began = time.perf_counter() - self.before.wall_s
        if ahead := self.config.data.prefetch:
            self.source = Prefetched(self.job.data, ahead, self.steps)
        trainer, job, before, now = self.trainer, self.job, self.before, time.time()
        recovered, spares = (
            (self.recovery.facts, self.recovery.spares) if self.recovery else ({}, None)
        )
        record = {
            "event": "resume" if agreed.saved or recovered else "start",
            "step": job.step,
            "samples_seen": job.done.samples,
            **recovered,
            "time": now,
            "startup_s": startup_s,
            "version": __version__,
            "ranks": self.transport.size,
            **({} if spares is None else {"spares": spares}),
            "hosts": len(set(self.transport.hosts)),
            "blas_threads": process.blas_threads_in_use(),
            "blas_kernels": (process.processor().label, process.blas_kernels()),
            "parameters": trainer.parameter_count,
        }
        if self._energy:
            record["metered"] = [*self._energy.parts]
            self._energy.since()
        if trainer.frozen_count:
            record["frozen"] = trainer.frozen_count
        record |= {"held_out": self.source.held_out, **amounts(job.data)}
        if trainer.begun_from:
            record["init_from"] = trainer.begun_from
        if before.ended:
            record["waited_s"] = max(0.0, now - startup_s - before.ended)
            record["repeated_s"] = before.repeated_s
        if agreed.changed:
            record["changed"] = agreed.changed
        if trainer.job.counts.problem:
            record["uncounted"] = trainer.job.counts.problem
        self.record(record)

    # Parts of a step.

    def _log(self, result: StepResult) -> None:
        """Show a step to the watchers, and write a line of metrics if one is due."""
        step = self.finished
        self._comm_s += result.comm_s
        for watcher in self.watchers:
            watcher.on_step(step, result)
        is_due = step == 1 or step % self.config.run.log_every == 0 or step == self.steps
        if is_due or result.stop or not result.updated:
            self._write(step, result)

    def _write(self, step: int, result: StepResult) -> None:
        config = self.config
        now, steps = result.extras.get("ended") or time.perf_counter(), step - self._logged_at
        step_s = (now - self._since - (self._paused_s - self._paused_then)) / steps
        comm_s = self._comm_s / steps
        self._since, self._paused_then = now, self._paused_s
        self._logged_at, self._comm_s = step, 0.0
        size = config.batch.size
        record = {
            "step": step,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "step_s": step_s,
            "comm_s": comm_s,
            "samples_per_s": size / step_s,
            "samples_seen": self.after(step).samples,
        }
        if self.source.form == "tokens":
            context = config.model.context
            record["tokens_per_s"] = size * context / step_s
            record["tokens_seen"] = context * record["samples_seen"]
        if self._energy and (joules := self._energy.since()) is not None:
            per_sample = joules / (steps * size)
            if self.source.form == "tokens":
                record["joules_per_token"] = per_sample / config.model.context
            else:
                record["joules_per_sample"] = per_sample
        record |= self._rates(step_s)
        names = mode_of(config.replication, config.pipeline.schedule).records(config.replication)
        record |= {name: result.extras.get(name, 0) for name in names}
        if "expert_tokens" in result.extras:
            for name in ("expert_tokens", "dropped", "imbalance"):
                record[name] = result.extras[name]
        if config.precision.compute == "float16":
            record["loss_scale"] = result.extras["loss_scale"]
        record["peak_activation_bytes"] = self.peak
        if not result.updated:
            record["overflow" if result.extras.get("overflows") else "skipped"] = True
            record["nonfinite_elements"] = result.nonfinite
        if not result.counted:
            record["empty"] = True
        if result.extras.get("is_spike"):
            record["spike"] = True
        if self._slow:
            record |= self._slow.record(step)
        self.record(record)

    def _note_memory(self) -> None:
        """Note in the trace what has changed of this rank's memory."""
        recorder, arena = self.recorder, self.trainer.arena
        if not recorder.is_on:
            return
        if arena.peak != self._peak_noted:
            self._peak_noted = arena.peak
            recorder.facts(peak_activation_bytes=arena.peak)
        if arena.released != self._released_noted:
            self._released_noted = arena.released
            recorder.facts(released_bytes=arena.released)
        if self.stepped == GROWING:
            recorder.facts(grown_bytes=process.peak_memory() - self._memory_before)

    def _check_skips(self, result: StepResult) -> None:
        """Raise TrainingError if the run skips too many updates."""
        step = self.finished
        # An overflow does not count: the dynamic loss scale reacts to it.
        overflows = result.extras.get("overflows", 0)
        is_skipped = not result.updated and not overflows
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        self.skipped += is_skipped
        if overflows >= OVERFLOWS:
            raise self._failed(
                step,
                f"The last {overflows} steps up to step {step} had gradients beyond float16, "
                f"at last with a loss scale of {result.extras['loss_scale']:g}.",
                "Lower optimizer.lr, or set precision.compute to bfloat16, and start again.",
            )
        is_nonfinite = is_skipped and result.counted and not result.extras.get("is_spike")
        if is_nonfinite and self.config.run.on_nonfinite == "stop":
            raise self._failed(
                step,
                f"Step {step} has loss {result.loss} and {result.nonfinite} gradient elements that are "
                f"not finite{self._where(step, result)}.",
                "Lower optimizer.lr, or go on past such steps with --set run.on_nonfinite=skip.",
            )
        if self._in_a_row == SKIPS or (step == self.steps and self.skipped > step / 2):
            undone = ", a spike, or were undone" * (self.config.run.on_spike != "ignore")
            raise self._failed(
                step,
                f"A run may not skip {SKIPS} steps in a row or more than half of them, but "
                f"{self.skipped} of {step} had no target that counts, or a loss or gradient that is not finite{undone}, "
                f"among them the last {self._in_a_row} up to step {step}.",
                "Lower optimizer.lr, then go on with --resume from the newest checkpoint, or start again."
                if result.counted
                else "Raise batch.size (or data.mask), or see what is ignored: data.separator, prompts longer than a row.",
            )

    def _where(self, step: int, result: StepResult) -> str:
        """Return a clause about the first arrays that are not finite in a step; collective.

        Empty if the ranks do not end each step together.
        """
        if self.config.replication.mode not in TOGETHER or "ended" in result.extras:
            return ""
        from mpitrain.run.locating import located

        trainer, number = self.trainer, step - 1
        batch = trainer.replica.batch(self.source, number, self.after(number).samples)
        return located(trainer, lambda: trainer.step(number, *batch))

    def _failed(self, step: int, law: str, way_out: str) -> TrainingError:
        """Write the last line of metrics, and return the error of all ranks: an asynchronous server tells of a step
        without an update in a pause of all.
        """
        self.record({"event": "failed", "step": step})
        return TrainingError(law, way_out).on_every_rank()

    # Parts of a pause.

    def _go_back_or_on(self, step: int) -> None:
        """Go back to a snapshot after a spike; else take one, every run.snapshot_every steps; collective.

        A save that is skipped while another is on its way leaves a snapshot, too: the times of a
        disk must not change to which step a run goes back.
        """
        assert self._snapshots
        if not self._is_spike:
            everies = self.config.run.snapshot_every, self.config.checkpoint.every
            if step == self.job.step or any(every and step % every == 0 for every in everies):
                with self.recorder.pausing("a snapshot"):
                    self.take_snapshot(step)
            return
        self._is_spike, skips = False, self.trainer.replica.skips
        undone = -skips.number
        with self.recorder.pausing("going back"):
            before = self._snapshots.restore(step)
        undone += skips.number
        self.skipped += undone
        self.record({"event": "back", "step": step, "to": before, "undone": undone})
        newest = self.checkpoints.newest
        if newest is not None and newest > before:
            self.checkpoints.save(step)  # A resume must not begin with what was undone.

    def _record_digests(self, step: int) -> None:
        """Record digests of the state of all ranks; collective."""
        self.reach("digests", step)
        with self.recorder.pausing("digests"):
            everyone = self.transport.gather_text(state_digests(self.trainer))
        self.record({"event": "digests", "step": step, **digest_record(everyone)})

    def _evaluate_if_due(self, step: int, stop: bool) -> bool:
        """Evaluate every run.eval_every steps; a resume repeats one that a stop interrupted; collective.

        returns  whether the run stops while steps or a due evaluation remain
        """
        keys, is_last = self.config.run, step == self.steps
        is_due = is_last and keys.eval_every != -1
        is_due |= step > 0 and step == keys.next_evaluation(step - 1)
        if not is_due or self._evaluated_at == step:
            self._end_if_spent(step)
            return stop and not is_last
        self.met_at = step
        if stop or self._evaluate(step):
            self._end_if_spent(step)
            return stop
        self.checkpoints.save(step)
        return True

    def _end_if_spent(self, step: int) -> None:
        """Make this step the last one if evaluations have not improved for run.patience; collective."""
        if 0 < self.config.run.patience <= self.best.since and step < self.steps:
            self.steps = step
            self.checkpoints.save(step)

    def _evaluate(self, step: int) -> bool:
        """Evaluate and record the result; return False if a stop request interrupts it; collective."""

        def stop_requested() -> bool:
            self.reach("evaluation", step)
            return self.asks()

        began = time.perf_counter()
        with self.recorder.pausing("evaluation"):
            result = self.trainer.evaluate(self.source, stop_requested)
        if result is None:
            return False
        loss, accuracy = result
        bits, seconds = bits_per_byte(self.job.data, loss), time.perf_counter() - began
        self.best = self.best.after(loss, step)
        record: dict[str, Any] = {"step": step, "val_loss": loss}
        if bits is not None:
            record["val_bits_per_byte"] = bits
        if not math.isnan(accuracy):
            record["val_accuracy"] = accuracy
        record |= {"eval_s": seconds, "best_step": self.best.step, **self._samples()}
        self.record(record)
        if self.config.checkpoint.best and self.best.step == step:
            self.checkpoints.keep_best(step)
        return True

    def _samples(self) -> dict[str, Any]:
        """Continue run.sample_prompt, and return the texts for the record; collective."""
        if not (prompts := self.config.run.sample_prompt) or not self.config.run.sample:
            return {}
        from mpitrain.run.generate import samples

        with self.recorder.pausing("a sample"):
            texts = samples(self.trainer, self.folder, self.source.inputs, prompts, self.asks)
        return {"samples": [list(pair) for pair in zip(prompts, texts, strict=True)]}


class Checkpoints:
    """Saves checkpoints of a run: every checkpoint.every steps, and where it stops or ends.

    With checkpoint.background, and memory for copies, a thread writes what was copied between two
    steps. A save that is due meanwhile is skipped. The last save of a run makes no copies.

    newest  the step of the newest checkpoint, which may be on its way; None: there is none
    """

    def __init__(self, run: Run, newest: int | None):
        self._run, self.newest, self._skipped = run, newest, 0
        self._best = run.best.step if run.config.checkpoint.best else -1
        self._on_its_way: saving.Save | None = None
        self._unrecorded: saving.Save | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not write the checkpoint that is on its way."""
        return self._on_its_way is not None and self._on_its_way.has_failed

    def pause(self, step: int, stop: bool) -> None:
        """Save what is due between two steps; stop: whether the run stops here."""
        run, every = self._run, self._run.config.checkpoint.every
        self._record()
        if stop or step == run.steps:
            self.save(step)
        elif every and step and step % every == 0 and self.newest != step:
            run.met_at = step
            with run.recorder.pausing("checkpoint"):
                # A checkpoint that stays for ever waits for the one before.
                if not self._stays(step) and not self._is_over():
                    self._skipped += 1
                else:
                    self._wait()
                    self._begin(step, in_background=True)

    def save(self, step: int) -> None:
        """Save a checkpoint of this step, unless there is one; return when it is published."""
        self._run.met_at = step
        with self._run.recorder.pausing("checkpoint"):
            self._wait()
            if self.newest != step:
                self._begin(step, in_background=False)
                self._wait()

    def keep_best(self, step: int) -> None:
        """Save the step of the best evaluation; the checkpoint that was the best is then removed."""
        with self._run.recorder.pausing("checkpoint"):
            if self.newest != step:
                self._wait()
            self._best = step
            if self.newest != step:
                self._begin(step, in_background=True)
        if not self._unrecorded:
            self._drop_old()

    def close(self) -> None:
        """Leave no thread that writes; after an error that all ranks raise, publish what is on its way."""
        error, save = sys.exc_info()[1], self._on_its_way
        if save and isinstance(error, MpitrainError) and error.agreed:  # All ranks are here.
            with suppress(MpitrainError):
                save.wait()
        elif save:
            save.give_up()

    def _is_over(self) -> bool:
        """Return whether the save that was on its way is published; collective."""
        save = self._on_its_way
        return save is None or all(self._run.transport.gather_text(save.is_published))

    def _stays(self, step: int) -> bool:
        """Return whether a checkpoint stays although it is old."""
        every = self._run.config.checkpoint.keep_every
        return step == self._best or bool(every and step % every == 0)

    def _begin(self, step: int, in_background: bool) -> None:
        """Begin a save while none is on its way; collective."""
        run, trainer, config = self._run, self._run.trainer, self._run.config
        run.reach("save", step)
        run.take_snapshot(step)
        trainer.sync_parameters()
        scalars = trainer.replica.skips.scalars()
        base = trainer.begun_from if config.lora.rank else {}
        sizes = trainer.job.axes.sizes
        manifest = Manifest(run.after(step), sizes, scalars, base=base, meaning=run.meaning)
        manifest = manifest._replace(metrics=run.written)
        room = room_for_copies(trainer) if in_background and config.checkpoint.background else None
        with (
            copying(
                f"the checkpoint of step {step}, which is copied and then written in the background",
                "Add --set checkpoint.background=false, and go on with --resume.",
            )
            if room
            else nullcontext()
        ):
            self._on_its_way = self._unrecorded = save = saving.begin(
                run.folder / CHECKPOINTS,
                state_to_save(trainer),
                trainer.storage,
                run.transport,
                trainer.backend,
                manifest,
                config.checkpoint.keep,
                self._stays,
                room,
                WORTH_COPYING if config.checkpoint.background == "auto" else 0,
                lambda: run.reach("piece", step),
            )
        self.newest = step
        if save.is_copied:
            run.reach("snapshot", step)
            save.start(run.reach)
        else:
            self._wait()

    def _wait(self) -> None:
        """Wait until no save is on its way; collective.

        raises  TrainingError on every rank if one could not be written
        """
        save, self._on_its_way = self._on_its_way, None
        if save:
            with self._run.patience(PUBLISHED):
                save.wait()
            self._record()

    def _record(self) -> None:
        """Record the checkpoint that was begun last, once this rank knows that it is published."""
        save, run = self._unrecorded, self._run
        if not save or not save.is_published:
            return
        self._unrecorded = None
        run.limit.saved(save.seconds)
        run.record(
            {
                "event": "checkpoint",
                "step": save.step,
                "checkpoint_s": save.seconds,
                "checkpoint_pause_s": min(save.paused_s, save.seconds),
                "checkpoint_bytes": save.nbytes,
                **({"checkpoints_skipped": self._skipped} if self._skipped else {}),
            }
        )
        for watcher in run.watchers:
            watcher.on_checkpoint(save.step, save.path)
        self._drop_old()

    def _drop_old(self) -> None:
        """Remove the checkpoint that was the best before, unless its successor is on its way."""
        run, config = self._run, self._run.config.checkpoint
        if run.transport.rank == 0 and config.best:
            with suppress(OSError):
                drop_old(run.folder / CHECKPOINTS, config.keep, self._stays)


def _claimed(
    rank: int, agreed: Job, job: Job, begun: int, locks: list[int], alive: Callable[[], None]
) -> tuple[str, ResumeInfo, dict[str, Any]] | None:
    """Claim the run directory on rank 0; return it with the earlier part of the run, and its meaning.

    begun   step up to which the run stays as it was; -1: it begins anew
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
    before = ResumeInfo()
    if agreed.has_run:
        before = past(Path(agreed.folder), begun)
    folder, meant, lock = claim(agreed, job.trainer.job, job.source, begun, alive)
    locks.append(lock)
    return str(folder), before, meant
