"""Readers of token windows: the logits after each window, with a key-value cache if possible."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.pipeline.decoder import Decoder


class Reader:
    """Reader of windows of tokens, one window for each sequence of a replica.

    A decoder caches keys and values. Without one, each window is read as a whole at each call. That
    happens for models with a caller's layer that cannot compute only new tokens.
    """

    def __init__(
        self,
        decoder: Decoder | None,
        logits: Callable[[np.ndarray], Any],
        row: Callable[[Any, int], np.ndarray],
    ):
        """Bind the functions of a trainer.

        logits  (tokens (1, T)) -> the output of the model on the last stage, else None
        row     (output, token) -> (rows, V) float64 in host memory
        """
        self._decoder, self._logits, self._row = decoder, logits, row

    @property
    def caches(self) -> bool:
        """Whether there is a key-value cache."""
        return self._decoder is not None

    def without_cache(self) -> "Reader":
        """Return a reader of the same model that reads whole windows."""
        return Reader(None, self._logits, self._row)

    def read(self, windows: Sequence[Sequence[int]], context: int) -> np.ndarray | None:
        """Return the logits after the last token of each window, (sequences, V) float64.

        None on all stages but the last. Collective over the ranks of a replica.
        """
        if self._decoder:
            logits = self._decoder.read(windows)
            return None if logits is None else self._row(logits, 0)
        rows = [self._last(window, context) for window in windows]
        return None if rows[0] is None else np.concatenate(rows)

    def _last(self, window: Sequence[int], context: int) -> Any:
        # The causal mask hides the padding on the right. Widths are powers of two: few different
        # shapes need few buffers in the arena.
        width = min(context, max(16, 1 << (len(window) - 1).bit_length()))
        tokens = np.zeros((1, width), np.int64)
        tokens[0, : len(window)] = window
        logits = self._logits(tokens)
        return None if logits is None else self._row(logits, len(window) - 1)
