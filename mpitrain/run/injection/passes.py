"""Failures within a pass of the layers: a decorator around the replication of a trainer."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpitrain.layers.base import Gradient, Weights
from mpitrain.machine.backend import Backend
from mpitrain.parallel.replication.protocol import Replication
from mpitrain.run.injection.injector import Injector
from mpitrain.transport.base import Transport


def set_nan(backend: Backend, element: Any) -> None:
    """Write NaN over an array of one element."""
    element.fill(np.nan)


def flip_bit(backend: Backend, element: Any) -> None:
    """Change the lowest bit of the exponent: the element doubles or halves."""
    number = backend.to_host(element).copy()
    bits = number.view(f"u{number.itemsize}")
    bits ^= bits.dtype.type(1 << np.finfo(number.dtype).nmant)
    backend.put(element, number)


ELEMENT_FAILURES: dict[str, Callable[[Backend, Any], None]] = {"nan": set_nan, "bitflip": flip_bit}
"""The failures of one element of a gradient, by kind."""


class FailingPasses:
    """A Replication that fails at the first unit of a forward or of a backward.

    Every call is passed to the replication that this class wraps. Gradients change before their reduction.
    """

    def __init__(self, inner: Replication, injector: Injector, backend: Backend):
        self._inner, self._injector, self._backend = inner, injector, backend
        self._change = ELEMENT_FAILURES.get(injector.failure.kind)
        self._step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, step: int) -> None:
        self._step = step + 1
        self._inner.begin(step)

    def open(self, unit: int, micro: int) -> Weights:
        # An evaluation before the first step opens units, too.
        if self._step:
            self._injector.passes("forward", self._step)
        return self._inner.open(unit, micro)

    def gradient_ready(self, unit: int, is_last: bool) -> None:
        if self._change is None:
            self._injector.passes("backward", self._step)
        elif is_last:
            leaves = self._inner.gradients(unit, 0)
            written = next((leaf.array for leaf in _leaves(leaves) if leaf.filled), None)
            if written is not None and self._injector.is_due("backward", self._step):
                self._change(self._backend, written.reshape(-1)[:1])
        self._inner.gradient_ready(unit, is_last)


def _leaves(gradients: Any) -> Iterator[Gradient]:
    for entry in gradients.values():
        if isinstance(entry, Gradient):
            yield entry
        else:
            yield from _leaves(entry)


def failing(inner: Any, text: str, transport: Transport, backend: Backend) -> Any:
    """Return the replication with the failure of run.inject, if that is within a pass."""
    injector = Injector(text, transport)
    if injector.failure.point not in ("forward", "backward"):
        return inner
    return FailingPasses(inner, injector, backend)
