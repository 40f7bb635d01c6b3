"""Three ways to write the most likely tokens, for `bench generate`: by a key-value cache, by whole
windows, and by the package transformers.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from mpitrain.config import Model
from mpitrain.machine.process import blas_threads
from mpitrain.run.generate import Sampling, last_document, separator_of, texts
from mpitrain.run.inference import reader
from mpitrain.run.trainer import Trainer
from mpitrain.tools.bench.turns import take_turns
from mpitrain.tools.text_table import TextColumn, TextTable

GREEDY = Sampling(0, 0, 1)
SEED = 0


class GenerationSide(Protocol):
    """One way to write tokens. `write` is collective."""

    name: str

    def write(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the `count` most likely tokens after each prompt, one by one."""


class Cached:
    """Text generation with a key-value cache, as `mpitrain generate` does it."""

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
    """Text generation without a cache: each token needs a forward pass over all tokens before it."""

    name = "whole windows"

    def __init__(self, trainer: Trainer):
        self._context = trainer.config.model.context
        self._separator = separator_of(trainer.config.data)
        self._reader = reader(trainer, 1, self._context).without_cache()

    def write(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        windows = [[*prompt] for prompt in prompts]
        for _ in range(count):
            seen = [last_document(window, self._separator) for window in windows]
            logits = self._reader.read(seen, self._context)
            assert logits is not None
            for window, row in zip(windows, logits, strict=True):
                window.append(int(row.argmax()))
        return [window[len(prompt) :] for window, prompt in zip(windows, prompts, strict=True)]


class Transformers:
    """Greedy text generation by `generate` of transformers."""

    name = "transformers"

    def __init__(self, model: Model, vocabulary: int, tensors: Mapping[str, np.ndarray]):
        """Copy our model into one of transformers.

        tensors  our parameters, whole, by their full names
        """
        import torch

        from mpitrain.tools.bench.hugging_face import copied

        torch.set_num_threads(blas_threads())
        self.model = copied(model, vocabulary, tensors).eval()

    def write(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The prompts have the same length."""
        import torch

        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            sequences = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        return sequences[:, tokens.shape[1] :].tolist()


class GenerationRow(NamedTuple):
    """A line of the table.

    seconds  to write all tokens, median over the turns
    ratio    `seconds` divided by those of the first side
    same     number of tokens that equal those of the first side. Of each prompt, only the tokens
             before the first different one count
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
    """Measure all sides in turns, after one turn that does not count. Each turn writes all tokens."""
    written: dict[str, list[list[int]]] = {}

    def turn(side: GenerationSide, block: int) -> float:
        began = time.perf_counter()
        written[side.name] = side.write(prompts, count)
        return time.perf_counter() - began

    times = [*take_turns([partial(turn, side) for side in sides], turns, 1)]
    first, total = sides[0].name, count * len(prompts)
    return [
        GenerationRow(
            side.name,
            total,
            median(taken),
            min(taken),
            total / median(taken),
            median(taken) / median(times[0]),
            sum(map(_common_prefix_length, written[side.name], written[first])),
        )
        for side, taken in zip(sides, times, strict=True)
    ]


def _common_prefix_length(tokens: Sequence[int], others: Sequence[int]) -> int:
    differs = np.flatnonzero(np.array(tokens) != np.array(others))
    return int(differs[0]) if len(differs) else len(tokens)


TABLE = TextTable(
    [
        TextColumn("side", "<15", "side"),
        TextColumn("tokens", "7,", "tokens"),
        TextColumn("s", "9.3f", "seconds"),
        TextColumn("least s", "9.3f", "least_seconds"),
        TextColumn("tokens/s", "10,.0f", "tokens_per_s"),
        TextColumn("ratio", "8.2f", "ratio"),
        TextColumn("#same", "7,", "same"),
    ]
)
