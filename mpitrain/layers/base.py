"""What a layer is: parameter descriptions, one forward and two backward halves.

    y, saved    = layer.forward(w, x, arena)
    dx, pending = layer.backward_input(w, dy, saved, arena)
    layer.backward_weight(pending, dw)

A layer borrows its arguments: it never writes to x or dy. `saved` may refer to x and y, and `pending` to dy; a reference
keeps an array alive. So the caller writes into none of them until the halves have run, with two exceptions: dx, to which
`pending` never refers, and y of a layer whose `output_is_free` belong to the caller.
`backward_input` may overwrite what `saved` alone holds; `saved` and `pending` are each used once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.machine.arena import Arena


class Parameter(NamedTuple):
    """One logical tensor, or the part of it that this rank holds.

    name      dotted, relative to the layer that lists it; never depends on the layout
    shape     of the whole logical tensor
    draw      (generator, shape) -> float64 array: the initial value of the whole tensor
    decayed   whether weight decay applies
    slices    the part held here, one slice per dim; None for the whole
    trainable whether the optimizer updates it
    """

    name: str
    shape: tuple[int, ...]
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    decayed: bool
    slices: tuple[slice, ...] | None = None
    trainable: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part held here."""
        if self.slices is None:
            return self.shape
        return tuple(len(range(*s.indices(n))) for s, n in zip(self.slices, self.shape, strict=True))


@dataclass
class Gradient:
    """Where one parameter's gradient is summed. The first writer of a step overwrites, later ones add."""

    array: np.ndarray
    filled: bool = False

    def claim(self) -> bool:
        """Announce a write: True if the writer must add to what is there, False if it must overwrite."""
        accumulate, self.filled = self.filled, True
        return accumulate


Weights = Mapping[str, Any]
"""Named views of one unit's parameters, nested by the dots of their names: w["norm"]["gain"] is an array."""

Gradients = Mapping[str, Any]
"""The same nesting, with a Gradient at every leaf."""


class Layer(Protocol):
    """One forward and two backward halves, as the head of this file says."""

    @property
    def output_is_free(self) -> bool:
        """Whether the caller may write into y as soon as it is returned: `saved` does not refer to it."""

    def parameters(self) -> list[Parameter]:
        """The tensors this layer computes with, named relative to it."""

    def forward(self, w: Weights, x: np.ndarray, arena: Arena) -> tuple[np.ndarray, Any]:
        """The output, and whatever `backward_input` will need."""

    def backward_input(self, w: Weights, dy: np.ndarray, saved: Any, arena: Arena) -> tuple[np.ndarray | None, Any]:
        """The gradient of the input (None where the input has none), and whatever the weight half still needs."""

    def backward_weight(self, pending: Any, dw: Gradients) -> None:
        """Write or add the gradients of the parameters, as `Gradient.claim` says."""


class Unit(NamedTuple):
    """One entry of a model's list: the grain at which parameters are stored, moved and sharded.

    name   prefix of its parameters' full names: "blocks.0.attention" holds "blocks.0.attention.qkv.weight"
    layer  what it computes
    tied   {own parameter name: full name of the tensor, in an earlier unit, that it shares}
    """

    name: str
    layer: Layer
    tied: Mapping[str, str] = {}
