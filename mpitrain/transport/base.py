"""The Transport protocol: what every carrier of messages offers, and nothing a collective could be built from instead.

Arrays are contiguous NumPy (or CuPy) arrays of any shape and dtype; a receive fills the whole array. Every
point-to-point call carries a `tag`; messages of one (source, tag) arrive in the order they were sent. `rank` and `size`
are relative to this transport: `split` makes smaller ones.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import sched_yield
from typing import Any, Protocol

import numpy as np

from mpitrain.errors import CommError
from mpitrain.trace.recorder import Recorder
from mpitrain.transport.windows import Windows

FIRST_CLAIMED_TAG = 1 << 14
"""Tags below it are for whoever calls `send` and `recv` by hand; `claim_tag` gives out those from it upwards."""


SPIN, LONGEST_PAUSE = 5e-5, 1e-3
"""Seconds: a wait gives way to others up to the first, then sleeps, at most for the second at a time."""


@dataclass
class Traffic:
    """What this rank has sent through point-to-point calls: messages and payload bytes, empty messages included.

    Shared by a transport and what was split from it. Barriers, `gather_text` and the library's own reductions are not
    point-to-point and are not counted.

    waits_for  what this rank stands still for, if it does and that has a name: read by whoever reports a rank that hangs
    content    what is in the message it stands still for, where somebody has said so
    """

    messages: int = 0
    nbytes: int = 0
    waits_for: Any = None
    content: str = ""


class Tenants:
    """What others have built on a transport, with communicators and windows of their own: closed before it, if it still lives.

    What is built on all ranks dies on each at its own time, so the ranks tell each other what lives.
    """

    def __init__(self) -> None:
        self._closing: list[weakref.WeakMethod] = []

    def add(self, close: Callable[[], None]) -> None:
        """Remember the method that closes something; it may have been called before. Collective."""
        self._closing.append(weakref.WeakMethod(close))

    def close(self, transport: "Transport") -> None:
        """Close what lives on every rank, the newest first; what lives on some alone nobody can close. Collective."""
        living = [method() for method in self._closing]
        self._closing.clear()
        if not living:
            return
        told = transport.gather_text([close is not None for close in living])
        while living:
            close = living.pop()
            if close and all(lives[len(living)] for lives in told):
                close()


class Request(Protocol):
    """A message under way, which `str` names. The array belongs to the transport until `test` has said True or `wait` has
    returned.
    """

    @property
    def source(self) -> int:
        """The sender of a finished receive (that is how `start_recv_any` reports it); -1 for sends."""

    def test(self) -> bool:
        """True once the message is complete, and from then on; moves messages along; never blocks."""

    def wait(self) -> None:
        """Block until the message is complete."""


class Several:
    """Requests under way together, as one: the pieces of something long that was sent."""

    source = -1

    def __init__(self, requests: list[Request]):
        self._requests = requests

    def test(self) -> bool:
        return all(request.test() for request in self._requests)

    def wait(self) -> None:
        for request in self._requests:
            request.wait()

    def __str__(self) -> str:
        return named(self._requests)


class Transport(Protocol):
    """Moves arrays between `size` ranks. Waits have no deadline of their own; the watchdog has.

    A carrier inherits what has a body here: the calls that wait, made of those that begin.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    """Host name of every rank, by rank."""
    members: tuple[int, ...]
    """Place of every rank in the whole job: its rank before any split."""
    traffic: Traffic
    windows: Windows
    """The shared memory allocated so far; `windows.locate` tells whether an array lies in it."""
    tenants: Tenants
    native_dtypes: frozenset[str]
    """Names of the dtypes that `native_all_reduce` takes."""
    recorder: Recorder
    """What notes this rank's messages and waits: SILENT but on a transport that is recorded."""
    admits_threads: bool
    """Whether a second thread may send and receive beside the main one."""
    allocates_on_device: bool
    """Whether `allocate` returns memory of a GPU, which is no shared window of host memory."""

    def aside(self, array: Any) -> Any:
        """What orders a reduction of the array and the computation: `device.Aside`; None in host memory, all in order there."""

    def claim_tag(self) -> int:
        """A tag that nobody else on this transport uses, the same on all ranks if they claim in the same order."""

    def send(self, array: np.ndarray, to: int, tag: int = 0) -> None:
        """Send the array; returns when it may be reused."""
        self.start_send(array, to, tag).wait()

    def recv(self, array: np.ndarray, source: int, tag: int = 0) -> None:
        """Fill the array with the next message from `source` under `tag`; CommError if its size differs."""
        self.start_recv(array, source, tag).wait()

    def exchange(
        self, outgoing: np.ndarray, to: int, incoming: np.ndarray, source: int, tag: int = 0
    ) -> None:
        """Send and receive at once, so that a ring of exchanges cannot deadlock."""
        receive = self.start_recv(incoming, source, tag)
        self.start_send(outgoing, to, tag).wait()
        receive.wait()

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        """Begin a send; the array must stay untouched until the request is complete."""

    def start_recv(self, array: np.ndarray, source: int, tag: int = 0) -> Request:
        """Begin a receive; the array holds the message once the request is complete, and nothing defined before."""

    def start_recv_any(self, array: np.ndarray, tag: int = 0) -> Request:
        """Begin a receive from whoever sends first under `tag`; `request.source` names the sender afterwards."""

    def wait_any(self, requests: Sequence[Request]) -> int:
        """Block until a request is complete, and return its place in the list: the first, if there are several.

        A request stays complete: leave it out next time. Polls and pauses as `wait_until` does.
        raises  CommError if the list is empty
        """
        if not requests:
            raise CommError(
                f"rank {self.rank}: wait_any needs a request to wait for, but was given none.",
                "Leave the loop when no request is left.",
            )
        found = -1

        def one_is_complete() -> bool:
            nonlocal found
            found = next((i for i, request in enumerate(requests) if request.test()), -1)
            return found >= 0

        self.wait_until(one_is_complete, what=_AnyOf(requests))
        return found

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        """Call `done`, which polls messages under way, until it says True: beneath `wait_any`, for what is no request.

        The pauses between calls rise from `pause` seconds to LONGEST_PAUSE, and start again when something was sent. Other
        threads of this rank may send and receive between calls.
        what   str() of it names the wait in a deadlock; if None, this rank's messages under way are named
        """

    def admit_thread(self) -> None:
        """Let one more thread of this rank call what is point-to-point, until it calls `dismiss_thread`.

        Meanwhile no wait of the main thread keeps it out, but the collective calls of start-up and end do: `split`,
        `allocate`, `close`, `native_all_reduce`.
        """

    def dismiss_thread(self) -> None:
        """The thread that was admitted calls no more."""

    def barrier(self) -> None:
        """Return once every rank has entered."""

    def split(self, color: int | None, key: int = 0) -> "Transport | None":
        """A transport of the ranks with the same colour, ordered by (key, rank); None for colour None. Collective."""

    def gather_text(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank; values travel as JSON. Collective."""

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        """A zeroed, 64-byte aligned 1-D buffer, in a window that the ranks of this host share if there are several.

        If the host has no room for the window it is plain memory, and one line says so. Collective; see `close`.
        """

    def close(self) -> None:
        """Give back the communicators and windows this transport has taken: MPI has a limited number of them. Collective.

        Its tenants are closed first.
        A window stays open if arrays still lie in it, or another part of the job has borrowed it, on any rank. It then
        belongs to the transport that all were split from. That transport is closed last and frees every window: whoever
        touches an array in one afterwards crashes. CommError on every rank, and nothing is closed, if a part is open.
        """

    def native_all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        """The library's own all-reduce in place ("add" or "maximum"), where there is one. Collective."""

    def start_native_all_reduce(self, array: np.ndarray, op: str = "add") -> Request:
        """Begin `native_all_reduce`. Host memory only."""

    def bind_native(
        self, operation: str, array: np.ndarray, other: np.ndarray
    ) -> Callable[[], None]:
        """A function that runs another collective of the library's own, by its name in native.OPERATIONS, on host memory.

        The length of the array is a multiple of the number of ranks. Collective: binding, and every run.
        other  of an all-to-all: the array it sends, as long; of a reduce-scatter: receives this rank's chunk of the sum
        raises CommError on every rank if one call of the library cannot take so many elements
        """

    def abort(self, message: str) -> None:
        """Print the message and end every rank of the job at once, non-zero. Does not return."""


def poll_until(done: Callable[[], bool], traffic: Traffic, pause: float, what: Any = None) -> None:
    """`Transport.wait_until` where nobody tells that a message has come."""
    now, sent = pause, traffic.messages
    traffic.waits_for = what
    while not done():
        if traffic.messages != sent:
            now, sent = pause, traffic.messages
        if now < SPIN:
            sched_yield()
        else:
            time.sleep(now)
        now = min(1.1 * now, LONGEST_PAUSE)
    traffic.waits_for = None


class _AnyOf:
    """The name of a wait for any of several requests, made when somebody asks."""

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests

    def __str__(self) -> str:
        return f"wait_any of ({named(self._requests)})"


def named(requests: Iterable[Any]) -> str:
    """The names of all requests."""
    return "; ".join(map(str, requests))


def check_message(array: np.ndarray, rank: int, peers: Iterable[int], size: int) -> None:
    """CommError unless the array is one block of plain memory and every peer is a rank."""
    if not array.flags.c_contiguous or array.dtype.hasobject:
        raise CommError(
            f"rank {rank}: a message is one contiguous block of plain numbers, but this array has shape {array.shape}, "
            f"strides {array.strides}, dtype {array.dtype}.",
            "Copy it into a buffer first: numpy.ascontiguousarray(array).",
        )
    for peer in peers:
        if not 0 <= peer < size:
            raise CommError(
                f"rank {rank}: peer {peer} is not among ranks 0 to {size - 1}.",
                "Peers are counted within the transport in hand, which may be a part of the job.",
            )


def aligned_zeros(count: int, dtype: Any) -> np.ndarray:
    """A zeroed 1-D host array that starts on a 64-byte boundary: a cache line, and a full AVX-512 register."""
    dtype = np.dtype(dtype)
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * dtype.itemsize].view(dtype)
