"""Small jobs, and the losses, norms and parameters that training them gives."""

from typing import NamedTuple

import numpy as np

from mpitrain.config import with_settings
from mpitrain.optim import RULES
from mpitrain.parallel.modes import MODES
from mpitrain.run.build import build
from mpitrain.run.choices import parse
from mpitrain.run.replicas import replicas_equal
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks

STEPS = 12
EXACT = [name for name in RULES if name not in ("lion", "adamw8bit", "adafactor")]
"""Rules whose parameters are compared whole; test_optimizers.py compares the others, each in its way."""
SERVERLESS = [name for name in MODES if name not in ("all-reduce", "server")]
"""The modes of replication beside the default, in which every rank trains."""
OWN_CURVES = dict.fromkeys(("local", "gossip"), "tests/ranks/parallel/test_averaging.py")
"""{mode of replication whose curve is not that of one rank: the file that proves its curve}"""
TINY = [
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "batch.size=12",
    "run.steps=20",
    "run.eval_rows=20",
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


def stepped(trainer, source, steps):
    """The results of these steps, made as the loop of a run makes them in any mode."""
    mode, results = trainer.replica, []
    for index in steps:
        own = None
        for number in mode.steps(index, lambda: False):
            own = trainer.step(number, *mode.batch(source, number))
        results.append(mode.outcome(index, own))
    return results


def curve(transport, config, steps=STEPS):
    """Losses and gradient norms of every step, and the final parameters, which replicas have alike."""
    trainer, source, _ = build(transport, config)
    results = stepped(trainer, source, range(steps))
    assert replicas_equal(trainer)
    used = np.concatenate([tensor.ravel() for tensor in trainer.tensors().values()])
    return np.array([o.loss for o in results]), np.array([o.grad_norm for o in results]), used


def curves(ranks, *settings, steps=STEPS, hosts=None):
    """The curve every rank saw, which must be one."""
    results = run_ranks(ranks, curve, configured(*settings), steps, hosts=hosts)
    assert all(same(results[0], other) for other in results[1:])
    return results[0]


def same(one, other):
    """Whether the arrays of two sequences are equal, bit for bit."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def near(one, other):
    """Whether the numbers of two sequences of arrays are equal within 1e-9, as the laws mean it; those of NaN are not."""
    pairs = zip(one, other, strict=True)
    return all(np.all(np.abs(a - b) <= 1e-9 + 1e-9 * np.abs(a)) for a, b in pairs)


def held(trainer):
    """{full name: (description, values)} of what this rank has of each tensor."""
    tensors = {} if trainer.grid.is_server else trainer.tensors()
    described = {entry.name: entry.parameter for entry in trainer.storage.tensors}
    return {name: (described[name], values) for name, values in tensors.items()}


def assert_parts(found, whole, where=None):
    """Assert that what `held` says of a rank are parts of the whole tensors of another, within 1e-9."""
    for name, (parameter, values) in found.items():
        right = parameter.part_of(whole[name][1])
        assert values.shape == right.shape, (where, name)
        assert np.all(np.abs(values - right) <= 1e-9), (where, name)


class Trained(NamedTuple):
    """What a rank is told of steps and of an evaluation, its part of every tensor, and the number of parameters in all."""

    told: np.ndarray
    tensors: dict[str, tuple]
    count: int


def trained(transport, config, steps, source=None, units=None):
    """Train the model of a configuration, or of these units; buffers of the first step serve all."""
    if units is None:
        trainer, source, _ = build(transport, config, source=source)
    else:
        trainer = Trainer(transport, units, config)
    told, allocations = [], set()
    for index in range(steps):
        (result,) = stepped(trainer, source, [index])
        told.append((result.loss, result.grad_norm))
        allocations.add(trainer.arena.allocations)
    assert len(allocations) == 1 or config.memory.release_every
    assert trainer.arena.live == 0
    trainer.sync_parameters()
    assert replicas_equal(trainer)
    told.append(trainer.evaluate(source))
    return Trained(np.array(told), held(trainer), trainer.parameter_count)


def assert_alike(alone, together, where=None):
    """Assert that ranks are told what one rank is, which learns, and hold parts of its tensors, within 1e-9."""
    assert np.ptp(alone.told[:-1, 0]) > 1e-3, "the loss must move, or equality says nothing"
    for found in together:
        assert near(alone.told, found.told) and found.count == alone.count, where
        assert_parts(found.tensors, alone.tensors, where)


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
