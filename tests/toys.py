"""A plugin with one toy of each kind; tests name this file in run.plugins, and do not import it."""

import numpy as np

from mpitrain.collectives.plans import ring
from mpitrain.collectives.plans.steps import relabel
from mpitrain.collectives.selection.algorithm import of_plan
from mpitrain.collectives.selection.table import ALL_REDUCE
from mpitrain.data import SOURCES, SourceKind
from mpitrain.layers.base import Unit, normal
from mpitrain.models.table import MODELS, Model
from mpitrain.ops import OPERATIONS, Operation
from mpitrain.optim import RULES
from mpitrain.optim.optimizer import ElementWise, Rule
from mpitrain.parallel.modes import MODES
from mpitrain.parallel.replica import Replica
from mpitrain.pipeline.schedules import (
    SCHEDULES,
    BackwardInput,
    BackwardWeight,
    Forward,
    looped,
    of_chunks,
)


def backwards(rank, n, count):
    """A ring that goes the other way round: every rank sends to the one before."""
    return relabel(ring.all_reduce(n - 1 - rank, n, count), range(n - 1, -1, -1))


def weights_last(stage, stages, micro_batches):
    """GPipe with the weight halves of all micro-batches at the end."""
    return [
        kind(stage, micro)
        for kind in (Forward, BackwardInput, BackwardWeight)
        for micro in range(micro_batches)
    ]


def step(p, g, scale, lr, weight_decay, arena, mirror=None):
    """Gradient descent without decay, half as far: p -= lr scale g / 2."""
    p -= lr * scale * g / 2
    if mirror is not None:
        mirror[...] = p


class Counting:
    """A source of tokens: each row counts upwards from a start of its own, modulo 7."""

    form, inputs, classes, held_out = "tokens", 7, 7, 6

    def __init__(self, request):
        self.shape = (request.context,)

    def batch(self, seed, step, size, rows, before=None):
        return self.rows(np.random.default_rng([seed, step]).integers(7, size=size)[rows])

    def rows(self, starts):
        counted = (np.asarray(starts)[:, None] + np.arange(self.shape[0] + 1)) % 7
        return counted[:, :-1], counted[:, 1:]

    held_out_rows = rows


def bigrams(layers, keys, source):
    return [
        Unit("embedding", layers.embedding(source.inputs, keys.context, keys.width)),
        Unit("head", layers.head(keys.width, source.classes, normal(0.1))),
    ]


class Toy(Replica):
    help = "each rank updates from the sum of all gradients, as a toy"


ALL_REDUCE["toy-ring"] = of_plan(backwards)
SCHEDULES["toy-gpipe"] = of_chunks(weights_last, 1, looped)
MODES["toy"] = Toy
OPERATIONS["toy_step"] = Operation(
    "p:L g:L scale=0.7 lr=0.1 weight_decay=0.01 -> p", "mirror", step
)
RULES["toy-sgd"] = Rule(
    "half a step of gradient descent", (), {}, ElementWise("toy_step", lambda update: {})
)
SOURCES["toy"] = SourceKind(Counting, "tokens")
MODELS["toy-bigrams"] = Model(bigrams, "tokens", "for tokens", split="width", writes=True)
