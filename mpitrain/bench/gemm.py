"""Matrix products of our own beside the library's, size by size, in one run."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.bench.kernels import count_wrong
from mpitrain.bench.target import Target
from mpitrain.ops.cuda.product import gemm

SIZES = {"cpu": (256, 512, 1024), "cuda-sim": (32, 65, 127), "cuda": (1024, 2048, 4096, 8192)}


class Row(NamedTuple):
    """One size: our time and the library's (NumPy's BLAS, or cuBLAS through CuPy)."""

    size: int
    seconds: float
    library_seconds: float
    gflops: float
    percent: float
    wrong: int


def measure(device: Target, sizes: Sequence[int], dtype: str) -> Iterator[Row]:
    """Square products; on the CPU, where there are no kernels, the library against itself."""
    for size in sizes:
        rng = np.random.default_rng(size)
        a, b = (rng.integers(-2, 3, (size, size)).astype(dtype) for _ in range(2))     # sums are exact in float32
        x, y, z = device.put(a), device.put(b), device.put(np.empty((size, size), np.float32))

        def ours(x=x, y=y, z=z) -> None:
            if device.kernels is None:
                z[...] = np.matmul(x, y)
            else:
                gemm(device.kernels, device.arena, x, y, z)

        seconds, theirs = device.seconds(ours), device.seconds(lambda x=x, y=y: np.matmul(x, y))
        wrong = count_wrong(device.get(z).astype(np.float32), a.astype(np.float32) @ b.astype(np.float32))
        yield Row(size, seconds, theirs, 2 * size**3 / seconds / 1e9, 100 * theirs / seconds, wrong)
