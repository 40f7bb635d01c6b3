"""A plugin with one toy of each kind; tests name this file in run.plugins, and do not import it."""

from mpitrain.collectives.plans import ring
from mpitrain.collectives.plans.steps import relabel
from mpitrain.collectives.selection.algorithm import of_plan
from mpitrain.collectives.selection.table import ALL_REDUCE
from mpitrain.ops import OPERATIONS, Operation
from mpitrain.optim import RULES
from mpitrain.optim.rule import ElementWise, Rule
from mpitrain.parallel.mode import Mode, nothing, unknown
from mpitrain.parallel.modes import MODES
from mpitrain.pipeline.instructions import BackwardInput, BackwardWeight, Forward
from mpitrain.pipeline.schedules import SCHEDULES, looped, of_chunks


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


ALL_REDUCE["toy-ring"] = of_plan(backwards)
SCHEDULES["toy-gpipe"] = of_chunks(weights_last, 1, looped)
MODES["toy"] = Mode(
    help="each rank updates from the sum of all gradients, as a toy",
    make=lambda replica: MODES["all-reduce"].make(replica),
    memory=lambda sizes: sizes.replica,
    traffic=unknown,
    refusal=nothing,
)
OPERATIONS["toy_step"] = Operation(
    "half a step of gradient descent",
    "p:L g:L scale=0.7 lr=0.1 weight_decay=0.01 -> p",
    "mirror",
    step,
)
RULES["toy-sgd"] = Rule(
    "half a step of gradient descent", (), {}, ElementWise("toy_step", lambda update: {})
)
