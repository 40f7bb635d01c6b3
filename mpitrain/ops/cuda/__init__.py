"""The CUDA body: our own kernels behind the names and signatures of `reference`, on a GPU or in the simulator.

Nothing here waits for the device. Sums that the others return as numbers are arrays without dims here: float() waits.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda import attention, embedding, linear, loss, norm, product, steps, sums
from mpitrain.ops.cuda.tiles import DEFAULT, read_tiles
from mpitrain.ops.reference import add

WITH_PRODUCTS = (
    linear.linear, linear.logits, linear.linear_backward_input, linear.linear_backward_weight,
    linear.linear_gelu, linear.linear_gelu_backward_input, linear.linear_relu, linear.linear_relu_backward_input,
)
FUNCTIONS = (
    linear.linear_backward_bias, linear.gelu, linear.gelu_backward, linear.relu, linear.relu_backward,
    norm.layer_norm, norm.layer_norm_backward_input, norm.layer_norm_backward_gain, norm.layer_norm_backward_bias,
    embedding.embedding, embedding.embedding_backward_table, embedding.embedding_backward_positions,
    attention.attention, attention.attention_backward,
    loss.cross_entropy, loss.cross_entropy_loss, loss.count_correct,
    loss.row_maximum, loss.row_exponentials, loss.cross_entropy_split, loss.row_argmax, loss.count_correct_split,
    steps.sgd, steps.momentum, steps.adamw, sums.square_sum, sums.count_nonfinite,
)


def body(kernels: Kernels, multiply: linear.Multiply = product.gemm) -> SimpleNamespace:
    """The operations, launched through these kernels; `multiply` makes the products of linear layers."""
    bound = {function.__name__: partial(function, kernels) for function in FUNCTIONS}
    bound |= {function.__name__: partial(function, kernels, multiply) for function in WITH_PRODUCTS}
    return SimpleNamespace(**bound, add=add)


def multiply(gemm: str, tiles: str = "") -> linear.Multiply:
    """Who multiplies matrices, as device.gemm and device.tiles say; ConfigError for a file that is no table of tiles."""
    if gemm == "library":
        return product.library
    return partial(product.gemm, table=read_tiles(Path(tiles)) if tiles else DEFAULT)
