"""Layers made of layers: one after another, and around a shortcut. They take what these offer: see base.py."""

from itertools import pairwise
from typing import Any

from mpitrain.layers.base import Parameter, backward
from mpitrain.ops import Writes
from mpitrain.ops.reference import add

NOTHING: dict = {}


class Sequential:
    """The named children, at least one, one after another; a child's parameters are found under its name."""

    def __init__(self, **children: Any):
        first, *_, last = (*children, *children)
        self.children, self._first, self._last = children, first, last
        self.output_is_free = children[last].output_is_free
        self.adds_to_output = getattr(children[last], "adds_to_output", False)
        self.adds_to_input = getattr(children[first], "adds_to_input", False)
        self.vocab = getattr(children[first], "vocab", 0)
        self._back: dict[str, Any] = dict(children)
        self._gelus, self._takers = set(), set()
        for (name, child), (after, taker) in pairwise(children.items()):
            if getattr(taker, "takes_gelu", False) and (without := getattr(child, "without_gelu", None)):
                self._back[name] = without
                self._gelus.add(name)
                self._takers.add(after)

    def parameters(self):
        """Every child's, prefixed by the child's name."""
        return [
            parameter._replace(name=f"{name}.{parameter.name}")
            for name, child in self.children.items() for parameter in child.parameters()
        ]

    def output_shape(self, shape):
        for child in self.children.values():
            shape = child.output_shape(shape)
        return shape

    def forward(self, w, x, arena, residual=None):
        saved = []
        for name, child in self.children.items():
            own = w.get(name, NOTHING)
            adds = residual is not None and name == self._last
            x, kept = child.forward(own, x, arena, residual=residual) if adds else child.forward(own, x, arena)
            saved.append(kept)
        return x, saved

    def backward_input(self, w, dy, saved, arena, residual=None):
        pending = {}
        for name, child in reversed(self._back.items()):
            # Popped, so that each child's buffers return to the arena before the next child asks for some.
            own = w.get(name, NOTHING)
            if name in self._takers:
                dy, pending[name] = child.backward_input(own, dy, self._popped(name, saved), arena, gelu=saved[-1][1])
            elif residual is not None and name == self._first:
                dy, pending[name] = child.backward_input(own, dy, self._popped(name, saved), arena, residual=residual)
            else:
                dy, pending[name] = child.backward_input(own, dy, self._popped(name, saved), arena)
        return dy, pending

    def backward_weight(self, pending, dw, arena):
        while pending:
            name, wanted = pending.popitem()
            self.children[name].backward_weight(wanted, dw.get(name, NOTHING), arena)

    def backward(self, w, dy, saved, dw, arena, residual=None):
        for name, child in reversed(self._back.items()):
            own, gradients = w.get(name, NOTHING), dw.get(name, NOTHING)
            if name in self._takers:
                dy, pending = child.backward_input(own, dy, self._popped(name, saved), arena, gelu=saved[-1][1])
                child.backward_weight(pending, gradients, arena)
                del pending
            else:
                added = residual if name == self._first else None
                dy = backward(child, own, dy, self._popped(name, saved), gradients, arena, added)
        return dy

    def _popped(self, name: str, saved: list) -> Any:
        """What the child saved, which is the last in the list; of one that goes back without its GELU, what concerns the rest."""
        own = saved.pop()
        return own[0] if name in self._gelus else own


class Residual:
    """x + inner(x), as a pass of its own where the inner layer does not offer it. Adds no level to the names."""

    output_is_free = True

    def __init__(self, inner: Any, add: Writes = add):
        """inner: a layer; add: the operation."""
        self.inner, self.add = inner, add
        self._output_is_sum, self._input_is_sum = getattr(inner, "adds_to_output", False), getattr(inner, "adds_to_input", False)

    def parameters(self) -> list[Parameter]:
        """Those of the inner layer."""
        return self.inner.parameters()

    def output_shape(self, shape):
        return shape

    def forward(self, w, x, arena):
        if self._output_is_sum:
            return self.inner.forward(w, x, arena, residual=x)
        y, saved = self.inner.forward(w, x, arena)
        total = y if self.inner.output_is_free else arena.take(y.shape, y.dtype)
        self.add(y, x, total, arena)
        return total, saved

    def backward_input(self, w, dy, saved, arena):
        if self._input_is_sum:
            return self.inner.backward_input(w, dy, saved, arena, residual=dy)
        dx, pending = self.inner.backward_input(w, dy, saved, arena)
        self.add(dx, dy, dx, arena)
        return dx, pending

    def backward_weight(self, pending, dw, arena):
        self.inner.backward_weight(pending, dw, arena)

    def backward(self, w, dy, saved, dw, arena):
        if self._input_is_sum:
            return backward(self.inner, w, dy, saved, dw, arena, dy)
        dx = backward(self.inner, w, dy, saved, dw, arena)
        self.add(dx, dy, dx, arena)
        return dx
