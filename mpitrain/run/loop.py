"""The training loop of one run, with its checkpoints, evaluations and metrics."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from mpitrain import __version__
from mpitrain.config import Config, Run
from mpitrain.data import Prefetched, Source, amounts, bits_per_byte
from mpitrain.errors import CheckpointError, TrainingError, on_every_rank
from mpitrain.files import mend
from mpitrain.machine.process import blas_threads_in_use, gpu_identities
from mpitrain.machine.time_limit import TimeLimit
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.replication.records import StepResult
from mpitrain.run.build import Job, build
from mpitrain.run.checkpoint import saving
from mpitrain.run.checkpoint.digests import digest_record
from mpitrain.run.checkpoint.manifest import Done
from mpitrain.run.initial import of_adapters
from mpitrain.run.metrics import CLOSING, METRICS, MetricsFile, ResumeInfo, past
from mpitrain.run.resolve import Given, RunLocation, agree_on
from mpitrain.run.run_dir import CHECKPOINTS, claim, look
from mpitrain.run.stalls.slow_ranks import SlowRanks, alike
from mpitrain.run.tensorboard import TensorBoard
from mpitrain.run.trace_setup import Traced
from mpitrain.run.trainer import replicas_equal, state_digests
from mpitrain.run.utilisation import utilisation
from mpitrain.run.watchdog import Watchdog
from mpitrain.run.watcher import Watcher
from mpitrain.trace.recorder import Recorder
from mpitrain.trace.ring_buffer import ROWS
from mpitrain.transport.agreement import from_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.decorators import Recorded
from mpitrain.transport.device import DeviceTransport

SKIPS = 10
"""Number of consecutive skipped steps that ends a run."""
OVERFLOWS = 20
"""Number of consecutive steps with gradients beyond float16 that ends a run."""


class Finished(NamedTuple):
    """The result of a run.

    stopped  whether it was stopped on request
    job      the job after training; its `step` is not advanced: it is still the step at which this
             run began
    """

    stopped: bool
    job: Job


def train(
    transport: "Transport",
    configured: "Callable[[], Config]",
    resume: "str" = "no",
    stop_requested: "Callable[[], bool]" = bool,
    watchers: "Sequence[Watcher]" = (),
    begins: "Callable[[], Any]" = bool,
    ends: "Callable[[], float | None]" = NoneType,
) -> "Finished":
    """Train a model in a run directory, as `mpitrain train` does; collective.

    Parameters
    ----------
    configured : callable
        Returns the configuration, on every rank; all ranks raise an MpitrainError of one.
    resume : {"no", "yes", "auto"}
        As `--resume`.
    stop_requested : callable
        Called once a step, and for each batch of an evaluation. If it returns True on a rank, the
        run saves a checkpoint and ends. A resume makes the evaluation that is due. The default,
        `bool()`, is False.
    watchers : sequence of Watcher
        Called in this order, on rank 0.
    begins : callable
        Called before there is anything to save. From then on a signal must not end the process.
    ends : callable
        Returns the end of the batch job on rank 0, in seconds since 1970, or None. The default,
        `NoneType()`, is None.
    """
    watchers = watchers if transport.rank == 0 else ()
    with (
        closing(Watchdog(transport.rank, Run().stall_seconds, transport.traffic)) as watchdog,
        ExitStack() as closed,
    ):
        for watcher in watchers:
            closed.callback(watcher.close)

        injector: list[Any] = []  # The Injector of run.inject, if the key is set.

        def watched() -> Config:
            config = configured()
            watchdog.patience(config.run.stall_seconds, config.run.on_stall)
            if config.run.inject:
                from mpitrain.run.injection import Injector

                injector.append(Injector(config.run.inject, transport))
                injector[0].passes("start", 0)
            return config

        watchdog.alive("looking for the run directory")
        agreed = agree_on(
            transport,
            watched,
            lambda config: look(config, resume, transport.size) if transport.rank == 0 else None,
        )
        for watcher in watchers:
            watcher.on_agreed(agreed.config, transport.hosts)
        if agreed.config.run.trace and not transport.recorder.is_on:
            transport = Recorded(transport, Recorder())
        if injector:
            transport = injector[0].over(transport)
        watchdog.alive("building the model")
        with transport.recorder.pausing("building the model"):
            job = build(transport, agreed)
        watchdog.alive("claiming the run directory")
        begins()
        locks: list[int] = []
        try:
            over = job.trainer.transport
            refusals = over.refusals if isinstance(over, DeviceTransport) else []
            claimed, reasons = zip(
                *from_all_ranks(
                    transport, lambda: (_claimed(transport.rank, agreed, job, locks), refusals)
                ),
                strict=True,
            )
            if transport.rank == 0 and not refusals and any(reasons):
                from mpitrain.collectives.cuda_ipc import say_unshared

                say_unshared(next(filter(None, reasons))[0])
            folder, before = Path(claimed[0][0]), ResumeInfo(*claimed[0][1])
            traced = Traced(transport, job, folder)
            watchdog.alive("measuring matrix products")
            places = gpu_identities(transport.hosts, job.trainer.resolved.gpus)
            rates = utilisation(job, places.count(places[transport.rank]))
            if agreed.config.run.tensorboard and transport.rank == 0:
                watchers = [*watchers, board := TensorBoard()]
                closed.callback(board.close)
            run = _Run(
                job,
                agreed.location,
                folder,
                before,
                stop_requested,
                watchdog,
                watchers,
                traced,
                rates,
                ends,
                injector[0].passes if injector else None,
            )
            if transport.recorder.is_on:
                watchdog.traces(folder, transport.recorder)
            with closing(run):
                return Finished(run.loop(), job)
        finally:
            for lock in locks:
                os.close(lock)


def _claimed(rank: int, agreed: Given, job: Job, locks: list[int]) -> tuple[str, ResumeInfo] | None:
    """Claim the run directory on rank 0, and return it with the earlier part of the run.

    locks   receives the descriptor of its lock, which the caller must close
    raises  MpitrainError, on any rank if the run has more steps than it shall have
    """
    if job.step > agreed.config.run.steps:
        raise CheckpointError(
            f"The checkpoint is at step {job.step}, past run.steps {agreed.config.run.steps}.",
            f"Set run.steps to at least {job.step}.",
        )
    if rank > 0:
        return None
    folder, lock = claim(agreed.location, job.trainer.resolved, job.source, job.step)
    locks.append(lock)
    return str(folder), past(folder, job.step)


class _Run:
    """The training loop and its output. Only rank 0 writes metrics and has watchers."""

    def __init__(
        self,
        job: Job,
        location: RunLocation,
        folder: Path,
        past: ResumeInfo,
        stop_requested: Callable[[], bool],
        watchdog: Watchdog,
        watchers: Sequence[Watcher],
        traced: Traced,
        rates: Callable[[float], dict[str, float]],
        ends: Callable[[], float | None],
        fails: Callable[[str, int], None] | None,
    ):
        """Bind the loop to a job.

        fails  (point, step): the failure of run.inject, if it is due; None without one
        """
        self._fails = fails
        self._trainer, self._done, data = job.trainer, job.done, job.trainer.config.data
        self._source: Source = job.data
        self._data = job.data
        self._prefetched: Prefetched | None = None
        if data.prefetch:
            steps = job.trainer.config.run.steps
            self._source = self._prefetched = Prefetched(job.data, data.prefetch, steps)
        self._recorder, self._traced = job.trainer.transport.recorder, traced
        self._utilisation = rates
        self._batch_name = self._recorder.name(ROWS)
        self._first = job.step
        self._config, transport = self._trainer.config, self._trainer.transport
        exchange = mode_of(self._config).exchange(self._config.replication)
        self._limit = limit = TimeLimit(ends, past.checkpoint_s, exchange)
        self._folder, self._stop_requested, self._watchdog, self._watchers = (
            folder,
            lambda: stop_requested() or limit.is_near(),
            watchdog,
            watchers,
        )
        self._is_root = transport.rank == 0
        self._evaluated_at: int | None = self._first if past.is_evaluated else None
        self._began = time.perf_counter() - past.wall_s
        # The next line of metrics covers the time since `_since` and the steps since `_logged_at`.
        self._since, self._logged_at, self._comm_s = time.perf_counter(), self._first, 0.0
        # Steps with a skipped update: their total, and the number of consecutive ones up to now.
        self._skipped, self._in_a_row = past.skipped, past.in_a_row
        self._saved_at: int | None = self._first if location.saved else None
        # The peak memory of each rank's activations in bytes, as of the last pause of all ranks.
        self._peaks = [0]
        self._metrics = MetricsFile(folder / METRICS) if self._is_root else None
        # In mode master only rank 0 updates, so no other rank has equal work.
        without = (0,) if self._config.replication.mode == "master" else ()
        groups = alike(self._trainer.grid.axes, self._config.batch.size, without)
        does_compare = self._is_root and self._recorder.is_on and groups
        self._slow = SlowRanks(folder, transport.hosts, groups) if does_compare else None
        record = {
            "event": "resume" if location.saved else "start",
            "step": self._first,
            "version": __version__,
            "ranks": transport.size,
            "hosts": len(set(transport.hosts)),
            "blas_threads": blas_threads_in_use(),
            "parameters": self._trainer.parameter_count,
            **({"frozen": frozen} if (frozen := self._trainer.frozen_count) else {}),
            "held_out": self._source.held_out,
            **amounts(job.data),
            **({"init_from": begun} if (begun := self._trainer.begun_from) else {}),
            **({"changed": location.changed} if location.changed else {}),
            **({"uncounted": problem} if (problem := self._trainer.counted.problem) else {}),
        }
        self._record(record)

    def close(self) -> None:
        if self._prefetched:
            self._prefetched.close()
        if self._slow:
            self._slow.close()
        if self._metrics:
            self._metrics.close()

    # Each step counts values that are not finite, so NumPy need not warn of them.
    @np.errstate(divide="ignore", over="ignore", invalid="ignore")
    def loop(self) -> bool:
        """Run the remaining steps; return whether the run was stopped on request."""
        # A resumed run first makes an evaluation that was due at its end.
        is_stopped = self._pause(self._first, stop=False)
        for index in range(self._first, self._config.run.steps):
            if is_stopped:
                break
            with self._recorder.stepping(index):
                is_asked = self._step(index)
            is_stopped = self._pause(index + 1, is_asked)
        if is_stopped:
            self._record({"event": "stopped", "step": self._saved_at, **self._limit.reason()})
        else:
            self._end()
            if self._fails:
                self._fails("end", self._config.run.steps)
        return is_stopped

    def _step(self, index: int) -> bool:
        """Run one optimizer step, log it, and end the run after too many skipped updates.

        Returns whether a rank requested a stop.
        """
        run, step, began = self._config.run, index + 1, time.perf_counter()
        self._watchdog.alive(f"step {step}")
        if self._fails:
            self._fails("step", step)
        replication, own = self._trainer.replication, None
        for number in replication.steps(index, self._stop_requested):
            self._watchdog.alive(f"step {number + 1}")
            span = self._recorder.compute(self._batch_name)
            inputs, targets = replication.batch(self._source, number, self._after(number).samples)
            self._recorder.end(span)
            own = self._trainer.step(number, inputs, targets, self._stop_requested)
        outcome = replication.outcome(index, own)
        self._traced.stepped()
        self._limit.stepped(time.perf_counter() - began)
        self._comm_s += outcome.comm_s
        # An overflow does not count: the dynamic loss scale reacts to it.
        is_skipped = not outcome.updated and not outcome.overflows
        self._skipped += is_skipped
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        for watcher in self._watchers:
            watcher.on_step(step, outcome)
        if (
            step == 1
            or step % run.log_every == 0
            or step == run.steps
            or outcome.stop
            or not outcome.updated
        ):
            self._log_step(step, outcome)
        if outcome.overflows >= OVERFLOWS:
            raise self._failed(
                step,
                f"The last {outcome.overflows} steps up to step {step} had gradients beyond float16, "
                f"at last with a loss scale of {outcome.loss_scale:g}.",
                "Lower optimizer.lr, or set precision.compute to bfloat16, and start again.",
            )
        if is_skipped and outcome.counted and run.on_nonfinite == "stop":
            raise self._failed(
                step,
                f"Step {step} has loss {outcome.loss} and {outcome.nonfinite} gradient elements that are "
                f"not finite{self._where(outcome)}.",
                "Lower optimizer.lr, or go on past such steps with --set run.on_nonfinite=skip.",
            )
        if self._in_a_row == SKIPS or (step == run.steps and self._skipped > step / 2):
            raise self._failed(
                step,
                f"A run may not skip {SKIPS} steps in a row or more than half of them, but "
                f"{self._skipped} of {step} had no target that counts, or a loss or gradient that is not finite, "
                f"among them the last {self._in_a_row} up to step {step}.",
                "Lower optimizer.lr, then go on with --resume from the newest checkpoint, or start again."
                if outcome.counted
                else "Raise batch.size, or see why the data masks so much: data.separator, or prompts longer than model.context.",
            )
        return outcome.stop

    def _where(self, outcome: StepResult) -> str:
        """Return a clause that names the ranks where a step's loss is not finite; collective.

        Ranks without a step in common have none.
        """
        if not self._is_common or outcome.ended is not None:
            return ""
        transport = self._trainer.transport
        if ranks := self._trainer.spoilt_ranks():
            named = ", ".join(f"{rank} ({transport.hosts[rank]})" for rank in ranks[:8])
            return f"; the loss is not finite on {len(ranks)} of {transport.size} ranks: {named}"
        return "; the loss of each rank is finite" if np.isfinite(outcome.loss) else ""

    def _pause(self, step: int, stop: bool) -> bool:
        """Save and evaluate if they are due after this step; return whether the run stops here.

        The time of a pause does not count as training time. A stop request does not wait for an
        evaluation. After the last step it matters only if an evaluation is due.
        """
        began = time.perf_counter()
        every, is_last = self._config.checkpoint.every, step == self._config.run.steps
        is_left, is_saved = (
            self._is_evaluation_due(step),
            stop or is_last or bool(every and step and step % every == 0),
        )
        does_rest = is_saved or is_left
        noted = self._config.run.digest_every
        if noted and step % noted == 0 and (step > self._first or not step):
            self._note_digests(step)
        if is_saved:
            self._save(step)
        if is_left and not stop:
            is_left = stop = not self._evaluate(step)
            if stop:
                self._save(step)
        if does_rest:
            self._meet()
        self._since += time.perf_counter() - began
        return stop and (is_left or not is_last)

    def _note_digests(self, step: int) -> None:
        """Record digests of the state of all ranks; collective."""
        self._watchdog.alive(f"the digests of step {step}")
        trainer = self._trainer
        with self._recorder.pausing("digests"):
            everyone = trainer.transport.gather_text(state_digests(trainer))
        self._record({"event": "digests", "step": step, **digest_record(everyone)})

    def _meet(self) -> None:
        """Measure the clock offsets, and gather all ranks' peak activation memory; collective."""
        with self._recorder.pausing("the clocks"):
            self._traced.align()
            self._peaks = self._trainer.transport.gather_text(self._trainer.arena.peak)

    @property
    def _peak(self) -> int:
        """Peak activation memory of all ranks in bytes; for other ranks as of the last pause."""
        return max(self._trainer.arena.peak, *self._peaks)

    def _is_evaluation_due(self, step: int) -> bool:
        run = self._config.run
        is_due = (run.eval_every >= 0 and step == run.steps) or (
            run.eval_every > 0 and step > 0 and step % run.eval_every == 0
        )
        return is_due and self._evaluated_at != step

    def _end(self) -> None:
        equal = replicas_equal(self._trainer)
        self._record(
            {
                "event": "end",
                "step": self._config.run.steps,
                "replicas_equal": equal,
                "peak_activation_bytes": self._peak,
                "peak_activation_bytes_of_ranks": self._peaks,
                "held_activation_bytes": self._trainer.arena.held,
            }
        )
        if not equal:
            raise on_every_rank(
                TrainingError(
                    "After the last step the parameters differ between replicas.",
                    "This is a fault of mpitrain or of the machine's memory; please report it.",
                )
            )

    def _log_step(self, step: int, outcome: StepResult) -> None:
        """Write a line of metrics about the steps since the last line."""
        self._traced.peak(self._trainer.arena.peak)
        self._traced.released(self._trainer.arena.released)
        now, size, steps = (
            outcome.ended or time.perf_counter(),
            self._config.batch.size,
            step - self._logged_at,
        )
        step_s, comm_s = (now - self._since) / steps, self._comm_s / steps
        self._since, self._logged_at, self._comm_s = now, step, 0.0
        rates = {"samples_per_s": size / step_s, "samples_seen": self._after(step).samples}
        if self._source.form == "tokens":
            context = self._config.model.context
            rates |= {
                "tokens_per_s": size * context / step_s,
                "tokens_seen": context * rates["samples_seen"],
            }
        rates |= self._utilisation(step_s)
        records = mode_of(self._config).records(self._config.replication)
        rates |= {name: getattr(outcome, name) for name in records}
        skipped = (
            {}
            if outcome.updated
            else {
                "overflow" if outcome.overflows else "skipped": True,
                "nonfinite_elements": outcome.nonfinite,
            }
        )
        if not outcome.counted:
            skipped["empty"] = True
        if self._config.precision.compute == "float16":
            rates |= {"loss_scale": outcome.loss_scale}
        self._record(
            {
                "step": step,
                "loss": outcome.loss,
                "lr": outcome.lr,
                "grad_norm": outcome.grad_norm,
                "step_s": step_s,
                "comm_s": comm_s,
                **rates,
                "peak_activation_bytes": self._peak,
                **skipped,
                **(self._slow.record(step) if self._slow else {}),
            }
        )

    def _evaluate(self, step: int) -> bool:
        """Evaluate and record the result; return False if a stop request interrupts it."""

        def stop_requested() -> bool:
            self._watchdog.alive(f"the evaluation after step {step}")
            return self._stop_requested()

        began = time.perf_counter()
        with self._recorder.pausing("evaluation"):
            if self._fails:
                self._fails("evaluation", step)
            result = self._trainer.evaluate(self._source, stop_requested)
        if result:
            loss, accuracy = result
            bits = bits_per_byte(self._data, loss)
            self._record(
                {
                    "step": step,
                    "val_loss": loss,
                    **({"val_bits_per_byte": bits} if bits is not None else {}),
                    "val_accuracy": accuracy,
                    "eval_s": time.perf_counter() - began,
                }
            )
        return result is not None

    def _after(self, step: int) -> Done:
        return Done(
            step,
            self._done.samples + (step - self._first) * self._config.batch.size,
            self._done.run,
        )

    def _save(self, step: int) -> None:
        if self._saved_at == step:
            return
        self._watchdog.alive(f"the checkpoint of step {step}")
        trainer, began = self._trainer, time.perf_counter()
        with self._recorder.pausing("checkpoint"):
            if self._fails:
                self._fails("save", step)
            trainer.sync_parameters()
            kept = trainer.replication.kept()
            base = trainer.begun_from if self._config.lora.rank else {}
            saved = saving.save(
                self._folder / CHECKPOINTS,
                of_adapters(kept) if base else kept,
                trainer.storage,
                trainer.transport,
                trainer.backend,
                self._after(step),
                trainer.resolved.axes._asdict(),
                trainer.replication.scalars(),
                self._config.checkpoint.keep,
                base,
            )
        self._saved_at, seconds = step, time.perf_counter() - began
        self._limit.saved(seconds)
        self._record(
            {
                "event": "checkpoint",
                "step": step,
                "checkpoint_s": seconds,
                "checkpoint_bytes": saved.nbytes,
            }
        )
        for watcher in self._watchers:
            watcher.on_checkpoint(step, saved.path)

    def _record(self, record: dict[str, Any]) -> None:
        if not self._metrics:
            return
        record = {**record, "wall_s": time.perf_counter() - self._began}
        try:
            self._metrics.write(record)
        except OSError as error:
            way_on = (
                "go on with --resume"
                if self._saved_at is not None
                else "start again with --resume=auto"
            )
            raise TrainingError(
                f"{self._folder / METRICS} cannot be written: {error.strerror or error}.",
                f"{mend(error)}, then {way_on}.",
            ) from None
        for watcher in self._watchers:
            if record.get("event") in CLOSING:
                watcher.on_end(record)
            elif record.get("event") in ("start", "resume"):
                watcher.on_begin(self._config, self._folder, record)
            elif "val_loss" in record:
                watcher.on_evaluation(record)
            elif "event" not in record:  # `_save` calls on_checkpoint.
                watcher.on_log(record)

    def _failed(self, step: int, law: str, way_out: str) -> TrainingError:
        """Write the last line of metrics, and return the error to raise on every rank.

        Asynchronous servers do not wait for a step: a worker may still send to one that has ended.
        So the first rank that fails ends all.
        """
        self._record({"event": "failed", "step": step})
        error = TrainingError(law, way_out)
        return on_every_rank(error) if self._is_common else error

    @property
    def _is_common(self) -> bool:
        """Whether all ranks end a step together."""
        replication = self._config.replication
        return replication.mode != "server" or replication.update == "sync"
