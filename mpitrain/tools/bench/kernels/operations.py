"""Time, rate, relative rate and wrong elements of every operation of a training step."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mpitrain.ops import bodies
from mpitrain.ops.cuda import wire
from mpitrain.ops.cuda.launches import sum_rows
from mpitrain.ops.device import Device
from mpitrain.tools.bench.kernels.timing import seconds
from mpitrain.tools.bench.kernels.work import (
    MOVED,
    SHAPES,
    WRONG,
    Calls,
    OperationCall,
    OperationRow,
    Peer,
    count_wrong,
    stored,
    values,
)


def measure(
    device: Device, peer: Peer | None = None, attends: bool = True
) -> Iterator[OperationRow]:
    """Yield rows as they are measured; `attends`: attention is among them.

    The first row, a copy, is 100% for memory-bound operations; the first product is 100% for the
    others.
    """
    backend = device.backend
    x = backend.from_host(np.ones(MOVED[device.kind] * SHAPES[device.kind][2], np.float32))
    y = backend.from_host(np.empty(x.shape, np.float32))

    def copy() -> None:
        y[...] = x

    (ours,) = seconds(device, copy)
    rate = 2 * x.nbytes / ours / 1e9
    yield OperationRow(
        "copy",
        1e6 * ours,
        rate,
        "GB/s",
        100.0,
        np.nan,
        int((backend.to_host(y) != 1).sum()),
    )
    yield from measured(device, works(device, peer, attends), {"GB/s": rate})


def measured(
    device: Device, each: Iterable[OperationCall], ceilings: dict[str, float] | None = None
) -> Iterator[OperationRow]:
    """Yield a row of each work.

    ceilings  the rate of 100% by unit; without one, it is that of the first row with this unit
    """
    backend, ceilings = device.backend, dict(ceilings or {})
    for work in each:
        work.run()
        wrong = count_wrong(
            backend.to_host(work.result()), np.asarray(work.truth()), work.tolerance
        )
        ours, *theirs = seconds(device, work.run, *([work.peer] if work.peer else []))
        rate = work.amount / ours / 1e9
        ceiling = ceilings.setdefault(work.unit, rate)
        yield OperationRow(
            work.name,
            1e6 * ours,
            rate,
            work.unit,
            100 * rate / ceiling,
            1e6 * theirs[0] if theirs else np.nan,
            wrong,
        )


def works(device: Device, peer: Peer | None, attends: bool = True) -> Iterator[OperationCall]:
    """Yield the operations of a GPT's training step, at sizes that suit the device."""
    ops, rng = device.ops, np.random.default_rng(0)
    batch, tokens, width, _, vocab = SHAPES[device.kind]
    rows, wide, many_rows = batch * tokens, 4 * width, MOVED[device.kind]

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    size, calls = 2.0 * rows * width * wide, Calls(device, M=rows, K=width, N=wide)
    yield calls.work("linear", "linear", size)
    yield calls.work("linear_gelu", "linear_gelu", size)
    yield calls.work("linear input", "linear_backward_input", size)
    yield calls.work("linear weight", "linear_backward_weight", size, accumulate=False)

    def product_then_sum(of: dict[str, Any]) -> None:
        y, _ = ops.linear(of["x"], of["w"], of["b"], of["arena"])
        ops.add(y, of["residual"], y, of["arena"])

    residual = numbers(rows, wide)
    yield calls.work("linear + residual", "linear", size, product_then_sum, residual=residual)
    # The host backend multiplies its saved factors in place, so repeated runs would let them grow.
    if device.kernels is not None:
        z = device.backend.from_host(numbers(rows, width))
        yield calls.work(
            "linear input x gelu'",
            "gelu_linear_backward_input",
            size,
            lambda of: ops.gelu_backward(
                ops.linear_backward_input(of["dy"], of["w"], of["saved"], of["arena"])[0],
                z,
                of["arena"],
            ),
        )
    calls = Calls(device, M=many_rows, C=width, N=width, L=many_rows * width)
    yield calls.work("layer_norm", "layer_norm")
    yield calls.work("layer_norm input", "layer_norm_backward_input")

    def in_two_passes(of: dict[str, Any]) -> None:
        ops.add_bias(of["x"], of["b"], of["out"], of["arena"])
        ops.add(of["out"], of["residual"], of["out"], of["arena"])

    residual = numbers(many_rows, width)
    yield calls.work("bias + residual", "add_bias", 0.0, in_two_passes, residual=residual)
    if attends:
        yield from attentions(device, peer)
    logit_calls = Calls(device, M=min(rows, 1024), V=vocab)
    yield logit_calls.work("cross_entropy_loss", "cross_entropy_loss")
    yield calls.work("adamw", "adamw", lr=0.0, weight_decay=0.0)
    yield calls.work("gradient_facts", "gradient_facts")
    if device.kernels is not None:
        yield from reductions(device, *np.abs(numbers(2, many_rows * width)))


def attentions(device: Device, peer: Peer | None) -> Iterator[OperationCall]:
    """Yield attention, forward and backward, in float32 and, with kernels, in bfloat16."""
    ops, reference = device.ops, bodies.reference()
    arena, backend = device.arena(), device.backend
    batch, tokens, width, heads, _ = SHAPES[device.kind]
    # The causal forward pass has two matrix products, each over half of all pairs of tokens.
    pairs = 2.0 * batch * tokens * tokens * width
    rng = np.random.default_rng(1)
    qkv, dy = (rng.standard_normal((batch, tokens, parts * width), np.float32) for parts in (3, 1))
    compared = slice(2)  # only two sequences are compared, because the reference is slow
    for dtype in ("float32", "bfloat16") if device.kernels is not None else ("float32",):
        packed, pull = (backend.from_host(stored(array, dtype)) for array in (qkv, dy))
        theirs = peer(device.kind, qkv, dy, heads, dtype) if peer else None
        kept: dict[str, Any] = {}

        def forward(packed=packed, kept=kept) -> None:
            kept["y"], kept["saved"] = ops.attention(packed, heads, arena)

        def backward(pull=pull, kept=kept) -> None:
            kept["dqkv"] = ops.attention_backward(pull, kept["saved"], arena)

        true_qkv, true_dy = (values(stored(array[compared], dtype)) for array in (qkv, dy))

        def got(name: str, kept=kept) -> np.ndarray:
            return values(backend.to_host(kept[name][compared]))

        def true_y(x=true_qkv) -> np.ndarray:
            return reference.attention(x, heads, None)[0]

        def truth(x=true_qkv, dy=true_dy) -> np.ndarray:
            return reference.attention_backward(dy, reference.attention(x, heads, None)[1], None)

        tolerance = {"float32": WRONG, "bfloat16": 2e-2}[dtype]
        yield OperationCall(
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
            yield OperationCall(
                f"attention back {dtype}",
                backward,
                partial(got, "dqkv"),
                truth,
                2.5 * pairs,
                "GFLOP/s",
                tolerance,
                theirs.backward if theirs else None,
            )


def reductions(device: Device, a: np.ndarray, b: np.ndarray) -> Iterator[OperationCall]:
    """Yield column sums, and kernels of all-reduces: sums of chunks, 16-bit and 8-bit codecs."""
    kernels, arena, put = device.kernels, device.arena(), device.backend.from_host
    width = SHAPES[device.kind][2]
    assert kernels is not None
    x, total = put(a), put(b.copy())
    half, back = put(np.empty(a.size, np.float16)), put(np.empty_like(a))
    scales = -(-a.size // wire.BLOCK)
    coded, scale = put(np.empty(a.size, np.int8)), put(np.empty(scales, np.float32))
    matrix, sums = x.reshape(-1, width), put(np.empty(width, np.float32))
    yield OperationCall(
        "column sums",
        lambda: sum_rows(kernels, matrix, sums, False, arena),
        lambda: sums,
        lambda: a.reshape(-1, width).sum(0, dtype=np.float64),
        a.nbytes,
    )
    # Later runs add again, but only the result of the first run is compared.
    yield OperationCall(
        "add_into",
        lambda: wire.add_into(kernels, total, x),
        lambda: total,
        lambda: a + b,
        3 * a.nbytes,
    )
    yield OperationCall(
        "to float16",
        lambda: wire.convert(kernels, x, half),
        lambda: half,
        lambda: a.astype(np.float16),
        1.5 * a.nbytes,
    )
    yield OperationCall(
        "to int8",
        lambda: wire.encode_int8(kernels, x, coded, scale),
        lambda: scale,
        lambda: np.maximum.reduceat(a, np.arange(0, a.size, wire.BLOCK)) / 127,
        1.25 * a.nbytes,
    )
    yield OperationCall(
        "from int8",
        lambda: wire.decode_int8(kernels, coded, scale, back, False),
        lambda: back,
        lambda: a,
        1.25 * a.nbytes,
        tolerance=1 / 127,
    )
