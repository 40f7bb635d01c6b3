"""Topics of layers on several ranks: linear layers, and ring attention, with symbols as their input.

The rows of a linear layer's input are unit vectors, one for each feature. So the output for a
feature is a coefficient, and a column of outputs is printed as one sum of features. Weights are
small whole numbers. In ring attention the value of each token is a unit vector, and all scores are
equal: an output is the mean of the values that its query sees.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from mpitrain.collectives.group import ActivationBuffer, Group
from mpitrain.config import Layout
from mpitrain.errors import Sentence
from mpitrain.layers.base import READING
from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import Arena
from mpitrain.ops.device import ops_for
from mpitrain.parallel.tensor.context import RingAttention
from mpitrain.parallel.tensor.layer_factory import GroupShape, layers_for
from mpitrain.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpitrain.parallel.tensor.rows import ReplicatedRows
from mpitrain.tools.textbook.explain.explanation import (
    Columns,
    CountedFormula,
    CutMatrix,
    Explanation,
    Frame,
    SourceLines,
    Topic,
    TopicSetting,
)
from mpitrain.tools.textbook.explain.toy import written
from mpitrain.transport.base import Transport
from mpitrain.transport.threads import run_ranks

FEATURES = {1: 4, 2: 4, 3: 3, 4: 4}
"""{ranks: inputs and outputs of the whole layer}: the ranks divide them."""


class ShownLayer(NamedTuple):
    """A layer to show.

    make       (factory, inputs and outputs) -> the layer of this rank
    source     its class, shown as source
    splits     which dim of the weight is divided: 0 outputs, 1 inputs
    sentences  the idea, a sentence each
    is_alone   whether every rank has all of x and of y, as between layers that are not divided
    """

    make: Callable[[Plain, int], Any]
    source: type
    splits: int
    sentences: Sequence[str]
    is_alone: bool = False


def _drawn(generator: Any, shape: tuple[int, ...]) -> np.ndarray:
    outputs, inputs = np.indices(shape)
    return 1.0 + (outputs + 2 * inputs) % 3


class _RankCells(NamedTuple):
    """The cells of a rank in each frame, and the bytes that it has sent by then.

    pair  bytes that it sends for a column-parallel layer and a row-parallel one behind it
    """

    frames: Sequence[tuple[str, dict[str, list[str]], int]]
    pair: int


def record(shown: ShownLayer, setting: TopicSetting) -> Explanation:
    n, count = setting.ranks, FEATURES[setting.ranks]
    ranks: list[_RankCells] = run_ranks(n, _run, shown)
    groups = ("x", "W", "y", "dy", "dx")
    frames = [
        Frame(
            ranks[0].frames[at][0],
            tuple(
                tuple(cell for group in groups for cell in rank.frames[at][1][group])
                for rank in ranks
            ),
            sent=tuple(rank.frames[at][2] for rank in ranks),
        )
        for at in range(len(ranks[0].frames))
    ]
    size, times = 8 * count * count, 3 if shown.is_alone else 2
    return Explanation(
        [Sentence(sentence, n=n) for sentence in shown.sentences],
        (
            "x0+2x1 under y0: that column of y is this sum of features; d0 is a symbol of dy. W: numbers of a row or "
            "column of the weight. - or empty: not on this rank, or not yet."
        ),
        [Sentence("rank {r}", r=rank) for rank in range(n)],
        [
            Columns("input x", _numbered("x", count)),
            Columns("rows of W" if shown.splits == 0 else "columns of W", _numbered("W", count)),
            Columns("output y", _numbered("y", count)),
            Columns("gradient dy", _numbered("dy", count)),
            Columns("gradient dx", _numbered("dx", count)),
        ],
        frames,
        [
            CountedFormula(
                "bytes that a rank sends, forward and backward",
                max(frames[-1].sent),
                f"{times} (n-1)/n B T C",
                times * (n - 1) / n * size,
            ),
            CountedFormula(
                "bytes that a rank sends for a column-parallel layer and a row-parallel one behind it",
                max(rank.pair for rank in ranks),
                "4 (n-1)/n B T C",
                4 * (n - 1) / n * size,
            ),
        ],
        [SourceLines.of(shown.source)],
        f"mpitrain launch -n {n} -- train --tp {n}",
        ("tests/laws/layers.py", "tests/ranks/parallel/test_training.py"),
        products=_products(n, count, shown.splits),
    )


def _products(n: int, count: int, splits: int) -> list[tuple[str, list[CutMatrix]]]:
    """Return the product of the forward and that of the backward, cut among the ranks."""
    own = count // n

    def cut(dim: int) -> list[tuple[int, int, int, int, str, int]]:
        """Return the parts of the ranks: rows (0), columns (1), or all of a matrix on each rank (2)."""
        if dim == 2:
            return [(0, 0, count, count, Sentence("every rank"), -1)]
        return [
            (0, r * own, count, own, Sentence("rank {r}", r=r), r)
            if dim
            else (r * own, 0, own, count, Sentence("rank {r}", r=r), r)
            for r in range(n)
        ]

    def product(names: Sequence[str], dims: Sequence[int]) -> list[CutMatrix]:
        shape = count, count
        summed = [(0, 0, count, count, Sentence("the sum of all ranks"), n)]
        return [
            CutMatrix(sign, name, shape, cut(dim) if dim < 3 else summed)
            for sign, name, dim in zip(("", "\N{DOT OPERATOR}", "="), names, dims, strict=True)
        ]

    inner, outer = ((2, 1, 1), (1, 0, 3))  # of a product over all inputs, and of one over a rank's
    forward, backward = (inner, outer) if splits == 0 else (outer, inner)
    return [
        ("forward: y", product(("x", "W^T", "y"), forward)),
        ("backward: dx", product(("dy", "W", "dx"), backward)),
    ]


def _numbered(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{feature}" for feature in range(count))


def _run(transport: Transport, shown: ShownLayer) -> _RankCells:
    group, arena = Group(transport, "ring"), Arena()
    layers = layers_for(ops_for("cpu"), group, Layout())
    partial: list[np.ndarray] = []
    if isinstance(layers.rows, ReplicatedRows):
        reduction = layers.rows.reduction

        def seen(lease: ActivationBuffer) -> Any:
            """Copy this rank's summand before it is added to others."""
            partial.append(lease.array.copy())
            return reduction(lease)

        layers.rows.reduction = seen  # type: ignore[method-assign]
    count = FEATURES[transport.size]
    layer = shown.make(layers, count)
    (weight,) = layer.parameters()
    w = {"weight": weight.part_of(_drawn(None, weight.shape))}
    per_rank = count // transport.size
    own = range(transport.rank * per_rank, (transport.rank + 1) * per_rank)
    every = range(count)
    x_at, y_at = (every, own) if shown.splits == 0 else (own, every)
    if shown.is_alone:
        x_at = y_at = every
    x, dy = (np.ascontiguousarray(np.eye(count)[:, list(at)]) for at in (x_at, y_at))
    rows = w["weight"] if shown.splits == 0 else w["weight"].T
    empty = [""] * count
    cells = {
        "x": _cells(x, x_at, "x"),
        "W": [",".join(f"{v:g}" for v in rows[own.index(at)]) if at in own else "" for at in every],
        "y": empty,
        "dy": empty,
        "dx": empty,
    }
    frames: list[tuple[str, dict[str, list[str]], int]] = []
    before = transport.traffic.nbytes

    def note(title: str, **changed: list[str]) -> None:
        cells.update(changed)
        frames.append((title, dict(cells), sent))

    sent = 0
    note("start")
    y, saved = layer.forward(w, x, READING, arena)
    if partial:
        note("forward: a summand of y on each rank", y=_cells(partial.pop(), y_at, "x"))
    elif shown.is_alone:  # An all-gather changes no column that the rank has.
        note("forward: some columns of y on each rank", y=_cells(y[:, own], own, "x"))
    sent = transport.traffic.nbytes - before
    note("forward: y", y=_cells(y, y_at, "x"))
    note("the gradient of y arrives", dy=_cells(dy, y_at, "d"))
    dx, _ = layer.backward_input(w, dy, saved, arena)
    if partial:
        note("backward: a summand of dx on each rank", dx=_cells(partial.pop(), x_at, "d"))
    elif shown.is_alone:
        note("backward: some columns of dx on each rank", dx=_cells(dx[:, own], own, "d"))
    sent = transport.traffic.nbytes - before
    note("backward: dx", dx=_cells(dx, x_at, "d"))
    return _RankCells(frames, _bytes_of_the_pair(layers, group, count, arena))


def _bytes_of_the_pair(layers: Plain, group: Group, count: int, arena: Arena) -> int:
    traffic = group.transport.traffic
    pair = [
        make(layers, count, count, _drawn, bias=False)
        for make in (ColumnParallelLinear, RowParallelLinear)
    ]
    weights = [
        {"weight": weight.part_of(_drawn(None, weight.shape))}
        for layer in pair
        for weight in layer.parameters()
    ]
    before, rows, states = traffic.nbytes, np.eye(count), []
    for layer, w in zip(pair, weights, strict=True):
        rows, saved = layer.forward(w, rows, READING, arena)
        states.append(saved)
    for layer, w, saved in reversed([*zip(pair, weights, states, strict=True)]):
        rows, _ = layer.backward_input(w, rows, saved, arena)
    return traffic.nbytes - before


def _cells(array: np.ndarray, features: Sequence[int], letter: str) -> list[str]:
    """Return the columns of an array as sums of symbols: a letter and the number of a feature."""
    cells = [""] * len(array)
    for feature, column in zip(features, array.T, strict=True):
        cells[feature] = written({f"{letter}{i}": float(c) for i, c in enumerate(column) if c})
    return cells


def record_ring(setting: TopicSetting) -> Explanation:
    n, tokens = setting.ranks, 2 * setting.ranks
    ranks: list[_RingCells] = run_ranks(n, _ring)
    later = [Sentence("step {s}: tokens of rank r - {s}", s=step) for step in range(1, n)]
    titles = ["start", "step 0: own tokens", *later]
    around = tuple((rank, (rank + 1) % n, -1) for rank in range(n))
    frames = [
        Frame(
            title,
            tuple(rank.cells[at] for rank in ranks),
            around if 0 < at < n else (),
            tuple(rank.sent[at] for rank in ranks),
        )
        for at, title in enumerate(titles)
    ]
    chunks = "first chunk", "second chunk"
    size = 8 * tokens * tokens
    return Explanation(
        [
            Sentence(
                "Each row has {t} chunks of tokens, and a rank has the r-th and the r-th from the end.",
                t=tokens,
            ),
            "In each step a rank attends to the keys and values that it has, while they travel to the next rank.",
            "No query sees a later key. After step 0 a rank leaves out half of its queries or of the keys: equal work.",
            "A part joins an output by the sums of the exponentials of both.",
            "In the backward the gradients of keys and values travel one step behind them, and come home last.",
        ],
        "v0: the value of token 0. All scores are equal, so y is the mean of the values that its query has seen.",
        [Sentence("rank {r}", r=rank) for rank in range(n)],
        [Columns("keys and values in use", chunks), Columns("output y", chunks)],
        frames,
        [
            CountedFormula(
                "bytes that a rank sends, forward and backward",
                max(rank.nbytes for rank in ranks),
                "6 (n-1)/n B T C",
                6 * (n - 1) / n * size,
            ),
            CountedFormula(
                "pairs of query and key, on the rank that has most",
                max(rank.pairs for rank in ranks),
                "T (T+1)/(2n)",
                tokens * (tokens + 1) / (2 * n),
            ),
        ],
        [SourceLines.of(RingAttention)],
        f"mpitrain launch -n {n} -- train --cp {n} --set layout.cp_mode=ring",
        ("tests/ranks/parallel/test_tensor.py",),
    )


class _RingCells(NamedTuple):
    """The cells of a rank in each frame, and the bytes that it has sent by then.

    nbytes  that it sends forward and backward
    pairs   of query and key that it computes
    """

    cells: list[tuple[str, ...]]
    sent: list[int]
    nbytes: int
    pairs: int


def _ring(transport: Transport) -> _RingCells:
    tokens, arena = 2 * transport.size, Arena()
    context, traffic = Group(transport, "ring"), transport.traffic
    alone = cast(Group, GroupShape(0, 1))
    layers = layers_for(ops_for("cpu"), alone, Layout(cp_mode="ring"), context)
    layer: Any = layers.attention(tokens, 1)
    before, sent, pairs = traffic.nbytes, [0], 0
    cells: list[tuple[str, ...]] = [("",) * 4]
    part = layer.ops.attention_part

    def seen(q: Any, kv: Any, *rest: Any) -> Any:
        nonlocal pairs
        sent.append(traffic.nbytes - before)
        y, joined = part(q, kv, *rest)
        pairs += q.shape[1] * kv.shape[1] - (
            len(cells) == 1
        )  # The first chunk sees one of its own.
        used = [*_means(kv[0, :, tokens:]), ""][:2]
        cells.append((*used, *_means(y[0])))
        return y, joined

    layer.ops = SimpleNamespace(**{**vars(layer.ops), "attention_part": seen})
    own = layers.tokens.of(tokens)
    values = np.eye(tokens)[own][None]
    y, saved = layer.forward(
        {}, np.concatenate([0 * values, 0 * values, values], 2), READING, arena
    )
    layer.backward_input({}, np.ones_like(y), saved, arena)
    return _RingCells(cells, sent, traffic.nbytes - before, pairs)


def _means(rows: np.ndarray) -> list[str]:
    return [written({f"v{i}": float(c) for i, c in enumerate(row) if c}) for row in rows]


NO_GATHER = (
    "A column-parallel layer and a row-parallel one behind it need no all-gather: see their bytes."
)


def _topic(title: str, shown: ShownLayer) -> Topic:
    return Topic(title, partial(record, shown), ranks=2, most=4)


TOPICS = {
    "column": _topic(
        "Column-parallel linear layer: outputs are divided",
        ShownLayer(
            lambda layers, count: ColumnParallelLinear(layers, count, count, _drawn, bias=False),
            ColumnParallelLinear,
            0,
            (
                "A linear layer computes y = x W^T. Here the outputs are divided among {n} ranks.",
                "Every rank has all of x, and computes its own columns of y: no message forward.",
                "In the backward each rank has only a summand of dx, since it has some outputs.",
                "An all-reduce adds the summands, so every rank has dx.",
            ),
        ),
    ),
    "row": _topic(
        "Row-parallel linear layer: inputs are divided",
        ShownLayer(
            lambda layers, count: RowParallelLinear(layers, count, count, _drawn, bias=False),
            RowParallelLinear,
            1,
            (
                "A linear layer computes y = x W^T. Here the inputs are divided among {n} ranks.",
                "Each rank has some columns of x, and so computes only a summand of y.",
                "An all-reduce adds the summands, so every rank has y.",
                "The backward needs no message: dy is on every rank, dx_r = dy W_r.",
                "After a column-parallel layer, x is divided in this way: one all-reduce for both.",
            ),
        ),
    ),
    "column-alone": _topic(
        "Column-parallel layer alone: outputs are gathered",
        ShownLayer(
            lambda layers, count: ColumnParallelLinear(
                layers, count, count, _drawn, bias=False, gather_output=True
            ),
            ColumnParallelLinear,
            0,
            (
                "Outputs are divided among {n} ranks, but the next layer needs all of y.",
                "An all-gather puts the columns of y of all ranks side by side.",
                "In the backward an all-reduce adds the summands of dx, as with column.",
                NO_GATHER,
            ),
            is_alone=True,
        ),
    ),
    "row-alone": _topic(
        "Row-parallel layer alone: gradients of inputs are gathered",
        ShownLayer(
            lambda layers, count: RowParallelLinear(
                layers, count, count, _drawn, bias=False, input_is_parallel=False
            ),
            RowParallelLinear,
            1,
            (
                "Inputs are divided among {n} ranks. Every rank has all of x, and takes its columns.",
                "An all-reduce adds the summands of y, as with row.",
                "In the backward an all-gather puts the columns of dx of all ranks side by side.",
                NO_GATHER,
            ),
            is_alone=True,
        ),
    ),
    "ring-attention": Topic(
        "Ring attention: the tokens of a row are divided", record_ring, least=2, most=4
    ),
}
