"""The definition of the operations of layers, forward and backward: linear, norm, embedding,
dropout, images; and of those on logits: loss, gradient and accuracy, whole or split.

A split vocabulary is Megatron's vocabulary-parallel cross-entropy: each rank has a slice of the
columns. The caller reduces (M,) or (2, M) numbers over the slices between the operations:

    cross_entropy:  row_maximum -> max -> row_exponentials -> sum -> cross_entropy_split
    count_correct:  row_maximum -> max -> row_argmax -> max -> count_correct_split

A row with the target IGNORED adds nothing to a loss or a count, and its gradient is 0. Losses of
numbers (`squared_error` and below) have NaN in its place.
"""

import math
from functools import lru_cache

import numpy as np

from mpitrain.data.source import IGNORED
from mpitrain.ops.random_bits import LANES, scale, threshold
from mpitrain.ops.table import operation

GELU_SCALE = float(np.sqrt(2 / np.pi))
GELU_CUBIC = 0.044715


@operation("a:L b:L out:L|0 -> out", "out")
def add(a, b, out, arena):
    """Write a + b to out, which may be a or b.

    All have one shape, and may be of any array type that NumPy's functions accept.
    """
    np.add(a, b, out=out)


@operation("a:L alpha=0.75 b:L beta=-0.5 out:L|0 -> out", "nothing")
def weighted_sum(a, alpha, b, beta, out, arena):
    """Write alpha a + beta b to out; if b is None, write alpha a. out may be a or b.

    a, b, out: one shape; alpha, beta: numbers
    """
    out[...] = alpha * a if b is None else alpha * a + beta * b


@operation("x:M,N b:N out:M,N|0 -> out", "out")
def add_bias(x, b, out, arena, residual=None):
    """Write x + b + residual to out.

    x, residual, out: (..., N); b: (N,), added to every row, or None
    """
    out[...] = plus(x if b is None else x + b, residual)


@operation("x:M,K w:N,K b:N -> y:M,N saved", "y", products="MNK")
def linear(x, w, b, arena, out=None, residual=None):
    """Return (y, saved) with y = x w^T + b + residual.

    x: (M, K); w: (N, K); b: (N,) or None; y: (M, N)
    """
    y = x @ w.T
    return into(out, plus(y if b is None else y + b, residual)), x


def product_3xtf32(a, b):
    """Return a b, as device.gemm=3xtf32 means it.

    Each number is the sum of two of TF32, whose products are exact in float32. The product of the
    two low parts is left out: 2^-22 of a b. The largest float32 numbers, and infinity, give NaN.
    a: (M, K) float32; b: (K, N) float32
    """
    (a_high, a_low), (b_high, b_low) = split_tf32(a), split_tf32(b)
    return a_low @ b_high + a_high @ b_low + a_high @ b_high


def split_tf32(x):
    """Return (high, low), float32 arrays that sum to x within 2^-23 of it.

    Both are TF32: the last 13 bits are 0. high is the nearest to x; low is cut off.
    """
    last = np.uint32(0x1FFF)
    high = (x.view(np.uint32) + np.uint32(0x1000) & ~last).view(np.float32)
    return high, ((x - high).view(np.uint32) & ~last).view(np.float32)


@operation("x:M,K w:N,K b:N -> y:M,N saved", "y", products="MNK")
def logits(x, w, b, arena):
    """Return the result of `linear` for the output layer of a language model.

    The row stride of y may exceed N elements, as rows may be padded. Only the operations on logits
    and the backward halves of `linear` accept such an array.
    """
    return linear(x, w, b, arena)


@operation("dy:M,N w:N,K saved@linear -> dx:M,K pending", "dx", products="MNK")
def linear_backward_input(dy, w, saved, arena, out=None):
    """Return (dx, pending) with dx = dy w.

    `pending` is the input of `linear_backward_weight` and `linear_backward_bias`.
    dy: (M, N); w: (N, K); dx: (M, K)
    """
    return into(out, dy @ w), (dy, saved)


@operation("dy:M,N w:N,K saved@linear before@gelu|M,K -> dz:M,K pending", "dz", products="MNK")
def gelu_linear_backward_input(dy, w, saved, before, arena):
    """Return (dz, pending) with dz = (dy w) gelu'(z), for a layer that follows `linear_gelu`.

    The input x of this layer is the output y of `linear_gelu`. dz is the gradient of z there.
    Continue with `linear_backward_input` on dz.
    before  the second item that `linear_gelu` saved; may be overwritten
    dz      (M, K)
    """
    return dy @ w * _gelu_slope(before), (dy, saved)


@operation(
    "pending@linear_backward_input|M,N+M,K dw:N,K accumulate=1 -> dw", "nothing", products="MNK"
)
def linear_backward_weight(pending, dw, accumulate, arena, db=None):
    """Write or add dw = dy^T x.    dw: (N, K)

    db  the bias gradient is written or added likewise, in the same pass where possible
    """
    dy, x = pending
    put(dy.T @ x, dw, accumulate)
    if db is not None:
        linear_backward_bias(pending, db, accumulate, arena)


@operation("pending@linear_backward_input|N db:N accumulate=1 -> db", "nothing", launches=2)
def linear_backward_bias(pending, db, accumulate, arena):
    """Write or add db, the sum of dy over rows.    db: (N,)"""
    put(pending[0].sum(0), db, accumulate)


@operation("x:M,K w:N,K b:N -> y:M,N saved:M,N", "y", products="MNK")
def linear_gelu(x, w, b, arena):
    """Return (y, saved) with y = gelu(x w^T + b), shapes as in `linear`.

    GELU is the tanh form of Hendrycks & Gimpel 2016, section 2.
    """
    z, _ = linear(x, w, b, arena)
    return gelu(z, arena)[0], (x, z)


@operation("dy:M,N w:N,K saved@linear_gelu|M,N -> dx:M,K pending", "dx", launches=2, products="MNK")
def linear_gelu_backward_input(dy, w, saved, arena, out=None):
    """Return (dx, pending), the input half of the backward pass of `linear_gelu`.

    It is `linear_backward_input` with dy gelu'(z) in place of dy. `pending` is the input of
    `linear_backward_weight` and `linear_backward_bias`.
    """
    x, z = saved
    return linear_backward_input(dy * _gelu_slope(z), w, x, arena, out)


@operation("x:M,K w:N,K b:N -> y:M,N saved", "y", products="MNK")
def linear_relu(x, w, b, arena):
    """Return (y, saved) with y = max(0, x w^T + b), shapes as in `linear`."""
    z, _ = linear(x, w, b, arena)
    return np.maximum(z, 0), (x, z > 0)


@operation("dy:M,N w:N,K saved@linear_relu|M,N -> dx:M,K pending", "dx", launches=2, products="MNK")
def linear_relu_backward_input(dy, w, saved, arena, out=None):
    """Return (dx, pending), the input half of the backward pass of `linear_relu`.

    It is `linear_backward_input` with dy relu'(z) in place of dy; relu' is 0 at 0.
    """
    x, positive = saved
    return linear_backward_input(dy * positive, w, x, arena, out)


@operation("z:M,K -> y:M,K saved", "y")
def gelu(z, arena):
    """Return (y, saved) with y = gelu(z), for a z that is not a product of `linear`.

    May write y over z.    z, y: any shape
    """
    return 0.5 * z * (1 + np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))), z


@operation("dy:M,K saved@gelu|M,K -> dz:M,K", "dz")
def gelu_backward(dy, saved, arena):
    """Return dz = dy gelu'(z).    dy, dz: the shape of z"""
    return dy * _gelu_slope(saved)


@operation("z:M,K -> y:M,K saved", "y")
def gelu_erf(z, arena):
    """Return (y, saved) with y = z P(z), where P is the normal distribution: GELU as BERT has it.

    z, y: (M, N)
    """
    return z * _normal(z), z


@operation("dy:M,K saved@gelu_erf|M,K -> dz:M,K", "dz")
def gelu_erf_backward(dy, saved, arena):
    """Return dz = dy (P(z) + z P'(z)).    dy, dz: the shape of z"""
    density = np.exp(-0.5 * saved**2) / np.sqrt(2 * np.pi, dtype=saved.dtype)
    return dy * (_normal(saved) + saved * density)


def _normal(z):
    half = np.vectorize(math.erfc, otypes=[np.float64])(-z / math.sqrt(2))
    return (0.5 * half).astype(z.dtype)


@operation("z:M,K -> y:M,K saved", "y")
def tanh(z, arena):
    """Return (y, saved) with y = tanh(z).    z, y: (M, N)"""
    y = np.tanh(z)
    return y, y


@operation("dy:M,K saved@tanh|M,K -> dz:M,K", "dz")
def tanh_backward(dy, saved, arena):
    """Return dz = dy (1 - y^2).    dy, dz: the shape of z"""
    return dy * (1 - saved**2)


@operation("z:M,K -> y:M,K saved", "y")
def relu(z, arena):
    """Return (y, saved) with y = max(0, z), for a z that is not a product of `linear`.

    May write y over z.    z, y: any shape
    """
    return np.maximum(z, 0), z > 0


@operation("dy:M,K saved@relu|M,K -> dz:M,K", "dz")
def relu_backward(dy, saved, arena):
    """Return dz; the gradient at 0 is 0.    dy, dz: the shape of z"""
    return dy * saved


@operation("x:M,C gain:C bias:C epsilon=0.25 -> y:M,C saved", "y")
def layer_norm(x, gain, bias, epsilon, arena):
    """Return (y, saved) with y = (x - mean) / sqrt(var + epsilon) * gain + bias over the last dim.

    x, y: (M, C); gain, bias: (C,). Source: Ba, Kiros & Hinton 2016.
    """
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    normal = centred * inverse
    return normal * gain + bias, (normal, inverse)


@operation("dy:M,C gain:C saved@layer_norm|M,C -> dx:M,C pending", "dx")
def layer_norm_backward_input(dy, gain, saved, arena, residual=None):
    """Return (dx, pending), the input half of the backward pass of `layer_norm`.

    The gradient `residual` is added to dx. `pending` is the input of `layer_norm_backward_weight`.
    dy, dx, residual: (M, C); gain: (C,)
    """
    normal, inverse = saved
    d = dy * gain
    dx = inverse * (d - d.mean(-1, keepdims=True) - normal * (d * normal).mean(-1, keepdims=True))
    return plus(dx, residual), (dy, normal)


@operation(
    "pending@layer_norm_backward_input|2,C dgain:C dbias:C accumulate=1 -> dgain dbias", "nothing"
)
def layer_norm_backward_weight(pending, dgain, dbias, accumulate, arena):
    """Write or add dgain = sum over rows of dy times the normalised x, and dbias = sum of dy.

    dgain, dbias: (C,); None: a frozen tensor has no gradient
    """
    dy, normal = pending
    if dgain is not None:
        put((dy * normal).sum(0), dgain, accumulate)
    if dbias is not None:
        put(dy.sum(0), dbias, accumulate)


@operation("x:M,C gain:C epsilon=0.25 -> y:M,C saved", "y")
def rms_norm(x, gain, epsilon, arena):
    """Return (y, saved) with y = x / sqrt(mean of x^2 + epsilon) * gain over the last dim.

    x, y: (M, C); gain: (C,). Source: Zhang & Sennrich 2019.
    """
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x * inverse * gain, (x * inverse, inverse)


@operation("dy:M,C gain:C saved@rms_norm|M,C -> dx:M,C pending", "dx")
def rms_norm_backward_input(dy, gain, saved, arena, residual=None):
    """Return (dx, pending), as `layer_norm_backward_input`."""
    normal, inverse = saved
    d = dy * gain
    dx = inverse * (d - normal * (d * normal).mean(-1, keepdims=True))
    return plus(dx, residual), (dy, normal)


@operation("pending@rms_norm_backward_input|C dgain:C accumulate=1 -> dgain", "nothing")
def rms_norm_backward_weight(pending, dgain, accumulate, arena):
    """Write or add dgain, the sum over rows of dy times the normalised x.    dgain: (C,)"""
    dy, normal = pending
    put((dy * normal).sum(0), dgain, accumulate)


@operation("x:M,2N -> y:M,N saved", "y")
def swiglu(x, arena):
    """Return (y, saved) with y = silu(gate) up, silu(z) = z / (1 + e^-z) (Shazeer 2020).

    x: (M, 2 N), gate and then up; y: (M, N)
    """
    gate, up = np.split(x, 2, -1)
    return gate * _logistic(gate) * up, x


@operation("dy:M,N saved@swiglu|M,2N -> dx:M,2N", "dx")
def swiglu_backward(dy, saved, arena):
    """Return dx.    dy: (M, N); dx: (M, 2 N)"""
    gate, up = np.split(saved, 2, -1)
    share = _logistic(gate)
    slope = share * (1 + gate * (1 - share))
    return np.concatenate([dy * up * slope, dy * gate * share], -1)


@operation("x:M,2N -> y:M,N saved", "y")
def geglu(x, arena):
    """Return (y, saved) with y = gelu(gate) up, of the tanh form (Shazeer 2020).

    x: (M, 2 N), gate and then up; y: (M, N)
    """
    gate, up = np.split(x, 2, -1)
    return gelu(gate, None)[0] * up, x


@operation("dy:M,N saved@geglu|M,2N -> dx:M,2N", "dx")
def geglu_backward(dy, saved, arena):
    """Return dx.    dy: (M, N); dx: (M, 2 N)"""
    gate, up = np.split(saved, 2, -1)
    value, own = gelu(gate.copy(), None)
    return np.concatenate([gelu_backward(dy * up, own, None), dy * value], -1)


@operation("x:M,N z:M,1 -> y:M,N saved", "y")
def gate_rows(x, z, arena):
    """Return (y, saved) with y = x / (1 + e^-z): each row is gated by a number.    x, y: (M, N); z: (M, 1)"""
    return x * _logistic(z), (x, z)


@operation("dy:M,N saved@gate_rows|M,N+M -> dx:M,N dz:M,1", "dx dz")
def gate_rows_backward(dy, saved, arena):
    """Return (dx, dz).    dy, dx: (M, N); dz: (M, 1)"""
    x, z = saved
    share = _logistic(z)
    return dy * share, (dy * x).sum(-1, keepdims=True) * share * (1 - share)


def _logistic(z):
    return 0.5 * (1 + np.tanh(0.5 * z))


@operation("z:M,K cap=2.0 -> y:M,K saved", "y")
def soft_cap(z, cap, arena):
    """Return (y, saved) with y = cap tanh(z / cap), which is below the cap (Gemma 2).    z, y: (M, N)"""
    return cap * np.tanh(z / cap), (z, cap)


@operation("z:M,K limit=0.5 -> y:M,K saved", "y")
def clip(z, limit, arena):
    """Return (y, saved) with y = z between -limit and limit, else the nearer of these.    z, y: (M, N)"""
    return np.clip(z, -limit, limit), (z, limit)


@operation("z:M,K factor=0.5 -> y:M,K", "y")
def times(z, factor, arena):
    """Return y = factor z.    z, y: (M, N)"""
    return factor * z


@operation("dy:M,K saved@clip|M,K -> dz:M,K", "dz")
def clip_backward(dy, saved, arena):
    """Return dz = dy, or 0 where z was beyond the limits.    dy, dz: the shape of z"""
    z, limit = saved
    return dy * (np.abs(z) <= limit)


@operation("dy:M,K saved@soft_cap|M,K -> dz:M,K", "dz")
def soft_cap_backward(dy, saved, arena):
    """Return dz = dy (1 - tanh(z / cap)^2).    dy, dz: the shape of z"""
    z, cap = saved
    return dy * (1 - np.tanh(z / cap) ** 2)


@operation(
    "x:B,T,2HD heads=H turned=1 theta=100.0 context=T scaling=(2,1,4,9) direction=1 -> y:B,T,2HD",
    "y",
)
def rotate(x, heads, turned, theta, context, scaling, direction, arena, positions=None, out=None):
    """Return y: the first `turned` heads of x, turned by their positions; the others as they are.

    The pair of channels i and i + D / 2 is turned by the angle position x theta^(-2 i / D), in
    float32 (Su et al. 2021, in the order of Hugging Face).

    x, y       (B, T, heads D) with an even D; out may be x
    context    positions are below it
    scaling    of the angles, as `scaled` takes it; (): none
    direction  1, or -1 for the gradient
    positions  (B, T) integers; None: 0 to T - 1 in each row
    """
    width = x.shape[2] // heads // 2
    y = x.reshape(*x.shape[:2], heads, 2, width).copy()
    at = np.arange(x.shape[1]) if positions is None else positions
    cos, sin = np.moveaxis(turns(theta, width, context, scaling)[at], -2, 0)[..., None, :].astype(
        x.dtype
    )
    a, b = y[:, :, :turned, 0].copy(), y[:, :, :turned, 1].copy()
    y[:, :, :turned, 0] = a * cos - direction * b * sin
    y[:, :, :turned, 1] = b * cos + direction * a * sin
    return into(out, y.reshape(x.shape))


@lru_cache(16)
def turns(theta, width, context, scaling=()):
    """Return the cosine and sine of each position's angles, (context, 2, width) float64."""
    frequencies = (1 / theta ** (np.arange(width) / width)).astype(np.float32)
    if scaling:
        frequencies = scaled(frequencies, theta, scaling)
    angles = np.arange(context, dtype=np.float32)[:, None] * frequencies
    table = np.stack([np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)], 1)
    table *= scaling[4] if len(scaling) == 5 else 1
    table.flags.writeable = False
    return table


def scaled(frequencies, theta, scaling):
    """Return the angles of a position for a longer context, in radians.

    Each turns as before, `factor` times slower, or by a weighted mean of both:

    (factor,)                           linear: every angle turns slower
    (factor, low, high, context)        Llama 3: with at most `low` periods in the earlier context an
                                        angle turns slower, from `high` periods on as before
    (factor, fast, slow, context, size) YaRN (Peng et al. 2023): the weight is a ramp over the numbers
                                        of the angles, between whole ones around `fast` and `slow`
                                        periods; `turns` multiplies cosines and sines by size
    """
    factor, *bounds = scaling
    if not bounds:
        return (frequencies / np.float32(factor)).astype(np.float32)
    low, high, context, *_ = bounds
    if len(bounds) == 3:
        periods = context * frequencies.astype(np.float64) / (2 * np.pi)
        weight = np.clip((periods - low) / (high - low), 0, 1)
    else:
        width = len(frequencies)
        first, last = (
            width * math.log(context / (periods * 2 * math.pi)) / math.log(theta)
            for periods in (low, high)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * width - 1)
        last += 0.001 * (first == last)
        weight = 1 - np.clip((np.arange(width) - first) / (last - first), 0, 1)
    return ((1 - weight) * frequencies / factor + weight * frequencies).astype(np.float32)


@operation("tokens<V:B,T table:V,C|B,T,C positions:T,C -> x:B,T,C saved", "x")
def embedding(tokens, table, positions, arena, first=0, out=None):
    """Return (x, saved) with x[b, t] = table[tokens[b, t] - first] + positions[t].

    A token outside the table counts as a row of zeros.
    tokens: (B, T); table: (V, C); positions: (>= T, C), or None for no addition; x: (B, T, C)

    The sum of x over the slices of a split table is exactly the x of the whole table. For this, one
    slice adds the positions and the others pass None. Every slice gets the whole gradient of the
    positions, whether it added them or not.
    """
    held = (tokens >= first) & (tokens < first + len(table))
    x = np.zeros((*tokens.shape, table.shape[1]), table.dtype)
    x[held] = table[tokens[held] - first]
    return into(out, x if positions is None else x + positions[: tokens.shape[1]]), (
        tokens[held] - first,
        held,
    )


@operation("dx:B,T,C saved@embedding dtable:V,C|0 accumulate=0 -> dtable", "nothing")
def embedding_backward_table(dx, saved, dtable, accumulate, arena):
    """Add each row of dx to its token's row of dtable, if the table has that row.

    With accumulate False, dtable is set to zero before.    dx: (B, T, C); dtable: (V, C)
    """
    rows, held = saved
    if not accumulate:
        dtable.fill(0)
    np.add.at(dtable, rows, dx[held])


@operation("dx:B,T,C dpositions:T,C accumulate=1 -> dpositions", "nothing")
def embedding_backward_positions(dx, dpositions, accumulate, arena):
    """Write or add the sum of dx over the batch.

    Positions from T on have gradient 0.    dx: (B, T, C); dpositions: (>= T, C)
    """
    if not accumulate:
        dpositions.fill(0)
    dpositions[: dx.shape[1]] += dx.sum(0)


def into(out, value):
    if out is None:
        return value
    assert out.shape == value.shape and out.dtype == value.dtype
    out[...] = value
    return out


def plus(value, residual):
    return value if residual is None else value + residual


def _gelu_slope(z):
    t = np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t**2) * GELU_SCALE * (1 + 3 * GELU_CUBIC * z**2)


def put(value, out, accumulate):
    if accumulate:
        out += value
    else:
        out[...] = value


MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


@operation("x:M,C key=(5,3) step=2 first=7 columns=C rate=0.25 -> y:M,C", "y")
def dropout(x, key, step, first, columns, rate, arena, residual=None, out=None):
    """Return x mask / (1 - p) + residual; its backward is the same function of dy.

    The mask is 0 with probability p, the rate, and else 1. Element (m, c) has number first + m
    columns + c in the whole tensor.
    x: (M, C) of rows of `columns` elements; key: (seed, layer)
    """
    numbers = first + np.arange(len(x))[:, None] * columns + np.arange(x.shape[1])
    mask = random_bits(key, step, numbers) >= threshold(rate)
    return into(out, plus(x * mask * np.asarray(scale(rate), x.dtype), residual))


def random_bits(key, step, numbers):
    """Return the 16 bits of each element.    numbers: integers from 0, any shape"""
    words = np.empty((4, *numbers.shape), np.uint64)
    words[0], words[1], words[2:] = numbers // LANES + 1, step, 0
    keys = [int(word) for word in key]
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], words[0])
        high1, low1 = _product(MULTIPLIERS[1], words[2])
        words[:] = (
            high1 ^ words[1] ^ np.uint64(keys[0]),
            low1,
            high0 ^ words[3] ^ np.uint64(keys[1]),
            low0,
        )
        keys = [(word + add) % 2**64 for word, add in zip(keys, WEYL, strict=True)]
    lane = numbers % LANES
    word = np.take_along_axis(words, (lane // 4)[None], 0)[0]
    return word >> (lane % 4 * 16).astype(np.uint64) & np.uint64(0xFFFF)


def _product(factor, x):
    """Return the upper and the lower 64 bits of a product of 64-bit integers."""
    high, low = np.uint64(factor >> 32), np.uint64(factor & 0xFFFFFFFF)
    rest, above = x & LOW, x >> HALF
    middle = (low * rest >> HALF) + low * above
    carried = (middle & LOW) + high * rest
    return high * above + (middle >> HALF) + (carried >> HALF), np.uint64(factor) * x


@operation("x:B,I,J,F w:G,SSF b:G side=S -> y:B,I,J,G saved", "y", launches=2, products="BIJSSFG")
def conv2d(x, w, b, side, arena):
    """Return (y, saved): the convolution with zeros around the image, as padding="same" of PyTorch.

    x: (B, H, W, C); w: (N, S S C), by row, column and channel; b: (N,) or None; y: (B, H, W, N)

    The channels, or the rows and columns, of x are contiguous, so x may be a view of (B, C, H, W).
    side  S
    """
    (_, rows, columns, _), around = x.shape, _surrounded(x, side)
    y = sum(
        around[:, i : i + rows, j : j + columns] @ tap.T for i, j, tap in _taps(w, side, x.shape[3])
    )
    return y if b is None else y + b, x


@operation("dy:B,I,J,G w:G,SSF side=S -> dx:B,I,J,F", "dx", launches=3, products="BIJSSFG")
def conv2d_backward_input(dy, w, side, arena):
    """Return dx, (B, H, W, C).    dy: (B, H, W, N); w: (N, S S C)"""
    images, rows, columns, _ = dy.shape
    channels, border = w.shape[1] // side**2, side // 2
    around = np.zeros((images, rows + 2 * border, columns + 2 * border, channels), dy.dtype)
    for i, j, tap in _taps(w, side, channels):
        around[:, i : i + rows, j : j + columns] += dy @ tap
    return around[:, border : border + rows, border : border + columns].copy()


@operation(
    "dy:B,I,J,G saved@conv2d|B,I,J,F dw:G,SSF side=S accumulate=1 -> dw",
    "nothing",
    launches=2,
    products="BIJSSFG",
)
def conv2d_backward_weight(dy, saved, dw, side, accumulate, arena):
    """Write or add dw.    dy: (B, H, W, N); dw: (N, S S C)"""
    (_, rows, columns, channels), around = saved.shape, _surrounded(saved, side)
    if not accumulate:
        dw[...] = 0
    for i, j, tap in _taps(dw, side, channels):
        tap += np.einsum("bhwn,bhwc->nc", dy, around[:, i : i + rows, j : j + columns])


@operation("dy:B,I,J,G db:G accumulate=1 -> db", "nothing", launches=2)
def conv2d_backward_bias(dy, db, accumulate, arena):
    """Write or add db, the sum of dy over images, rows and columns.    db: (N,)"""
    db[...] = dy.sum((0, 1, 2)) + (db if accumulate else 0)


@operation("x:B,PI,PJ,F size=P -> y:B,I,J,F saved%:B,I,J,F", "nothing")
def max_pool(x, size, arena):
    """Return (y, saved): the largest number of each window; rows and columns that fill none count not.

    x: (B, H, W, C); y: (B, H // P, W // P, C)
    size  P, at most 16
    """
    images, rows, columns, channels = x.shape
    shape = images, rows // size, columns // size, channels
    windows = x[:, : shape[1] * size, : shape[2] * size]
    windows = windows.reshape(images, shape[1], size, shape[2], size, channels)
    windows = windows.swapaxes(2, 3).reshape(*shape[:3], size * size, channels)
    return windows.max(3), (windows.argmax(3), x.shape)


@operation("dy:B,I,J,F saved@max_pool size=P -> dx:B,PI,PJ,F", "nothing")
def max_pool_backward(dy, saved, size, arena):
    """Return dx: dy at the first largest number of each window, elsewhere 0."""
    winners, shape = saved
    dx = np.zeros(shape, dy.dtype)
    at = np.indices(dy.shape)
    dx[at[0], at[1] * size + winners // size, at[2] * size + winners % size, at[3]] = dy
    return dx


def _surrounded(x, side):
    border = side // 2
    return np.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))


def _taps(w, side, channels):
    """Yield (row, column, view (N, C)) of a kernel's elements."""
    taps = w.reshape(len(w), side, side, channels)
    for i in range(side):
        for j in range(side):
            yield i, j, taps[:, i, j]


@operation("logits:M,V targets<V:M scale=0.125 -> loss dlogits:M,V", "dlogits", launches=3)
def cross_entropy(logits, targets, scale, arena, smoothing=0.0):
    """Return (loss_sum, dlogits); dlogits is written over `logits`.

    loss_sum is the sum over rows of -log(probability of the target).
    logits     (M, V)
    targets    (M,)
    scale      factor of dlogits, not of loss_sum: 1 / the targets of the whole update (`begin` in
               parallel/replica.py), times the loss scale
    smoothing  part of a target that all entries share equally (Szegedy et al. 2016, section 7)
    """
    loss_sum = cross_entropy_loss(logits, targets, arena)
    if smoothing:
        rows = counted_rows(targets)
        shifted = logits[rows] - logits[rows, targets[rows]][:, None]
        loss_sum -= smoothing * float(shifted.mean(-1, dtype=np.float64).sum())
    logits -= logits.max(-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(-1, keepdims=True)
    rows = counted_rows(targets)
    logits[rows, targets[rows]] -= 1 - smoothing
    if smoothing:
        logits -= smoothing / logits.shape[-1]
    logits *= scale
    logits[targets == IGNORED] = 0
    return loss_sum, logits


@operation("logits:M,V targets<V:M -> loss", "nothing", launches=3)
def cross_entropy_loss(logits, targets, arena):
    """Return only loss_sum, for evaluation; logits do not change."""
    shifted = (logits - logits.max(-1, keepdims=True)).astype(np.float64)
    log_sum, rows = np.log(np.exp(shifted).sum(-1)), counted_rows(targets)
    return float((log_sum[rows] - shifted[rows, targets[rows]]).sum())


@operation("logits:M,V targets<V:M -> count", "nothing", launches=3)
def count_correct(logits, targets, arena):
    """Return the number of rows that have their largest logit at the target."""
    return int((logits.argmax(-1) == targets).sum())


@operation("logits:M,V -> maxima:M", "nothing")
def row_maximum(logits, arena, out=None):
    """Return maxima: the largest logit of each row, to be maximised over the slices by the caller.

    logits: (M, V), the columns of this slice; maxima: (M,), -inf if there are no columns
    """
    return into(out, logits.max(-1, initial=-np.inf))


@operation("logits:M,V targets<V:M first=0 maxima@row_maximum|M -> facts:2,M", "nothing")
def row_exponentials(logits, targets, first, maxima, arena, out=None, smoothing=0.0, share=0.0):
    """Return facts, to be summed over the slices; may overwrite the logits with data for
    `cross_entropy_split`.

    logits     (M, V), the columns of this slice
    targets    (M,), indices in the whole vocabulary
    maxima     (M,), of whole rows
    facts      (2, M): each row's sum of exp(logit - maximum); its target's logit - maximum, or 0 if
               the target is in another slice. With smoothing the latter is the mean of these
               differences over the smoothed target: (1 - smoothing) of it + share of each entry's
    smoothing  as of `cross_entropy`
    share      smoothing / entries of the whole vocabulary
    """
    rows, columns = columns_of(targets, first, logits)
    logits -= maxima[:, None]
    facts = np.zeros((2, len(logits)), logits.dtype)
    facts[1] = share * logits.sum(-1) if share else 0
    facts[1, rows] += (1 - smoothing) * logits[rows, columns]
    np.exp(logits, out=logits)
    facts[0] = logits.sum(-1)
    return into(out, facts)


@operation(
    "logits:M,V targets<V:M first=0 maxima@row_maximum|M facts@row_exponentials|2,M "
    "scale=0.125 -> loss dlogits:M,V",
    "dlogits",
    launches=3,
)
def cross_entropy_split(
    logits, targets, first, maxima, facts, scale, arena, smoothing=0.0, share=0.0
):
    """Return (loss_sum, dlogits) as `cross_entropy`, on the columns of this slice.

    dlogits is written over `logits`. loss_sum is the loss of whole rows, with the same bits on
    every slice: do not sum it.
    logits: (M, V), as `row_exponentials` left them; maxima: (M,); facts: (2, M), summed over the
    slices; smoothing, share: as of `row_exponentials`
    """
    rows, columns = columns_of(targets, first, logits)
    total, at_target = facts
    logits /= total[:, None]
    logits[rows, columns] -= 1 - smoothing
    logits -= share
    logits *= scale
    logits[targets == IGNORED] = 0
    losses = np.log(total, dtype=np.float64) - at_target
    return float(losses[counted_rows(targets)].sum()), logits


@operation("logits:M,V first=0 maxima@row_maximum|M -> places:M", "nothing")
def row_argmax(logits, first, maxima, arena, out=None):
    """Return places: minus the lowest index with the row's largest logit.

    The caller takes the maximum of places over the slices. Indices are in the whole vocabulary. A
    NaN is larger than any number. float32 distinguishes the first 2^24 entries of a vocabulary.
    logits: (M, V); maxima: (M,), of whole rows
    places: (M,), -inf for a row with its largest logit in another slice
    """
    entries = first + np.arange(logits.shape[-1], dtype=logits.dtype)
    is_largest = (logits == maxima[:, None]) | np.isnan(logits)
    return into(
        out, np.where(is_largest, -entries, -np.inf).max(-1, initial=-np.inf).astype(logits.dtype)
    )


@operation("places@row_argmax|M targets<V:M -> count", "nothing", launches=3)
def count_correct_split(places, targets, arena):
    """Return the result of `count_correct`, from the maximum of `row_argmax` over the slices.

    places, targets: (M,)
    """
    return int((-places == targets).sum())


@operation("predictions:L targets:L scale=0.125 -> loss dpredictions:L", "dpredictions", launches=3)
def squared_error(predictions, targets, scale, arena):
    """Return (loss_sum, dpredictions): the sum of (prediction - target)^2, and its gradient.

    dpredictions is written over `predictions`. A target NaN does not count.
    predictions, targets  equally many numbers, of any shape
    scale                 factor of dpredictions, as of `cross_entropy`
    """
    error = predictions.reshape(-1) - targets.reshape(-1)
    return _of_numbers(predictions, targets, scale, error**2, 2 * error)


@operation("predictions:L targets:L scale=0.125 -> loss dpredictions:L", "dpredictions", launches=3)
def absolute_error(predictions, targets, scale, arena):
    """Return the sum of |prediction - target| as `squared_error`; the gradient at 0 is 0."""
    error = predictions.reshape(-1) - targets.reshape(-1)
    return _of_numbers(predictions, targets, scale, np.abs(error), np.sign(error))


@operation("predictions:L targets:L scale=0.125 -> loss dpredictions:L", "dpredictions", launches=3)
def binary_cross_entropy(predictions, targets, scale, arena):
    """Return the sum of -log(probability of the target) as `squared_error`.

    predictions  logits: the probability of 1 is 1 / (1 + exp(-logit))
    targets      from 0 to 1
    """
    x, y = predictions.reshape(-1), targets.reshape(-1)
    power = np.exp(-np.abs(x))
    loss = np.maximum(x, 0) - x * y + np.log1p(power)
    return _of_numbers(
        predictions, targets, scale, loss, np.where(x < 0, power, 1) / (1 + power) - y
    )


def _of_numbers(predictions, targets, scale, losses, gradient):
    counted = ~np.isnan(targets.reshape(-1))
    predictions[...] = np.where(counted, scale * gradient, 0).reshape(predictions.shape)
    return float(np.sum(losses, where=counted, dtype=np.float64)), predictions


def counted_rows(targets):
    """Return the numbers of the rows that count, ascending.    targets: (M,)"""
    return np.flatnonzero(targets != IGNORED)


def columns_of(targets, first, logits):
    """Return (rows, columns) of the targets in these columns."""
    rows = np.flatnonzero((targets >= first) & (targets < first + logits.shape[-1]))
    return rows, targets[rows] - first
