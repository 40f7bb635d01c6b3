"""Attention on queries, keys and values side by side in one array, as a model's layers pass them."""

from typing import Any

import numpy as np


class Packed:
    """The operations of attention of a backend, with one array in place of q and kv, and of dq and dkv.

    forward   "attention" or "attention_dropout"
    kv_heads  heads of keys and values; None: as many as heads
    offset    of the operation; queries are the last `queries` rows of the array, or all
    """

    def __init__(
        self,
        ops: Any,
        forward: str = "attention",
        kv_heads: int | None = None,
        queries: int | None = None,
        **named: Any,
    ):
        self._forward, self._backward = getattr(ops, forward), ops.attention_backward
        self._kv_heads, self._queries, self._named = kv_heads, queries, named

    def attention(self, qkv: Any, heads: int, *rest: Any) -> tuple[Any, Any]:
        y, saved = self._forward(*self.parts(qkv, heads), heads, *rest, **self._named)
        return y, (qkv, heads, saved)

    def attention_backward(self, dy: Any, saved: Any, arena: Any) -> Any:
        qkv, heads, own = saved
        dqkv = np.zeros_like(qkv)
        self._backward(dy, own, *self.parts(dqkv, heads), arena)
        return dqkv

    def parts(self, qkv: Any, heads: int) -> tuple[Any, Any]:
        """Return views of q and kv."""
        width = qkv.shape[2] // (heads + 2 * (self._kv_heads or heads)) * heads
        return qkv[:, -(self._queries or qkv.shape[1]) :, :width], qkv[..., width:]
