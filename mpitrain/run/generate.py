"""Autoregressive text generation with a trained GPT: temperature and top-k sampling."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mpitrain.collectives.bind import bind_broadcast
from mpitrain.config import Data
from mpitrain.data import writes_text
from mpitrain.data.tokenizer import TOKENIZER, ByteTokenizer, Tokenizer, open_tokenizer
from mpitrain.errors import ConfigError, DataError, TrainingError, on_every_rank
from mpitrain.files import contents
from mpitrain.run.trainer import Trainer

NOT_FINITE = -1
"""The value in place of a token if the logits are not finite."""


def tokenizer_of_run(folder: Path, data: Data) -> Tokenizer | None:
    """Return the tokenizer of a run directory; None if the run knows the numbers of tokens only.

    raises  DataError if its file is damaged; ConfigError if it needs a missing package
    """
    if writes_text(data.source, data.mixture):
        return ByteTokenizer()
    try:
        found = contents(folder / TOKENIZER, inner=1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(
            f"The tokenizer {folder / TOKENIZER} cannot be read: {error.strerror}.",
            "Copy it from the data of the run.",
        ) from None
    return open_tokenizer(found, str(folder / TOKENIZER))


def tokens(
    trainer: Trainer,
    prompt: Sequence[int],
    temperature: float,
    top_k: int,
    seed: int,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Generate tokens after `prompt` until a stop is requested; collective.

    All ranks compute the logits; rank 0 draws a token and broadcasts it. Every rank must take
    the same number of tokens from the iterator.

    prompt          at least one token; only the last model.context of them count
    temperature     divides the logits; 0 takes the most likely token
    top_k           number of the most likely tokens to draw from; 0: all
    stop_requested  called on rank 0 alone, for every token; after True this token is the last
    raises          TrainingError on every rank if the logits are not finite
    """
    context = trainer.config.model.context
    recent = list(prompt)[-context:]
    if not recent:
        raise ConfigError("A prompt needs at least one token.", "Give --prompt some text.")
    generator = np.random.default_rng(seed)
    told = np.zeros(2, np.int64)  # This holds a token, and whether it is the last.
    telling = bind_broadcast(trainer.transport, told)
    while not told[1]:
        # The causal mask hides the padding on the right. Widths are powers of two: few different
        # shapes need few buffers in the arena.
        window = np.zeros((1, min(context, max(16, 1 << (len(recent) - 1).bit_length()))), np.int64)
        window[0, : len(recent)] = recent
        last = np.empty(0) if trainer.grid.is_server else trainer.logits_of(window, len(recent) - 1)
        if trainer.transport.rank == 0:
            told[:] = _draw(last, temperature, top_k, generator), stop_requested()
        telling.run()
        token = int(told[0])
        if token == NOT_FINITE:
            raise on_every_rank(
                TrainingError(
                    "The model's output is not finite: its training has diverged.",
                    "Train again with a lower optimizer.lr.",
                )
            )
        yield token
        recent = [*recent, token][-context:]


def _draw(
    logits: np.ndarray, temperature: float, top_k: int, generator: np.random.Generator
) -> int:
    """Draw a token from the logits, (classes,) float64; NOT_FINITE if these are not finite."""
    if not np.isfinite(logits).all():
        return NOT_FINITE
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = np.where(logits < np.sort(logits)[-top_k], -np.inf, logits)
    with np.errstate(over="ignore"):  # Near temperature 0 most weights underflow to exp(-inf).
        weights = np.exp((logits - logits.max()) / temperature)
    return int(generator.choice(len(weights), p=weights / weights.sum()))
