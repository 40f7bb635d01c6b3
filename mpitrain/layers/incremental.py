"""Incremental decoding: forwards of only the new tokens, over stored keys and values of earlier ones.

A layer offers this in one of three ways. If its attribute `is_rowwise` is true, each output row
depends only on the same input row, and `forward` computes the new rows. Attention and embeddings
have a method `forward_next(w, x, past, arena) -> y`. Layers made of layers have this method, and a
method `inner_layers`; they are incremental if all inner layers are. A subclass that overrides
`forward` must define `is_rowwise` or `forward_next` again. A model with any other layer computes
whole windows of tokens instead.

B sequences, T new tokens, H heads, D channels of a head, W tokens that a cache has room for.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from typing import Any

from mpitrain.layers.base import READING, Weights
from mpitrain.machine.backend import Arena


class Past:
    """The key-value cache of some sequences, as transformers' `StaticCache`.

    The n-th call of `arrays` in a forward returns the arrays of the n-th attention layer.

    lengths    (B,) int64: the position of the first new token of each sequence
    positions  (B, T) int64: the positions of all new tokens
    """

    lengths: Any
    positions: Any

    def __init__(self, sequences: int, room: int, arena: Arena):
        """Make an empty cache.

        room  number of tokens of each sequence that the cache can store
        """
        self._shape, self._arena = (sequences, room), arena
        self._arrays: list[tuple[Any, Any]] = []
        self._rows, self._next = slice(0, sequences), 0

    def begin(self, rows: slice, lengths: Any, positions: Any) -> None:
        self._rows, self.lengths, self.positions, self._next = rows, lengths, positions, 0

    def arrays(self, heads: int, width: int, dtype: Any) -> tuple[Any, Any]:
        """Return the stored keys and values of the next attention layer, (B, H, W, D) each."""
        if self._next == len(self._arrays):
            sequences, room = self._shape
            pair = self._arena.take((2, sequences, heads, room, width), dtype)
            pair.fill(0)  # Masked values count 0 times, so they must be finite.
            self._arrays.append((pair[0], pair[1]))
        keys, values = self._arrays[self._next]
        self._next += 1
        return keys[self._rows], values[self._rows]


class FixedArena:
    """Arena whose n-th lease after each `rewind` is always the same array.

    So a forward of the same shapes as the one before allocates nothing. It overwrites the arrays of
    the one before.
    """

    def __init__(self, arena: Arena):
        self._arena, self._arrays, self._next = arena, list[Any](), 0

    def rewind(self) -> None:
        self._next = 0

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the next array, uninitialised; as `Arena.take`."""
        at = self._next
        self._next += 1
        if at < len(self._arrays):
            known = self._arrays[at]
            if known.shape == shape and known.dtype == dtype:
                return known
            del self._arrays[at:]
        array = self._arena.take(shape, dtype)
        self._arrays.append(array)
        return array


def forward_next(layer: Any, w: Weights, x: Any, past: Past, arena: Arena, *fused: Any) -> Any:
    """Return a layer's output for the new tokens.

    fused  the last argument of a fused forward (`Fusion.adds_to_output`)
    """
    offer = getattr(layer, "forward_next", None)
    if offer:
        return offer(w, x, past, arena, *fused)
    return layer.forward(w, x, READING, arena, *fused)[0]


def is_rowwise(layer: Any) -> bool:
    if _offers(layer, "inner_layers"):
        return all(map(is_rowwise, layer.inner_layers()))
    return _offers(layer, "is_rowwise") and layer.is_rowwise


def is_incremental(layer: Any) -> bool:
    if _offers(layer, "inner_layers"):
        return all(map(is_incremental, layer.inner_layers()))
    return _offers(layer, "forward_next") or is_rowwise(layer)


def _offers(layer: Any, name: str) -> bool:
    """Return whether an attribute belongs to the layer's own `forward`.

    If a subclass overrides `forward`, attributes of its base class do not count: they may not fit.
    """
    for kind in type(layer).__mro__:
        if name in vars(kind):
            return True
        if "forward" in vars(kind):
            break
    return False
