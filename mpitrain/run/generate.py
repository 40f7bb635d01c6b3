"""Text from a trained GPT: one token at a time, each drawn from what the model says of the tokens before it."""

from collections.abc import Iterator, Sequence

import numpy as np

from mpitrain.errors import ConfigError, TrainingError
from mpitrain.run.trainer import Trainer


def tokens(trainer: Trainer, prompt: Sequence[int], temperature: float, top_k: int, seed: int) -> Iterator[int]:
    """Tokens after `prompt`, without end; local.

    temperature  0 takes the likeliest token
    top_k        draw among so many of the likeliest; 0: among all
    raises       TrainingError if the model's output is not finite
    """
    context = trainer.config.model.context
    recent = list(prompt)[-context:]
    if not recent:
        raise ConfigError("A prompt needs at least one token.", "Give --prompt some text.")
    generator = np.random.default_rng(seed)
    while True:
        # Tokens to the right are masked: any value will do. Few widths, so that the arena holds few buffers.
        window = np.zeros((1, min(context, max(16, 1 << (len(recent) - 1).bit_length()))), np.int64)
        window[0, :len(recent)] = recent
        logits = trainer.backend.to_host(trainer.logits(window))[0, len(recent) - 1].astype(np.float64)
        if not np.isfinite(logits).all():
            raise TrainingError("The model's output is not finite: its training has diverged.",
                                "Train again with a lower optimizer.lr.")
        token = _draw(logits, temperature, top_k, generator)
        yield token
        recent = [*recent, token][-context:]


def _draw(logits: np.ndarray, temperature: float, top_k: int, generator: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = np.where(logits < np.sort(logits)[-top_k], -np.inf, logits)
    with np.errstate(over="ignore"):  # near temperature 0 all but the likeliest become exp(-inf)
        weights = np.exp((logits - logits.max()) / temperature)
    return int(generator.choice(len(weights), p=weights / weights.sum()))
