"""Losses of rules with a momentum under lossy wires, with the usual decay of the momentum and with a faster one.

    python jobs/prove/lossy.py [SECTION.KEY=VALUE ...]

A small GPT on two ranks, which are threads. Each line is a rule, its rate and its other numbers; the losses are of held-out
tokens, in nats, without a wire format, with topk and with powersgd.
"""

import sys
from collections.abc import Sequence

from mpitrain.config import with_settings
from mpitrain.run.build import build
from mpitrain.run.choices import parse
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

SMALL = (
    "model.layers=2",
    "model.width=64",
    "model.heads=2",
    "model.context=64",
    "batch.size=16",
    "run.steps=150",
    "run.eval_rows=300",
    "optimizer.warmup=10",
)
RUNS = (
    ("momentum", 0.03, ()),
    ("momentum", 0.1, ()),
    ("momentum", 0.1, ("optimizer.momentum=0.45",)),
    ("nesterov", 0.03, ()),
    ("nesterov", 0.1, ()),
    ("nesterov", 0.1, ("optimizer.momentum=0.45",)),
    ("lion", 1.5e-3, ()),
    ("lion", 1.5e-3, ("optimizer.beta1=0.5",)),
    ("adamw", 2e-3, ("optimizer.beta1_delayed=0.8",)),
    ("adamw", 2e-3, ()),
)
WIRES = ("none", "topk", "powersgd")


def loss(settings: Sequence[str]) -> float:
    """Train on two ranks, and return the held-out loss."""
    config = parse(with_settings({}, [*settings]))

    def run(transport: Transport) -> float:
        job = build(transport, config)
        for step in range(config.run.steps):
            job.trainer.step(step, *job.trainer.replica.batch(job.data, step))
        found = job.trainer.evaluate(job.data)
        assert found
        return found[0]

    return run_ranks(2, run)[0]


def main() -> None:
    """Print a table."""
    print(f"| rule | learning rate | | {' | '.join(WIRES)} |")
    print(f"| --- | --- | --- |{' --- |' * len(WIRES)}")
    for name, rate, more in RUNS:
        own = (f"optimizer.name={name}", f"optimizer.lr={rate}", *more)
        found = [loss([*SMALL, *own, f"replication.wire={wire}", *sys.argv[1:]]) for wire in WIRES]
        shown = ", ".join(one.removeprefix("optimizer.") for one in more)
        print(
            f"| `{name}` | {rate:g} | {shown} | {' | '.join(f'{one:.3f}' for one in found)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
