"""Attention of all ranks of a ring, without messages, against attention over whole rows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.layers.base import TokenShare
from mpitrain.machine.backend import Arena
from mpitrain.ops import Ops
from mpitrain.ops.cuda.product import gemm
from mpitrain.ops.cuda.tiles import AttentionGain, MeasuredTiles
from mpitrain.ops.device import cuda_ops, reference_ops
from mpitrain.ops.reference.attention import Seen
from tests.cases.documents import starts_of
from tests.cases.numbers import assert_close, numbers, stored, values
from tests.cases.packed import on

reference = reference_ops()


def of_rank(
    ops: Ops,
    share: TokenShare,
    q: Any,
    kv: Any,
    dy: Any,
    heads: int,
    starts: Any,
    window: int = 0,
    cap: float = 0.0,
) -> Any:
    """Return y, dq and, for each rank's tokens, dkv: what a rank computes of whole rows (B, T, C)."""
    arena, joined, steps = Arena(), None, []
    y, q, dy = None, share.cut(q), share.cut(dy)
    own = q.shape[1]
    firsts: Any = [None] * share.ranks
    if starts is not None or window:
        starts = np.zeros(kv.shape[:2], np.int32) if starts is None else starts
        firsts = share.firsts(starts, window)
    for step in share.steps(kv.shape[1], window):
        source = (share.rank - step) % share.ranks
        where = Seen(firsts[source], *((own, 0) if step else (0, window)), cap=cap)
        queries, keys = share.seen(source, own, window)
        if queries.start < queries.stop:
            steps.append((source, queries, keys, where))
    passing = [share._replace(rank=rank).cut(kv) for rank in range(share.ranks)]
    for source, queries, keys, where in steps:
        seen = q[:, queries], passing[source][:, keys]
        y, joined = ops.attention_part(*seen, heads, arena, where, joined)
    dq, dkvs = np.zeros_like(q), [np.zeros_like(each) for each in passing]
    for source, queries, keys, where in steps:
        part, seen = np.zeros_like(q), (q[:, queries], passing[source][:, keys])
        out = part[:, queries], dkvs[source][:, keys]
        ops.attention_part_backward(dy[:, queries], joined, *seen, *out, arena, where)
        dq += part
    return y, dq, dkvs


def check_ring(
    ops: Ops,
    ranks: int,
    shape: tuple[int, int],
    h: int,
    d: int,
    g: int | None = None,
    documents: list[list[int]] | None = None,
    window: int = 0,
    cap: float = 0.0,
    dtype: str = "float64",
) -> None:
    """Compare y and all gradients, put together from the ranks of a ring."""
    q, kv, dy = (
        stored(numbers(n, *shape, columns * d), dtype)
        for n, columns in enumerate((h, 2 * (g or h), h), 1)
    )
    starts = None if documents is None else starts_of(documents)
    y, dq, dkv = np.empty_like(q), np.empty_like(q), np.zeros(kv.shape)
    for rank in range(ranks):
        share = TokenShare(rank, ranks, True)
        mine = share.of(shape[1])
        y[:, mine], dq[:, mine], parts = of_rank(ops, share, q, kv, dy, h, starts, window, cap)
        for source, part in enumerate(parts):
            dkv[:, share._replace(rank=source).of(shape[1])] += part.astype("f8")
    seen = Seen(starts, window=window, cap=cap)
    true_y, saved = reference.attention(values(q), values(kv), h, None, seen)
    true_dq, true_dkv = np.empty(q.shape), np.empty(kv.shape)
    reference.attention_backward(values(dy), saved, true_dq, true_dkv, None)
    for found, truth in ((y, true_y), (dq, true_dq), (dkv, true_dkv)):
        assert_close(found, truth, dtype, f"ring of {ranks}, {shape}")


RINGS: list[tuple[Any, ...]] = [
    (2, (2, 24), 4, 3, 2),
    (3, (2, 24), 2, 3, None, [[5, 7, 12], [1] * 24]),
    (4, (0, 24), 2, 3, None),
    (2, (1, 268), 2, 4, 1, [[3, 90, 84, 91]]),  # 134 tokens of a rank are not whole tiles
    *((4, (1, 24), 2, 3, 1, None, window) for window in (1, 2, 3, 4, 7, 24)),
    (3, (2, 24), 2, 3, None, [[5, 7, 12], [1] * 24], 3, 0.7),
    (2, (1, 268), 2, 4, 1, None, 70),
]


def on_kernels(kernels: Kernels, ring: tuple[Any, ...], dtype: str) -> None:
    check_ring(on(kernels, dtype), *ring, dtype=dtype)


def by_gain(kernels: Kernels) -> None:
    """All parts have logarithms of one base, also if the table has measured numbers of keys near those of some alone."""
    table = MeasuredTiles(by_gain=True, attention=[AttentionGain(16, 24, 9.0)])
    check_ring(cuda_ops(kernels, partial(gemm, table=table)), 2, (1, 24), 2, 16, dtype="float32")


def parts() -> Iterator[Callable]:
    """attention and attention_join, of a ring."""
    for ring in RINGS:
        yield partial(on_kernels, ring=ring, dtype="float64")


def tensor_parts() -> Iterator[Callable]:
    """attention_tensor, its backward and attention_join, of a ring."""
    for ranks, length, *more in (
        (2, 560, [[100, 200, 260]]),
        (3, 300, None),
        (3, 300, None, 60, 0.7),
    ):
        yield partial(on_kernels, ring=(ranks, (1, length), 2, 16, 1, *more), dtype="float16")
    yield partial(on_kernels, ring=(2, (1, 140), 2, 16, 1, [[100, 40]], 50, 0.7), dtype="3xtf32")
    yield by_gain
