"""Whole runs of a small job on ranks that are threads, and what they write."""

import json
from functools import partial

from mpitrain.config import parse, with_settings
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks

TEXT = [f"word {n % 7} " for n in range(240)]
TINY = [
    "model.layers=1",
    "model.width=8",
    "model.heads=1",
    "model.context=8",
    "batch.size=6",
    "run.steps=6",
    "run.log_every=1",
    "run.eval_rows=20",
    "checkpoint.every=0",
    "device.kind=cpu",
]


def never(rank):
    return False


def go(ranks, settings, resume="no", stop=never, watchers=()):
    """Train on so many threads; whether the run was stopped."""
    config = parse(with_settings({}, settings))
    return run_ranks(
        ranks,
        lambda own: train(own, lambda: config, resume, partial(stop, own.rank), watchers).stopped,
    )[0]


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


def validated(tmp_path):
    """Steps with a validation record, in the order of the file."""
    return [record["step"] for record in records(tmp_path) if "val_loss" in record]
