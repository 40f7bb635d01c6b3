"""Topics of memory and precision on one rank: recomputation, and loss scaling.

An activation is alive while an object refers to it. Weak references count the living ones without
keeping them alive.
"""

import weakref
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import Sentence
from mpitrain.layers.base import Unit
from mpitrain.layers.recomputed import with_recomputation
from mpitrain.parallel.replica import DynamicLossScale, StepResult
from mpitrain.pipeline.pipeline import Stage
from mpitrain.run.trainer import Trainer
from mpitrain.tools.textbook.explain import toy
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Topic,
    TopicSetting,
)
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

SEGMENTS = "ceil((L-1)/k) + 2"
"""Activations that are alive at the end of the forward: one for each segment, and the last unit's."""
UNITS = "ABCD"
WAYS = {"none": 0, "unit": 1, "2": 2}
"""{memory.recompute: units that are computed again together}."""

GRADIENTS = (3e-9, 4e-8, 2e-6, 5e-3, 6.0)
"""Elements of a gradient, from too small for float16 to large."""
MOST = float(np.finfo(np.float16).max)


class _Pass(NamedTuple):
    """A forward or backward, and which activations are alive after it: each unit's input and its
    inner one.
    """

    name: str
    alive: tuple[str, ...]


class _Inner(toy.SymbolLayer):
    """A layer that saves its input and an inner activation, like a GELU between two products."""

    def __init__(self, unit: int, symbols: Any, seen: Any, made: list[Any]):
        super().__init__(unit, toy.VECTOR, symbols, seen)
        self._number, self._made = unit, made

    def forward(self, w: Any, x: Any, now: Any, arena: Any) -> tuple[Any, Any]:
        inner = arena.take(x.shape, x.dtype)
        inner[...] = x
        self._made[2 * self._number] = weakref.ref(x)
        self._made[2 * self._number + 1] = weakref.ref(inner)
        y, _ = super().forward(w, x, now, arena)
        return y, (x, inner)

    def backward_input(self, w: Any, dy: Any, saved: Any, arena: Any) -> tuple[Any, Any]:
        return super().backward_input(w, dy, saved[0], arena)


def _run(transport: Transport, way: str) -> list[_Pass]:
    symbols = toy.basis(1, 1, has_inputs=True)
    made: list[Any] = [lambda: None] * (2 * len(UNITS))
    passes: list[_Pass] = []

    def seen(layer_pass: toy.Pass) -> None:
        letter = {"forward": "F", "input": "B", "weight": ""}[layer_pass.kind]
        if letter:
            alive = tuple("x0" if array() is not None else "" for array in made)
            passes.append(_Pass(f"{letter} {UNITS[layer_pass.unit]}", alive))

    config = toy.configured("batch.size=1", "run.steps=1", f"memory.recompute={way}")
    units = [
        Unit(f"unit{number}", _Inner(number, symbols, seen, made)) for number in range(len(UNITS))
    ]
    trainer = Trainer(transport, units, config, toy.SymbolLoss())
    trainer.step(0, *trainer.replica.batch(toy.SymbolSource(symbols), 0))
    return passes


def recomputation(setting: TopicSetting) -> Explanation:
    runs = {way: run_ranks(1, _run, way)[0] for way in WAYS}
    longest = max(map(len, runs.values()))
    frames = [Frame("start", tuple(("",) * (2 * len(UNITS) + 1) for _ in WAYS))]
    for at in range(longest):
        cells = [
            (passes[at].name, *passes[at].alive)
            if at < len(passes)
            else ("",) * (2 * len(UNITS) + 1)
            for passes in runs.values()
        ]
        frames.append(Frame(Sentence("after pass {k}", k=at + 1), tuple(cells)))
    count = len(UNITS)
    formulas = []
    for way, size in WAYS.items():
        peak = max(sum(map(bool, entry.alive)) for entry in runs[way])
        words, value = ("2 L", 2 * count) if not size else (SEGMENTS, -(-(count - 1) // size) + 2)
        formulas.append(
            CountedFormula(
                Sentence("most activations alive, memory.recompute {way}", way=way),
                peak,
                words,
                value,
            )
        )
    forwards = {way: sum(entry.name[0] == "F" for entry in passes) for way, passes in runs.items()}
    formulas.append(
        CountedFormula(
            "forwards of units with recomputation", forwards["unit"], "2 L - 1", 2 * count - 1
        )
    )
    return Explanation(
        [
            "The backward of a unit needs the activations that its forward saved.",
            "With recomputation a segment of k units saves only its input.",
            "Its backward first runs the forwards of the segment again.",
            "The last unit is left out, because its backward follows at once.",
            "Memory falls, and up to a third more is computed: B takes twice the time of F.",
        ],
        "A.x: input of unit A; A.h: its inner activation; x0: alive; - or empty: freed or not yet made. F, B: passes.",
        [Sentence("recompute {way}", way=way) for way in WAYS],
        [
            Columns("now", ("pass",)),
            Columns("activations", tuple(f"{u}.{kind}" for u in UNITS for kind in "xh")),
        ],
        frames,
        formulas,
        [SourceLines.of(with_recomputation), SourceLines.of(Stage)],
        "mpitrain train --set memory.recompute=unit",
        ("tests/laws/layers.py",),
    )


def loss_scaling(setting: TopicSetting) -> Explanation:
    scale, frames, skipped = DynamicLossScale(), list[Frame](), 0
    first = scale.loss_scale
    plain = _frame("without a scale", 1.0, "")
    while True:
        value = scale.loss_scale
        scaled = _scaled(value)
        is_finite = bool(np.isfinite(scaled).all())
        step = len(frames) + 1
        norm = float(np.linalg.norm(scaled.astype(np.float64)))
        result = StepResult(1.0, norm, int((~np.isfinite(scaled)).sum()), 0.1, is_finite, False)
        scale.conclude(result)
        title = (
            Sentence("step {k}: the update", k=step)
            if is_finite
            else Sentence("step {k}: an overflow, no update, half the scale", k=step)
        )
        frames.append(_frame(title, value, f"{value:g}"))
        if is_finite:
            break
        skipped += 1
    largest = max(GRADIENTS)
    return Explanation(
        [
            Sentence(
                "float16 has no number between 0 and {least:.2g}: small gradients become 0.",
                least=2.0**-24,
            ),
            "The loss is multiplied by a scale, and so are all gradients.",
            "In float32 the update divides by the scale: the small gradients are there.",
            Sentence(
                "Above {most:.0f} a gradient is infinite: the step is skipped, the scale halves.",
                most=MOST,
            ),
            Sentence("After {good} steps without overflow the scale doubles.", good=scale.GOOD),
        ],
        "float16: the gradient as the backward computes it; divided: as the update reads it.",
        [Sentence("gradient {g:g}", g=g) for g in GRADIENTS],
        [
            Columns("without a scale", ("float16",)),
            Columns("with the scale", ("scale", "float16", "divided")),
        ],
        [plain, *frames],
        [
            CountedFormula(
                "skipped steps",
                skipped,
                "ceil(lg(largest scale / 65504))",
                float(max(0, np.ceil(np.log2(largest * first / MOST)))),
            ),
            CountedFormula(
                "gradients that are 0 without the scale",
                float((np.array(GRADIENTS, np.float16) == 0).sum()),
                "g <= 2^-25",
                float(sum(g <= 2.0**-25 for g in GRADIENTS)),
            ),
        ],
        [SourceLines.of(DynamicLossScale)],
        "mpitrain train --set precision.compute=float16",
        ("tests/unit/parallel",),
    )


def _scaled(scale: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (np.array(GRADIENTS) * scale).astype(np.float16)


def _frame(title: str, scale: float, shown: str) -> Frame:
    """Return the gradients in 16 bits, computed without a loss scale and with this one.

    shown  the scale as text; empty: only the gradients without a scale
    """
    rows = zip(_scaled(1.0), _scaled(scale), strict=True)
    return Frame(
        title,
        tuple(
            (
                f"{bare:.3g}",
                *((shown, f"{half:.3g}", f"{float(half) / scale:.3g}") if shown else ("",) * 3),
            )
            for bare, half in rows
        ),
    )


TOPICS = {
    "recomputation": Topic(
        "Recomputation: activations are freed, and computed again", recomputation, ranks=1, most=1
    ),
    "loss-scaling": Topic(
        "Loss scaling: small gradients survive float16", loss_scaling, ranks=1, most=1
    ),
}
