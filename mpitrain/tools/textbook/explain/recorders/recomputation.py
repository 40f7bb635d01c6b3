"""The topic of recomputation: the activations that are alive after each pass of a step.

An activation is alive while an object refers to it. Weak references count it, and change nothing.
"""

import weakref
from typing import Any, NamedTuple

from mpitrain.layers.base import Unit
from mpitrain.layers.memory.recomputed import with_recomputation
from mpitrain.pipeline.stage import Stage
from mpitrain.run.trainer import Trainer
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Text,
    sentence,
)
from mpitrain.tools.textbook.explain.recorders import toy
from mpitrain.tools.textbook.explain.topic import TopicSetting
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

SEGMENTS = "ceil((L-1)/k) + 2"
"""Activations that are alive at the end of the forward: one for each segment, and the last unit's."""
UNITS = "ABCD"
WAYS = {"none": 0, "unit": 1, "2": 2}
"""{memory.recompute: units that are computed again together}."""


class _Pass(NamedTuple):
    """A pass, and the activations that are alive after it: for each unit its input and its inner."""

    name: str
    alive: tuple[str, ...]


class _Inner(toy.SymbolLayer):
    """A layer that saves its input and an inner activation, as a GELU between two products."""

    def __init__(self, unit: int, symbols: Any, seen: Any, made: list[Any]):
        super().__init__(unit, toy.VECTOR, symbols, seen)
        self._number, self._made = unit, made

    def forward(self, w: Any, x: Any, arena: Any) -> tuple[Any, Any]:
        """Return a copy of x; save x and another copy."""
        inner = arena.take(x.shape, x.dtype)
        inner[...] = x
        self._made[2 * self._number] = weakref.ref(x)
        self._made[2 * self._number + 1] = weakref.ref(inner)
        y, _ = super().forward(w, x, arena)
        return y, (x, inner)

    def backward_input(self, w: Any, dy: Any, saved: Any, arena: Any) -> tuple[Any, Any]:
        """Return a copy of dy; the saved state ends with the return."""
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
    trainer.step(0, *trainer.replication.rows.batch(toy.SymbolSource(symbols), 0))
    return passes


def record(name: str, setting: TopicSetting) -> Explanation:
    """Record a step for each value of memory.recompute."""
    runs = {way: run_ranks(1, _run, way)[0] for way in WAYS}
    longest = max(map(len, runs.values()))
    frames = [Frame(sentence("start"), tuple(("",) * (2 * len(UNITS) + 1) for _ in WAYS))]
    for at in range(longest):
        cells = [
            (passes[at].name, *passes[at].alive)
            if at < len(passes)
            else ("",) * (2 * len(UNITS) + 1)
            for passes in runs.values()
        ]
        frames.append(Frame(sentence("after pass {k}", k=at + 1), tuple(cells)))
    count = len(UNITS)
    formulas = []
    for way, size in WAYS.items():
        peak = max(sum(map(bool, entry.alive)) for entry in runs[way])
        words, value = ("2 L", 2 * count) if not size else (SEGMENTS, -(-(count - 1) // size) + 2)
        formulas.append(
            CountedFormula(
                sentence("most activations alive, memory.recompute {way}", way=way),
                peak,
                words,
                value,
            )
        )
    forwards = {way: sum(entry.name[0] == "F" for entry in passes) for way, passes in runs.items()}
    formulas.append(
        CountedFormula(
            sentence("forwards of units with recomputation"),
            forwards["unit"],
            "2 L - 1",
            2 * count - 1,
        )
    )
    return Explanation(
        name,
        TITLE,
        [
            sentence("The backward of a unit needs the activations that its forward saved."),
            sentence("With recomputation a segment of k units saves only its input."),
            sentence("Its backward first runs the forwards of the segment again."),
            sentence("The last unit is left out, because its backward follows at once."),
            sentence(
                "Memory falls, and up to a third more is computed: B takes twice the time of F."
            ),
        ],
        sentence(
            "A.x: input of unit A; A.h: its inner activation; x0: alive; - or empty: freed or not yet made. F, B: passes."
        ),
        [sentence("recompute {way}", way=way) for way in WAYS],
        [
            Columns(sentence("now"), ("pass",)),
            Columns(sentence("activations"), tuple(f"{u}.{kind}" for u in UNITS for kind in "xh")),
        ],
        frames,
        formulas,
        [SourceLines.of(with_recomputation), SourceLines.of(Stage)],
        "mpitrain train --set memory.recompute=unit",
        ("tests/laws/layers.py",),
    )


TITLE: Text = sentence("Recomputation: activations are freed, and computed again")
