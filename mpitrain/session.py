"""One run from start to end: its directory, its loop, its checkpoints, its metrics."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tomli_w

from mpitrain import __version__, checkpoint
from mpitrain.build import Job, build
from mpitrain.collectives.tuning import write_tuning
from mpitrain.config import FILE, Config, parse, read_toml, with_settings
from mpitrain.errors import CheckpointError, ConfigError, MpitrainError, TrainingError
from mpitrain.metrics import MetricsFile, Watchdog, cut_after, write_whole
from mpitrain.optim import learning_rate
from mpitrain.topology import topology
from mpitrain.trainer import replicas_equal
from mpitrain.transport.agree import agreed
from mpitrain.transport.base import Transport

METRICS, TUNING, CHECKPOINTS = "metrics.jsonl", "tuning.json", "checkpoints"


class Watcher(Protocol):
    """Is told what happens, on rank 0; the command line draws a progress bar from it."""

    def began(self, config: Config, folder: Path, record: dict[str, Any], first_step: int) -> None:
        """The run starts (or goes on) after `first_step` steps."""

    def stepped(self, step: int, loss: float) -> None:
        """A step is done."""

    def recorded(self, record: dict[str, Any]) -> None:
        """A line was written to metrics.jsonl."""


class Finished(NamedTuple):
    """How a run ended: its directory, whether it was stopped on request, and the job as it stands."""

    folder: Path
    stopped: bool
    job: Job


def prepare_folder(transport: Transport, config: Config, resume: str) -> tuple[Path, bool]:
    """The run directory, the same on all ranks, and whether it holds a run to go on with; collective.

    resume  "no": a directory that holds a run is refused; "yes": one that holds none is; "auto": either will do
    """
    def choose() -> list[Any] | None:
        if transport.rank != 0:
            return None
        if resume != "no" and not config.run.out:
            raise ConfigError("--resume needs the directory of the run.", "Add --out DIR, for example --out runs/mine.")
        folder = Path(config.run.out) if config.run.out else _fresh_name(Path("runs"))
        has_run = (folder / FILE).exists()
        if resume == "no" and has_run:
            raise ConfigError(f"{folder} already holds a run.", "Add --resume to go on with it, or choose another --out.")
        if resume == "yes" and not has_run:
            raise ConfigError(f"There is no run in {folder} to resume.", "Name its directory with --out, or leave out --resume.")
        try:
            (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"The run directory {folder} cannot be made: {error.strerror}.", "Choose another --out.") from None
        return [str(folder), has_run]

    folder, has_run = transport.gather_text(agreed(transport, choose))[0]
    return Path(folder), has_run and (resume == "yes" or bool(checkpoint.steps(Path(folder) / CHECKPOINTS)))


def _fresh_name(parent: Path) -> Path:
    date = time.strftime("%Y-%m-%d")
    return next(folder for n in range(1, 1 << 30) if not (folder := parent / f"{date}-{n}").exists())


def train(transport: Transport, config: Config, resume: str, stop_requested: Callable[[], bool], watcher: Watcher) -> Finished:
    """Train as configured, in its run directory; collective.

    resume          see `prepare_folder`
    stop_requested  asked once per step; a True on any rank ends the run after a checkpoint
    raises          MpitrainError with `agreed` set where all ranks stop together
    """
    folder, goes_on = prepare_folder(transport, config, resume)
    saved = agreed(transport, lambda: checkpoint.newest(folder / CHECKPOINTS)) if goes_on else None
    job = build(transport, config, saved)
    agreed(transport, lambda: _check_steps(job.step, config))
    run = _Run(job, folder, watcher)
    try:
        stopped = run.loop(stop_requested)
    finally:
        run.close()
    return Finished(folder, stopped, job)


def _check_steps(done: int, config: Config) -> None:
    if done > config.run.steps:
        raise CheckpointError(f"The checkpoint is at step {done}, past run.steps {config.run.steps}.",
                              f"Set run.steps to at least {done}.")


def _resolved(config: Config, folder: Path, ranks: int) -> dict[str, Any]:
    """The configuration as tables, with what was left to be chosen filled in and the run's own copy of the tuning."""
    tables = config.model_dump()
    if config.replication.tuning:
        tables["replication"]["tuning"] = str(folder / TUNING)
    tables["run"]["out"], tables["layout"]["dp"] = str(folder), topology(config, ranks).dp
    return tables


class _Run:
    """The loop, and what it writes. Rank 0 alone has a metrics file and tells the watcher."""

    def __init__(self, job: Job, folder: Path, watcher: Watcher):
        trainer, source, first = job
        self._trainer, self._source, self._first, self._folder, self._watcher = trainer, source, first, folder, watcher
        self._config, self._is_root = trainer.config, trainer.transport.rank == 0
        self._watchdog = Watchdog(trainer.transport.rank, self._config.run.stall_seconds)
        self._saved_at: int | None = first or None
        self._metrics: MetricsFile | None = None
        if self._is_root:
            write_whole(folder / FILE, tomli_w.dumps(_resolved(self._config, folder, trainer.transport.size)))
            if self._config.replication.tuning:
                write_tuning(folder / TUNING, trainer.group.tuning)
            cut_after(folder / METRICS, first)
            self._metrics = MetricsFile(folder / METRICS)
            record = {
                "event": "resume" if first else "start", "step": first, "version": __version__,
                "ranks": trainer.transport.size, "hosts": len(set(trainer.transport.hosts)),
                "parameters": trainer.plan.parameter_count, "held_out": source.held_out,
            }
            self._metrics.write(record)
            watcher.began(self._config, folder, record, first)

    def close(self) -> None:
        self._watchdog.close()
        if self._metrics:
            self._metrics.close()

    def loop(self, stop_requested: Callable[[], bool]) -> bool:
        """The steps that are left; returns whether the run was stopped on request."""
        first, run, every = self._first, self._config.run, self._config.checkpoint.every
        since, logged_at = time.perf_counter(), first
        for index in range(first, run.steps):
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
            if outcome.stop and step < run.steps:
                self._save(step)
                self._record({"event": "stopped", "step": step})
                return True
            if run.eval_every > 0 and step % run.eval_every == 0 and step < run.steps:
                self._evaluate(step)
                since, logged_at = time.perf_counter(), step
            if every and step % every == 0:
                self._save(step)
        if run.eval_every >= 0:
            self._evaluate(run.steps)
        self._save(run.steps)
        equal = replicas_equal(self._trainer)
        self._record({"event": "end", "step": run.steps, "replicas_equal": equal,
                      "peak_activation_bytes": self._trainer.arena.peak})
        if not equal:
            error = TrainingError("After the last step the parameters differ between replicas.",
                                  "This is a fault of mpitrain or of the machine's memory; please report it.")
            error.agreed = True
            raise error
        return False

    def _log_step(self, step: int, outcome: Any, step_s: float, predictions: int) -> None:
        size = self._config.batch.size
        rates = {"samples_per_s": size / step_s}
        if self._source.model == "gpt":
            rates["tokens_per_s"] = size * predictions / step_s
        skipped = {} if outcome.updated else {"skipped": True, "nonfinite_elements": outcome.nonfinite}
        lr = learning_rate(self._config.optimizer, step - 1, self._config.run.steps)
        self._record({"step": step, "loss": outcome.loss, "lr": lr, "grad_norm": outcome.grad_norm, "step_s": step_s,
                      **rates, "peak_activation_bytes": self._trainer.arena.peak, **skipped})

    def _evaluate(self, step: int) -> None:
        self._watchdog.alive(f"the evaluation after step {step}")
        loss, accuracy = self._trainer.evaluate(self._source)
        self._record({"step": step, "val_loss": loss, "val_accuracy": accuracy})

    def _save(self, step: int) -> None:
        if self._saved_at == step:
            return
        self._watchdog.alive(f"the checkpoint of step {step}")
        checkpoint.save(self._folder / CHECKPOINTS, self._trainer, step, self._config.checkpoint.keep)
        self._saved_at = step

    def _record(self, record: dict[str, Any]) -> None:
        if self._metrics:
            self._metrics.write(record)
            self._watcher.recorded(record)

    def _nonfinite(self, step: int, outcome: Any) -> MpitrainError:
        self._record({"event": "failed", "step": step})
        error = TrainingError(
            f"Step {step} has loss {outcome.loss} and {outcome.nonfinite} gradient elements that are not finite.",
            "Lower optimizer.lr, or go on past such steps with --set run.on_nonfinite=skip.",
        )
        error.agreed = True
        return error


def configured(folder: Path, settings: list[str]) -> Config:
    """The configuration of a run directory, to be opened on however many ranks, with `section.key=value` put in."""
    return parse(with_settings({**read_toml(folder / FILE), "layout": {}}, settings))


def open_run(transport: Transport, folder: Path, settings: list[str]) -> Job:
    """The job of a run directory, as its newest checkpoint left it; collective. `settings`: see `configured`."""
    config = agreed(transport, lambda: configured(folder, settings))
    return build(transport, config, agreed(transport, lambda: checkpoint.newest(folder / CHECKPOINTS)))
