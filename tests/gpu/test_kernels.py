"""The cases of every kernel on a real GPU: arrays go there for each launch and come back. Skipped where there is none."""

import ctypes as c
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mpitrain.kernels.cuda import CudaEngine
from mpitrain.kernels.loader import Argument, Kernels, TensorMap
from tests.cases.numbers import numbers, stored, values
from tests.cases.suite import SUITE

pytestmark = pytest.mark.gpu
GROUPS = {group.__name__: group for groups in SUITE.values() for group in groups}


class Visiting(CudaEngine):
    """Launches on NumPy arrays: each extent, gaps of a strided view included, visits the GPU for one launch."""

    takes_plain = False

    def __init__(self, cupy: ModuleType):
        super().__init__(cupy)
        self._module = cupy

    def tensor_map(self, array: Any, box_rows: int) -> TensorMap:
        """A map of the array here; a launch makes that of its visit."""
        return TensorMap(array, box_rows)

    def load(self, source: Any, signature: Any, defines: dict[str, str]) -> Any:
        kernel = super().load(source, signature, defines)

        def launch(grid: Any, block: Any, arguments: list[Any], shared: int) -> None:
            visits: dict[tuple, tuple] = {}
            there = [self._visit(argument, visits) for argument in arguments]
            kernel(
                grid,
                block,
                [each.array if isinstance(each, Argument) else each for each in there],
                shared,
            )
            for parameter, argument in zip(signature.parameters, arguments, strict=True):
                if (
                    parameter.is_pointer
                    and not parameter.is_readonly
                    and argument.array is not None
                    and argument.array.size
                ):
                    self._return(argument.array, visits)

        return launch

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, *how: bool) -> None:
        visits: dict[tuple, tuple] = {}
        super().multiply(*(self._visit(Argument(array), visits).array for array in (a, b, c)), *how)
        self._return(c, visits)

    def _return(self, array: np.ndarray, visits: dict[tuple, tuple]) -> None:
        low, extent = visits[_key(array)][:2]
        back = self._module.asnumpy(extent)
        array[...] = np.ndarray(
            array.shape, array.dtype, back, array.ctypes.data - low, array.strides
        )

    def _visit(self, argument: Any, visits: dict[tuple, tuple]) -> Any:
        if isinstance(argument, TensorMap):
            visiting = self._visit(Argument(argument.array), visits).array
            return super().tensor_map(visiting, argument.box_rows)
        if not isinstance(argument, Argument) or argument.array is None:
            return argument
        array = argument.array
        if not array.size:
            return argument._replace(array=self._module.empty(array.shape, array.dtype))
        if _key(array) not in visits:
            low, high = np.lib.array_utils.byte_bounds(array)
            # Placed so that its alignment modulo 64 is the array's own.
            room = self._module.empty(high - low + 64, np.uint8)
            extent = room[low % 64 :][: high - low]
            extent.set(np.frombuffer((c.c_ubyte * (high - low)).from_address(low), np.uint8))
            pointer = extent.data + (array.ctypes.data - low)
            visits[_key(array)] = (
                low,
                extent,
                self._module.ndarray(array.shape, array.dtype, pointer, array.strides),
            )
        return argument._replace(array=visits[_key(array)][2])


def _key(array: np.ndarray) -> tuple:
    return array.ctypes.data, array.shape, array.strides


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    cupy = pytest.importorskip("cupy")
    try:
        return Kernels(Visiting(cupy))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")


@pytest.mark.parametrize("group", GROUPS)
def test_a_kernel_computes_on_the_gpu_what_the_reference_says(kernels, group):
    for case in GROUPS[group]():
        try:
            case(kernels)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-6), ("float64", 1e-14), ("float16", 1e-6), ("bfloat16", 1e-6)],
)
def test_the_library_multiplies_without_tf32(dtype, tolerance):
    """TF32 keeps 10 bits of the elements, which costs 3e-4 here; the results of 16-bit elements are float32."""
    cupy = pytest.importorskip("cupy")
    engine = CudaEngine(cupy)
    a, b = stored(numbers(1, 70, 130), dtype), stored(numbers(2, 50, 130), dtype)
    c = cupy.zeros((70, 50), "float64" if dtype == "float64" else "float32")
    for run in (1, 2):
        engine.multiply(cupy.asarray(a), cupy.asarray(b), c, False, True, run == 2)
        truth = run * values(a) @ values(b).T
        assert np.abs(cupy.asnumpy(c) - truth).max() <= 10 * tolerance * np.abs(truth).max()
