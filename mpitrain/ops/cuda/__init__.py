"""The CUDA body: our own kernels behind the names and signatures of `reference`, on a GPU or in the simulator.

Nothing here waits for the device. Sums that the others return as numbers are arrays without dims here: float() waits.
"""

from functools import partial
from types import SimpleNamespace

from mpitrain.kernels.engines import kernels_for
from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda import attention, embedding, linear, loss, norm, product, steps, sums

MULTIPLY = {"tiled": product.gemm, "library": product.library}
"""Who multiplies matrices, by the names of device.gemm."""

WITH_PRODUCTS = (
    linear.linear, linear.linear_backward_input, linear.linear_backward_weight,
    linear.linear_gelu, linear.linear_gelu_backward_input, linear.linear_relu, linear.linear_relu_backward_input,
)
FUNCTIONS = (
    linear.linear_backward_bias,
    norm.layer_norm, norm.layer_norm_backward_input, norm.layer_norm_backward_gain, norm.layer_norm_backward_bias,
    embedding.embedding, embedding.embedding_backward_table, embedding.embedding_backward_positions,
    attention.attention, attention.attention_backward,
    loss.cross_entropy, loss.cross_entropy_loss, loss.count_correct,
    loss.row_maximum, loss.row_exponentials, loss.cross_entropy_split,
    steps.sgd, steps.momentum, steps.adamw, sums.square_sum, sums.count_nonfinite,
)


def body(kernels: Kernels, multiply: linear.Multiply = product.gemm) -> SimpleNamespace:
    """The operations, launched through these kernels; `multiply` makes the products of linear layers."""
    bound = {function.__name__: partial(function, kernels) for function in FUNCTIONS}
    return SimpleNamespace(**bound, **{function.__name__: partial(function, kernels, multiply) for function in WITH_PRODUCTS})


def on(kind: str, gemm: str) -> SimpleNamespace:
    """The operations on a kind of device, "cuda" or "cuda-sim"; products as device.gemm says."""
    return body(kernels_for(kind), MULTIPLY[gemm])
