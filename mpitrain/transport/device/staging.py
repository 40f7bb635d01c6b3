"""Messages of GPU memory through page-locked host memory, for an MPI that is not CUDA-aware.

A message travels in pieces. While one piece is sent, the next is copied to the host. While one
piece arrives, the one before it is copied to the device. A message posts all its receives when it
starts, and all its sends before `start_send` returns. It then needs no further calls to progress:
as with MPI's own messages, the rank may wait for anything else. Staging memory grows to the largest
number of bytes ever in progress. It is reused, and never freed.
"""

from typing import Any

import numpy as np

from mpitrain.errors import CommError
from mpitrain.machine.arena import Arena, HostMemory
from mpitrain.machine.backend import Copy, DeviceBackend
from mpitrain.transport.base import Transport
from mpitrain.transport.device.messages import Carrier, UnderWay
from mpitrain.transport.requests import Request, Several, check_message, named

PIECE = 1 << 20
"""Bytes of a piece: long enough for the full rate of links and copy engines, short enough to
overlap early.
"""


class _StagingMemory(HostMemory):
    """Page-locked host memory of an arena, which a device can copy to and from by itself."""

    def __init__(self, backend: DeviceBackend):
        super().__init__()
        self._backend = backend

    def allocate(self, nbytes: int) -> np.ndarray:
        return self._backend.staging(nbytes)


class Staged(Carrier):
    """The strategy that copies device arrays through host memory.

    piece   bytes; the same on all ranks

    All transports split from one share its staging memory.
    """

    def __init__(self, host: Transport, backend: DeviceBackend, piece: int = PIECE):
        super().__init__(host, backend)
        self._piece, self._buffers = piece, Arena(_StagingMemory(backend))

    def start_send(self, array: Any, to: int, tag: int = 0) -> Request:
        check_message(array, self.rank, (to,), self.size)
        flat, buffer = self._staged(array)
        pieces, so_far = self._pieces(flat), self._backend.so_far()
        copies = [self._backend.start_copy(buffer[piece], flat[piece], so_far) for piece in pieces]
        sends: list[Request] = []
        for piece, copy in zip(pieces, copies, strict=True):
            while not copy.test():
                for send in sends:
                    send.test()  # lets MPI make progress on earlier pieces
            sends.append(self._inner.start_send(buffer[piece], to, tag))
        return Several(sends)

    def start_recv(self, array: Any, source: int, tag: int = 0) -> Request:
        check_message(array, self.rank, (source,), self.size)
        flat, buffer = self._staged(array)
        pieces = self._pieces(flat)
        receives = [self._inner.start_recv(buffer[piece], source, tag) for piece in pieces]
        return _Receive(
            self._backend,
            self.under_way,
            receives,
            [(flat[piece], buffer[piece]) for piece in pieces],
        )

    def start_recv_any(self, array: Any, tag: int = 0) -> Request:
        check_message(array, self.rank, (), self.size)
        flat, buffer = self._staged(array)
        if len(self._pieces(flat)) > 1:  # several pieces could come from different ranks
            raise CommError(
                f"rank {self.rank}: a receive from any rank holds at most {self._piece} bytes where GPU memory is staged, "
                f"but this array has {array.nbytes}.",
                "Let the sender announce itself first and receive from that rank, or use an MPI that takes GPU memory.",
            )
        return _Receive(
            self._backend,
            self.under_way,
            [self._inner.start_recv_any(buffer, tag)],
            [(flat, buffer)],
        )

    def native_all_reduce(self, array: Any, op: str = "add") -> None:
        flat, buffer = self._staged(array)
        so_far = self._backend.so_far()
        self._backend.start_copy(buffer, flat, so_far).wait()
        self._inner.native_all_reduce(buffer, op)
        self._backend.start_copy(flat, buffer, so_far).wait()

    def _staged(self, array: Any) -> tuple[Any, np.ndarray]:
        """Return the array as one dim, and a buffer that is free when no view of it is left."""
        return array.reshape(-1), self._buffers.take((array.size,), array.dtype)

    def _pieces(self, flat: Any) -> list[slice]:
        """An empty message is one empty piece."""
        step = max(1, self._piece // flat.dtype.itemsize)
        return [
            slice(start, min(start + step, flat.size))
            for start in range(0, max(1, flat.size), step)
        ]


class _Receive:
    """The receives of a message's pieces, each followed by its copy to the device.

    ends   (device, staging) of every piece
    """

    def __init__(
        self,
        backend: DeviceBackend,
        under_way: UnderWay,
        receives: list[Request],
        ends: list[tuple[Any, np.ndarray]],
    ):
        self._backend, self._under_way, self._receives, self._ends = (
            backend,
            under_way,
            receives,
            ends,
        )
        self._copies: list[Copy] = []
        # Work that still reads the array may continue while the message is on its way.
        self._before = backend.so_far()

    @property
    def source(self) -> int:
        return self._receives[0].source

    def test(self) -> bool:
        while len(self._copies) < len(self._ends):
            if not self._receives[len(self._copies)].test():
                return False
            self._start_copy()
        return self._under_way.ended(self._copies)

    def wait(self) -> None:
        while len(self._copies) < len(self._ends):
            self._receives[len(self._copies)].wait()
            self._start_copy()
        for copy in self._copies:
            copy.wait()

    def __str__(self) -> str:
        return named(self._receives)

    def _start_copy(self) -> None:
        self._copies.append(self._backend.start_copy(*self._ends[len(self._copies)], self._before))
