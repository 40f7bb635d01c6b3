"""Draws of the next token, compared with a plain reference: temperature, top-k and top-p."""

import numpy as np
import pytest

from mpitrain.run.generate import NOT_FINITE, Sampling, draw, probabilities

LOGITS = np.random.default_rng(5).standard_normal((4, 37)) * 3


def reference(logits, temperature, top_k, top_p):
    """Probabilities token by token: sort, keep the first k, then the first with p together."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    weights = {token: float(np.exp((logits[token] - max(logits)) / temperature)) for token in order}
    total, kept, before = sum(weights.values()), {}, 0.0
    for token in order:
        if before < top_p * total:
            kept[token] = weights[token]
        before += weights[token]
    return np.array([kept.get(token, 0.0) / sum(kept.values()) for token in range(len(logits))])


@pytest.mark.parametrize("temperature", [0.3, 1, 4])
@pytest.mark.parametrize("top_k", [0, 1, 5, 99])
@pytest.mark.parametrize("top_p", [0.1, 0.7, 1])
def test_probabilities_are_those_of_the_plain_reference(temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    for logits in LOGITS:
        wanted = reference(logits, *sampling)
        assert np.all(np.abs(probabilities(logits, sampling) - wanted) <= 1e-12)


def test_a_draw_takes_the_same_token_as_generator_choice():
    one, other = np.random.default_rng(3), np.random.default_rng(3)
    sampling = Sampling(0.8, 20, 0.9)
    for logits in np.tile(LOGITS, (50, 1)):
        wanted = other.choice(len(logits), p=probabilities(logits, sampling))
        assert draw(logits, sampling, one) == wanted


def test_draws_follow_temperature_top_k_and_top_p():
    logits, generator = np.array([0.0, 3.0, 2.0, -1.0]), np.random.default_rng(0)
    assert draw(logits, Sampling(0, 0), generator) == 1
    assert {draw(logits, Sampling(5.0, 2), generator) for _ in range(200)} == {1, 2}
    assert {draw(logits, Sampling(1.0, 0, 0.9), generator) for _ in range(200)} == {1, 2}
    assert {draw(logits, Sampling(1.0, 0, 1e-9), generator) for _ in range(20)} == {1}
    drawn = [draw(logits, Sampling(1.0, 0), generator) for _ in range(4000)]
    wanted = np.exp(logits) / np.exp(logits).sum()
    assert np.all(np.abs(np.bincount(drawn, minlength=4) / 4000 - wanted) < 0.04)


def test_near_a_temperature_of_0_the_likeliest_token_is_drawn():
    generator = np.random.default_rng(0)
    for logits in LOGITS:
        assert draw(logits, Sampling(1e-300, 0), generator) == logits.argmax()


def test_logits_that_are_not_finite_give_no_token():
    for bad in (np.nan, np.inf, -np.inf):
        assert draw(np.array([0.0, bad]), Sampling(), np.random.default_rng(0)) == NOT_FINITE
