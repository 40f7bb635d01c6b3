"""Time, rate and wrong elements of every operation of a training step, and its rate beside a peer's."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpitrain.ops import OPERATIONS, Ops
from mpitrain.ops.cuda import wire
from mpitrain.ops.cuda.launches import sum_rows
from mpitrain.ops.cuda.tiles import AttentionGain
from mpitrain.ops.device import Device, device_for, reference_ops
from mpitrain.ops.table import Operand, operands
from mpitrain.tools.bench.kernels.examples import examples
from mpitrain.tools.bench.turns import take_turns
from mpitrain.tools.text_table import TextColumn, TextTable

BUDGET = 0.25
"""Seconds for the timed runs of one row."""
MOMENT = 0.002
"""Least seconds of one turn."""
FEWEST, MOST = 5, 200
"""Lower and upper bound of the number of turns."""
WRONG = 1e-4
"""Largest error of a correct element, relative to the reference's largest element."""
SHAPES = {
    "cpu": (8, 128, 256, 4, 512),
    "cuda-sim": (2, 24, 32, 2, 40),
    "cuda": (16, 1024, 768, 12, 50304),
}
"""{kind of device: (sequences, tokens, channels, heads, vocabulary)}."""
MOVED = {"cpu": 1024, "cuda-sim": 48, "cuda": 1 << 16}
"""Rows for memory-bound operations. On a GPU they exceed all caches and hide launch costs."""


class OperationRow(NamedTuple):
    """One measurement.

    rate     10^9 bytes/s or, if `unit` is GFLOP/s, 10^9 floating-point operations/s
    percent  rate in percent of the copy's (GB/s) or of the first matrix product's (GFLOP/s)
    peer_us  microseconds of the peer, which runs in turns with us; nan without a peer
    """

    name: str
    time_us: float
    rate: float
    unit: str
    percent: float
    peer_us: float
    wrong: int


TABLE = TextTable(
    [
        TextColumn("operation", "<26", "name"),
        TextColumn("time us", "10.1f", "time_us"),
        TextColumn("rate", "10.2f", "rate"),
        TextColumn("", "<8", "unit"),
        TextColumn("percent", "8.1f", "percent"),
        TextColumn("peer us", "10.1f", "peer_us"),
        TextColumn("#wrong", "7", "wrong"),
    ]
)
"""A line for each `OperationRow`."""


class OperationCall(NamedTuple):
    """An operation on given arrays, with what is needed to check and rate it.

    run        runs the operation
    result     () -> array to check, as the last run left it
    truth      () -> the same array by the definition of the operation, on the host
    amount     bytes moved, or floating-point operations, in a run
    tolerance  of `count_wrong`
    peer       runs PyTorch's operation, or two of our operations in place of a fused one
    """

    name: str
    run: Callable[[], Any]
    result: Callable[[], Any]
    truth: Callable[[], Any]
    amount: float
    unit: str = "GB/s"
    tolerance: float = WRONG
    peer: Callable[[], Any] | None = None


AttentionPeer = Callable[[str, np.ndarray, np.ndarray, int, str], Any]
"""(kind of device, qkv, dy, heads, dtype) -> PyTorch's attention, with `forward` and `backward`."""


def count_wrong(result: np.ndarray, truth: np.ndarray, tolerance: float = WRONG) -> int:
    """Return the number of elements whose error exceeds `tolerance` times the largest element.

    NaN counts as wrong.
    """
    most = tolerance * max(np.abs(truth).max(initial=0), 1e-3)
    return int((~(np.abs(result - truth) <= most)).sum())


def seconds(device: Device, *runs: Callable[[], Any]) -> list[float]:
    """Return the median seconds of each function. The functions run in turns, after a warm-up.

    A turn starts as many runs as take MOMENT, and then waits for all of them, so that launches on a
    GPU overlap with kernels. There is one turn in the simulator, whose times do not predict a GPU.
    """
    for run in runs:
        run()
    device.backend.synchronize()
    once = [_turn(device, run, 1) for run in runs]
    counts = [max(1, int(MOMENT / spent)) for spent in once]
    turns = 1
    if device.kind != "cuda-sim":
        expected = sum(spent * count for spent, count in zip(once, counts, strict=True))
        turns = max(FEWEST, min(MOST, int(BUDGET / expected)))
    timed = zip(runs, counts, strict=True)
    sides = [lambda _, side=side: _turn(device, *side) for side in timed]
    spent = zip(take_turns(sides, turns), counts, strict=True)
    return [median(each) / count for each, count in spent]


def _turn(device: Device, run: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    device.backend.synchronize()
    return time.perf_counter() - start


class Calls:
    """Calls of operations with random arguments: on a device, and on the host by their definitions.

    device  the device whose operations are called
    sizes   {letter of a shape: size}, as in `mpitrain.ops.table`
    """

    def __init__(self, device: Device, **sizes: int):
        def draw(operand: Operand, shape: tuple[int, ...]) -> np.ndarray:
            rng = np.random.default_rng([*operand.name.encode()])
            if operand.below:
                return rng.integers(sizes[operand.below], size=shape)
            if operand.coded:
                return rng.integers(256, size=shape, dtype=np.uint8)
            numbers = rng.standard_normal(shape, np.float32)
            return np.abs(numbers) if operand.positive else numbers

        self._sizes, self._ops, self._put = sizes, device.ops, device.backend.from_host
        self._on_device = examples(
            self._ops, sizes, lambda *drawn: self._put(draw(*drawn)), device.arena()
        )
        self._reference = reference_ops()
        self._on_host = examples(self._reference, sizes, draw, None)

    def work(
        self,
        label: str,
        name: str,
        flops: float = 0.0,
        peer: Callable[[dict[str, Any]], Any] | None = None,
        **changed: Any,
    ) -> OperationCall:
        """Return a call of an operation. If the operation has several results, the first one is checked.

        label    name of the row
        flops    floating-point operations; 0: the row has GB/s, and the amount is the bytes it
                 moves
        peer     (arguments by name) -> None, runs the peer
        changed  numbers and host arrays that replace arguments, or add to them
        """
        row, latest = OPERATIONS[name], list[Any]()
        line = operands(row.operands)
        arrays = {key: value for key, value in changed.items() if hasattr(value, "nbytes")}
        placed = {key: self._put(array) for key, array in arrays.items()}
        arguments = self._on_device(name) | changed | placed
        nbytes = row.nbytes(**self._sizes) + sum(array.nbytes for array in arrays.values())

        def call(ops: Ops, arguments: dict[str, Any]) -> Any:
            result, output = getattr(ops, name)(**arguments), line.gives[0].name
            first = result[0] if len(line.results) > 1 else result
            return arguments.get(output, first)

        def run() -> None:
            latest[:] = [call(self._ops, arguments)]

        return OperationCall(
            label,
            run,
            lambda: latest[0],
            lambda: call(self._reference, self._on_host(name) | changed),
            flops or nbytes,
            "GFLOP/s" if row.products else "GB/s",
            peer=partial(peer, arguments) if peer else None,
        )


def measure(
    device: Device, peer: AttentionPeer | None = None, attends: bool = True
) -> Iterator[OperationRow]:
    """Yield rows as they are measured.

    The rate of the first row, a copy, is 100% for operations that are measured in GB/s; the rate of
    the first matrix product is 100% for those in GFLOP/s.

    attends  whether attention is measured
    """
    backend = device.backend
    x = backend.from_host(np.ones(MOVED[device.kind] * SHAPES[device.kind][2], np.float32))
    y = backend.from_host(np.empty(x.shape, np.float32))

    def copy() -> None:
        y[...] = x

    (ours,) = seconds(device, copy)
    rate = 2 * x.nbytes / ours / 1e9
    wrong = int((backend.to_host(y) != 1).sum())
    yield OperationRow("copy", 1e6 * ours, rate, "GB/s", 100.0, np.nan, wrong)
    yield from measured(device, works(device, peer, attends), {"GB/s": rate})


def measured(
    device: Device, each: Iterable[OperationCall], ceilings: dict[str, float] | None = None
) -> Iterator[OperationRow]:
    """Yield a row for each call.

    ceilings  {unit: rate that is 100%}; where a unit is missing, the first row with this unit is
              100%
    """
    backend, ceilings = device.backend, dict(ceilings or {})
    for work in each:
        work.run()
        result, truth = backend.to_host(work.result()), np.asarray(work.truth())
        wrong = count_wrong(result, truth, work.tolerance)
        ours, *theirs = seconds(device, work.run, *([work.peer] if work.peer else []))
        rate = work.amount / ours / 1e9
        ceiling = ceilings.setdefault(work.unit, rate)
        peer_us = 1e6 * theirs[0] if theirs else np.nan
        percent = 100 * rate / ceiling
        yield OperationRow(work.name, 1e6 * ours, rate, work.unit, percent, peer_us, wrong)


def works(
    device: Device, peer: AttentionPeer | None, attends: bool = True
) -> Iterator[OperationCall]:
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

        def apart(of: dict[str, Any]) -> None:
            dx, *_ = ops.linear_backward_input(of["dy"], of["w"], of["saved"], of["arena"])
            ops.gelu_backward(dx, z, of["arena"])

        yield calls.work("linear input x gelu'", "gelu_linear_backward_input", size, apart)
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
    yield logit_calls.work("cross_entropy", "cross_entropy", scale=1.0)
    yield calls.work("adamw", "adamw", lr=0.0, weight_decay=0.0)
    yield calls.work("gradient_facts", "gradient_facts")
    if device.kernels is not None:
        yield from reductions(device, *np.abs(numbers(2, many_rows * width)))


def attentions(
    device: Device, peer: AttentionPeer | None, dtypes: Sequence[str] = ()
) -> Iterator[OperationCall]:
    """Yield attention, forward and backward, in these dtypes: if there are none, in float32 and, with
    kernels, also in bfloat16.
    """
    ops, reference = device.ops, reference_ops()
    arena, backend = device.arena(), device.backend
    batch, tokens, width, heads, _ = SHAPES[device.kind]
    # The causal forward pass has two matrix products, each over half of all pairs of tokens.
    pairs = 2.0 * batch * tokens * tokens * width
    rng = np.random.default_rng(1)
    qkv, dy = (rng.standard_normal((batch, tokens, parts * width), np.float32) for parts in (3, 1))
    compared = slice(2)  # only two sequences are compared, because the reference is slow

    def attended(x: np.ndarray) -> tuple[np.ndarray, Any]:
        return reference.attention(x[..., :width], x[..., width:], heads, None)

    for dtype in dtypes or ("float32", "bfloat16")[: 1 + (device.kernels is not None)]:
        packed, pull = (backend.from_host(array.astype(dtype)) for array in (qkv, dy))
        theirs = peer(device.kind, qkv, dy, heads, dtype) if peer else None
        kept: dict[str, Any] = {}

        def forward(packed=packed, kept=kept) -> None:
            q, kv = packed[..., :width], packed[..., width:]
            kept["y"], kept["saved"] = ops.attention(q, kv, heads, arena)

        def backward(pull=pull, kept=kept) -> None:
            dqkv = kept["dqkv"] = arena.take((batch, tokens, 3 * width), pull.dtype)
            dq, dkv = dqkv[..., :width], dqkv[..., width:]
            ops.attention_backward(pull, kept["saved"], dq, dkv, arena)

        x, pulled = (array[compared].astype(dtype).astype(np.float32) for array in (qkv, dy))

        def got(name: str, kept=kept) -> np.ndarray:
            return backend.to_host(kept[name][compared]).astype(np.float32)

        def true_y(x=x) -> np.ndarray:
            return attended(x)[0]

        def true_dqkv(x=x, dy=pulled) -> np.ndarray:
            found = np.empty_like(x)
            dq, dkv = found[..., :width], found[..., width:]
            reference.attention_backward(dy, attended(x)[1], dq, dkv, None)
            return found

        label, result = f"attention {dtype}", partial(got, "y")
        law = "GFLOP/s", {"float32": WRONG, "bfloat16": 2e-2}[dtype]
        yield OperationCall(label, forward, result, true_y, pairs, *law, theirs and theirs.forward)
        if device.kernels is not None:  # the host backend overwrites its saved arrays in backward
            label, result = f"attention back {dtype}", partial(got, "dqkv")
            other = theirs and theirs.backward
            yield OperationCall(label, backward, result, true_dqkv, 2.5 * pairs, *law, other)


def attention_gain(device: Device) -> AttentionGain:
    """Measure attention in float32 on CUDA cores and by 3xTF32, in turns, forward and backward together."""
    _, tokens, width, heads, _ = SHAPES[device.kind]

    def both(gemm: str) -> Callable[[], None]:
        forward, backward = attentions(device_for(device.kind, gemm), None, ["float32"])

        def run() -> None:
            forward.run()
            backward.run()

        return run

    by_cuda_cores, by_tensor_cores = seconds(device, both("tiled"), both("3xtf32"))
    return AttentionGain(width // heads, tokens, by_cuda_cores / by_tensor_cores)


def reductions(device: Device, a: np.ndarray, b: np.ndarray) -> Iterator[OperationCall]:
    """Yield column sums, and the kernels of all-reduces: sums of chunks, 16-bit and 8-bit codecs."""
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
