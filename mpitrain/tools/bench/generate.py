"""Three ways to write the most likely tokens, for `compare --generate`: by a key-value cache, by whole
windows, and by the package transformers.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from mpitrain.config import Model
from mpitrain.machine.process import blas_threads
from mpitrain.run.generate import Sampling, last_document, separator_of, texts
from mpitrain.run.inference import reader
from mpitrain.run.trainer import Trainer
from mpitrain.tools.bench.turns import Row, measured

GREEDY = Sampling(0, 0, 1)
SEED = 0


class GenerationSide(Protocol):
    """One way to write tokens. `write` is collective."""

    name: str

    def write(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the `count` most likely tokens after each prompt, one by one."""


class Cached:
    """Text generation with a key-value cache, as `mpitrain generate` does it."""

    def __init__(self, trainer: Trainer, name: str = "mpitrain"):
        self._trainer, self.name = trainer, name

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


class WritingSide:
    """A side that writes all tokens in each of its turns.

    first  the side whose tokens are the right ones; None: this one
    """

    def __init__(
        self,
        writer: GenerationSide,
        prompts: Sequence[Sequence[int]],
        count: int,
        first: "WritingSide | None" = None,
    ):
        self._writer, self._prompts, self._count, self._first = writer, prompts, count, first
        self.tokens: list[list[int]] = []

    def turn(self, block: int) -> float:
        began = time.perf_counter()
        self.tokens = self._writer.write(self._prompts, self._count)
        return time.perf_counter() - began

    def row(self) -> Row:
        right = self._first.tokens if self._first else self.tokens
        return Row(
            self._writer.name,
            samples=len(self._prompts),
            tokens=self._count * len(self._prompts),
            same=sum(map(_common_prefix_length, self.tokens, right)),
        )


def measure(
    sides: Sequence[GenerationSide], prompts: Sequence[Sequence[int]], count: int, blocks: int
) -> list[Row]:
    """Measure all sides in turns, after one turn that does not count. Each turn writes all tokens."""
    first = WritingSide(sides[0], prompts, count)
    others = [WritingSide(side, prompts, count, first) for side in sides[1:]]
    return [*measured([first, *others], blocks, 1)]


def _common_prefix_length(tokens: Sequence[int], others: Sequence[int]) -> int:
    differs = np.flatnonzero(np.array(tokens) != np.array(others))
    return int(differs[0]) if len(differs) else len(tokens)
