"""The watcher that writes TensorBoard event files: the numbers of metrics.jsonl as scalars."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.config import Config
from mpitrain.errors import TrainingError
from mpitrain.files import append, mend, opened
from mpitrain.run.metrics import read_metrics, series, strict
from mpitrain.run.run_dir import METRICS
from mpitrain.run.watching.event_file import scalars_record, version_record
from mpitrain.run.watching.watcher import Watcher

FOLDER = "tensorboard"
PREFIX, SUFFIX = "events.out.tfevents.", ".mpitrain"
"""The start of a name that TensorBoard reads, and the end of a name that is ours."""


class TensorBoard(Watcher):
    """Writes RUN/tensorboard/events.out.tfevents.SECONDS.mpitrain.

    A start writes the records of metrics.jsonl to a new file, which replaces that of an earlier
    start. So a resumed run has one file, without the steps that the resume repeats. Each later
    record is one write: a killed run leaves at most its last record incomplete. Tags are
    train/NAME and validation/NAME, where NAME is the key in metrics.jsonl without val_.
    """

    __slots__ = ("_descriptor", "_path", "_started")

    def __init__(self) -> None:
        self._descriptor = -1

    def on_begin(self, config: Config, run_dir: Path, record: dict[str, Any]) -> None:
        now = time.time()
        self._started = now - record["wall_s"]
        records = [version_record(self._started)]
        records += [self._record(line) for line in read_metrics(run_dir / METRICS)]
        name = f"{PREFIX}{int(now)}{SUFFIX}"
        self._path = run_dir / FOLDER / name
        try:
            with opened(run_dir) as run, run.make(FOLDER) as folder:
                for old in folder.names():
                    if old.startswith(PREFIX) and old.endswith(SUFFIX):
                        folder.remove(old)
                with folder.whole(name) as file:
                    file.write(b"".join(records))
                self._descriptor = folder.append(name)
        except OSError as error:
            raise self._refused(error) from None

    def on_log(self, record: dict[str, Any]) -> None:
        try:
            append(self._descriptor, self._record(strict(record)))
        except OSError as error:
            raise self._refused(error) from None

    on_evaluation = on_log

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _record(self, record: Mapping[str, Any]) -> bytes:
        """Return the record of the series of a line of metrics; empty if it has none."""
        numbers = series(record)
        seconds = self._started + numbers.pop("wall_s", 0.0)
        group = "validation" if "val_loss" in record else "train"
        tags = {f"{group}/{name.removeprefix('val_')}": value for name, value in numbers.items()}
        return scalars_record(seconds, int(record["step"]), tags) if tags else b""

    def _refused(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self._path} cannot be written: {error.strerror or error}.",
            f"{mend(error)}, or set run.tensorboard to false; then go on with --resume.",
        )
