"""The number of micro-batches that `mpitrain plan batch` would name, and what steps take by it and by all others.

Layers sleep for so many ms for a micro-batch and so many for each of its rows. Exit code 1 if the step of the named count takes
more than 1.05 times as long as that of the count that was measured best.
"""

import sys
import time
from statistics import median

import numpy as np
from sleeping import configured, sleeper, started

from mpitrain.run.trainer import Trainer
from mpitrain.tools.plan.micro_batches import best, counts, predict, sizes
from mpitrain.tools.plan.stages import end_s, measure
from mpitrain.transport.base import Transport

SCHEDULES = ("gpipe", "1f1b")
ROWS, STEPS, WIDTH = 24, 4, 1 << 16
SECONDS = ((0.002, 0.0015), (0.002, 0.0015), (0.002, 0.0015))
"""Of a stage's forward, input half and weight half: for a micro-batch, and for each row."""
MOST = 1.05


def built(transport: Transport, name: str, micro_batches: int) -> Trainer:
    """A trainer of one sleeping layer a stage."""
    config = configured(
        f"layout.pp={transport.size}",
        f"pipeline.schedule={name}",
        f"batch.micro_batches={micro_batches}",
        f"batch.size={ROWS}",
        "run.steps=100",
    )
    return sleeper(transport, config, transport.size, SECONDS, WIDTH)[0]


def compared(transport: Transport, name: str) -> bool:
    """Print every count; whether the named one is fast enough."""
    inputs = np.zeros((ROWS, 1), np.float32)
    targets = inputs.astype(np.int64)
    trainer = built(transport, name, transport.size)
    found = counts(trainer.config, transport.size, ROWS)
    measured = measure(trainer, inputs, targets, sizes(found, ROWS))
    predicted = predict(
        trainer.config,
        transport.size,
        ROWS,
        found,
        measured,
        end_s(trainer, inputs[:1], targets[:1]),
    )
    trainer.close()
    trainers = [built(transport, name, each.micro_batches) for each in predicted]
    times: list[list[float]] = [[] for _ in trainers]
    for turn in range(1 + STEPS):
        for trainer, mine in zip(trainers, times, strict=True):
            transport.barrier()
            start = time.perf_counter()
            trainer.step(turn, inputs, targets)
            mine.append(max(transport.gather_text(time.perf_counter() - start)))
    for trainer in trainers:
        trainer.close()
    took = {
        each.micro_batches: median(mine[1:]) for each, mine in zip(predicted, times, strict=True)
    }
    named, fastest = best(predicted).micro_batches, min(took, key=took.__getitem__)
    is_near = took[named] <= MOST * took[fastest]
    if transport.rank == 0:
        print(f"{name}, {transport.size} stages, {ROWS} rows: predicted and measured ms of a step")
        pairs = [
            f"{each.micro_batches:3}: {1e3 * each.step_s:6.1f} {1e3 * took[each.micro_batches]:6.1f}"
            for each in predicted
        ]
        for start in range(0, len(pairs), 6):
            print("  " + "   ".join(pairs[start : start + 6]))
        print(
            f"  named {named}; best {fastest}; {took[named] / took[fastest]:.3f} times as long"
            f"{'' if is_near else ': more than 1.05'}",
            flush=True,
        )
    return is_near


def main(transport: Transport, stages: str) -> bool:
    """Whether the named counts are fast enough."""
    return all(transport.gather_text([compared(transport, name) for name in SCHEDULES])[0])


if __name__ == "__main__":
    sys.exit(started(main, int(sys.argv[1]), *sys.argv[1:2]))
