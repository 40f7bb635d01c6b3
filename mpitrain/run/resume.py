"""What a run that is resumed has behind it, by its metrics."""

import math
from pathlib import Path
from typing import NamedTuple

from mpitrain.run.metrics import read_metrics
from mpitrain.run.run_dir import METRICS


class ResumeInfo(NamedTuple):
    """What the metrics of a run say of its time before.

    wall_s        seconds it took
    is_evaluated  whether its checkpoint was
    skipped       steps whose update was skipped
    in_a_row      such steps up to its checkpoint without another between
    """

    wall_s: float = 0.0
    is_evaluated: bool = False
    skipped: int = 0
    in_a_row: int = 0


def past(folder: Path, step: int) -> ResumeInfo:
    """Of the run in this directory, which goes on after `step`."""
    records = read_metrics(folder / METRICS)
    walls = [
        wall
        for record in records
        if isinstance(wall := record.get("wall_s"), float) and math.isfinite(wall)
    ]
    skipped = {record.get("step") for record in records if record.get("skipped") is True}
    in_a_row = next(count for count in range(len(skipped) + 1) if step - count not in skipped)
    is_evaluated = any("val_loss" in record and record.get("step") == step for record in records)
    return ResumeInfo(max(walls, default=0.0), is_evaluated, len(skipped), in_a_row)
