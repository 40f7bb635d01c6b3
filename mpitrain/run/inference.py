"""Rows of a model: checks of tokens and targets, places of tokens, and readers for generation."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpitrain.config import Run
from mpitrain.data import IGNORED, Source, Targets, positions_of
from mpitrain.errors import DataError, TrainingError
from mpitrain.layers.base import Places
from mpitrain.layers.plain import Plain
from mpitrain.transport.base import Transport

if TYPE_CHECKING:
    from mpitrain.pipeline.decoder import Decoder

Shape = tuple[int, ...]
_WAYS_OUT = {
    "tokens": "Pass tokens of the model's vocabulary, or build the model with a larger one.",
    "targets": f"Pass the number of the right class, or {IGNORED} for a prediction that does not count.",
}


def places_of(
    layers: Plain,
    shape: Shape,
    starts: np.ndarray | None,
    placed: Callable[[np.ndarray], Any],
    types: np.ndarray | None = None,
) -> Places | None:
    """Return the places of the tokens of some rows.

    layers  the factory of the model's layers; this rank has its `tokens`
    shape   (B, T) of the rows
    starts  from `Trainer`; padding to the right is a document of its own
    placed  copies an array to the backend's memory
    types   of tokens, from `Trainer`, in the shape of `starts`
    """
    share = layers.tokens
    if starts is None:
        if share.ranks == 1:
            return None
        own = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        firsts = _firsts(layers, np.zeros(shape, np.int32), layers.windows - {0}, placed)
        return Places(None, None, placed(share.cut(own)), firsts=firsts)
    if starts.shape != shape:
        rows, tokens = starts.shape
        starts = np.pad(starts, ((0, shape[0] - rows), (0, 0)))
        starts = np.pad(starts, ((0, 0), (0, shape[1] - tokens)), constant_values=tokens)
    positions = positions_of(starts)
    whole = placed(positions)
    own = whole if share.ranks == 1 else placed(share.cut(positions))
    firsts = _firsts(layers, starts, layers.windows, placed)
    seen = None if share.is_ring else placed(starts)
    return Places(seen, whole, own, None if types is None else placed(types), firsts)


def _firsts(
    layers: Plain, starts: np.ndarray, windows: Iterable[int], placed: Callable[[np.ndarray], Any]
) -> dict[int, list[Any]]:
    """Return `Places.firsts` for these windows: empty without a ring."""
    share = layers.tokens
    return {
        window: [placed(each) for each in share.firsts(starts, window)]
        for window in windows
        if share.is_ring
    }


def evaluated_rows(run: Run, source: Source) -> int:
    return min(source.held_out, run.eval_rows or source.held_out)


def diverged() -> TrainingError:
    """Return the error that every rank raises for logits that are not finite."""
    return TrainingError(
        "The model's output is not finite: its training has diverged.",
        "Train again with a lower optimizer.lr.",
    ).on_every_rank()


class Indices:
    """The range checks of one model's tokens and targets.

    A check costs two passes over integers in host memory, and no message.

    vocabulary  number of tokens that the model takes; 0: its inputs are features
    takes       the targets of the loss; None: it is no row of LOSSES, and targets are not checked
    stored      the dtype of targets that are numbers
    """

    def __init__(
        self, transport: Transport, vocabulary: int, takes: Targets | None, stored: np.dtype
    ):
        self._transport, self.vocabulary = transport, vocabulary
        self.takes, self._stored = takes, stored
        # The first call of `targets` sets these for its shape of inputs.
        self._inputs: Shape = ()
        self._predictions: list[int] = []
        self._classes = 0

    def tokens(self, inputs: np.ndarray, where: str) -> np.ndarray:
        """Return the inputs, tokens as int32 or int64; features are not checked."""
        return self._known(inputs, self.vocabulary, "tokens", where) if self.vocabulary else inputs

    def rows(self, inputs: np.ndarray, share: range, where: str) -> None:
        """Refuse more rows than this rank's share of the global batch: the loss is divided by batch.size."""
        if len(inputs) <= len(share):
            return
        self._end(
            DataError(
                f"A rank computes at most its share of batch.size rows, {len(share)}, but "
                f"{self._on(where)} has {len(inputs)}.",
                "Pass the rows trainer.share() of the global batch.",
            )
        )

    def targets(
        self, targets: np.ndarray, inputs: Shape, output: Callable[[Shape], Shape], where: str
    ) -> np.ndarray:
        """Return the targets as int32 or int64, one for each prediction; or as numbers (rows, outputs).

        output  maps the shape of the inputs to the shape of the whole logits
        """
        if self.takes is None:
            return targets
        if inputs != self._inputs:
            *self._predictions, self._classes = output(inputs)
            self._inputs = inputs
        if self.takes != "classes":
            return self._numbers(targets, where)
        if targets.shape != (predictions := tuple(self._predictions)) and (
            inputs[0] or targets.size
        ):
            self._end(
                DataError(
                    f"Targets must have the shape {predictions}, one for each prediction, but those of "
                    f"{self._on(where)} have {targets.shape}.",
                    "Pass the number of the right class for each prediction.",
                )
            )
        return self._known(targets, self._classes, "targets", where)

    def _numbers(self, targets: np.ndarray, where: str) -> np.ndarray:
        shape = (self._predictions[0], self._classes)
        is_whole = targets.shape[:1] == shape[:1] and targets.size == math.prod(shape)
        if targets.dtype.kind != "f" or not is_whole:
            self._end(
                DataError(
                    f"Targets must be floats, {shape[1]} for each of {shape[0]} rows, but those of {self._on(where)} are "
                    f"{targets.dtype} of shape {targets.shape}.",
                    "Pass a float for each output of the model.",
                )
            )
        return np.ascontiguousarray(targets.reshape(shape), self._stored)

    def ignored(self, targets: np.ndarray) -> int:
        if self.takes is None:
            return 0
        is_ignored = targets == IGNORED if self.takes == "classes" else np.isnan(targets)
        return int(np.count_nonzero(is_ignored))

    def _known(self, array: np.ndarray, count: int, what: str, where: str) -> np.ndarray:
        """Check the array; abort the job on an error, since only this rank sees its rows."""
        try:
            return known(array, count, what, self._on(where))
        except DataError as error:
            self._end(error)

    def _on(self, where: str) -> str:
        rank = self._transport.rank
        return f"{where} on rank {rank} ({self._transport.hosts[rank]})"

    def _end(self, error: DataError) -> NoReturn:
        """Raise the error; with several ranks, abort the job first."""
        if self._transport.size == 1:
            raise error.on_every_rank() from None
        self._transport.abort(error.named())
        raise error


def known(array: np.ndarray, count: int, what: str, where: str) -> np.ndarray:
    """Return the array as int32 or int64; DataError unless all elements are in 0 .. count - 1.

    A target may also be IGNORED.

    what   "tokens" or "targets"
    where  the location of the array, for the message
    """
    if array.dtype.kind not in "iu":
        raise DataError(
            f"{what.capitalize()} must be integers, but those of {where} are {array.dtype}.",
            "Convert them, for example with array.astype(numpy.int64).",
        )
    if array.size and not (array.min() >= 0 and array.max() < count):
        is_wrong = (array < 0) | (array >= count)
        if what == "targets":
            is_wrong &= array != IGNORED
        if not is_wrong.any():
            return _wide(array)
        first = np.unravel_index(np.argmax(is_wrong), array.shape)
        raise DataError(
            f"{what.capitalize()} must lie in 0..{count - 1}, but {where} has {array[first]} at "
            f"[{', '.join(map(str, first))}].",
            _WAYS_OUT[what],
        )
    return _wide(array)


def _wide(array: np.ndarray) -> np.ndarray:
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)


class Reader:
    """Computes the next token's logits for several sequences of a replica.

    A window is the tokens of one sequence that the model reads. With a decoder, which caches keys
    and values, only new tokens are computed. Without one, each call reads whole windows: a layer of
    the caller may not be able to compute new tokens alone.
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

    def without_cache(self) -> Reader:
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
