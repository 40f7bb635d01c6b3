"""Sides of `bench generate`: the most likely tokens, by a cache, by whole windows, or by a peer."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.run.generate import Sampling, last_document, separator_of, texts
from mpitrain.run.trainer import Trainer

GREEDY = Sampling(0, 0, 1)
SEED = 0


class GenerationSide(Protocol):
    """One way to write the same tokens; `write` is collective."""

    name: str

    def write(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the `count` most likely tokens after each prompt, one by one."""


class Cached:
    """Text generation as `mpitrain generate` does it."""

    name = "mpitrain"

    def __init__(self, trainer: Trainer):
        self._trainer = trainer

    def write(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in prompts]
        for together in texts(self._trainer, prompts, GREEDY, SEED, count):
            for index, token in together:
                tokens[index].append(token)
        return tokens


class WholeWindows:
    """Text generation without a cache: each token from a forward over the tokens before it."""

    name = "whole windows"

    def __init__(self, trainer: Trainer):
        self._context = trainer.config.model.context
        self._separator = separator_of(trainer.config.data)
        self._reader = trainer.reader(1, self._context).without_cache()

    def write(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        windows = [[*prompt] for prompt in prompts]
        for _ in range(count):
            seen = [last_document(window, self._separator) for window in windows]
            logits = self._reader.read(seen, self._context)
            assert logits is not None
            for window, row in zip(windows, logits, strict=True):
                window.append(int(row.argmax()))
        return [window[len(prompt) :] for window, prompt in zip(windows, prompts, strict=True)]


class GenerationRow(NamedTuple):
    """A line of the table.

    seconds  median over the turns, of all tokens
    ratio    its seconds relative to those of the first side
    same     tokens that equal those of the first side, before the first other one of each prompt
    """

    side: str
    tokens: int
    seconds: float
    least_seconds: float
    tokens_per_s: float
    ratio: float
    same: int


def measure(
    sides: Sequence[GenerationSide], prompts: Sequence[Sequence[int]], count: int, turns: int
) -> list[GenerationRow]:
    """Measure all sides in turns; every turn writes all tokens. A first turn is not measured."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    written: dict[str, Any] = {}
    for turn in range(turns + 1):
        for side in sides:
            began = time.perf_counter()
            written[side.name] = side.write(prompts, count)
            if turn:
                seconds[side.name].append(time.perf_counter() - began)
    first, total = sides[0].name, count * len(prompts)
    return [
        GenerationRow(
            name,
            total,
            median(taken),
            min(taken),
            total / median(taken),
            median(taken) / median(seconds[first]),
            sum(map(_common_prefix_length, written[name], written[first])),
        )
        for name, taken in seconds.items()
    ]


def _common_prefix_length(tokens: Sequence[int], others: Sequence[int]) -> int:
    differs = np.flatnonzero(np.array(tokens) != np.array(others))
    return int(differs[0]) if len(differs) else len(tokens)


def table(rows: Sequence[GenerationRow]) -> list[str]:
    head = f"{'side':<15} {'tokens':>7} {'s':>9} {'least s':>9} {'tokens/s':>10} {'ratio':>8} {'#same':>7}"
    return [
        head,
        *(
            f"{row.side:<15} {row.tokens:7,} {row.seconds:9.3f} {row.least_seconds:9.3f} "
            f"{row.tokens_per_s:10,.0f} {row.ratio:8.2f} {row.same:7,}"
            for row in rows
        ),
    ]
