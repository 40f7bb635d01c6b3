"""The meaning of each operation, forward and backward, in plain NumPy.

B batch, T tokens, C channels, H heads, D = C / H, V vocabulary; M rows, K inputs, N outputs of a matrix product.

All arrays of a call have one dtype, float32 or float64; tokens and targets are signed integers; scalars are Python
numbers. Whoever reads data checks that tokens and targets lie in the vocabulary, no operation does: one that has a part of
the vocabulary cannot tell a wrong number from an entry of another part. Parts are runs of entries, ragged or empty;
`first` is the entry of a part's first row or column.
Every forward that has a backward returns (output, saved); each backward uses its `saved` once and may overwrite what
`saved` alone holds. `saved` may refer to the inputs and the output, into which nobody writes until the backward has run;
it never refers to the output of `linear`. Nothing writes to its inputs unless its first sentence says so. `accumulate` is
BLAS's beta: True adds to the gradient that is passed in, False overwrites it. Buffers come from `arena` in the tuned
bodies; here they are simply allocated. `out` is where the first result is to be written, contiguous, of its shape and dtype;
None for a buffer of the arena's.

`residual` is added to the first result, of its shape and dtype; None for nothing. What `linear_gelu` and `linear_relu` save is
(what `linear` would have saved, what the derivative of the activation is made of).
"""

from mpitrain.ops.reference.layers import (
    EPSILON,
    GELU_CUBIC,
    GELU_SCALE,
    add,
    add_bias,
    attention,
    attention_backward,
    embedding,
    embedding_backward_positions,
    embedding_backward_table,
    gelu,
    gelu_backward,
    gelu_linear_backward_input,
    layer_norm,
    layer_norm_backward_bias,
    layer_norm_backward_gain,
    layer_norm_backward_input,
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
from mpitrain.ops.reference.loss import (
    count_correct,
    count_correct_split,
    cross_entropy,
    cross_entropy_loss,
    cross_entropy_split,
    row_argmax,
    row_exponentials,
    row_maximum,
)
from mpitrain.ops.reference.steps import adamw, gradient_facts, momentum, sgd

__all__ = [
    "EPSILON",
    "GELU_CUBIC",
    "GELU_SCALE",
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
