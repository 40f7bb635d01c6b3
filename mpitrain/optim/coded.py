"""Optimizer state in codes of 8 bits: the coded buffers of a rank, and the updates that use them.

Tensors with fewer than 4,096 elements and embeddings have uncoded state, as Dettmers et al. 2022
(section 2.3) propose. A tied tensor is an embedding on one of its stages, so its state is uncoded,
too. Each block of 256 elements has a scale; blocks are counted from the first element of the
tensor's region on the rank. If a piece begins or ends within a block, the elements of the block
that are in the piece have a scale of their own.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain import config
from mpitrain.layers.base import Parameter
from mpitrain.layers.flat import GRAIN, Entry, Storage
from mpitrain.machine.backend import Backend
from mpitrain.ops.codes import BLOCK, Map, block_count, decode, encode
from mpitrain.optim.optimizer import (
    Arrays,
    FactSums,
    HyperParameters,
    Optimizer,
    Rule,
    Update,
    UpdateCall,
    group_of,
)
from mpitrain.regions import Piece, moved, overlap


class BlockWise(NamedTuple):
    """The step of an element-wise rule whose state is in codes of 8 bits, with scales of blocks.

    op         name of the operation (p, g, *codes, *scales, scale, lr, weight_decay, lead, arena,
               mirror=None) on tensors with coded state
    plain      name of the operation on all other tensors, as `ElementWise.op`
    maps       {buffer of the state: its map of codes}, in the order of the arguments
    arguments  (update) -> the other arguments of both operations, by name
    """

    op: str
    plain: str
    maps: Mapping[str, Map]
    arguments: Callable[[Update], Mapping[str, float]]

    @property
    def optimizer(self) -> type[Optimizer]:
        return CodedOptimizer


LEAST = 4096
"""Smallest number of elements of a tensor whose state is in codes of 8 bits."""


def is_coded(storage: Storage, entry: Entry) -> bool:
    is_embedding = getattr(storage.units[entry.unit].layer, "vocab", 0) > 0
    is_tied = entry.parameter.holders not in ("", "tp")
    return math.prod(entry.parameter.shape) >= LEAST and not (is_embedding or is_tied)


class CodedRegion(NamedTuple):
    """Adjacent elements of one piece: of one tensor with codes, or of several tensors without.

    start, stop  the elements [start, stop) in the concatenated pieces of this rank
    run          the same elements, counted from the beginning of the piece
    values       the same elements in `CodedState.codes`; without codes in `CodedState.plain`
    scales       their blocks in `CodedState.scales`; None: the elements have no codes
    lead         elements of the first block that are before `start`
    """

    start: int
    stop: int
    run: slice
    values: slice
    scales: slice | None
    lead: int
    group: HyperParameters


def regions(
    storage: Storage, settings: config.Optimizer, pieces: Sequence[Piece]
) -> dict[Piece, list[CodedRegion]]:
    """Return {piece: its regions}, one for each coded tensor and each run of uncoded tensors."""
    starts = {entry.name: entry.start for entry in storage.entries if is_coded(storage, entry)}

    def key(tensor: Parameter) -> tuple[str, HyperParameters]:
        return tensor.name if tensor.name in starts else "", group_of(settings, tensor)

    by_piece: dict[Piece, list[CodedRegion]] = {}
    codes = scales = plain = 0
    for piece in pieces:
        by_piece[piece] = []
        for start, stop, (name, group) in storage.runs(piece.start, piece.stop, key):
            count, shift = stop - start, piece.offset - piece.start
            lead = (start - starts[name]) % BLOCK if name else 0
            first, blocks = (codes, block_count(count, lead)) if name else (plain, 0)
            by_piece[piece].append(
                CodedRegion(
                    start + shift,
                    stop + shift,
                    slice(start - piece.start, stop - piece.start),
                    slice(first, first + count),
                    slice(scales, scales + blocks) if name else None,
                    lead,
                    group,
                )
            )
            scales, room = scales + blocks, -(-count // GRAIN) * GRAIN
            codes, plain = (codes + room, plain) if name else (codes, plain + room)
    return by_piece


class CodedState:
    """A buffer of optimizer state for all elements of a rank, partly in codes of 8 bits.

    Checkpoints use it as a 1-D array. Its slices are decoded when they are read, and encoded when
    they are written. Writing decoded values restores the same codes.

    codes   uint8, one per element of all regions with codes
    scales  one per block: float32 values, stored in the storage's dtype
    plain   the elements of all regions without codes, in the storage's dtype
    """

    def __init__(
        self,
        regions: Iterable[CodedRegion],
        length: int,
        dtype: np.dtype,
        of: Map,
        backend: Backend,
    ):
        self._regions, self._of, self._backend = list(regions), of, backend
        self.size, self.dtype, self.shape = length, dtype, (length,)
        coded = [region for region in self._regions if region.scales]
        self.codes = backend.zeros(_end(region.values for region in coded), np.uint8)
        self.scales = backend.zeros(_end(r.scales for r in coded if r.scales), dtype)
        self.plain = backend.zeros(_end(r.values for r in self._regions if not r.scales), dtype)
        self.arrays = self.codes, self.scales, self.plain

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes + self.plain.nbytes)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, along: slice) -> Any:
        start, stop, _ = along.indices(self.size)
        values = np.zeros(max(0, stop - start), self.dtype)
        for region in self._regions:
            if both := overlap(region, range(start, stop)):
                values[moved(both, -start)] = self._decoded(region, both.start, both.stop)
        return self._backend.from_host(values)

    def __setitem__(self, along: slice, values: Any) -> None:
        start, stop, _ = along.indices(self.size)
        host_values = self._backend.to_host(values)
        for region in self._regions:
            if both := overlap(region, range(start, stop)):
                own = self._decoded(region, region.start, region.stop).copy()
                own[moved(both, -region.start)] = host_values[moved(both, -start)]
                self._encode(region, own)

    def _decoded(self, region: CodedRegion, low: int, high: int) -> np.ndarray:
        first, count = low - region.start, high - low
        values = slice(region.values.start + first, region.values.start + first + count)
        if not region.scales:
            return self._backend.to_host(self.plain[values])
        block, lead = divmod(region.lead + first, BLOCK)
        block += region.scales.start
        codes, scales = (
            self._backend.to_host(array)
            for array in (self.codes[values], self.scales[block : block + block_count(count, lead)])
        )
        return decode(codes, scales, lead, self._of, self.dtype)

    def _encode(self, region: CodedRegion, values: np.ndarray) -> None:
        if not region.scales:
            self._backend.put(self.plain[region.values], values)
            return
        codes, scales = encode(values, region.lead, self._of)
        self._backend.put(self.codes[region.values], codes)
        self._backend.put(self.scales[region.scales], scales.astype(self.dtype))


def _end(slices: Iterable[slice]) -> int:
    return max((one.stop for one in slices), default=0)


class CodedOptimizer(Optimizer):
    """The optimizer of a block-wise rule; its state is in `CodedState`s."""

    @staticmethod
    def element_bytes(itemsize: int) -> float:
        return 1 + itemsize / BLOCK

    @classmethod
    def state_bytes(cls, rule: Rule, storage: Storage) -> float:
        itemsize = storage.dtype.itemsize
        return len(rule.state) * sum(
            (entry.stop - entry.start)
            * (cls.element_bytes(itemsize) if is_coded(storage, entry) else itemsize)
            for entry in storage.entries
        )

    def allocate(self, sums: Callable[[], FactSums]) -> None:
        self._regions = regions(self.storage, self.settings, self.pieces)
        length = sum(piece.stop - piece.start for piece in self.pieces)
        every_region = [region for own in self._regions.values() for region in own]
        self.state = {
            name: CodedState(every_region, length, self.storage.dtype, of, self.backend)
            for name, of in self.step.maps.items()
        }

    def bind(self, arrays: Arrays) -> Mapping[Piece, Sequence[UpdateCall]]:
        coded, plain = getattr(self.ops, self.step.op), getattr(self.ops, self.step.plain)
        state = self.state.values()
        bound: dict[Piece, list[UpdateCall]] = {}
        for piece, (parameters, gradients, mirror) in arrays.items():
            bound[piece] = []
            for region in self._regions[piece]:
                run, values, scales = region.run, region.values, region.scales
                operation, own = plain, [buffer.plain[values] for buffer in state]
                named: dict[str, Any] = {"weight_decay": region.group.weight_decay}
                if scales:
                    operation, named["lead"] = coded, region.lead
                    own = [
                        *(buffer.codes[values] for buffer in state),
                        *(buffer.scales[scales] for buffer in state),
                    ]
                if mirror is not None:
                    named["mirror"] = mirror[run]
                own = [parameters[run], gradients[run], *own]
                bound[piece].append(UpdateCall(operation, own, region.group.lr, named))
        return bound
