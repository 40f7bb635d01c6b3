"""Inference on a mesh of ranks: logits, evaluation, losses of rows, and readers for generation."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpitrain.config import Run
from mpitrain.data import (
    IGNORED,
    Source,
    Targets,
    positions_of,
    read_rows,
    without_ends,
    without_padding,
)
from mpitrain.errors import ConfigError, DataError, TrainingError
from mpitrain.layers.base import Loss, Places, Unit
from mpitrain.layers.chunked_logits import ChunkedLogits, computed, sliced
from mpitrain.layers.plain import Plain
from mpitrain.machine.arena import Arena
from mpitrain.parallel.grid import Grid, share
from mpitrain.parallel.replica import Replica
from mpitrain.parallel.tensor.context import all_tokens
from mpitrain.parallel.tensor.layer_factory import LayerFactory
from mpitrain.pipeline.pipeline import Pipeline
from mpitrain.regions import moved, overlap
from mpitrain.run.job import Job
from mpitrain.transport.base import Transport

if TYPE_CHECKING:
    from mpitrain.pipeline.decoder import Decoder

Shape = tuple[int, ...]
_WAYS_OUT = {
    "tokens": "Pass tokens of the model's vocabulary, or build the model with a larger one.",
    "targets": f"Pass the number of the right class, or {IGNORED} for a prediction that does not count.",
}


class Inference:
    """The model of a trainer, for logits, losses, evaluation and generation.

    All methods but `cut`, `places` and `placed` are collective.
    """

    def __init__(
        self,
        resolved: Job,
        grid: Grid,
        layers: LayerFactory,
        loss: Loss,
        pipe: Pipeline,
        replica: Replica,
        indices: Indices,
        decoded: tuple[Sequence[Sequence[Unit]], LayerFactory],
        arena: Arena,
        stored: np.dtype,
    ):
        """Take the parts of a trainer.

        decoded  all chunks of the model, of layers that compute new tokens, and their factory
        stored   the dtype of master parameters
        """
        self.config, self.backend, self.arena = resolved.config, resolved.device.backend, arena
        self.resolved, self.grid, self.pipe, self.replica = resolved, grid, pipe, replica
        self._layers, self._loss, self._indices, self._decoded = layers, loss, indices, decoded
        self._computed = resolved.device.half or stored

    def cut(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Any, ...]:
        """Return inputs without padding, targets without marks of document ends, `starts`, `types`.

        starts  (B, T) int32, the index in the row where each token's document begins; None unless
                rows are texts or data.attend is document
        types   (B, T) int32, the token types; None unless rows are texts
        """
        if self.config.data.attend == "document" and targets.ndim == 2:
            return inputs, *without_ends(targets), None
        inputs, *marks = self._texts(inputs)
        return inputs, targets, *marks

    def _texts(self, inputs: np.ndarray) -> tuple[Any, ...]:
        """Return inputs without padding, and `starts` and `types` as of `cut`."""
        if self._indices.vocabulary and inputs.ndim == len(self.logits_shape(inputs.shape)):
            return without_padding(inputs)
        return inputs, None, None

    def places(
        self, shape: Shape, given: Shape, starts: np.ndarray | None, types: np.ndarray | None = None
    ) -> Places | None:
        """Return the places of the tokens of rows.

        shape, given   of the rows, (B, T), with and without padding
        starts, types  from `cut`
        """
        if starts is None and shape[1:] != given[1:] and not self._is_causal:
            starts = np.zeros(given, np.int32)
        return places_of(self._layers, shape, starts, self.placed, types)

    def own(self, rows: np.ndarray, fill: int) -> np.ndarray:
        """Return this rank's tokens of rows (B, T), or of their targets.

        fill  the value after the ends of rows, if their tokens do not divide among the ranks
        """
        share = self._layers.now.tokens
        if share.ranks == 1:
            return rows
        missing = self._layers.filled(rows.shape)[1] - rows.shape[1]
        filled = np.pad(rows, ((0, 0), (0, missing)), constant_values=fill)
        return share.cut(filled)

    def placed(self, rows: np.ndarray) -> Any:
        """Copy rows to the device; features are rounded where activations are stored in 16 bits."""
        half = self.resolved.device.half
        return self.backend.from_host(
            rows.astype(half) if half and rows.dtype.kind == "f" else rows, self.arena
        )

    def logits(self, inputs: np.ndarray) -> np.ndarray | None:
        logits = self.infer(*self._texts(inputs))
        return (
            None if logits is None else self._layers.whole(computed(logits, self.arena), self.arena)
        )

    def infer(
        self, inputs: np.ndarray, starts: np.ndarray | None = None, types: np.ndarray | None = None
    ) -> Any:
        """Return the logits of all tokens, with this tensor-parallel rank's columns.

        None except on the last stage.    starts, types: from `cut`
        """
        logits = self._own_logits(inputs, starts, types)
        if logits is None or not self._layers.context:
            return logits
        context, share = self._layers.context, self._layers.now.tokens
        whole = all_tokens(computed(logits, self.arena), context, share, self.arena)
        return whole[:, : inputs.shape[1]]

    def _own_logits(
        self, inputs: np.ndarray, starts: np.ndarray | None = None, types: np.ndarray | None = None
    ) -> Any:
        """Return the logits of this rank's tokens, with this tensor-parallel rank's columns.

        None except on the last stage. If the ranks cannot divide the rows or their tokens, the
        inputs are padded with zeros. The padding comes after all rows or to the right of them. The
        causal mask hides it; without that mask it is a document of its own.
        """
        inputs = self._indices.tokens(inputs, "an input")
        filled = np.zeros(self._layers.filled(inputs.shape), inputs.dtype)
        filled[tuple(map(slice, inputs.shape))] = inputs
        own = self.own(filled, 0)
        places = self.places(filled.shape, inputs.shape, starts, types)
        logits = self.pipe.infer(own.shape, lambda: self.placed(own), places)
        if logits is None:
            return None
        lengths = self.own(inputs, 0).shape[: logits.ndim - 1]
        if isinstance(logits, ChunkedLogits):
            return logits.cut(lengths, self.arena)
        return logits[tuple(map(slice, lengths))]

    def logits_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole logits for an input of this shape, without padding rows."""
        ranks, (count, *lengths) = self._layers.now.tokens.ranks, self._layers.filled(shape)
        *rows, columns = self.pipe.output_shape((count, *(each // ranks for each in lengths)))
        rows[1:] = [each * ranks for each in rows[1:]]
        return *map(min, rows, shape), self._layers.columns(columns)

    def evaluate(
        self, source: Source, stop_requested: Callable[[], bool] | None = None
    ) -> tuple[float, float] | None:
        # On each rank a batch has at most the rows of a micro-batch of training. All ranks compute
        # the same number of batches. A rank without rows computes one row that does not count.
        rows, replicas = evaluated_rows(self.config.run, source), self.grid.axes.dp
        together = replicas * max(
            1, self.config.batch.size // (replicas * self.config.batch.micro_batches)
        )
        totals = np.zeros(3)
        for start in range(0, rows, together):
            own_rows = share(min(together, rows - start), self.grid.coords.dp, replicas)
            is_asked = stop_requested is not None and stop_requested()
            numbers = [(start + i) * source.held_out // rows for i in own_rows] or [0]
            measured = (0.0, 0, 0) if self.grid.is_server else self._losses(source, numbers)
            does_count = bool(own_rows) and self.grid.reports_loss
            *sums, stop = self.replica.total(*(measured if does_count else (0.0, 0, 0)), is_asked)
            if stop:
                return None
            totals += sums
        loss, right, count = totals.tolist()
        if not count:
            raise DataError(
                f"An evaluation needs a target that counts, but {rows} of {source.held_out} held-out rows have none.",
                "Raise run.eval_rows, name other held-out data, or leave the evaluation out with run.eval_every=-1.",
            ).on_every_rank()
        has_classes = self._indices.takes in ("classes", None)
        return loss / count, right / count if has_classes else math.nan

    def row_losses(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the summed loss of each row, (rows,) float64, on ranks that report it; collective.

        With layout.cp each of these ranks sums the losses of its tokens.
        """
        self._check_causal(
            "A choice has the probability of its tokens, each after the earlier ones"
        )
        targets = self._indices.targets(targets, inputs.shape, self.logits_shape, "a batch")
        targets = self.own(targets, IGNORED)
        flat = self.backend.from_host(targets).reshape(-1)
        losses, length = np.zeros(len(inputs)), targets.shape[1]
        logits = self._own_logits(inputs)
        if logits is None:
            return losses
        for place, some in sliced(logits, self.arena):
            first = place.start or 0
            stop = first + len(some)
            # A slice may begin or end within a row.
            for row in range(first // length, -(-stop // length)):
                both = overlap(range(first, stop), range(row * length, (row + 1) * length))
                part = some[moved(both, -first)]
                losses[row] += float(self._loss.value(part, flat[moved(both, 0)], self.arena))
        return losses

    def _losses(self, source: Source, rows: Sequence[int]) -> tuple[float, int, int]:
        """Return of held-out rows the summed loss, and the correct and the counted predictions."""
        inputs, targets = read_rows(
            self.config.data.source, source, len(rows), lambda: source.held_out_rows(rows)
        )
        inputs, targets, *marks = self.cut(inputs, targets)
        targets = self._indices.targets(
            targets, inputs.shape, self.logits_shape, "a held-out batch"
        )
        targets = self.own(targets, IGNORED)
        counted = targets.size - self._indices.ignored(targets)
        flat = self.backend.from_host(targets).reshape(-1)
        logits = self._own_logits(inputs, *marks)
        if logits is None:
            return 0.0, 0, 0
        total, right = 0.0, 0
        for place, some in sliced(logits, self.arena):
            right += int(self._loss.correct(some, flat[place], self.arena))
            total += float(self._loss.value(some, flat[place], self.arena))
        return total, right, counted

    def reader(self, sequences: int, room: int) -> Reader:
        """Return a reader of `sequences` windows, of at most `room` tokens each; collective."""
        from mpitrain.pipeline.decoder import Decoder, can_decode

        self._check_causal("Text is generated token by token")
        chunks, layers = self._decoded
        decoder = None
        if can_decode(chunks):
            decoder = Decoder(
                self.resolved.plan.stage_of,
                chunks,
                self.grid.pp.transport,
                self.replica,
                self.arena,
                self._computed,
                layers.now,
                self.placed,
                sequences,
                room,
            )
        return Reader(decoder, self.infer, self._row)

    @property
    def _is_causal(self) -> bool:
        return "attention to later tokens" not in self._layers.made

    def _check_causal(self, why: str) -> None:
        if not self._is_causal:
            raise ConfigError(
                f"{why}, but attention of this model has no causal mask: tokens see later ones.",
                "Use a model with the causal mask.",
            ).on_every_rank()

    def _row(self, logits: Any, token: int) -> np.ndarray:
        """Return the logits at one token of each row, (rows, classes) float64 in host memory."""
        rows = computed(logits, self.arena)[:, token]
        whole = self._layers.whole(rows, self.arena)
        return np.asarray(self.backend.to_host(whole), np.float64)


def places_of(
    layers: Plain,
    shape: Shape,
    starts: np.ndarray | None,
    placed: Callable[[np.ndarray], Any],
    types: np.ndarray | None = None,
) -> Places | None:
    """Return the places of the tokens of some rows.

    layers  the factory of the model's layers; this rank has the tokens of its `now`
    shape   (B, T) of the rows
    starts  from `Inference.cut`; padding to the right is a document of its own
    placed  copies an array to the backend's memory
    types   of tokens, from `Inference.cut`, in the shape of `starts`
    """
    share = layers.now.tokens
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
    share = layers.now.tokens
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
