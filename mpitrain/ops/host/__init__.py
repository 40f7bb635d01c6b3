"""The CPU backend: NumPy and its BLAS, in blocks of rows that stay in cache.

Apart from its matrix products, a step costs passes over memory. So products write into arena
buffers. The operations after a product run while its block of rows is in cache. No transpose is a
copy: BLAS reads strided views.
"""

from mpitrain.ops.host.attention import attention, attention_backward
from mpitrain.ops.host.embedding import (
    embedding,
    embedding_backward_positions,
    embedding_backward_table,
)
from mpitrain.ops.host.linear import (
    add_bias,
    gelu,
    gelu_backward,
    gelu_linear_backward_input,
    linear,
    linear_backward_bias,
    linear_backward_input,
    linear_backward_weight,
    linear_gelu,
    linear_gelu_backward_input,
    linear_relu,
    linear_relu_backward_input,
    logits,
    relu,
    relu_backward,
    weighted_sum,
)
from mpitrain.ops.host.loss import (
    count_correct,
    count_correct_split,
    cross_entropy,
    cross_entropy_loss,
    cross_entropy_split,
    row_argmax,
    row_exponentials,
    row_maximum,
)
from mpitrain.ops.host.norm import (
    layer_norm,
    layer_norm_backward_bias,
    layer_norm_backward_gain,
    layer_norm_backward_input,
)
from mpitrain.ops.host.steps import adamw, gradient_facts, momentum, sgd
from mpitrain.ops.reference import add

__all__ = [
    "adamw",
    "add",
    "add_bias",
    "attention",
    "attention_backward",
    "count_correct",
    "count_correct_split",
    "cross_entropy",
    "cross_entropy_loss",
    "cross_entropy_split",
    "embedding",
    "embedding_backward_positions",
    "embedding_backward_table",
    "gelu",
    "gelu_backward",
    "gelu_linear_backward_input",
    "gradient_facts",
    "layer_norm",
    "layer_norm_backward_bias",
    "layer_norm_backward_gain",
    "layer_norm_backward_input",
    "linear",
    "linear_backward_bias",
    "linear_backward_input",
    "linear_backward_weight",
    "linear_gelu",
    "linear_gelu_backward_input",
    "linear_relu",
    "linear_relu_backward_input",
    "logits",
    "momentum",
    "relu",
    "relu_backward",
    "row_argmax",
    "row_exponentials",
    "row_maximum",
    "sgd",
    "weighted_sum",
]
