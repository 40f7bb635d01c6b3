"""The CUDA backend: our own kernels, on a GPU or in the simulator, with the signatures of
`reference`.

No function here waits for the device. Numbers that `reference` returns are arrays here, without
dims or of two elements.
"""

from functools import partial
from pathlib import Path

from mpitrain.ops.cuda import (
    attention,
    embedding,
    images,
    linear,
    loss,
    norm,
    product,
    steps,
    tensor_steps,
)
from mpitrain.ops.cuda.tiles import DEFAULT, read_tiles

__all__ = [
    "attention",
    "embedding",
    "images",
    "linear",
    "loss",
    "multiply",
    "norm",
    "steps",
    "tensor_steps",
]


def multiply(gemm: str, tiles: str = "") -> linear.Multiply:
    """Return the matrix product that device.gemm and device.tiles choose.

    raises  ConfigError for a file that is no table of tiles
    """
    if gemm == "library":
        return product.library
    return partial(product.gemm, table=read_tiles(Path(tiles)) if tiles else DEFAULT)
