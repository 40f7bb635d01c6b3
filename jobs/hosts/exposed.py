"""How much of the communication of each way to keep replicas equal is exposed beside compute that sleeps.

    exposed.py UNITS ELEMENTS MILLISECONDS BLOCKS STEPS

Started by jobs/prove/overlap.sh on one rank per host.
A model of UNITS units, each of ELEMENTS float32 parameters, which computes by
sleeping: MILLISECONDS for a unit's forward, twice as long for its backward. In turns, BLOCKS times STEPS steps of each mode, with
overlap and without. Exposed is what a step takes longer than one rank alone.
exit code 1 if in a mode more than 30 % of what is exposed without overlap still is with it
"""

import sys
import time
from statistics import median

import numpy as np

from mpitrain.cli.session import mpi_session
from mpitrain.config import parse, with_settings
from mpitrain.layers.base import Parameter, Unit, normal
from mpitrain.run.trainer import Trainer

MODES = {"all-reduce": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
MOST = 0.3


class Sleeping:
    """A layer whose output is its input; its halves sleep as long as its forward."""

    output_is_free = True

    def __init__(self, elements, seconds):
        self._elements, self._seconds = elements, seconds

    def parameters(self):
        return [Parameter("weight", (self._elements,), normal(0.02), decayed=False)]

    def output_shape(self, shape):
        return shape

    def forward(self, w, x, now, arena):
        time.sleep(self._seconds)
        y = arena.take(x.shape, x.dtype)
        y[...] = x
        return y, None

    def backward_input(self, w, dy, saved, arena):
        time.sleep(self._seconds)
        return dy, None

    def backward_weight(self, pending, dw, arena):
        time.sleep(self._seconds)
        dw["weight"].claim()
        dw["weight"].array.fill(1e-3)


def seconds(transport, trainer, steps):
    """Median time of a step on the slowest rank."""
    inputs, targets = np.zeros((1, 2), np.float32), np.zeros(1, np.int64)
    trainer.step(0, inputs, targets)  # after it, what a step leaves to the next is there
    times = []
    for index in range(1, steps + 1):
        start = time.perf_counter()
        trainer.step(index, inputs, targets)
        times.append(time.perf_counter() - start)
    return max(transport.gather_text(median(times)))


def measure(transport, units, elements, milliseconds, blocks, steps):
    """Print the table; how many modes expose too much."""

    def trainer(where, *settings):
        model = [
            Unit(f"unit{number}", Sleeping(elements, milliseconds / 1e3)) for number in range(units)
        ]
        return Trainer(
            where,
            model,
            parse(
                with_settings(
                    {},
                    [
                        "device.kind=cpu",
                        "optimizer.name=sgd",
                        "replication.algorithm=ring",
                        f"batch.size={where.size}",
                        f"replication.bucket_mb={4e-6 * elements}",
                        *settings,
                    ],
                )
            ),
        )

    sides = {("alone", ""): trainer(transport.split(transport.rank))}
    for name, stage in MODES.items():
        for overlap in ("true", "false"):
            sides[name, overlap] = trainer(
                transport, f"replication.zero={stage}", f"replication.overlap={overlap}"
            )
    times: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
    for _ in range(blocks):
        for side, made in sides.items():
            times[side].append(seconds(transport, made, steps))
    if transport.rank:
        return 0
    print(
        f"{transport.size} hosts, {units} units of {4e-6 * elements:.2f} MB, which sleep {milliseconds} ms forward and "
        f"{2 * milliseconds} backward: {median(times['alone', '']):.3f} s alone; medians of {blocks} blocks of {steps} steps"
    )
    print(
        f"{'mode':<11} {'overlap':>9} {'without':>9} {'exposed':>9} {'without':>9}   share, least .. most of a block"
    )
    failures = 0
    for name in MODES:
        on, off = times[name, "true"], times[name, "false"]
        exposed = [
            [step - alone for step, alone in zip(side, times["alone", ""], strict=True)]
            for side in (on, off)
        ]
        shares = [a / b for a, b in zip(*exposed, strict=True)]
        failures += not median(shares) <= MOST
        print(
            f"{name:<11} {median(on):7.3f} s {median(off):7.3f} s {median(exposed[0]):7.3f} s {median(exposed[1]):7.3f} s   "
            f"{median(shares):5.0%}   {min(shares):.0%} .. {max(shares):.0%}"
        )
    return failures


with mpi_session() as world:
    failed = measure(world, *map(int, sys.argv[1:]))
sys.exit(failed > 0)
