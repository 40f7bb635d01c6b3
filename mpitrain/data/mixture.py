"""A weighted mixture of token sources: each row of a batch comes from a drawn source."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from mpitrain.data.source import Form
from mpitrain.data.tokens import TokenSource

DRAW = 1
"""Separates the random numbers that draw a source from those that draw a window."""


class MixtureSource:
    """A data source that draws each row from one of several token sources, in any layout the same.

    A row comes from a source with probability weight / sum of weights. The held-out rows are those
    of all sources, one source after the other.

    members     {name: (source, weight)}
    vocabulary  at least that of each source; 0: the largest of these
    """

    form: Form = "tokens"

    def __init__(self, members: Mapping[str, tuple[TokenSource, float]], vocabulary: int = 0):
        self._sources = [source for source, _ in members.values()]
        weights = np.array([weight for _, weight in members.values()])
        self._bounds = np.cumsum(weights)[:-1] / weights.sum()
        self.inputs = self.classes = max(vocabulary, *(source.inputs for source in self._sources))
        self.shape = self._sources[0].shape
        self.tokens = sum(source.tokens for source in self._sources)
        self.held_out_tokens = sum(source.held_out_tokens for source in self._sources)
        self._firsts = [0, *accumulate(source.held_out for source in self._sources)]
        self.held_out = self._firsts[-1]
        ratios = [source.bytes_per_token for source in self._sources]
        known = sum(s.held_out * ratio for s, ratio in zip(self._sources, ratios, strict=True))
        self.bytes_per_token = known / self.held_out if all(ratios) else 0.0

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        draws = np.random.default_rng([seed, step, DRAW]).random(size)[rows.start : rows.stop]
        numbers = np.arange(rows.start, rows.stop)
        return self._joined(
            np.searchsorted(self._bounds, draws, side="right"),
            lambda source, mask: source.drawn(seed, step, size, numbers[mask]),
        )

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.asarray(rows, np.int64)
        chosen = np.searchsorted(self._firsts[1:], numbers, side="right")
        local = numbers - np.asarray(self._firsts)[chosen]
        return self._joined(chosen, lambda source, mask: source.held_out_rows(local[mask].tolist()))

    def _joined(
        self,
        chosen: np.ndarray,
        read: Callable[[TokenSource, np.ndarray], tuple[np.ndarray, np.ndarray]],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows in their order.

        chosen  (B,), the number of the source of each row
        read    (source, mask of its rows) -> inputs and targets of these rows
        """
        inputs, targets = np.empty((2, len(chosen), *self.shape), np.int64)
        for number, source in enumerate(self._sources):
            mask = chosen == number
            if mask.any():
                inputs[mask], targets[mask] = read(source, mask)
        return inputs, targets
