"""Text from a trained GPT: one token at a time, each drawn from what the model says of the tokens before it."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mpitrain.collectives.bind import bind_broadcast
from mpitrain.errors import ConfigError, TrainingError, on_every_rank
from mpitrain.run.trainer import Trainer

NOT_FINITE = -1
"""In place of a token: there is none to draw."""


def tokens(
    trainer: Trainer,
    prompt: Sequence[int],
    temperature: float,
    top_k: int,
    seed: int,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Tokens after `prompt`, until a stop is requested: all ranks compute, rank 0 draws and tells the others.

    Collective: every rank takes the same number of tokens.
    temperature     0 takes the likeliest token
    top_k           draw among so many of the likeliest; 0: among all
    stop_requested  asked on rank 0 alone, with every token; after a True this token is the last
    raises          TrainingError on every rank if the model's output is not finite
    """
    context = trainer.config.model.context
    recent = list(prompt)[-context:]
    if not recent:
        raise ConfigError("A prompt needs at least one token.", "Give --prompt some text.")
    generator = np.random.default_rng(seed)
    told = np.zeros(2, np.int64)  # a token, and whether it is the last
    telling = bind_broadcast(trainer.transport, told)
    while not told[1]:
        # Tokens to the right are masked: any value will do. Few widths, so that the arena holds few buffers.
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
    """A token by what the model says of each, or NOT_FINITE."""
    if not np.isfinite(logits).all():
        return NOT_FINITE
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = np.where(logits < np.sort(logits)[-top_k], -np.inf, logits)
    with np.errstate(over="ignore"):  # near temperature 0 all but the likeliest become exp(-inf)
        weights = np.exp((logits - logits.max()) / temperature)
    return int(generator.choice(len(weights), p=weights / weights.sum()))
