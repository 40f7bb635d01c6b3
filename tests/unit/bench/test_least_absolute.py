"""The linear program of `bench fit`: exact models are recovered, and no other x above the bounds has a smaller sum."""

import numpy as np
import pytest

from mpitrain.tools.bench.collectives.fit import least_absolute

CASES = [(1, 1), (3, 7), (7, 3), (61, 11), (97, 23), (0, 2)]


def matrix(rows, terms, kind, seed):
    """Columns of very different size, as of bytes and messages; some of them empty."""
    draw = np.random.default_rng(seed)
    found = draw.random((rows, terms)) * 10.0 ** draw.integers(-9, 9, terms)
    found *= draw.random((rows, terms)) < 0.7
    if kind == "repeated":
        return np.ceil(found[draw.integers(0, max(rows, 1), rows)])
    seconds = found @ draw.random(terms)
    if kind == "outliers":
        seconds *= np.where(draw.random(rows) < 0.1, 30, 1)
    return found[seconds > 0] / seconds[seconds > 0, None]


@pytest.mark.parametrize("kind", ("exact", "outliers", "repeated"))
@pytest.mark.parametrize("shape", CASES)
def test_the_sum_of_distances_is_that_of_another_solver(kind, shape):
    linprog = pytest.importorskip("scipy.optimize").linprog
    for seed in range(5):
        given = matrix(*shape, kind, seed)
        rows, terms = given.shape
        scale = np.linalg.norm(given, axis=0)
        scale[scale == 0] = 1
        scaled, least = given / scale, (seed % 3) / scale
        found = least_absolute(given, least)
        best = linprog(
            np.repeat((0, 1), (terms, rows)),
            np.block([[scaled, -np.eye(rows)], [-scaled, -np.eye(rows)]]),
            np.repeat((1, -1), rows),
            bounds=[(bound, None) for bound in (*(least * scale), *np.zeros(rows))],
        )
        assert (found >= least).all()
        assert abs(np.abs(given @ found - 1).sum() - (best.fun if rows else 0)) <= 1e-7


@pytest.mark.parametrize("outliers", (0, 7))
def test_an_exact_model_is_recovered_although_some_rows_are_far_from_it(outliers):
    draw = np.random.default_rng(3)
    constants = np.array([0, 1e-6, 2e-9, 3, 4e4])
    amounts = (draw.random((50, 5)) + 0.1) * [1, 1e6, 1e9, 1, 1e-4]
    seconds = amounts @ constants
    seconds[:outliers] *= 40
    first, *others = least_absolute(amounts / seconds[:, None], np.zeros(5))
    assert first <= 1e-12 and np.allclose(others, constants[1:], rtol=1e-9, atol=0)
