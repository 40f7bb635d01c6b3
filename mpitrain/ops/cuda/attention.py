"""Causal attention in tiles (FlashAttention-2, Dao 2023). `saved` is (qkv, y, log_sums, heads, drop,
starts).

log_sums is one number per row instead of a row of weights. 16-bit elements use tensor cores if the
device has them (capability 8.0). The head width must be a multiple of 16, up to 128. All other
cases use the ordinary arithmetic units, and so does attention with dropout. `drop` is empty, or
the arguments of dropout. `starts` is None, or the first token of each token's document, (B, T) int32.
"""

from math import e, log2
from typing import Any, NamedTuple

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import Kernels, Macros
from mpitrain.machine.backend import address
from mpitrain.ops.cuda.launches import (
    KINDS,
    ROWS,
    c_type,
    element,
    index,
    most_shared,
    row_blocks,
    sum_type,
)
from mpitrain.ops.cuda.steps import LaunchNumbers
from mpitrain.ops.random_bits import scale, threshold


class AttentionKernels(NamedTuple):
    """The kernels for a shape, and their launch parameters.

    prefix   of the kernels' names
    tile     rows that a block owns
    threads  per block
    scale    the forward multiplies scores by it: 1 / sqrt(D), times log2(e) where exponentials are
             powers of 2
    shared   bytes of dynamic shared memory, forward and backward
    macros   forward and backward
    """

    prefix: str
    tile: int
    threads: int
    scale: float
    shared: tuple[int, int]
    macros: tuple[Macros, Macros]


def attention(kernels: Kernels, qkv, heads, arena, starts=None):
    return _attended(kernels, qkv, heads, (), starts, arena)


def attention_dropout(
    kernels: Kernels,
    numbers: LaunchNumbers,
    qkv,
    heads,
    key,
    step,
    first,
    every,
    rate,
    arena,
    starts=None,
):
    drop = (threshold(rate), scale(rate), first, every, *key, numbers.integer(step))
    return _attended(kernels, qkv, heads, drop, starts, arena)


def _attended(kernels: Kernels, qkv: Any, heads: int, drop: tuple, starts: Any, arena: Any) -> Any:
    batch, length, width = _shape(qkv)
    y, log_sums = (
        arena.take((batch, length, width), qkv.dtype),
        arena.take((batch, heads, length), KINDS[qkv.dtype].sums),
    )
    chosen = choose(
        kernels,
        qkv,
        heads,
        qkv.itemsize == 2 and address(qkv) % 16 == 0,
        bool(drop),
        starts is not None,
    )
    arrays = qkv, y, log_sums, *drop, starts
    _launch(kernels, chosen, "", chosen.scale, qkv, heads, arrays, "y log_sums")
    return y, (qkv, y, log_sums, heads, drop, starts)


def attention_backward(kernels: Kernels, dy, saved, arena):
    """Return dqkv; the weights are recomputed tile by tile.    dy: (B, T, C); dqkv: (B, T, 3C)"""
    qkv, y, log_sums, heads, drop, starts = saved
    batch, length, width = _shape(qkv)
    dots, dqkv = arena.take(log_sums.shape, log_sums.dtype), arena.take(qkv.shape, qkv.dtype)
    is_chunked = qkv.itemsize == 2 and (address(qkv) | address(dy)) % 16 == 0
    chosen = choose(kernels, qkv, heads, is_chunked, bool(drop), starts is not None)
    kernels.launch(
        "attention_dots",
        row_blocks(dots.size),
        ROWS,
        (batch, length, heads, width // heads, y, dy, dots),
        macros=KINDS[qkv.dtype].macros,
        fresh="dots",
    )
    for half in ("_backward_kv", "_backward_q"):
        _launch(
            kernels,
            chosen,
            half,
            (width // heads) ** -0.5,
            qkv,
            heads,
            (qkv, dy, log_sums, dots, dqkv, *drop, starts),
        )
    return dqkv


def attention_next(kernels: Kernels, qkv, keys, values, past, heads, arena):
    """Return y of new tokens, and store their keys and values; one warp per query and head.

    qkv: (B, T, 3C); keys, values: (B, H, W, D); past: (B,); y: (B, T, C)
    """
    batch, length, width = _shape(qkv)
    head, y = width // heads, arena.take((batch, length, width), qkv.dtype)
    kernels.launch(
        "attention_next",
        row_blocks(batch * length * heads),
        ROWS,
        (batch, length, heads, keys.shape[2], head**-0.5, qkv, past, keys, values, y),
        macros=kernels.macros(**element(qkv), **index(past), HEAD=head),
        fresh="y",
    )
    return y


attention_dropout_backward = attention_backward


def choose(
    kernels: Kernels,
    qkv: Any,
    heads: int,
    is_chunked: bool,
    drops: bool = False,
    has_documents: bool = False,
) -> AttentionKernels:
    """Return the kernels for these arrays on this device, chosen once per shape.

    is_chunked     whether elements have 16 bits and all rows that are read begin at multiples of 16
                   bytes
    drops          whether the probabilities have dropout
    has_documents  whether rows have several documents
    raises         KernelError if the heads are too wide for the device
    """
    key = ("attention", qkv.dtype, qkv.shape, heads, is_chunked, drops, has_documents)
    chosen = kernels.plans.get(key)
    if chosen is None:
        chosen = kernels.plans[key] = _choose(kernels, qkv, heads, is_chunked, drops, has_documents)
    return chosen


def has_tensor_kernel(head: int) -> bool:
    """Return whether attention has a kernel of tensor cores for 16-bit heads of so many channels."""
    return head % 16 == 0 and head <= 128


def _choose(
    kernels: Kernels, qkv: Any, heads: int, is_chunked: bool, drops: bool, has_documents: bool
) -> AttentionKernels:
    _, length, width = _shape(qkv)
    head, capability = width // heads, kernels.engine.capability
    limit, common = most_shared(kernels), {**element(qkv), "HEAD": head}
    if has_documents:
        common["DOCUMENTS"] = 1
    if (
        c_type(qkv) in ("__half", "__nv_bfloat16")
        and capability >= 80
        and has_tensor_kernel(head)
        and not drops
    ):
        # The shared memory holds one tile of 128 rows (forward) or two (backward).
        # It also holds two stages of two smaller tiles, with the statistics of their rows.
        forward, backward = (
            {step: (tiles * 128 + 4 * step) * 2 * (head + 8) + 16 * step for step in steps}
            for tiles, steps in ((1, (64, 32)), (2, (32, 16)))
        )
        steps = _step(forward, limit), _step(backward, limit)
        macros = tuple(
            kernels.macros(**common, STEP=step, CHUNKED=int(is_chunked)) for step in steps
        )
        return AttentionKernels(
            "attention_tensor",
            128,
            128 if head <= 64 else 256,
            head**-0.5 * log2(e),
            (forward[steps[0]], backward[steps[1]]),
            (macros[0], macros[1]),
        )
    pitch, size = -(-head // 4) * 4 + 4, 8 if sum_type(qkv) == "float64" else 4
    for tile in (64, 32) if length > 32 else (32,):
        shared = tile * (2 * pitch + tile + 4) * size, tile * (4 * pitch + tile + 4) * size
        if shared[1] <= limit:
            return AttentionKernels(
                "attention_dropout" if drops else "attention",
                tile,
                tile * tile // 16,
                head**-0.5,
                shared,
                (kernels.macros(**common, TILE=tile),) * 2,
            )
    raise KernelError(
        f"Heads of {head} channels need {shared[1]} bytes of shared memory a block; this device has {limit}.",
        "Use more and narrower heads.",
    )


def _step(shared: dict[int, int], limit: int) -> int:
    """Return the first step with which two blocks fit a multiprocessor, or else one block.

    shared  {step: bytes of shared memory per block}
    limit   bytes of shared memory of a multiprocessor
    """
    return next(
        (step for blocks in (2, 1) for step, nbytes in shared.items() if blocks * nbytes <= limit)
    )


def _shape(qkv: Any) -> tuple[int, int, int]:
    batch, length, triple = qkv.shape
    return batch, length, triple // 3


def _launch(
    kernels: Kernels,
    chosen: AttentionKernels,
    half: str,
    scale: float,
    qkv: Any,
    heads: int,
    arrays: tuple,
    fresh: str = "",
) -> None:
    is_backward = half != ""
    batch, length, _ = qkv.shape
    kernels.launch(
        chosen.prefix + half,
        (-(-length // chosen.tile), heads, batch),
        (chosen.threads,),
        (length, heads, scale, *arrays),
        chosen.shared[is_backward],
        chosen.macros[is_backward],
        fresh,
    )
