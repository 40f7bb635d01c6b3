"""Copies between arrays of one memory, whose rows may have gaps."""

from typing import Any

from mpitrain.machine.backend import address, on_device


def copy_rows(target: Any, source: Any) -> None:
    """Copy one array onto another, in the order of the current stream (as cudaMemcpy2DAsync).

    An assignment would do on the host. But CuPy compiles a kernel for it if strides differ, or if
    the first dim is 1.

    target, source  of one shape and dtype, in one memory. If rows have gaps, a device copies each
                    matrix of the last two dims separately. Only if the last dim is not contiguous,
                    as in a transposed weight of another library, CuPy's kernel copies
    """
    if not on_device(target):
        target[...] = source
        return
    if target.flags.c_contiguous and source.flags.c_contiguous:
        shape: Any = () if source.size == 1 else -1
        target.reshape(shape)[...] = source.reshape(shape)
        return
    if not (_has_rows(target) and _has_rows(source)):
        target[...] = source
        return
    if source.ndim > 2:
        for at in range(len(source)):
            copy_rows(target[at], source[at])
        return
    from cupy import cuda

    cuda.runtime.memcpy2DAsync(
        address(target),
        _pitch(target),
        address(source),
        _pitch(source),
        source.shape[1] * source.itemsize,
        source.shape[0],
        cuda.runtime.memcpyDefault,
        cuda.get_current_stream().ptr,
    )


def _has_rows(array: Any) -> bool:
    """Return whether the last dim is contiguous, and its rows do not overlap."""
    if array.ndim < 2:
        return False
    *_, rows, columns = array.shape
    *_, pitch, step = array.strides
    is_contiguous = columns == 1 or step == array.itemsize
    return is_contiguous and (rows == 1 or pitch >= columns * array.itemsize)


def _pitch(matrix: Any) -> int:
    """Return the bytes between the starts of two rows; of a single row, its length."""
    rows, columns = matrix.shape
    pitch: int = matrix.strides[0] if rows > 1 else columns * matrix.itemsize
    return pitch
