"""Numerical operations: one name, several bodies.

`reference` is the meaning of each operation, in plain NumPy; the other bodies have the same names and signatures and
are tested against it. A forward returns (output, saved) and the matching backward takes `saved`, whose contents are
private to the body; it may refer to the output. Buffers that outlive a call, and large scratch, come from `arena`.
"""

from collections.abc import Callable
from typing import Any, Protocol

Returns = Callable[..., Any]
Pair = Callable[..., tuple[Any, Any]]
Writes = Callable[..., None]


class Ops(Protocol):
    """A body. `Pair`: (output, saved), of a backward (dx, pending), or two numbers; `Writes`: into its arguments."""

    linear: Pair
    logits: Pair
    linear_backward_input: Pair
    gelu_linear_backward_input: Pair
    linear_backward_weight: Writes
    linear_backward_bias: Writes
    linear_gelu: Pair
    linear_gelu_backward_input: Pair
    linear_relu: Pair
    linear_relu_backward_input: Pair
    gelu: Pair
    gelu_backward: Returns
    relu: Pair
    relu_backward: Returns
    layer_norm: Pair
    layer_norm_backward_input: Pair
    layer_norm_backward_gain: Writes
    layer_norm_backward_bias: Writes
    embedding: Pair
    embedding_backward_table: Writes
    embedding_backward_positions: Writes
    attention: Pair
    attention_backward: Returns
    cross_entropy: Pair
    cross_entropy_loss: Returns
    count_correct: Returns
    row_maximum: Returns
    row_exponentials: Returns
    cross_entropy_split: Pair
    row_argmax: Returns
    count_correct_split: Returns
    add: Writes
    weighted_sum: Writes
    add_bias: Writes
    sgd: Writes
    momentum: Writes
    adamw: Writes
    gradient_facts: Pair
