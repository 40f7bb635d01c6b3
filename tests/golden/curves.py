"""Small runs whose losses are written down, so that a change that should not touch results is seen not to.

python -m tests.golden.curves            write losses.json anew, where results are meant to change
python -m tests.golden.curves wgmma      by how much losses in 16 bits differ by Hopper's warpgroups from those written down
"""

import json
import sys
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
HALVES = ("bfloat16", "float16")
CASES |= {half: (1, [*CASES["cuda-sim"][1], f"precision.compute={half}"]) for half in HALVES}
"""Device kind, or what kernels of 16 bits compute with: number of ranks, settings."""
WARPGROUPS = "device.tensor_cores=wgmma"


def losses(kind: str, *more: str, steps: int = STEPS) -> list[float]:
    """The losses of the run of a device kind, step by step.    more: settings"""
    ranks, settings = CASES[kind]
    return run_ranks(ranks, _losses, parse(with_settings({}, [*settings, *more])), steps)[0]


def _losses(transport, config, steps):
    trainer, source, _ = build(transport, config)
    return [
        trainer.step(
            index, *source.batch(config.run.seed, index, config.batch.size, trainer.share())
        ).loss
        for index in range(steps)
    ]


def by_warpgroups() -> None:
    """Print a line for each type of 16 bits."""
    written = json.loads(LOSSES.read_text())
    for half in HALVES:
        apart = [
            abs(a / b - 1) for a, b in zip(losses(half, WARPGROUPS), written[half], strict=True)
        ]
        print(f"{half}: first loss {apart[0]:.0e} apart, {STEPS} losses at most {max(apart):.0e}")


if __name__ == "__main__" and sys.argv[1:] == ["wgmma"]:
    by_warpgroups()
elif __name__ == "__main__":
    LOSSES.write_text(json.dumps({kind: losses(kind) for kind in CASES}, indent=1) + "\n")
