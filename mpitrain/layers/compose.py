"""Layers made of layers: sequences, and residual connections. They use fusions (base.py)."""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Fusion, Gradients, Now, Parameter, Weights, backward, fusion_of
from mpitrain.layers.incremental import Past, forward_next
from mpitrain.layers.recomputed import saved_again
from mpitrain.machine.arena import Arena
from mpitrain.ops.reference.layers import add as add_arrays

NOTHING: dict = {}


class Sequential:
    """Layers one after another (as torch.nn.Sequential): `Sequential(a, b)` or `Sequential(up=a,
    down=b)`.

    Parameters
    ----------
    *layers : Layer
        At least one, unless `children` are given. Their names are "0", "1" and so on.
    **children : Layer
        Layers with names. The parameters of a child have its name as prefix: "up.weight".

    Raises
    ------
    ConfigError
        If there is no layer, if only some layers have names, or if a child is no layer.
    """

    def __init__(self, *layers: Any, **children: Any):
        if bool(layers) == bool(children):
            raise ConfigError(
                "Sequential takes layers, all of them with names or none, but got "
                f"{len(layers)} without and {len(children)} with names.",
                "Write Sequential(a, b) or Sequential(up=a, down=b).",
            )
        children = children or {str(number): layer for number, layer in enumerate(layers)}
        for name, child in children.items():
            if not hasattr(child, "forward"):
                raise ConfigError(
                    f"Sequential takes layers, but {name!r} is of type {type(child).__name__}.",
                    "Write Sequential(a, b); with a list of layers Sequential(*layers).",
                )
        first, *_, last = (*children, *children)
        self.children, self._last = children, last
        self.output_is_free = children[last].output_is_free
        self.vocab = getattr(children[first], "vocab", 0)
        offers = {name: fusion_of(child) for name, child in children.items()}
        self.fusion = Fusion(offers[last].adds_to_output, offers[first].adds_to_input)
        back: dict[str, Any] = dict(children)
        cuts, takers = dict[str, Any](), set()
        for (name, offer), (after, next_offer) in pairwise(offers.items()):
            if offer.gelu_cut and next_offer.takes_gelu:
                cuts[name], back[name] = offer.gelu_cut
                takers.add(after)
        # The last child is not in this list. `cut` is the forward of a child without its GELU, which
        # the next child computes. All other children have None.
        self._forwards = [(name, child, cuts.get(name)) for name, child in children.items()][:-1]
        # The first boolean: the child takes the slope of the GELU from its neighbour. The second
        # one: the child adds the residual to its result.
        self._backwards = [
            (name, child, name in takers, name == first) for name, child in reversed(back.items())
        ]

    def parameters(self) -> list[Parameter]:
        """Return the parameters of all children, with the children's names as prefixes."""
        return [
            parameter._replace(name=f"{name}.{parameter.name}")
            for name, child in self.children.items()
            for parameter in child.parameters()
        ]

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the output for an input of this shape."""
        for child in self.children.values():
            shape = child.output_shape(shape)
        return shape

    def forward(
        self, w: Weights, x: Any, now: Now, arena: Arena, residual: Any = None
    ) -> tuple[Any, Any]:
        """Return the output for x, and the state for `backward_input`.

        residual is added to the output if the last child offers this. The state is a list of the
        children's states. If a child leaves its GELU to the next one, the slope of this GELU comes
        after its state.
        """
        x, saved = self._before_last(w, x, now, arena)
        forward, own = self.children[self._last].forward, w.get(self._last, NOTHING)
        x, state = (
            forward(own, x, now, arena)
            if residual is None
            else forward(own, x, now, arena, residual)
        )
        return x, [*saved, state]

    def saved_again(self, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
        """Return `saved` of `forward`."""
        x, saved = self._before_last(w, x, now, arena)
        last = self.children[self._last]
        return [*saved, saved_again(last, w.get(self._last, NOTHING), x, now, arena)]

    def inner_layers(self) -> list[Any]:
        """Return the children."""
        return [*self.children.values()]

    def forward_next(
        self, w: Weights, x: Any, past: Past, arena: Arena, residual: Any = None
    ) -> Any:
        """Return the output for new tokens, plus the residual as `forward`."""
        for name, child in self.children.items():
            fused = () if residual is None or name != self._last else (residual,)
            x = forward_next(child, w.get(name, NOTHING), x, past, arena, *fused)
        return x

    def _before_last(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, list[Any]]:
        """Return the input of the last child, and the states of the children before it."""
        saved: list[Any] = []
        for name, child, cut in self._forwards:
            x, *state = (cut or child.forward)(w.get(name, NOTHING), x, now, arena)
            saved += state
        return x, saved

    def backward_input(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, residual: Any = None
    ) -> tuple[Any, Any]:
        """Return the gradient of the input, and the state for `backward_weight`.

        residual is added to the gradient if the first child offers this.
        """
        pending = {}
        for name, child, takes_slope, is_first in self._backwards:
            # `pop` drops the last reference, so this child's buffers return to the arena before
            # the next child allocates. `saved` has a slope below the state of the child that takes it.
            own = w.get(name, NOTHING)
            fused = saved.pop(-2) if takes_slope else residual if is_first else None
            dy, pending[name] = (
                child.backward_input(own, dy, saved.pop(), arena)
                if fused is None
                else child.backward_input(own, dy, saved.pop(), arena, fused)
            )
        return dy, pending

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Write the gradients of all parameters, or add to them."""
        while pending:
            name, wanted = pending.popitem()
            self.children[name].backward_weight(wanted, dw.get(name, NOTHING), arena)

    def backward(
        self, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena, residual: Any = None
    ) -> Any:
        """Run both halves of backward, child by child, and return the gradient of the input."""
        for name, child, takes_slope, is_first in self._backwards:
            own, gradients = w.get(name, NOTHING), dw.get(name, NOTHING)
            fused = saved.pop(-2) if takes_slope else residual if is_first else None
            dy = backward(child, own, dy, saved.pop(), gradients, arena, fused)
        return dy


class Residual:
    """A residual connection, x + inner(x), with the parameter names of the inner layer.

    Parameters
    ----------
    inner : Layer
        Its output has the shape of its input.
    add : callable, optional
        (a, b, sum, arena) writes a + b to sum. By default NumPy's on the host; `Plain.residual`
        passes the device's.
    """

    output_is_free = True

    def __init__(self, inner: Any, add: Callable[..., None] | None = None):
        self.inner, self.add = inner, add or add_arrays
        self._fusion = fusion_of(inner)

    def parameters(self) -> list[Parameter]:
        """Return the parameters of the inner layer."""
        return self.inner.parameters()

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the input."""
        return shape

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        """Return the output for x, and the state for `backward_input`."""
        if self._fusion.adds_to_output:
            return self.inner.forward(w, x, now, arena, x)
        y, saved = self.inner.forward(w, x, now, arena)
        return self._plus(x, y, arena), saved

    def inner_layers(self) -> list[Any]:
        """Return the inner layer."""
        return [self.inner]

    def forward_next(self, w: Weights, x: Any, past: Past, arena: Arena) -> Any:
        """Return the output for new tokens."""
        if self._fusion.adds_to_output:
            return forward_next(self.inner, w, x, past, arena, x)
        return self._plus(x, forward_next(self.inner, w, x, past, arena), arena)

    def _plus(self, x: Any, y: Any, arena: Arena) -> Any:
        """Return x + y, written over y if that is free."""
        total = y if self.inner.output_is_free else arena.take(y.shape, y.dtype)
        self.add(y, x, total, arena)
        return total

    def saved_again(self, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
        """Return `saved` of `forward`."""
        return saved_again(self.inner, w, x, now, arena)

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        """Return the gradient of the input, and the state for `backward_weight`."""
        if self._fusion.adds_to_input:
            return self.inner.backward_input(w, dy, saved, arena, dy)
        dx, pending = self.inner.backward_input(w, dy, saved, arena)
        self.add(dx, dy, dx, arena)
        return dx, pending

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Write the gradients of the parameters, or add to them."""
        self.inner.backward_weight(pending, dw, arena)

    def backward(self, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena) -> Any:
        """Run both halves of backward, and return the gradient of the input."""
        if self._fusion.adds_to_input:
            return backward(self.inner, w, dy, saved, dw, arena, dy)
        dx = backward(self.inner, w, dy, saved, dw, arena)
        self.add(dx, dy, dx, arena)
        return dx
