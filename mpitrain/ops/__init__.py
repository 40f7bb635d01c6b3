"""Numerical operations: one name, several bodies.

`reference` is the meaning of each operation, in plain NumPy; the other bodies have the same names and signatures and
are tested against it. A forward returns (output, saved) and the matching backward takes `saved`, whose contents are
private to the body; it may refer to the output. Buffers that outlive a call, and large scratch, come from `arena`.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from mpitrain.errors import ConfigError

BODIES = {
    "reference": "mpitrain.ops.reference",
    "cpu": "mpitrain.ops.host",
    "cuda": "mpitrain.ops.cuda",
    "cuda-sim": "mpitrain.ops.cuda",
}

Returns = Callable[..., Any]
Pair = Callable[..., tuple[Any, Any]]
Writes = Callable[..., None]


class Ops(Protocol):
    """A body. `Pair`: (output, saved), or of a backward (dx, pending); `Writes`: into its arguments."""

    linear: Pair
    linear_backward_input: Pair
    linear_backward_weight: Writes
    linear_backward_bias: Writes
    linear_gelu: Pair
    linear_gelu_backward_input: Pair
    linear_relu: Pair
    linear_relu_backward_input: Pair
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
    sgd: Writes
    momentum: Writes
    adamw: Writes
    square_sum: Returns
    count_nonfinite: Returns


@cache
def ops_for(kind: str, gemm: str = "tiled", tiles: str = "") -> Ops:
    """The body for a kind of device; raises ConfigError for a kind that has none.

    gemm, tiles   as in the configuration of the device; bodies without kernels have one way to multiply and read neither
    cuda and cuda-sim are the same body, launching the same kernels on the current GPU and in the simulator.
    """
    if kind not in BODIES:
        raise ConfigError(f"there are no operations for device kind {kind!r}.", f"Choose one of {', '.join(BODIES)}.")
    body: Any = import_module(BODIES[kind])
    return body.on(kind, gemm, tiles) if hasattr(body, "on") else body
