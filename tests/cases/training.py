"""Losses, optimizer steps, totals, casts, and what an all-reduce does to its chunks."""

from ast import literal_eval
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from mpitrain.data import IGNORED
from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from mpitrain.ops import OPERATIONS, codes
from mpitrain.ops.cuda import steps as launched
from mpitrain.ops.cuda.launches import sum_all, total
from mpitrain.ops.cuda.wire import (
    add_into,
    convert,
    decode_fp16,
    decode_int8,
    encode_fp16,
    encode_int8,
    maximum_into,
    top_k,
)
from mpitrain.ops.device import cuda_ops, reference_ops
from mpitrain.ops.table import operands
from mpitrain.optim.optimizer import GroupRun, launches
from tests.cases.numbers import assert_close, numbers, stored, values

reference = reference_ops()

COUNTS = (0, 1, 7, 8, 9, 1023, 1025, 4099)


def check_cross_entropy(
    kernels: Kernels, m: int, v: int, dtype: str = "float32", index: str = "int64", room: int = 0
) -> None:
    """Loss, gradient over the logits, and the count of right rows; with `room` elements between the rows."""
    ops, logits = cuda_ops(kernels), stored(3 * numbers(1, m, v + room), dtype)[:, :v]
    targets = np.random.default_rng(0).integers(v, size=m).astype(index)
    targets[2::3] = IGNORED
    truth, right = values(logits), (values(logits).argmax(1) == targets).sum()
    assert int(ops.count_correct(logits, targets, Arena())) == right
    assert_close(
        ops.cross_entropy_loss(logits, targets, Arena()),
        reference.cross_entropy_loss(truth, targets, None),
        dtype,
    )
    for smoothing in (0.3, 0.0):
        mine = logits if smoothing == 0 else stored(3 * numbers(1, m, v + room), dtype)[:, :v]
        loss, dlogits = ops.cross_entropy(mine, targets, 0.125, Arena(), smoothing)
        assert dlogits is mine
        true_loss, true_dlogits = reference.cross_entropy(
            truth.copy(), targets, 0.125, None, smoothing
        )
        assert_close(loss, true_loss, dtype)
        assert_close(dlogits, true_dlogits, dtype)


def check_losses_of_numbers(kernels: Kernels, count: int, dtype: str) -> None:
    """Targets are float32 beside predictions of 16 bits; those that are NaN do not count."""
    ops, wide = cuda_ops(kernels), "float64" if dtype == "float64" else "float32"
    for name in ("squared_error", "absolute_error", "binary_cross_entropy"):
        predictions = stored(3 * numbers(1, count), dtype)
        targets = np.random.default_rng(0).random(count).astype(wide)
        targets[1::5], targets[2::5] = np.nan, values(predictions)[2::5]
        truth = getattr(reference, name)(values(predictions), np.float64(targets), 0.125, None)
        loss, gradient = getattr(ops, name)(predictions, targets, 0.125, Arena())
        assert gradient is predictions
        assert_close(loss, truth[0], wide)
        assert_close(gradient, truth[1], dtype)


def check_huge_logits(kernels: Kernels) -> None:
    """Nothing overflows, and a row of equal maxima counts its first as the largest."""
    ops = cuda_ops(kernels)
    logits = np.array([[1e4, -1e4, 0], [-1e38, 0, 1e38]], np.float32)
    loss, dlogits = ops.cross_entropy(logits, np.array([0, 2]), 1.0, Arena())
    assert loss == 0
    np.testing.assert_array_equal(dlogits, 0)
    ties = np.zeros((3, 300), np.float32)
    ties[1, 280:] = 1
    ties[2, 290] = np.nan
    assert int(ops.count_correct(ties, np.array([0, 280, 290]), Arena())) == 3
    assert int(ops.count_correct(ties, np.array([1, 281, 0]), Arena())) == 0
    assert int(ops.count_correct(np.full((1, 5), -1, np.float32), np.array([0]), Arena())) == 1


def check_stray_target(kernels: Kernels) -> None:
    """A target outside the vocabulary makes the loss NaN instead of reading another row."""
    ops, logits = cuda_ops(kernels), np.zeros((2, 4), np.float32)
    for stray in (-1, 4):
        assert np.isnan(ops.cross_entropy_loss(logits, np.array([0, stray]), Arena()))
        loss, dlogits = ops.cross_entropy(logits.copy(), np.array([0, stray]), 1.0, Arena())
        assert np.isnan(loss)
        assert_close(dlogits, [[-0.75, 0.25, 0.25, 0.25], [0.25] * 4])


def check_ignored_rows(kernels: Kernels) -> None:
    """A row that does not count has loss and gradient 0, even if its logits are not finite."""
    ops, targets = cuda_ops(kernels), np.array([IGNORED, 1, IGNORED])
    logits = np.array([[1, 2], [0, 0], [np.nan, np.inf]], np.float32)
    assert_close(ops.cross_entropy_loss(logits, targets, Arena()), np.log(2), "float32")
    assert int(ops.count_correct(logits, targets, Arena())) == 0
    loss, dlogits = ops.cross_entropy(logits, targets, 1.0, Arena())
    assert_close(loss, np.log(2), "float32")
    np.testing.assert_array_equal(dlogits, [[0, 0], [0.5, -0.5], [0, 0]])


def check_split_vocabulary(
    kernels: Kernels,
    m: int,
    v: int,
    ranks: int,
    dtype: str = "float32",
    room: int = 0,
    smoothing: float = 0.0,
) -> None:
    """The vocabulary cut into ranks: the four steps, with the sums over ranks done here, equal the whole."""
    ops, x = cuda_ops(kernels), 3 * numbers(1, m, v)
    x -= np.where(np.arange(m)[:, None] % 2, x.max(1, keepdims=True), 9)  # maxima of 0, and below
    logits = stored(x, dtype)
    targets, cuts = (
        np.random.default_rng(0).integers(v, size=m),
        [v * rank // ranks for rank in range(ranks + 1)],
    )
    near = [entry for cut in cuts if 0 < cut < v for entry in (cut - 1, cut)][:m]
    targets[: len(near)] = near  # on both sides of the first column of a rank
    targets[3::3] = IGNORED
    spread = {"smoothing": smoothing, "share": smoothing / v}
    true_loss, truth = reference.cross_entropy(values(logits), targets, 0.125, None, smoothing)
    parts = [np.pad(logits[:, a:b], ((0, 0), (0, room)))[:, : b - a] for a, b in pairwise(cuts)]
    maximum = np.max([ops.row_maximum(part, Arena()) for part in parts], axis=0)
    np.testing.assert_array_equal(maximum, values(logits).max(1))
    places = np.max(
        [
            ops.row_argmax(part, first, maximum, Arena())
            for part, first in zip(parts, cuts, strict=False)
        ],
        axis=0,
    )
    np.testing.assert_array_equal(-places, values(logits).argmax(1))
    assert (
        int(ops.count_correct_split(places, targets, Arena()))
        == (values(logits).argmax(1) == targets).sum()
    )
    facts = np.sum(
        [
            ops.row_exponentials(part, targets, first, maximum, Arena(), **spread)
            for part, first in zip(parts, cuts, strict=False)
        ],
        axis=0,
    )
    losses = [
        ops.cross_entropy_split(part, targets, first, maximum, facts, 0.125, Arena(), **spread)
        for part, first in zip(parts, cuts, strict=False)
    ]
    for loss, _ in losses:
        assert_close(loss, true_loss, dtype)
    assert_close(np.concatenate([dlogits for _, dlogits in losses], 1), truth, dtype)


STEPS = [
    name
    for name, row in OPERATIONS.items()
    if row.rounds == "mirror"
    and {one.shape for one in operands(row.operands).takes} == {"L", None}
    and "%" not in row.operands
]


def step_of(
    name: str, count: int, dtype: str, shifted: bool = False
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Buffers of positive numbers, and the numbers of the example in the step's row."""
    takes = operands(OPERATIONS[name].operands).takes
    buffers = [
        stored(np.abs(numbers(seed, count)) + 0.5, dtype, shifted)
        for seed in range(sum(one.shape is not None for one in takes))
    ]
    return buffers, {one.name: literal_eval(one.number) for one in takes if one.number}


def check_step(kernels: Kernels, name: str, count: int, dtype: str, shifted: bool) -> None:
    """One optimizer step against the reference; the first step too, if it depends on their count."""
    mine, scalars = step_of(name, count, dtype, shifted)
    for first in ({}, {"step": 1} if "step" in scalars else {}):
        truth = [values(buffer) for buffer in mine]
        getattr(reference, name)(*truth, arena=None, **(scalars | first))
        getattr(cuda_ops(kernels), name)(*mine, arena=Arena(), **(scalars | first))
        for a, b in zip(mine, truth, strict=True):
            assert_close(a, b, dtype, name)


def check_mirrored_step(
    kernels: Kernels, name: str, count: int, mirror: str, shifted: bool
) -> None:
    """The same step, twice, with a mirror: the same as without one, and parameters rounded to nearest even."""
    ops = cuda_ops(kernels)
    mine, scalars = step_of(name, count, "float32", shifted)
    alone, rounded = [array.copy() for array in mine], stored(np.zeros(count), mirror, shifted)
    for scale in (0.7, 0.3):  # numbers in device memory are written anew
        numbers_of = scalars | {"scale" if "scale" in scalars else "lr": scale, "arena": Arena()}
        getattr(ops, name)(*alone, **numbers_of)
        getattr(ops, name)(*mine, mirror=rounded, **numbers_of)
    for one, other in zip(mine, alone, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(rounded, mine[0].astype(rounded.dtype))


RATES = (1.0, 0.3), (0.5, 0.0), (1.0, 0.0)
RUNS = {
    "one": [(0, 37)],
    "two": [(32, 64), (64, 71)],
    "padded": [(0, 1), (32, 63), (64, 96), (128, 2080), (2080, 2081)],
    "many": [(32 * n, 32 * n + 1 + n % 32) for n in range(77)],
}
"""Runs of a flat buffer by name; elements between two of them are padding."""


def check_runs(
    kernels: Kernels, name: str, bounds: str, dtype: str = "float32", mirror: str | None = None
) -> None:
    """Runs of several parameter groups: one launch, with the bits of a launch for each run."""
    runs = [GroupRun(*run, *RATES[n % 3]) for n, run in enumerate(RUNS[bounds])]
    ops, count = cuda_ops(kernels), runs[-1].stop + 5
    mine, scalars = step_of(name, count, dtype)
    alone, lr = [array.copy() for array in mine], scalars.pop("lr")
    scalars = {**scalars, "arena": Arena()}
    del scalars["weight_decay"]
    rounded = [stored(np.zeros(count), mirror or dtype) for _ in range(2)]
    (whole,) = launches(getattr(ops, name), runs)
    everything = slice(whole.start, whole.stop)
    for rate in (lr, lr / 3):  # numbers in device memory are written anew
        before = kernels.launches
        getattr(ops, name)(
            *(array[everything] for array in mine),
            lr=rate * whole.lr,
            weight_decay=whole.weight_decay,
            **scalars,
            mirror=rounded[0][everything] if mirror else None,
        )
        assert kernels.launches == before + 1
        for run in runs:
            here = slice(run.start, run.stop)
            own = {"lr": rate * run.lr, "weight_decay": run.weight_decay} | scalars
            if mirror:
                own["mirror"] = rounded[1][here]
            getattr(ops, name)(*(array[here] for array in alone), **own)
    outside = [slice(0, runs[0].start), slice(runs[-1].stop, None)]
    for here in [*(slice(run.start, run.stop) for run in runs), *outside]:
        for one, other in zip([*mine, rounded[0]], [*alone, rounded[1]], strict=True):
            np.testing.assert_array_equal(one[here], other[here])


def check_signs(kernels: Kernels) -> None:
    """Lion steps against either sign of its mixed momentum; where that is 0, the decay alone."""
    p, g, m = (stored(numbers(seed, 300), "float32") for seed in range(3))
    g[::7] = m[::7] = 0
    truth = [values(array) for array in (p, g, m)]
    reference.lion(*truth, 0.7, 0.1, 0.9, 0.99, 0.3, None)
    cuda_ops(kernels).lion(p, g, m, 0.7, 0.1, 0.9, 0.99, 0.3, Arena())
    for one, other in zip((p, g, m), truth, strict=True):
        assert_close(one, other, "float32")


def check_coded_step(
    kernels: Kernels,
    count: int,
    lead: int,
    dtype: str = "float32",
    mirror: str | None = None,
    shifted: bool = False,
) -> None:
    """A step with moments in codes, twice: parameters as the definition, codes within one of it."""
    p, g = (stored(numbers(seed, count), dtype, shifted) for seed in range(2))
    g[100:500] *= 1e-6  # codes of all decades
    rounded = None if mirror is None else stored(np.zeros(count), mirror, shifted)
    length = codes.block_count(count, lead)
    moments = [np.zeros(count, np.uint8) for _ in range(2)]
    moments[0][:] = np.flatnonzero(codes.SIGNED.values == 0)[0]
    state = [*moments, *(np.zeros(length, dtype) for _ in range(2))]
    every = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "lead": lead}
    for step in (1, 2):
        before = [array.copy() for array in state]
        truth = values(p), values(g)
        reference.adamw8bit(*truth, *before, scale=0.7, step=step, arena=None, **every)
        cuda_ops(kernels).adamw8bit(
            p, g, *state, scale=0.7, step=step, arena=Arena(), mirror=rounded, **every
        )
        assert_close(p, truth[0], dtype)
        for mine, wanted in zip(state[:2], before[:2], strict=True):
            off = np.abs(mine.astype(int) - wanted)
            assert off.max(initial=0) <= 1 and off.sum() <= count / 50
        for mine, wanted in zip(state[2:], before[2:], strict=True):
            assert_close(mine, wanted, "float32")
        g *= -1  # the next moments are smaller than a missing element's
    if rounded is not None:
        np.testing.assert_array_equal(rounded, p.astype(rounded.dtype))


def check_totals(kernels: Kernels, count: int, dtype: str) -> None:
    """Sum, sum of squares and number of elements that are not finite."""
    ops, x = cuda_ops(kernels), stored(numbers(1, count), dtype, shifted=count % 2 == 1)
    kind = "float64" if dtype == "float64" else "float32"
    assert_close(sum_all(kernels, x, Arena()), values(x).sum(), kind)
    rows = stored(
        np.stack([values(x), 2 * values(x)]), "float64"
    )  # longer than one block goes over at once
    assert_close(total(kernels, rows, Arena()), rows.sum(1), "float64")
    squares, nonfinite = ops.gradient_facts(x, Arena())
    assert_close(squares, (values(x) ** 2).sum(), kind)
    assert nonfinite == 0
    if count > 2:
        x[[0, count // 2, count - 1]] = np.nan, np.inf, -np.inf
        squares, nonfinite = ops.gradient_facts(x, Arena())
        assert not np.isfinite(squares) and nonfinite == 3


def check_large_squares(kernels: Kernels) -> None:
    """Squares that float32 has, beyond it and below: an error below 1e-6, and none of ones."""
    facts = cuda_ops(kernels).gradient_facts
    assert facts(np.ones(100_003, np.float32), Arena())[0] == 100_003
    for size in (1e30, 1e24, 1e18, 1.0, 1e-12, 1e-22, 1e-25):
        x = (size * numbers(1, 10_001)).astype(np.float32)
        x[::7] *= np.float32(1e-12)
        assert abs(facts(x, Arena())[0] / (values(x) ** 2).sum() - 1) <= 1e-6, size


def check_conversion(kernels: Kernels, count: int, source: str, target: str) -> None:
    """A cast rounds to nearest even."""
    x, y = (
        stored(100 * numbers(1, count), source, shifted=count % 2 == 1),
        stored(np.zeros(count), target),
    )
    convert(kernels, x, y)
    np.testing.assert_array_equal(y, stored(values(x), target))


def check_combination(kernels: Kernels, count: int, wire: str, here: str = "float32") -> None:
    """Received chunks, decoded, are added to or replace the smaller of what is here: in float32, rounded once."""
    x = stored(numbers(1, count), wire, shifted=count % 2 == 1)
    for combine, truth in ((add_into, np.add), (maximum_into, np.maximum)):
        y = stored(numbers(2, count), here)
        expected = truth(*(values(array).astype(np.float32) for array in (y, x))).astype(y.dtype)
        combine(kernels, y, x)
        np.testing.assert_array_equal(y, expected)


def check_maximum_keeps_nan(kernels: Kernels) -> None:
    """A NaN on either side is in the result."""
    x, y = np.float32([np.nan, 1, 2]), np.float32([0, np.nan, 5])
    maximum_into(kernels, y, x)
    np.testing.assert_array_equal(y, [np.nan, np.nan, 5])


def check_int8(kernels: Kernels, count: int, shifted: bool = False) -> None:
    """Encoding loses at most half a step of each block's scale; decoding can add."""
    x = stored(numbers(1, count), "float32", shifted)
    x[: count // 3] = 0
    q, scales = np.empty(count, np.int8), np.empty(-(-count // 256), np.float32)
    encode_int8(kernels, x, q, scales)
    y, sums = np.empty_like(x), np.ones_like(x)
    decode_int8(kernels, q, scales, y, accumulate=False)
    decode_int8(kernels, q, scales, sums, accumulate=True)
    of_element = np.repeat(scales, 256)[:count]
    assert (np.abs(x - y) <= 0.5001 * of_element).all()
    np.testing.assert_allclose(
        scales, [np.abs(x[i : i + 256]).max() / 127 for i in range(0, count, 256)], rtol=1e-6
    )
    assert_close(sums, 1 + values(y))


def check_fp16(kernels: Kernels, count: int, size: float, shifted: bool = False) -> None:
    """Elements of any size keep 11 binary digits in a block whose largest is below 2^28 times as large; decoding can add."""
    x = stored(numbers(1, count) * size, "float32", shifted)
    x[: count // 3] = 0
    q, scales = np.empty(count, np.float16), np.empty(-(-count // 256), np.float32)
    encode_fp16(kernels, x, q, scales)
    y, sums = np.empty_like(x), np.ones_like(x)
    decode_fp16(kernels, q, scales, y, accumulate=False)
    decode_fp16(kernels, q, scales, sums, accumulate=True)
    truth = values(x)
    np.testing.assert_array_equal(
        q, (truth / np.repeat(values(scales), 256)[:count]).astype(np.float16)
    )
    assert (np.frexp(scales)[0] == 0.5).all() and (
        np.abs(values(y) - truth) <= 2**-11 * np.abs(truth)
    ).all()
    np.testing.assert_array_equal(sums, 1 + y)


def check_fp16_takes_the_largest_numbers(kernels: Kernels) -> None:
    """Where rounding up would end in infinity, the largest number of 11 binary digits is what remains."""
    x = np.float32([3.4028235e38, -3.4028235e38, 3.4011621e38, 1, 0, -1e-45])
    q, scales, y = np.empty(6, np.float16), np.empty(1, np.float32), np.empty(6, np.float32)
    encode_fp16(kernels, x, q, scales)
    decode_fp16(kernels, q, scales, y, accumulate=False)
    np.testing.assert_array_equal(
        y, np.float32([3.4011621e38, -3.4011621e38, 3.4011621e38, 0, 0, 0])
    )


def check_what_is_not_finite_is_marked(
    kernels: Kernels, bad: float, encode: Callable, decode: Callable, number: type
) -> None:
    """A block with an infinity or a NaN decodes to NaN; its neighbours do not."""
    x = np.ones(600, np.float32)
    x[300] = bad
    q, scales = np.empty(600, number), np.empty(3, np.float32)
    encode(kernels, x, q, scales)
    y = np.empty_like(x)
    decode(kernels, q, scales, y, accumulate=False)
    assert np.isnan(y[256:512]).all() and np.isfinite(y[:256]).all() and np.isfinite(y[512:]).all()


def check_top_k(kernels: Kernels, count: int, k: int, x: np.ndarray | None = None) -> None:
    """The k largest magnitudes, the first of equals, in ascending order of indices; of an odd count without alignment."""
    x = stored(numbers(1, count), "float32", shifted=count % 2 == 1) if x is None else x
    order = np.lexsort((np.arange(count), -np.abs(x)))
    expected = np.sort(order[:k])
    indices, chosen = top_k(kernels, x, k, Arena())
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(chosen, x[expected])


def losses() -> Iterator[Callable]:
    """cross_entropy."""
    for m, v in ((1, 1), (1, 5), (0, 3), (7, 31), (4, 255), (3, 256), (2, 257), (3, 1031)):
        yield partial(check_cross_entropy, m=m, v=v)
    yield partial(check_cross_entropy, m=5, v=40, dtype="float64", index="int32")
    for dtype, v, room in (
        ("float32", 50, 14),
        ("float32", 4100, 60),
        ("float32", 3584, 0),  # a thread of the loop with several loads begins at the end
        ("float16", 40, 0),
        ("float16", 29, 35),
        ("float16", 29, 4),
        ("bfloat16", 71, 57),
    ):
        yield partial(check_cross_entropy, m=2, v=v, dtype=dtype, room=room)
    for v in (41_700, 42_000):  # on both sides of what shared memory holds of a row
        yield partial(check_cross_entropy, m=1, v=v)
    for m, v, ranks in ((1, 1, 1), (7, 31, 2), (3, 600, 3), (2, 2, 4)):
        yield partial(check_split_vocabulary, m=m, v=v, ranks=ranks)
    yield partial(check_split_vocabulary, m=5, v=40, ranks=2, dtype="float64")
    yield partial(check_split_vocabulary, m=5, v=58, ranks=2, room=3)
    yield partial(check_split_vocabulary, m=5, v=58, ranks=2, dtype="float16", room=35)
    yield partial(check_split_vocabulary, m=5, v=58, ranks=3, smoothing=0.2)
    for count, dtype in ((1, "float32"), (0, "float32"), (777, "float64"), (300, "bfloat16")):
        yield partial(check_losses_of_numbers, count=count, dtype=dtype)
    yield from (check_huge_logits, check_stray_target, check_ignored_rows)


def steps() -> Iterator[Callable]:
    """steps."""
    for name in STEPS:
        for count in COUNTS:
            dtype = "float64" if count == 1023 else "float32"
            yield partial(check_step, name=name, count=count, dtype=dtype, shifted=count == 1025)
        for count, mirror in ((1023, "float16"), (1025, "bfloat16")):
            shifted = mirror == "bfloat16"
            yield partial(
                check_mirrored_step, name=name, count=count, mirror=mirror, shifted=shifted
            )
    for name in sorted(name for name in STEPS if hasattr(getattr(launched, name), "takes_runs")):
        for bounds in RUNS:
            yield partial(check_runs, name=name, bounds=bounds)
        yield partial(check_runs, name=name, bounds="padded", dtype="float64")
        yield partial(check_runs, name=name, bounds="padded", mirror="bfloat16")
    yield check_signs


def coded_steps() -> Iterator[Callable]:
    """steps_8bit."""
    for count, lead in (
        (0, 0),
        (0, 32),
        (1, 0),
        (32, 96),
        (255, 0),
        (257, 32),
        (1031, 224),
        (2304, 0),
    ):
        yield partial(check_coded_step, count=count, lead=lead)
    yield partial(check_coded_step, count=4100, lead=64, dtype="float64")
    yield partial(check_coded_step, count=1031, lead=128, shifted=True)
    for mirror in ("float16", "bfloat16"):
        yield partial(check_coded_step, count=1031, lead=160, mirror=mirror)


def totals() -> Iterator[Callable]:
    """totals."""
    for count in COUNTS:
        yield partial(check_totals, count=count, dtype="float32")
    for dtype in ("float64", "float16", "bfloat16"):
        for count in (1031, 2056):
            yield partial(check_totals, count=count, dtype=dtype)
    yield check_large_squares


def conversions() -> Iterator[Callable]:
    """convert."""
    for source, target in (
        ("float32", "float16"),
        ("float16", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float64", "float32"),
    ):
        for count in COUNTS:
            yield partial(check_conversion, count=count, source=source, target=target)


def wires() -> Iterator[Callable]:
    """wire."""
    for wire in ("float32", "float16", "bfloat16"):
        for count in COUNTS:
            yield partial(check_combination, count=count, wire=wire)
    yield partial(check_combination, count=1031, wire="bfloat16", here="bfloat16")
    for count in (0, 1, 255, 256, 257, 2049, 2305):
        yield partial(check_int8, count=count)
        yield partial(check_fp16, count=count, size=1e-6)
    yield partial(check_int8, count=600, shifted=True)
    yield partial(check_fp16, count=600, size=1, shifted=True)
    for size in (1e-44, 1e-38, 1e-33, 1e5, 5e37):
        yield partial(check_fp16, count=300, size=size)
    for bad in (np.nan, np.inf, -np.inf):
        yield partial(
            check_what_is_not_finite_is_marked,
            bad=bad,
            encode=encode_int8,
            decode=decode_int8,
            number=np.int8,
        )
        yield partial(
            check_what_is_not_finite_is_marked,
            bad=bad,
            encode=encode_fp16,
            decode=decode_fp16,
            number=np.float16,
        )
    yield from (check_maximum_keeps_nan, check_fp16_takes_the_largest_numbers)


def selections() -> Iterator[Callable]:
    """top_k."""
    for count, k in (
        (0, 0),
        (1, 1),
        (5, 0),
        (5, 5),
        (255, 3),
        (256, 256),
        (257, 100),
        (1031, 10),
        (3001, 2999),
        (4096, 7),
        (4097, 100),
        (9001, 5000),
    ):  # a block of threads takes 4096
        yield partial(check_top_k, count=count, k=k)
    yield partial(
        check_top_k, count=1000, k=300, x=np.repeat(np.float32([1, -1, 2, 0]), 250)
    )  # ties at the threshold
    for count in (700, 9001):
        for k in (count // 2, count):
            yield partial(check_top_k, count=count, k=k, x=np.zeros(count, np.float32))
