"""What a run does besides its steps: hooks, which the loop calls, and the state they share."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from mpitrain import __version__
from mpitrain.data import Prefetched, Source, amounts, bits_per_byte
from mpitrain.errors import ConfigError, MpitrainError, TrainingError, gigabytes, say
from mpitrain.files import mend
from mpitrain.machine import blas_kernels, process
from mpitrain.machine.process import own_id
from mpitrain.machine.time_limit import TimeLimit
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.replication.protocol import StateBuffer, StepResult
from mpitrain.run.checkpoint import saving
from mpitrain.run.checkpoint.manifest import CHECKPOINTS, Done, Manifest, drop_old
from mpitrain.run.job import Job, RunLocation
from mpitrain.run.metrics import CLOSING, METRICS, Best, MetricsFile, ResumeInfo
from mpitrain.run.replicas import digest_record, state_digests
from mpitrain.run.slow_ranks import SlowRanks, alike
from mpitrain.run.trainer import Trainer
from mpitrain.run.watchdog import Watchdog
from mpitrain.run.watcher import Watcher
from mpitrain.trace.recorder import ROWS
from mpitrain.trace.timeline import trace_file
from mpitrain.transport.clocks import Clocks

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


@contextmanager
def copying(what: str, way_out: str) -> Iterator[None]:
    """Turn a lack of memory for copies into an error that names the key which asks for them."""
    try:
        yield
    except MemoryError as error:
        raise TrainingError(f"There is no memory for {what}: {error}.", way_out) from None


class RunState:
    """The state of a run that its hooks share, and its metrics; only rank 0 writes and has watchers.

    meaning   of the parameters, as `run_dir.meaning`
    source    the data, perhaps read ahead by a thread
    first     number of steps before this start
    finished  number of steps that have ended on this rank
    loss      of the last of these; None: it was before this start
    limit     the time limit of the batch job
    saved_at  the step of the newest checkpoint, which may be on its way; None: there is none
    save      the checkpoint that is on its way
    met_at    the last step after which the ranks saved or evaluated together
    steps     the last step; an evaluation may end the run before run.steps
    best      the best evaluation so far
    skipped   number of updates that were skipped because of loss or gradients, or undone
    paused_s  seconds since this start that the hooks took between steps
    peaks     the peak activation bytes of each rank, as of `met_at`
    """

    def __init__(
        self,
        job: Job,
        location: RunLocation,
        folder: Path,
        before: ResumeInfo,
        meaning: Mapping[str, Any],
        stop_requested: Callable[[], bool] | None,
        ends: Callable[[], float | None] | None,
        watchers: Sequence[Watcher],
    ):
        """Take a job and its run directory.

        meaning                         of the parameters, for manifests
        stop_requested, ends, watchers  from `train`
        """
        self.job, self.trainer, self.config = job, job.trainer, job.trainer.config
        self.folder, self.before, self.watchers = folder, before, watchers
        self.meaning = meaning
        self.transport, self.recorder = self.trainer.transport, self.trainer.transport.recorder
        self.first, self.steps = job.step, self.config.run.steps
        self.finished = self.first
        self.loss: float | None = None
        self.source: Source = job.data
        exchange = mode_of(self.config).exchange(self.config.replication)
        is_root = self.transport.rank == 0
        seconds = 3600 * self.config.run.max_hours * is_root
        self.limit = TimeLimit(ends, before.checkpoint_s, exchange, seconds)
        self._stop_requested = stop_requested
        self.saved_at = self.first if location.saved else None
        self.save: saving.Save | None = None
        self.met_at, self.paused_s, self.peaks = -1, 0.0, [0]
        self.best, self.skipped = Best(*before.best), before.skipped
        self.hooks: list[Hook] = []
        self.batch_name = self.recorder.name(ROWS)
        self._began = 0.0
        self._metrics = MetricsFile(folder / METRICS) if is_root else None

    def begin(self, location: RunLocation, startup_s: float, recovered: Mapping[str, Any]) -> None:
        """Start the clock and the thread that reads ahead, and record the start.

        recovered  facts of a start after the loss of ranks
        """
        self._began = time.perf_counter() - self.before.wall_s
        if ahead := self.config.data.prefetch:
            self.source = Prefetched(self.job.data, ahead, self.steps)
        trainer, job, now = self.trainer, self.job, time.time()
        record = {
            "event": "resume" if location.saved or recovered else "start",
            "step": self.first,
            "samples_seen": job.done.samples,
            **recovered,
            "time": now,
            "startup_s": startup_s,
            "version": __version__,
            "ranks": self.transport.size,
            "hosts": len(set(self.transport.hosts)),
            "blas_threads": process.blas_threads_in_use(),
            "blas_kernels": blas_kernels.in_use(),
            "parameters": trainer.parameter_count,
            **({"frozen": frozen} if (frozen := trainer.frozen_count) else {}),
            "held_out": self.source.held_out,
            **amounts(job.data),
            **({"init_from": begun} if (begun := trainer.begun_from) else {}),
            **(
                {
                    "waited_s": max(0.0, now - startup_s - self.before.ended),
                    "repeated_s": self.before.repeated_s,
                }
                if self.before.ended
                else {}
            ),
            **({"changed": location.changed} if location.changed else {}),
            **({"uncounted": problem} if (problem := trainer.counted.problem) else {}),
        }
        self.record(record)

    def asks(self) -> bool:
        """Return whether this rank wants all ranks to stop.

        One that could not write a checkpoint does: as they stop, all ranks learn of the failure.
        """
        requested = self._stop_requested
        has_failed = self.save is not None and self.save.has_failed
        return has_failed or (requested is not None and requested()) or self.limit.is_near()

    def reach(self, point: str, step: int) -> None:
        """Tell all hooks that the run has reached a point, as `Hook.reaches`."""
        for hook in self.hooks:
            hook.reaches(point, step)

    def after(self, step: int) -> Done:
        """Return the progress of the run after a step."""
        samples = self.job.done.samples + (step - self.first) * self.config.batch.size
        return Done(step, samples, self.job.done.run)

    @property
    def peak(self) -> int:
        """Peak activation memory of all ranks in bytes; for other ranks as of `met_at`."""
        return max(self.trainer.arena.peak, *self.peaks)

    @property
    def written(self) -> Sequence[int]:
        """Bytes of the metrics up to now, and their CRC-32, on rank 0."""
        return self._metrics.written if self._metrics else ()

    @property
    def is_common(self) -> bool:
        """Whether all ranks end a step together."""
        replication = self.config.replication
        return replication.mode != "server" or replication.update == "sync"

    def record(self, record: dict[str, Any]) -> None:
        """Append a line to the metrics, and pass it to the watchers."""
        if not self._metrics:
            return
        record = {**record, "wall_s": time.perf_counter() - self._began}
        try:
            self._metrics.write(record)
        except OSError as error:
            way_on = (
                "go on with --resume"
                if self.saved_at is not None
                else "start again with --resume=auto"
            )
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
            elif "event" not in record:  # `Saving` calls on_checkpoint.
                watcher.on_log(record)

    def close(self) -> None:
        if isinstance(self.source, Prefetched):
            self.source.close()
        for hook in self.hooks:
            hook.close()
        if self._metrics:
            self._metrics.close()


class Hook:
    """A task of a run besides its steps. By default it does nothing."""

    def reaches(self, point: str, step: int) -> None:
        """Act at a point of the run.

        point  what begins there: step, batch (one of a step), save, evaluation, digests or end; in a
               save piece (another block or file); in one that is copied also snapshot
               (the copies are made), and in its thread thread
               (the files are written) and publish
        """

    def step_ends(self, step: int, outcome: StepResult) -> None:
        """Act after a step; an error that it raises ends the run."""

    def pause(self, step: int, stop: bool) -> bool:
        """Act between two steps; return whether the run stops here, the same on all ranks.

        stop  the answer of the hook before; for the first hook, whether a rank asks to stop
        """
        return stop

    def close(self) -> None:
        """Free files; called once, after an error too."""


class Watching(Hook):
    """Tells the watchdog that the run is alive."""

    TEXTS = {
        "step": "step {}",
        "batch": "step {}",
        "save": "the checkpoint of step {}",
        "piece": "the checkpoint of step {}",
        "evaluation": "the evaluation after step {}",
        "digests": "the digests of step {}",
    }

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog

    def reaches(self, point: str, step: int) -> None:
        if text := self.TEXTS.get(point):
            self._watchdog.alive(text.format(step))


class Failing(Hook):
    """Fails where run.inject says."""

    def __init__(self, passes: Callable[[str, int], None]):
        """passes: the method of the `Injector`."""
        self._passes = passes

    def reaches(self, point: str, step: int) -> None:
        self._passes(point, step)


class Logging(Hook):
    """Writes the lines of steps to the metrics."""

    def __init__(self, run: RunState, utilisation: Callable[[float], dict[str, float]]):
        """utilisation: seconds of a step -> its `mfu` and `hfu`, or {}."""
        self._run, self._utilisation = run, utilisation
        # The next line covers the time since `_since` and the steps since `_logged_at`.
        self._since, self._logged_at, self._comm_s = time.perf_counter(), run.first, 0.0
        self._paused_s = run.paused_s
        config = run.config
        # In mode master only rank 0 updates, so no other rank has equal work.
        without = (0,) if config.replication.mode == "master" else ()
        groups = alike(run.trainer.grid.axes, config.batch.size, without)
        does_compare = run.transport.rank == 0 and run.recorder.is_on and groups
        self._slow = SlowRanks(run.folder, run.transport.hosts, groups) if does_compare else None

    def step_ends(self, step: int, outcome: StepResult) -> None:
        self._comm_s += outcome.comm_s
        for watcher in self._run.watchers:
            watcher.on_step(step, outcome)
        is_due = step == 1 or step % self._run.config.run.log_every == 0 or step == self._run.steps
        if is_due or outcome.stop or not outcome.updated:
            self._write(step, outcome)

    def close(self) -> None:
        if self._slow:
            self._slow.close()

    def _write(self, step: int, outcome: StepResult) -> None:
        run, config = self._run, self._run.config
        now, steps = outcome.ended or time.perf_counter(), step - self._logged_at
        step_s = (now - self._since - (run.paused_s - self._paused_s)) / steps
        comm_s = self._comm_s / steps
        self._since, self._paused_s = now, run.paused_s
        self._logged_at, self._comm_s = step, 0.0
        size = config.batch.size
        rates = {"samples_per_s": size / step_s, "samples_seen": run.after(step).samples}
        if run.source.form == "tokens":
            context = config.model.context
            rates |= {
                "tokens_per_s": size * context / step_s,
                "tokens_seen": context * rates["samples_seen"],
            }
        rates |= self._utilisation(step_s)
        records = mode_of(config).records(config.replication)
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
        if outcome.is_spike:
            skipped["spike"] = True
        if config.precision.compute == "float16":
            rates |= {"loss_scale": outcome.loss_scale}
        run.record(
            {
                "step": step,
                "loss": outcome.loss,
                "lr": outcome.lr,
                "grad_norm": outcome.grad_norm,
                "step_s": step_s,
                "comm_s": comm_s,
                **rates,
                "peak_activation_bytes": run.peak,
                **skipped,
                **(self._slow.record(step) if self._slow else {}),
            }
        )


class Digesting(Hook):
    """Records digests of the state of all ranks, every run.digest_every steps."""

    def __init__(self, run: RunState):
        self._run = run

    def pause(self, step: int, stop: bool) -> bool:
        run, every = self._run, self._run.config.run.digest_every
        if step % every == 0 and (step > run.first or not step):
            run.reach("digests", step)
            with run.recorder.pausing("digests"):
                everyone = run.transport.gather_text(state_digests(run.trainer))
            run.record({"event": "digests", "step": step, **digest_record(everyone)})
        return stop


class Saving(Hook):
    """Saves checkpoints: every checkpoint.every steps, and where the run stops or ends.

    With checkpoint.background, and memory for copies, a thread writes what was copied between two
    steps. A save that is due meanwhile is skipped. The last save of a run makes no copies.
    """

    def __init__(self, run: RunState):
        self._run, self._skipped = run, 0
        self._best = run.best.step if run.config.checkpoint.best else -1
        self._unrecorded: saving.Save | None = None

    def pause(self, step: int, stop: bool) -> bool:
        run, every = self._run, self._run.config.checkpoint.every
        self._record()
        if stop or step == run.steps:
            self.save(step)
        elif every and step and step % every == 0 and run.saved_at != step:
            run.met_at = step
            with run.recorder.pausing("checkpoint"):
                # A checkpoint that stays for ever waits for the one before.
                if not self._stays(step) and not self._is_over():
                    self._skipped += 1
                else:
                    self._wait()
                    self._begin(step, in_background=True)
        return stop

    def save(self, step: int) -> None:
        """Save a checkpoint of this step, unless there is one; return when it is published."""
        run = self._run
        run.met_at = step
        with run.recorder.pausing("checkpoint"):
            self._wait()
            if run.saved_at != step:
                self._begin(step, in_background=False)
                self._wait()

    def keep_best(self, step: int) -> None:
        """Save the step of the best evaluation; the checkpoint that was the best is then removed."""
        run = self._run
        with run.recorder.pausing("checkpoint"):
            if run.saved_at != step:
                self._wait()
            self._best = step
            if run.saved_at != step:
                self._begin(step, in_background=True)
        if not self._unrecorded:
            self._drop_old()

    def close(self) -> None:
        error, save = sys.exc_info()[1], self._run.save
        if save and isinstance(error, MpitrainError) and error.agreed:  # All ranks are here.
            with suppress(MpitrainError):
                save.wait()
        elif save:
            save.give_up()

    def _is_over(self) -> bool:
        """Return whether the save that was on its way is published; collective."""
        save = self._run.save
        return save is None or all(self._run.transport.gather_text(save.is_published))

    def _stays(self, step: int) -> bool:
        """Return whether a checkpoint stays although it is old."""
        every = self._run.config.checkpoint.keep_every
        return step == self._best or bool(every and step % every == 0)

    def _begin(self, step: int, in_background: bool) -> None:
        """Begin a save while none is on its way; collective."""
        run, trainer, config = self._run, self._run.trainer, self._run.config
        run.reach("save", step)
        trainer.sync_parameters()
        scalars = trainer.replication.step_end.skips.scalars()
        base = trainer.begun_from if config.lora.rank else {}
        sizes = trainer.resolved.axes.sizes
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
            run.save = self._unrecorded = save = saving.begin(
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
        run.saved_at = step
        if save.is_copied:
            run.reach("snapshot", step)
            save.start(run.reach)
        else:
            self._wait()

    def _wait(self) -> None:
        """Wait until no save is on its way; collective.

        raises  TrainingError on every rank if one could not be written
        """
        save, self._run.save = self._run.save, None
        if save:
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


class GoingBack(Hook):
    """Takes snapshots, every run.snapshot_every steps and with each checkpoint, and goes back to them."""

    def __init__(self, run: RunState, saving: Saving):
        from mpitrain.run.checkpoint.snapshot import Snapshots

        self._run, self._saving = run, saving
        self._snapshots, self._is_spike = Snapshots(run.trainer), False

    def _take(self, step: int) -> None:
        way_out = "Set run.on_spike to skip, which needs none."
        with copying(f"the snapshot of step {step} for run.on_spike=back", way_out):
            self._snapshots.take(step)

    def reaches(self, point: str, step: int) -> None:
        if point == "save":
            self._take(step)

    def step_ends(self, step: int, outcome: StepResult) -> None:
        self._is_spike = outcome.is_spike

    def pause(self, step: int, stop: bool) -> bool:
        run = self._run
        if not self._is_spike:
            # A save that is skipped while another is on its way leaves a snapshot, too: the times of
            # a disk must not change to which step a run goes back.
            everies = run.config.run.snapshot_every, run.config.checkpoint.every
            if step == run.first or any(every and step % every == 0 for every in everies):
                with run.recorder.pausing("a snapshot"):
                    self._take(step)
            return stop
        self._is_spike, skips = False, run.trainer.replication.step_end.skips
        undone = -skips.number
        with run.recorder.pausing("going back"):
            before = self._snapshots.restore(step)
        undone += skips.number
        run.skipped += undone
        run.record({"event": "back", "step": step, "to": before, "undone": undone})
        if run.saved_at is not None and run.saved_at > before:
            self._saving.save(step)  # A resume must not begin with what was undone.
        return stop


def state_to_save(trainer: Trainer) -> Sequence[StateBuffer]:
    """Return the arrays that checkpoints have: with adapters not the model under them; collective."""
    kept = trainer.replication.kept()
    if not trainer.config.lora.rank:
        return kept
    from mpitrain.run.initial import of_adapters

    return of_adapters(kept)


def room_for_copies(trainer: Trainer) -> saving.HostRoom:
    """Return the memory of this rank's host for copies of a checkpoint, besides snapshots; collective."""
    limit, is_host = trainer.config.memory.limit_gb, trainer.backend.kind != "cuda"
    held = sum(trainer.replication.held_by_kind().values()) + trainer.counted.peak
    held += trainer.snapshot_bytes
    return saving.HostRoom(process.free_memory("cpu"), int(limit * 1e9 * is_host), held)


def snapshot_bytes(trainer: Trainer) -> int:
    """Return the bytes of the snapshots that run.on_spike=back needs on this rank; collective."""
    if trainer.config.run.on_spike != "back":
        return 0
    from mpitrain.run.checkpoint.snapshot import KEPT, arrays_of

    trainer.sync_parameters()
    return KEPT * sum(array.nbytes for array in arrays_of(trainer))


def check_copies(trainer: Trainer, copied: int) -> None:
    """Raise an agreed ConfigError if copies that the configuration asks for do not fit in memory.

    copied  bytes of the copies of run.copies_every on this rank
    """
    run, does_save = trainer.config.run, trainer.config.checkpoint.background is True
    trainer.snapshot_bytes = snapshots = snapshot_bytes(trainer) + copied
    if not does_save and run.on_spike != "back" and not run.copies_every:
        return
    trainer.sync_parameters()
    room = room_for_copies(trainer)
    # The first step touches pages that are only reserved now.
    reserved = snapshots if trainer.backend.kind == "cuda" else room.held
    room = room._replace(free=room.free - reserved)
    kept = state_to_save(trainer) if does_save else []
    _, short = saving.share_out(kept, trainer.storage, trainer.transport, room)
    if short:
        keys = [("checkpoint.background=true", "checkpoint.background to auto")] * does_save
        keys += [("run.on_spike=back", "run.on_spike to skip")] * (run.on_spike == "back")
        keys += [("run.copies_every", "run.copies_every to 0")] * bool(run.copies_every)
        names, ways = (" and ".join(words) for words in zip(*keys, strict=True))
        copied, left = (n + snapshots * short.ranks for n in (short.needed, short.room))
        needed, room_left = gigabytes(copied, max(0, left))
        (missing,) = gigabytes(copied - left)
        raise ConfigError(
            f"With {names} {short.ranks} rank(s) of {short.host} copy {needed} of their state, but "
            f"{room_left} are left for that.",
            f"Set {ways}, or find {missing} more: raise memory.limit_gb, or use more hosts.",
        ).on_every_rank()


class Evaluating(Hook):
    """Evaluates every run.eval_every steps. A resume repeats one that a stop interrupted."""

    def __init__(self, run: RunState, saving: Saving):
        self._run, self._saving = run, saving
        self._evaluated_at = run.first if run.before.is_evaluated else None

    def pause(self, step: int, stop: bool) -> bool:
        """Return True if a rank asks to stop while steps or a due evaluation remain."""
        run, keys = self._run, self._run.config.run
        is_last = step == run.steps
        is_due = is_last and keys.eval_every != -1
        is_due |= step > 0 and step == keys.next_evaluation(step - 1)
        if not is_due or self._evaluated_at == step:
            self._end_if_spent(step)
            return stop and not is_last
        run.met_at = step
        if stop or self._evaluate(step):
            self._end_if_spent(step)
            return stop
        self._saving.save(step)
        return True

    def _end_if_spent(self, step: int) -> None:
        """Make this step the last one if evaluations have not improved for run.patience; collective."""
        run = self._run
        if 0 < run.config.run.patience <= run.best.since and step < run.steps:
            run.steps = step
            self._saving.save(step)

    def _evaluate(self, step: int) -> bool:
        """Evaluate and record the result; return False if a stop request interrupts it."""
        run = self._run

        def stop_requested() -> bool:
            run.reach("evaluation", step)
            return run.asks()

        began = time.perf_counter()
        with run.recorder.pausing("evaluation"):
            result = run.trainer.evaluate(run.source, stop_requested)
        if result is None:
            return False
        loss, accuracy = result
        bits, seconds = bits_per_byte(run.job.data, loss), time.perf_counter() - began
        run.best = run.best.after(loss, step)
        run.record(
            {
                "step": step,
                "val_loss": loss,
                **({"val_bits_per_byte": bits} if bits is not None else {}),
                **({} if math.isnan(accuracy) else {"val_accuracy": accuracy}),
                "eval_s": seconds,
                "best_step": run.best.step,
                **self._samples(),
            }
        )
        if run.config.checkpoint.best and run.best.step == step:
            self._saving.keep_best(step)
        return True

    def _samples(self) -> dict[str, Any]:
        """Continue run.sample_prompt, and return the texts for the record; collective."""
        run = self._run
        if not (prompts := run.config.run.sample_prompt) or not run.config.run.sample:
            return {}
        from mpitrain.run.generate import samples

        with run.recorder.pausing("a sample"):
            texts = samples(run.trainer, run.folder, run.source.inputs, prompts, run.asks)
        return {"samples": [list(pair) for pair in zip(prompts, texts, strict=True)]}


class Tracing(Hook):
    """Writes facts about this rank into its trace, and gathers the peak memory of all ranks.

    If the trace file cannot be written, the rank prints a warning, and the run continues.
    """

    def __init__(self, run: RunState):
        """Open the trace file in the run directory, and write its header; collective."""
        self._run, self._recorder = run, run.recorder
        self._peak, self._released = -1, 0
        self._steps, self._before = 0, process.peak_memory()
        recorder, transport, trainer = run.recorder, run.transport, run.trainer
        if not recorder.is_on:
            return
        rank, grid, replication = transport.rank, trainer.grid, trainer.replication
        self._clocks = Clocks(transport, recorder.clock)
        at = grid.coords._asdict()
        recorder.facts(
            run=run.job.done.run,
            rank=rank,
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
        if counted := trainer.counted.peak:
            # Gradients and optimizer state are zeros whose pages the first step touches.
            state = sum(replication.held_by_kind().values()) - replication.store.parameters.nbytes
            recorder.facts(counted_activation_bytes=counted, counted_growth_bytes=counted + state)
        recorder.facts(clock=self._clocks.measure())
        try:
            recorder.keep(trace_file(run.folder, rank))
        except OSError as error:
            say(f"warning: rank {rank} cannot keep a trace in {run.folder}: {error.strerror}.")

    def step_ends(self, step: int, outcome: StepResult) -> None:
        if not self._recorder.is_on:
            return
        arena = self._run.trainer.arena
        if arena.peak != self._peak:
            self._peak = arena.peak
            self._recorder.facts(peak_activation_bytes=arena.peak)
        if arena.released != self._released:
            self._released = arena.released
            self._recorder.facts(released_bytes=arena.released)
        self._steps += 1
        if self._steps == GROWING:
            self._recorder.facts(grown_bytes=process.peak_memory() - self._before)

    def pause(self, step: int, stop: bool) -> bool:
        run = self._run
        if run.met_at == step:
            with self._recorder.pausing("the clocks"):
                if self._recorder.is_on:
                    # Readers of the trace interpolate the drift linearly between measurements.
                    self._recorder.facts(clock=self._clocks.measure())
                run.peaks = run.transport.gather_text(run.trainer.arena.peak)
        return stop


class Skipping(Hook):
    """Ends a run that skips too many updates."""

    def __init__(self, run: RunState):
        self._run = run
        self._in_a_row = run.before.in_a_row  # steps with a skipped update up to now

    def step_ends(self, step: int, outcome: StepResult) -> None:
        """Raise TrainingError, on every rank if the ranks end a step together."""
        # An overflow does not count: the dynamic loss scale reacts to it.
        is_skipped = not outcome.updated and not outcome.overflows
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        run = self._run
        run.skipped += is_skipped
        if outcome.overflows >= OVERFLOWS:
            raise self._failed(
                step,
                f"The last {outcome.overflows} steps up to step {step} had gradients beyond float16, "
                f"at last with a loss scale of {outcome.loss_scale:g}.",
                "Lower optimizer.lr, or set precision.compute to bfloat16, and start again.",
            )
        is_nonfinite = is_skipped and outcome.counted and not outcome.is_spike
        if is_nonfinite and run.config.run.on_nonfinite == "stop":
            raise self._failed(
                step,
                f"Step {step} has loss {outcome.loss} and {outcome.nonfinite} gradient elements that are "
                f"not finite{self._where(step, outcome)}.",
                "Lower optimizer.lr, or go on past such steps with --set run.on_nonfinite=skip.",
            )
        if self._in_a_row == SKIPS or (step == run.steps and run.skipped > step / 2):
            undone = ", a spike, or were undone" * (run.config.run.on_spike != "ignore")
            raise self._failed(
                step,
                f"A run may not skip {SKIPS} steps in a row or more than half of them, but "
                f"{run.skipped} of {step} had no target that counts, or a loss or gradient that is not finite{undone}, "
                f"among them the last {self._in_a_row} up to step {step}.",
                "Lower optimizer.lr, then go on with --resume from the newest checkpoint, or start again."
                if outcome.counted
                else "Raise batch.size (or data.mask), or see what is ignored: data.separator, prompts longer than a row.",
            )

    def _where(self, step: int, outcome: StepResult) -> str:
        """Return a clause about the first arrays that are not finite in a step; collective.

        Empty if the ranks do not end each step together.
        """
        run = self._run
        if run.config.replication.mode not in TOGETHER or outcome.ended is not None:
            return ""
        from mpitrain.run.locating import located

        trainer, number = run.trainer, step - 1
        batch = trainer.replication.rows.batch(run.source, number, run.after(number).samples)
        return located(trainer, lambda: trainer.step(number, *batch))

    def _failed(self, step: int, law: str, way_out: str) -> TrainingError:
        """Write the last line of metrics, and return the error.

        Where ranks end each step together, all raise it. With an asynchronous server they do not,
        and the first rank that raises it ends the job.
        """
        self._run.record({"event": "failed", "step": step})
        error = TrainingError(law, way_out)
        return error.on_every_rank() if self._run.is_common else error
