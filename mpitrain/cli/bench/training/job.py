"""The job of `bench train`: a GPT of which each rank computes a few sequences."""

from collections.abc import Sequence
from typing import Any

from mpitrain.cli.job_options import configured

SHAPE = {
    "model.layers": 4,
    "model.width": 256,
    "model.heads": 4,
    "model.context": 128,
    "optimizer.clip": 0.0,
    "optimizer.lr": 1e-3,
}
SEQUENCES = 16
"""Sequences per rank in a step."""
ALONE = [
    "layout.dp=1",
    "layout.tp=1",
    "layout.pp=1",
    "layout.sequence_parallel=false",
    "replication.mode=all-reduce",
    "replication.shard=all",
    "run.delay=",
    "run.inject=",
]
"""Settings that turn the job into a job of one rank."""


def configured_on(
    size: int, blocks: int, steps: int, settings: list[str], preset_name: str | None = None
) -> Any:
    """Return the configuration to measure on `size` ranks."""
    from mpitrain.config import preset
    from mpitrain.tools.bench.training.steps import WARM_UP

    batch = preset(preset_name).get("batch", {"size": SEQUENCES, "micro_batches": 1})
    rows = batch["size"] // max(1, batch["micro_batches"])
    shape = {
        "batch.size": rows * size,
        "batch.micro_batches": 0,
        "run.steps": WARM_UP + blocks * steps,
    }
    ours = [f"{key}={value}" for key, value in shape.items()]
    job = [] if preset_name else settings_of(settings)
    return configured(None, [*job, *ours, *settings], preset_name)


def settings_of(settings: Sequence[str] = ()) -> list[str]:
    """Return the settings of SHAPE; a folder in run.init_from determines the model itself."""
    is_given = any(setting.replace(" ", "").startswith("run.init_from=") for setting in settings)
    return [
        f"{key}={value}"
        for key, value in SHAPE.items()
        if not (is_given and key.startswith("model."))
    ]
