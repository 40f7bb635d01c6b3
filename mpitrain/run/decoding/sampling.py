"""Sampling of the next token from logits: temperature, top-k and top-p, as transformers' warpers."""

from typing import NamedTuple

import numpy as np

NOT_FINITE = -1
"""The value in place of a token if the logits are not finite."""


class Sampling(NamedTuple):
    """How to draw a token from logits.

    temperature  divides the logits; 0 takes the most likely token
    top_k        number of the most likely tokens to draw from; 0: all
    top_p        draw from the fewest tokens with at least this probability together (nucleus
                 sampling, Holtzman et al. 2020); 1: all
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0


def draw(logits: np.ndarray, sampling: Sampling, generator: np.random.Generator) -> int:
    """Draw a token from the logits, (V,) float64; NOT_FINITE if these are not finite."""
    if not np.isfinite(logits).all():
        return NOT_FINITE
    if sampling.temperature == 0:
        return int(logits.argmax())
    # These lines equal `generator.choice`, without its checks.
    sums = probabilities(logits, sampling).cumsum()
    sums /= sums[-1]
    return int(sums.searchsorted(generator.random(), side="right"))


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the probability of each token, (V,). Excluded tokens have 0.

    The order is that of transformers: temperature, top-k, then top-p of the remaining tokens.
    """
    temperature, top_k, top_p = sampling
    if 0 < top_k < len(logits):
        least = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits < least, -np.inf, logits)
    with np.errstate(over="ignore"):  # Near temperature 0 most weights underflow to exp(-inf).
        weights = np.exp((logits - logits.max()) / temperature)
    weights /= weights.sum()
    if top_p < 1:
        order = weights.argsort(kind="stable")[::-1]
        before = weights[order].cumsum() - weights[order]
        weights[order[before >= top_p]] = 0
        weights /= weights.sum()
    return weights
