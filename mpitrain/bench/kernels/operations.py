"""Time, rate, relative rate and wrong elements of every operation of a training step."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.bench.kernels.timing import seconds
from mpitrain.ops import OPERATIONS, bodies
from mpitrain.ops.cuda import wire
from mpitrain.ops.cuda.sums import sum_rows
from mpitrain.ops.device import Device

WRONG = 1e-4
"""Upper bound of the error of a right element, relative to the reference's largest element."""
EPSILON = 1e-5
"""Added to the variance in LayerNorm."""
SHAPES = {
    "cpu": (8, 128, 256, 4, 512),
    "cuda-sim": (2, 24, 32, 2, 40),
    "cuda": (16, 1024, 768, 12, 50304),
}
"""{kind of device: (sequences, tokens, channels, heads, vocabulary)}."""

MOVED = {"cpu": 1024, "cuda-sim": 48, "cuda": 1 << 17}
"""Rows for memory-bound operations. On a GPU they exceed all caches and hide launch costs."""


class Row(NamedTuple):
    """One measurement.

    rate     10^9 bytes/s or, if `unit` is GFLOP/s, 10^9 floating-point operations/s
    percent  rate relative to the copy, or relative to the first matrix product
    peer_us  time of the peer in turns with ours; nan without a peer
    """

    name: str
    time_us: float
    rate: float
    unit: str
    percent: float
    peer_us: float
    wrong: int


class Work(NamedTuple):
    """An operation on given arrays.

    run        runs the operation
    result     () -> array to compare
    truth      () -> reference on the host
    amount     bytes moved or floating-point operations of a run
    tolerance  as in `count_wrong`
    peer       runs PyTorch's operation, or two operations of ours in place of a fused one
    """

    name: str
    run: Callable[[], Any]
    result: Callable[[], Any]
    truth: Callable[[], Any]
    amount: float
    unit: str = "GB/s"
    tolerance: float = WRONG
    peer: Callable[[], Any] | None = None


class Attention(Protocol):
    """A protocol for the attention of a reference library, such as PyTorch, on given arrays."""

    def forward(self) -> None:
        """Compute the attention."""

    def backward(self) -> None:
        """Compute the gradient of the input, after `forward`."""


Peer = Callable[[str, np.ndarray, np.ndarray, int, str], Attention]
"""(device kind, qkv, dy, heads, dtype) -> attention of the reference library, PyTorch."""


def measure(device: Device, peer: Peer | None = None) -> Iterator[Row]:
    """Yield rows as they are measured.

    The first row, a copy, is 100% for memory-bound operations; the first product is 100% for the
    others.
    """
    backend = device.backend
    x = backend.from_host(np.ones(MOVED[device.kind] * SHAPES[device.kind][2], np.float32))
    y = backend.from_host(np.empty(x.shape, np.float32))

    def copy() -> None:
        y[...] = x

    (ours,) = seconds(device, copy)
    ceilings = {"GB/s": 2 * x.nbytes / ours / 1e9}
    yield Row(
        "copy",
        1e6 * ours,
        ceilings["GB/s"],
        "GB/s",
        100.0,
        np.nan,
        int((backend.to_host(y) != 1).sum()),
    )
    for work in works(device, peer):
        work.run()
        wrong = count_wrong(
            backend.to_host(work.result()), np.asarray(work.truth()), work.tolerance
        )
        ours, *theirs = seconds(device, work.run, *([work.peer] if work.peer else []))
        rate = work.amount / ours / 1e9
        ceiling = ceilings.setdefault(work.unit, rate)
        yield Row(
            work.name,
            1e6 * ours,
            rate,
            work.unit,
            100 * rate / ceiling,
            1e6 * theirs[0] if theirs else np.nan,
            wrong,
        )


def count_wrong(mine: np.ndarray, truth: np.ndarray, tolerance: float = WRONG) -> int:
    """Return the number of elements with an error above tolerance times the largest element.

    NaN counts as wrong.
    """
    return int(
        (~(np.abs(mine - truth) <= tolerance * max(np.abs(truth).max(initial=0), 1e-3))).sum()
    )


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """Convert the numbers to a storage dtype."""
    return x.astype(dtype)


def values(x: np.ndarray) -> np.ndarray:
    """Convert stored numbers to float32."""
    return x.astype(np.float32)


def works(device: Device, peer: Peer | None) -> Iterator[Work]:
    """Yield the operations of a GPT's training step, at sizes that suit the device."""
    ops, reference, arena = device.ops, bodies.reference(), device.arena()
    put, get = device.backend.from_host, device.backend.to_host
    batch, tokens, width, _, vocab = SHAPES[device.kind]
    rows, rng = batch * tokens, np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x, dy, w = numbers(rows, width), numbers(rows, 4 * width), numbers(4 * width, width)
    b, gain = numbers(4 * width), numbers(width)
    w *= width**-0.5
    dx, dw, db, dw_bias = put(x), put(w), put(b), put(dy)
    kept: dict[str, Any] = {}

    def keep(name: str, compute: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            kept[name] = compute()

        return run

    def first(name: str) -> Callable[[], Any]:
        return lambda: kept[name][0] if isinstance(kept[name], tuple) else kept[name]

    size, many_rows = 2.0 * rows * width * 4 * width, MOVED[device.kind]
    yield Work(
        "linear",
        keep("linear", lambda: ops.linear(dx, dw, db, arena)),
        first("linear"),
        lambda: reference.linear(x, w, b, None)[0],
        size,
        "GFLOP/s",
    )
    yield Work(
        "linear_gelu",
        keep("gelu", lambda: ops.linear_gelu(dx, dw, db, arena)),
        first("gelu"),
        lambda: reference.linear_gelu(x, w, b, None)[0],
        size,
        "GFLOP/s",
    )
    yield Work(
        "linear input",
        keep("input", lambda: ops.linear_backward_input(dw_bias, dw, kept["linear"][1], arena)),
        first("input"),
        lambda: dy @ w,
        size,
        "GFLOP/s",
    )
    out = put(np.empty_like(w))
    yield Work(
        "linear weight",
        lambda: ops.linear_backward_weight(kept["input"][1], out, False, arena),
        lambda: out,
        lambda: dy.T @ x,
        size,
        "GFLOP/s",
    )
    yield Work(
        "linear + residual",
        keep("sum", lambda: ops.linear(dx, dw, db, arena, residual=dw_bias)),
        first("sum"),
        lambda: reference.linear(x, w, b, None, residual=dy)[0],
        size,
        "GFLOP/s",
        peer=lambda: ops.add(y := ops.linear(dx, dw, db, arena)[0], dw_bias, y, arena),
    )
    # The host backend multiplies its saved factors in place, so repeated runs would let them grow.
    if device.kernels is not None:
        z, saved = numbers(rows, width), kept["linear"][1]
        mine, theirs = put(z.copy()), put(z.copy())
        yield Work(
            "linear input x gelu'",
            keep("back", lambda: ops.gelu_linear_backward_input(dw_bias, dw, saved, mine, arena)),
            first("back"),
            lambda: reference.gelu_linear_backward_input(dy, w, x, z, None)[0],
            size,
            "GFLOP/s",
            peer=lambda: ops.gelu_backward(
                ops.linear_backward_input(dw_bias, dw, saved, arena)[0], theirs, arena
            ),
        )
    kept.clear()
    many, g = numbers(many_rows, width), put(gain)
    dmany = put(many)
    yield Work(
        "layer_norm",
        keep("norm", lambda: ops.layer_norm(dmany, g, g, EPSILON, arena)),
        first("norm"),
        lambda: reference.layer_norm(many, gain, gain, EPSILON, None)[0],
        OPERATIONS["layer_norm"].nbytes(M=many_rows, C=width),
    )
    yield Work(
        "layer_norm input",
        keep("back", lambda: ops.layer_norm_backward_input(dmany, g, kept["norm"][1], arena)),
        first("back"),
        lambda: reference.layer_norm_backward_input(
            many, gain, reference.layer_norm(many, gain, gain, EPSILON, None)[1], None
        )[0],
        OPERATIONS["layer_norm_backward_input"].nbytes(M=many_rows, C=width),
    )
    kept.clear()
    total = put(np.empty_like(many))

    def in_two_passes() -> None:
        ops.add_bias(dmany, g, total, arena)
        ops.add(total, dmany, total, arena)

    yield Work(
        "bias + residual",
        lambda: ops.add_bias(dmany, g, total, arena, dmany),
        lambda: total,
        lambda: many + gain + many,
        OPERATIONS["add_bias"].nbytes(M=many_rows, N=width) + many.nbytes,
        peer=in_two_passes,
    )
    yield from attentions(device, peer)
    logits, targets = numbers(min(rows, 1024), vocab), rng.integers(vocab, size=min(rows, 1024))
    on_device, right = put(logits), put(targets)
    yield Work(
        "cross_entropy_loss",
        keep("loss", lambda: ops.cross_entropy_loss(on_device, right, arena)),
        lambda: np.asarray(get(kept["loss"])),
        lambda: reference.cross_entropy_loss(logits, targets, None),
        OPERATIONS["cross_entropy_loss"].nbytes(M=len(targets), V=vocab),
    )
    flat = [np.abs(numbers(many.size)) for _ in range(4)]
    p, grad, m, v = (put(a.copy()) for a in flat)
    scalars = {
        "scale": 1.0,
        "lr": 0.0,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "step": 1,
    }
    yield Work(
        "adamw",
        lambda: ops.adamw(p, grad, m, v, arena=arena, **scalars),
        lambda: p,
        lambda: flat[0],
        OPERATIONS["adamw"].nbytes(L=many.size),
    )
    yield Work(
        "gradient_facts",
        keep("facts", lambda: ops.gradient_facts(grad, arena)),
        lambda: np.asarray(get(kept["facts"])),
        lambda: np.array(reference.gradient_facts(flat[1], None)),
        OPERATIONS["gradient_facts"].nbytes(L=many.size),
    )
    if device.kernels is not None:
        yield from reductions(device, flat[0], flat[1])


def attentions(device: Device, peer: Peer | None) -> Iterator[Work]:
    """Yield attention, forward and backward, in float32 and, with kernels, in bfloat16."""
    ops, reference, arena, backend = (
        device.ops,
        bodies.reference(),
        device.arena(),
        device.backend,
    )
    batch, tokens, width, heads, _ = SHAPES[device.kind]
    # The causal forward pass has two products over half of all pairs of tokens.
    pairs, rng = (
        2.0 * batch * tokens * tokens * width,
        np.random.default_rng(1),
    )
    qkv, dy = (rng.standard_normal((batch, tokens, parts * width), np.float32) for parts in (3, 1))
    few = slice(2)  # only two sequences are compared, because the reference is slow
    for dtype in ("float32", "bfloat16") if device.kernels is not None else ("float32",):
        packed, pull = (backend.from_host(stored(array, dtype)) for array in (qkv, dy))
        theirs = peer(device.kind, qkv, dy, heads, dtype) if peer else None
        kept: dict[str, Any] = {}

        def forward(packed=packed, kept=kept) -> None:
            kept["y"], kept["saved"] = ops.attention(packed, heads, arena)

        def backward(pull=pull, kept=kept) -> None:
            kept["dqkv"] = ops.attention_backward(pull, kept["saved"], arena)

        true_qkv, true_dy = (values(stored(array[few], dtype)) for array in (qkv, dy))

        def got(name: str, kept=kept) -> np.ndarray:
            return values(backend.to_host(kept[name][few]))

        def true_y(x=true_qkv) -> np.ndarray:
            return reference.attention(x, heads, None)[0]

        def truth(x=true_qkv, dy=true_dy) -> np.ndarray:
            return reference.attention_backward(dy, reference.attention(x, heads, None)[1], None)

        tolerance = {"float32": WRONG, "bfloat16": 2e-2}[dtype]
        yield Work(
            f"attention {dtype}",
            forward,
            partial(got, "y"),
            true_y,
            pairs,
            "GFLOP/s",
            tolerance,
            theirs.forward if theirs else None,
        )
        if device.kernels is not None:  # the host backend overwrites its saved arrays in backward
            yield Work(
                f"attention back {dtype}",
                backward,
                partial(got, "dqkv"),
                truth,
                2.5 * pairs,
                "GFLOP/s",
                tolerance,
                theirs.backward if theirs else None,
            )


def reductions(device: Device, a: np.ndarray, b: np.ndarray) -> Iterator[Work]:
    """Yield column sums, and kernels of all-reduces: sums of chunks, 16-bit and 8-bit codecs."""
    kernels, arena, put, width = (
        device.kernels,
        device.arena(),
        device.backend.from_host,
        SHAPES[device.kind][2],
    )
    assert kernels is not None
    x, half, back, total = (
        put(a),
        put(np.empty(a.size, np.float16)),
        put(np.empty_like(a)),
        put(b.copy()),
    )
    scales = -(-a.size // wire.BLOCK)
    coded, scale = put(np.empty(a.size, np.int8)), put(np.empty(scales, np.float32))
    matrix, sums = x.reshape(-1, width), put(np.empty(width, np.float32))
    yield Work(
        "column sums",
        lambda: sum_rows(kernels, matrix, sums, False, arena),
        lambda: sums,
        lambda: a.reshape(-1, width).sum(0, dtype=np.float64),
        a.nbytes,
    )
    # Later runs add again, but only the result of the first run is compared.
    yield Work(
        "add_into",
        lambda: wire.add_into(kernels, total, x),
        lambda: total,
        lambda: a + b,
        3 * a.nbytes,
    )
    yield Work(
        "to float16",
        lambda: wire.convert(kernels, x, half),
        lambda: half,
        lambda: a.astype(np.float16),
        1.5 * a.nbytes,
    )
    yield Work(
        "to int8",
        lambda: wire.encode_int8(kernels, x, coded, scale),
        lambda: scale,
        lambda: np.maximum.reduceat(a, np.arange(0, a.size, wire.BLOCK)) / 127,
        1.25 * a.nbytes,
    )
    yield Work(
        "from int8",
        lambda: wire.decode_int8(kernels, coded, scale, back, False),
        lambda: back,
        lambda: a,
        1.25 * a.nbytes,
        tolerance=1 / 127,
    )
