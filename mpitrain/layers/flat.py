"""Flat storage: all parameters of a model in one buffer, with gradients and optimizer state alike.

`Storage` computes the offset of each tensor. `Storage.weights` returns named views of a flat
buffer; layers compute with them.

Frozen tensors are in a separate flat buffer, which has no gradients and no state:

    trained   parameters   [ unit 0 | unit 1 | ... ]   all that ranks reduce, update and average
              gradients    [ unit 0 | unit 1 | ... ]
              state        [ unit 0 | unit 1 | ... ]
    frozen    parameters   [ unit 0 | unit 1 | ... ]   in the dtype that layers compute with

Tensors of a unit are sorted by `decayed`, so the optimizer walks a few runs instead of many
tensors. Every tensor starts at a multiple of 32 elements. A unit is padded to a multiple of
dp x 32. Tensors, and each rank's shard of a unit, are therefore whole cache lines, even in a
16-bit mirror. The padding stays zero, because its gradient is zero.

Tensors that several ranks of a replica hold come last, sorted by these sets of ranks (`holders`).
All ranks of such a set lay out and shard these tensors alike. So they sum the gradients of these
tensors in the same order, whatever other tensors each rank has.
"""

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from mpitrain.layers.base import Gradient, Gradients, Parameter, Unit, Weights, parameters_of
from mpitrain.machine.backend import Backend
from mpitrain.regions import Piece, moved, overlap

GRAIN = 32  # tensors start at multiples of this number of elements


class Entry(NamedTuple):
    """A stored tensor: full name, description, unit, and offset of its region in the flat buffer,
    in elements.
    """

    name: str
    parameter: Parameter
    unit: int
    start: int

    @property
    def stop(self) -> int:
        # NumPy's product would wrap at 64 bits.
        return self.start + math.prod(self.parameter.local_shape)

    def view(self, flat: Any) -> Any:
        """Return this tensor's view of a flat buffer, in its own shape."""
        return flat[self.start : self.stop].reshape(self.parameter.local_shape)


class Span(NamedTuple):
    """The range of a unit in the flat buffer, padding included (offsets in elements).

    A unit has one span for each set of ranks that share some of its tensors.

    holders  the set of ranks, as in `Parameter.holders`
    partial  whether each of these ranks computes only a summand of the gradient
    """

    start: int
    stop: int
    unit: int
    holders: str
    partial: bool


class Bucket(NamedTuple):
    """A run of whole spans that is reduced as one (offsets in elements).

    A bucket is ready when the gradients of all its units are ready.

    frozen  whether the offsets are in the buffer of frozen tensors
    """

    start: int
    stop: int
    units: tuple[int, ...]
    holders: str = ""
    partial: bool = False
    frozen: bool = False


class FlatLayout:
    """The layout of some tensors of a list of units in one flat buffer.

    entries  the tensors, in order of storage; a tied tensor is stored once, in its first unit
    spans    in order of storage. Each unit has one span for its tensors that no other rank of the
             replica shares; it may be empty. Shared tensors have spans of their own.
    length   of the flat buffer, in elements
    """

    def __init__(self, tensors: Sequence[Sequence[Parameter]], dtype: np.dtype, grain: int):
        """Lay out the tensors of each unit; spans are multiples of `grain` elements."""
        self.dtype = dtype
        self.entries: list[Entry] = []
        self.spans: list[Span] = []
        self.length = 0
        kinds = {(p.holders, p.partial) for own in tensors for p in own}
        for kind in sorted({("", False), *kinds}):
            for unit, own in enumerate(tensors):
                of_kind = [p for p in own if (p.holders, p.partial) == kind]
                if not of_kind and kind != ("", False):
                    continue
                start = stop = self.length
                for parameter in sorted(of_kind, key=lambda p: p.decayed):
                    at = start + _padded(stop - start, GRAIN)
                    self.entries.append(Entry(parameter.name, parameter, unit, at))
                    stop = self.entries[-1].stop
                self.length = start + _padded(stop - start, grain)
                self.spans.append(Span(start, self.length, unit, *kind))

    @property
    def largest(self) -> int:
        return max((span.stop - span.start for span in self.spans), default=0)

    def initialize(
        self,
        flat: Any,
        seed: int,
        backend: Backend,
        pieces: Sequence[Piece] | None = None,
        is_drawn: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Fill a buffer with initial values, which depend only on (seed, full name).

        Each rank draws the whole tensor on the host and copies its region. So the values are equal
        on all devices and layouts. They are rounded to the storage's dtype, and then to the dtype
        of `flat`.

        pieces    the pieces of the whole flat buffer that `flat` consists of; None: all of it
        is_drawn  (full name of a tensor) -> whether to draw it; others become zero
        """
        flat[:] = 0
        for entry in self.entries:
            if not is_drawn(entry.name):
                continue
            generator = np.random.default_rng([seed, zlib.crc32(entry.name.encode())])
            whole = entry.parameter.draw(generator, entry.parameter.shape)
            own = entry.parameter.part_of(whole).astype(self.dtype).astype(flat.dtype, copy=False)
            for piece in [Piece(0, self.length, 0)] if pieces is None else pieces:
                if both := overlap(entry, piece):
                    values = own.reshape(-1)[moved(both, -entry.start)]
                    flat[moved(both, piece.offset - piece.start)] = backend.from_host(values)

    def views(self, flat: Any) -> dict[str, Any]:
        """Return {full name of a tensor: its view of a flat buffer}."""
        return {entry.name: entry.view(flat) for entry in self.entries}

    def runs(
        self, start: int, stop: int, key: Callable[[Parameter], Any]
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield (start, stop, key) of the runs of adjacent tensors with equal keys, within [start, stop).

        A run has the padding between its tensors.
        """
        within = [entry for entry in self.entries if overlap(entry, range(start, stop))]
        for own, entries in groupby(within, lambda entry: key(entry.parameter)):
            run = list(entries)
            yield max(start, run[0].start), min(stop, run[-1].stop), own

    def buckets(self, nbytes: float, firsts: Collection[int] = ()) -> list[Bucket]:
        """Return the buckets, in the order in which backward makes them ready: from the last span
        to the first.

        A bucket takes whole spans until it has `nbytes`. All its spans have the same `holders` and
        `partial`.

        firsts  units at which a bucket must start: first units of model chunks
        """
        buckets: list[Bucket] = []
        units: list[int] = []
        stop = self.length
        for span, before in zip(reversed(self.spans), [*self.spans[-2::-1], None], strict=True):
            units.append(span.unit)
            is_last = (
                before is None
                or before[3:] != span[3:]
                or any(before.unit < first <= span.unit for first in firsts)
            )
            if is_last or (stop - span.start) * self.dtype.itemsize >= nbytes:
                if span.start < stop:
                    buckets.append(
                        Bucket(span.start, stop, tuple(units), span.holders, span.partial)
                    )
                stop, units = span.start, []
        return buckets


class Storage(FlatLayout):
    """The layout of all tensors of a list of units (as FSDP's flat parameter).

    The attributes of `FlatLayout` are those of the trained tensors.

    units   the units of this rank
    frozen  the layout of the frozen tensors
    """

    def __init__(self, units: Sequence[Unit], dtype: Any, dp: int = 1):
        self.units, grain = list(units), dp * GRAIN
        stored = [_stored(unit) for unit in self.units]
        trained = [[p for p in own if p.trainable] for own in stored]
        frozen = [[p for p in own if not p.trainable] for own in stored]
        super().__init__(trained, np.dtype(dtype), grain)
        self.frozen = FlatLayout(frozen, self.dtype, grain)

    @property
    def tensors(self) -> list[Entry]:
        """All stored tensors: the trained ones, then the frozen ones."""
        return [*self.entries, *self.frozen.entries]

    @property
    def parameter_count(self) -> int:
        """Number of elements of all logical tensors. Each counts once, in its whole shape, even if
        it is tied or divided.
        """
        return sum(
            math.prod(entry.parameter.shape)
            for entry in self.tensors
            if not entry.parameter.is_copy
        )

    def weights(self, flat: Any, frozen: Any = None) -> list[Weights]:
        """Return views of the flat buffers for each unit, nested by name.

        flat    the trained tensors
        frozen  the frozen tensors; None if there are none
        """
        return self.nested(self.views(flat) | self.frozen.views(frozen))

    def gradients(self, flat: np.ndarray) -> tuple[list[Gradients], list[list[Gradient]]]:
        """Return a `Gradient` for each trained tensor, as views of a flat buffer.

        flat     the gradients of the trained tensors
        returns  the Gradients of each unit, nested by name, where all units of a tied tensor have
                 the same Gradient; and a list of those whose tensor the unit stores
        """
        leaves = {name: Gradient(view) for name, view in self.views(flat).items()}
        stored = [
            [leaves[entry.name] for entry in self.entries if entry.unit == unit]
            for unit in range(len(self.units))
        ]
        return self.nested(leaves), stored

    def nested(self, leaves: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return, for each unit, a mapping nested by its parameter names.

        leaves  {full name of a tensor: leaf}; tensors without a leaf are left out
        """
        trees: list[Mapping[str, Any]] = []
        for unit in self.units:
            tree: dict[str, Any] = _Leaves()
            for parameter in unit.layer.parameters():
                *path, last = parameter.name.split(".")
                node = tree
                for part in path:
                    node = node.setdefault(part, _Leaves())
                if (name := unit.full_name(parameter)) in leaves:
                    node[last] = leaves[name]
            trees.append(tree)
        return trees

    def frozen_buckets(self) -> list[Bucket]:
        """Return a bucket of each span of frozen tensors, from the last span to the first."""
        return [bucket._replace(frozen=True) for bucket in self.frozen.buckets(0)]

    def within(self, bucket: Bucket) -> list[Entry]:
        entries = self.frozen.entries if bucket.frozen else self.entries
        return [entry for entry in entries if bucket.start <= entry.start < bucket.stop]


class _Leaves(dict[str, Any]):
    """A mapping of tensors by name, for a layer."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name} is no parameter here, or is frozen and has no gradient")


def _padded(count: int, grain: int) -> int:
    return -(-count // grain) * grain


def _stored(unit: Unit) -> list[Parameter]:
    """Return a unit's own tensors, and each tied tensor that no earlier unit of this rank stores.

    The tensors have their full names.
    """
    own = parameters_of(unit)
    return [
        unit.held.get(p.name, p._replace(name=f"{unit.name}.{p.name}"))
        for p in own
        if p.name in unit.held or p.name not in unit.tied
    ]


def dealt(spans: Sequence[Span], hands: int) -> list[list[Piece]]:
    """Distribute whole spans among `hands` owners: the largest first, each to the owner with the
    fewest elements.

    returns  the pieces of each owner; adjacent spans are one piece
    """
    held: list[list[Span]] = [[] for _ in range(hands)]
    lengths = [0] * hands
    for span in sorted(spans, key=lambda span: span.start - span.stop):
        hand = lengths.index(min(lengths))
        held[hand].append(span)
        lengths[hand] += span.stop - span.start
    return [_joined(sorted(hand)) for hand in held]


def _joined(spans: Sequence[Span]) -> list[Piece]:
    pieces: list[Piece] = []
    offset = 0
    for span in spans:
        if pieces and pieces[-1].stop == span.start:
            pieces[-1] = pieces[-1]._replace(stop=span.stop)
        elif span.start < span.stop:
            pieces.append(Piece(span.start, span.stop, offset))
        offset += span.stop - span.start
    return pieces


def shard(buckets: Sequence[Bucket], rank: int, ranks: int) -> list[Piece]:
    """Return the rank-th of `ranks` equal shards of every bucket, in order of storage.

    This is the chunk that a reduce-scatter of the bucket leaves on this rank.
    """
    pieces, offset = [], 0
    for bucket in sorted(buckets):
        length = (bucket.stop - bucket.start) // ranks
        pieces.append(
            Piece(bucket.start + rank * length, bucket.start + (rank + 1) * length, offset)
        )
        offset += length
    return pieces
