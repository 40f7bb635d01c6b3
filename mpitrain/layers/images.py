"""Layers of images: convolution, max-pooling and flattening, of activations (B, H, W, C).

B images, H rows, W columns, C channels. Channels come last, so a convolution is a product of rows.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.layers.base import Draw, Gradients, Now, Parameter, Weights, zeros
from mpitrain.machine.backend import Arena
from mpitrain.ops import Ops


class Conv:
    """A convolution with optional ReLU (as torch.nn.Conv2d with padding="same"), (B, H, W, inputs)
    to (B, H, W, outputs).

    weight      (outputs, kernel x kernel x inputs), the last dim by row, column and channel
    bias        (outputs,)
    activation  None or "relu"
    """

    def __init__(
        self,
        ops: Ops,
        inputs: int,
        outputs: int,
        kernel: int,
        draw: Draw,
        activation: str | None = None,
    ):
        self.ops, self.inputs, self.outputs, self.kernel = ops, inputs, outputs, kernel
        self.draw, self.activation = draw, activation
        self.output_is_free = activation is None

    def parameters(self) -> list[Parameter]:
        shape = self.outputs, self.kernel * self.kernel * self.inputs
        return [
            Parameter("weight", shape, self.draw, decayed=True),
            Parameter("bias", (self.outputs,), zeros, decayed=False),
        ]

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:-1], self.outputs)

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        y, saved = self.ops.conv2d(x, w["weight"], w["bias"], self.kernel, arena)
        if self.activation is None:
            return y, (saved, None)
        y, active = self.ops.relu(y, arena)
        return y, (saved, active)

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        dz, pending = self._before_activation(dy, saved, arena)
        return self.ops.conv2d_backward_input(dz, w["weight"], self.kernel, arena), pending

    def _before_activation(self, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        """Return the gradient of the convolution's output, and the state for `backward_weight`."""
        x, active = saved
        dz = dy if active is None else self.ops.relu_backward(dy, active, arena)
        return dz, (dz, x)

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        dz, x = pending
        if "weight" in dw:
            own = dw["weight"]
            self.ops.conv2d_backward_weight(dz, x, own.array, self.kernel, own.claim(), arena)
        if "bias" in dw:
            self.ops.conv2d_backward_bias(dz, dw["bias"].array, dw["bias"].claim(), arena)


class PixelConv(Conv):
    """A convolution of pixels (B, C, H, W), as data sources give them. The input has no gradient."""

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        images, _, rows, columns = shape
        return images, rows, columns, self.outputs

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        return super().forward(w, x.transpose(0, 2, 3, 1), now, arena)

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        return None, self._before_activation(dy, saved, arena)[1]


class MaxPool:
    """The largest number of each window (as torch.nn.MaxPool2d). (B, H, W, C) becomes (B, H //
    size, W // size, C).
    """

    output_is_free = True

    def __init__(self, ops: Ops, size: int):
        self.ops, self.size = ops, size

    def parameters(self) -> list[Parameter]:
        return []

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        images, rows, columns, channels = shape
        return images, rows // self.size, columns // self.size, channels

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        return self.ops.max_pool(x, self.size, arena)

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, None]:
        return self.ops.max_pool_backward(dy, saved, self.size, arena), None

    def backward_weight(self, pending: None, dw: Gradients, arena: Arena) -> None:
        """Do nothing: there are no parameters."""


class Flatten:
    """A view of each image as a row of features (as torch.nn.Flatten), (B, ...) to (B, features)."""

    output_is_free = False

    def parameters(self) -> list[Parameter]:
        return []

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return shape[0], math.prod(shape[1:])

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        return x.reshape(self.output_shape(x.shape)), x.shape

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, None]:
        return dy.reshape(saved), None

    def backward_weight(self, pending: None, dw: Gradients, arena: Arena) -> None:
        """Do nothing: there are no parameters."""
