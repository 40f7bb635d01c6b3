"""Stages of unequal speed: the last one sleeps twice as long for a layer. Steps by a partition by time and by parameters.

Exit code 1 unless the partition by time gives the others twice as many units, and its steps take at most 0.85 times as long.
"""

import sys
import time
from statistics import median

import numpy as np
from sleeping import configured, sleepers, started

from mpitrain.machine.arena import Arena
from mpitrain.ops.device import backend_for
from mpitrain.pipeline.partition import by_time, unit_seconds
from mpitrain.run.trainer import Trainer
from mpitrain.transport.base import Transport

LAYER_S, ROWS, WIDTH, STEPS = 0.004, 8, 256, 5
MOST = 0.85


def main(transport: Transport, stages: str) -> bool:
    """Whether the partition by time is as it must be."""
    p = transport.size
    units = 2 * (2 * p - 1)  # twice as many on each but the last
    seconds = ((LAYER_S * (1 + (transport.rank == p - 1)), 0.0),) * 3
    model, loss, _ = sleepers(units, seconds, WIDTH)
    inputs = np.zeros((ROWS, 1), np.float32)
    found = transport.gather_text(
        unit_seconds(
            model, inputs[:1], lambda y: y, backend_for("cpu"), Arena(), "float32", "float32"
        )
    )
    counts = by_time(found, range(p), range(p))
    took = {}
    for name, partition in (("time", ",".join(map(str, counts))), ("parameters", "")):
        config = configured(
            f"layout.pp={p}",
            f"batch.micro_batches={ROWS}",
            f"batch.size={ROWS}",
            f"run.steps={1 + STEPS}",
            f"pipeline.partition={partition}",
        )
        trainer = Trainer(transport, model, config, loss)
        times = []
        for step in range(1 + STEPS):
            transport.barrier()
            start = time.perf_counter()
            trainer.step(step, inputs, inputs.astype(np.int64))
            times.append(max(transport.gather_text(time.perf_counter() - start)))
        took[name] = median(times[1:])
        each = transport.gather_text(len(trainer.units))
        trainer.close()
        if transport.rank == 0:
            print(
                f"{p} stages, the last half as fast, {units} units by {name:<10}: {', '.join(map(str, each))}; "
                f"{1e3 * took[name]:.1f} ms a step",
                flush=True,
            )
    ratio = took["time"] / took["parameters"]
    if transport.rank == 0:
        print(f"  by time {ratio:.3f} times as long as by parameters", flush=True)
    return counts == [4] * (p - 1) + [2] and ratio <= MOST


if __name__ == "__main__":
    sys.exit(started(main, int(sys.argv[1]), *sys.argv[1:2]))
