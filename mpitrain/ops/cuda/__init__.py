"""The CUDA backend: our own kernels, on a GPU or in the simulator, with the signatures of
`reference`.

No function here waits for the device. Numbers that `reference` returns are arrays here, without
dims or of two elements.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend, HostBackend
from mpitrain.ops.cuda import attention, embedding, linear, loss, norm, product, steps, sums, wire
from mpitrain.ops.cuda.tiles import DEFAULT, read_tiles

WITH_PRODUCTS = (
    linear.linear,
    linear.logits,
    linear.linear_backward_input,
    linear.gelu_linear_backward_input,
    linear.linear_backward_weight,
    linear.linear_gelu,
    linear.linear_gelu_backward_input,
    linear.linear_relu,
    linear.linear_relu_backward_input,
)
FUNCTIONS = (
    linear.linear_backward_bias,
    linear.add,
    linear.weighted_sum,
    linear.add_bias,
    linear.gelu,
    linear.gelu_backward,
    linear.relu,
    linear.relu_backward,
    norm.layer_norm,
    norm.layer_norm_backward_input,
    norm.layer_norm_backward_gain,
    norm.layer_norm_backward_bias,
    embedding.embedding,
    embedding.embedding_backward_table,
    embedding.embedding_backward_positions,
    attention.attention,
    attention.attention_backward,
    loss.cross_entropy,
    loss.cross_entropy_loss,
    loss.count_correct,
    loss.row_maximum,
    loss.row_exponentials,
    loss.cross_entropy_split,
    loss.row_argmax,
    loss.count_correct_split,
    sums.gradient_facts,
)
WITH_NUMBERS = (steps.sgd, steps.momentum, steps.adamw)


def body(
    kernels: Kernels, multiply: linear.Multiply = product.gemm, backend: Backend | None = None
) -> SimpleNamespace:
    """Return the operations, launched through these kernels.

    multiply  the matrix product of linear layers
    backend   the backend of the arrays; None: host memory
    """
    numbers = steps.Numbers(backend or HostBackend())
    bound = {function.__name__: partial(function, kernels) for function in FUNCTIONS}
    bound |= {function.__name__: partial(function, kernels, multiply) for function in WITH_PRODUCTS}
    bound |= {function.__name__: partial(function, kernels, numbers) for function in WITH_NUMBERS}
    return SimpleNamespace(**bound)


def mirror(kernels: Kernels, parameters: Any, mirror: Any, arena: Arena) -> None:
    """Write the parameters, rounded to the mirror's type, to the mirror."""
    wire.convert(kernels, parameters, mirror)


def multiply(gemm: str, tiles: str = "") -> linear.Multiply:
    """Return the matrix product that device.gemm and device.tiles choose.

    raises  ConfigError for a file that is no table of tiles
    """
    if gemm == "library":
        return product.library
    return partial(product.gemm, table=read_tiles(Path(tiles)) if tiles else DEFAULT)
