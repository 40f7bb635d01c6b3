"""A source of random tokens, some targets of which do not count, and what PyTorch trains on it."""

import numpy as np

from mpitrain.data import IGNORED, Reading, Request
from mpitrain.data.instructions import BEGINS, COUNTS, Conversations, InstructionSource
from mpitrain.data.token_files import ArrayTokens

V, T = 11, 4


class MaskedTokens:
    """Rows of tokens with ragged masks; in the steps of `empty` no target of the batch counts.

    Row 0 of a batch never counts, row 1 always does; in the others each target is drawn.
    """

    form, shape, inputs, classes, held_out = "tokens", (T,), V, V, 7

    def __init__(self, empty=()):
        self._empty = empty

    def batch(self, seed, step, size, rows, before=None):
        rng = np.random.default_rng([seed, step])
        inputs, targets = rng.integers(V, size=(2, size, T))
        is_masked = rng.random((size, T)) < 0.6
        is_masked[:2] = [[True], [False]]
        targets[is_masked | (step in self._empty)] = IGNORED
        return inputs[rows.start : rows.stop], targets[rows.start : rows.stop]

    def held_out_rows(self, rows):
        inputs, targets = self.batch(9, 0, self.held_out, range(self.held_out))
        return inputs[list(rows)], targets[list(rows)]


def packed():
    """Conversations in tokens, packed into rows of 24; the first and some others have no answer."""
    rng = np.random.default_rng(5)
    tokens, marks = rng.integers(V, size=400).astype(np.uint8), np.zeros(400, np.uint8)
    starts = np.append(0, np.sort(rng.choice(np.arange(15, 400), 40, replace=False)))
    for start, stop in zip(starts, [*starts[1:], 400], strict=True):
        marks[(start + stop) // 2 : stop] = COUNTS * (start % 3 > 0)
        marks[start] |= BEGINS
    reading = Reading()._replace(packing=True)
    request = Request("jsonl:none", 24, "float64", V, "", None, reading)
    return InstructionSource(Conversations(ArrayTokens(tokens), marks), V, request, "")


MASKED = [
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    f"model.context={T}",
    "batch.size=7",
    "run.steps=3",
    "precision.compute=float64",
    "optimizer.name=sgd",
    "optimizer.weight_decay=0.0",
    "optimizer.warmup=0",
    "optimizer.lr=0.5",
    "optimizer.clip=0.7",
]
"""Settings of a small GPT in float64; clipping is at work in each of its steps."""
