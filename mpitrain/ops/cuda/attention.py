"""Attention in tiles (FlashAttention-2, Dao 2023). `saved` is (q, kv, y, log_sums, heads, drop,
seen).

log_sums is one number per row instead of a row of weights. `FORMS` says which kernels take which
attention: 16-bit elements use tensor cores if the device has them (capability 8.0), with heads of a
multiple of 16 channels, up to 128, and so does float32 where its products are three of TF32; with
device.tensor_cores=wgmma, 16-bit heads of 64 and 128 channels use the products of Hopper's
warpgroups. All other cases use the ordinary arithmetic units, and so does
attention with dropout. `drop` is empty, or the arguments of dropout.
Groups of heads that share keys and values, documents, a window, a soft-cap, and offsets or other pitches than those of a
layer are macros: a launch without them runs a kernel that has no registers for them.
"""

from collections.abc import Callable
from math import e, log, log2
from typing import Any, NamedTuple

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import Macros
from mpitrain.machine.backend import copy_rows
from mpitrain.ops.cuda.launches import (
    KINDS,
    ROWS,
    c_type,
    element,
    in_chunks,
    index,
    most_shared,
    row_blocks,
    shared_of,
    sum_type,
)
from mpitrain.ops.cuda.tiles import DEFAULT
from mpitrain.ops.random_bits import scale, threshold
from mpitrain.ops.reference.attention import CAUSAL, Seen


class AttentionKernels(NamedTuple):
    """The kernels for a shape, and their launch parameters.

    prefix   of the kernels' names
    tile     rows that a block owns
    threads  per block
    unit     the forward multiplies the scale of scores by it: 1, or log2(e) where exponentials are
             powers of 2
    shared   bytes of dynamic shared memory, forward and backward
    macros   forward and backward
    """

    prefix: str
    tile: int
    threads: int
    unit: float
    shared: tuple[int, int]
    macros: tuple[Macros, Macros]

    @property
    def is_tensor(self) -> bool:
        """Whether they use tensor cores, and logarithms of base 2."""
        return self.prefix in ("attention_tensor", "attention_hopper")


class Asked(NamedTuple):
    """What decides which kernels compute an attention.

    is_half    elements have 16 bits
    is_split   they are float32, and device.gemm makes three products of TF32 of one
    head       channels of a head
    drops      the probabilities have dropout
    in_chunks  there are rows, and all begin at multiples of 16 bytes
    wgmma      device.tensor_cores is wgmma
    """

    is_half: bool
    is_split: bool
    head: int
    drops: bool
    in_chunks: bool
    wgmma: bool
    capability: int


def attention(kernels, q, kv, heads, arena, seen=CAUSAL):
    return _attended(kernels, q, kv, heads, (), seen, arena)


def attention_dropout(kernels, q, kv, heads, key, step, first, every, rate, arena, seen=CAUSAL):
    drop = (threshold(rate), scale(rate), first, every, *key, kernels.numbers.integer(step))
    return _attended(kernels, q, kv, heads, drop, seen, arena)


def _attended(kernels: Any, q: Any, kv: Any, heads: int, *how: Any) -> Any:
    drop, seen, arena = how
    batch, count, _ = q.shape
    seen = seen.narrow(count) if seen.window else seen
    y = arena.take(q.shape, q.dtype)
    log_sums = arena.take((batch, heads, count), KINDS[q.dtype].sums)
    call = _called(kernels, q, kv, heads, y, bool(drop), seen)
    if call.chosen.prefix == "attention_hopper":
        _launch_hopper(call, y, log_sums)
    else:
        _launch(call, "", (y, log_sums, *drop, seen.starts))
    return y, (q, kv, y, log_sums, heads, drop, seen)


def attention_part(kernels, q, kv, heads, arena, seen=CAUSAL, earlier=None):
    y, saved = _attended(kernels, q, kv, heads, (), seen, arena)
    log_sums = saved[3]
    if earlier is None:
        return y, (y, log_sums, heads)
    (batch, count, width), (whole, whole_sums, _) = q.shape, earlier
    is_tensor = choose(kernels, q, kv, heads, y, False, seen).is_tensor
    sizes = batch, whole.shape[1], count, heads, width // heads
    kernels.launch(
        "attention_join",
        row_blocks(log_sums.size),
        ROWS,
        (*sizes, log(2) if is_tensor else 1.0, y, log_sums, whole, whole_sums),
        macros=KINDS[q.dtype].macros,
    )
    return whole, earlier


def attention_part_backward(kernels, dy, saved, q, kv, dq, dkv, arena, seen=CAUSAL):
    y, log_sums, heads = saved
    if first := y.shape[1] - q.shape[1]:
        rows = dy, y[:, first:], log_sums[..., first:]
        dy, y, log_sums = (arena.take(each.shape, each.dtype) for each in rows)
        for target, source in zip((dy, y, log_sums), rows, strict=True):
            copy_rows(target, source)
    whole = q, kv, y, log_sums, heads, (), seen.narrow(q.shape[1])
    attention_backward(kernels, dy, whole, dq, dkv, arena)


def attention_backward(kernels, dy, saved, dq, dkv, arena):
    """Write dq and dkv, which have the strides of q and kv; the weights are recomputed tile by
    tile.    dy: (B, Q, H D)
    """
    q, kv, y, log_sums, heads, drop, seen = saved
    pairs = (q, dq), (kv, dkv)
    assert not q.size or all(x.strides[:2] == dx.strides[:2] for x, dx in pairs)
    dots = arena.take(log_sums.shape, log_sums.dtype)
    call = _called(kernels, q, kv, heads, dy, bool(drop), seen)
    kernels.launch(
        "attention_dots",
        row_blocks(dots.size),
        ROWS,
        (*q.shape[:2], heads, call.head, y, dy, dots),
        macros=KINDS[q.dtype].macros,
        fresh="dots",
    )
    if call.chosen.prefix == "attention_hopper":
        _launch_hopper_backward(call, dy, log_sums, dots, dq, dkv, arena)
        return
    for half, gradient in (("_backward_kv", dkv), ("_backward_q", dq)):
        _launch(call, half, (dy, log_sums, dots, gradient, *drop, seen.starts))


def attention_next(kernels, q, kv, keys, values, past, heads, arena, seen=CAUSAL):
    """Return y of new tokens, and store their keys and values; one warp per query and head.

    q, y: (B, T, H D); kv: (B, T, 2 G D); keys, values: (B, G, W, D); past: (B,)
    """
    batch, length, _ = q.shape
    (_, groups, room, head), y = keys.shape, arena.take(q.shape, q.dtype)
    pitches = q.strides[1] // q.itemsize, kv.strides[1] // kv.itemsize
    sizes = batch, length, heads, groups, room, min(seen.window or room, room), *pitches
    cap = _of_cap(seen) if seen.cap else {}
    kernels.launch(
        "attention_next",
        row_blocks(batch * length * heads),
        ROWS,
        (*sizes, seen.scale_of(head), q, kv, past, keys, values, y),
        macros=kernels.macros(**element(q), **index(past), HEAD=head, **cap),
        fresh="y",
        strided="q kv",
    )
    return y


attention_dropout_backward = attention_backward


def choose(
    kernels: Any, q: Any, kv: Any, heads: int, other: Any, drops: bool = False, seen: Seen = CAUSAL
) -> AttentionKernels:
    """Return the kernels for these arrays on this device, chosen once per shape.

    kernels  `Kernels`, or a `Launcher` that also knows device.tensor_cores
    other    what else they read, y or dy
    drops    whether the probabilities have dropout
    raises   KernelError if the heads are too wide for the device
    """
    tiles = getattr(kernels, "tiles", None) or DEFAULT
    wgmma = getattr(kernels, "tensor_cores", "mma") == "wgmma"
    # Kernels for whole sequences need as many queries as keys, in views into rows that hold both and nothing else.
    pitch = (q.shape[2] + kv.shape[2]) * q.itemsize
    are_views = q.strides[:2] == kv.strides[:2] == (kv.shape[1] * pitch, pitch)
    is_general = seen.offset != 0 or q.shape[1] != kv.shape[1] or not are_views
    documents = 0 if seen.starts is None else 2 if seen.closed and seen.offset else 1
    has_window, has_rows = int(seen.window > 0), q.size > 0 and kv.size > 0
    may_copy_chunks = q.dtype.itemsize == 2 or tiles.is_3xtf32 or tiles.by_gain
    is_chunked = may_copy_chunks and bool(in_chunks(q, kv, other))
    shape, masks = (q.shape[1:], kv.shape[2], heads), (documents, has_window, is_general, seen.cap)
    key = ("attention", q.dtype, shape, is_chunked, has_rows, drops, tiles, wgmma, *masks)
    chosen = kernels.plans.get(key)
    if chosen is None:
        head, is_half = q.shape[2] // heads, c_type(q) in ("__half", "__nv_bfloat16")
        # Gains are of whole causal sequences. Parts of a ring share logarithms, of one base for all numbers of keys.
        measured = 0 if is_general else kv.shape[1]
        is_split = c_type(q) == "float" and tiles.splits_attention(head, measured)
        is_chunked = is_chunked and (is_half or is_split)
        asked = Asked(
            is_half,
            is_split,
            head,
            drops,
            is_chunked and has_rows,
            wgmma,
            kernels.engine.capability,
        )
        bounds = {"DOCUMENTS": documents, "WINDOW": has_window, "GENERAL": int(is_general)}
        defines = {**element(q), "HEAD": head, **_of_cap(seen)}
        defines |= {name: value for name, value in bounds.items() if value}
        if (shared_by := 2 * q.shape[2] // kv.shape[2]) > 1:
            defines["GROUP"] = shared_by
        form = next(form for form in FORMS.values() if form.takes(asked))
        chosen = kernels.plans[key] = form.kernels(kernels, q, asked, is_chunked, defines)
    return chosen


def _of_cap(seen: Seen) -> dict[str, Any]:
    """Return the macro of a soft-cap, if there is one: a constant of the kernel."""
    return {"CAP": repr(float(seen.cap))} if seen.cap else {}


def has_tensor_kernel(head: int) -> bool:
    """Return whether attention has a kernel of tensor cores for heads of so many channels."""
    return head % 16 == 0 and head <= 128


HOPPER_ROWS = 128  # OWNED and STEP of attention_hopper.cu, KEYS of attention_hopper_backward.cu
HOPPER_HEADS = 64, 128
HOPPER_STAGES = 2
HOPPER_QUERIES = {
    64: 128,
    128: 64,
}  # STEP of attention_hopper_backward.cu, by the channels of a head
HOPPER_PARTS = 4
"""The most arrays of sums that dq is made of."""
HOPPER_LOOPS = {
    ("attention_hopper", 64): (12, 440),
    ("attention_hopper", 128): (16, 500),
    ("attention_hopper_backward", 64): (36, 1180),
    ("attention_hopper_backward", 128): (32, 900),
}
"""(kernel, channels of a head) -> of its main loop the products, of 64 rows in a depth of 16, and the most instructions.

A test compiles the kernels and counts; on paper this is their time.
"""


def _hopper(
    kernels: Any, q: Any, asked: Asked, is_chunked: bool, defines: dict[str, Any]
) -> AttentionKernels:
    """Return attention_hopper and its backward.

    The shared memory holds a tile of queries, and stages of keys and values; in the backward keys and
    values, stages of queries, dy and their statistics, and two tiles of slopes.
    """
    tile, step = HOPPER_ROWS * asked.head * 2, HOPPER_QUERIES[asked.head]
    forward = (1 + 2 * HOPPER_STAGES) * tile + 8 * (4 + 4 * HOPPER_STAGES)
    of_queries = 2 * step * asked.head * 2 + 8 * step
    backward = 2 * tile + HOPPER_STAGES * of_queries + 2 * step * HOPPER_ROWS * 2
    macros = kernels.macros(**defines)
    return AttentionKernels(
        "attention_hopper",
        HOPPER_ROWS,
        384,
        log2(e),
        (forward + 1024, backward + 8 * (4 + 2 * HOPPER_STAGES) + 1024),
        (macros, macros),
    )


def parts_of(blocks: int, heads: int, multiprocessors: int) -> int:
    """Return by how many blocks of threads the keys of a head are shared, so that all end soon.

    Each part more is an array of sums more, which counts a twentieth of the whole time.
    blocks  of keys
    heads   of keys and values, of all sequences
    """

    def time(parts: int) -> float:
        return -(-heads * parts // multiprocessors) * -(-blocks // parts) / blocks + parts / 20

    return min(range(1, min(blocks, HOPPER_PARTS) + 1), key=time)


def _tensor(
    kernels: Any, q: Any, asked: Asked, is_chunked: bool, defines: dict[str, Any]
) -> AttentionKernels:
    """Return attention_tensor and its backward.

    The shared memory holds one tile of 128 rows (forward) or two (backward).
    It also holds two stages of two smaller tiles, with the statistics of their rows.
    """
    head, limit = asked.head, most_shared(kernels)
    forward, backward = (
        {step: (tiles * 128 + 4 * step) * 2 * (head + 8) + 16 * step for step in steps}
        for tiles, steps in ((1, (64, 32)), (2, (32, 16)))
    )
    steps = _step(forward, limit), _step(backward, limit)
    macros = tuple(kernels.macros(**defines, STEP=step, CHUNKED=int(is_chunked)) for step in steps)
    return AttentionKernels(
        "attention_tensor",
        128,
        128 if head <= 64 else 256,
        log2(e),
        (forward[steps[0]], backward[steps[1]]),
        (macros[0], macros[1]),
    )


def _split_steps(head: int) -> tuple[int, int]:
    """Return steps with which no register of attention in float32 is spilled, forward and backward."""
    return (32 if head <= 64 else 16), 16


def _split_shared(head: int) -> tuple[int, int]:
    """Return the bytes of shared memory of attention in float32, forward and backward: as `_tensor`."""
    forward, backward = (
        (rows + 4 * step) * 4 * (head + 4) + 16 * step
        for rows, step in zip((128, 256), _split_steps(head), strict=True)
    )
    return forward, backward


def _split(
    kernels: Any, q: Any, asked: Asked, is_chunked: bool, defines: dict[str, Any]
) -> AttentionKernels:
    """Return attention_tensor and its backward for float32: one block on a multiprocessor."""
    macros = [
        kernels.macros(**defines, STEP=step, CHUNKED=int(is_chunked))
        for step in _split_steps(asked.head)
    ]
    shared = _split_shared(asked.head)
    return AttentionKernels("attention_tensor", 128, 256, log2(e), shared, (macros[0], macros[1]))


def _ordinary(
    kernels: Any, q: Any, asked: Asked, is_chunked: bool, defines: dict[str, Any]
) -> AttentionKernels:
    """Return attention, or attention_dropout."""
    head, limit = asked.head, most_shared(kernels)
    pitch, size = -(-head // 4) * 4 + 4, 8 if sum_type(q) == "float64" else 4
    for tile in (64, 32) if q.shape[1] > 32 else (32,):
        shared = tile * (2 * pitch + tile + 4) * size, tile * (4 * pitch + tile + 4) * size
        if shared[1] <= limit:
            return AttentionKernels(
                "attention_dropout" if asked.drops else "attention",
                tile,
                tile * tile // 16,
                1.0,
                shared,
                (kernels.macros(**defines, TILE=tile),) * 2,
            )
    raise KernelError(
        f"Heads of {head} channels need {shared[1]} bytes of shared memory a block; this device has {limit}.",
        "Use more and narrower heads.",
    )


class AttentionForm(NamedTuple):
    """Kernels of attention: which attention they take, and the function that returns them."""

    takes: Callable[[Asked], bool]
    kernels: Callable[..., AttentionKernels]


FORMS = {
    "wgmma": AttentionForm(
        lambda asked: (
            asked.wgmma
            and asked.is_half
            and asked.head in HOPPER_HEADS
            and asked.in_chunks
            and not asked.drops
        ),
        _hopper,
    ),
    "mma.sync": AttentionForm(
        lambda asked: (
            asked.capability >= 80
            and asked.is_half
            and has_tensor_kernel(asked.head)
            and not asked.drops
        ),
        _tensor,
    ),
    "3xTF32": AttentionForm(
        lambda asked: (
            asked.capability >= 80
            and asked.is_split
            and has_tensor_kernel(asked.head)
            and max(_split_shared(asked.head)) <= shared_of(asked.capability)
            and not asked.drops
        ),
        _split,
    ),
    "ordinary units": AttentionForm(lambda asked: True, _ordinary),
}
"""The first that takes an attention computes it."""


def _step(shared: dict[int, int], limit: int) -> int:
    """Return the first step with which two blocks fit a multiprocessor, or else one block.

    shared  {step: bytes of shared memory per block}
    limit   bytes of shared memory of a multiprocessor
    """
    return next(
        (step for blocks in (2, 1) for step, nbytes in shared.items() if blocks * nbytes <= limit)
    )


class AttentionCall(NamedTuple):
    """An attention with its kernels: what each of its launches takes.

    head, heads  channels of a head, and heads of the queries
    groups       heads of keys and values
    scale        of the scores
    masks        numbers of queries and keys, and which of these a query sees
    of_q, of_kv  elements from one row to the next, and rows from one sequence to the next
    """

    kernels: Any
    chosen: AttentionKernels
    q: Any
    kv: Any
    starts: Any
    head: int
    heads: int
    groups: int
    scale: float
    masks: tuple[int, ...]
    of_q: tuple[int, int]
    of_kv: tuple[int, int]


def _called(
    kernels: Any, q: Any, kv: Any, heads: int, other: Any, drops: bool, seen: Seen
) -> AttentionCall:
    head = q.shape[2] // heads
    return AttentionCall(
        kernels,
        choose(kernels, q, kv, heads, other, drops, seen),
        q,
        kv,
        seen.starts,
        head,
        heads,
        kv.shape[2] // (2 * head),
        seen.scale_of(head),
        (q.shape[1], kv.shape[1], seen.offset, seen.window, heads),
        (q.strides[1] // q.itemsize, q.strides[0] // (q.strides[1] or 1)),
        (kv.strides[1] // kv.itemsize, kv.strides[0] // (kv.strides[1] or 1)),
    )


def _launch(call: AttentionCall, half: str, arrays: tuple) -> None:
    """Launch the forward or a half of the backward.

    arrays  those after q and kv
    """
    chosen, (batch, count, _), length = call.chosen, call.q.shape, call.kv.shape[1]
    of_keys = half == "_backward_kv"
    owned, own_heads = (length, call.groups) if of_keys else (count, call.heads)
    (q_pitch, q_rows), (kv_pitch, kv_rows) = call.of_q, call.of_kv
    scale = call.scale if half else call.scale * chosen.unit
    call.kernels.launch(
        chosen.prefix + half,
        (-(-owned // chosen.tile), own_heads, batch),
        (chosen.threads,),
        (*call.masks, q_pitch, kv_pitch, q_rows, kv_rows, scale, call.q, call.kv, *arrays),
        chosen.shared[half != ""],
        chosen.macros[half != ""],
        "" if half else "y log_sums",
        f"q kv {'dkv' if of_keys else 'dq'}" if half else "q kv",
    )


def _launch_hopper(call: AttentionCall, y: Any, log_sums: Any) -> None:
    """Launch the forward by warpgroups, whose blocks go on with the next queries."""
    chosen, engine, (batch, count, _) = call.chosen, call.kernels.engine, call.q.shape
    maps = (engine.tensor_map(each, chosen.tile) for each in (call.q, call.kv))
    jobs = -(-count // chosen.tile) * call.heads * batch
    call.kernels.launch(
        chosen.prefix,
        (min(jobs, engine.multiprocessors),),
        (chosen.threads,),
        (*maps, *call.masks, batch, call.scale * chosen.unit, y, log_sums, call.starts),
        chosen.shared[0],
        chosen.macros[0],
        "y log_sums",
    )


def _launch_hopper_backward(
    call: AttentionCall, dy: Any, log_sums: Any, dots: Any, dq: Any, dkv: Any, arena: Any
) -> None:
    """Launch the backward by warpgroups: one kernel for all products, and the sum of the parts of dq."""
    chosen, engine, (batch, count, width) = call.chosen, call.kernels.engine, call.q.shape
    blocks = -(-call.kv.shape[1] // chosen.tile)
    parts = parts_of(blocks, batch * call.groups, engine.multiprocessors)
    sums, step = arena.take((parts * batch * count * width,), dots.dtype), HOPPER_QUERIES[call.head]
    rows = (call.q, step), (call.kv, chosen.tile), (dy, step)
    maps = (engine.tensor_map(each, box) for each, box in rows)
    call.kernels.launch(
        "attention_hopper_backward",
        (parts, call.groups, batch),
        (chosen.threads,),
        (*maps, *call.masks, *call.of_kv, call.scale, log_sums, dots, dkv, sums, call.starts),
        chosen.shared[1],
        chosen.macros[1],
        "sums",
        "dkv",
    )
    call.kernels.launch(
        "attention_hopper_dq",
        (-(-count * call.head // 2048), call.heads, batch),
        (256,),
        (parts, count, *call.of_q, call.scale, sums, dq),
        0,
        chosen.macros[1],
        "",
        "dq",
    )
