"""The earlier part of a resumed run, read from its metrics."""

import math
from pathlib import Path
from typing import NamedTuple

from mpitrain.run.metrics import read_metrics
from mpitrain.run.run_dir import METRICS


class ResumeInfo(NamedTuple):
    """The facts about the earlier part of a run that a resumed run continues from.

    wall_s        wall-clock time of the earlier part, in seconds
    is_evaluated  whether the step of the checkpoint was evaluated
    skipped       number of steps with a skipped update
    in_a_row      number of consecutive such steps that end at the checkpoint
    checkpoint_s  longest time to publish a checkpoint, in seconds; 0 if there was none
    """

    wall_s: float = 0.0
    is_evaluated: bool = False
    skipped: int = 0
    in_a_row: int = 0
    checkpoint_s: float = 0.0


def past(folder: Path, step: int) -> ResumeInfo:
    """Return the facts about the run in this directory, which resumes after `step`."""
    records = read_metrics(folder / METRICS)

    def longest(key: str) -> float:
        values = (record.get(key) for record in records)
        return max((s for s in values if isinstance(s, float) and math.isfinite(s)), default=0.0)

    skipped = {record.get("step") for record in records if record.get("skipped") is True}
    in_a_row = next(count for count in range(len(skipped) + 1) if step - count not in skipped)
    is_evaluated = any("val_loss" in record and record.get("step") == step for record in records)
    return ResumeInfo(
        longest("wall_s"), is_evaluated, len(skipped), in_a_row, longest("checkpoint_s")
    )
