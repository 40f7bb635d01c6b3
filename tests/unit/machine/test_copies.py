"""Copies of rows with gaps: on the host by assignment, on a GPU without a kernel of CuPy."""

import sys

import ml_dtypes
import numpy as np
import pytest

from mpitrain.machine.backend import copy_rows
from tests.fakes import cupy

SHAPES = [(3, 5), (1, 4), (4, 1), (1, 1), (0, 3), (3, 0)]


@pytest.fixture
def fake(monkeypatch):
    """CuPy without a GPU, which refuses to compute."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy, "kernels_alone", True)
    cupy.faults.clear()
    return cupy


def moved(rows, columns, dtype, gaps, to_device):
    """A matrix after columns from 2 on came from another, whose gaps are others, and what it should be."""
    source = np.arange(rows * (columns + gaps)).reshape(rows, columns + gaps).astype(dtype)
    target = np.full((rows, columns + 4), -1, dtype)
    ours, theirs = to_device(target), to_device(source)
    copy_rows(ours[:, 2 : 2 + columns], theirs[:, gaps:])
    wanted = target.copy()
    wanted[:, 2 : 2 + columns] = source[:, gaps:]
    return ours, wanted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_columns_of_one_matrix_become_those_of_another(shape, dtype, fake):
    for gaps in (0, 3):
        on_host, wanted = moved(*shape, dtype, gaps, np.copy)
        assert np.array_equal(on_host, wanted)
        on_gpu, _ = moved(*shape, dtype, gaps, fake.asarray)
        assert np.array_equal(fake.asnumpy(on_gpu), wanted)
    assert fake.faults == []


def test_each_matrix_of_an_array_with_more_dims_is_copied(fake):
    array = np.arange(48.0).reshape(2, 3, 8)
    target, source = fake.zeros((2, 3, 8)), fake.asarray(array)
    copy_rows(target[..., :2, 1:4], source[:, 1:, 5:])
    assert np.array_equal(fake.asnumpy(target)[..., :2, 1:4], array[:, 1:, 5:])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 4), (1, 1, 3), (2, 0), (0, 2), (3, 2)])
def test_arrays_without_gaps_may_have_any_shape(shape, fake):
    array = np.arange(float(np.prod(shape, dtype=int))).reshape(shape) + 1
    target = fake.zeros(shape)
    copy_rows(target, fake.asarray(array))
    assert np.array_equal(fake.asnumpy(target), array) and fake.faults == []


@pytest.mark.parametrize("count", [0, 1, 5])
def test_one_row_needs_no_second_dim(count, fake):
    target, source = fake.zeros(8), fake.asarray(np.arange(1.0, 9))
    copy_rows(target[2 : 2 + count], source[:count])
    wanted = np.zeros(8)
    wanted[2 : 2 + count] = np.arange(1.0, 1 + count)
    assert np.array_equal(fake.asnumpy(target), wanted)


@pytest.mark.parametrize("view", ["last dim", "second dim", "every other", "repeated"])
def test_elements_that_are_not_in_rows_are_copied_by_cupy(view, fake, monkeypatch):
    """The second dim is contiguous in PyTorch's memory format channels_last."""
    monkeypatch.setattr(fake, "kernels_alone", False)
    array = np.arange(120.0).reshape(2, 3, 4, 5)
    stored, wanted, strides = {
        "last dim": (array[0, 0].T.copy(), array[0, 0], (8, 32)),
        "second dim": (np.moveaxis(array, 1, -1).copy(), array, (480, 8, 120, 24)),
        "every other": (array.ravel(), array.ravel()[::2], (16,)),
        "repeated": (array[0, 0, 0], array[0, 0, [0, 0, 0]], (0, 8)),
    }[view]
    source = fake.ndarray(wanted.shape, float, fake.asarray(stored).data, strides)
    target = fake.zeros(wanted.shape)
    copy_rows(target, source)
    assert np.array_equal(fake.asnumpy(target), wanted) and fake.faults == []


def test_a_copy_is_in_the_order_of_the_stream(fake):
    first, second = (fake.asarray(np.full((2, 3), number)) for number in (1.0, 2.0))
    target = fake.zeros((2, 6))
    copy_rows(target[:, 3:], first)
    copy_rows(first, second)
    assert fake.asnumpy(target)[:, 3:].tolist() == [[1.0] * 3] * 2
    assert fake.asnumpy(first).tolist() == [[2.0] * 3] * 2 and fake.faults == []


@pytest.mark.parametrize(
    "target, source",
    [
        ((slice(None), slice(3)), (slice(None), slice(3))),
        ((slice(None), slice(3)), (slice(None), slice(3, 6))),
        ((slice(1),), (slice(1),)),
        ((slice(1), slice(1)), (slice(1), slice(1))),
    ],
)
def test_an_assignment_for_which_cupy_compiles_a_kernel_is_refused(target, source, fake):
    """Rows with gaps, and a single row: CuPy leaves out the value's leading dims of 1, so that its shape differs."""
    array, other = fake.zeros((2, 6)), fake.zeros((2, 6))
    statement = compile("array[target] = value", "assignment", "exec")
    names = {"__name__": "mpitrain.layers", "array": array, "target": target}
    with pytest.raises(TypeError, match="elementwise_copy"):
        exec(statement, names | {"value": other[source]})
    exec(statement, names | {"target": slice(None), "value": other})
