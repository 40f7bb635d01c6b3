"""The definition of attention, with and without dropout, and of its incremental form.

`Seen` says which keys a query sees: the causal mask, documents, a window and parts of a ring.

B sequences, Q queries, T keys, D channels of a head. H query heads share G heads of keys and
values: each group of H / G heads in turn has one (Ainslie et al. 2023, GQA).
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from typing import Any, NamedTuple

import numpy as np

from mpitrain.ops.random_bits import attention_number, scale, threshold
from mpitrain.ops.reference.layers import random_bits
from mpitrain.ops.table import operation


class Seen(NamedTuple):
    """Which keys the queries of an attention see.

    Query t of a sequence sees key s if every bound lets it:

        offset  s <= t + offset               0: the causal mask; T - 1 or more: there is none
        window  s > t + offset - window       0: there is none
        starts  s >= starts[t]                None: there is none
        closed  starts[s] == starts[t], too   of the same tokens, and without a window

    So every query sees a run of keys, and neither its first key nor its end ever falls from one
    query to the next. With all bounds of a block of queries and a block of keys an operation knows
    whether to skip it (no query sees a key), to compute it as it is (each sees all), or to mask it.

    starts  (B, Q) int32, ascending in a row, in the memory of the operations. Of tokens in
            documents: the first token of each one's document
    closed  whether starts are of documents that end, too; the causal mask hides the end without it

    It also says what becomes of a product q k of a query with a key that it sees:

        scale   the score is q k scale            0: scale is 1 / sqrt(D)
        cap     and then cap tanh(score / cap)    0: it stays
    """

    starts: Any = None
    offset: int = 0
    window: int = 0
    closed: bool = False
    scale: float = 0.0
    cap: float = 0.0

    def narrow(self, queries: int) -> Seen:
        """Return the record without a window that hides no key of so many queries."""
        return self._replace(window=0) if self.window >= queries + self.offset else self

    def scale_of(self, width: int) -> float:
        """Return the scale of scores of heads of D = width channels."""
        return self.scale or width**-0.5

    def keys_of_a_query(self, keys: int) -> int:
        """Return how many of so many keys a query computes with, if scores are whole squares."""
        return min(keys, self.window or keys)

    def mask(self, queries: int, keys: int) -> np.ndarray:
        """Return whether each query sees each key, (B or 1, 1, Q, T)."""
        last, every, starts = (
            np.arange(queries)[:, None] + self.offset,
            np.arange(keys),
            self.starts,
        )
        is_seen = every <= last
        if self.window:
            is_seen = is_seen & (every > last - self.window)
        if starts is None:
            return is_seen[None, None]
        own = starts[:, :, None]
        return (is_seen & (own == starts[:, None] if self.closed else own <= every))[:, None]


CAUSAL = Seen()


def first_keys(starts: np.ndarray, window: int) -> np.ndarray:
    """Return the first keys of queries whose window ends at their own token, (B, Q) int32.

    starts  (B, Q), the first keys without a window
    window  0: there is none
    """
    if not window:
        return starts
    tokens = np.arange(1, starts.shape[1] + 1, dtype=np.int64)
    return np.maximum(starts, tokens - window).astype(np.int32)


@operation("q:B,T,HD kv:B,T,2ED heads=H -> y:B,T,HD saved", "y", products="2BTTHD")
def attention(q, kv, heads, arena, seen=CAUSAL):
    """Return (y, saved) with y = softmax(scores) v for each head (Vaswani et al. 2017).

    Rows may be views into longer rows.

    q     (B, Q, H D): the heads side by side
    kv    (B, T, 2 G D): the heads of keys side by side, then those of values
    seen  which keys a query sees, of these keys at least one, and with which scores; starts are
          those of documents, none after its token
    y     (B, Q, H D)
    """
    return attended(q, kv, heads, 1, seen)


def attended(q, kv, heads, mask, seen=CAUSAL):
    """Return (y, saved) of attention whose probabilities are multiplied by a mask, (B, H, Q, T)."""
    scores, slopes, v = _scores(q, kv, heads, seen)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = (weights * mask @ v).swapaxes(1, 2).reshape(q.shape)
    return y, (q, kv, weights, mask, slopes)


@operation("q:B,T,HD kv:B,K,2ED heads=H -> y:B,T,HD saved", "y", products="2BTKHD")
def attention_part(q, kv, heads, arena, seen=CAUSAL, earlier=None):
    """Return (y, saved) of attention to some of the keys, joined to earlier parts (Liu et al. 2023).

    Queries and keys are as in `attention`, but need not be of the same tokens.

    seen     not closed; where starts are T, a query sees no key, and y is 0
    earlier  `saved` of the parts before, for these queries or for more, of which these are the last;
             y and `saved` are then theirs, with this part joined in place. None: this is the first
    """
    scores, _, v = _scores(q, kv, heads, seen)
    log_sums = np.logaddexp.reduce(scores, -1, initial=-np.inf)
    weights = np.exp(scores - np.maximum(log_sums, np.finfo(q.dtype).min)[..., None])
    y = (weights @ v).swapaxes(1, 2).reshape(q.shape)
    if earlier is None:
        return y, (y, log_sums)
    first = earlier[0].shape[1] - q.shape[1]
    own, own_sums = earlier[0][:, first:], earlier[1][..., first:]
    joined = np.logaddexp(own_sums, log_sums)
    shares = (np.exp(each - joined).swapaxes(1, 2)[..., None] for each in (own_sums, log_sums))
    parts = (_heads(each, 1, heads)[0].swapaxes(1, 2) for each in (own, y))
    own[...] = sum(map(np.multiply, shares, parts)).reshape(own.shape)
    own_sums[...] = joined
    return earlier[0], earlier


@operation(
    "dy:B,T,DH saved@attention_part|B,T,DH q:B,T,HD kv:B,K,2ED dq:B,T,DH|0 dkv:B,K,2ED|0 -> dq dkv",
    "dq dkv",
    launches=3,
    products="4BTKHD",
)
def attention_part_backward(dy, saved, q, kv, dq, dkv, arena, seen=CAUSAL):
    """Write what some of the keys add to dq, and their dkv.

    dy     (B, Q, H D) of these queries
    saved  of `attention_part`, after all parts
    """
    first, heads = saved[0].shape[1] - q.shape[1], saved[1].shape[1]
    y, log_sums = saved[0][:, first:], saved[1][..., first:]
    scores, slopes, _ = _scores(q, kv, heads, seen)
    (own_y,), (own_dy,) = _heads(y, 1, heads), _heads(dy, 1, heads)
    dots = (own_dy * own_y).sum(-1, keepdims=True)
    _put_gradients(dy, q, kv, np.exp(scores - log_sums[..., None]), 1, slopes, dots, dq, dkv)


def _scores(q, kv, heads, seen: Seen):
    """Return the scores (B, H, Q, T), -inf for keys that a query does not see, the slopes of the
    others in q k^T, and the values.
    """
    (every_q,), (k, v) = _heads(q, 1, heads), _heads(kv, 2, _groups(q, kv, heads))
    k, v = (np.repeat(x, heads // x.shape[1], 1) for x in (k, v))
    slopes = scale = seen.scale_of(k.shape[-1])
    scores = every_q @ k.swapaxes(-1, -2) * scale
    if seen.cap:
        ratios = np.tanh(scores / seen.cap)
        scores, slopes = ratios * seen.cap, scale * (1 - ratios * ratios)
    return np.where(seen.mask(q.shape[1], kv.shape[1]), scores, -np.inf), slopes, v


@operation(
    "q:B,T,HD kv:B,T,2ED keys:B,E,2T,D values:B,E,2T,D past<T:B heads=H -> y:B,T,HD keys values",
    "y",
    products="4BTTHD",
)
def attention_next(q, kv, keys, values, past, heads, arena, seen=CAUSAL):
    """Return y of `attention` for new tokens that follow stored ones (incremental decoding).

    New token t of sequence b has the position past[b] + t. Its key and value are stored there, and
    it sees the positions up to its own, of these the last `seen.window`, or with 0 all.

    q, kv         (B, T, H D) and (B, T, 2 G D), of the new tokens
    keys, values  (B, G, W, D), finite; they receive the new keys and values
    past          (B,) int64, with past + T <= W
    y             (B, T, H D)
    """
    groups = keys.shape[1]
    (every_q,), (every_k, every_v) = _heads(q, 1, heads), _heads(kv, 2, groups)
    y = np.empty_like(every_q)
    for b, first in enumerate(past):
        for t, query in enumerate(every_q[b].swapaxes(0, 1)):
            end = first + t + 1
            own = slice(max(0, end - seen.window) if seen.window else 0, end)
            keys[b, :, end - 1], values[b, :, end - 1] = every_k[b, :, t], every_v[b, :, t]
            scored, summed = (np.repeat(x[b, :, own], heads // groups, 0) for x in (keys, values))
            scores = (scored @ query[..., None])[..., 0]
            scores *= seen.scale_of(query.shape[-1])
            scores = seen.cap * np.tanh(scores / seen.cap) if seen.cap else scores
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            y[b, :, t] = (weights[:, None] @ summed)[:, 0]
    return y.swapaxes(1, 2).reshape(q.shape)


@operation(
    "dy:B,T,DH saved@attention|B,T,DH+B,T,2ED+B,T,DH dq:B,T,DH|0 dkv:B,T,2ED|0 -> dq dkv",
    "dq dkv",
    launches=3,
    products="4BTTHD",
)
def attention_backward(dy, saved, dq, dkv, arena):
    """Write dq and dkv, of the shapes and strides of q and kv.    dy: (B, Q, H D)

    The gradients of keys and values are sums over the query heads of their group.
    """
    q, kv, weights, mask, slopes = saved
    _put_gradients(dy, q, kv, weights, mask, slopes, None, dq, dkv)


def _put_gradients(dy, q, kv, weights, mask, slopes, dots, dq, dkv):
    """Write dq and dkv.

    slopes  of the scores in q k^T
    dots    (B, H, Q, 1), sums of dy y over a row; None: of these keys alone
    """
    heads, groups = weights.shape[1], _groups(q, kv, weights.shape[1])
    (every_q,), (k, v), (d,) = _heads(q, 1, heads), _heads(kv, 2, groups), _heads(dy, 1, heads)
    k, v = (np.repeat(x, heads // groups, 1) for x in (k, v))
    dweights = d @ v.swapaxes(-1, -2) * mask
    dots = (dweights * weights).sum(-1, keepdims=True) if dots is None else dots
    dscores = weights * (dweights - dots) * slopes
    _heads(dq, 1, heads)[0][...] = dscores @ k
    for out, each in zip(
        _heads(dkv, 2, groups),
        (dscores.swapaxes(-1, -2) @ every_q, (weights * mask).swapaxes(-1, -2) @ d),
        strict=True,
    ):
        out[...] = each.reshape(len(each), groups, heads // groups, *each.shape[2:]).sum(2)


@operation(
    "q:B,T,HD kv:B,T,2ED heads=H key=(5,3) step=2 first=7 every=11 rate=0.25 -> y:B,T,HD saved",
    "y",
    products="2BTTHD",
)
def attention_dropout(q, kv, heads, key, step, first, every, rate, arena, seen=CAUSAL):
    """Return (y, saved) of attention with dropout of its probabilities.

    There are as many queries as keys. Head h of sequence b has the number first + b every + h.
    `attention_number` numbers the probabilities of a head.
    key  (seed, layer)
    """
    batch, length, _ = q.shape
    number = (first + np.arange(batch)[:, None] * every + np.arange(heads))[..., None, None]
    queries, keys = np.arange(length)[:, None], np.arange(length)
    bits = random_bits(key, step, attention_number(number, queries, keys, length))
    mask = (bits >= threshold(rate)) * np.asarray(scale(rate), q.dtype)
    return attended(q, kv, heads, mask, seen)


@operation(
    "dy:B,T,DH saved@attention_dropout|B,T,DH+B,T,2ED+B,T,DH dq:B,T,DH|0 dkv:B,T,2ED|0 -> dq dkv",
    "dq dkv",
    launches=3,
    products="4BTTHD",
)
def attention_dropout_backward(dy, saved, dq, dkv, arena):
    """Write dq and dkv, as `attention_backward`."""
    attention_backward(dy, saved, dq, dkv, arena)


def _groups(q, kv, heads):
    """Return G."""
    return kv.shape[-1] * heads // (2 * q.shape[-1])


def _heads(packed, parts, heads):
    """Return `parts` views (B, heads, T, D) into (B, T, parts heads D)."""
    width = packed.shape[2] // (parts * heads)
    return packed.reshape(*packed.shape[:2], parts, heads, width).transpose(2, 0, 3, 1, 4)
