"""Dropout (Srivastava et al. 2014): alone, and after another layer.

The mask is a function of (seed, step, row, layer, element), so it is the same in any layout. It is
not saved: the backward draws it again. Where `now.trains` is False, nothing is dropped.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Iterator, Sequence
from itertools import pairwise, starmap
from typing import Any, Protocol

import numpy as np

from mpitrain.layers.base import (
    Fusion,
    Gradients,
    Layer,
    Now,
    Parameter,
    TokenShare,
    Weights,
    backward,
    fusion_of,
)
from mpitrain.layers.incremental import Past, forward_next
from mpitrain.layers.recomputed import saved_again
from mpitrain.machine.backend import Arena
from mpitrain.ops import Ops
from mpitrain.ops.random_bits import Key


class Drawing(Protocol):
    """The part of a layer factory that layers with random bits need."""

    ops: Ops
    seed: int
    tokens: TokenShare

    def row_numbers(self, shape: Sequence[int], now: Now) -> range | np.ndarray: ...


class Dropout:
    """A layer that sets elements to 0 with probability `rate`, and scales the others by
    1 / (1 - rate).

    number   of the layer in the model, which selects its random bits
    column   the first column of the input on this rank
    columns  number of columns of the whole input; 0: this rank has all of them
    """

    output_is_free = False
    is_rowwise = True

    def __init__(
        self, layers: Drawing, rate: float, number: int, column: int = 0, columns: int = 0
    ):
        self.layers, self.rate, self.number = layers, rate, number
        self.column, self.columns = column, columns

    def parameters(self) -> list[Parameter]:
        return []

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        return self.dropped(x, now, arena) if now.trains else x, now

    def saved_again(self, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
        return now

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        return self.dropped(dy, saved, arena) if saved.trains else dy, None

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Do nothing: there are no parameters."""

    @property
    def key(self) -> Key:
        return Key(self.layers.seed, self.number)

    def dropped(self, x: Any, now: Now, arena: Arena, residual: Any = None, out: Any = None) -> Any:
        """Return x after dropout, plus the residual.

        out  receives the result, and may be x; None: a new buffer
        """
        width, numbers = x.shape[-1], self.layers.row_numbers(x.shape, now)
        if not isinstance(numbers, range) and out is None:
            out = arena.take(x.shape, x.dtype)
        x, shape = x.reshape(-1, width), x.shape
        more = [None if one is None else one.reshape(-1, width) for one in (residual, out)]
        if isinstance(numbers, range):
            return self._drawn(numbers.start, x, now, arena, *more).reshape(shape)
        for run in runs_in(numbers) if len(numbers) else ():
            arrays = [None if one is None else one[run] for one in more]
            self._drawn(int(numbers[run.start]), x[run], now, arena, *arrays)
        return out

    def _drawn(self, first: int, x: Any, now: Now, arena: Arena, *more: Any) -> Any:
        """Return x after dropout, of rows with numbers from `first` on; `more` as of the operation."""
        columns = self.columns or x.shape[-1]
        at = first * columns + self.column
        return self.layers.ops.dropout(x, self.key, now.step, at, columns, self.rate, arena, *more)


def runs_in(numbers: np.ndarray) -> Iterator[slice]:
    """Iterate over the runs of consecutive numbers, as slices of their indices."""
    ends = [*(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    return starmap(slice, pairwise([0, *ends]))


class Dropped:
    """A layer with dropout of its output; it has the parameter names of the inner layer.

    In an evaluation it computes what the inner layer computes.
    """

    def __init__(self, inner: Layer, drop: Dropout):
        self.inner, self.drop = inner, drop
        self.output_is_free, self.vocab = inner.output_is_free, getattr(inner, "vocab", 0)
        offer = fusion_of(inner)
        self.fusion = Fusion(adds_to_output=offer.adds_to_output, takes_gelu=offer.takes_gelu)

    def parameters(self) -> list[Parameter]:
        return self.inner.parameters()

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.inner.output_shape(shape)

    def inner_layers(self) -> list[Any]:
        return [self.inner]

    def forward_next(self, w: Weights, x: Any, past: Past, arena: Arena, *fused: Any) -> Any:
        return forward_next(self.inner, w, x, past, arena, *fused)

    def forward(
        self, w: Weights, x: Any, now: Now, arena: Arena, residual: Any = None
    ) -> tuple[Any, Any]:
        forward: Any = self.inner.forward
        if not now.trains:
            y, saved = forward(w, x, now, arena, *(() if residual is None else (residual,)))
            return y, (saved, now)
        y, saved = forward(w, x, now, arena)
        out = y if self.output_is_free else None
        return self.drop.dropped(y, now, arena, residual, out), (saved, now)

    def saved_again(self, w: Weights, x: Any, now: Now, arena: Arena) -> Any:
        return saved_again(self.inner, w, x, now, arena), now

    def backward_input(
        self, w: Weights, dy: Any, saved: Any, arena: Arena, slope: Any = None
    ) -> tuple[Any, Any]:
        half: Any = self.inner.backward_input
        saved, now = saved
        dy = self._undropped(dy, now, arena)
        return half(w, dy, saved, arena, *(() if slope is None else (slope,)))

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        self.inner.backward_weight(pending, dw, arena)

    def backward(
        self, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena, slope: Any = None
    ) -> Any:
        saved, now = saved
        return backward(self.inner, w, self._undropped(dy, now, arena), saved, dw, arena, slope)

    def _undropped(self, dy: Any, now: Now, arena: Arena) -> Any:
        """Return the gradient of the inner layer's output."""
        return self.drop.dropped(dy, now, arena) if now.trains else dy
