"""Flat storage: every parameter of a model in one buffer, cut in units; gradients and optimizer state lie alike.

`Storage` says where each tensor lies; `weights` turns a flat buffer into the nested names that layers compute with. Within a
unit tensors are ordered by (trainable, decayed), so that the optimizer walks a few runs instead of many tensors; a unit is
padded to a multiple of dp x 64 bytes, so that every rank's share of it is whole cache lines. Padding stays zero.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.layers.base import Gradient, Gradients, Parameter, Unit, Weights
from mpitrain.machine.backend import Backend

ALIGNMENT = 64  # bytes


class Entry(NamedTuple):
    """One stored tensor: its full name, its description, and where its part lies in the flat buffer (elements)."""

    name: str
    parameter: Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.parameter.local_shape)  # NumPy's product would wrap at 64 bits

    def view(self, flat: np.ndarray) -> np.ndarray:
        """This tensor's part of a flat buffer, in its shape."""
        return flat[self.start:self.stop].reshape(self.parameter.local_shape)


class Run(NamedTuple):
    """Neighbouring trainable tensors that the optimizer treats alike (elements)."""

    start: int
    stop: int
    decayed: bool


class Bucket(NamedTuple):
    """A run of whole units that is reduced together (elements); ready when its first unit's gradients are."""

    start: int
    stop: int
    first_unit: int


class Storage:
    """Where every tensor of a list of units lies.

    entries   all stored tensors, in order of storage; a tied tensor is stored once, in its first unit
    bounds    (start, stop) of each unit in elements, padding included
    length    of a flat buffer, in elements
    """

    def __init__(self, units: Sequence[Unit], dtype: Any, dp: int = 1):
        self.units, self.dtype = list(units), np.dtype(dtype)
        self.entries: list[Entry] = []
        self.bounds: list[tuple[int, int]] = []
        grain = dp * ALIGNMENT // self.dtype.itemsize
        stop = 0
        for unit in self.units:
            start = stop
            own = [p for p in unit.layer.parameters() if p.name not in unit.tied]
            for parameter in sorted(own, key=lambda p: (p.trainable, p.decayed)):
                self.entries.append(Entry(f"{unit.name}.{parameter.name}", parameter, stop))
                stop = self.entries[-1].stop
            stop = start + -(-(stop - start) // grain) * grain
            self.bounds.append((start, stop))
        self.length = stop
        self._by_name = {entry.name: entry for entry in self.entries}

    @property
    def parameter_count(self) -> int:
        """Elements of all logical tensors, each counted once, whatever part of them is held here."""
        return sum(math.prod(entry.parameter.shape) for entry in self.entries)

    def initialize(self, flat: Any, seed: int, backend: Backend) -> None:
        """Fill the buffer with initial values, which depend on (seed, full name) alone: draw the whole, keep the part.

        They are drawn on the host whatever the backend, so that they are the same on any device.
        """
        flat[:] = 0
        for entry in self.entries:
            parameter = entry.parameter
            generator = np.random.default_rng([seed, zlib.crc32(entry.name.encode())])
            whole = parameter.draw(generator, parameter.shape)
            part = whole if parameter.slices is None else whole[parameter.slices]
            entry.view(flat)[...] = backend.from_host(part.astype(self.dtype))

    def weights(self, flat: np.ndarray) -> list[Weights]:
        """Views of a flat buffer for each unit, nested by name."""
        return self._nested({entry.name: entry.view(flat) for entry in self.entries})

    def gradients(self, flat: np.ndarray) -> tuple[list[Gradients], list[list[Gradient]]]:
        """Gradient leaves over a flat buffer: nested for each unit, and those that each unit stores. Tied tensors share one."""
        leaves = {entry.name: Gradient(entry.view(flat)) for entry in self.entries}
        stored = [[leaves[e.name] for e in self.entries if start <= e.start < stop] for start, stop in self.bounds]
        return self._nested(leaves), stored

    def _nested(self, leaves: dict[str, Any]) -> list[Mapping[str, Any]]:
        trees: list[Mapping[str, Any]] = []
        for unit in self.units:
            tree: dict[str, Any] = {}
            for parameter in unit.layer.parameters():
                full = unit.tied.get(parameter.name, f"{unit.name}.{parameter.name}")
                *path, last = parameter.name.split(".")
                node = tree
                for part in path:
                    node = node.setdefault(part, {})
                node[last] = leaves[full]
            trees.append(tree)
        return trees

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """The optimizer's runs within [start, stop): neighbours with equal `decayed` joined, frozen tensors left out."""
        run: Run | None = None
        for entry in self.entries:
            low, high = max(entry.start, start), min(entry.stop, stop)
            if low >= high or not entry.parameter.trainable:
                continue
            if run and run.stop == low and run.decayed == entry.parameter.decayed:
                run = run._replace(stop=high)
                continue
            if run:
                yield run
            run = Run(low, high, entry.parameter.decayed)
        if run:
            yield run

    def buckets(self, nbytes: float) -> list[Bucket]:
        """Whole units joined from the last to the first until a bucket holds `nbytes`: the order they become ready."""
        buckets: list[Bucket] = []
        stop = self.length
        for index in reversed(range(len(self.units))):
            start = self.bounds[index][0]
            if (stop - start) * self.dtype.itemsize >= nbytes or index == 0:
                if start < stop:
                    buckets.append(Bucket(start, stop, index))
                stop = start
        return buckets
