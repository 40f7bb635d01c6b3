"""Messages of GPU memory over a transport of host memory: the DeviceTransport.

Arrays in host memory go straight to the host transport. Arrays in device memory go one of two ways.
`Direct` passes the device pointer to a CUDA-aware MPI. `Staged` copies through page-locked host
memory. `over_device` chooses: it asks the MPI library, then tries it in a child process.

Work on the device that wrote an array must end before a message reads it. Work that still reads the
target of a receive must end before the message arrives. A copy waits for that work on the device.
MPI does not know streams. Before MPI gets a pointer, the host therefore waits for all work started
so far on the current stream.

A reduction of many messages runs on a stream of its own (`aside`). Its copies and sums wait once
for the computation before it. The computation after it waits for them. So no step of a ring waits
for computation that runs meanwhile:

    computation  ... writes the array |  other work      | reads the sum ...
                                begin v                  ^ end
    messages                          | copies and sums  |
"""

import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, cast

import numpy as np

from mpitrain.errors import CommError, ConfigError
from mpitrain.machine import process
from mpitrain.machine.backend import Arena, Backend, Copy, DeviceBackend, HostMemory, on_device
from mpitrain.transport.base import Request, Several, Transport, check_message, named
from mpitrain.transport.library import Awareness, cuda_awareness, loaded_path


class UnderWay:
    """A record of device work in progress: a wait for the device is no deadlock."""

    def __init__(self) -> None:
        self.is_any = False

    def ended(self, copies: Sequence[Copy]) -> bool:
        """Return whether all copies have ended; if not, record that the device is still busy."""
        if all(one.test() for one in copies):
            return True
        self.is_any = True
        return False


class Aside:
    """The message stream of a device, for a reduction of an array in device memory.

    As a Request it has ended when the computation before `begin` has.
    """

    source = -1

    def __init__(self, backend: DeviceBackend, under_way: UnderWay):
        self._backend, self._under_way = backend, under_way
        self._before: list[Copy] = []

    def begin(self) -> None:
        """Record an event after the computation launched so far.

        Work on the message stream may start only after this event: when `test` returns True, or
        after `wait`.
        """
        self._before = [self._backend.so_far()]

    def test(self) -> bool:
        """Return whether the computation before `begin` has ended. Never blocks."""
        return self._under_way.ended(self._before)

    def has_passed(self, event: Copy) -> bool:
        """Return whether the device has passed an event. Never blocks."""
        return self._under_way.ended([event])

    def wait(self) -> None:
        """Block until the computation before `begin` has ended."""
        for before in self._before:
            before.wait()

    def here(self) -> AbstractContextManager[Any]:
        """Return a context in which work starts on the message stream."""
        return self._backend.aside()

    def around(self, steps: Iterator[Request]) -> Iterator[Request]:
        """Do a run whose own work starts on the message stream; yield its requests."""
        self.begin()
        request: Request | None = self
        while request:
            yield request
            with self.here():
                request = next(steps, None)
        with self.here():
            after = self._backend.so_far()
        # The computation started from now on waits for the message stream.
        self._backend.follow(after)


def aside(transport: Transport, array: Any) -> Aside | None:
    """Return the stream for the messages of a reduction of `array`.

    The messages start after the computation launched before the reduction. Computation launched
    after it waits for them. None in host memory, where all work is already in order.
    """
    if isinstance(transport, DeviceTransport) and on_device(array):
        return Aside(transport.backend, transport.under_way)
    return None


OUTLIVING = deque[list](maxlen=1024)
"""The last `retired` of transports that are gone: other ranks may still be about to wait for these events."""


class DeviceTransport:
    """A Transport for messages in device and host memory; its `allocate` returns device memory.

    All other calls and attributes are those of the host transport, as `hosts`, tags, traffic and
    windows. A staged message counts in `traffic` once per piece. Only the main thread may call: it
    owns the streams and the staging memory. All transports split from one share these, and the
    record of work `under_way`. The two subclasses move the arrays.

    host      carries arrays in host memory
    backend   manages the device memory
    unshared  the reason why these ranks cannot use each other's device memory, "" if they can; None
              until collectives have tried
    refusals  such reasons of all groups of this rank
    retired   events of this rank whose collectives are gone
    is_whole  whether these are all ranks of the transport from which this one was split
    """

    admits_threads = False
    send, recv, exchange = Transport.send, Transport.recv, Transport.exchange

    def __init__(self, host: Transport, backend: DeviceBackend):
        self.backend, self.under_way = backend, UnderWay()
        self.refusals: list[str] = []
        self._join(host, True)

    def _join(self, host: Transport, is_whole: bool) -> None:
        self.host, self.rank, self.size = host, host.rank, host.size
        self.is_whole, self.retired = is_whole, list[Any]()
        weakref.finalize(self, OUTLIVING.append, self.retired).atexit = False
        self.unshared: str | None = (
            None if host.needs_all else "It does not outlive the loss of a rank."
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def split(self, color: int | None, key: int = 0) -> Self | None:
        part = self.host.split(color, key)
        return None if part is None else self._over(part)

    def subset(self, ranks: Sequence[int]) -> Self:
        return self._over(self.host.subset(ranks))

    def _over(self, host: Transport) -> Self:
        part = object.__new__(type(self))
        vars(part).update(vars(self))
        part._join(host, self.is_whole and host.size == self.size)
        return part

    def start_send(self, array: Any, to: int, tag: int = 0) -> Request:
        return (self._send if on_device(array) else self.host.start_send)(array, to, tag)

    def start_recv(self, array: Any, source: int | None, tag: int = 0) -> Request:
        return (self._recv if on_device(array) else self.host.start_recv)(array, source, tag)

    def _send(self, array: Any, to: int, tag: int) -> Request:
        """Send an array in device memory, as `start_send`; the next method likewise."""
        raise NotImplementedError

    def _recv(self, array: Any, source: int | None, tag: int) -> Request:
        raise NotImplementedError

    def on_host(self, array: Any, work: Callable[[Any], None]) -> None:
        """Let `work` change an array in device memory, which MPI can use."""
        raise NotImplementedError

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        # The host transport reports a deadlock if no message can end a wait. So its wait returns
        # whenever the device is busy, and this loop starts it again.
        under_way, ended = self.under_way, False

        def goes_on() -> bool:
            nonlocal ended
            under_way.is_any = False
            ended = done()
            return ended or under_way.is_any

        while not ended:
            self.host.wait_until(goes_on, pause, what)

    def allocate(self, count: int, dtype: Any) -> Any:
        return self.backend.zeros(count, dtype)


class Direct(DeviceTransport):
    """Transport that passes device pointers to a CUDA-aware MPI."""

    def _send(self, array: Any, to: int, tag: int) -> Request:
        self.backend.synchronize()
        self.host.traffic.by_pointer += array.nbytes
        return self.host.start_send(array, to, tag)

    def _recv(self, array: Any, source: int | None, tag: int) -> Request:
        self.backend.synchronize()
        return self.host.start_recv(array, source, tag)

    def on_host(self, array: Any, work: Callable[[Any], None]) -> None:
        self.backend.synchronize()
        work(array)


PIECE = 1 << 20
"""Bytes of a piece of a staged message.

A piece is long enough for the full rate of links and copy engines, and short enough to overlap early.
"""


class _StagingMemory(HostMemory):
    """Page-locked host memory of an arena, which a device can copy to and from by itself."""

    def __init__(self, backend: DeviceBackend):
        super().__init__()
        self._backend = backend

    def allocate(self, nbytes: int) -> np.ndarray:
        return self._backend.staging(nbytes)


class Staged(DeviceTransport):
    """Transport that copies device arrays through page-locked host memory.

    A message travels in pieces. While one piece is sent, the next is copied to the host. While one
    piece arrives, the one before it is copied to the device. A message posts all its receives when
    it starts, and all its sends before `start_send` returns. It then needs no further calls to
    progress: as with MPI's own messages, the rank may wait for anything else. Staging memory grows
    to the largest number of bytes ever in progress. It is reused, and never freed.
    """

    def __init__(self, host: Transport, backend: DeviceBackend, piece: int = PIECE):
        """piece: bytes of a piece, the same on all ranks."""
        super().__init__(host, backend)
        self._piece, self._buffers = piece, Arena(_StagingMemory(backend))

    def _send(self, array: Any, to: int, tag: int) -> Request:
        check_message(array, self.rank, (to,), self.size)
        flat, buffer = self._staged(array)
        pieces, so_far = self._pieces(flat), self.backend.so_far()
        copies = [self.backend.start_copy(buffer[piece], flat[piece], so_far) for piece in pieces]
        sends: list[Request] = []
        for piece, staged in zip(pieces, copies, strict=True):
            while not staged.test():
                for send in sends:
                    send.test()  # lets MPI make progress on earlier pieces
            sends.append(self.host.start_send(buffer[piece], to, tag))
        return Several(sends)

    def _recv(self, array: Any, source: int | None, tag: int) -> Request:
        check_message(array, self.rank, () if source is None else (source,), self.size)
        flat, buffer = self._staged(array)
        pieces = self._pieces(flat)
        if source is None and len(pieces) > 1:  # they could come from different ranks
            raise CommError(
                f"rank {self.rank}: a receive from any rank holds at most {self._piece} bytes where GPU memory is staged, "
                f"but this array has {array.nbytes}.",
                "Let the sender announce itself first and receive from that rank, or use an MPI that takes GPU memory.",
            )
        receives = [self.host.start_recv(buffer[piece], source, tag) for piece in pieces]
        return _Receive(
            self.backend,
            self.under_way,
            receives,
            [(flat[piece], buffer[piece]) for piece in pieces],
        )

    def on_host(self, array: Any, work: Callable[[Any], None]) -> None:
        flat, buffer = self._staged(array)
        so_far = self.backend.so_far()
        self.backend.start_copy(buffer, flat, so_far).wait()
        work(buffer)
        self.backend.start_copy(flat, buffer, so_far).wait()

    def _staged(self, array: Any) -> tuple[Any, np.ndarray]:
        """Return the array as one dim, and a buffer that is free when no view of it is left."""
        return array.reshape(-1), self._buffers.take((array.size,), array.dtype)

    def _pieces(self, flat: Any) -> list[slice]:
        """Return the pieces of an array; an empty array is one empty piece."""
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
        for started in self._copies:
            started.wait()

    def __str__(self) -> str:
        return named(self._receives)

    def _start_copy(self) -> None:
        self._copies.append(self._backend.start_copy(*self._ends[len(self._copies)], self._before))


COUNTS = (1, 1001, 1 << 20)
"""Floats per message of the self-test: a small (eager) one, an odd length, and one by rendezvous."""

WRONG = 3  # exit code of a self-test that received wrong data
CHILD = (sys.executable, "-m", "mpitrain.transport.device")
SECONDS = 120.0


def over_device(transport: Transport, backend: Backend, cuda_aware: str) -> Transport:
    """Return a transport that carries the backend's arrays as device.cuda_aware demands; collective."""
    if not isinstance(backend, DeviceBackend):
        return transport
    is_aware = cuda_messages(transport, cuda_aware).cuda
    return cast(Transport, (Direct if is_aware else Staged)(transport, backend))


def cuda_messages(transport: Transport, setting: str) -> Awareness:
    """Decide whether GPU pointers go to MPI, and why: the same answer on every rank. Collective.

    setting  device.cuda_aware: "yes" and "no" are final; "auto" queries and tests MPI on one rank
             of each host
    """
    if setting != "auto":
        return Awareness(setting == "yes", f"device.cuda_aware = {setting}")
    awareness = None
    if transport.hosts.index(transport.hosts[transport.rank]) == transport.rank:
        awareness = cuda_awareness(loaded_path(), process.environment())
        proven = self_test(CHILD, process.environment_of_one(), SECONDS) if awareness.cuda else None
        awareness = (
            Awareness(proven.cuda, f"says {awareness.how}, {proven.how}")
            if proven
            else Awareness(False, f"says {awareness.how}")
        )
    answers = [Awareness(*answer) for answer in transport.gather_text(awareness) if answer]
    return next((answer for answer in answers if not answer.cuda), answers[0])


def self_test(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Awareness:
    """Let a child send GPU memory to itself; a crash, wrong data, a timeout or any failure mean no.

    A wrong yes of the library causes a segmentation fault or wrong numbers, not an error code.
    Therefore a child process makes the trial, with MPI alone. It proves that the library can read
    and write such memory. It does not test the links between hosts.
    """
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Awareness(False, f"but a self-test was still waiting after {seconds:g} s")
    if done.returncode == 0:
        return Awareness(True, "and a self-test moved GPU memory")
    if done.returncode == WRONG:
        return Awareness(False, "but a self-test received wrong data")
    if done.returncode < 0:
        return Awareness(
            False, f"but a self-test crashed ({signal.Signals(-done.returncode).name})"
        )
    lines = done.stderr.strip().splitlines()
    return Awareness(
        False,
        f"but a self-test failed: {lines[-1].strip() if lines else f'exit code {done.returncode}'}",
    )


def exchange_is_right(transport: Transport, backend: DeviceBackend) -> bool:
    """Send device memory from this rank to itself, and compare the data."""
    for count in COUNTS:
        sent = np.arange(count, dtype=np.float32) + 1
        outgoing, incoming = backend.from_host(sent), backend.zeros(count, np.float32)
        transport.exchange(outgoing, transport.rank, incoming, transport.rank)
        if not (on_device(incoming) and np.array_equal(backend.to_host(incoming), sent)):
            return False
    return True


def main() -> None:
    """Run the self-test: the entry point of the child process."""
    from mpitrain.machine.cuda import CudaBackend
    from mpitrain.transport.mpi import connect

    process.choose_gpu("cuda")
    try:
        backend = CudaBackend()
    except ConfigError as error:
        sys.exit(error.law)
    sys.exit(0 if exchange_is_right(Direct(connect(), backend), backend) else WRONG)


if __name__ == "__main__":
    main()
