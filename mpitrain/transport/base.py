"""The Transport protocol: what every carrier of messages offers, and nothing a collective could be built from instead.

Arrays are contiguous NumPy (or CuPy) arrays of any shape and dtype; a receive fills the whole array. Every
point-to-point call carries a `tag`; messages of one (source, tag) arrive in the order they were sent. `rank` and `size`
are relative to this transport: `split` makes smaller ones.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import sched_yield
from typing import Any, Protocol

import numpy as np

from mpitrain.errors import CommError
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
    """

    messages: int = 0
    nbytes: int = 0


class Request(Protocol):
    """A message under way. The array belongs to the transport until `test` has said True or `wait` has returned."""

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


class Transport(Protocol):
    """Moves arrays between `size` ranks. Waits have no deadline of their own; the watchdog has."""

    rank: int
    size: int
    hosts: tuple[str, ...]
    """Host name of every rank, by rank."""
    members: tuple[int, ...]
    """Place of every rank in the whole job: its rank before any split."""
    traffic: Traffic
    windows: Windows
    """The shared memory allocated so far; `windows.locate` tells whether an array lies in it."""
    native_dtypes: frozenset[str]
    """Names of the dtypes that `native_all_reduce` takes."""
    admits_threads: bool
    """Whether a second thread may send and receive beside the main one."""

    def claim_tag(self) -> int:
        """A tag that nobody else on this transport uses, the same on all ranks if they claim in the same order."""

    def send(self, array: np.ndarray, to: int, tag: int = 0) -> None:
        """Send the array; returns when it may be reused."""

    def recv(self, array: np.ndarray, source: int, tag: int = 0) -> None:
        """Fill the array with the next message from `source` under `tag`; CommError if its size differs."""

    def exchange(self, outgoing: np.ndarray, to: int, incoming: np.ndarray, source: int, tag: int = 0) -> None:
        """Send and receive at once, so that a ring of exchanges cannot deadlock."""

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        """Begin a send; the array must stay untouched until the request is complete."""

    def start_recv(self, array: np.ndarray, source: int, tag: int = 0) -> Request:
        """Begin a receive; the array holds the message once the request is complete, and nothing defined before."""

    def start_recv_any(self, array: np.ndarray, tag: int = 0) -> Request:
        """Begin a receive from whoever sends first under `tag`; `request.source` names the sender afterwards."""

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6) -> None:
        """Call `done`, which polls what is under way, until it says True.

        The pauses between calls rise from `pause` seconds to LONGEST_PAUSE, and start again when something was sent.
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

        A window stays open if arrays still lie in it, or another part of the job has borrowed it, on any rank. It then
        belongs to the transport that all were split from. That transport is closed last and frees every window: whoever
        touches an array in one afterwards crashes. CommError on every rank, and nothing is closed, if a part is open.
        """

    def native_all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        """The library's own all-reduce in place ("add" or "maximum"), where there is one. Collective."""

    def start_native_all_reduce(self, array: np.ndarray, op: str = "add") -> Request:
        """Begin `native_all_reduce`. Host memory only."""

    def abort(self, message: str) -> None:
        """Print the message and end every rank of the job at once, non-zero. Does not return."""


def poll_until(done: Callable[[], bool], traffic: Traffic, pause: float) -> None:
    """`Transport.wait_until` where nobody tells that a message has come."""
    now, sent = pause, traffic.messages
    while not done():
        if traffic.messages != sent:
            now, sent = pause, traffic.messages
        if now < SPIN:
            sched_yield()
        else:
            time.sleep(now)
        now = min(1.1 * now, LONGEST_PAUSE)


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
            raise CommError(f"rank {rank}: peer {peer} is not among ranks 0 to {size - 1}.",
                            "Peers are counted within the transport in hand, which may be a part of the job.")


def aligned_zeros(count: int, dtype: Any) -> np.ndarray:
    """A zeroed 1-D host array that starts on a 64-byte boundary: a cache line, and a full AVX-512 register."""
    dtype = np.dtype(dtype)
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + count * dtype.itemsize].view(dtype)
