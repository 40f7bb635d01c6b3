"""Flat storage: every parameter of a model in one buffer, cut in units; gradients and optimizer state lie alike.

`Storage` says where each tensor lies; `weights` turns a flat buffer into the nested names that layers compute with. Within a
unit tensors are ordered by (trainable, decayed), so that the optimizer walks a few runs instead of many tensors. Every tensor
starts at a multiple of 32 elements, and a unit is padded to a multiple of dp x 32: tensors and every rank's share of a unit are
whole cache lines in a mirror of 16 bits as well. Padding stays zero: its gradient is.

Tensors that several ranks of a replica hold alike follow behind all others, sorted by who holds them: all holders lay them out
and divide them alike, and so sum them in one order, whatever else each of them has.
"""

import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.layers.base import Gradient, Gradients, Parameter, Unit, Weights
from mpitrain.machine.backend import Backend

GRAIN = 32  # elements


class Entry(NamedTuple):
    """One stored tensor: its full name, its description, its unit, and where its part lies in the flat buffer (elements)."""

    name: str
    parameter: Parameter
    unit: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(
            self.parameter.local_shape
        )  # NumPy's product would wrap at 64 bits

    def view(self, flat: np.ndarray) -> np.ndarray:
        """This tensor's part of a flat buffer, in its shape."""
        return flat[self.start : self.stop].reshape(self.parameter.local_shape)


class Piece(NamedTuple):
    """Elements [start, stop) of a flat buffer, and where they lie in the compact buffer of the rank that owns them.

    The whole buffer is Piece(0, length, 0).
    """

    start: int
    stop: int
    place: int


class Run(NamedTuple):
    """Neighbouring trainable tensors that the optimizer treats alike (elements), with the padding between them."""

    start: int
    stop: int
    decayed: bool


class Span(NamedTuple):
    """What a unit has of the flat buffer (elements), padding included: of the tensors that one set of ranks holds alike.

    partial  whether these ranks have only parts of the gradients, to be summed
    """

    start: int
    stop: int
    unit: int
    holders: str
    partial: bool


class Bucket(NamedTuple):
    """A run of whole spans that is reduced together (elements); ready when the gradients of all its units are."""

    start: int
    stop: int
    units: tuple[int, ...]
    holders: str = ""
    partial: bool = False


class Storage:
    """Where every tensor of a list of units lies.

    entries   all stored tensors, in order of storage; a tied tensor is stored once, in its first unit
    spans     in order of storage; every unit has one of the tensors it alone holds, if they be none
    length    of a flat buffer, in elements
    """

    def __init__(self, units: Sequence[Unit], dtype: Any, dp: int = 1):
        self.units, self.dtype = list(units), np.dtype(dtype)
        self.entries: list[Entry] = []
        self.spans: list[Span] = []
        stored = [_stored(unit) for unit in self.units]
        self.length = 0
        for kind in sorted({("", False), *((p.holders, p.partial) for own in stored for p in own)}):
            for index, own in enumerate(stored):
                mine = sorted(
                    (p for p in own if (p.holders, p.partial) == kind),
                    key=lambda p: (p.trainable, p.decayed),
                )
                if mine or kind == ("", False):
                    self._lay_out(index, kind, mine, dp * GRAIN)

    def _lay_out(
        self, unit: int, kind: tuple[str, bool], parameters: Sequence[Parameter], grain: int
    ) -> None:
        start = stop = self.length
        for parameter in parameters:
            self.entries.append(
                Entry(parameter.name, parameter, unit, start + _padded(stop - start, GRAIN))
            )
            stop = self.entries[-1].stop
        self.length = start + _padded(stop - start, grain)
        self.spans.append(Span(start, self.length, unit, *kind))

    @property
    def parameter_count(self) -> int:
        """Elements of all logical tensors, each counted once, whatever part of them is held here, and none that is a copy."""
        return sum(
            math.prod(entry.parameter.shape)
            for entry in self.entries
            if not entry.parameter.is_copy
        )

    def initialize(
        self, flat: Any, seed: int, backend: Backend, pieces: Sequence[Piece] | None = None
    ) -> None:
        """Fill a buffer with initial values, which depend on (seed, full name) alone: draw the whole, keep the part.

        They are drawn on the host whatever the backend, so that they are the same on any device; a `flat` of another dtype holds
        them rounded to the storage's, then to that.
        pieces  what of the flat buffer lies where in `flat`; None: all of it
        """
        flat[:] = 0
        for entry in self.entries:
            parameter = entry.parameter
            generator = np.random.default_rng([seed, zlib.crc32(entry.name.encode())])
            whole = parameter.draw(generator, parameter.shape)
            values = (
                parameter.part_of(whole)
                .astype(self.dtype)
                .astype(flat.dtype, copy=False)
                .reshape(-1)
            )
            for piece in [Piece(0, self.length, 0)] if pieces is None else pieces:
                low, high = max(entry.start, piece.start), min(entry.stop, piece.stop)
                if low < high:
                    place = piece.place - piece.start
                    flat[place + low : place + high] = backend.from_host(
                        values[low - entry.start : high - entry.start]
                    )

    def used(self, unit: int) -> list[Entry]:
        """The tensors that a unit computes with, tied ones included."""
        names = {self.units[unit].full_name(p) for p in self.units[unit].layer.parameters()}
        return [entry for entry in self.entries if entry.name in names]

    def weights(self, flat: np.ndarray) -> list[Weights]:
        """Views of a flat buffer for each unit, nested by name."""
        return self.nested({entry.name: entry.view(flat) for entry in self.entries})

    def gradients(self, flat: np.ndarray) -> tuple[list[Gradients], list[list[Gradient]]]:
        """Gradient leaves over a flat buffer: nested for each unit, and those that each unit stores. Tied tensors share one."""
        leaves = {entry.name: Gradient(entry.view(flat)) for entry in self.entries}
        stored = [
            [leaves[entry.name] for entry in self.entries if entry.unit == unit]
            for unit in range(len(self.units))
        ]
        return self.nested(leaves), stored

    def nested(self, leaves: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What belongs to each tensor, by full name, as each unit's names see it."""
        trees: list[Mapping[str, Any]] = []
        for unit in self.units:
            tree: dict[str, Any] = {}
            for parameter in unit.layer.parameters():
                *path, last = parameter.name.split(".")
                node = tree
                for part in path:
                    node = node.setdefault(part, {})
                node[last] = leaves[unit.full_name(parameter)]
            trees.append(tree)
        return trees

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """The optimizer's runs within [start, stop): neighbours with equal `decayed` joined, frozen tensors left out."""
        run: Run | None = None
        for entry in self.entries:
            low, high = max(entry.start, start), min(entry.stop, stop)
            if low >= high:
                continue
            trainable, decayed = entry.parameter.trainable, entry.parameter.decayed
            if run and not (trainable and run.decayed == decayed):
                yield run
                run = None
            if trainable:
                run = Run(run.start if run else low, high, decayed)
        if run:
            yield run

    def buckets(self, nbytes: float, firsts: Collection[int] = ()) -> list[Bucket]:
        """Whole spans joined from the last to the first until a bucket holds `nbytes`: the order in which they become ready.

        Those of one set of holders alone are joined.
        firsts  units that are not joined with those before them
        """
        buckets: list[Bucket] = []
        units: list[int] = []
        stop = self.length
        for span, before in zip(reversed(self.spans), [*self.spans[-2::-1], None], strict=True):
            units.append(span.unit)
            is_last = before is None or before[3:] != span[3:] or span.unit in firsts
            if is_last or (stop - span.start) * self.dtype.itemsize >= nbytes:
                if span.start < stop:
                    buckets.append(
                        Bucket(span.start, stop, tuple(units), span.holders, span.partial)
                    )
                stop, units = span.start, []
        return buckets


def _padded(count: int, grain: int) -> int:
    return -(-count // grain) * grain


def _stored(unit: Unit) -> list[Parameter]:
    """The tensors that a unit stores, named in full: its own, and of tied ones those that no earlier unit of this rank does."""
    own = unit.layer.parameters()
    return [
        unit.held.get(p.name, p._replace(name=f"{unit.name}.{p.name}"))
        for p in own
        if p.name in unit.held or p.name not in unit.tied
    ]


def dealt(spans: Sequence[Span], hands: int) -> list[list[Piece]]:
    """Whole spans shared out by size, the largest first, each to whoever has least; of each hand neighbours are one piece."""
    held: list[list[Span]] = [[] for _ in range(hands)]
    lengths = [0] * hands
    for span in sorted(spans, key=lambda span: span.start - span.stop):
        hand = lengths.index(min(lengths))
        held[hand].append(span)
        lengths[hand] += span.stop - span.start
    return [_joined(sorted(hand)) for hand in held]


def _joined(spans: Sequence[Span]) -> list[Piece]:
    pieces: list[Piece] = []
    place = 0
    for span in spans:
        if pieces and pieces[-1].stop == span.start:
            pieces[-1] = pieces[-1]._replace(stop=span.stop)
        elif span.start < span.stop:
            pieces.append(Piece(span.start, span.stop, place))
        place += span.stop - span.start
    return pieces


def shard(buckets: Sequence[Bucket], rank: int, ranks: int) -> list[Piece]:
    """The rank-th of `ranks` equal parts of every bucket, in order of storage: what a reduce-scatter of each leaves there."""
    pieces, place = [], 0
    for bucket in sorted(buckets):
        length = (bucket.stop - bucket.start) // ranks
        pieces.append(
            Piece(bucket.start + rank * length, bucket.start + (rank + 1) * length, place)
        )
        place += length
    return pieces
