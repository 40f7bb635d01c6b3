"""Classifiers as flat lists of units: a multi-layer perceptron and a convolutional network."""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Sequence
from itertools import cycle, pairwise

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit, normal
from mpitrain.layers.plain import Plain, Sequential


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

    A unit is a layer of weights.

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
    head = last(widths[-1], classes, normal((2 / widths[-1]) ** 0.5), role="head")
    return [*units, Unit("head", head)]


def cnn(
    layers: Plain,
    *,
    shape: Sequence[int],
    channels: Sequence[int],
    hidden: Sequence[int],
    classes: int,
    kernel: int = 3,
    pool: int = 2,
    dropout: float = 0.0,
) -> list[Unit]:
    """Return the units of a convolutional network (LeCun et al. 1998): convolutions, then an MLP.

    It maps images (B, *shape) to logits (B, classes). Weights are drawn as those of `mlp`.

    Parameters
    ----------
    shape : sequence of int
        Channels, rows and columns of an image.
    channels : sequence of int
        Of each convolution's output; ReLU and a max-pooling follow each convolution.
    kernel, pool : int
        Rows and columns of each kernel, an odd number, and of each pooling window.

    Others as of `mlp`.

    Raises
    ------
    ConfigError
        If an image is too small for the max-poolings.
    """
    depth, rows, columns = shape
    if min(rows, columns) < pool ** len(channels):
        raise ConfigError(
            f"{len(channels)} max-poolings by {pool} need images of {pool ** len(channels)} rows and columns, "
            f"but they have {rows} x {columns}.",
            "List fewer numbers in model.channels, or lower model.pool.",
        )
    units = []
    for i, (inputs, outputs) in enumerate(pairwise([depth, *channels])):
        conv = layers.conv if i else layers.pixel_conv
        draw = normal((2 / (kernel * kernel * inputs)) ** 0.5)
        children = {
            "conv": conv(inputs, outputs, kernel, draw, "relu"),
            "pool": layers.max_pool(pool),
        }
        if i == len(channels) - 1:
            children["flat"] = layers.flatten()
        units.append(Unit(f"convolutions.{i}", Sequential(**children)))
    shrunk = pool ** len(channels)
    features = (rows // shrunk) * (columns // shrunk) * channels[-1]
    rest = mlp(layers, features=features, hidden=hidden, classes=classes, dropout=dropout)
    return [*units, *rest]
