"""The meaning of each operation, forward and backward, in plain NumPy.

B batch, T tokens, C channels, H heads, D = C / H, V vocabulary; M rows, K inputs, N outputs of a matrix product.

All arrays of a call have one dtype, float32 or float64; tokens and targets are integers; scalars are Python numbers.
Every forward that has a backward returns (output, saved); each backward uses its `saved` once and may overwrite what
`saved` alone holds. `saved` may refer to the inputs and the output, into which nobody writes until the backward has run;
it never refers to the output of `linear`. Nothing writes to its inputs unless its first sentence says so. `accumulate` is
BLAS's beta: True adds to the gradient that is passed in, False overwrites it. Buffers come from `arena` in the tuned
bodies; here they are simply allocated.
"""

import numpy as np

EPSILON = 1e-5  # LayerNorm's, added to the variance
GELU_SCALE = float(np.sqrt(2 / np.pi))
GELU_CUBIC = 0.044715


def linear(x, w, b, arena):
    """y = x w^T + b.    x: (M, K); w: (N, K); b: (N,) or None; y: (M, N)"""
    y = x @ w.T
    return (y if b is None else y + b), x


def linear_backward_input(dy, w, saved, arena):
    """(dx, pending): dx = dy w, and what the two weight halves below need.    dy: (M, N); dx: (M, K)"""
    return dy @ w, (dy, saved)


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
    return 0.5 * z * (1 + np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))), (x, z)


def linear_gelu_backward_input(dy, w, saved, arena):
    """As `linear_backward_input`, through the activation; the same weight halves serve its `pending`."""
    x, z = saved
    t = np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))
    slope = 0.5 * (1 + t) + 0.5 * z * (1 - t**2) * GELU_SCALE * (1 + 3 * GELU_CUBIC * z**2)
    return linear_backward_input(dy * slope, w, x, arena)


def linear_relu(x, w, b, arena):
    """y = max(0, x w^T + b). Shapes as in `linear`."""
    z, _ = linear(x, w, b, arena)
    return np.maximum(z, 0), (x, z > 0)


def linear_relu_backward_input(dy, w, saved, arena):
    """As `linear_backward_input`, through the activation; the gradient at 0 is 0."""
    x, positive = saved
    return linear_backward_input(dy * positive, w, x, arena)


def layer_norm(x, gain, bias, arena):
    """y = (x - mean) / sqrt(var + EPSILON) * gain + bias over the last dim (Ba, Kiros & Hinton 2016).

    x, y: (M, C); gain, bias: (C,)
    """
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    normal = centred * inverse
    return normal * gain + bias, (normal, inverse)


def layer_norm_backward_input(dy, gain, saved, arena):
    """(dx, pending).    dy, dx: (M, C)"""
    normal, inverse = saved
    d = dy * gain
    dx = inverse * (d - d.mean(-1, keepdims=True) - normal * (d * normal).mean(-1, keepdims=True))
    return dx, (dy, normal)


def layer_norm_backward_gain(pending, dgain, accumulate, arena):
    """Write or add the sum over rows of dy times the normalised x.    dgain: (C,)"""
    dy, normal = pending
    _put((dy * normal).sum(0), dgain, accumulate)


def layer_norm_backward_bias(pending, dbias, accumulate, arena):
    """Write or add the sum over rows of dy.    dbias: (C,)"""
    _put(pending[0].sum(0), dbias, accumulate)


def embedding(tokens, table, positions, arena):
    """x[b, t] = table[tokens[b, t]] + positions[t].

    tokens: (B, T); table: (V, C); positions: (>= T, C); x: (B, T, C)
    """
    return table[tokens] + positions[:tokens.shape[1]], tokens


def embedding_backward_table(dx, saved, dtable, accumulate, arena):
    """Add each row of dx to the row of its token.    dx: (B, T, C); dtable: (V, C)"""
    if not accumulate:
        dtable.fill(0)
    np.add.at(dtable, saved, dx)


def embedding_backward_positions(dx, dpositions, accumulate, arena):
    """Write or add the sum of dx over the batch; positions beyond T have gradient 0.    dpositions: (>= T, C)"""
    if not accumulate:
        dpositions.fill(0)
    dpositions[:dx.shape[1]] += dx.sum(0)


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


def cross_entropy(logits, targets, scale, arena):
    """(loss_sum, dlogits): minus the log-probability of the targets, and its gradient written over `logits`.

    logits: (M, V); targets: (M,); dlogits is `logits` itself
    scale: 1 / rows of the whole update, the one place where the mean is taken; it multiplies dlogits, not loss_sum
    """
    loss_sum = cross_entropy_loss(logits, targets, arena)
    logits -= logits.max(-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(-1, keepdims=True)
    logits[np.arange(len(targets)), targets] -= 1
    logits *= scale
    return loss_sum, logits


def cross_entropy_loss(logits, targets, arena):
    """loss_sum alone, for evaluation; logits stay as they are."""
    shifted = (logits - logits.max(-1, keepdims=True)).astype(np.float64)
    log_sum = np.log(np.exp(shifted).sum(-1))
    return float((log_sum - shifted[np.arange(len(targets)), targets]).sum())


def count_correct(logits, targets, arena):
    """How many rows have their largest logit at the target."""
    return int((logits.argmax(-1) == targets).sum())


def sgd(p, g, scale, lr, weight_decay, arena):
    """Step p in place: p -= lr (scale g + weight_decay p).    p, g: (count,); scale: clipping and loss scale"""
    p -= lr * (scale * g + weight_decay * p)


def momentum(p, g, m, scale, lr, beta, weight_decay, arena):
    """Step p and m in place: m = beta m + scale g + weight_decay p, p -= lr m.    p, g, m: (count,); m starts at 0"""
    m *= beta
    m += scale * g + weight_decay * p
    p -= lr * m


def adamw(p, g, m, v, scale, lr, beta1, beta2, eps, weight_decay, step, arena):
    """Step p, m and v in place; decay is decoupled (Loshchilov & Hutter 2019, algorithm 2 with lr in the decay).

    p, g, m, v: (count,); m and v start at 0; step counts from 1
    """
    g = scale * g
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    p *= 1 - lr * weight_decay
    p -= lr / (1 - beta1**step) * m / (np.sqrt(v / (1 - beta2**step)) + eps)


def square_sum(x, arena):
    """Sum of squares, accumulated in float64.    x: (count,)"""
    return float(np.square(x, dtype=np.float64).sum())


def count_nonfinite(x, arena):
    """How many elements are infinite or NaN.    x: (count,)"""
    return int(x.size - np.isfinite(x).sum())


def _put(value, out, accumulate):
    if accumulate:
        out += value
    else:
        out[...] = value


def _heads(packed, heads):
    """Views of q, k, v, each (B, H, T, D), into (B, T, 3C)."""
    batch, length, _ = packed.shape
    return packed.reshape(batch, length, 3, heads, -1).transpose(2, 0, 3, 1, 4)
