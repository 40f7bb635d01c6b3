"""Arrays out of line one at a time: a kernel that moves 16 bytes at once asks each of them whether it can."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda.launches import sum_rows
from mpitrain.ops.device import cuda_ops, reference_ops
from tests.cases.numbers import assert_close, numbers, stored, values

reference = reference_ops()


class Askew(Arena):
    """An arena whose buffers begin one element off any alignment."""

    def take(self, shape, dtype):
        return stored(np.zeros(shape), dtype, shifted=True)


def one_askew(which: int, *shapes: tuple[int, ...]) -> tuple[Arena, list[np.ndarray]]:
    """An arena and arrays of these shapes, of which one alone is out of line: the arena, if `which` is none of them."""
    arrays = [
        stored(numbers(seed, *shape), "float32", seed == which) for seed, shape in enumerate(shapes)
    ]
    return Arena() if which < len(shapes) else Askew(), arrays


def check_bias(kernels: Kernels, which: int) -> None:
    """A rank's own rows of a sum begin anywhere; a bias, its gradient, a residual or the output may as well."""
    ops, (arena, (x, b, residual, out, db)) = (
        cuda_ops(kernels),
        one_askew(which, (3, 8), (8,), (3, 8), (3, 8), (8,)),
    )
    ops.add_bias(x, b, out, arena, residual)
    np.testing.assert_array_equal(out, x + b + residual)
    truth = db + x.sum(0)
    sum_rows(kernels, x, db, True, arena)
    assert_close(db, truth)


def check_norm(kernels: Kernels, which: int) -> None:
    """Any array of a LayerNorm may begin anywhere."""
    ops, (arena, (x, gain, bias, dy, residual, dgain, dbias)) = (
        cuda_ops(kernels),
        one_askew(which, (3, 8), (8,), (8,), (3, 8), (3, 8), (8,), (8,)),
    )
    y, saved = ops.layer_norm(x, gain, bias, 1e-5, arena)
    true_y, true_saved = reference.layer_norm(values(x), values(gain), values(bias), 1e-5, None)
    assert_close(y, true_y)
    dx, pending = ops.layer_norm_backward_input(dy, gain, saved, arena, residual)
    true_dx, truth = reference.layer_norm_backward_input(
        values(dy), values(gain), true_saved, None, values(residual)
    )
    assert_close(dx, true_dx)
    sums = [values(dgain), values(dbias)]
    reference.layer_norm_backward_weight(truth, *sums, True, None)
    ops.layer_norm_backward_weight(pending, dgain, dbias, True, arena)
    assert_close(dgain, sums[0])
    assert_close(dbias, sums[1])


def check_embedding(kernels: Kernels, which: int) -> None:
    """Any array of an embedding may begin anywhere."""
    ops, tokens = cuda_ops(kernels), np.array([[1, 0, 4]])
    arena, (table, positions, out, dx, dtable, dpositions) = one_askew(
        which, (5, 8), (3, 8), (1, 3, 8), (1, 3, 8), (5, 8), (3, 8)
    )
    _, saved = ops.embedding(tokens, table, positions, arena, 0, out)
    true_x, truth = reference.embedding(tokens, values(table), values(positions), None)
    assert_close(out, true_x)
    for name, what, true_what, into in (
        ("table", (dx, saved), (values(dx), truth), dtable),
        ("positions", (dx,), (values(dx),), dpositions),
    ):
        getattr(reference, f"embedding_backward_{name}")(
            *true_what, expected := values(into), True, None
        )
        getattr(ops, f"embedding_backward_{name}")(*what, into, True, arena)
        assert_close(into, expected, what=name)


def askew() -> Iterator[partial]:
    """Kernels with a row or a column to a warp; of the others whole groups of arrays are out of line in their own cases."""
    for check, arrays in ((check_bias, 5), (check_norm, 7), (check_embedding, 6)):
        for which in range(arrays + 1):
            yield partial(check, which=which)
