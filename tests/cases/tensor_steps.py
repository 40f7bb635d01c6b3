"""Tensor-wise steps: sums over rows and columns, LAMB, Adafactor, and the iteration of Muon."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from mpitrain.ops.device import cuda_ops, reference_ops
from tests.cases.numbers import assert_close, numbers, stored, values
from tests.cases.training import COUNTS

reference = reference_ops()
SHAPES = ((0, 3), (1, 1), (1, 300), (7, 33), (8, 31), (9, 32), (65, 5), (129, 257), (300, 2))
LAMB = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def positive(seed: int, *shape: int) -> np.ndarray:
    """Numbers from 0.5 on."""
    return np.abs(numbers(seed, *shape)) + 0.5


def check_squares(kernels: Kernels, count: int, dtype: str) -> None:
    """Squares are added to a sum in double, with an error below 1e-6; large ones do not overflow."""
    x, sums = stored(numbers(1, count), dtype, count % 2 == 1), np.full(1, 2.0)
    cuda_ops(kernels).add_squares(x, sums, Arena())
    most = 1e-12 if dtype == "float64" else 1e-6
    assert abs(sums[0] / (2 + (values(x) ** 2).sum()) - 1) <= most


def check_lamb(kernels: Kernels, count: int, dtype: str, mirror: str | None) -> None:
    """Moments, both sums, and a step by sums of a tensor that has more elements."""
    ops, shifted = cuda_ops(kernels), count % 2 == 1
    p, g, m, v = (
        stored(array, dtype, shifted)
        for array in (numbers(1, count), numbers(2, count), numbers(3, count), positive(4, count))
    )
    sums, truth = np.full(2, 2.0), [values(array) for array in (p, g, m, v, np.full(2, 2.0))]
    rounded = None if mirror is None else stored(np.zeros(count), mirror, shifted)
    for step, scale in ((1, 0.7), (3, 0.3)):
        reference.lamb_moments(*truth, scale=scale, step=step, arena=None, **LAMB)
        ops.lamb_moments(p, g, m, v, sums, scale=scale, step=step, arena=Arena(), **LAMB)
        for mine, true in zip((p, g, m, v, sums), truth, strict=True):
            assert_close(mine, true, dtype)
        reference.lamb(truth[0], *truth[2:], lr=0.1, step=step, arena=None, **LAMB)
        ops.lamb(p, m, v, sums, lr=0.1, step=step, arena=Arena(), mirror=rounded, **LAMB)
        assert_close(p, truth[0], dtype)
        if rounded is not None:
            np.testing.assert_array_equal(rounded, p.astype(rounded.dtype))


def check_trust(kernels: Kernels) -> None:
    """Where a norm is 0 the ratio is 1."""
    for squares in ([0.0, 4.0], [4.0, 0.0]):
        p, m, v = (np.ones(5, np.float32) for _ in range(3))
        cuda_ops(kernels).lamb(
            p, m, v, np.array(squares), 0.1, 0.0, 0.0, 0.0, 0.0, 1, arena=Arena()
        )
        assert_close(p, np.full(5, 0.9))


def check_adafactor(
    kernels: Kernels, shape: tuple[int, int], dtype: str, mirror: str | None, is_vector: bool
) -> None:
    """A step of a block of a larger tensor, whose rows and columns lie apart."""
    ops, (rows, columns), eps = cuda_ops(kernels), shape, 1e-3
    sums = [2 * rows + 1, columns + 3]
    places = np.random.default_rng(1).permutation(sums[0])[:rows]
    mine = None if is_vector else places, np.random.default_rng(2).permutation(sums[1])[:columns]
    p, g = (stored(numbers(seed, *shape), dtype, columns % 2 == 1) for seed in (1, 2))
    state = [None if is_vector else stored(positive(3, sums[0]), dtype)]
    state.append(stored(positive(4, sums[1]), dtype))
    facts = [None if is_vector else np.zeros(sums[0]), np.zeros(sums[1])]
    squares = np.full(1, 2.0)
    copies = [None if one is None else values(one) for one in (p, g, *state, *facts, squares)]
    true_p, true_g, *true_state, true_row, true_column, true_squares = copies
    rounded = None if mirror is None else stored(np.zeros(shape), mirror)
    for one, weight in ((ops, 0.3), (reference, 0.3)):
        is_mine = one is ops
        own_p, own_g = (p, g) if is_mine else (true_p, true_g)
        own, found = (state, facts) if is_mine else (true_state, [true_row, true_column])
        total, arena = (squares if is_mine else true_squares), Arena()
        one.adafactor_squares(own_g, *mine, *found, 0.7, arena)
        one.adafactor_variances(*own, *found, weight, eps, arena)
        one.adafactor_update(own_g, *mine, *found, total, 0.7, eps, arena)
        one.adafactor(
            own_p,
            own_g,
            *mine,
            *found,
            np.full(1, 40.0),
            total,
            max(1, rows * columns),
            0.7,
            0.1,
            0.05,
            eps,
            0.1,
            arena,
            mirror=rounded if is_mine else None,
        )
    pairs = [(p, true_p), *zip(state, true_state, strict=True), (squares, true_squares)]
    pairs += zip(facts, (true_row, true_column), strict=True)
    for found_array, truth in pairs:
        if found_array is not None:
            assert_close(found_array, truth, dtype)
    if rounded is not None:
        np.testing.assert_array_equal(rounded, p.astype(rounded.dtype))


def check_small_gradients(kernels: Kernels) -> None:
    """Variances and their mean have lower bounds."""
    ops, arena = cuda_ops(kernels), Arena()
    row, column = np.zeros(2, np.float32), np.zeros(3, np.float32)
    facts, rows, columns = (np.full(2, 3e-3), np.full(3, 2e-3)), np.arange(2), np.arange(3)
    ops.adafactor_variances(row, column, *facts, 1.0, 1e-2, arena)
    assert_close(row, np.full(2, 1e-3))
    assert_close(facts[0], np.full(2, 0.1))
    squares = np.zeros(1)
    ops.adafactor_update(
        np.ones((2, 3), np.float32), rows, columns, *facts, squares, 1.0, 1e-1, arena
    )
    assert_close(squares, [6 / 0.1**2])


def check_newton_schulz(kernels: Kernels, shape: tuple[int, int], steps: int) -> None:
    """Wide, square and tall matrices, an odd and an even number of steps, and zeros."""
    truth = numbers(1, *shape)
    mine = truth.copy()
    reference.newton_schulz(truth, steps, None)
    cuda_ops(kernels).newton_schulz(mine, steps, Arena())
    assert_close(mine, truth, "float64", size=1e3)
    zeros = np.zeros(shape)
    cuda_ops(kernels).newton_schulz(zeros, steps, Arena())
    np.testing.assert_array_equal(zeros, 0)


def tensor_steps() -> Iterator[Callable]:
    """tensor_steps."""
    for count in (*COUNTS, 600_000):
        yield partial(check_squares, count=count, dtype="float32")
    yield partial(check_squares, count=1023, dtype="float64")
    for count in COUNTS:
        dtype = "float64" if count == 1023 else "float32"
        yield partial(check_lamb, count=count, dtype=dtype, mirror=None)
    for mirror in ("float16", "bfloat16"):
        yield partial(check_lamb, count=1025, dtype="float32", mirror=mirror)
    yield check_trust
    for shape in SHAPES:
        dtype = "float64" if shape == (9, 32) else "float32"
        mirror = "bfloat16" if shape == (7, 33) else None
        for is_vector in (False, True) if shape[0] == 1 else (False,):
            yield partial(
                check_adafactor, shape=shape, dtype=dtype, mirror=mirror, is_vector=is_vector
            )
    yield check_small_gradients
    for shape, steps in (((5, 5), 1), ((3, 17), 2), ((33, 7), 3), ((1, 9), 5)):
        yield partial(check_newton_schulz, shape=shape, steps=steps)
