"""Locates a bad step: repeats it, and names the first arrays that are not finite; imported only then.

Parameters are those of the step, since a step that is not finite updates nothing. The run ends afterwards.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpitrain.layers.base import backward
from mpitrain.run.trainer import Trainer


class BadArray(NamedTuple):
    """An array that is not finite, although a rank computed it from arrays that are.

    what       its name, with the unit
    call       number of calls of layers on the rank up to then
    is_stored  whether it is a parameter: then the step did not compute it
    """

    micro: int
    what: str
    call: int
    is_stored: bool = False


class Sentinel:
    """The first bad array of this rank.

    calls  of layers so far
    """

    def __init__(self, trainer: Trainer):
        self._trainer, self.calls = trainer, 0
        self.first: BadArray | None = None

    def is_bad(self, array: Any) -> bool:
        if array is None or getattr(array, "dtype", np.dtype(int)).kind in "iu":
            return False  # tokens, or weights in 8 bits
        return not np.isfinite(self._trainer.backend.to_host(array)).all()

    def find(self, what: str, is_stored: bool = False) -> None:
        micro = self._trainer.pipe.micro
        self.first = self.first or BadArray(micro, what, self.calls, is_stored)


class WatchedLayer:
    """A unit's layer, whose results a watch sees."""

    def __init__(self, layer: Any, unit: str, watch: Sentinel):
        self._layer, self._unit, self._watch = layer, unit, watch
        self._is_spoilt = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def forward(self, w: Any, x: Any, now: Any, arena: Any) -> Any:
        self._watch.calls += 1
        was_bad = self._watch.is_bad(x)
        y, saved = self._layer.forward(w, x, now, arena)
        if not was_bad and self._watch.is_bad(y):
            stored = [name for name, array in _leaves(w) if self._watch.is_bad(array)]
            if stored:
                self._watch.find(f"the parameter {self._unit}.{stored[0]}", True)
            else:
                self._watch.find(f"the output of {self._unit}")
        return y, saved

    def backward(self, w: Any, dy: Any, saved: Any, dw: Any, arena: Any) -> Any:
        was_bad = self._watch.is_bad(dy)
        dx = backward(self._layer, w, dy, saved, dw, arena)
        self._look(was_bad, dx, dw)
        return dx

    def backward_input(self, w: Any, dy: Any, saved: Any, arena: Any) -> Any:
        was_bad = self._watch.is_bad(dy)
        dx, pending = self._layer.backward_input(w, dy, saved, arena)
        self._look(was_bad, dx, {})
        return dx, (was_bad, pending)

    def backward_weight(self, pending: Any, dw: Any, arena: Any) -> None:
        was_bad, pending = pending
        self._layer.backward_weight(pending, dw, arena)
        self._look(was_bad, None, dw)

    def _look(self, was_bad: bool, dx: Any, dw: Any) -> None:
        self._watch.calls += 1
        # Gradients add up over micro-batches: what one has spoilt is bad in the next ones, too.
        self._is_spoilt |= was_bad
        if self._is_spoilt:
            return
        for name, leaf in _leaves(dw):
            if leaf.filled and self._watch.is_bad(leaf.array):
                self._watch.find(f"the gradient of {self._unit}.{name}")
        if self._watch.is_bad(dx):
            self._watch.find(f"the gradient of the input of {self._unit}")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, entry in tree.items():
        if isinstance(entry, Mapping):
            yield from _leaves(entry, f"{prefix}{name}.")
        else:
            yield prefix + name, entry


def located(trainer: Trainer, repeat: Callable[[], Any]) -> str:
    """Repeat a step, and return a clause about the ranks on which it goes wrong first; collective.

    repeat  runs the step again
    """
    watch, transport = Sentinel(trainer), trainer.transport
    for stage in trainer.pipe.stages.values():
        stage.replace_layers(lambda layer, unit: WatchedLayer(layer, unit, watch))
    repeat()
    losses = np.isfinite(trainer.loss_sums())
    loss = None if losses.all() else BadArray(int(np.argmin(losses)), "the loss", 0)
    everyone = transport.gather_text([trainer.grid.coords.pp, watch.first, loss])
    bad_arrays = {
        rank: (stage, BadArray(*bad)) for rank, (stage, bad, _) in enumerate(everyone) if bad
    }
    bad_arrays = bad_arrays or {
        rank: (0, BadArray(*bad)) for rank, (*_, bad) in enumerate(everyone) if bad
    }
    # Ranks of one stage make the same calls. Reductions carry what is bad to those that find it later.
    earliest = {
        stage: min(bad.call for other, bad in bad_arrays.values() if other == stage)
        for stage, _ in bad_arrays.values()
    }
    origins = {
        rank: bad for rank, (stage, bad) in bad_arrays.items() if bad.call == earliest[stage]
    }
    origins = {rank: bad for rank, bad in origins.items() if bad.is_stored} or origins
    if not origins:
        return "; repeated, no rank computes such an array: suspect memory and devices, or sums that overflow"
    named = ", ".join(
        f"{bad.what} on rank {rank} ({transport.hosts[rank]}) in micro-batch {bad.micro + 1}"
        for rank, bad in [*origins.items()][:4]
    )
    return f"; repeated, it has {named}" + (", ..." if len(origins) > 4 else "")
