"""One run from start to end: its loop, its checkpoints, its metrics."""

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpitrain import __version__, checkpoint
from mpitrain.build import Job, build
from mpitrain.config import Config, parse, read_toml, with_settings
from mpitrain.data import Unopened
from mpitrain.errors import CheckpointError, ConfigError, TrainingError
from mpitrain.metrics import MetricsFile, Watchdog
from mpitrain.parallel.replicate import Outcome
from mpitrain.rundir import CHECKPOINTS, CONFIG, METRICS, Place, claim, find
from mpitrain.trainer import replicas_equal
from mpitrain.transport.agree import agreed
from mpitrain.transport.base import Transport


class Watcher(Protocol):
    """Is told what happens, on rank 0; the command line draws a progress bar from it."""

    def began(self, config: Config, folder: Path, record: dict[str, Any]) -> None:
        """The run starts, or goes on after record["step"] steps."""

    def stepped(self, step: int, loss: float) -> None:
        """A step is done."""

    def recorded(self, record: dict[str, Any]) -> None:
        """A line was written to metrics.jsonl."""


class Finished(NamedTuple):
    """How a run ended: whether it was stopped on request, and the job as it stands."""

    stopped: bool
    job: Job


def train(transport: Transport, config: Config, resume: str, stop_requested: Callable[[], bool], watcher: Watcher,
          begins: Callable[[], None] = lambda: None, watchdog: Watchdog | None = None) -> Finished:
    """Train as configured, in its run directory; collective.

    resume          see `rundir.find`
    stop_requested  asked once per step; a True on any rank ends the run after a checkpoint
    begins          called on every rank before any of them has something to save: a stop must be asked for from then on
    watchdog        one that has watched what came before; closed at the end
    raises          MpitrainError with `agreed` set where all ranks stop together
    """
    with closing(watchdog or Watchdog(transport.rank, config.run.stall_seconds)) as watchdog:
        return _train(transport, config, resume, stop_requested, watcher, begins, watchdog)


def _train(transport: Transport, config: Config, resume: str, stop_requested: Callable[[], bool], watcher: Watcher,
           begins: Callable[[], None], watchdog: Watchdog) -> Finished:
    watchdog.alive("looking for the run directory")
    place = find(transport, config, resume)
    watchdog.alive("building the model")
    job = build(transport, config, place.saved)
    watchdog.alive("claiming the run directory")
    begins()
    agreed(transport, lambda: _check_steps(job.step, config))
    claimed = agreed(transport, lambda: claim(place, job) if transport.rank == 0 else None)
    folder = Path(transport.gather_text(str(claimed[0]) if claimed else None)[0])
    run = _Run(job, place, folder, watchdog, watcher)
    try:
        return Finished(run.loop(stop_requested), job)
    finally:
        run.close()
        if claimed:
            os.close(claimed[1])


def _check_steps(done: int, config: Config) -> None:
    if done > config.run.steps:
        raise CheckpointError(f"The checkpoint is at step {done}, past run.steps {config.run.steps}.",
                              f"Set run.steps to at least {done}.")


class _Run:
    """The loop, and what it writes. Rank 0 alone has a metrics file and tells the watcher."""

    def __init__(self, job: Job, place: Place, folder: Path, watchdog: Watchdog, watcher: Watcher):
        self._trainer, self._source, self._first = job
        self._config, transport = self._trainer.config, self._trainer.transport
        self._folder, self._watchdog, self._watcher = folder, watchdog, watcher
        self._is_root = transport.rank == 0
        self._saved_at: int | None = self._first if place.saved else None
        self._metrics = MetricsFile(folder / METRICS) if self._is_root else None
        record = {
            "event": "resume" if place.saved else "start", "step": self._first, "version": __version__,
            "ranks": transport.size, "hosts": len(set(transport.hosts)),
            "parameters": self._trainer.plan.parameter_count, "held_out": self._source.held_out,
            **({"changed": place.changed} if place.changed else {}),
        }
        if self._is_root:
            watcher.began(self._config, folder, record)
        self._record(record)

    def close(self) -> None:
        self._watchdog.close()
        if self._metrics:
            self._metrics.close()

    def loop(self, stop_requested: Callable[[], bool]) -> bool:
        """The steps that are left; returns whether the run was stopped on request."""
        run, checkpoints = self._config.run, self._config.checkpoint.every
        since, logged_at = time.perf_counter(), self._first
        for index in range(self._first, run.steps):
            step = index + 1
            self._watchdog.alive(f"step {step}")
            rows = self._trainer.share()
            inputs, targets = self._source.batch(run.seed, index, self._config.batch.size, rows)
            outcome = self._trainer.step(index, inputs, targets, stop_requested())
            if self._is_root:
                self._watcher.stepped(step, outcome.loss)
            if step == 1 or step % run.log_every == 0 or step == run.steps or outcome.stop or not outcome.updated:
                now = time.perf_counter()
                self._log_step(step, outcome, (now - since) / (step - logged_at), targets[0].size)
                since, logged_at = now, step
            if not outcome.updated and run.on_nonfinite == "stop":
                raise self._nonfinite(step, outcome)
            if step == run.steps:
                break
            if outcome.stop or (checkpoints and step % checkpoints == 0):
                self._save(step)
            if run.eval_every > 0 and step % run.eval_every == 0:
                self._evaluate(step)
                since, logged_at = time.perf_counter(), step
            if outcome.stop:
                self._record({"event": "stopped", "step": step})
                return True
        self._save(run.steps)
        if run.eval_every >= 0:
            self._evaluate(run.steps)
        self._end()
        return False

    def _end(self) -> None:
        equal = replicas_equal(self._trainer)
        self._record({"event": "end", "step": self._config.run.steps, "replicas_equal": equal,
                      "peak_activation_bytes": self._trainer.arena.peak})
        if not equal:
            error = TrainingError("After the last step the parameters differ between replicas.",
                                  "This is a fault of mpitrain or of the machine's memory; please report it.")
            error.agreed = True
            raise error

    def _log_step(self, step: int, outcome: Outcome, step_s: float, predictions: int) -> None:
        size = self._config.batch.size
        rates = {"samples_per_s": size / step_s}
        if self._source.model == "gpt":
            rates["tokens_per_s"] = size * predictions / step_s
        skipped = {} if outcome.updated else {"skipped": True, "nonfinite_elements": outcome.nonfinite}
        self._record({"step": step, "loss": outcome.loss, "lr": outcome.lr, "grad_norm": outcome.grad_norm, "step_s": step_s,
                      **rates, "peak_activation_bytes": self._trainer.arena.peak, **skipped})

    def _evaluate(self, step: int) -> None:
        loss, accuracy = self._trainer.evaluate(
            self._source, lambda: self._watchdog.alive(f"the evaluation after step {step}"))
        self._record({"step": step, "val_loss": loss, "val_accuracy": accuracy})

    def _save(self, step: int) -> None:
        if self._saved_at == step:
            return
        self._watchdog.alive(f"the checkpoint of step {step}")
        checkpoint.save(self._folder / CHECKPOINTS, self._trainer, step, self._config.checkpoint.keep)
        self._saved_at = step

    def _record(self, record: dict[str, Any]) -> None:
        if not self._metrics:
            return
        try:
            self._metrics.write(record)
        except OSError as error:
            raise TrainingError(f"{self._folder / METRICS} cannot be written: {error}.",
                                "Make room, then go on with --resume.") from None
        self._watcher.recorded(record)

    def _nonfinite(self, step: int, outcome: Outcome) -> TrainingError:
        self._record({"event": "failed", "step": step})
        error = TrainingError(
            f"Step {step} has loss {outcome.loss} and {outcome.nonfinite} gradient elements that are not finite.",
            "Lower optimizer.lr, or go on past such steps with --set run.on_nonfinite=skip.",
        )
        error.agreed = True
        return error


def configured(folder: Path, settings: list[str], ranks: int = 1) -> Config:
    """The configuration of a run directory, to be opened by so many ranks, with `section.key=value` put in."""
    if not (folder / CONFIG).exists():
        raise ConfigError(f"There is no run in {folder}: it has no {CONFIG}.", "Name the directory of a run.")
    then = parse(read_toml(folder / CONFIG))
    anew = ["layout.dp=0", "batch.micro_batches=1", f"batch.size={max(then.batch.size, ranks)}"]
    return parse(with_settings(then.model_dump(), [*anew, *settings]))


def open_run(transport: Transport, folder: Path, settings: list[str], needs_data: bool = True) -> Job:
    """The job of a run directory as its newest checkpoint left it, on however many ranks; collective.

    settings    section.key=value, over the configuration of the run
    needs_data  False: a token model is built without its data source
    """
    config = agreed(transport, lambda: configured(folder, settings, transport.size))
    saved = agreed(transport, lambda: checkpoint.newest(folder / CHECKPOINTS))
    vocabulary = config.data.vocabulary or 256
    is_enough = not needs_data and config.model.kind == "gpt"
    return build(transport, config, saved, Unopened("gpt", vocabulary, vocabulary) if is_enough else None)
