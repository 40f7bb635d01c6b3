"""Recomputation of activations (gradient checkpointing, Chen et al. 2016, arXiv:1604.06174).

A recomputed layer saves only its input, and the micro-batch. The input half of its backward first computes the other
activations again. A layer with a method `saved_again(w, x, now, arena) -> saved` skips work that only
its output needs: a linear layer its product, a row-parallel layer its all-reduce.

memory.recompute  saved for the backward     computed again in the backward
none              all activations            nothing
attention         all but probabilities      the scores and probabilities of attention
unit              the input of each unit     the forward of the unit, but for its last product
N                 the input of each N units  the forward of N units, but for the last product
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpitrain.layers.base import Gradients, Now, Parameter, Unit, Weights, backward, forward_only
from mpitrain.layers.incremental import Past, forward_next
from mpitrain.machine.backend import Arena
from mpitrain.ops import Ops


def saved_again(layer: Any, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
    """Return the state that a layer's forward saves, by its own `saved_again` if it has one."""
    offer = getattr(layer, "saved_again", None)
    return offer(w, x, now, arena) if offer else layer.forward(w, x, now, arena)[1]


def state_of(ops: Ops, x: Any, weight: Any, bias: Any, arena: Arena) -> Any:
    """Return the state that `ops.linear` saves, without its product.

    The product of no rows has the same state, but for its input.
    """
    _, state = ops.linear(x[:0], weight, bias, arena)
    return with_input(state, x)


def input_of(saved: Any) -> Any:
    """Return the input in a linear operation's saved state.

    The state is the input itself, or a tuple; the first entry of the tuple is again such a state.
    """
    return input_of(saved[0]) if isinstance(saved, tuple) else saved


def with_input(saved: Any, x: Any) -> Any:
    """Return a linear operation's saved state with its input replaced by x."""
    return (with_input(saved[0], x), *saved[1:]) if isinstance(saved, tuple) else x


class Recomputed:
    """A layer that saves only its input (as torch.utils.checkpoint).

    inner  the layer; its outputs and gradients stay the same, bit for bit
    """

    def __init__(self, inner: Any):
        self.inner = inner
        self.output_is_free = inner.output_is_free

    def parameters(self) -> list[Parameter]:
        return self.inner.parameters()

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.inner.output_shape(shape)

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        return self.inner.forward(w, x, now, arena)[0], (x, now)

    def inner_layers(self) -> list[Any]:
        return [self.inner]

    def forward_next(self, w: Weights, x: Any, past: Past, arena: Arena) -> Any:
        return forward_next(self.inner, w, x, past, arena)

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        saved = self._again(w, saved, arena)
        return self.inner.backward_input(w, dy, saved, arena)

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        self.inner.backward_weight(pending, dw, arena)

    def backward(self, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena) -> Any:
        saved = self._again(w, saved, arena)
        return backward(self.inner, w, dy, saved, dw, arena)

    def _again(self, w: Weights, saved: Any, arena: Arena) -> Any:
        x, now = saved
        return saved_again(self.inner, w, x, now._replace(is_again=True), arena)


def with_recomputation(chunks: Sequence[Sequence[Unit]], size: int) -> list[list[Unit]]:
    """Return the chunks of a model with `size` units in each recomputed segment.

    A layer that takes tokens, and the model's last unit, save all activations. Units that run no
    backward save nothing anyway. The layer of a single unit is wrapped in `Recomputed`; of several
    units the stage does the same, since only it has the parameters of each: they all have the same
    list as their `Unit.segment`.

    size  0: nothing is computed again
    """
    model = [unit for chunk in chunks for unit in chunk]
    trained = model[forward_only(model) : -1]

    def is_recomputed(unit: Unit) -> bool:
        return unit in trained and not getattr(unit.layer, "vocab", 0)

    wrapped = []
    for units in chunks:
        chunk = list(units)
        again = [index for index, unit in enumerate(chunk) if is_recomputed(unit)] if size else []
        for first in range(0, len(again), max(1, size)):
            indices = again[first : first + size]
            names = [chunk[index].name for index in indices]
            for index in indices:
                unit = chunk[index]
                chunk[index] = (
                    replace(unit, layer=Recomputed(unit.layer))
                    if len(indices) == 1
                    else replace(unit, segment=names)
                )
        wrapped.append(chunk)
    return wrapped
