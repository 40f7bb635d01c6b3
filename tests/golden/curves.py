"""Small runs whose losses are written down, so that a change that should not touch results is seen not to.

python -m tests.golden.curves      write losses.json anew, where results are meant to change
"""

import json
from pathlib import Path

from mpitrain.config import parse, with_settings
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks

LOSSES = Path(__file__).with_name("losses.json")
STEPS = 20
TEXT = Path(__file__).parents[2] / "LICENSE"  # pydocs differs from one Python to the next
GPT = [
    f"data.source=text:{TEXT}",
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.context=32",
    "batch.size=4",
    f"run.steps={STEPS}",
    "run.seed=1",
    "optimizer.weight_decay=0.1",
    "optimizer.clip=1.0",
    "optimizer.warmup=3",
    "replication.algorithm=ring",
]
CASES = {
    "cpu": (
        2,
        [
            *GPT,
            "device.kind=cpu",
            "precision.compute=float64",
            "optimizer.name=adamw",
            "optimizer.lr=0.01",
        ],
    ),
    "cuda-sim": (
        1,
        [
            *GPT,
            "device.kind=cuda-sim",
            "optimizer.name=momentum",
            "optimizer.lr=0.1",
            "model.layers=1",
        ],
    ),
}
"""Device kind: number of ranks, settings."""


def losses(kind: str, *more: str) -> list[float]:
    """The losses of the run of a device kind, step by step.    more: settings"""
    ranks, settings = CASES[kind]
    return run_ranks(ranks, _losses, parse(with_settings({}, [*settings, *more])))[0]


def _losses(transport, config):
    trainer, source, _ = build(transport, config)
    return [
        trainer.step(
            index, *source.batch(config.run.seed, index, config.batch.size, trainer.share())
        ).loss
        for index in range(STEPS)
    ]


if __name__ == "__main__":
    LOSSES.write_text(json.dumps({kind: losses(kind) for kind in CASES}, indent=1) + "\n")
