"""Small jobs, and the losses, norms and parameters that training them gives."""

import numpy as np

from mpitrain.config import with_settings
from mpitrain.optim import RULES
from mpitrain.run.build import build
from mpitrain.run.choices import parse
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks

STEPS = 20
EXACT = [name for name in RULES if name not in ("lion", "adamw8bit", "adafactor")]
"""Rules whose parameters are compared whole; test_optimizers.py compares the others, each in its way."""
TINY = [
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "batch.size=12",
    "run.steps=20",
    "optimizer.warmup=3",
    "optimizer.lr=0.01",
    "replication.bucket_mb=0.004",
]
MLP = [
    "data.source=digits",
    "model.kind=mlp",
    "model.layers=2",
    "model.width=24",
    "batch.size=32",
    "run.steps=20",
    "optimizer.lr=0.01",
]


def configured(*settings):
    return parse(with_settings({}, list(settings)))


def curve(transport, config):
    """Losses and gradient norms of every step, the final parameters, and whether replicas are equal."""
    trainer, source, _ = build(transport, config)
    outcomes = []
    for index in range(STEPS):
        inputs, targets = source.batch(config.run.seed, index, config.batch.size, trainer.share())
        outcomes.append(trainer.step(index, inputs, targets))
    assert replicas_equal(trainer)
    used = np.concatenate([tensor.ravel() for tensor in trainer.tensors().values()])
    return np.array([o.loss for o in outcomes]), np.array([o.grad_norm for o in outcomes]), used


def curves(ranks, *settings):
    """The curve every rank saw, which must be one."""
    config = configured(*settings)
    results = run_ranks(ranks, curve, config)
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))
    return results[0]


def by_hand(name, entry, gradient, value, state, lr, step):
    """One update of one tensor in plain NumPy, from the papers' formulas; `state` is a dict that this call keeps."""
    decay = 0.1 if len(entry.parameter.shape) == 2 else 0.0
    if name == "sgd":
        return value - lr * (gradient + decay * value)
    if name == "momentum":
        state["m"] = 0.9 * state.get("m", 0) + gradient + decay * value
        return value - lr * state["m"]
    state["m"] = 0.8 * state.get("m", 0) + 0.2 * gradient
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * gradient**2
    mean, square = state["m"] / (1 - 0.8**step), state["v"] / (1 - 0.95**step)
    return value - lr * decay * value - lr * mean / (np.sqrt(square) + 1e-8)
