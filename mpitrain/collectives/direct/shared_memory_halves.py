"""Reduce-scatter and all-gather through shared memory: the two halves of its all-reduce.

Each rank reads the windows of all ranks, and writes only to its own array. A first barrier
ensures that all arrays are ready, a second one that they have been read. For a small array,
ranks read copies in two slots that take turns, so one barrier is enough.

Sums have the order of the all-reduce. A reduce-scatter and then an all-gather give the same bits.
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
from mpitrain.collectives.engine.agreement import Agreed
from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.collectives.plans.topology import Topology
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import on_device
from mpitrain.transport.base import Transport

REDUCE_SCATTER_TAKES, ALL_GATHER_TAKES = (1.0, 0.5), (1.0, 0.7)
"""Fractions of the two constants of the all-reduce: the fixed time and the time per byte.

They are rough. With 2 ranks and 64 KiB to 64 MiB in windows, a reduce-scatter took 0.2 to 0.7
of the all-reduce. An all-gather took 0.5 to 0.7. In other memory, both took 1.0 falling to 0.4.
"""

Views = list[tuple[np.ndarray, np.ndarray]]
"""(target, source) of copies or of combinations."""


class Reads(NamedTuple):
    """Copies and sums of one run as data, in the order of their execution.

    brought  copies before the first barrier, to memory that other ranks read
    copied   copies after the first barrier
    summed   combinations after these copies, of the target with the source
    """

    brought: Views
    copied: Views
    summed: Views


class Half(Shared):
    """Reduce-scatter or all-gather through shared memory.

    turns   reads of successive runs, in turn. With one entry, a second barrier comes before any
            rank may overwrite an array that others read. With two entries, each has its own
            copies: a rank in the barrier of one run has read the copies of the run before
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
    transport: Transport, array: np.ndarray, op: str, agreed: Agreed, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind a reduce-scatter through shared memory; collective. Arguments are as in `bind_shared`.

    order   of the sum, as in the all-reduce. Small arrays: ranks 0, 1, 2 ... Others: rank r sums its
            own elements first, then the elements of ranks r + 1, r + 2 ...
    """
    if on_device(array):
        return bind_reduce_scatter_gpu(transport, array, op, agreed.tag, arithmetic)
    return bind_in_window(
        transport, array, agreed, partial(_reduce_scatter, transport, array, op, agreed.tag)
    )


def bind_all_gather(
    transport: Transport, array: np.ndarray, op: str, agreed: Agreed, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind an all-gather through shared memory; collective. Arguments are as in `bind_shared`."""
    if on_device(array):
        return bind_all_gather_gpu(transport, array, agreed.tag, arithmetic)
    return bind_in_window(
        transport, array, agreed, partial(_all_gather, transport, array, op, agreed.tag)
    )


def refusal(situation: Topology) -> ConfigError | None:
    """Return an error unless all ranks are on one host."""
    return hosts_differ(situation, "ring")


def _reduce_scatter(
    transport: Transport, array: np.ndarray, op: str, tag: int, slots: list[list[np.ndarray]]
) -> Half:
    """slots: each rank's copy of the array, by rank; a small array has two lists, used in turn."""
    flat, rank = array.reshape(-1), transport.rank
    start, stop = chunk_bounds(flat.size, transport.size)[rank]
    chunk = flat[start:stop]
    if len(slots) == 2:
        return Half(
            transport,
            array,
            op,
            tag,
            [
                Reads(
                    [(copies[rank], flat)],
                    [(chunk, copies[0][start:stop])],
                    [(chunk, copy[start:stop]) for copy in copies[1:]],
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
    flat, rank = array.reshape(-1), transport.rank
    chunks = [slice(*bounds) for bounds in chunk_bounds(flat.size, transport.size)]
    # Each rank begins with the chunk of a different peer.
    peers = [(rank + step) % transport.size for step in range(1, transport.size)]
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
    """Return whether this rank's region of the window is a copy, not the array itself."""
    return flat.ctypes.data != own.ctypes.data
