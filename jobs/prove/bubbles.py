"""Bubbles of pipelines whose compute sleeps, beside what the simulator says of them: a table, and exit code 1 beyond 3 points.

Before each instruction a host does work of its own, in Python: about 0.25 ms, at 25 ms of sleep one point of bubble. Each rank
measures that on a pipeline of one stage, and the simulator adds it.

A stage sleeps for 50 ms in its forward and in each half of its backward, schedules with two chunks a stage for 25 ms in each
chunk. The bubble is 1 - time slept / (stages x time from the first sleep of a step to the end of its last, over all stages). So
it leaves out the control message and the update, which come after. What a message takes, and whether MPI sends it eagerly, is
measured first, for the simulator.
"""

import sys
from itertools import pairwise
from statistics import median

import numpy as np
from sleeping import configured, sleeper, started

from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedules import fused_at_the_input, with_messages
from mpitrain.pipeline.simulate import Cost, simulate
from mpitrain.tools.plan.stages import MessageTime, slowest, way
from mpitrain.transport.base import Transport

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zb-v": 2, "v-half": 2}
MICRO_BATCHES, HALF_S, WARM_UP, STEPS = 8, 0.05, 1, 5
MESSAGES = {"1 KiB": 1 << 8, "8 MiB": 1 << 21}
"""Elements of float32 that cross a boundary, as a micro-batch of one row."""
MOST = 0.03


def overhead(transport: Transport, part_s: float) -> float:
    """Seconds between two instructions of a stage that waits for no message; collective.

    Each rank trains a model of one sleeping layer by itself, at the same time as the others.
    """
    alone = transport.split(transport.rank)
    assert alone is not None
    config = configured(
        f"batch.micro_batches={MICRO_BATCHES}",
        f"batch.size={MICRO_BATCHES}",
        f"run.steps={WARM_UP + 1}",
    )
    trainer, slept = sleeper(alone, config, 1, ((part_s, 0.0),) * 3, 2)
    rows = np.zeros((MICRO_BATCHES, 1), np.float32)
    for step in range(WARM_UP + 1):
        slept.clear()
        transport.barrier()
        trainer.step(step, rows, rows.astype(np.int64))
    trainer.close()
    gaps = [start - end for (_, end), (start, _) in pairwise(slept)]
    gaps = [
        gap for at, gap in enumerate(gaps) if at % 3 != 1
    ]  # one instruction computes both halves of a backward here
    return median(gap for mine in transport.gather_text(gaps) for gap in mine)


def measured(
    transport: Transport, name: str, width: int, sent: MessageTime
) -> tuple[float, list[float]]:
    """The simulated bubble, and those of the steps."""
    stages, chunks = transport.size, CHUNKS[name]
    host_s = overhead(transport, HALF_S / chunks)
    config = configured(
        f"layout.pp={stages}",
        f"pipeline.schedule={name}",
        f"batch.micro_batches={MICRO_BATCHES}",
        f"batch.size={MICRO_BATCHES}",
        f"run.steps={WARM_UP + STEPS}",
    )
    part_s, chunks = HALF_S / chunks, stages * chunks
    trainer, slept = sleeper(transport, config, chunks, ((part_s, 0.0),) * 3, width)
    found, rows = [], np.zeros((MICRO_BATCHES, 1), np.float32)
    for step in range(WARM_UP + STEPS):
        slept.clear()
        transport.barrier()
        trainer.step(step, rows, rows.astype(np.int64))
        spans = [span for mine in transport.gather_text(slept) for span in mine]
        assert len(spans) == 3 * chunks * MICRO_BATCHES
        took = max(end for _, end in spans) - min(start for start, _ in spans)
        found.append(1 - sum(end - start for start, end in spans) / (stages * took))
    plan = fused_at_the_input(trainer.job.plan)
    trainer.close()
    return simulate(
        with_messages(plan), [Cost(part_s, part_s, part_s)] * chunks, *sent, host_s
    ).bubble, found[WARM_UP:]


def compared(transport: Transport, message: str, names: list[str]) -> bool:
    """Print a line for each schedule; whether all are near enough."""
    width = MESSAGES[message]
    lower = (
        transport.rank // 2 * 2
    )  # every second boundary at once: in a pipeline, too, stages receive at the same time
    has_peer = lower + 1 < transport.size
    told = transport.gather_text(
        way(transport, np.zeros(width, np.float32), lower, lower + 1, 1)
        if has_peer
        else MessageTime(0.0, 0.0)
    )
    sent = slowest(told)
    if transport.rank == 0:
        protocol = "eagerly" if sent.is_eager else "by rendezvous"
        print(
            f"{transport.size} stages, {MICRO_BATCHES} micro-batches, messages of {message}, sent {protocol}: "
            f"{1e3 * sent.transfer:.2f} ms each beside compute, {1e3 * sent.receive:.2f} ms of the receiver's",
            flush=True,
        )
    is_near = True
    for name in names:
        simulated, found = measured(transport, name, width, sent)
        apart = median(found) - simulated
        is_near &= abs(apart) <= MOST
        if transport.rank == 0:
            print(
                f"  {name:<12} {100 * simulated:8.2f}% {100 * median(found):8.2f}% {100 * min(found):8.2f}% .. "
                f"{100 * max(found):5.2f}% {100 * apart:+8.2f}{'' if abs(apart) <= MOST else '  beyond 3 points'}",
                flush=True,
            )
    return is_near


def main(transport: Transport, stages: str, names: str = "") -> bool:
    """The table of these schedules; whether all are near enough."""
    wanted = names.split() or list(CHUNKS)
    if unknown := [name for name in wanted if name not in CHUNKS]:
        raise ConfigError(f"{unknown[0]} is none of {', '.join(CHUNKS)}.").on_every_rank()
    if transport.rank == 0:
        print(
            f"  {'schedule':<12} {'simulated':>9} {'measured':>9} {'all steps':>18} {'apart':>8}",
            flush=True,
        )
    return all(
        transport.gather_text([compared(transport, message, wanted) for message in MESSAGES])[0]
    )


if __name__ == "__main__":
    sys.exit(started(main, int(sys.argv[1]), *sys.argv[1:3]))
