"""A table of all update rules: a job at the best of three learning rates, bytes per parameter, and the time of a step.

    python jobs/prove/rules.py [RULE ...] [--set SECTION.KEY=VALUE ...]

The job is the default one, on one rank. The rates are a third of the rule's own default, the default, and three times it;
plain SGD and heavy-ball momentum, whose default is that of adamw, start from CENTRES. Loss is that of the held-out tokens, in
nats. Bytes are parameters, gradients and state. The time is that of the processor, in the fastest step of the best run.
"""

import argparse
import math
from collections.abc import Sequence
from time import process_time
from typing import NamedTuple

from mpitrain.config import with_settings
from mpitrain.optim import RULES
from mpitrain.run.build import build
from mpitrain.run.choices import parse
from mpitrain.run.job import with_hyper_parameters
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

CENTRES = {"sgd": 0.3, "momentum": 0.03}
FACTORS = (1 / 3, 1, 3)


class Found(NamedTuple):
    """One run of a rule."""

    loss: float
    rate: float
    nbytes: float
    step_s: float


def trained(settings: Sequence[str], rate: float) -> Found:
    """Train a job on one rank."""
    config = parse(with_settings({}, [*settings, f"optimizer.lr={rate!r}"]))

    def run(transport: Transport) -> Found:
        job = build(transport, config)
        trainer, mode = job.trainer, job.trainer.replica
        seconds = list[float]()
        for step in range(config.run.steps):
            batch, start = mode.batch(job.data, step), process_time()
            trainer.step(step, *batch)
            seconds.append(process_time() - start)
        trainer.sync_parameters()
        nbytes = sum(mode.held_by_kind().values()) / trainer.parameter_count
        evaluated = trainer.evaluate(job.data)
        assert evaluated
        return Found(evaluated[0], rate, nbytes, min(seconds))

    return run_ranks(1, run)[0]


def best(name: str, settings: Sequence[str]) -> tuple[Found, bool]:
    """Return the run of a rule with the lowest loss, and whether its rate is between the other two."""
    own = [*settings, f"optimizer.name={name}"]
    centre = CENTRES.get(name) or with_hyper_parameters(parse(with_settings({}, own))).optimizer.lr
    runs = [trained(own, float(f"{factor * centre:.2g}")) for factor in FACTORS]
    found = min(runs, key=lambda run: (math.isnan(run.loss), run.loss))
    return found, found is runs[1]


def main() -> None:
    """Print a line for each rule; a rate in brackets is the lowest or the highest of the three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rules", nargs="*")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    given = parser.parse_args()
    print("| rule | loss | learning rate | bytes per parameter | processor time per step, ms |")
    print("| --- | --- | --- | --- | --- |")
    for name in given.rules or RULES:
        found, is_between = best(name, given.settings)
        rate = f"{found.rate:g}" if is_between else f"({found.rate:g})"
        print(
            f"| `{name}` | {found.loss:.3f} | {rate} | {found.nbytes:.2f} | {1e3 * found.step_s:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
