"""Layers forward and backward: pointwise, columns, layer_norm, embedding, attention."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.launches import sum_rows
from mpitrain.ops.device import cuda_ops, host_ops, reference_ops
from mpitrain.ops.reference.attention import Seen
from tests.cases.numbers import assert_close, numbers, stored, values
from tests.cases.packed import Packed, on

reference = reference_ops()


def halves(
    names: list[str], ops, pending, truth, shapes: list[tuple[int, ...]], dtype: str
) -> None:
    """Each weight half must overwrite rubbish, and add to what is there, as the reference does; no gradient is of 16 bits."""
    for accumulate in (False, True):
        for name, shape in zip(names, shapes, strict=True):
            out = stored(
                numbers(9, *shape), "float32" if dtype in ("float16", "bfloat16") else dtype
            )
            expected = values(out)
            getattr(ops, name)(*pending, out, accumulate, Arena())
            getattr(reference, name)(*truth, expected, accumulate, None)
            assert_close(out, expected, dtype, name)


def check_linear(
    kernels: Kernels,
    m: int,
    k: int,
    n: int,
    activation: str = "",
    dtype: str = "float32",
    biased: bool = True,
    gemm: str = "tiled",
) -> None:
    """A linear layer, forward and the three backward halves."""
    ops, arena, name = cuda_ops(kernels, product.chosen(gemm)), Arena(), f"linear{activation}"
    x, w, b, dy = (
        stored(a, dtype)
        for a in (numbers(1, m, k), numbers(2, n, k), numbers(3, n), numbers(4, m, n))
    )
    y, saved = getattr(ops, name)(x, w, b if biased else None, arena)
    true_y, true_saved = getattr(reference, name)(
        values(x), values(w), values(b) if biased else None, None
    )
    assert_close(y, true_y, dtype, name)
    dx, pending = getattr(ops, f"{name}_backward_input")(dy, w, saved, arena)
    true_dx, truth = getattr(reference, f"{name}_backward_input")(
        values(dy), values(w), true_saved, None
    )
    assert_close(dx, true_dx, dtype, "dx")
    names, shapes = ["linear_backward_weight", "linear_backward_bias"], [(n, k), (n,)]
    count = 2 if biased else 1
    halves(names[:count], ops, (pending,), (truth,), shapes[:count], dtype)
    if biased:
        summed = "float32" if dtype in ("float16", "bfloat16") else dtype
        for kind, accumulate in ((summed, False), (summed, True), (dtype, True)):
            dw, db = stored(numbers(9, n, k), summed), stored(numbers(8, n), kind)
            expected = values(dw), values(db)
            ops.linear_backward_weight(pending, dw, accumulate, arena, db)
            reference.linear_backward_weight(truth, expected[0], accumulate, None, expected[1])
            assert_close(dw, expected[0], dtype, "dw")
            assert_close(db, expected[1], dtype, "db")


def check_fused(
    kernels: Kernels, m: int, k: int, n: int, dtype: str = "float32", gemm: str = "tiled"
) -> None:
    """A linear layer after one with GELU: the residual in its sum; backward GELU's derivative, written over what was kept."""
    ops, arena = cuda_ops(kernels, product.chosen(gemm)), Arena()
    x, up, b, w, residual, dy = (
        stored(a, dtype)
        for a in (
            numbers(1, m, k),
            numbers(2, n, k),
            numbers(3, n),
            numbers(4, k, n),
            numbers(5, m, k),
            numbers(6, m, k),
        )
    )
    h, (_, z) = ops.linear_gelu(x, up, b, arena)
    true_h, (_, true_z) = reference.linear_gelu(values(x), values(up), values(b), None)
    y, saved = ops.linear(h, w, None, arena, residual=residual)
    true_y, true_saved = reference.linear(true_h, values(w), None, None, residual=values(residual))
    assert_close(y, true_y, dtype, "y")
    dz, pending = ops.gelu_linear_backward_input(dy, w, saved, z, arena)
    true_dz, truth = reference.gelu_linear_backward_input(
        values(dy), values(w), true_saved, true_z, None
    )
    assert dz is z
    assert_close(dz, true_dz, dtype, "dz")
    halves(["linear_backward_weight"], ops, (pending,), (truth,), [(k, n)], dtype)


def check_logits(kernels: Kernels, m: int, k: int, n: int, dtype: str = "float32") -> None:
    """Logits begin at multiples of 64 elements, and through loss and both backward products nobody touches what is between."""
    ops, arena, targets = cuda_ops(kernels), Arena(), np.arange(m) % n
    x, w = stored(numbers(1, m, k), dtype), stored(numbers(2, n, k), dtype)
    y, saved = ops.logits(x, w, None, arena)
    assert (
        y.shape == (m, n)
        and y.strides == (-(-n // 64) * 64 * y.itemsize, y.itemsize)
        and y.ctypes.data % 64 == 0
    )
    assert_close(y, reference.logits(values(x), values(w), None, None)[0], dtype, "logits")
    true_dy = reference.cross_entropy(values(y), targets, 0.125, None)[1]
    _, dy = ops.cross_entropy(y, targets, 0.125, arena)
    dx, pending = ops.linear_backward_input(dy, w, saved, arena)
    true_dx, truth = reference.linear_backward_input(true_dy, values(w), values(x), None)
    assert_close(dx, true_dx, dtype, "dx")
    halves(["linear_backward_weight"], ops, (pending,), (truth,), [(n, k)], dtype)


def check_activation(kernels: Kernels, n: int, activation: str, dtype: str = "float32") -> None:
    """An activation alone, forward and backward, on arrays of which those of an odd length have no alignment."""
    ops = cuda_ops(kernels)
    z, dy = (stored(numbers(seed, n), dtype, shifted=n % 2 == 1) for seed in (1, 2))
    true_y, true_saved = getattr(reference, activation)(values(z), None)
    truth = getattr(reference, f"{activation}_backward")(values(dy), true_saved, None)
    y, saved = getattr(ops, activation)(z, Arena())
    assert_close(y, true_y, dtype)
    assert_close(getattr(ops, f"{activation}_backward")(dy, saved, Arena()), truth, dtype)


def check_cap(kernels: Kernels, m: int, n: int, name: str, dtype: str = "float32") -> None:
    """A cap of numbers below and above the cap, forward and backward, of rows side by side and of padded ones."""
    ops, arrays = cuda_ops(kernels), (3 * numbers(1, m, n), 3 * numbers(2, m, n))
    for pads in ((0, 0), (3, 3), (8, 0)):
        padded = [
            stored(np.pad(x, ((0, 0), (0, pad))), dtype)
            for x, pad in zip(arrays, pads, strict=True)
        ]
        z, dy = (x[:, :n] for x in padded)
        backward = f"{name}_backward"
        true_y, true_saved = getattr(reference, name)(values(z), 2.5, None)
        truth = getattr(reference, backward)(values(dy), true_saved, None)
        y, saved = getattr(ops, name)(z, 2.5, Arena())
        assert_close(y, true_y, dtype)
        assert_close(getattr(ops, backward)(dy, saved, Arena()), truth, dtype)
        assert_close(ops.times(z, 2.5, Arena()), reference.times(values(z), 2.5, None), dtype)
        assert not padded[0][:, n:].any(), "the padding is nobody's"


def check_sums(
    kernels: Kernels, m: int, n: int, dtype: str = "float32", shifted: bool = False
) -> None:
    """A sum of two arrays, into a third and into one of them, and of rows, a bias and a residual: rounded once."""
    ops, arena = cuda_ops(kernels), Arena()
    a, b, bias = (
        stored(x, dtype, shifted) for x in (numbers(1, m, n), numbers(2, m, n), numbers(3, n))
    )
    wide = values(a).astype(np.float32) if dtype != "float64" else values(a)
    truth, biased = (wide + values(x).astype(wide.dtype) for x in (b, bias))
    every = [
        (bias, b, biased + values(b).astype(wide.dtype)),
        (bias, None, biased),
        (None, b, truth),
        (None, None, wide),
    ]
    for here, residual, sums in every:
        over, out = stored(values(a), dtype, shifted), np.empty_like(a)
        ops.add_bias(over, here, over, arena, residual)
        ops.add_bias(a, here, out, arena, residual)
        np.testing.assert_array_equal(over, sums.astype(a.dtype))
        np.testing.assert_array_equal(out, over)
    ops.add(a, b, out, arena)
    ops.add(a, b, b, arena)
    for found in (out, b):
        np.testing.assert_array_equal(found, truth.astype(a.dtype))


def check_weighted_sums(
    kernels: Kernels, n: int, dtype: str = "float32", shifted: bool = False
) -> None:
    """A sum with weights, and one array alone, into a third and into either."""
    ops, arena = cuda_ops(kernels), Arena()
    a, b = (stored(numbers(seed, n), dtype, shifted) for seed in (1, 2))
    for other in (b, None):
        reference.weighted_sum(
            values(a), 0.75, None if other is None else values(b), -0.5, truth := np.empty(n), None
        )
        ops.weighted_sum(a, 0.75, other, -0.5, found := np.empty_like(a), arena)
        assert_close(found, truth, dtype, "a sum with weights")
        ops.weighted_sum(over := a.copy(), 0.75, other, -0.5, over, arena)
        np.testing.assert_array_equal(over, found)
    ops.weighted_sum(a, 0.75, over := b.copy(), -0.5, over, arena)
    reference.weighted_sum(values(a), 0.75, values(b), -0.5, truth, None)
    assert_close(over, truth, dtype, "a sum over its second")


def check_column_sums(
    kernels: Kernels, m: int, n: int, accumulate: bool, dtype: str = "float32"
) -> None:
    """A sum down the columns, the bias gradient where it comes alone."""
    x, out = stored(numbers(1, m, n), dtype), stored(numbers(2, n), "float32")
    truth = values(x).sum(0) + (values(out) if accumulate else 0)
    sum_rows(kernels, x, out, accumulate, Arena())
    assert_close(out, truth)


def check_layer_norm(
    kernels: Kernels,
    m: int,
    c: int,
    dtype: str = "float32",
    shifted: bool = False,
    adds: bool = False,
) -> None:
    """LayerNorm of rows with a mean far from 0, forward and both backward halves.

    adds: dx has a residual in its sum
    """
    ops, arena = cuda_ops(kernels), Arena()
    x, gain, bias, dy, residual = (
        stored(a, dtype, shifted)
        for a in (
            3 + numbers(1, m, c),
            numbers(2, c),
            numbers(3, c),
            numbers(4, m, c),
            numbers(5, m, c),
        )
    )
    y, saved = ops.layer_norm(x, gain, bias, 1e-5, arena)
    true_y, true_saved = reference.layer_norm(values(x), values(gain), values(bias), 1e-5, None)
    assert_close(y, true_y, dtype, "y")
    dx, pending = ops.layer_norm_backward_input(dy, gain, saved, arena, residual if adds else None)
    true_dx, truth = reference.layer_norm_backward_input(
        values(dy), values(gain), true_saved, None, values(residual) if adds else None
    )
    size = np.abs(values(dy) * values(gain) * true_saved[1]).max(
        initial=0
    )  # in a row of one number all cancels
    assert_close(dx, true_dx, dtype, "dx", size)
    stored_as = "float32" if dtype in ("float16", "bfloat16") else dtype
    for accumulate in (False, True):
        for frozen in (None, 0, 1):
            outs = [None if n == frozen else stored(numbers(n, c), stored_as) for n in range(2)]
            expected = [None if out is None else values(out) for out in outs]
            ops.layer_norm_backward_weight(pending, *outs, accumulate, Arena())
            reference.layer_norm_backward_weight(truth, *expected, accumulate, None)
            for out, wanted in zip(outs, expected, strict=True):
                assert out is None or assert_close(out, wanted, dtype, "gain and bias") is None


def check_rms_norm(
    kernels: Kernels, m: int, c: int, dtype: str = "float32", shifted: bool = False
) -> None:
    """RMSNorm, forward and both backward halves, with a residual in dx."""
    ops, arena = cuda_ops(kernels), Arena()
    x, gain, dy, residual = (
        stored(a, dtype, shifted)
        for a in (3 + numbers(1, m, c), numbers(2, c), numbers(4, m, c), numbers(5, m, c))
    )
    y, saved = ops.rms_norm(x, gain, 1e-5, arena)
    true_y, true_saved = reference.rms_norm(values(x), values(gain), 1e-5, None)
    assert_close(y, true_y, dtype, "y")
    dx, pending = ops.rms_norm_backward_input(dy, gain, saved, arena, residual)
    true_dx, truth = reference.rms_norm_backward_input(
        values(dy), values(gain), true_saved, None, values(residual)
    )
    assert_close(dx, true_dx, dtype, "dx")
    halves(["rms_norm_backward_weight"], ops, (pending,), (truth,), [(c,)], dtype)


def check_gated(kernels: Kernels, name: str, m: int, n: int, dtype: str = "float32") -> None:
    """SwiGLU and GeGLU, forward and backward; rows of an odd width have no alignment."""
    ops, arena, back = cuda_ops(kernels), Arena(), f"{name}_backward"
    x, dy = stored(3 * numbers(1, m, 2 * n), dtype), stored(numbers(2, m, n), dtype)
    truth, true_saved = getattr(reference, name)(values(x), None)
    true_dx = getattr(reference, back)(values(dy), true_saved, None)
    y, saved = getattr(ops, name)(x, arena)
    assert_close(y, truth, dtype, "y")
    assert_close(getattr(ops, back)(dy, saved, arena), true_dx, dtype, "dx")


def check_gate_rows(kernels: Kernels, m: int, n: int, dtype: str = "float32") -> None:
    """A gate of a number for each row, forward and backward; rows of an odd width have no alignment."""
    ops, arena = cuda_ops(kernels), Arena()
    arrays = 2 * numbers(1, m, n), 2 * numbers(2, m, 1), numbers(3, m, n)
    x, z, dy = (stored(array, dtype) for array in arrays)
    truth, true_saved = reference.gate_rows(values(x), values(z), None)
    y, saved = ops.gate_rows(x, z, arena)
    assert_close(y, truth, dtype, "y")
    gradients = reference.gate_rows_backward(values(dy), true_saved, None)
    found = ops.gate_rows_backward(dy, saved, arena)
    for name, one, wanted in zip(("dx", "dz"), found, gradients, strict=True):
        assert_close(one, wanted, dtype, name)


def check_rotate(
    kernels: Kernels,
    b: int,
    t: int,
    h: int,
    d: int,
    turned: int,
    dtype: str = "float32",
    index: str = "",
) -> None:
    """Rotary positions, of a row and given; into another array, and back over the array itself."""
    ops, x = cuda_ops(kernels), stored(numbers(1, b, t, h * d), dtype)
    at = np.random.default_rng(0).integers(2 * t, size=(b, t)).astype(index) if index else None
    given = h, turned, 10_000.0, 2 * t, (2, 1, 4, t)
    truth = reference.rotate(values(x), *given, 1, None, at)
    y = ops.rotate(x, *given, 1, Arena(), at)
    assert_close(y, truth, dtype, "y")
    truth = reference.rotate(values(y), *given, -1, None, at)
    assert ops.rotate(y, *given, -1, Arena(), at, y) is y
    assert_close(y, truth, dtype, "y")
    assert_close(y, values(x), dtype, "turned back")


def check_embedding(
    kernels: Kernels,
    b: int,
    t: int,
    v: int,
    c: int,
    dtype: str = "float32",
    index: str = "int64",
    shifted: bool = False,
) -> None:
    """Token and position embedding, and the gradients of both tables."""
    ops = cuda_ops(kernels)
    tokens = np.random.default_rng(0).integers(v, size=(b, t)).astype(index)
    table, positions, dx = (
        stored(a, dtype, shifted)
        for a in (numbers(1, v, c), numbers(2, t + 2, c), numbers(3, b, t, c))
    )
    x, saved = ops.embedding(tokens, table, positions, Arena())
    true_x, truth = reference.embedding(tokens, values(table), values(positions), None)
    assert_close(x, true_x, dtype, "x")
    halves(["embedding_backward_table"], ops, (dx, saved), (values(dx), truth), [(v, c)], dtype)
    halves(["embedding_backward_positions"], ops, (dx,), (values(dx),), [(t + 2, c)], dtype)


def check_part_of_table(kernels: Kernels, v: int, first: int, positions: bool) -> None:
    """A row that the part does not hold counts as zero, and its gradient is nobody's."""
    ops, tokens = cuda_ops(kernels), np.array([[first + v - 1, first + v, first - 1, first]])
    table, dx = stored(numbers(1, v, 6), "float32"), stored(numbers(3, 1, 4, 6), "float32")
    added = stored(numbers(2, 4, 6), "float32") if positions else None
    x, saved = ops.embedding(tokens, table, added, Arena(), first)
    true_x, truth = reference.embedding(
        tokens, values(table), values(added) if positions else None, None, first
    )
    assert_close(x, true_x)
    halves(["embedding_backward_table"], ops, (dx, saved), (values(dx), truth), [(v, 6)], "float32")


def check_attention(
    kernels: Kernels,
    b: int,
    t: int,
    h: int,
    d: int,
    dtype: str = "float32",
    shifted: bool = False,
    g: int | None = None,
    queries: int | None = None,
    rate: float = 0.0,
    tensor_cores: str = "mma",
    **seen: float,
) -> None:
    """Attention forward and backward: g heads of keys and values, the last `queries` rows, fields of `Seen`; with a rate dropout,
    of some heads of a batch's sequences.
    """
    name = "attention_dropout" if rate else "attention"
    given = ((5, 2**40 + 3), 2**35 + 1, 2**20 + 3, h + 2, rate) if rate else ()
    on_kernels = on(kernels, dtype, tensor_cores)
    ops, truth = (Packed(each, name, g, queries, **seen) for each in (on_kernels, reference))
    qkv, dy = (
        stored(numbers(1, b, t, (h + 2 * (g or h)) * d), dtype, shifted),
        stored(numbers(2, b, queries or t, h * d), dtype, shifted),
    )
    arena = Arena()
    y, saved = ops.attention(qkv, h, *given, arena)
    true_y, true_saved = truth.attention(values(qkv), h, *given, None)
    assert_close(y, true_y, dtype, "y")
    assert_close(
        ops.attention_backward(dy, saved, arena),
        truth.attention_backward(values(dy), true_saved, None),
        dtype,
        "dqkv",
    )


def check_next(
    kernels: Kernels,
    past: tuple[int, ...],
    t: int,
    h: int,
    d: int,
    dtype: str = "float32",
    g: int | None = None,
    **seen: float,
) -> None:
    """Compare attention of new tokens, after different numbers of stored tokens; the rest of the
    cache must not change.
    """
    ops, b, room = cuda_ops(kernels), len(past), max(past, default=0) + t + 2
    groups = g or h
    qkv = stored(numbers(1, b, t, (h + 2 * groups) * d), dtype)
    caches = [stored(numbers(seed, b, groups, room, d), dtype) for seed in (2, 3)]
    truths = [values(cache) for cache in caches]
    firsts, width = np.array(past, np.int64), h * d
    y, truth = (
        each.attention_next(
            x[..., :width], x[..., width:], *stores, firsts, h, Arena(), Seen(**seen)
        )
        for each, x, stores in ((ops, qkv, caches), (reference, values(qkv), truths))
    )
    assert_close(y, truth, dtype, "y")
    for cache, truth in zip(caches, truths, strict=True):
        np.testing.assert_array_equal(values(cache), truth)


CAPPED = {"cap": 0.7, "scale": 0.9}
"""A soft-cap, and a scale that brings scores below and above it."""


def dropped_attentions() -> Iterator[Callable]:
    """attention_dropout."""
    for b, t, h in ((1, 1, 1), (2, 5, 3), (0, 5, 1), (1, 33, 2), (2, 130, 2)):
        yield partial(check_attention, b=b, t=t, h=h, d=4, shifted=t == 33, rate=0.3)
    for dtype in ("float64", "bfloat16"):
        yield partial(check_attention, b=1, t=40, h=2, d=16, dtype=dtype, rate=0.3)
    yield partial(check_attention, b=2, t=70, h=4, g=2, d=4, rate=0.3, offset=70)
    yield partial(check_attention, b=1, t=37, h=2, d=4, rate=0.3, **CAPPED)


def check_no_sequences(kernels: Kernels, dtype: str, d: int) -> None:
    """Attention of no sequences is none, and so is its gradient."""
    ops, qkv = Packed(cuda_ops(kernels)), stored(numbers(1, 0, 5, 3 * d), dtype)
    y, saved = ops.attention(qkv, 1, Arena())
    assert y.shape == (0, 5, d) and ops.attention_backward(y, saved, Arena()).shape == qkv.shape


def check_split_attention(kernels: Kernels) -> None:
    """Three products of TF32 are nearer to the truth than the sums of CUDA cores; one alone would be far."""
    q, kv, dy = (
        stored(numbers(seed, 1, 300, n * 16), "float32") for seed, n in ((1, 1), (2, 2), (3, 1))
    )
    y, saved = reference.attention(values(q), values(kv), 1, None)
    true_dq, true_dkv = np.empty(q.shape), np.empty(kv.shape)
    reference.attention_backward(values(dy), saved, true_dq, true_dkv, None)
    errors = []
    for way in ("float32", "3xtf32"):
        ops, arena, dq, dkv = on(kernels, way), Arena(), np.empty_like(q), np.empty_like(kv)
        mine, saved = ops.attention(q, kv, 1, arena)
        ops.attention_backward(dy, saved, dq, dkv, arena)
        found = (mine, y), (dq, true_dq), (dkv, true_dkv)
        errors.append([np.abs(values(x) - truth).max() / np.abs(truth).max() for x, truth in found])
    by_cores, by_splitting = errors
    assert all(error <= 1e-6 for error in by_splitting), by_splitting
    assert by_splitting[2] <= by_cores[2], "the longest sums"


def check_attention_repeats(kernels: Kernels, dtype: str) -> None:
    """In another order of threads each sum is the same to the last bit."""
    ops, arena = Packed(on(kernels, dtype), kv_heads=1), Arena()
    qkv, dy = stored(numbers(1, 1, 200, 64), dtype), stored(numbers(2, 1, 200, 32), dtype)
    found = set()
    for _ in range(2):
        y, saved = ops.attention(qkv, 2, arena)
        found.add((y.tobytes(), ops.attention_backward(dy, saved, arena).tobytes()))
    assert len(found) == 1


def check_masking(kernels: Kernels, dtype: str = "float32", d: int = 4) -> None:
    """Later tokens, however large, change nothing."""
    ops, qkv = Packed(on(kernels, dtype)), stored(numbers(1, 1, 70, 3 * d), dtype)
    y = ops.attention(qkv, 1, Arena())[0].copy()
    for t in (0, 31, 32, 63, 64):
        later = qkv.copy()
        later[:, t + 1 :] += 1e3
        np.testing.assert_array_equal(
            ops.attention(later, 1, Arena())[0][:, : t + 1], y[:, : t + 1]
        )


def check_dropout(
    kernels: Kernels,
    m: int,
    c: int,
    columns: int,
    first: int = 0,
    dtype: str = "float32",
    shifted: bool = False,
) -> None:
    """Dropout of rows that begin `columns` numbers apart, into a third array and into x: the bits of the host."""
    ops, host = cuda_ops(kernels), host_ops()
    x, residual = (stored(numbers(seed, m, c), dtype, shifted) for seed in (1, 2))
    wide = np.float64 if dtype == "float64" else np.float32
    for added in (None, residual):
        given = (5, 2**40 + 3), 2**35 + 1, first, columns, 0.3
        truth = host.dropout(
            x.astype(wide), *given, Arena(), None if added is None else added.astype(wide)
        )
        found = ops.dropout(x, *given, Arena(), added)
        np.testing.assert_array_equal(found, truth.astype(x.dtype))
        over = stored(values(x), dtype, shifted)
        assert ops.dropout(over, *given, Arena(), added, over) is over
        np.testing.assert_array_equal(over, found)


def dropouts() -> Iterator[Callable]:
    """dropout."""
    for m, c in ((1, 1), (0, 4), (3, 5), (2, 16), (5, 64), (9, 515), (270, 1040)):
        yield partial(check_dropout, m=m, c=c, columns=c, first=m * c)
    for m, c, columns, first in (
        (1, 31, 31, 0),
        (3, 16, 48, 16),
        (5, 7, 21, 2**33 + 14),
        (4, 40, 80, 40),
    ):
        yield partial(check_dropout, m=m, c=c, columns=columns, first=first)
    for first in (0, 1):
        yield partial(check_dropout, m=3, c=48, columns=48, first=first, shifted=True)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_dropout, m=6, c=40, columns=40, first=32, dtype=dtype)


def linears() -> Iterator[Callable]:
    """pointwise and columns."""
    for m, k, n in ((1, 1, 1), (5, 3, 7), (0, 3, 2), (33, 29, 31)):  # one tile for all weights
        for activation in ("", "_gelu", "_relu"):
            yield partial(check_linear, m=m, k=k, n=n, activation=activation)
    yield partial(check_linear, m=5, k=3, n=7, activation="_gelu", dtype="float64", biased=False)
    yield partial(check_linear, m=70, k=9, n=40, activation="_gelu", dtype="bfloat16")
    yield partial(check_linear, m=33, k=31, n=37, activation="_gelu", gemm="library")
    for m, k, n in ((1, 1, 1), (0, 3, 2), (33, 29, 31)):
        yield partial(check_fused, m=m, k=k, n=n)
    yield partial(check_fused, m=35, k=9, n=40, dtype="float16")
    yield partial(check_fused, m=33, k=300, n=37, gemm="library", dtype="bfloat16")
    yield partial(check_logits, m=6, k=16, n=129, dtype="bfloat16")
    for n in (0, 1, 7, 8, 9, 1023, 1024, 1026):
        yield partial(check_activation, n=n, activation="gelu")
        yield partial(check_activation, n=n, activation="relu", dtype="bfloat16")
    for activation in ("gelu_erf", "tanh"):
        yield partial(check_activation, n=1026, activation=activation)
        yield partial(check_activation, n=9, activation=activation, dtype="bfloat16")
    for m, n in ((1, 1), (0, 3), (33, 31), (9, 128), (3, 132)):
        yield partial(check_sums, m=m, n=n)
    for dtype in ("float64", "float16", "bfloat16"):
        for n in (37, 264):
            yield partial(
                check_sums, m=5, n=n, dtype=dtype, shifted=dtype == "bfloat16" and n == 37
            )
    for n in (0, 1, 1031):
        yield partial(check_weighted_sums, n=n)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_weighted_sums, n=1024, dtype=dtype, shifted=dtype == "bfloat16")
    for m, n in ((1, 1), (0, 3), (7, 31), (65, 32), (200, 33), (33, 68)):
        yield partial(check_column_sums, m=m, n=n, accumulate=n % 2 == 0)
    for m, n in ((200, 65), (33, 136)):
        yield partial(check_column_sums, m=m, n=n, accumulate=n % 2 == 0, dtype="bfloat16")


def norms() -> Iterator[Callable]:
    """layer_norm."""
    for m, c in (
        (1, 1),
        (0, 4),
        (3, 5),
        (4, 32),
        (5, 127),
        (70, 128),
        (9, 129),
        (2, 512),
        (2, 523),
        (2, 1024),
        (9, 1025),
        (3, 2049),
        (3, 10_501),
    ):
        yield partial(check_layer_norm, m=m, c=c, adds=c % 2 == 0 or c > 1000)
    yield partial(check_layer_norm, m=7, c=36, shifted=True, adds=True)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_layer_norm, m=7, c=36, dtype=dtype, adds=True)


def rms_norms() -> Iterator[Callable]:
    """layer_norm without a mean."""
    for m, c in ((1, 1), (0, 4), (5, 127), (70, 128), (2, 523), (9, 1025), (3, 2049), (3, 10_501)):
        yield partial(check_rms_norm, m=m, c=c)
    yield partial(check_rms_norm, m=7, c=36, shifted=True)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_rms_norm, m=7, c=36, dtype=dtype)


def gates() -> Iterator[Callable]:
    """pointwise: gated, gate_rows, soft_cap."""
    for name in ("swiglu", "geglu"):
        for m, n in ((1, 1), (0, 3), (5, 7), (9, 128), (3, 301)):
            yield partial(check_gated, name=name, m=m, n=n)
        for dtype in ("float64", "float16", "bfloat16"):
            yield partial(check_gated, name=name, m=5, n=36, dtype=dtype)
    for m, n in ((1, 1), (0, 3), (5, 7), (9, 128), (3, 301)):
        yield partial(check_gate_rows, m=m, n=n)
        for name in ("soft_cap", "clip"):
            yield partial(check_cap, m=m, n=n, name=name)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_gate_rows, m=5, n=36, dtype=dtype)
        for name in ("soft_cap", "clip"):
            yield partial(check_cap, m=3, n=44, name=name, dtype=dtype)


def rotations() -> Iterator[Callable]:
    """rotate."""
    for b, t, h, d, turned in (
        (1, 1, 1, 2, 1),
        (0, 5, 2, 4, 1),
        (2, 7, 5, 6, 3),
        (1, 70, 3, 16, 3),
    ):
        for index in ("", "int32", "int64"):
            yield partial(check_rotate, b=b, t=t, h=h, d=d, turned=turned, index=index)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_rotate, b=2, t=9, h=3, d=8, turned=2, dtype=dtype)


def embeddings() -> Iterator[Callable]:
    """embedding, and the positions' gradient of columns."""
    shapes = (
        (1, 1, 1, 1),
        (3, 5, 2, 7),
        (2, 9, 50, 3),
        (0, 4, 5, 6),
        (3, 43, 31, 128),
        (2, 64, 33, 131),
        (1, 7, 65, 36),
        (1, 8, 32, 127),
    )
    for b, t, v, c in shapes:
        yield partial(check_embedding, b=b, t=t, v=v, c=c)
    yield partial(check_embedding, b=3, t=50, v=40, c=36, dtype="float64", index="int32")
    yield partial(check_embedding, b=3, t=9, v=7, c=12, shifted=True)
    for t, c in ((5, 12), (4, 257), (3, 264)):
        yield partial(check_embedding, b=2, t=t, v=7, c=c, dtype="bfloat16")
    for v, first in ((5, 0), (5, 9), (32, 64), (0, 3)):
        yield partial(check_part_of_table, v=v, first=first, positions=first == 9)


GROUPED = [
    (70, 4, 2, None, 0),  # heads that share keys and values
    (33, 3, 1, None, 33),  # and no mask
    (65, 2, 2, None, 64),
    (97, 2, 1, 40, 57),  # the last rows of a sequence
    (97, 2, 2, 33, 20),  # keys that no query sees
    (40, 2, 2, 5, 0),
    (200, 2, 1, 150, 31),
]
"""Tokens, heads, heads of keys and values, queries, offset."""


def attentions() -> Iterator[Callable]:
    """attention."""
    for b, t, h, d in (
        (1, 1, 1, 1),
        (2, 5, 3, 7),
        (1, 31, 2, 4),
        (1, 32, 1, 4),
        (1, 33, 2, 7),
        (1, 65, 1, 4),
        (2, 97, 2, 7),
    ):  # each width is a library of its own, which takes a second to compile
        yield partial(check_attention, b=b, t=t, h=h, d=d)
    yield partial(check_attention, b=1, t=70, h=1, d=65)  # a second group of channels
    yield partial(check_attention, b=1, t=37, h=2, d=8, shifted=True)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_attention, b=1, t=40, h=2, d=8, dtype=dtype)
    for t, h, g, queries, offset in GROUPED:
        yield partial(check_attention, b=2, t=t, h=h, g=g, d=4, queries=queries, offset=offset)
    for dtype in ("float32", "float64", "bfloat16"):
        yield partial(check_attention, b=1, t=70, h=2, g=1, d=8, dtype=dtype, window=40, **CAPPED)
    yield partial(check_attention, b=1, t=33, h=2, d=8, cap=50.0)
    yield partial(check_no_sequences, dtype="float32", d=4)
    yield check_masking


def next_attentions() -> Iterator[Callable]:
    """attention_next."""
    for past, t, h, d in (
        ((0,), 1, 1, 1),
        ((3, 0, 7), 1, 3, 7),
        ((31, 30), 1, 2, 8),
        ((32,), 2, 1, 8),
        ((0, 5), 34, 2, 7),
        ((64, 1), 3, 1, 65),
        ((2,), 2, 2, 65),
        ((), 2, 1, 8),
    ):
        yield partial(check_next, past=past, t=t, h=h, d=d)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_next, past=(9, 40), t=2, h=2, d=8, dtype=dtype)
    for g in (1, 2):
        yield partial(check_next, past=(9, 40), t=3, h=4, g=g, d=8)
    for window in (1, 2, 10, 32, 33, 1000):
        yield partial(check_next, past=(9, 70), t=1, h=1, d=8, window=window)
        yield partial(check_next, past=(40, 0), t=35, h=2, g=1, d=8, window=window)
    for dtype in ("float32", "bfloat16"):
        yield partial(check_next, past=(9, 40), t=2, h=2, d=8, dtype=dtype, window=20, **CAPPED)


def tensor_attentions() -> Iterator[Callable]:
    """attention_tensor and attention_tensor_backward."""
    for b, t, h in (
        (1, 1, 1),
        (2, 5, 3),
        (1, 33, 1),
        (1, 65, 2),
        (1, 127, 1),
        (1, 128, 1),
        (2, 129, 2),
        (1, 270, 1),
    ):
        yield partial(check_attention, b=b, t=t, h=h, d=16, dtype="float16")
    yield partial(check_attention, b=1, t=140, h=2, d=16, dtype="bfloat16", shifted=True)
    for t, h, g, queries, offset in (*GROUPED, (300, 2, 1, 170, 130), (256, 2, 2, 130, 256)):
        yield partial(
            check_attention,
            b=1 + (t < 100),
            t=t,
            h=h,
            g=g,
            d=16,
            queries=queries,
            offset=offset,
            dtype="float16",
        )
    yield partial(
        check_attention, b=1, t=131, h=2, d=64, dtype="float16"
    )  # several copies to a thread
    yield partial(check_attention, b=1, t=100, h=1, d=80, dtype="bfloat16")  # eight warps
    for t, d, seen in ((200, 80, {"window": 70}), (160, 64, {"offset": 160})):
        yield partial(check_attention, b=1, t=t, h=2, g=1, d=d, dtype="float16", **seen, **CAPPED)
    yield partial(check_no_sequences, dtype="float16", d=16)
    yield partial(check_masking, dtype="float16", d=16)
    yield partial(check_attention_repeats, dtype="float16")
    # Of float32 the same template, with other fragments and one block on a multiprocessor.
    for t in (1, 17, 127, 129):
        yield partial(check_attention, b=1, t=t, h=2, d=16, dtype="3xtf32")
    yield partial(check_attention, b=2, t=131, h=2, d=64, dtype="3xtf32", shifted=True)
    yield check_split_attention
