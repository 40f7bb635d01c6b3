"""The meaning of the operations of layers, forward and backward: linear, layer norm, embedding, attention."""

import numpy as np

EPSILON = 1e-5  # LayerNorm's, added to the variance
GELU_SCALE = float(np.sqrt(2 / np.pi))
GELU_CUBIC = 0.044715


def add(a, b, out, arena):
    """Write a + b to out, which may be a or b, all of one shape; what answers to NumPy's functions can be added."""
    np.add(a, b, out=out)


def weighted_sum(a, alpha, b, beta, out, arena):
    """Write alpha a + beta b, or alpha a where b is None, to out, which may be a or b; all of one shape but the numbers."""
    out[...] = alpha * a if b is None else alpha * a + beta * b


def add_bias(x, b, out, arena, residual=None):
    """Write x + b + residual to out, which may be x.    x, residual and out: (..., N); b: (N,), to every row, or None"""
    out[...] = plus(x if b is None else x + b, residual)


def linear(x, w, b, arena, out=None, residual=None):
    """y = x w^T + b + residual.    x: (M, K); w: (N, K); b: (N,) or None; y: (M, N)"""
    y = x @ w.T
    return into(out, plus(y if b is None else y + b, residual)), x


def logits(x, w, b, arena):
    """As `linear`, for the operations on logits and the halves of `linear` alone: its rows may lie further apart than V."""
    return linear(x, w, b, arena)


def linear_backward_input(dy, w, saved, arena, out=None):
    """(dx, pending): dx = dy w, and what the two weight halves below need.    dy: (M, N); dx: (M, K)"""
    return into(out, dy @ w), (dy, saved)


def gelu_linear_backward_input(dy, w, saved, before, arena):
    """(dz, pending) of a layer whose x is y of `linear_gelu`: dz = dy w gelu'(z), which that one's product goes back by.

    before: the second of what `linear_gelu` saved, used up; dz: (M, K)
    """
    return dy @ w * _gelu_slope(before), (dy, saved)


def linear_backward_weight(pending, dw, accumulate, arena):
    """Write or add dw = dy^T x.    dw: (N, K)"""
    dy, x = pending
    _put(dy.T @ x, dw, accumulate)


def linear_backward_bias(pending, db, accumulate, arena):
    """Write or add db, the sum of dy over rows.    db: (N,)"""
    _put(pending[0].sum(0), db, accumulate)


def linear_gelu(x, w, b, arena):
    """y = gelu(x w^T + b), tanh form of Hendrycks & Gimpel 2016, section 2. Shapes as in `linear`."""
    z, _ = linear(x, w, b, arena)
    return gelu(z, arena)[0], (x, z)


def linear_gelu_backward_input(dy, w, saved, arena, out=None):
    """As `linear_backward_input`, through the activation; the same weight halves serve its `pending`."""
    x, z = saved
    return linear_backward_input(dy * _gelu_slope(z), w, x, arena, out)


def linear_relu(x, w, b, arena):
    """y = max(0, x w^T + b). Shapes as in `linear`."""
    z, _ = linear(x, w, b, arena)
    return np.maximum(z, 0), (x, z > 0)


def linear_relu_backward_input(dy, w, saved, arena, out=None):
    """As `linear_backward_input`, through the activation; the gradient at 0 is 0."""
    x, positive = saved
    return linear_backward_input(dy * positive, w, x, arena, out)


def gelu(z, arena):
    """y = gelu(z) where no product comes right before, which may be written over z.    z, y: any shape"""
    return 0.5 * z * (1 + np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))), z


def gelu_backward(dy, saved, arena):
    """dz.    dy, dz: as z"""
    return dy * _gelu_slope(saved)


def relu(z, arena):
    """y = max(0, z), as `gelu`."""
    return np.maximum(z, 0), z > 0


def relu_backward(dy, saved, arena):
    """dz; the gradient at 0 is 0."""
    return dy * saved


def layer_norm(x, gain, bias, arena):
    """y = (x - mean) / sqrt(var + EPSILON) * gain + bias over the last dim (Ba, Kiros & Hinton 2016).

    x, y: (M, C); gain, bias: (C,)
    """
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    normal = centred * inverse
    return normal * gain + bias, (normal, inverse)


def layer_norm_backward_input(dy, gain, saved, arena, residual=None):
    """(dx, pending), the residual in dx.    dy, dx: (M, C)"""
    normal, inverse = saved
    d = dy * gain
    dx = inverse * (d - d.mean(-1, keepdims=True) - normal * (d * normal).mean(-1, keepdims=True))
    return plus(dx, residual), (dy, normal)


def layer_norm_backward_gain(pending, dgain, accumulate, arena):
    """Write or add the sum over rows of dy times the normalised x.    dgain: (C,)"""
    dy, normal = pending
    _put((dy * normal).sum(0), dgain, accumulate)


def layer_norm_backward_bias(pending, dbias, accumulate, arena):
    """Write or add the sum over rows of dy.    dbias: (C,)"""
    _put(pending[0].sum(0), dbias, accumulate)


def embedding(tokens, table, positions, arena, first=0, out=None):
    """x[b, t] = table[tokens[b, t] - first] + positions[t], where a row that the table does not hold counts as zero.

    tokens: (B, T); table: (V, C); positions: (>= T, C) or None for none; x: (B, T, C)
    The sum of x over the parts of a table is x of the whole, without rounding, if one part adds the positions and the
    others None. Each part has the whole gradient of the positions, whether it added them or not.
    """
    held = (tokens >= first) & (tokens < first + len(table))
    x = np.zeros((*tokens.shape, table.shape[1]), table.dtype)
    x[held] = table[tokens[held] - first]
    return into(out, x if positions is None else x + positions[: tokens.shape[1]]), (
        tokens[held] - first,
        held,
    )


def embedding_backward_table(dx, saved, dtable, accumulate, arena):
    """Add each row of dx to the row of its token, if the table holds it.    dx: (B, T, C); dtable: (V, C)"""
    rows, held = saved
    if not accumulate:
        dtable.fill(0)
    np.add.at(dtable, rows, dx[held])


def embedding_backward_positions(dx, dpositions, accumulate, arena):
    """Write or add the sum of dx over the batch; positions beyond T have gradient 0.    dpositions: (>= T, C)"""
    if not accumulate:
        dpositions.fill(0)
    dpositions[: dx.shape[1]] += dx.sum(0)


def attention(qkv, heads, arena):
    """y = softmax(q k^T / sqrt(D), causal) v for each head (Vaswani et al. 2017).

    qkv: (B, T, 3C), queries, keys and values side by side, each with its heads side by side; y: (B, T, C)
    """
    q, k, v = _heads(qkv, heads)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1], dtype=qkv.dtype)
    scores = np.where(np.tri(qkv.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = (weights @ v).swapaxes(1, 2).reshape(*qkv.shape[:2], -1)
    return y, (qkv, weights)


def attention_backward(dy, saved, arena):
    """dqkv.    dy: (B, T, C); dqkv: (B, T, 3C)"""
    qkv, weights = saved
    heads = weights.shape[1]
    q, k, v = _heads(qkv, heads)
    d = dy.reshape(*dy.shape[:2], heads, -1).swapaxes(1, 2)
    dweights = d @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
    dscores /= np.sqrt(q.shape[-1], dtype=qkv.dtype)
    dqkv = np.empty_like(qkv)
    dq, dk, dv = _heads(dqkv, heads)
    dq[...] = dscores @ k
    dk[...] = dscores.swapaxes(-1, -2) @ q
    dv[...] = weights.swapaxes(-1, -2) @ d
    return dqkv


def into(out, value):
    """The value, in `out` if that is not None."""
    if out is None:
        return value
    assert out.shape == value.shape and out.dtype == value.dtype
    out[...] = value
    return out


def plus(value, residual):
    """The value, and the residual if that is not None."""
    return value if residual is None else value + residual


def _gelu_slope(z):
    """Its derivative."""
    t = np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t**2) * GELU_SCALE * (1 + 3 * GELU_CUBIC * z**2)


def _put(value, out, accumulate):
    if accumulate:
        out += value
    else:
        out[...] = value


def _heads(packed, heads):
    """Views of q, k, v, each (B, H, T, D), into (B, T, 3C)."""
    batch, length, _ = packed.shape
    return packed.reshape(batch, length, 3, heads, -1).transpose(2, 0, 3, 1, 4)
