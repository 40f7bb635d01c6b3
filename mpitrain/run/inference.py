"""What a trainer computes beside training: logits, evaluations, and readers for generation.

All functions are collective. `trainer` is a `Trainer`, which imports this file.
"""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.config import Run
from mpitrain.data import IGNORED, Source, read_rows
from mpitrain.errors import ConfigError, DataError, TrainingError
from mpitrain.layers.chunked_logits import ChunkedLogits, computed, sliced
from mpitrain.parallel.tensor.layer_factory import filled_shape
from mpitrain.regions import moved, overlap, share

if TYPE_CHECKING:
    from mpitrain.pipeline.decoder import Decoder


def evaluated_rows(run: Run, source: Source) -> int:
    return min(source.held_out, run.eval_rows or source.held_out)


def diverged() -> TrainingError:
    """Return the error that every rank raises for logits that are not finite."""
    return TrainingError(
        "The model's output is not finite: its training has diverged.",
        "Train again with a lower optimizer.lr.",
    ).on_every_rank()


def logits(trainer: Any, inputs: np.ndarray) -> Any:
    """Return the logits of all tokens, with all columns, as `Trainer.logits`."""
    own = infer(trainer, *trainer.rows.texts(inputs))
    return None if own is None else _whole(trainer, computed(own, trainer.arena))


def infer(
    trainer: Any,
    inputs: np.ndarray,
    starts: np.ndarray | None = None,
    types: np.ndarray | None = None,
) -> Any:
    """Return the logits of all tokens, with this tensor-parallel rank's columns.

    None except on the last stage.    starts, types: from `Rows.read`
    """
    own, arena = own_logits(trainer, inputs, starts, types), trainer.arena
    if own is None or trainer.layers.tokens.ranks == 1:
        return own
    return trainer.layers.all_tokens(computed(own, arena), arena)[:, : inputs.shape[1]]


def own_logits(
    trainer: Any,
    inputs: np.ndarray,
    starts: np.ndarray | None = None,
    types: np.ndarray | None = None,
) -> Any:
    """Return the logits of this rank's tokens, with this tensor-parallel rank's columns.

    None except on the last stage. If the ranks cannot divide the rows or their tokens, the
    inputs are padded with zeros. The padding comes after all rows or to the right of them. The
    causal mask hides it; without that mask it is a document of its own.
    """
    inputs = trainer.rows.tokens(inputs, "an input")
    filled = np.zeros(filled_shape(trainer.layers, inputs.shape), inputs.dtype)
    filled[tuple(map(slice, inputs.shape))] = inputs
    own = trainer.rows.own_tokens(filled, 0)
    places = trainer.rows.places(own.shape, inputs.shape, starts, types)
    logits = trainer.pipe.infer(own, places)
    if logits is None:
        return None
    lengths = trainer.rows.own_tokens(inputs, 0).shape[: logits.ndim - 1]
    if isinstance(logits, ChunkedLogits):
        return logits.cut(lengths, trainer.arena)
    return logits[tuple(map(slice, lengths))]


def evaluate(
    trainer: Any, source: Source, stop_requested: Callable[[], bool] | None = None
) -> tuple[float, float] | None:
    """Return the mean loss and the accuracy of held-out rows, as `Trainer.evaluate`."""
    trainer.sync_parameters()
    # On each rank a batch has at most the rows of a micro-batch of training. All ranks compute
    # the same number of batches. A rank without rows computes one row that does not count.
    config, grid = trainer.config, trainer.grid
    rows, replicas = evaluated_rows(config.run, source), grid.axes.dp
    together = replicas * max(1, config.batch.size // (replicas * config.batch.micro_batches))
    totals = np.zeros(3)
    for start in range(0, rows, together):
        own_rows = share(min(together, rows - start), grid.coords.dp, replicas)
        is_asked = stop_requested is not None and stop_requested()
        numbers = [(start + i) * source.held_out // rows for i in own_rows] or [0]
        measured = (0.0, 0, 0) if grid.is_server else _losses(trainer, source, numbers)
        does_count = bool(own_rows) and grid.reports_loss
        *sums, stop = trainer.replica.total(*(measured if does_count else (0.0, 0, 0)), is_asked)
        if stop:
            return None
        totals += sums
    loss, right, count = totals.tolist()
    if not count:
        raise DataError(
            f"An evaluation needs a target that counts, but {rows} of {source.held_out} held-out rows have none.",
            "Raise run.eval_rows, name other held-out data, or leave the evaluation out with run.eval_every=-1.",
        ).on_every_rank()
    return loss / count, right / count if trainer.rows.has_classes else math.nan


def _losses(trainer: Any, source: Source, rows: Sequence[int]) -> tuple[float, int, int]:
    """Return of held-out rows the summed loss, and the correct and the counted predictions."""
    name, loss = trainer.config.data.source, trainer.loss
    inputs, targets = read_rows(name, source, len(rows), lambda: source.held_out_rows(rows))
    inputs, targets, *marks = trainer.rows.read(inputs, targets, "a held-out batch")
    targets = trainer.rows.own_tokens(targets, IGNORED)
    counted = int(np.count_nonzero(trainer.rows.counts(targets)))
    flat = trainer.backend.from_host(targets).reshape(-1)
    logits = own_logits(trainer, inputs, *marks)
    if logits is None:
        return 0.0, 0, 0
    total, right = 0.0, 0
    for place, some in sliced(logits, trainer.arena):
        right += int(loss.correct(some, flat[place], trainer.arena))
        total += float(loss.value(some, flat[place], trainer.arena))
    return total, right, counted


def row_losses(trainer: Any, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the summed loss of each row, (rows,) float64, on ranks that report it.

    With layout.cp each of these ranks sums the losses of its tokens.
    """
    _check_causal(
        trainer, "A choice has the probability of its tokens, each after the earlier ones"
    )
    targets = trainer.rows.targets(targets, inputs.shape, "a batch")
    targets = trainer.rows.own_tokens(targets, IGNORED)
    flat = trainer.backend.from_host(targets).reshape(-1)
    losses, length = np.zeros(len(inputs)), targets.shape[1]
    logits = own_logits(trainer, inputs)
    if logits is None:
        return losses
    for place, some in sliced(logits, trainer.arena):
        first = place.start or 0
        stop = first + len(some)
        # A slice may begin or end within a row.
        for row in range(first // length, -(-stop // length)):
            both = overlap(range(first, stop), range(row * length, (row + 1) * length))
            part = some[moved(both, -first)]
            losses[row] += float(trainer.loss.value(part, flat[moved(both, 0)], trainer.arena))
    return losses


def reader(trainer: Any, sequences: int, room: int) -> Reader:
    """Return a reader of `sequences` windows, of at most `room` tokens each."""
    from mpitrain.pipeline.decoder import Decoder, can_decode

    _check_causal(trainer, "Text is generated token by token")
    chunks = trainer.decoded
    decoder = None
    if can_decode(chunks):
        decoder = Decoder(
            trainer.job.plan.stage_of,
            chunks,
            trainer.grid.pp.transport,
            trainer.replica,
            trainer.arena,
            trainer.job.device.half or trainer.storage.dtype,
            trainer.placed,
            sequences,
            room,
        )
    return Reader(trainer, decoder)


class Reader:
    """Computes the next token's logits for several sequences of a replica.

    A window is the tokens of one sequence that the model reads. With a decoder, which caches keys
    and values, only new tokens are computed. Without one, each call reads whole windows: a layer of
    the caller may not be able to compute new tokens alone.
    """

    def __init__(self, trainer: Any, decoder: Decoder | None):
        self._trainer, self._decoder = trainer, decoder

    @property
    def caches(self) -> bool:
        """Whether there is a key-value cache."""
        return self._decoder is not None

    def without_cache(self) -> Reader:
        """Return a reader of the same model that reads whole windows."""
        return Reader(self._trainer, None)

    def read(self, windows: Sequence[Sequence[int]], context: int) -> np.ndarray | None:
        """Return the logits after the last token of each window, (sequences, V) float64.

        None on all stages but the last. Collective over the ranks of a replica.
        """
        if self._decoder:
            logits = self._decoder.read(windows)
            return None if logits is None else _row(self._trainer, logits, 0)
        rows = [self._last(window, context) for window in windows]
        return None if rows[0] is None else np.concatenate(rows)

    def _last(self, window: Sequence[int], context: int) -> Any:
        # The causal mask hides the padding on the right. Widths are powers of two: few different
        # shapes need few buffers in the arena.
        width = min(context, max(16, 1 << (len(window) - 1).bit_length()))
        tokens = np.zeros((1, width), np.int64)
        tokens[0, : len(window)] = window
        logits = infer(self._trainer, tokens)
        return None if logits is None else _row(self._trainer, logits, len(window) - 1)


def _whole(trainer: Any, logits: Any) -> Any:
    split = trainer.layers.split_loss
    return split.whole(logits, trainer.arena) if split else logits


def _row(trainer: Any, logits: Any, token: int) -> np.ndarray:
    """Return the logits at one token of each row, (rows, classes) float64 in host memory."""
    rows = _whole(trainer, computed(logits, trainer.arena)[:, token])
    return np.asarray(trainer.backend.to_host(rows), np.float64)


def _check_causal(trainer: Any, why: str) -> None:
    if not trainer.rows.is_causal:
        raise ConfigError(
            f"{why}, but attention of this model has no causal mask: tokens see later ones.",
            "Use a model with the causal mask.",
        ).on_every_rank()
