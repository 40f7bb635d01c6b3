"""The seconds of a training step by kind of unit: norm, attention, MLP, head, loss, and the rest."""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, cast

from mpitrain.errors import ConfigError, on_every_rank
from mpitrain.ops import Ops
from mpitrain.run.build import Job, model
from mpitrain.run.trainer import Trainer
from mpitrain.tools.bench.training.bare_products import Product, products_of
from mpitrain.tools.bench.training.steps import Ours, Result
from mpitrain.trace.recorder import NO_PHASE, Recorder
from mpitrain.transport.base import Transport
from mpitrain.transport.decorators import Recorded

BETWEEN, COMMUNICATION = "between operations", "communication"
SPANS = {"the loss": "loss", "the norm": "optimizer", "the parameters": "optimizer"}
"""Kinds of spans that are no forward or backward of a unit, by name."""


def kind_of(unit: str) -> str:
    """Return the kind of a unit: the last word of its name, such as "mlp" of "blocks.3.mlp"."""
    return re.findall(r"[^.\d]+", unit)[-1] if re.search(r"[^.\d]", unit) else unit


class Stopwatch(Recorder):
    """Recorder that sums the seconds of one rank by kind of work. Each moment has one kind.

    seconds   {kind: seconds} since `restart`
    products  the matrix products of the first step
    """

    is_on = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        # It has no ring buffer, so the constructor of Recorder is not called.
        self.clock, self.products = clock, list[Product]()
        self.step = self.micro = -1
        self.naming, self.topic = "", 0
        self._owner, self._labels = threading.get_ident(), [""]
        # Operations outside all spans are updates of parameters, for example on a parameter server.
        self._is_recording, self._units = True, ["optimizer"]
        self.restart()

    def restart(self) -> None:
        """Set all seconds to zero."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack, self._last = [BETWEEN], self.clock()

    def stop(self) -> None:
        """End a step: count the seconds up to now, and record no more products."""
        self._spend()
        self._is_recording = False

    def _spend(self) -> None:
        now = self.clock()
        self.seconds[self._stack[-1]] += now - self._last
        self._last = now

    def enter(self, kind: str) -> None:
        """Begin work of a kind, within other work."""
        self._spend()
        self._stack.append(kind)

    def leave(self) -> None:
        """End the work that began last."""
        self._spend()
        self._stack.pop()

    def name(self, what: str, ranks: Sequence[int] = ()) -> int:
        self._labels.append(what)
        return len(self._labels) - 1

    def facts(self, **facts: Any) -> None:
        pass

    def computes_on(self, mark: Callable[[], Any]) -> None:
        pass

    def begin(self, *fields: int, **more: int) -> int:
        return 0

    def compute(self, name: int, phase: int = NO_PHASE, unit: int = -1, micro: int = -1) -> int:
        label = self._labels[name]
        kind = SPANS.get(label, BETWEEN)
        self._units.append(kind_of(label) if unit >= 0 else kind)
        self.enter(kind)
        return 1

    def end(self, span: int) -> None:
        if span:
            self._units.pop()
            self.leave()

    def wait(self, name: int, peer: int = -1, message: int = 0) -> int:
        if threading.get_ident() != self._owner:
            return 0
        self.enter(COMMUNICATION)
        return 1

    def go_on(self, wait: int) -> None:
        if wait:
            self.leave()

    def timed(self, ops: Ops) -> Ops:
        """Return the operations; each also adds its time to the seconds of its kind."""

        def wrapped(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                kind = self._stack[-1]
                if kind == BETWEEN:
                    kind = "norm" if name.startswith("layer_norm") else self._units[-1]
                self.enter(kind)
                result = body(*arguments, **named)
                self.leave()
                if self._is_recording:
                    self.products += products_of(kind, name, arguments, result)
                return result

            return run

        bodies = {name: wrapped(name, body) for name, body in vars(ops).items()}
        return cast(Ops, SimpleNamespace(**bodies))

    def communicates(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a function whose time counts as communication."""

        def run() -> None:
            self.enter(COMMUNICATION)
            call()
            self.leave()

        return run


class ByKind(Ours):
    """A side that trains a copy of a job, and measures each step by kind of unit.

    seconds  {kind: seconds} of each step
    """

    def __init__(self, transport: Transport, job: Job):
        """Build the copy; collective."""
        resolved, self.watch = job.trainer.resolved, Stopwatch()
        if resolved.device.kind != "cpu":
            raise on_every_rank(
                ConfigError(
                    "The floor is measured on the host, but device.kind is "
                    f"{resolved.device.kind}.",
                    "Use --device cpu, or leave out --floor.",
                )
            )
        device = resolved.device._replace(ops=self.watch.timed(resolved.device.ops))
        trainer = Trainer(
            Recorded(transport, self.watch),
            lambda layers: model(resolved.config, job.source, layers),
            resolved._replace(device=device),
        )
        mode = trainer.replication
        for each in (mode.store, mode.reducer, mode.step_end, trainer.pipe.channel):
            vars(each)["poll"] = self.watch.communicates(each.poll)
        self.seconds: list[dict[str, float]] = []
        super().__init__(Job(trainer, job.source, job.done), "by kind of unit")

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        self.watch.restart()
        loss = super().step(index, inputs, targets)
        self.watch.stop()
        self.seconds.append(dict(self.watch.seconds))
        return loss


def kind_rows(
    transport: Transport, measured: Sequence[dict[str, float]], floor: Sequence[dict[str, float]]
) -> list[tuple[str, float, float]]:
    """Return (kind, seconds of a step, seconds of its bare products), means over ranks; collective.

    measured, floor  {kind: seconds} of each step on this rank; a median over steps counts
    """

    def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
        kinds = dict.fromkeys(kind for step in steps for kind in step)
        return {kind: median(step.get(kind, 0.0) for step in steps) for kind in kinds}

    everyone = transport.gather_text([medians(measured), medians(floor)])
    kinds = sorted(
        dict.fromkeys(kind for seconds, _ in everyone for kind in seconds),
        key=lambda kind: (kind == BETWEEN, kind == COMMUNICATION),
    )

    def mean(kind: str, side: int) -> float:
        return fmean(each[side].get(kind, 0.0) for each in everyone)

    return [(kind, mean(kind, 0), mean(kind, 1)) for kind in kinds]


def floor_table(ours: Result, floor: Result, rows: Sequence[tuple[str, float, float]]) -> list[str]:
    """Format the step, its floor, and each kind of unit as lines of a table."""
    ratios = [step_s / bare for step_s, bare in zip(ours.blocks, floor.blocks, strict=True) if bare]
    lines = [f"{'kind of unit':<20} {'ms a step':>10} {'bare products':>14} {'above':>8}"]
    for kind, seconds, bare in rows:
        products = f"{bare * 1e3:14.2f}" if bare else f"{'-':>14}"
        lines.append(f"{kind:<20} {seconds * 1e3:>10.2f} {products} {(seconds - bare) * 1e3:>8.2f}")
    total, least = sum(row[1] for row in rows), sum(row[2] for row in rows)
    lines.append(
        f"{'measured in all':<20} {total * 1e3:>10.2f} {least * 1e3:>14.2f} {(total - least) * 1e3:>8.2f}"
    )
    if ratios:
        lines.append(
            f"{ours.name}: a step is {median(ratios):.3f} times its bare products (blocks "
            f"{min(ratios):.3f} .. {max(ratios):.3f})"
        )
    return lines
