"""Steps as `plan layout` predicts them, beside measured ones. Started by plan.sh.

    plan.py measure RANKS FILE [TUNING]     train the layouts of so many ranks, and append them to FILE
    plan.py judge FILE                      print all of FILE; exit code 1 if the claim fails

A small GPT trains with real messages, and its layers sleep in addition: for their FLOPs at RATE, which is far slower than the
processor. So two cores suffice for eight ranks, and other work on the machine counts little. RANKS is 0 for a larger GPT that
computes, on 2 ranks; that one needs two quiet cores.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from sleeping import started

from mpitrain.config import parse, with_settings
from mpitrain.layers.recomputed import saved_again
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.tensors import TensorOptimizer
from mpitrain.run import build
from mpitrain.run import job as jobs
from mpitrain.tools.plan.layout import PARTS, ParallelLayout, Planner
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

RATE = 7.5e7
"""FLOP/s of a sleeping rank: a step of one rank takes about 7 s."""
WARM_UP, STEPS = 1, 3
MOST_BYTES = 0.01
"""Largest median error of the predicted memory: of parameters, gradients, optimizer state and activations.

Layers that sleep keep their arguments a little longer, and the buckets of ZeRO 2 between hosts are estimated.
Layers that do not sleep need the predicted bytes: tests/ranks/plan/test_layout_counts.py.
"""
SMALL = "batch.size=16 model.layers=3 model.width=64 model.heads=8 model.context=32 device.kind=cpu"
LARGE = "batch.size=16 model.layers=4 model.width=256 model.context=256 device.kind=cpu"
# dp, tp, pp, ZeRO, micro-batches, recomputation, cp
LAYOUTS: dict[int, list[tuple[Any, ...]]] = {
    0: [(2, 1, 1, 0, 1), (2, 1, 1, 1, 1), (2, 1, 1, 3, 1), (1, 2, 1, 0, 1), (1, 1, 2, 0, 8)],
    1: [(1, 1, 1, 0, 1), (1, 1, 1, 0, 4, "unit")],
    2: [
        (2, 1, 1, 0, 1),
        (2, 1, 1, 3, 2),
        (1, 2, 1, 0, 2),
        (1, 1, 2, 0, 4),
        (1, 1, 1, 0, 2, "none", 2),
    ],
    4: [
        *((4, 1, 1, 0, 1), (4, 1, 1, 3, 2), (2, 2, 1, 0, 1), (1, 4, 1, 0, 1)),
        *((2, 1, 2, 0, 4), (1, 2, 2, 1, 8), (1, 1, 4, 0, 16), (2, 2, 1, 1, 2, "unit")),
    ],
    8: [
        *((8, 1, 1, 0, 1), (8, 1, 1, 2, 2), (4, 2, 1, 0, 1), (2, 4, 1, 1, 2), (1, 8, 1, 0, 1)),
        *((2, 2, 2, 0, 4), (2, 1, 4, 0, 8), (1, 2, 4, 0, 8), (1, 1, 8, 0, 16)),
    ],
}
"""{ranks: their layouts}; of 4 ranks on 2 hosts, and of 8 on 4."""


class Slowed:
    """A layer that sleeps for the rest of the time that its FLOPs take at RATE.

    third  seconds of a row in the forward, and in each half of the backward
    again  seconds of a row in a repeated forward
    spans  where the start and the end of each call are noted, from the time that it is a list
    """

    spans: list[tuple[float, float]] | None = None
    debt = 0.0
    """Seconds by which sleeps and computing have been too long, which shortens the next sleeps: a crowded machine wakes late."""
    waited: Callable[[], float] = staticmethod(lambda: 0.0)
    """Returns the seconds of messages within layers so far, which are no computing."""

    def __init__(self, layer: Any, third: float, again: float):
        self._layer, self._third, self._again = layer, third, again
        self.output_is_free, self.vocab = layer.output_is_free, getattr(layer, "vocab", 0)
        self.parameters, self.output_shape = layer.parameters, layer.output_shape

    def inner_layers(self) -> list[Any]:
        return [self._layer]

    def _slowly(self, seconds: float, call: Any, *arguments: Any) -> Any:
        start, waited = time.perf_counter(), Slowed.waited()
        result = call(*arguments)
        if Slowed.spans is None:  # Layers are only counted.
            return result
        start += Slowed.waited() - waited
        if seconds:
            time.sleep(max(0.0, start + seconds - Slowed.debt - time.perf_counter()))
            Slowed.debt += time.perf_counter() - start - seconds
        Slowed.spans.append((start, time.perf_counter()))
        return result

    def forward(self, w: Any, x: Any, now: Any, arena: Any) -> tuple[Any, Any]:
        y, saved = self._slowly(len(x) * self._third, self._layer.forward, w, x, now, arena)
        return y, (saved, len(x))

    def saved_again(self, w: Any, x: Any, now: Any, arena: Any) -> Any:
        return self._slowly(len(x) * self._again, saved_again, self._layer, w, x, now, arena), len(
            x
        )

    def backward_input(self, w: Any, dy: Any, saved: Any, arena: Any) -> tuple[Any, Any]:
        saved, rows = saved
        call = self._layer.backward_input
        dx, pending = self._slowly(rows * self._third, call, w, dy, saved, arena)
        return dx, (pending, rows)

    def backward_weight(self, pending: Any, dw: Any, arena: Any) -> None:
        pending, rows = pending
        self._slowly(rows * self._third, self._layer.backward_weight, pending, dw, arena)


updates = [0.0]
"""Seconds of this rank in updates of the optimizer."""


def timed_update(update: Any) -> Any:
    def call(*arguments: Any, **more: Any) -> Any:
        start = time.perf_counter()
        try:
            return update(*arguments, **more)
        finally:
            updates[0] += time.perf_counter() - start

    return call


def steps(
    transport: Transport, config: Any, seconds: list[tuple[float, float]] | None
) -> dict[str, float]:
    """Return the parts of the median step of a job, as measured, and the bytes of the fullest rank. Collective.

    seconds  (third, again) of each unit; None: it computes only
    """
    Slowed.spans, plain = None, jobs.units_of
    slow = seconds or [(0.0, 0.0)] * 10**6
    jobs.units_of = lambda *arguments: [
        replace(unit, layer=Slowed(unit.layer, *each))
        for unit, each in zip(plain(*arguments), slow, strict=False)
    ]
    try:
        job = build.build(transport, config)
    finally:
        jobs.units_of = plain
    trainer, every = job.trainer, []
    for step in range(WARM_UP + STEPS):
        rows = trainer.replica.batch(job.data, step)
        Slowed.spans, exchanged, updates[0] = [], trainer.grid.exchanged.seconds, 0.0
        Slowed.debt, Slowed.waited = 0.0, lambda: trainer.grid.exchanged.seconds
        transport.barrier()
        start = time.perf_counter()
        trainer.step(step, *rows)
        end, tensors = time.perf_counter(), trainer.grid.exchanged.seconds - exchanged
        busy = sum(stop - begin for begin, stop in Slowed.spans)
        last = max(stop for _, stop in Slowed.spans)
        facts = transport.gather_text((busy, tensors, start, last, end, updates[0]))
        computing, tensors = max(facts)[:2]
        begun, last, ended = (
            min(f[2] for f in facts),
            max(f[3] for f in facts),
            max(f[4] for f in facts),
        )
        parts = {"computing": computing, "tensors": tensors, "update": max(f[5] for f in facts)}
        # Where there is one stage, all waiting is for replicas: with ZeRO 2 and 3 also in the passes.
        parts["pipeline"] = last - begun - computing - tensors if trainer.grid.axes.pp > 1 else 0.0
        parts["replicas"] = ended - begun - sum(parts.values())
        every.append(parts | {"step": ended - begun})
    trainer.replica.sync()
    held = trainer.replica.held_by_kind()
    nbytes = (
        sum(held[kind] for kind in ("parameters", "gradients", "state")) + trainer.pipe.peak_bytes
    )
    nbytes = max(transport.gather_text(nbytes))
    job.close()
    Slowed.spans = None
    timed = sorted(every[WARM_UP:], key=lambda parts: parts["step"])
    return timed[len(timed) // 2] | {"nbytes": nbytes}


def measure(transport: Transport, kind: str, file: str, tuning: str = "") -> bool:
    """Predict and measure all layouts of these ranks; rank 0 appends a line for each to the file."""
    rate = RATE if kind != "0" else None
    settings = [
        *(SMALL if rate else LARGE).split(),
        f"run.steps={WARM_UP + STEPS}",
        *([f"replication.tuning={tuning}"] * bool(tuning)),
    ]
    planner = Planner(parse(with_settings({}, settings)), transport.hosts, rate, 1e12)
    for each in LAYOUTS[int(kind)]:
        layout = ParallelLayout(*(*each, "none")[: max(6, len(each))])
        predicted, axes = planner.predict(layout), layout.axes
        counted = planner._counted(axes, layout.micro_batches, 1, layout.recompute)
        seconds = None
        if rate:
            once = [(unit.counted.flops - unit.repeated) / 3 / rate for unit in counted]
            seconds = [*zip(once, (unit.repeated / rate for unit in counted), strict=True)]
        words = [f"{key}={value}" for key, value in layout.settings.items()]
        measured = steps(transport, parse(with_settings({}, [*settings, *words])), seconds)
        if transport.rank == 0:
            parts = {part: getattr(predicted, part) for part in PARTS} | {
                "update": 0.0,
                "step": predicted.step_s,
                "nbytes": predicted.nbytes,
            }
            row = {
                "set": f"{transport.size} on {len(set(transport.hosts))}",
                "layout": layout,
                "predicted": parts,
                "measured": measured,
            }
            with Path(file).open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    return True


def judge(file: str) -> bool:
    """Print predictions beside measurements; return whether they are near enough."""
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    parts = (*PARTS, "update")
    print(
        "ranks on hosts: dp tp pp ZeRO micro-batches recomputation cp; ms predicted, measured, error; "
        "then predicted - measured of each part"
    )
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        words = (f"{part} {1e3 * (predicted[part] - measured[part]):+.0f}" for part in parts)
        name = f"{row['set']}: {' '.join(map(str, row['layout']))}"
        print(
            f"{name:32} {1e3 * predicted['step']:8.0f} {1e3 * measured['step']:8.0f} "
            f"{100 * (predicted['step'] / measured['step'] - 1):+6.1f}%   {', '.join(words)}"
        )
    errors = [abs(row["predicted"]["step"] / row["measured"]["step"] - 1) for row in rows]
    of_part = {
        part: median(
            abs(row["predicted"][part] - row["measured"][part]) / row["measured"]["step"]
            for row in rows
        )
        for part in parts
    }
    print(
        "median error of a part, of the step: "
        + ", ".join(f"{part} {100 * error:.1f}%" for part, error in of_part.items())
    )
    apart = [abs(row["predicted"]["nbytes"] / row["measured"]["nbytes"] - 1) for row in rows]
    print(
        f"memory of the fullest rank: median error {100 * median(apart):.1f}%, at most {100 * max(apart):.1f}%"
    )
    losses, agreeing = [], []
    for name in dict.fromkeys(row["set"] for row in rows):
        every = [
            (row["predicted"]["step"], row["measured"]["step"])
            for row in rows
            if row["set"] == name
        ]
        losses.append(min(every)[1] / min(measured for _, measured in every))
        agreeing += [
            1 if (a[0] < b[0]) == (a[1] < b[1]) else -1
            for a, b in combinations(every, 2)
            if abs(a[1] / b[1] - 1) > 0.05
        ]
    tau = sum(agreeing) / max(1, len(agreeing))
    print(
        f"{len(rows)} layouts: median error {100 * median(errors):.1f}%; the best predicted takes at most {max(losses):.2f} of "
        f"the best measured; tau {tau:.2f} of {len(agreeing)} pairs of the same ranks that differ by 5% or more"
    )
    is_near = median(errors) <= 0.2 and median(apart) <= MOST_BYTES
    return is_near and max(losses) <= 1.1 and (not agreeing or tau >= 0.7)


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "judge":
        sys.exit(not judge(*words))
    for each in (Optimizer, TensorOptimizer):
        each.update = timed_update(each.update)  # type: ignore[method-assign]
    if words[0] == "1":  # A job of one rank would start itself for ever.
        sys.exit(not all(run_ranks(1, measure, *words)))
    sys.exit(
        started(
            lambda transport, _, *rest: measure(transport, *rest), int(words[0]) or 2, *sys.argv[1:]
        )
    )
