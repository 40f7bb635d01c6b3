"""The definition of each operation, forward and backward, in plain NumPy.

B batch, T tokens, C channels, H heads, D = C / H, V vocabulary;
M rows, K inputs, N outputs of a matrix product.

Types: all arrays of a call have one dtype, float32 or float64. Tokens and targets are signed
integers. Scalars are Python numbers.

Range checks: the code that reads data checks that tokens and targets lie in the vocabulary. No
operation checks it. On a slice of a split vocabulary, a wrong number looks like an entry of another
slice. Slices are runs of entries, ragged or empty. `first` is the index of a slice's first row or
column in the whole vocabulary.

Saved values: every forward that has a backward returns (output, saved). A backward uses its `saved`
once. It may overwrite arrays that only `saved` refers to. `saved` may refer to the inputs and the
output, so these must not change until the backward has run. It never refers to the output of
`linear`. An operation changes an input only where its docstring says so.

Arguments of several operations:

accumulate  BLAS's beta: True adds to the gradient that is passed in, False overwrites it
arena       gives the buffers in the tuned backends; here, NumPy allocates them
out         a contiguous array for the first result, of its shape and dtype; None: a buffer from the
            arena
residual    an array that is added to the first result, of its shape and dtype; None for no addition
pending     the second result of an input half of a backward; the weight halves read it

`linear_gelu` and `linear_relu` save a pair: the value that `linear` saves, and the data for the
derivative of the activation.
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
