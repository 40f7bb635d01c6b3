"""The Layer protocol: descriptions of parameters, one forward, and two halves of backward.

    y, saved    = layer.forward(w, x, arena)
    dx, pending = layer.backward_input(w, dy, saved, arena)
    layer.backward_weight(pending, dw, arena)

A layer may also define both halves in one, `backward(w, dy, saved, dw, arena) -> dx`. The function
`backward` below then calls it. This is not possible where other work comes between the halves.

With an attribute `fusion` a layer offers to do work of its neighbours in the same pass over memory
(fusion.py). A method `saved_again` computes `saved` without the output (memory/recomputed.py).

With `is_rowwise` or `forward_next` it can compute only new tokens (incremental.py).

A layer that takes tokens has an attribute `vocab`, the number of tokens. A trainer checks that all
tokens are below it.

**Ownership of buffers.** A layer never writes to x, dy or the residual. `saved` may refer to x and
y, and `pending` to dy. A reference keeps an array alive. So the caller must not write to these
arrays before both halves have run. Two arrays are exceptions, and belong to the caller. One is
dx, to which `pending` never refers. The other is y of a layer with a true `output_is_free`. `backward_input` may
overwrite arrays that only `saved` refers to. `saved` and `pending` are each used once.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.machine.arena import Arena

Rectangle = tuple[slice, ...]
"""A region of a tensor: one slice per dim, with start >= 0, a stop, and no step."""


class Parameter(NamedTuple):
    """A logical tensor, or the region of it on this rank.

    name       dotted, relative to the layer that lists it; independent of the layout
    shape      of the whole logical tensor
    draw       (generator, shape) -> float64 array: the initial value of the whole tensor
    decayed    whether weight decay applies
    slices     the region on this rank, as rectangles that differ in at most one dim and are joined
               along it; queries, keys and values of some heads are three rectangles; None: the
               whole tensor
    trainable  whether the optimizer updates it
    holders    ranks of one replica with the same region: "tp" for replicated tensors, the full name
               for a tied tensor; empty: this rank alone
    partial    whether each of these ranks computes only a summand of the gradient; the summands are
               added before replicas reduce
    is_copy    whether this is a copy of a tied tensor that another stage owns and counts; its bits
               are equal
    coded      bytes of an element of the flat buffer, for a frozen weight that is stored in codes of
               8 bits (ops/int8_rows.py); 0: it is stored as numbers
    role       "embedding" or "head": a table that optimizers for hidden matrices leave out; empty:
               any other tensor
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
    role: str = ""
    coded: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the region on this rank."""
        if self.slices is None:
            return self.shape
        shapes = [tuple(s.stop - s.start for s in rectangle) for rectangle in self.slices]
        joined = self.joined_along
        return tuple(
            sum(shape[dim] for shape in shapes) if dim == joined else length
            for dim, length in enumerate(shapes[0])
        )

    def part_of(self, whole: np.ndarray) -> np.ndarray:
        """Return this rank's region of the whole tensor."""
        if self.slices is None:
            return whole
        return np.concatenate([whole[rectangle] for rectangle in self.slices], self.joined_along)

    @property
    def joined_along(self) -> int:
        """The dim in which the rectangles differ; 0 for a single rectangle."""
        assert self.slices is not None
        first = self.slices[0]
        return next(
            (dim for other in self.slices for dim in range(len(first)) if other[dim] != first[dim]),
            0,
        )


@dataclass
class Gradient:
    """The buffer of one parameter's gradient. The first writer of a step overwrites it, later
    writers add.
    """

    array: np.ndarray
    filled: bool = False

    def claim(self) -> bool:
        """Announce a write, and return whether the writer must add (True) or overwrite (False)."""
        accumulate, self.filled = self.filled, True
        return accumulate


Weights = Mapping[str, Any]
"""Named views of one unit's parameters, nested by the dots of their names: w["norm"]["gain"] is an
array.
"""

Gradients = Mapping[str, Any]
"""The same nesting as `Weights`, with a Gradient at every leaf.

A frozen tensor has no leaf: `"gain" in dw["norm"]` is False, and a layer skips its gradient.
"""


class Layer(Protocol):
    """A layer without state: one forward, and backward in two halves (as torch.autograd.Function).

    A pipeline may schedule the gradients of weights later than the gradients of inputs. The head of
    this file lists optional attributes and the ownership of buffers.

    Notes
    -----
    Shapes have leading dims for rows, such as (B, T), and one dim of features at the end.
    """

    @property
    def output_is_free(self) -> bool:
        """Whether the caller may write into y at once, because `saved` does not refer to it."""

    def parameters(self) -> list[Parameter]:
        """Return the tensors that this layer computes with.

        Returns
        -------
        list of Parameter
            With names relative to this layer.
        """

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of y.

        Parameters
        ----------
        shape : tuple of int
            The shape of x.

        Returns
        -------
        tuple of int
        """

    def forward(self, w: Weights, x: np.ndarray, arena: Arena) -> tuple[np.ndarray, Any]:
        """Compute the output.

        Parameters
        ----------
        w : Weights
            Views of this layer's parameters, by name.
        x : ndarray
            The input, which stays unchanged.
        arena : Arena
            Allocates y and scratch.

        Returns
        -------
        y : ndarray
            Of shape `output_shape(x.shape)`.
        saved : object
            The state for one call of `backward_input`.
        """

    def backward_input(
        self, w: Weights, dy: np.ndarray, saved: Any, arena: Arena
    ) -> tuple[np.ndarray | None, Any]:
        """Compute the gradient of the input.

        Parameters
        ----------
        w : Weights
            As in `forward`.
        dy : ndarray
            The gradient of y, which stays unchanged.
        saved : object
            The second result of `forward`.
        arena : Arena
            Allocates dx and scratch.

        Returns
        -------
        dx : ndarray or None
            Of the shape of x; None if the input has no gradient, as tokens.
        pending : object
            The state for one call of `backward_weight`.
        """

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Write the gradients of the parameters, or add to them.

        Parameters
        ----------
        pending : object
            The second result of `backward_input`.
        dw : Gradients
            One `Gradient` for each parameter that is not frozen. `Gradient.claim` decides between
            writing and adding.
        arena : Arena
            Allocates scratch.
        """


def backward(
    layer: Any,
    w: Weights,
    dy: np.ndarray,
    saved: Any,
    dw: Gradients,
    arena: Arena,
    fused: np.ndarray | None = None,
) -> np.ndarray | None:
    """Run both halves of a layer's backward, by its own `backward` if it has one.

    fused    the last argument of a fused call (`Fusion`); None: the call is not fused
    returns  dx, or None if the input has no gradient
    """
    # Unpacking arguments from a tuple would keep `saved` alive.
    if both := getattr(layer, "backward", None):
        return (
            both(w, dy, saved, dw, arena) if fused is None else both(w, dy, saved, dw, arena, fused)
        )
    half = layer.backward_input
    dx, pending = half(w, dy, saved, arena) if fused is None else half(w, dy, saved, arena, fused)
    del saved  # the weight half may reuse these buffers
    layer.backward_weight(pending, dw, arena)
    return dx


class Loss(Protocol):
    """The loss of logits (N, V) and their target classes (N,).

    Sums over rows are numbers, or arrays without dims that the device may still compute.
    """

    def gradient(
        self, logits: np.ndarray, targets: np.ndarray, scale: float, arena: Arena
    ) -> tuple[Any, np.ndarray]:
        """Compute the summed loss and the gradient of the logits.

        Parameters
        ----------
        logits : ndarray
            (N, V). The gradient may overwrite them.
        targets : ndarray
            (N,) int64, from 0 to V - 1.
        scale : float
            Factor of the gradient, but not of the returned loss.
        arena : Arena
            Allocates scratch.

        Returns
        -------
        loss : number or array without dims
            The sum over all rows.
        dlogits : ndarray
            (N, V), the gradient of scale times the sum.
        """

    def value(self, logits: np.ndarray, targets: np.ndarray, arena: Arena) -> Any:
        """Compute only the summed loss.

        Parameters
        ----------
        logits, targets, arena
            As in `gradient`, but the logits stay unchanged.

        Returns
        -------
        number or array without dims
        """

    def correct(self, logits: np.ndarray, targets: np.ndarray, arena: Arena) -> Any:
        """Count the rows that have their largest logit at the target.

        Parameters
        ----------
        logits, targets, arena
            As in `gradient`, but the logits stay unchanged.

        Returns
        -------
        number or array without dims
        """


@dataclass(frozen=True, eq=False)
class Unit:
    """One entry of a model's list of layers (as a module that FSDP wraps).

    ZeRO gathers a unit, and a pipeline places it, as a whole.

    Parameters
    ----------
    name : str
        Prefix of the full names of the parameters: unit "hidden" with a linear layer has
        "hidden.weight".
    layer : Layer
        For example one that `Plain` constructs.
    tied : mapping, optional
        {parameter of this layer: full name of a tensor in an earlier unit}: the layer uses that
        tensor instead.
    held : mapping, optional
        Set by a pipeline, for tied tensors on several stages.
    frozen : collection of str, optional
        Set by model.freeze: names of parameters.
    """

    name: str
    layer: Layer
    tied: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, Parameter] = field(default_factory=dict)
    frozen: Collection[str] = field(default_factory=frozenset)

    def full_name(self, parameter: Parameter) -> str:
        """Return the name of a parameter's tensor; for a tied one it is in the other unit."""
        return self.tied.get(parameter.name, f"{self.name}.{parameter.name}")


def are_units(made: Any) -> bool:
    """Return whether an object is a model: a list of units, at least one."""
    is_list = isinstance(made, Sequence) and len(made) > 0
    return is_list and all(isinstance(unit, Unit) for unit in made)
