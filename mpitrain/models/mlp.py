"""A multi-layer perceptron as a flat list of units: one per layer of weights."""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Sequence
from itertools import cycle, pairwise

from mpitrain.layers.base import Unit
from mpitrain.layers.initial import normal
from mpitrain.layers.plain import Plain


def mlp(
    layers: Plain,
    *,
    features: int,
    hidden: Sequence[int],
    classes: int,
    activation: str = "relu",
    dropout: float = 0.0,
) -> list[Unit]:
    """Return the units of a multi-layer perceptron: features (B, features) to logits (B, classes).

    Parameters
    ----------
    layers : Plain
        Makes the layers.
    features, classes : int
        Columns of the inputs and of the logits.
    hidden : sequence of int
        Widths of the hidden layers.
    activation : {"relu", "gelu"}
        Activation of the hidden layers.
    dropout : float
        Rate of dropout after each activation.

    Notes
    -----
    Weights are drawn with variance 2 / inputs (He et al. 2015, section 2.2); biases are 0.
    """
    widths = [features, *hidden]
    # Column- and row-parallel layers alternate, as in Megatron: each rank's outputs of the first
    # are its inputs of the second.
    turns = cycle((layers.column_linear, layers.row_linear))
    units = []
    for i, ((inputs, outputs), linear) in enumerate(zip(pairwise(widths), turns, strict=False)):
        layer = linear(inputs, outputs, normal((2 / inputs) ** 0.5), activation)
        columns = 0 if i % 2 else outputs
        units.append(Unit(f"hidden.{i}", layers.dropped(layer, dropout, columns)))
    last = layers.row_linear if len(hidden) % 2 else layers.linear
    head = last(widths[-1], classes, normal((2 / widths[-1]) ** 0.5))
    head.role = "head"
    return [*units, Unit("head", head)]
