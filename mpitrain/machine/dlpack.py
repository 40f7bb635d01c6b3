"""Views of other libraries' arrays, through DLPack: NumPy in host memory, CuPy in GPU memory."""

from typing import Any

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.machine.cuda import cupy_with_gpu
from mpitrain.machine.kinds import Kind

HOST = (1, 3, 11)
"""DLPack's numbers of host memory: plain, or page-locked by CUDA or ROCm."""
CUDA = (2, 13)
"""DLPack's numbers of memory that CUDA kernels reach: of one GPU, or managed."""


def as_array(array: Any, name: str) -> Any:
    """Return an array of NumPy or CuPy that shares the memory of `array`, without its autograd.

    array   of NumPy, CuPy, PyTorch, or another library with DLPack
    name    of the array, for the error
    raises  ConfigError if it is no array, lies in other memory, or has no dtype of NumPy
    """
    array = array.detach() if hasattr(array, "detach") else array
    if isinstance(array, np.ndarray):
        return array
    if not hasattr(array, "__dlpack_device__"):
        raise ConfigError(
            f"{name} must be an array of NumPy, CuPy or PyTorch, but it is a {type(array).__name__}.",
            "Pass the arrays themselves, for example list(model.parameters()).",
        )
    number = int(array.__dlpack_device__()[0])
    if number not in (*HOST, *CUDA):
        raise ConfigError(
            f"{name} must lie in the memory of the host or of a CUDA GPU, but it lies elsewhere.",
            "Copy it to the host first.",
        )
    try:
        if number in HOST:
            view = np.from_dlpack(array)
            # NumPy makes arrays of older versions of DLPack read-only, but not PyTorch's own.
            writeable = view if view.flags.writeable else np.asarray(array)
            return writeable if np.shares_memory(view, writeable) else view
        cupy = cupy_with_gpu()
        return array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{name} must have a dtype that NumPy has too, but {error}.",
            "Use float32 or float64.",
        ) from None


def kind_of(array: Any) -> Kind:
    """Return the kind of device that stores an array of `as_array`."""
    return "cpu" if isinstance(array, np.ndarray) else "cuda"
