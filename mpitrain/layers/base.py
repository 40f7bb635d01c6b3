"""What a layer is: parameter descriptions, one forward and two backward halves.

    y, saved    = layer.forward(w, x, arena)
    dx, pending = layer.backward_input(w, dy, saved, arena)
    layer.backward_weight(pending, dw, arena)

A layer may have both halves in one as well, `backward(w, dy, saved, dw, arena) -> dx`, which is then used wherever nothing is to
come between them: see `backward` below.

A layer may offer to do more in the same pass over memory, by an attribute that is true:

    adds_to_output    y, saved = layer.forward(w, x, arena, residual=r): y has r in its sum
    adds_to_input     dx, pending = layer.backward_input(w, dy, saved, arena, residual=r), and so `backward`: dx has r in its sum
    without_gelu      of y = gelu(z): the layer of the same weights that ends in z; what that would have saved is saved[0]
    takes_gelu        dz, pending = layer.backward_input(w, dy, saved, arena, gelu=s[1]) of a layer whose x was gelu(z), saved
                      with s: what follows is the backward of `without_gelu`, and s[1] is used up

A layer whose x is tokens says how many there are, as `vocab`: a trainer lets no other token reach it.

A layer borrows its arguments: it never writes to x or dy. `saved` may refer to x and y, and `pending` to dy; a reference
keeps an array alive. So the caller writes into none of them until the halves have run, with two exceptions: dx, to which
`pending` never refers, and y of a layer whose `output_is_free` belong to the caller.
`backward_input` may overwrite what `saved` alone holds, and never the residual; `saved` and `pending` are each used once.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from mpitrain.machine.arena import Arena

Rectangle = tuple[slice, ...]
"""Part of a tensor: one slice per dim, from 0 <= start to stop, without a step."""


class Parameter(NamedTuple):
    """One logical tensor, or the part of it that this rank holds.

    name      dotted, relative to the layer that lists it; never depends on the layout
    shape     of the whole logical tensor
    draw      (generator, shape) -> float64 array: the initial value of the whole tensor
    decayed   whether weight decay applies
    slices    the part held here: rectangles that differ in one dim at most, joined along it (queries, keys and values of some
              heads are three); None for the whole
    trainable whether the optimizer updates it
    holders   the ranks of one replica that hold the same part: "tp", or of a tied tensor its full name; empty: this rank alone
    partial   whether each holder computes only part of the gradient: their parts are summed before replicas are
    is_copy   of a tied tensor that another stage owns: with the same bits, and counted there
    """

    name: str
    shape: tuple[int, ...]
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    decayed: bool
    slices: tuple[Rectangle, ...] | None = None
    trainable: bool = True
    holders: str = ""
    partial: bool = False
    is_copy: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part held here."""
        if self.slices is None:
            return self.shape
        shapes = [tuple(s.stop - s.start for s in rectangle) for rectangle in self.slices]
        joined = self._joined_along
        return tuple(
            sum(shape[dim] for shape in shapes) if dim == joined else length
            for dim, length in enumerate(shapes[0])
        )

    def part_of(self, whole: np.ndarray) -> np.ndarray:
        """The part held here of the whole tensor."""
        if self.slices is None:
            return whole
        return np.concatenate([whole[rectangle] for rectangle in self.slices], self._joined_along)

    @property
    def _joined_along(self) -> int:
        """The dim in which the rectangles differ; 0 if there is but one."""
        assert self.slices is not None
        first = self.slices[0]
        return next(
            (dim for other in self.slices for dim in range(len(first)) if other[dim] != first[dim]),
            0,
        )


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

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of y for an x of this shape."""

    def forward(self, w: Weights, x: np.ndarray, arena: Arena) -> tuple[np.ndarray, Any]:
        """The output, and whatever `backward_input` will need."""

    def backward_input(
        self, w: Weights, dy: np.ndarray, saved: Any, arena: Arena
    ) -> tuple[np.ndarray | None, Any]:
        """The gradient of the input (None where the input has none), and whatever the weight half still needs."""

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Write or add the gradients of the parameters, as `Gradient.claim` says."""


def backward(
    layer: Layer,
    w: Weights,
    dy: np.ndarray,
    saved: Any,
    dw: Gradients,
    arena: Arena,
    residual: np.ndarray | None = None,
) -> np.ndarray | None:
    """Both halves of a layer, in its own way where it has one; returns the gradient of the input.

    residual: where the layer `adds_to_input`, or None
    """
    both, half = getattr(layer, "backward", None), cast(Any, layer).backward_input
    if both:
        return (
            both(w, dy, saved, dw, arena)
            if residual is None
            else both(w, dy, saved, dw, arena, residual=residual)
        )
    dx, pending = (
        half(w, dy, saved, arena)
        if residual is None
        else half(w, dy, saved, arena, residual=residual)
    )
    del saved  # its buffers may serve the weight half
    layer.backward_weight(pending, dw, arena)
    return dx


class Loss(Protocol):
    """The end of a model: what its logits (N, V) say of the right classes, the targets (N,).

    Sums over the rows are numbers, or arrays without dims that the device may still be computing.
    """

    def gradient(
        self, logits: np.ndarray, targets: np.ndarray, scale: float, arena: Arena
    ) -> tuple[Any, np.ndarray]:
        """The summed loss, and the gradient of scale x that sum, which may be written over the logits."""

    def value(self, logits: np.ndarray, targets: np.ndarray, arena: Arena) -> Any:
        """The summed loss alone; logits stay as they are."""

    def correct(self, logits: np.ndarray, targets: np.ndarray, arena: Arena) -> Any:
        """How many rows have their largest logit at the target; logits stay as they are."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One entry of a model's list: what ZeRO gathers and pipelines place as a whole (as FSDP's wrapped module).

    Parameters
    ----------
    name : str
        Prefix of the full names of its parameters: unit "hidden" of a linear layer has "hidden.weight".
    layer : Layer
        For example one that `Plain` makes.
    tied : mapping, optional
        {parameter of this layer: full name of the tensor, in an earlier unit, in its place}.
    held : mapping, optional
        Set by a pipeline, for tied tensors that other stages hold, too.
    """

    name: str
    layer: Layer
    tied: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, Parameter] = field(default_factory=dict)

    def full_name(self, parameter: Parameter) -> str:
        """The name of the tensor that is this parameter of the layer."""
        return self.tied.get(parameter.name, f"{self.name}.{parameter.name}")
