"""Attention on queries, keys and values side by side in one array, as a model's layers pass them."""

from typing import Any

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.ops import Ops
from mpitrain.ops.cuda import product
from mpitrain.ops.device import cuda_ops
from mpitrain.ops.reference.attention import Seen


def on(kernels: Kernels, dtype: str, tensor_cores: str = "mma") -> Ops:
    """The operations on kernels; with the dtype `3xtf32`, float32 is multiplied so."""
    multiply = product.chosen("3xtf32" if dtype == "3xtf32" else "tiled")
    return cuda_ops(kernels, multiply, tensor_cores=tensor_cores)


class Packed:
    """The operations of attention of a backend, with one array in place of q and kv, and of dq and dkv.

    forward   "attention" or "attention_dropout"
    kv_heads  heads of keys and values; None: as many as heads
    queries   are the last so many rows of the array; None: all
    bounds    fields of `Seen`; starts are those of documents
    """

    def __init__(
        self,
        ops: Any,
        forward: str = "attention",
        kv_heads: int | None = None,
        queries: int | None = None,
        **bounds: Any,
    ):
        self._forward, self._backward = getattr(ops, forward), ops.attention_backward
        self._kv_heads, self._queries, self._bounds = kv_heads, queries, bounds

    def attention(self, qkv: Any, heads: int, *rest: Any, starts: Any = None) -> tuple[Any, Any]:
        seen = Seen(starts, **self._bounds, closed=starts is not None)
        y, saved = self._forward(*self.parts(qkv, heads), heads, *rest, seen)
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
