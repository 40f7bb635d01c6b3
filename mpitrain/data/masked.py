"""Masked tokens (Devlin et al. 2018): a model predicts some tokens of a row from all others.

B rows, T tokens of a row.
"""

import json
from collections.abc import Iterable, Sequence

import numpy as np

from mpitrain.config import Data
from mpitrain.data.rows import positions
from mpitrain.data.source import DOCUMENT_END, IGNORED, Form, Request, Source
from mpitrain.data.table import open_request
from mpitrain.data.tokenizer import BYTES_FILE, MASK, open_tokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
"""Names of tokens that are never hidden, beside those that a tokenizer calls special."""
MASKS = (MASK, "<mask>")
"""Usual names of the mask token."""
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


def masked(
    request: Request, data: Data, tokenizer: bytes | None, mask_name: str = ""
) -> MaskedSource:
    """Open a token source, and hide tokens of it.

    tokenizer  the content of a tokenizer.json; None: tokens are numbers, and none is special
    mask_name  the name of the mask token; empty, or of no token: it has a usual name
    """
    special, mask = set[int](), None
    if tokenizer not in (None, BYTES_FILE):
        named = open_tokenizer(tokenizer, "The tokenizer of the data").named
        masks = [token for name in (mask_name, *MASKS) if (token := named(name)) is not None]
        mask = masks[0] if masks else None
        special = {*masks[:1], *(token for name in SPECIAL if (token := named(name)) is not None)}
        special |= _added(tokenizer)
    added = 1 if mask is None and data.vocabulary else 0
    source = open_request(request._replace(vocabulary=data.vocabulary - added))
    return MaskedSource(source, data.mask, mask, sorted(special))


def _added(tokenizer: bytes) -> set[int]:
    """Return the tokens that a tokenizer.json calls special."""
    return {one["id"] for one in json.loads(tokenizer)["added_tokens"] if one.get("special")}
