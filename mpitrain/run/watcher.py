"""The base class of observers of a run, as callbacks of HuggingFace and Lightning."""

from __future__ import annotations  # help() prints signatures as they are written here.

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.config import Config
from mpitrain.config.plugins import module_of
from mpitrain.errors import ConfigError
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


WATCHERS: Table[str, type[Watcher]] = Table()
"""Classes of watchers by name: a plugin adds rows, and run.watchers names them."""


def watchers_of(entries: Sequence[str]) -> list[Watcher]:
    """Make the watchers of run.watchers; ConfigError if an entry is none."""
    return [_made(entry) for entry in entries]


def _made(entry: str) -> Watcher:
    file, _, name = entry.rpartition(":")
    kind = getattr(module_of(file), name, None) if file else WATCHERS.get(entry)
    if isinstance(kind, type) and issubclass(kind, Watcher):
        return kind()
    rows = f", or {' or '.join(WATCHERS)}" if WATCHERS else ""
    raise ConfigError(
        f"run.watchers must name a class that is derived from mpitrain.Watcher, but {entry} is none.",
        f"Name FILE.py:CLASS{rows}.",
    )
