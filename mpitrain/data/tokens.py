"""Token sources: windows of a flat sequence of tokens, and weighted mixtures of such sources."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.data.rows import EpochOrder, positions
from mpitrain.data.source import DOCUMENT_END, IGNORED, Form, Reading, Request, Scan
from mpitrain.data.token_files import (
    ArrayTokens,
    FlatTokens,
    bytes_per_token,
    largest_token,
    prepared,
    pydocs,
    template_of,
    text,
    token_paths,
    tokens_of,
    windows,
)
from mpitrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mpitrain.data.instructions import InstructionSource

BYTES = 256
"""The vocabulary of text: its tokens are its bytes."""
DRAW = 1
"""A third seed of the draws of a mixture's sources, so that they differ from the draws of windows."""


class TokenSource:
    """A token data source: windows of T tokens, drawn from a flat sequence.

    inputs are (B, T) int64; targets are the same windows, one token later. With a separator, a
    window ends with its first document: later targets are IGNORED, later inputs are separators.
    With data.attend=document, it goes on, and DOCUMENT_END marks the ends of documents.

    tokens           the tokens to train on; without `validation` also those to hold out
    name             of the source, for messages
    scan             the scan of a tokens:FILE, or None
    validation       the held-out tokens and their name; None holds out the last tenth of `tokens`
    reading          order of the windows, separator, and attend
    bytes_per_token  bytes of text per held-out token; 0: unknown
    raises           DataError if training or held-out tokens are shorter than a window, or if the
                     separator is outside of the vocabulary
    """

    form: Form = "tokens"

    def __init__(
        self,
        tokens: FlatTokens | np.ndarray,
        vocabulary: int,
        context: int,
        name: str,
        scan: Scan | None = None,
        validation: tuple[FlatTokens, str] | None = None,
        reading: Reading = Reading(),  # noqa: B008  a constant
        bytes_per_token: float = 0.0,
    ):
        self.bytes_per_token = bytes_per_token
        tokens = ArrayTokens(tokens) if isinstance(tokens, np.ndarray) else tokens
        self.inputs = self.classes = vocabulary
        self.shape: tuple[int, ...] = (context,)
        self.scan = scan
        self._context, self._separator = context, reading.separator
        self._marks_ends = reading.attend == "document"
        cut = len(tokens) - (0 if validation else len(tokens) // 10)
        self._train = tokens.region(0, cut)
        self._test = validation[0] if validation else tokens.region(cut, len(tokens))
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
        if reading.separator >= vocabulary:
            raise DataError(
                f"data.separator must be a token below {vocabulary}, but is {reading.separator}.",
                "Name the token that ends a document, or leave the key out.",
            )
        self.amounts = {
            "tokens": self.tokens,
            "held_out_tokens": self.held_out_tokens,
            "vocabulary": vocabulary,
        }
        is_ordered = reading.order == "epochs"
        self._order = EpochOrder((self.tokens - 1) // context) if is_ordered else None

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._order:
            chosen = self._order.chosen(seed, positions(step, size, rows, before))
            return self._windows(self._train, chosen * self._context)
        return self.drawn(seed, step, size, np.arange(rows.start, rows.stop))

    def drawn(
        self, seed: int, step: int, size: int, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return some of a step's random windows, as `batch` does.

        rows  (B,) int64, the numbers of the windows in the global batch
        """
        starts = np.random.default_rng([seed, step]).integers(
            self.tokens - self._context, size=size
        )
        return self._windows(self._train, starts[rows])

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return self._windows(self._test, np.asarray(rows, np.int64) * self._context)

    def _windows(self, tokens: FlatTokens, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = windows(tokens, starts, self._context + 1)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self._separator < 0:
            return inputs, targets
        if self._marks_ends:
            return inputs, np.where(inputs == self._separator, DOCUMENT_END, targets)
        is_after = np.logical_or.accumulate(inputs == self._separator, axis=1)
        return np.where(is_after, self._separator, inputs), np.where(is_after, IGNORED, targets)


class MixtureSource:
    """A data source that draws each row from one of several token sources.

    A row comes from a source with probability weight / sum of weights, in every layout from the
    same one. The held-out rows are those of all sources, one source after the other.

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
        self.amounts = {
            "tokens": self.tokens,
            "held_out_tokens": self.held_out_tokens,
            "vocabulary": self.inputs,
        }
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
        """Read each row from its source, and return the rows in their order.

        chosen  (B,), the number of the source of each row
        read    (source, mask of its rows) -> inputs and targets of these rows
        """
        inputs, targets = np.empty((2, len(chosen), *self.shape), np.int64)
        for number, source in enumerate(self._sources):
            mask = chosen == number
            if mask.any():
                inputs[mask], targets[mask] = read(source, mask)
        return inputs, targets


def open_pydocs(request: Request) -> TokenSource:
    return _of_bytes(ArrayTokens(pydocs()), "pydocs", request, None)


def open_text(request: Request) -> TokenSource:
    """Open a text file, whose bytes are tokens, and the file of held-out text if there is one."""
    path = request.other
    held_out = (text(Path(path)), path) if path else None
    return _of_bytes(text(Path(request.place)), request.place, request, held_out)


def _of_bytes(
    tokens: FlatTokens, name: str, request: Request, held_out: tuple[FlatTokens, str] | None
) -> TokenSource:
    return TokenSource(
        tokens,
        max(BYTES, request.vocabulary),
        request.context,
        name,
        validation=held_out,
        reading=request.reading,
        bytes_per_token=1.0,
    )


def open_tokens(request: Request) -> "TokenSource | InstructionSource":
    """Open files of tokens, which have been scanned, and the held-out file if there is one."""
    place, vocabulary, scan = request.place, request.vocabulary, request.scan
    dtype = request.reading.dtype
    assert scan is not None
    held_out = request.other
    most = largest_token(request.validation, 0, 1, dtype) if held_out else -1
    for path, largest, way_out in (
        (place, scan.largest, "train on other tokens"),
        (held_out, most, "name other tokens with data.validation"),
    ):
        if 0 < vocabulary <= largest:
            raise DataError(
                f"{path} holds token {largest}, so data.vocabulary must be at least {largest + 1}, but is {vocabulary}.",
                f"Leave out data.vocabulary, or {way_out}.",
            )
    noted = [facts.vocabulary for path in token_paths(place) if (facts := prepared(path))]
    entries = vocabulary or max(most + 1, scan.largest + 1, *noted)
    if template := template_of(place):
        from mpitrain.data.instructions import open_prepared

        return open_prepared(request, entries, template)
    for key in ("template", "packing"):
        if getattr(request.reading, key) != Reading._field_defaults[key]:
            raise ConfigError(
                f"data.{key} is of conversations, but {place} has none.", f"Leave out data.{key}."
            )
    return TokenSource(
        tokens_of(place, dtype),
        entries,
        request.context,
        place,
        scan,
        (tokens_of(held_out, dtype), held_out) if held_out else None,
        request.reading,
        bytes_per_token(token_paths(held_out or place)),
    )
