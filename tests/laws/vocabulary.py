"""What every body of the operations must do on the parts of a vocabulary: together they are the whole.

A law takes the operations and the backend of their arrays. The reductions over the parts are NumPy's.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from mpitrain.data import IGNORED
from mpitrain.machine.backend import Arena, Backend
from mpitrain.ops import Ops
from mpitrain.ops.device import reference_ops

reference = reference_ops()

PARTS = (1, 2, 3, 7)
ROUNDING = {
    np.float64: 1e-13,
    np.float32: 2e-6,
}  # of a loss, and of a gradient whose largest element is nearly its scale


def cuts(vocabulary: int, parts: int) -> list[int]:
    """Where the parts begin, and the end of the last: ragged, and some empty if there are fewer entries than parts."""
    return [vocabulary * part // parts for part in range(parts + 1)]


def drawn(rows: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits in float64, of which no exponential can be taken as they are; targets on both sides of the cuts if rows suffice.

    Every fourth target does not count.
    """
    rng = np.random.default_rng([rows, vocabulary])
    edges = sorted(
        {entry for parts in PARTS for cut in cuts(vocabulary, parts) for entry in (cut - 1, cut)}
    )
    targets = rng.integers(vocabulary, size=rows)
    near = [entry for entry in edges if 0 <= entry < vocabulary][:rows]
    targets[: len(near)] = near
    targets[3::4] = IGNORED
    return 3 * rng.standard_normal((rows, vocabulary)) - 1000 * (-1) ** np.arange(rows)[
        :, None
    ], targets


class Split:
    """Logits cut into parts, each in the backend's memory."""

    def __init__(
        self, ops: Ops, backend: Backend, logits: np.ndarray, targets: np.ndarray, parts: int
    ):
        self.ops, self.backend, self.arena = ops, backend, backend.arena()
        at = cuts(logits.shape[1], parts)
        self.parts = [
            (first, backend.from_host(logits[:, first:end].copy())) for first, end in pairwise(at)
        ]
        self.targets = backend.from_host(targets)
        self.maxima = self.over_parts(
            np.maximum, lambda first, part: ops.row_maximum(part, self.arena)
        )

    def over_parts(self, reduce: np.ufunc, compute: Callable[[int, Any], Any]) -> Any:
        """What every part has after the reduction, in the backend's memory."""
        mine = [self.backend.to_host(compute(first, part)) for first, part in self.parts]
        return self.backend.from_host(reduce.reduce(mine))

    def cross_entropy(self, scale: float) -> tuple[list[float], np.ndarray]:
        """(the loss by every part, the gradient put together)."""
        ops, targets, maxima, arena = self.ops, self.targets, self.maxima, self.arena
        facts = self.over_parts(
            np.add, lambda first, part: ops.row_exponentials(part, targets, first, maxima, arena)
        )
        done = [
            ops.cross_entropy_split(part, targets, first, maxima, facts, scale, arena)
            for first, part in self.parts
        ]
        for (_, part), (_, dlogits) in zip(self.parts, done, strict=True):
            assert dlogits is part, "the gradient is written over the logits"
        return [float(loss) for loss, _ in done], np.concatenate(
            [self.backend.to_host(d) for _, d in done], 1
        )

    def count_correct(self) -> int:
        places = self.over_parts(
            np.maximum,
            lambda first, part: self.ops.row_argmax(part, first, self.maxima, self.arena),
        )
        return int(self.ops.count_correct_split(places, self.targets, self.arena))


def reduced_over_parts(
    ops: Ops, backend: Backend, arena: Arena, dtype: type
) -> Iterator[Callable[..., Any]]:
    """Every operation whose result is reduced over the parts of something, as a function of `out`."""
    put, draw = backend.from_host, np.random.default_rng(5)
    x, w, b, dy = (
        put(draw.standard_normal(shape).astype(dtype)) for shape in ((9, 4), (7, 4), (7,), (9, 7))
    )
    targets, tokens, maxima = (
        put(np.arange(9) % 7),
        put(np.arange(9).reshape(3, 3)),
        put(np.full(9, 3, dtype)),
    )
    yield lambda **out: ops.linear(x, w, b, arena, **out)[0]
    yield lambda **out: ops.embedding(tokens, w, None, arena, 1, **out)[0]
    yield lambda **out: ops.row_maximum(dy, arena, **out)
    yield lambda **out: ops.row_exponentials(
        put(backend.to_host(dy).copy()), targets, 0, maxima, arena, **out
    )
    yield lambda **out: ops.row_argmax(dy, 0, ops.row_maximum(dy, arena), arena, **out)
    for name in ("linear", "linear_gelu", "linear_relu"):
        forward, backward = getattr(ops, name), getattr(ops, f"{name}_backward_input")
        yield lambda *, f=forward, g=backward, **out: g(dy, w, f(x, w, b, arena)[1], arena, **out)[
            0
        ]


class VocabularyLaws:
    """Laws of parts of a vocabulary, each part on a rank of its own."""

    def law_the_loss_of_parts_and_its_gradient_are_those_of_the_whole(self, ops, backend):
        """The last two shapes have parts of one column, and empty ones; one has no rows at all."""
        for rows, vocabulary in ((9, 23), (1, 40), (0, 5), (3, 7), (2, 1)):
            for dtype, tolerance in ROUNDING.items():
                logits, targets = drawn(rows, vocabulary)
                logits = logits.astype(dtype)
                true_loss, truth = reference.cross_entropy(
                    logits.astype(np.float64), targets, 0.125, None
                )
                for parts in PARTS:
                    losses, dlogits = Split(ops, backend, logits, targets, parts).cross_entropy(
                        0.125
                    )
                    case = f"{rows} rows, {vocabulary} entries in {parts} parts, {dtype.__name__}"
                    assert len(set(losses)) == 1, f"{case}: the parts differ about the loss"
                    assert abs(losses[0] - true_loss) <= tolerance * max(1, abs(true_loss)), case
                    assert dlogits.dtype == dtype and dlogits.shape == truth.shape
                    assert np.abs(dlogits - truth).max(initial=0) <= tolerance * 0.125, case

    def law_without_rounding_the_gradient_of_parts_has_the_bits_of_the_whole_s(self, ops, backend):
        """Logits are 0 or masked: a row's exponentials add up to a whole number in any order. Some parts are masked wholly."""
        for dtype in ROUNDING:
            targets = np.random.default_rng(0).integers(23, size=12)
            logits = np.where(np.random.default_rng(1).random((12, 23)) < 0.4, 0, -np.inf).astype(
                dtype
            )
            logits[np.arange(12), targets] = 0
            logits[:4, :12] = np.where(np.arange(12) == targets[:4, None], 0, -np.inf)
            whole = backend.from_host(logits.copy())
            loss, truth = ops.cross_entropy(whole, backend.from_host(targets), 0.3, backend.arena())
            for parts in PARTS:
                losses, dlogits = Split(ops, backend, logits, targets, parts).cross_entropy(0.3)
                np.testing.assert_array_equal(dlogits, backend.to_host(truth))
                assert abs(losses[0] - float(loss)) <= ROUNDING[dtype] * float(loss)

    def law_parts_count_the_correct_rows_of_the_whole(self, ops, backend):
        """The lowest of equal logits is the prediction, and a NaN is the largest of all, wherever the cuts are."""
        for dtype in ROUNDING:
            logits = np.random.default_rng(2).integers(-2, 3, size=(60, 23)).astype(dtype)
            targets = logits.argmax(1)
            targets[::3] = np.random.default_rng(3).integers(23, size=20)
            targets[1::7] = IGNORED
            logits[40:50, 20] = logits[45:55, 5] = np.nan
            targets[40:55] = np.repeat([20, 5, 5], 5)
            targets[[42, 53]] = 21, 20
            for rows in (60, 1, 0):
                truth = int(
                    ops.count_correct(
                        backend.from_host(logits[:rows]),
                        backend.from_host(targets[:rows]),
                        backend.arena(),
                    )
                )
                assert truth == (logits[:rows].argmax(1) == targets[:rows]).sum()
                for parts in PARTS:
                    assert (
                        Split(ops, backend, logits[:rows], targets[:rows], parts).count_correct()
                        == truth
                    )

    def law_parts_of_a_table_add_up_to_the_embedding(self, ops, backend):
        """Rows that a part does not hold are zero and have no gradient; one part adds the positions. Nothing is rounded."""
        put, get, arena = backend.from_host, backend.to_host, backend.arena()
        for (batch, length), vocabulary, width in (
            ((3, 5), 23, 6),
            ((1, 1), 1, 1),
            ((2, 40), 90, 3),
            ((0, 4), 5, 2),
        ):
            for dtype in ROUNDING:
                rng = np.random.default_rng(4)
                tokens = rng.integers(vocabulary, size=(batch, length))
                table, positions = (
                    rng.standard_normal((n, width)).astype(dtype) for n in (vocabulary, length + 2)
                )
                dx, before = (
                    rng.integers(-9, 9, size=s).astype(dtype)
                    for s in ((batch, length, width), table.shape)
                )
                truth, saved = reference.embedding(tokens, table, positions, None)
                dtable = np.empty_like(table)
                reference.embedding_backward_table(dx, saved, dtable, False, None)
                for parts in PARTS:
                    total, at = np.zeros_like(truth), cuts(vocabulary, parts)
                    for part, (first, end) in enumerate(pairwise(at)):
                        added = put(positions) if part == parts // 2 else None
                        x, saved = ops.embedding(
                            put(tokens), put(table[first:end]), added, arena, first
                        )
                        total += get(x)
                        if added is None:
                            assert not get(x)[(tokens < first) | (tokens >= end)].any()
                        for accumulate in (False, True):
                            mine = put(before[first:end].copy())
                            ops.embedding_backward_table(put(dx), saved, mine, accumulate, arena)
                            expected = dtable[first:end] + (before[first:end] if accumulate else 0)
                            np.testing.assert_array_equal(get(mine), expected)
                    np.testing.assert_array_equal(total, truth)

    def law_a_token_outside_the_table_disturbs_nobody(self, ops, backend):
        """On either side of the table, and far away: its row is zero, and the table's gradient ignores it."""
        put, get, arena = backend.from_host, backend.to_host, backend.arena()
        table, far = np.arange(1.0, 13).reshape(4, 3), 1 << 40
        tokens = np.array([[9, 10, 13, 14], [-1, -far, far, 11]])
        x, saved = ops.embedding(put(tokens), put(table), None, arena, 10)
        np.testing.assert_array_equal(
            get(x), [[[0] * 3, table[0], table[3], [0] * 3], [[0] * 3] * 3 + [table[1]]]
        )
        dtable, dx = put(np.full((4, 3), np.nan)), np.arange(24.0).reshape(2, 4, 3)
        ops.embedding_backward_table(put(dx), saved, dtable, False, arena)
        np.testing.assert_array_equal(get(dtable), [dx[0, 1], dx[1, 3], [0] * 3, dx[0, 2]])

    def law_what_is_reduced_over_parts_is_written_where_it_is_wanted(self, ops, backend):
        """Bit for bit what the operation puts into a buffer of its own."""
        for dtype in ROUNDING:
            arena = backend.arena()
            for call in reduced_over_parts(ops, backend, arena, dtype):
                truth = call()
                place, live = backend.from_host(np.full(truth.shape, np.nan, dtype)), arena.live
                assert call(out=place) is place and arena.live == live
                np.testing.assert_array_equal(backend.to_host(place), backend.to_host(truth))
