"""Claims about a mixture of experts: what balances it, what a capacity drops, and what an unlucky rank costs."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from mpitrain.run.build import build
from mpitrain.tools.plan.memory import count
from mpitrain.tools.textbook.claims.claim import Claim, Figures, other, usual
from mpitrain.tools.textbook.claims.measure import configured, on_ranks, typed
from mpitrain.transport.base import Transport

SWITCH = "Fedus et al., Switch Transformers, JMLR 2022"
STEPS, LAST = 60, 20
"""Steps of a training, of which the last are counted."""
TRAINED = (
    "model.experts=4",
    "model.top_k=1",
    "model.context=64",
    "optimizer.lr=0.01",
    "optimizer.schedule=constant",
)
LOGGED = f"run.steps={STEPS}", "run.log_every=1"
COUNTED = (
    "model.experts=4",
    "layout.dp=4",
    "layout.ep=4",
    "batch.size=8",
    "model.heads=2",
    "model.layers=2",
)


COUNTED_256 = typed(*COUNTED, "model.width=256", "model.context=16")


@cache
def routed(*settings: str) -> tuple[np.ndarray, float]:
    """Train a small model with 4 experts, 1 of a token; return the tokens of each expert in the last steps,
    and the mean fraction that was dropped.
    """
    config = configured(*TRAINED, *settings)

    def run(transport: Transport) -> Sequence[tuple[Sequence[int], float]]:
        trainer, source, _ = build(transport, config)
        every = [
            trainer.step(step, *trainer.replica.batch(source, step)).extras for step in range(STEPS)
        ]
        return [(each["expert_tokens"], each["dropped"]) for each in every[-LAST:]]

    (last,) = on_ranks(1, run)
    return np.sum([tokens for tokens, _ in last], axis=0), float(np.mean([d for _, d in last]))


def balanced(balance: float) -> Figures:
    tokens, _ = routed(f"model.balance={balance}")
    figures = {"tokens, busiest expert": float(tokens.max()), "tokens, idlest": float(tokens.min())}
    return Figures(float(tokens.max() / tokens.mean()), figures)


def dropped(capacity: float, balance: float) -> Figures:
    tokens, fraction = routed(f"model.capacity={capacity}", f"model.balance={balance}")
    return Figures(fraction, {"tokens": float(tokens.sum()), "dropped": fraction * tokens.sum()})


def unlucky(width: int, context: int) -> Figures:
    config = configured(*COUNTED, f"model.width={width}", f"model.context={context}")
    mean, busiest = (count(config, rows).stages[0].step for rows in (1.0, 2.0))
    numbers = {"MFLOP, mean rank": mean.flops / 1e6, "MFLOP, busiest": busiest.flops / 1e6}
    numbers |= {"kB, mean rank": mean.peak / 1e3, "kB, busiest": busiest.peak / 1e3}
    return Figures(busiest.flops / mean.flops, numbers)


CLAIMS = {
    "experts-balance": Claim(
        "A term of the loss balances the experts.",
        SWITCH,
        "tokens of the busiest expert / of the mean one",
        ("<=", 1.25),
        balanced,
        (
            usual("balance = {balance}", balance=0.01),
            usual("balance = {balance}", balance=0.1),
            other("balance = {balance}", balance=0.0),
        ),
        f"mpitrain train {typed(*TRAINED, 'model.balance=0.01', *LOGGED)}",
    ),
    "experts-capacity": Claim(
        "Balanced experts drop few tokens with a capacity of twice an equal share.",
        SWITCH,
        "fraction of tokens that are dropped",
        ("<=", 0.05),
        dropped,
        (
            usual("capacity {capacity}, balance {balance}", capacity=2.0, balance=0.01),
            other("capacity {capacity}, balance {balance}", capacity=2.0, balance=0.0),
            other("capacity {capacity}, balance {balance}", capacity=1.25, balance=0.01),
        ),
        f"mpitrain train {typed(*TRAINED, 'model.balance=0.01', 'model.capacity=2', *LOGGED)}",
    ),
    "experts-unlucky": Claim(
        "Twice the mean tokens at a rank's experts nearly double the work of a step.",
        "Lepikhin et al., GShard, ICLR 2021",
        "work of the busiest rank / of the mean one",
        (">", 1.5),
        unlucky,
        (
            usual("width {width}, context {context}", width=256, context=16),
            other("width {width}, context {context}", width=16, context=512),
        ),
        "\n".join(f"mpitrain plan memory {COUNTED_256}{ratio}" for ratio in ("", " --imbalance 2")),
    ),
}
