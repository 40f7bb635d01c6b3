"""Failures within a pass of the layers: decorators around the parts of a trainer's replication."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.layers.base import Gradient
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


class Preceded:
    """A part of a replication; each call of one of its methods calls `before` first."""

    def __init__(self, part: Any, method: str, before: Callable[..., None]):
        self._part = part

        def call(*arguments: Any) -> Any:
            before(*arguments)
            return getattr(part, method)(*arguments)

        setattr(self, method, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def _leaves(gradients: Any) -> Iterator[Gradient]:
    for entry in gradients.values():
        if isinstance(entry, Gradient):
            yield entry
        else:
            yield from _leaves(entry)


def failing(inner: Replication, text: str, transport: Transport, backend: Backend) -> Replication:
    """Return the replication with the failure of run.inject, if that is within a pass.

    It fails at the first unit of a forward or of a backward. Gradients change before their
    reduction.
    """
    injector = Injector(text, transport)
    if injector.failure.point not in ("forward", "backward"):
        return inner
    change, step = ELEMENT_FAILURES.get(injector.failure.kind), 0

    def begin(index: int) -> None:
        nonlocal step
        step = index + 1

    def before_open(unit: int, micro: int) -> None:
        # An evaluation before the first step opens units, too.
        if step:
            injector.passes("forward", step)

    def before_ready(unit: int, is_last: bool) -> None:
        if change is None:
            injector.passes("backward", step)
        elif is_last:
            leaves = _leaves(inner.reducer.gradients(unit))
            written = next((leaf.array for leaf in leaves if leaf.filled), None)
            if written is not None and injector.is_due("backward", step):
                change(backend, written.reshape(-1)[:1])

    step_end: Any = Preceded(inner.step_end, "begin", begin)
    store: Any = Preceded(inner.store, "open", before_open)
    reducer: Any = Preceded(inner.reducer, "ready", before_ready)
    return replace(inner, step_end=step_end, store=store, reducer=reducer)
