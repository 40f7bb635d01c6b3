"""The CPU backend: NumPy and its BLAS, in blocks of rows that stay in cache.

Apart from its matrix products, a step costs passes over memory. So products write into arena
buffers. The operations after a product run while its block of rows is in cache. No transpose is a
copy: BLAS reads strided views.
"""

from mpitrain.ops.host import attention, layers, steps

__all__ = ["attention", "layers", "steps"]
