"""Fusion: work of a neighbouring layer that a layer does in its own pass over memory.

    fused                            by                      offered as
    bias + residual                  linear, no activation   adds_to_output
    gradient of a norm + residual's  norm                    adds_to_input
    product * slope of a GELU        linear after a GELU     takes_gelu
    GELU + its slope                 linear with a GELU      gelu_cut

`Sequential` and `Residual` read these offers when they are made. The results equal those of
separate passes bit for bit. Bias + activation (`ops.linear_gelu`, `ops.linear_relu`) and loss +
gradient (`Loss.gradient`) are fused too, within one layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from mpitrain.layers.base import Layer


class GeluCut(NamedTuple):
    """A layer y = gelu(z) before a layer that takes its GELU.

    forward  (w, x, arena) -> (y, saved, slope), in place of the layer's own
    bare     layer with the same weights that ends in z; takes `saved` in backward
    """

    forward: Callable[..., tuple[Any, Any, Any]]
    bare: Layer


class Fusion(NamedTuple):
    """The fused calls that a layer offers. Each has one more argument, after the arena.

    adds_to_output  forward(w, x, arena, residual): y includes the residual in its sum
    adds_to_input   backward_input(w, dy, saved, arena, residual): dx includes it; `backward` alike
    takes_gelu      backward_input(w, dy, saved, arena, slope), of a layer with input x = gelu(z):
                    returns dz in place of dx, and may write over the slope; `backward` alike
    gelu_cut        of a layer y = gelu(z)
    """

    adds_to_output: bool = False
    adds_to_input: bool = False
    takes_gelu: bool = False
    gelu_cut: GeluCut | None = None


def fusion_of(layer: Any) -> Fusion:
    """Return the attribute `fusion` of a layer, or no fusion if it has none."""
    return getattr(layer, "fusion", Fusion())
