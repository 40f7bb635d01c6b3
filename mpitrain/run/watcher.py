"""The base class of observers of a run, as callbacks of HuggingFace and Lightning."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mpitrain.config import Config
from mpitrain.config.plugins import module_of
from mpitrain.errors import ConfigError
from mpitrain.machine.process import environment
from mpitrain.parallel.replica import StepResult
from mpitrain.tables import Table


class Watcher:
    """An observer of a run on rank 0 (a callback of HuggingFace). By default it does nothing.

    A `record` is a line of metrics.jsonl. An exception in a method ends the run.
    """

    __slots__ = ()

    def on_agreed(self, config: Config, hosts: Sequence[str]) -> None:
        """Handle the configuration, once all ranks agree; `hosts` by rank."""

    def on_begin(self, config: Config, run_dir: Path, record: dict[str, Any]) -> None:
        """Handle the start, or the resume after record["step"] steps."""

    def on_step(self, step: int, result: StepResult) -> None:
        """Handle the end of a step, which is not logged yet."""

    def on_log(self, record: dict[str, Any]) -> None:
        """Handle the record of logged steps."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Handle the record of an evaluation."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Handle a complete checkpoint."""

    def on_end(self, record: dict[str, Any]) -> None:
        """Handle the end, a stop, or a failure that all ranks agree on."""

    def close(self) -> None:
        """Release files; called once a start, after an error too."""


class Losses(Watcher):
    """Prints the loss of each log and each evaluation, in a line of its own."""

    def on_log(self, record: dict[str, Any]) -> None:
        print(f"step {record['step']}: loss {record['loss']:.4f}", flush=True)

    def on_evaluation(self, record: dict[str, Any]) -> None:
        print(f"step {record['step']}: validation loss {record['val_loss']:.4f}", flush=True)


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(
            f"run.watchers {name} needs the package {name}, which is not installed here.",
            f"pip install 'mpitrain[{name}]', or leave it out.",
        ) from None


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record, under names such as train/loss and validation/loss."""
    kind = "validation" if "val_loss" in record else "train"
    return {
        f"{kind}/{key.removeprefix('val_')}": value
        for key, value in record.items()
        if type(value) in (int, float) and math.isfinite(value) and key != "step"
    }


class Wandb(Watcher):
    """Sends the numbers of logs and evaluations to Weights & Biases, as a run of the project mpitrain.

    Its own variables choose where: WANDB_PROJECT, WANDB_MODE=offline.
    """

    __slots__ = ("_run", "_wandb")

    def __init__(self) -> None:
        self._wandb = _imported("wandb")
        self._run: Any = None

    def on_begin(self, config: Config, run_dir: Path, record: dict[str, Any]) -> None:
        project = None if "WANDB_PROJECT" in environment() else "mpitrain"
        self._run = self._wandb.init(project=project, name=run_dir.name, config=config.flat())

    def on_log(self, record: dict[str, Any]) -> None:
        self._run.log(_numbers(record), step=record["step"])

    on_evaluation = on_log

    def on_end(self, record: dict[str, Any]) -> None:
        self._run.finish(exit_code=int(record["event"] != "end"))
        self._run = None

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None


class Mlflow(Watcher):
    """Sends the numbers of logs and evaluations, and samples, to MLflow, as a run of the experiment mpitrain.

    Its own variables choose where: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
    """

    __slots__ = ("_is_open", "_mlflow")

    def __init__(self) -> None:
        self._mlflow, self._is_open = _imported("mlflow"), False

    def on_begin(self, config: Config, run_dir: Path, record: dict[str, Any]) -> None:
        if "MLFLOW_EXPERIMENT_NAME" not in environment():
            self._mlflow.set_experiment("mpitrain")
        self._mlflow.start_run(run_name=run_dir.name)
        self._is_open = True
        self._mlflow.log_params(config.flat())

    def on_log(self, record: dict[str, Any]) -> None:
        self._mlflow.log_metrics(_numbers(record), step=record["step"])

    def on_evaluation(self, record: dict[str, Any]) -> None:
        self.on_log(record)
        if samples := record.get("samples"):
            text = "\n".join(f"{prompt}\n{answer}\n" for prompt, answer in samples)
            self._mlflow.log_text(text, f"samples/{record['step']}.txt")

    def on_end(self, record: dict[str, Any]) -> None:
        self._end({"end": "FINISHED", "stopped": "KILLED"}.get(record["event"], "FAILED"))

    def close(self) -> None:
        self._end("FAILED")

    def _end(self, status: str) -> None:
        if self._is_open:
            self._mlflow.end_run(status)
        self._is_open = False


WATCHERS: Table[str, type[Watcher]] = Table({"wandb": Wandb, "mlflow": Mlflow})
"""Classes of watchers by name: a plugin adds rows, and run.watchers names them."""


def watchers_of(entries: Sequence[str]) -> list[Watcher]:
    """Make the watchers of run.watchers; ConfigError if an entry is none."""
    return [_made(entry) for entry in entries]


def _made(entry: str) -> Watcher:
    file, _, name = entry.rpartition(":")
    kind = getattr(module_of(file), name, None) if file else WATCHERS.get(entry)
    if isinstance(kind, type) and issubclass(kind, Watcher):
        return kind()
    rows = f", or {' or '.join(WATCHERS)}"
    raise ConfigError(
        f"run.watchers must name a class that is derived from mpitrain.Watcher, but {entry} is none.",
        f"Name FILE.py:CLASS{rows}.",
    )
