"""Reduce-scatter and all-gather without messages: the two halves of the all-reduce in shared.py.

Each rank reads what it needs out of all ranks' windows and writes to its own array alone: a barrier before tells that the
arrays are ready, one after that they have been read. Of a small array it reads copies that take turns, so that one barrier
is enough. Sums have the all-reduce's order: a reduce-scatter and then an all-gather leave the same bits.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from mpitrain.collectives.direct.cuda_ipc import bind_all_gather_gpu, bind_reduce_scatter_gpu
from mpitrain.collectives.direct.shared_memory import (
    CACHED_BYTES,
    Shared,
    bind_in_window,
    hosts_differ,
)
from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.collectives.plans.topology import Topology
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import on_device
from mpitrain.transport.base import Transport

REDUCE_SCATTER_TAKES, ALL_GATHER_TAKES = (1.0, 0.5), (1.0, 0.7)
"""Of the all-reduce: as many barriers, and part of what is done for a byte. Rough: with 2 ranks a reduce-scatter of 64 KiB to 64
MiB in windows took 0.2 to 0.7 of the all-reduce, an all-gather 0.5 to 0.7; in other memory both took 1.0 falling to 0.4."""

Views = list[tuple[np.ndarray, np.ndarray]]
"""(target, source)."""


class Reads(NamedTuple):
    """One run as data, in its order.

    brought  copied before the ranks meet, to where the others read it
    copied   copied when all have met
    summed   combined after that, the target with the source
    """

    brought: Views
    copied: Views
    summed: Views


class Half(Shared):
    """A reduce-scatter or an all-gather through shared memory.

    turns   what runs do in turn. One: all ranks meet again before anyone may write to what was read. Two, through copies of
            their own: a rank that enters the barrier of one run has read the copies of the run before
    """

    def __init__(
        self, transport: Transport, array: np.ndarray, op: str, tag: int, turns: list[Reads]
    ):
        super().__init__(transport, array, op, tag)
        self._turns, self._turn = turns, 0
        self.meetings = 3 - len(turns)

    def _bring(self) -> None:
        self._turn = (self._turn + 1) % len(self._turns)
        for target, source in self._turns[self._turn].brought:
            target[:] = source

    def _met(self, left: int) -> None:
        if left < self.meetings - 1:
            return
        for target, source in self._turns[self._turn].copied:
            target[:] = source
        for target, source in self._turns[self._turn].summed:
            self._combine(target, source)


def bind_reduce_scatter(
    transport: Transport, array: np.ndarray, op: str, tag: int, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind a reduce-scatter through shared memory, as `bind_shared` does an all-reduce. Collective.

    order   as in the all-reduce: of a small array ranks 0, 1, 2 ...; of others rank r sums its own part first, then those
            of ranks r + 1, r + 2 ...
    """
    if on_device(array):
        return bind_reduce_scatter_gpu(transport, array, op, tag, arithmetic)
    return bind_in_window(transport, array, partial(_reduce_scatter, transport, array, op, tag))


def bind_all_gather(
    transport: Transport, array: np.ndarray, op: str, tag: int, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind an all-gather through shared memory, as `bind_shared` does an all-reduce. Collective."""
    if on_device(array):
        return bind_all_gather_gpu(transport, array, tag)
    return bind_in_window(transport, array, partial(_all_gather, transport, array, op, tag))


def refusal(situation: Topology) -> ConfigError | None:
    """Memory is shared within one host."""
    return hosts_differ(situation, "ring")


def _reduce_scatter(
    transport: Transport, array: np.ndarray, op: str, tag: int, slots: list[list[np.ndarray]]
) -> Half:
    """slots: every rank's copy of the array, by rank; two sets of a small array."""
    flat, rank = array.reshape(-1), transport.rank
    start, stop = chunk_bounds(flat.size, transport.size)[rank]
    mine = flat[start:stop]
    if len(slots) == 2:
        return Half(
            transport,
            array,
            op,
            tag,
            [
                Reads(
                    [(copies[rank], flat)],
                    [(mine, copies[0][start:stop])],
                    [(mine, copy[start:stop]) for copy in copies[1:]],
                )
                for copies in slots
            ],
        )
    copies, step = slots[0], max(1, CACHED_BYTES // flat.itemsize)
    blocks = [slice(low, min(low + step, stop)) for low in range(start, stop, step)]
    summed = [
        (flat[block], copy[block])
        for block in blocks
        for copy in copies[rank + 1 :] + copies[:rank]
    ]
    outside = [slice(0, start), slice(stop, None)] if _is_copied(flat, copies[rank]) else []
    return Half(
        transport,
        array,
        op,
        tag,
        [Reads([(copies[rank][part], flat[part]) for part in outside], [], summed)],
    )


def _all_gather(
    transport: Transport, array: np.ndarray, op: str, tag: int, slots: list[list[np.ndarray]]
) -> Half:
    """slots: every rank's copy of the array, by rank; two sets of a small array."""
    flat, rank = array.reshape(-1), transport.rank
    chunks = [slice(*bounds) for bounds in chunk_bounds(flat.size, transport.size)]
    peers = [
        (rank + step) % transport.size for step in range(1, transport.size)
    ]  # each begins with another one's chunk
    return Half(
        transport,
        array,
        op,
        tag,
        [
            Reads(
                [(copies[rank][chunks[rank]], flat[chunks[rank]])]
                if _is_copied(flat, copies[rank])
                else [],
                [(flat[chunks[peer]], copies[peer][chunks[peer]]) for peer in peers],
                [],
            )
            for copies in slots
        ],
    )


def _is_copied(flat: np.ndarray, own: np.ndarray) -> bool:
    """Whether this rank's copy is not the array itself."""
    return flat.ctypes.data != own.ctypes.data
