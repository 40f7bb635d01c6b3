"""The topic of experts: which rank sends which token where, with unit vectors as tokens.

Each rank has TOKENS tokens and one expert. The router's weights are chosen so that one expert is asked
more often than the others. A row at an expert is a unit vector, and names its token; an output is
named by the expert that made it.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.group import Group
from mpitrain.config import Model
from mpitrain.errors import Sentence
from mpitrain.layers.base import READING
from mpitrain.layers.experts import Experts, Trip
from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import Arena
from mpitrain.ops.device import ops_for
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Topic,
    TopicSetting,
)
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

TOKENS = 3
"""Tokens of each rank."""


def choices(ranks: int) -> np.ndarray:
    """Return the expert of each token, (ranks, TOKENS): the first token of every rank asks expert 0."""
    ahead = np.arange(TOKENS)
    return np.where(ahead == 0, 0, (np.arange(ranks)[:, None] + ahead) % ranks)


class _RankRows(NamedTuple):
    """What a rank had and sent.

    arrived  the tokens of the rows at its expert, in their order
    outputs  the outputs of its own tokens
    sent     bytes sent when the counts were told, when the rows had arrived, and at the end
    """

    arrived: list[str]
    outputs: list[str]
    sent: list[int]


def record(setting: TopicSetting) -> Explanation:
    n = setting.ranks
    chosen, every = choices(n), np.arange(n * TOKENS).reshape(n, TOKENS)
    made: dict[bytes, str] = {}
    ranks: list[_RankRows] = run_ranks(n, _run, chosen, made)
    most = max(len(rank.arrived) for rank in ranks)
    titles = (
        "the router has chosen an expert for each token",
        "every rank tells how many rows it sends to each",
        "rows arrive at their experts, sorted",
        "outputs go back to the ranks of their tokens",
    )
    there = tuple((r, int(e), -1) for r in range(n) for e in np.unique(chosen[r]) if e != r)
    messages = ((), (), there, tuple((e, r, -1) for r, e, _ in there))

    def cells(at: int, rank: int) -> tuple[str, ...]:
        own = ranks[rank]
        return (
            *(f"t{token}" for token in every[rank]),
            *(f"e{expert}" for expert in chosen[rank]),
            *[*(own.arrived if at > 1 else []), *[""] * most][:most],
            *(own.outputs if at > 2 else [""] * TOKENS),
        )

    def sent(at: int) -> tuple[int, ...]:
        return tuple(rank.sent[at - 1] if at else 0 for rank in ranks)

    frames = [
        Frame(title, tuple(cells(at, r) for r in range(n)), messages[at], sent(at))
        for at, title in enumerate(titles)
    ]
    away = chosen != np.arange(n)[:, None]
    leave = away.sum(axis=1)
    come = np.array([(away & (chosen == rank)).sum() for rank in range(n)])
    channels, mean = n * TOKENS, TOKENS
    return Explanation(
        [
            Sentence("A mixture has {n} experts, and each of the {n} ranks stores one.", n=n),
            Sentence("A router chooses the expert of each token, from the token alone."),
            Sentence(
                "So tokens travel to the rank of their expert and back: two all-to-alls of unequal counts."
            ),
            Sentence(
                "All ranks wait for the rank whose expert is asked most: it computes most rows."
            ),
        ],
        (
            "t3: a token, e0: an expert, e0(t3): its output for the token. Empty: not there, or not yet. out, in: "
            "rows that leave a rank and that come to it, of C channels each. f_e: fraction of all tokens at an expert."
        ),
        [Sentence("rank {r}", r=rank) for rank in range(n)],
        [
            Columns("own tokens", tuple(f"x{at}" for at in range(TOKENS))),
            Columns("expert of each", tuple(f"c{at}" for at in range(TOKENS))),
            Columns("rows at the expert", tuple(f"r{at}" for at in range(most))),
            Columns("output y", tuple(f"y{at}" for at in range(TOKENS))),
        ],
        frames,
        [
            CountedFormula(
                "bytes with which a rank tells its counts",
                max(rank.sent[0] for rank in ranks),
                "8 E (n-1)",
                8 * n * (n - 1),
            ),
            CountedFormula(
                "bytes of rows that the busiest rank sends, there and back",
                max(rank.sent[2] - rank.sent[0] for rank in ranks),
                "8 C max(out + in)",
                8 * channels * int((leave + come).max()),
            ),
            CountedFormula(
                "rows of the busiest rank over the mean",
                max(len(rank.arrived) for rank in ranks) / mean,
                "max(f_e) E",
                float(np.bincount(chosen.reshape(-1)).max() / chosen.size * n),
            ),
        ],
        [SourceLines.of(Experts), SourceLines.of(Trip)],
        f"mpitrain launch -n {n} -- train --ep {n} --set model.experts={n} --set model.top_k=1",
        ("tests/ranks/parallel/test_experts.py", "tests/laws/exchange.py"),
    )


def _run(transport: Transport, chosen: np.ndarray, made: dict[bytes, str]) -> _RankRows:
    """Run the forward of a mixture.    made: {row: its name}, of all ranks, which are threads"""
    n, rank, channels = transport.size, transport.rank, chosen.size
    group, traffic, arena = Group(transport, "pairwise"), transport.traffic, Arena()
    keys = Model(experts=n, top_k=1, balance=0.0)
    ops = ops_for("cpu")
    layer: Any = Plain(ops, keys, ep=group).experts(channels, 2, _drawn, _drawn)
    before, sent, arrived = traffic.nbytes, list[int](), list[str]()
    routes, grouped = group.routes, ops.grouped_linear

    def told(counts: np.ndarray) -> Any:
        found = routes(counts)
        sent.append(traffic.nbytes - before)
        return found

    def computed(rows: Any, weight: Any, ends: Any, arena: Arena) -> Any:
        y, saved = grouped(rows, weight, ends, arena)
        if not arrived:  # The first product of the expert: its rows are tokens.
            sent.append(traffic.nbytes - before)
            arrived.extend(f"t{row.argmax()}" for row in rows[: int(ends[-1])])
        else:
            made.update({y[at].tobytes(): f"e{rank}({token})" for at, token in enumerate(arrived)})
        return y, saved

    group.routes = told  # type: ignore[method-assign]
    layer.ops = SimpleNamespace(**{**vars(ops), "grouped_linear": computed})
    weights = {
        name: {"weight": p.part_of(_drawn(None, p.shape))}
        for p in layer.parameters()
        for name in [p.name.partition(".")[0]]
    }
    router = np.zeros((n, channels))
    router[chosen.reshape(-1), np.arange(channels)] = 1
    weights["router"] = {"weight": router}
    tokens = np.eye(channels)[rank * TOKENS :][:TOKENS]
    y, _ = layer.forward(weights, tokens[None], READING, arena)
    sent.append(traffic.nbytes - before)
    return _RankRows(arrived, [made[row.tobytes()] for row in y[0]], sent)


def _drawn(generator: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers that differ, so that no two outputs are equal."""
    return np.sin(1.0 + np.arange(np.prod(shape))).reshape(shape)


TOPICS = {
    "moe": Topic("Mixture of experts: tokens go to the ranks of their experts", record, 3, 2, 4)
}
