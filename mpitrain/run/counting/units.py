"""Activations and FLOPs of each unit of a pipeline stage, for one micro-batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpitrain.layers.base import Unit, backward
from mpitrain.run.counting.body import Body, Replica


class UnitCount(NamedTuple):
    """The counts of one unit in one micro-batch. All bytes are of activations.

    saved    that its forward adds: its saved state and its output, less an input that dies
    pending  from the input half of backward to the weight half, if a schedule separates them
    peak     of the rank while its forward or its backward runs; the loss counts as the last unit's
    flops    floating-point operations of its matrix products, forward and backward
    """

    name: str
    saved: int
    pending: int
    peak: int
    flops: int


class UnitCounter:
    """Counts the units of one chunk of a model, one after another.

    units    the units of the chunk
    replica  their parameters and gradients
    """

    def __init__(self, body: Body, units: Sequence[Unit], replica: Replica):
        self._body, self._units, self._replica = body, units, replica
        self._peaks, self._flops = [0] * len(units), [0] * len(units)

    def count(self, x: Callable[[], Any], targets: Any) -> list[UnitCount]:
        """Return the counts of all units.

        x        () -> an input of the chunk
        targets  None, or () -> the targets, if the loss follows the chunk
        """
        arena, numbers = self._body.arena, range(len(self._units))
        y, saves, saved = self._forward(x)
        dy = self._gradient(y, targets)
        del y
        for n in reversed(numbers):
            before = self._begin()
            dy = backward(
                self._units[n].layer,
                self._replica.open(n, 0),
                dy,
                saves.pop(),
                self._replica.gradients(n, 0),
                arena,
            )
            self._end(n, before)
        del dy
        # `_pending` runs forwards again.
        peaks, flops = [*self._peaks], [*self._flops]
        pending, names = self._pending(x, targets), [unit.name for unit in self._units]
        return [*map(UnitCount, names, saved, pending, peaks, flops)]

    def _forward(self, first: Callable[[], Any]) -> tuple[Any, list[Any], list[int]]:
        """Return the output, the saved state of each unit, and its bytes."""
        arena, saves, found, x = self._body.arena, list[Any](), list[int](), first()
        for n, unit in enumerate(self._units):
            live, before = arena.live, self._begin()
            x, saved = unit.layer.forward(self._replica.open(n, 0), x, arena)
            saves.append(saved)
            del saved
            found.append(arena.live - live)
            self._end(n, before)
        return x, saves, found

    def _gradient(self, y: Any, targets: Any) -> Any:
        """Return the gradient of the output, from the loss if it follows."""
        before = self._begin()
        if targets is None:
            return self._body.arena.take(y.shape, y.dtype)
        right = targets().reshape(-1)
        _, dy = self._replica.loss(y.reshape(len(right), -1), right, 1.0)
        self._end(len(self._units) - 1, before)
        return dy.reshape(y.shape)

    def _pending(self, x: Callable[[], Any], targets: Any) -> list[int]:
        """Return the bytes that each unit's weight half gives back."""
        arena, found = self._body.arena, list[int]()
        y, saves, _ = self._forward(x)
        dy, pending = self._gradient(y, targets), list[Any]()
        del y
        for n in reversed(range(len(self._units))):
            dy, state = self._units[n].layer.backward_input(
                self._replica.open(n, 0), dy, saves.pop(), arena
            )
            pending.append(state)
            del state
        del dy
        for n in reversed(range(len(self._units))):
            live = arena.live
            self._units[n].layer.backward_weight(
                pending.pop(0), self._replica.gradients(n, 0), arena
            )
            found.append(live - arena.live)
        return found[::-1]

    def _begin(self) -> int:
        """Begin a pass of a unit; return the FLOPs so far."""
        self._body.arena.peak = self._body.arena.live
        return self._body.count.flops

    def _end(self, n: int, before: int) -> None:
        """End a pass of the n-th unit.    before: the result of `_begin`"""
        self._peaks[n] = max(self._peaks[n], self._body.arena.peak)
        self._flops[n] += self._body.count.flops - before
