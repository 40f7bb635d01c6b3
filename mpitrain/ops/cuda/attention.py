"""Causal attention. `saved` is (qkv, y, log_sums, heads): one number a row instead of a row of weights."""

from typing import Any

from mpitrain.errors import KernelError
from mpitrain.kernels.arguments import fresh
from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import element, sum_type
from mpitrain.ops.cuda.grids import ROWS, row_blocks

# Bytes of shared memory that a block may have, by compute capability; the largest entry not above a device's counts.
SHARED = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}


def attention(kernels: Kernels, qkv, heads, arena):
    """y = softmax(q k^T / sqrt(D), causal) v for each head."""
    batch, length, width = _shape(qkv)
    y, log_sums = arena.take((batch, length, width), qkv.dtype), arena.take((batch, heads, length), sum_type(qkv))
    _launch(kernels, "attention", 2, qkv, heads, (qkv, fresh(y), fresh(log_sums)))
    return y, (qkv, y, log_sums, heads)


def attention_backward(kernels: Kernels, dy, saved, arena):
    """dqkv, the weights computed again tile by tile."""
    qkv, y, log_sums, heads = saved
    batch, length, width = _shape(qkv)
    dots, dqkv = arena.take(log_sums.shape, log_sums.dtype), arena.take(qkv.shape, qkv.dtype)
    tile = _tile(kernels, 4, qkv, heads)
    kernels.launch("attention_dots", row_blocks(dots.size), ROWS, (batch, length, heads, y, dy, fresh(dots)),
                   **element(qkv), HEAD=width // heads, TILE=tile)
    for name in ("attention_backward_kv", "attention_backward_q"):
        _launch(kernels, name, 4, qkv, heads, (qkv, dy, log_sums, dots, dqkv))
    return dqkv


def _shape(qkv: Any) -> tuple[int, int, int]:
    batch, length, triple = qkv.shape
    return batch, length, triple // 3


def _launch(kernels: Kernels, name: str, operands: int, qkv: Any, heads: int, arrays: tuple) -> None:
    batch, length, width = _shape(qkv)
    head = width // heads
    tile = _tile(kernels, operands, qkv, heads)
    kernels.launch(name, (-(-length // tile), heads, batch), (tile * tile // 16,), (length, heads, head**-0.5, *arrays),
                   _shared(operands, tile, head, qkv), **element(qkv), HEAD=head, TILE=tile)


def _shared(operands: int, tile: int, head: int, qkv: Any) -> int:
    """Bytes for so many operands of (tile, head), and one (tile, tile) of weights."""
    pitch = -(-head // 4) * 4 + 4
    return tile * (operands * pitch + tile + 4) * (8 if sum_type(qkv) == "float64" else 4)


def _tile(kernels: Kernels, operands: int, qkv: Any, heads: int) -> int:
    """Rows of a tile: 64, or 32 where the sequence is short or the shared memory small."""
    _, length, width = _shape(qkv)
    head, capability = width // heads, kernels.engine.capability
    limit = SHARED[max((known for known in SHARED if known <= capability), default=min(SHARED))]
    for tile in (64, 32):
        if (length > 32 or tile == 32) and _shared(operands, tile, head, qkv) <= limit:
            return tile
    raise KernelError(f"Heads of {head} channels need {_shared(operands, 32, head, qkv)} bytes of shared memory a block; "
                      f"this device has {limit}.", "Use more and narrower heads.")
