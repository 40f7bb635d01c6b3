"""Masked tokens (Devlin et al. 2018): a model predicts some tokens of a row from all others.

B rows, T tokens of a row.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mpitrain.config import Data
from mpitrain.data.rows import positions
from mpitrain.data.source import DOCUMENT_END, IGNORED, Form, Source
from mpitrain.data.table import tokenizer_of
from mpitrain.data.tokenizer import BYTES_FILE, MASK, open_tokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", MASK)
"""Names of tokens that are never hidden."""
SHOWN = 0.8, 0.9
"""Of the chosen tokens, this part becomes the mask token, and the part up to here another token."""
DRAW = 2
"""A third seed of the draws, so that they differ from those of windows and of mixtures."""


class MaskedSource:
    """A token source of which some tokens are hidden: the targets are these tokens.

    Each token is chosen with probability `rate`. Of the chosen tokens 80% become the mask token, 10%
    any token and 10% stay. All other targets are IGNORED. The draws depend on the seed and on the
    position of a row among all rows since step 0, for held-out rows on their number alone.

    source   its targets tell the ends of documents, and what does not count
    mask     the mask token; one behind the tokens of the source is added to them
    special  tokens that are never chosen
    """

    form: Form = "tokens"

    def __init__(self, source: Source, rate: float, mask: int | None, special: Iterable[int] = ()):
        self._source, self._rate = source, rate
        self._mask = source.inputs if mask is None else mask
        self._special = np.array([*special], np.int64)
        self.inputs = self.classes = max(source.inputs, self._mask + 1)
        self.shape, self.held_out = source.shape, source.held_out
        known = getattr(source, "amounts", {})
        self.amounts = {**known, "vocabulary": self.inputs} if known else {}

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = self._source.batch(seed, step, size, rows, before)
        return self._hidden(
            inputs, targets, [(seed, row, DRAW) for row in positions(step, size, rows, before)]
        )

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = self._source.held_out_rows(rows)
        return self._hidden(inputs, targets, [(row, DRAW) for row in rows])

    def _hidden(
        self, inputs: np.ndarray, targets: np.ndarray, seeds: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs (B, T) with hidden tokens, and their targets.    seeds: of each row"""
        draws = np.empty((2, *inputs.shape))
        others = np.empty(inputs.shape, np.int64)
        for row, seed in enumerate(seeds):
            generator = np.random.default_rng(seed)
            draws[:, row] = generator.random((2, inputs.shape[1]))
            others[row] = generator.integers(self.inputs, size=inputs.shape[1])
        ends = targets == DOCUMENT_END
        does_count = ~ends & (targets != IGNORED) & ~np.isin(inputs, self._special)
        chosen = does_count & (draws[0] < self._rate)
        shown = np.where(draws[1] < SHOWN[0], self._mask, inputs)
        shown = np.where((draws[1] >= SHOWN[0]) & (draws[1] < SHOWN[1]), others, shown)
        # The input at the end of a document stays, as does the mark in its target.
        hidden = np.where(chosen, inputs, np.where(ends, DOCUMENT_END, IGNORED))
        return np.where(chosen, shown, inputs), hidden


def masked(opened: Callable[[int], Source], data: Data) -> MaskedSource:
    """Open a token source, and hide tokens of it.

    opened  makes the source, from data.vocabulary
    """
    content = tokenizer_of(data.mixture or [data.source], data.tokenizer)
    special: dict[str, int | None] = {}
    if content not in (None, BYTES_FILE):
        tokenizer = open_tokenizer(content, "The tokenizer of the data")
        special = {name: tokenizer.named(name) for name in SPECIAL}
    mask = special.get(MASK)
    added = 1 if mask is None and data.vocabulary else 0
    kept = [token for token in special.values() if token is not None]
    return MaskedSource(opened(data.vocabulary - added), data.mask, mask, kept)
