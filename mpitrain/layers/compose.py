"""Layers made of layers: one after another, and around a shortcut."""

from mpitrain.layers.base import Layer, Parameter, backward
from mpitrain.ops import Writes
from mpitrain.ops.reference import add

NOTHING: dict = {}


class Sequential:
    """The named children, at least one, one after another; a child's parameters are found under its name."""

    def __init__(self, **children: Layer):
        self.children = children
        self.output_is_free = list(children.values())[-1].output_is_free

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

    def forward(self, w, x, arena):
        saved = []
        for name, child in self.children.items():
            x, kept = child.forward(w.get(name, NOTHING), x, arena)
            saved.append(kept)
        return x, saved

    def backward_input(self, w, dy, saved, arena):
        pending = {}
        for name, child in reversed(self.children.items()):
            # Popped, so that each child's buffers return to the arena before the next child asks for some.
            dy, pending[name] = child.backward_input(w.get(name, NOTHING), dy, saved.pop(), arena)
        return dy, pending

    def backward_weight(self, pending, dw, arena):
        while pending:
            name, wanted = pending.popitem()
            self.children[name].backward_weight(wanted, dw.get(name, NOTHING), arena)

    def backward(self, w, dy, saved, dw, arena):
        for name, child in reversed(self.children.items()):
            dy = backward(child, w.get(name, NOTHING), dy, saved.pop(), dw.get(name, NOTHING), arena)
        return dy


class Residual:
    """x + inner(x). Adds no level to the names."""

    output_is_free = True

    def __init__(self, inner: Layer, add: Writes = add):
        """add: the operation."""
        self.inner, self.add = inner, add

    def parameters(self) -> list[Parameter]:
        """Those of the inner layer."""
        return self.inner.parameters()

    def output_shape(self, shape):
        return shape

    def forward(self, w, x, arena):
        y, saved = self.inner.forward(w, x, arena)
        total = y if self.inner.output_is_free else arena.take(y.shape, y.dtype)
        self.add(y, x, total, arena)
        return total, saved

    def backward_input(self, w, dy, saved, arena):
        dx, pending = self.inner.backward_input(w, dy, saved, arena)
        self.add(dx, dy, dx, arena)
        return dx, pending

    def backward_weight(self, pending, dw, arena):
        self.inner.backward_weight(pending, dw, arena)

    def backward(self, w, dy, saved, dw, arena):
        dx = backward(self.inner, w, dy, saved, dw, arena)
        self.add(dx, dy, dx, arena)
        return dx
