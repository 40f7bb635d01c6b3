"""Token sources: windows of a flat array of tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpitrain.data.source import Form, Request, Scan
from mpitrain.data.token_files import TENTH, largest_token, pydocs, text, tokens_of
from mpitrain.errors import DataError

BYTES = 256
"""The vocabulary of text: its tokens are its bytes."""


class TokenSource:
    """A token data source: windows of T tokens, drawn from a flat array.

    inputs are (B, T) int64; targets are the same windows, one token later.

    tokens      1-D, all of them; those held out included, unless `validation` has them
    name        of the source, for messages
    scan        the scan of a tokens:FILE, or None
    validation  the held-out tokens and their name; None holds out the last tenth of `tokens`
    raises      DataError if training or held-out tokens are shorter than a window
    """

    form: Form = "tokens"

    def __init__(
        self,
        tokens: np.ndarray,
        vocabulary: int,
        context: int,
        name: str,
        scan: Scan | None = None,
        validation: tuple[np.ndarray, str] | None = None,
    ):
        self.inputs = self.classes = vocabulary
        self.shape: tuple[int, ...] = (context,)
        self.scan = scan
        self._context = context
        cut = len(tokens) - (0 if validation else len(tokens) // 10)
        self._train, self._test = tokens[:cut], validation[0] if validation else tokens[cut:]
        self.tokens, self.held_out_tokens = len(self._train), len(self._test)
        self.held_out = (len(self._test) - 1) // context
        if validation and min(self.tokens, self.held_out_tokens) <= context:
            raise DataError(
                f"A row is {context + 1} tokens, but {name} has {self.tokens} tokens and {validation[1]} {self.held_out_tokens}.",
                "Lower model.context, use longer files, or hold out the last tenth with data.validation=tenth.",
            )
        if self.held_out < 1:
            raise DataError(
                f"The held-out tenth of {name} must hold a context of {context} tokens and one more, but the source has "
                f"{len(tokens)} tokens in all.",
                f"Use at least {10 * (context + 1)} tokens, or lower model.context.",
            )

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        starts = np.random.default_rng([seed, step]).integers(
            len(self._train) - self._context, size=size
        )
        return self._windows(self._train, starts[rows.start : rows.stop])

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return self._windows(self._test, np.asarray(rows, np.int64) * self._context)

    def _windows(self, tokens: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        windows = tokens[starts[:, None] + np.arange(self._context + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


def open_pydocs(request: Request) -> TokenSource:
    """Open CPython's documentation topics."""
    return TokenSource(pydocs(), BYTES, request.context, "pydocs")


def open_text(request: Request) -> TokenSource:
    """Open a text file, the bytes of which are tokens."""
    return TokenSource(text(Path(request.place)), BYTES, request.context, request.place)


def open_tokens(request: Request) -> TokenSource:
    """Open a file of uint16 tokens that was scanned, and the file of its held-out tokens."""
    place, vocabulary, scan = request.place, request.vocabulary, request.scan
    assert scan is not None
    other, most = "", -1
    if request.validation not in ("", TENTH):
        other = request.validation.partition(":")[2]
        most = largest_token(request.validation, 0, 1)
    for path, largest, way in (
        (place, scan.largest, "train on other tokens"),
        (other, most, "name other tokens with data.validation"),
    ):
        if 0 < vocabulary <= largest:
            raise DataError(
                f"{path} holds token {largest}, so data.vocabulary must be at least {largest + 1}, but is {vocabulary}.",
                f"Leave out data.vocabulary, or {way}.",
            )
    return TokenSource(
        tokens_of(Path(place)),
        vocabulary or max(most, scan.largest) + 1,
        request.context,
        place,
        scan,
        (tokens_of(Path(other)), other) if other else None,
    )
