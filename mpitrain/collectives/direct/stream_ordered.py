"""The run of a collective over the GPU memory of all ranks, on the stream of messages.

Run k of a rank has gradients G(k), which its stream of computation writes. R(k) is an event behind
them, which all ranks share. W(k) is the rank's work on the memory of all ranks, and D(k) an event
behind W(k).

    computation  G(k) R(k)  | other work ...                                  | G(k+1) R(k+1)
    messages                | wait for R(k) of all ranks, W(k), D(k)          |
    host         record R(k), barrier, launch W(k), poll D(k), announce its end, await all others

The computation never waits, and the host only polls. The order is safe:

1. W(k) begins after G(k) of all ranks. A rank launches its waits after the barrier, and all ranks
   have recorded R(k) before. A wait is for the last record before it (cudaStreamWaitEvent).
2. G(k+1) overwrites no memory in use. It follows the end of run k, when D(k) of all ranks has
   passed.
3. No wait is for a later record. R(k+1) follows the end of run k, when all ranks have launched
   their waits for R(k).
4. Streams never wait in a circle, in any order of several reductions. Each wait is launched after
   the record that it is for.
5. The loss of a rank ends the run, even if a device waits for the lost rank. While a rank polls its
   device, its receives from all ranks are posted.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.collectives.engine.executor import Execution, started_twice
from mpitrain.collectives.plans.pairwise import barrier
from mpitrain.machine.backend import Copy, Recordable
from mpitrain.transport.base import Request, named
from mpitrain.transport.device import DeviceTransport


class StreamOrdered:
    """Collective over the GPU memory of all ranks of a host; a Reduction.

    own     event R of this rank
    others  the events R of all other ranks, opened
    work    launches W on the current stream
    """

    state = learn = None
    algorithm = ""
    is_messages = False
    scratch_bytes = 0

    def __init__(
        self,
        transport: DeviceTransport,
        array: Any,
        tag: int,
        own: Recordable,
        others: Sequence[Any],
        work: Callable[[], None],
    ):
        self._transport, self._own, self._work = transport, own, work
        self._events = [own, *others]
        aside = transport.aside(array)
        assert aside is not None  # The array is in device memory.
        self._aside = aside
        plan = barrier(transport.rank, transport.size)
        self._recorded = Execution(transport, np.empty(0, np.uint8), "add", plan, tag)
        self._ended = _Announcements(transport, tag)
        self._done: Copy | None = None
        self._left: deque[Callable[[], bool]] = deque()

    def run(self) -> None:
        self.start()
        self.wait()

    def start(self) -> None:
        if self._left:
            raise started_twice()
        self._own.record()
        self._recorded.start()
        self._left.extend((self._has_launched, self._has_computed, self._ended.have_arrived))

    def poll(self) -> bool:
        while self._left and self._left[0]():
            self._left.popleft()
        return not self._left

    def wait(self) -> None:
        self._transport.wait_until(self.poll, what=self)

    def __str__(self) -> str:
        return f"{self._recorded}{self._ended}" or "the work of this GPU"

    def _has_launched(self) -> bool:
        """Launch the waits and the work when all ranks have recorded R; return whether they have."""
        if not self._recorded.poll():
            return False
        self._ended.expect()
        backend = self._transport.backend
        with self._aside.here():
            for event in self._events:
                backend.follow(event)
            self._work()
            self._done = backend.so_far()
        return True

    def _has_computed(self) -> bool:
        """Return whether D has passed, and then announce it; PeerLost if a rank has ended."""
        self._ended.have_arrived()
        assert self._done is not None  # The launch has set it.
        if not self._aside.has_passed(self._done):
            return False
        self._ended.send()
        return True


class _Announcements:
    """Empty messages by which all ranks announce the end of their work to each other."""

    def __init__(self, transport: DeviceTransport, tag: int):
        self._transport, self._tag, self._empty = transport, tag, np.empty(0, np.uint8)
        self._peers = [peer for peer in range(transport.size) if peer != transport.rank]
        self._requests: list[Request] = []

    def __str__(self) -> str:
        return named(self._requests)

    def expect(self) -> None:
        """Post the receives of one run."""
        self._requests = [
            self._transport.start_recv(self._empty, peer, self._tag) for peer in self._peers
        ]

    def send(self) -> None:
        """Announce the end of this rank's work."""
        self._requests += [
            self._transport.start_send(self._empty, peer, self._tag) for peer in self._peers
        ]

    def have_arrived(self) -> bool:
        """Return whether all messages posted so far are complete. Never blocks."""
        self._requests = [request for request in self._requests if not request.test()]
        return not self._requests
