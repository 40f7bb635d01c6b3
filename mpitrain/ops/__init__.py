"""Numerical operations: one set of names, several backends.

`reference` defines each operation in plain NumPy. The other backends (`host`, `cuda`) have the same
names and signatures, and are tested against it. A forward function returns (output, saved). The
matching backward function takes `saved`. The content of `saved` is private to the backend; it may
refer to the output. Buffers that outlive a call, and large scratch, come from `arena`.
"""

from collections.abc import Callable
from typing import Any, Protocol

Returns = Callable[..., Any]
Pair = Callable[..., tuple[Any, Any]]
Writes = Callable[..., None]


class Ops(Protocol):
    """The operations of one backend, as PyTorch's ATen kernels of one device.

    Notes
    -----
    `reference` documents each operation with shapes. The type of an attribute gives its results:

    Pair      (output, saved) of a forward, (dx, pending) of a backward, or two numbers
    Returns   one result
    Writes    nothing: it writes into its arguments

    A backward is split in two. The input half returns dx and `pending`. The weight halves take
    `pending`, so that they can run later or be left out.
    """

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
