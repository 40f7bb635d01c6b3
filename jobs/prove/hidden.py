"""How much of a column-parallel layer's sum is exposed beside a weight half that sleeps.

    hidden.py ROWS

Started by jobs/prove/overlap.sh on one rank per host.
Backward passes of LAYERS layers, each with a sum of ROWS x WIDTH float32, in
turns: the sum first and then the weight half, and both at once. Exposed is what they take longer than their weight halves.
exit code 1 if more than 30 % of what is exposed one after the other still is at once
"""

import sys
import time
from statistics import median

import numpy as np

from mpitrain.cli.session import mpi_session

LAYERS, WIDTH, STEPS = 4, 256, 5
WEIGHT_S = 0.1
MOST = 0.3


def main(rows):
    """Print what is exposed; returns the exit code."""
    with mpi_session() as transport:
        from mpitrain.collectives.group import Group
        from mpitrain.config import Layout
        from mpitrain.layers.initial import normal
        from mpitrain.ops.device import ops_for
        from mpitrain.parallel.tensor.layer_factory import layers_for
        from mpitrain.parallel.tensor.linear import ColumnParallelLinear

        class Sleeping(ColumnParallelLinear):
            """Its weight half only takes time."""

            def backward_weight(self, pending, dw, arena):
                time.sleep(WEIGHT_S)

        n = transport.size
        group = Group(transport, "ring")
        layer = Sleeping(
            layers_for(ops_for("cpu"), group, Layout(tp=n)), WIDTH, n, normal(1), bias=False
        )
        w, x, dy = (
            {"weight": np.ones((1, WIDTH), "f4")},
            np.ones((rows, WIDTH), "f4"),
            np.ones((rows, 1), "f4"),
        )

        def exposed(at_once):
            """Seconds, on the slowest rank."""
            transport.barrier()
            began = time.perf_counter()
            for _ in range(LAYERS):
                _, saved = layer.forward(w, x, group.arena)
                if at_once:
                    layer.backward(w, dy, saved, {}, group.arena)
                else:
                    _, pending = layer.backward_input(w, dy, saved, group.arena)
                    layer.backward_weight(pending, {}, group.arena)
            return max(transport.gather_text(time.perf_counter() - began)) - LAYERS * WEIGHT_S

        exposed(True), exposed(False)
        times = [(exposed(True), exposed(False)) for _ in range(STEPS)]
        ratios = sorted(one / other for one, other in times)
        at_once, in_turn = (1e3 * median(side) / LAYERS for side in zip(*times, strict=True))
        if transport.rank == 0:
            print(
                f"column-parallel layers, sums of {rows * WIDTH * 4 / 1e6:.1f} MB, weight halves of {1e3 * WEIGHT_S:.0f} ms: "
                f"{in_turn:.1f} ms a layer are exposed in turn, {at_once:.1f} at once, "
                f"{100 * median(ratios):.0f} % ({100 * ratios[0]:.0f} .. {100 * ratios[-1]:.0f})",
                flush=True,
            )
        return int(median(transport.gather_text(ratios)[0]) > MOST)


sys.exit(main(int(sys.argv[1])))
