"""Every operation of a training step, measured: time, rate, share of what the device can do, and elements that are wrong."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mpitrain.bench.target import Target
from mpitrain.ops import reference

WRONG = 1e-4    # difference, relative to the largest element of the truth, from which on an element counts as wrong
SHAPES = {"cpu": (8, 128, 256, 4, 512), "cuda-sim": (2, 24, 32, 2, 40), "cuda": (8, 1024, 768, 12, 50304)}
"""Sequences, tokens, channels, heads, vocabulary by kind of device."""


class Row(NamedTuple):
    """One measurement. `rate` counts bytes moved, or for `unit` GFLOP/s operations, in billions a second."""

    name: str
    seconds: float
    rate: float
    unit: str
    percent: float
    wrong: int


class Work(NamedTuple):
    """An operation on given arrays: what runs, what of it is compared with what, and how much it moves or computes."""

    name: str
    run: Callable[[], Any]
    result: Callable[[], Any]
    truth: Callable[[], Any]
    amount: float
    unit: str = "GB/s"


def measure(device: Target) -> Iterator[Row]:
    """Rows as they are measured: copying first, the ceiling of all that move bytes; a product second, that of the rest."""
    x = device.put(np.ones(SHAPES[device.kind][0] * SHAPES[device.kind][1] * SHAPES[device.kind][2], np.float32))
    y = device.put(np.empty(x.shape, np.float32))

    def copy() -> None:
        y[...] = x

    seconds = device.seconds(copy)
    ceilings = {"GB/s": 2 * x.nbytes / seconds / 1e9}
    yield Row("copy", seconds, ceilings["GB/s"], "GB/s", 100.0, int((device.get(y) != 1).sum()))
    for work in works(device):
        work.run()
        wrong = count_wrong(device.get(work.result()), np.asarray(work.truth()))
        seconds = device.seconds(work.run)
        rate = work.amount / seconds / 1e9
        ceiling = ceilings.setdefault(work.unit, rate)
        yield Row(work.name, seconds, rate, work.unit, 100 * rate / ceiling, wrong)


def count_wrong(mine: np.ndarray, truth: np.ndarray) -> int:
    """Elements that differ by more than WRONG of the largest; NaN is wrong."""
    return int((~(np.abs(mine - truth) <= WRONG * max(np.abs(truth).max(initial=0), 1e-3))).sum())


def works(device: Target) -> Iterator[Work]:
    """The operations of a GPT's step, at sizes that suit the device."""
    ops, arena, put = device.ops, device.arena, device.put
    batch, tokens, width, heads, vocab = SHAPES[device.kind]
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

    size, nbytes = 2.0 * rows * width * 4 * width, 4.0 * rows * width
    yield Work("linear", keep("linear", lambda: ops.linear(dx, dw, db, arena)), first("linear"),
               lambda: reference.linear(x, w, b, None)[0], size, "GFLOP/s")
    yield Work("linear_gelu", keep("gelu", lambda: ops.linear_gelu(dx, dw, db, arena)), first("gelu"),
               lambda: reference.linear_gelu(x, w, b, None)[0], size, "GFLOP/s")
    yield Work("linear input", keep("input", lambda: ops.linear_backward_input(dw_bias, dw, kept["linear"][1], arena)),
               first("input"), lambda: dy @ w, size, "GFLOP/s")
    out = put(np.empty_like(w))
    yield Work("linear weight", lambda: ops.linear_backward_weight(kept["input"][1], out, False, arena), lambda: out,
               lambda: dy.T @ x, size, "GFLOP/s")
    g = put(gain)
    yield Work("layer_norm", keep("norm", lambda: ops.layer_norm(dx, g, g, arena)), first("norm"),
               lambda: reference.layer_norm(x, gain, gain, None)[0], 2 * nbytes)
    yield Work("layer_norm input", keep("back", lambda: ops.layer_norm_backward_input(dx, g, kept["norm"][1], arena)),
               first("back"), lambda: reference.layer_norm_backward_input(x, gain, reference.layer_norm(x, gain, gain, None)[1],
                                                                          None)[0], 3 * nbytes)
    qkv = numbers(batch, tokens, 3 * width)
    packed, pull = put(qkv), put(x.reshape(batch, tokens, width))
    pairs = 2.0 * batch * tokens * tokens * width    # two products over half of all pairs
    yield Work("attention", keep("attention", lambda: ops.attention(packed, heads, arena)), first("attention"),
               lambda: reference.attention(qkv, heads, None)[0], pairs, "GFLOP/s")
    saved = ops.attention(packed, heads, arena)[1]
    if device.kernels is not None:    # the host body overwrites what it saved, once
        yield Work("attention back", keep("dqkv", lambda: ops.attention_backward(pull, saved, arena)), first("dqkv"),
                   lambda: reference.attention_backward(x.reshape(batch, tokens, width),
                                                        reference.attention(qkv, heads, None)[1], None), 2.5 * pairs, "GFLOP/s")
    logits, targets = numbers(min(rows, 1024), vocab), rng.integers(vocab, size=min(rows, 1024))
    on_device, right = put(logits), put(targets)
    yield Work("cross_entropy_loss", keep("loss", lambda: ops.cross_entropy_loss(on_device, right, arena)),
               lambda: np.asarray(device.get(kept["loss"])), lambda: reference.cross_entropy_loss(logits, targets, None),
               logits.nbytes)
    flat = [np.abs(numbers(rows * width)) for _ in range(4)]
    p, grad, m, v = (put(a.copy()) for a in flat)
    scalars = {"scale": 1.0, "lr": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    yield Work("adamw", lambda: ops.adamw(p, grad, m, v, arena=arena, **scalars), lambda: p, lambda: flat[0], 7 * nbytes)
    yield Work("square_sum", keep("sum", lambda: ops.square_sum(grad, arena)), lambda: np.asarray(device.get(kept["sum"])),
               lambda: np.square(flat[1], dtype=np.float64).sum(), nbytes)
