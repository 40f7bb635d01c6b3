"""The definition of the operations of layers, forward and backward: linear, norm, embedding,
attention.
"""

import numpy as np

GELU_SCALE = float(np.sqrt(2 / np.pi))
GELU_CUBIC = 0.044715


def add(a, b, out, arena):
    """Write a + b to out, which may be a or b.

    All have one shape, and may be of any array type that NumPy's functions accept.
    """
    np.add(a, b, out=out)


def weighted_sum(a, alpha, b, beta, out, arena):
    """Write alpha a + beta b to out; if b is None, write alpha a. out may be a or b.

    a, b, out: one shape; alpha, beta: numbers
    """
    out[...] = alpha * a if b is None else alpha * a + beta * b


def add_bias(x, b, out, arena, residual=None):
    """Write x + b + residual to out.

    x, residual, out: (..., N); b: (N,), added to every row, or None
    """
    out[...] = plus(x if b is None else x + b, residual)


def dequantize(q, scale, out, arena):
    """Write (q - 128) times the scale of each row to out: a weight of 8 bits as numbers.

    q: (N, K) uint8; scale: (N,); out: (N, K)
    """
    out[...] = (q.astype(scale.dtype) - 128) * scale[:, None]


def linear(x, w, b, arena, out=None, residual=None):
    """Return (y, saved) with y = x w^T + b + residual.

    x: (M, K); w: (N, K); b: (N,) or None; y: (M, N)
    """
    y = x @ w.T
    return into(out, plus(y if b is None else y + b, residual)), x


def logits(x, w, b, arena):
    """Return the result of `linear` for the output layer of a language model.

    The row stride of y may exceed N elements, as rows may be padded. Only the operations on logits
    and the backward halves of `linear` accept such an array.
    """
    return linear(x, w, b, arena)


def linear_backward_input(dy, w, saved, arena, out=None):
    """Return (dx, pending) with dx = dy w.

    `pending` is the input of `linear_backward_weight` and `linear_backward_bias`.
    dy: (M, N); w: (N, K); dx: (M, K)
    """
    return into(out, dy @ w), (dy, saved)


def gelu_linear_backward_input(dy, w, saved, before, arena):
    """Return (dz, pending) with dz = (dy w) gelu'(z), for a layer that follows `linear_gelu`.

    The input x of this layer is the output y of `linear_gelu`. dz is the gradient of z there.
    Continue with `linear_backward_input` on dz.
    before  the second item that `linear_gelu` saved; may be overwritten
    dz      (M, K)
    """
    return dy @ w * _gelu_slope(before), (dy, saved)


def linear_backward_weight(pending, dw, accumulate, arena, db=None):
    """Write or add dw = dy^T x.    dw: (N, K)

    db  receives the bias gradient, as from `linear_backward_bias`, in the same pass where possible
    """
    dy, x = pending
    put(dy.T @ x, dw, accumulate)
    if db is not None:
        linear_backward_bias(pending, db, False, arena)


def linear_backward_bias(pending, db, accumulate, arena):
    """Write or add db, the sum of dy over rows.    db: (N,)"""
    put(pending[0].sum(0), db, accumulate)


def linear_gelu(x, w, b, arena):
    """Return (y, saved) with y = gelu(x w^T + b), shapes as in `linear`.

    GELU is the tanh form of Hendrycks & Gimpel 2016, section 2.
    """
    z, _ = linear(x, w, b, arena)
    return gelu(z, arena)[0], (x, z)


def linear_gelu_backward_input(dy, w, saved, arena, out=None):
    """Return (dx, pending), the input half of the backward pass of `linear_gelu`.

    It is `linear_backward_input` with dy gelu'(z) in place of dy. `pending` is the input of
    `linear_backward_weight` and `linear_backward_bias`.
    """
    x, z = saved
    return linear_backward_input(dy * _gelu_slope(z), w, x, arena, out)


def linear_relu(x, w, b, arena):
    """Return (y, saved) with y = max(0, x w^T + b), shapes as in `linear`."""
    z, _ = linear(x, w, b, arena)
    return np.maximum(z, 0), (x, z > 0)


def linear_relu_backward_input(dy, w, saved, arena, out=None):
    """Return (dx, pending), the input half of the backward pass of `linear_relu`.

    It is `linear_backward_input` with dy relu'(z) in place of dy; relu' is 0 at 0.
    """
    x, positive = saved
    return linear_backward_input(dy * positive, w, x, arena, out)


def gelu(z, arena):
    """Return (y, saved) with y = gelu(z), for a z that is not a product of `linear`.

    May write y over z.    z, y: any shape
    """
    return 0.5 * z * (1 + np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))), z


def gelu_backward(dy, saved, arena):
    """Return dz = dy gelu'(z).    dy, dz: the shape of z"""
    return dy * _gelu_slope(saved)


def relu(z, arena):
    """Return (y, saved) with y = max(0, z), for a z that is not a product of `linear`.

    May write y over z.    z, y: any shape
    """
    return np.maximum(z, 0), z > 0


def relu_backward(dy, saved, arena):
    """Return dz; the gradient at 0 is 0.    dy, dz: the shape of z"""
    return dy * saved


def layer_norm(x, gain, bias, epsilon, arena):
    """Return (y, saved) with y = (x - mean) / sqrt(var + epsilon) * gain + bias over the last dim.

    x, y: (M, C); gain, bias: (C,). Source: Ba, Kiros & Hinton 2016.
    """
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    normal = centred * inverse
    return normal * gain + bias, (normal, inverse)


def layer_norm_backward_input(dy, gain, saved, arena, residual=None):
    """Return (dx, pending), the input half of the backward pass of `layer_norm`.

    The gradient `residual` is added to dx. `pending` is the input of `layer_norm_backward_weight`.
    dy, dx, residual: (M, C); gain: (C,)
    """
    normal, inverse = saved
    d = dy * gain
    dx = inverse * (d - d.mean(-1, keepdims=True) - normal * (d * normal).mean(-1, keepdims=True))
    return plus(dx, residual), (dy, normal)


def layer_norm_backward_weight(pending, dgain, dbias, accumulate, arena):
    """Write or add dgain = sum over rows of dy times the normalised x, and dbias = sum of dy.

    dgain, dbias: (C,); None: a frozen tensor has no gradient
    """
    dy, normal = pending
    if dgain is not None:
        put((dy * normal).sum(0), dgain, accumulate)
    if dbias is not None:
        put(dy.sum(0), dbias, accumulate)


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


def embedding_backward_table(dx, saved, dtable, accumulate, arena):
    """Add each row of dx to its token's row of dtable, if the table has that row.

    With accumulate False, dtable is set to zero before.    dx: (B, T, C); dtable: (V, C)
    """
    rows, held = saved
    if not accumulate:
        dtable.fill(0)
    np.add.at(dtable, rows, dx[held])


def embedding_backward_positions(dx, dpositions, accumulate, arena):
    """Write or add the sum of dx over the batch.

    Positions from T on have gradient 0.    dx: (B, T, C); dpositions: (>= T, C)
    """
    if not accumulate:
        dpositions.fill(0)
    dpositions[: dx.shape[1]] += dx.sum(0)


def attention(qkv, heads, arena, starts=None):
    """Return (y, saved) with y = softmax(q k^T / sqrt(D), causal) v for each head (Vaswani et al.
    2017).

    A query sees the keys from its document's first token on.

    qkv     (B, T, 3C): queries, keys and values side by side, each with its heads side by side
    starts  (B, T) int32: of each token, the first token of its document; ascending in a row, none
            after its token. None: a row is one document
    y       (B, T, C)
    """
    return attended(qkv, heads, 1, starts)


def attended(qkv, heads, mask, starts=None):
    """Return (y, saved) of attention whose probabilities are multiplied by a mask, (B, H, T, T)."""
    q, k, v = _heads(qkv, heads)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1], dtype=qkv.dtype)
    is_seen = np.tri(qkv.shape[1], dtype=bool)
    if starts is not None:
        is_seen = is_seen & (np.arange(qkv.shape[1]) >= starts[:, None, :, None])
    scores = np.where(is_seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = (weights * mask @ v).swapaxes(1, 2).reshape(*qkv.shape[:2], qkv.shape[2] // 3)
    return y, (qkv, weights, mask)


def attention_next(qkv, keys, values, past, heads, arena):
    """Return y of `attention` for new tokens that follow stored ones (incremental decoding).

    New token t of sequence b has the position past[b] + t. Its key and value are stored there, and
    it sees all positions up to its own.

    qkv           (B, T, 3C), of the new tokens
    keys, values  (B, H, W, D), finite; they receive the new keys and values
    past          (B,) int64, with past + T <= W
    y             (B, T, C)
    """
    every_q, every_k, every_v = _heads(qkv, heads)
    y = np.empty_like(every_q)
    for b, first in enumerate(past):
        for t, q in enumerate(every_q[b].swapaxes(0, 1)):
            end = first + t + 1
            keys[b, :, end - 1], values[b, :, end - 1] = every_k[b, :, t], every_v[b, :, t]
            scores = (keys[b, :, :end] @ q[..., None])[..., 0]
            scores /= np.sqrt(q.shape[-1], dtype=qkv.dtype)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            y[b, :, t] = (weights[:, None] @ values[b, :, :end])[:, 0]
    return y.swapaxes(1, 2).reshape(*qkv.shape[:2], qkv.shape[2] // 3)


def attention_backward(dy, saved, arena):
    """Return dqkv.    dy: (B, T, C); dqkv: (B, T, 3C)"""
    qkv, weights, mask = saved
    heads = weights.shape[1]
    q, k, v = _heads(qkv, heads)
    d = dy.reshape(*dy.shape[:2], heads, v.shape[-1]).swapaxes(1, 2)
    dweights = d @ v.swapaxes(-1, -2) * mask
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
    dscores /= np.sqrt(q.shape[-1], dtype=qkv.dtype)
    dqkv = np.empty_like(qkv)
    dq, dk, dv = _heads(dqkv, heads)
    dq[...] = dscores @ k
    dk[...] = dscores.swapaxes(-1, -2) @ q
    dv[...] = (weights * mask).swapaxes(-1, -2) @ d
    return dqkv


def into(out, value):
    """Return the value, written to `out` if that is not None."""
    if out is None:
        return value
    assert out.shape == value.shape and out.dtype == value.dtype
    out[...] = value
    return out


def plus(value, residual):
    """Return the value, plus the residual if that is not None."""
    return value if residual is None else value + residual


def _gelu_slope(z):
    t = np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t**2) * GELU_SCALE * (1 + 3 * GELU_CUBIC * z**2)


def put(value, out, accumulate):
    """Write the value to out, or add it."""
    if accumulate:
        out += value
    else:
        out[...] = value


def _heads(packed, heads):
    """Return views of q, k, v, each (B, H, T, D), into (B, T, 3C)."""
    batch, length, width = packed.shape
    return packed.reshape(batch, length, 3, heads, width // 3 // heads).transpose(2, 0, 3, 1, 4)
