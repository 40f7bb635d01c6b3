"""The Transport protocol: point-to-point messages, barriers, splits and shared memory.

Collectives that are built from these calls live in `mpitrain.collectives`; those of the MPI library
itself are in `native.py`.

Arrays are contiguous NumPy (or CuPy) arrays of any shape and dtype. A receive fills the whole
array. Every point-to-point call takes a `tag`. Messages of one (source, tag) arrive in the order in
which they were sent. `rank` and `size` are relative to this transport: `split` makes smaller ones.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpitrain.errors import CommError
from mpitrain.trace.recorder import LIBRARY_CALLS, MESSAGES, SILENT, Recorder
from mpitrain.transport.places import PlacedRanks
from mpitrain.transport.windows import Tenants, Windows

FIRST_CLAIMED_TAG = 1 << 14
"""The first tag that `claim_tag` returns; smaller tags are free for direct calls."""

LONGEST_PAUSE = 1e-3
"""The longest pause of a wait between two looks, in seconds."""


@dataclass
class Traffic:
    """A count of the point-to-point messages that this rank has sent, with their payload bytes.

    Empty messages count too. A transport and the transports split from it share one object.
    Barriers, `gather_text` and the library's own reductions are not point-to-point and do not
    count.

    by_pointer  bytes that MPI read from the memory of a device; they are part of `nbytes`
    waits_for   the request that this rank is blocked on, or None; the watchdog prints it
    content     a description of the payload that this rank waits for, such as an activation, or ""
    """

    messages: int = 0
    nbytes: int = 0
    by_pointer: int = 0
    waits_for: Any = None
    content: str = ""


Note = tuple[int, int, int]
"""The record of a message in a trace: its name, its peer, and its span."""


class Request(Protocol):
    """A message in progress, as an MPI_Request; `str` returns its name.

    The transport owns the array until `test` has returned True or `wait` has returned.
    """

    @property
    def source(self) -> int:
        """The rank that sent a received message, once the receive is complete; -1 for sends."""

    def test(self) -> bool:
        """Return True once the message is complete, and at every later call. Never blocks.

        The call also makes progress on messages, as MPI_Test.
        """

    def wait(self) -> None:
        """Block until the message is complete."""


class Transport(PlacedRanks, Protocol):
    """An endpoint for messages between `size` ranks, as an MPI communicator.

    Waits have no deadline of their own: the watchdog of a run detects a hang.

    An implementation inherits the methods that have a body here. They are blocking calls, made of
    the non-blocking ones.

    All methods marked "Collective" must be called by every rank of the transport, in the same
    order.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    """The host name of every rank, by rank."""
    members: tuple[int, ...]
    """Every rank's rank in the whole job (before any split), by rank of this transport."""
    traffic: Traffic
    """The messages and bytes that this rank has sent; `split` shares it."""
    windows: Windows
    """The shared memory allocated so far; `windows.locate` finds the window of an array."""
    tenants: Tenants
    """The objects that were built on this transport and that `close` closes first."""
    recorder: Recorder = SILENT
    """The recorder of this rank's messages and waits; SILENT until `record` sets another."""
    names: dict[str | int, int]
    """The numbers of names in the recorder: of waits (MESSAGES, LIBRARY_CALLS), and of claimed tags."""
    admits_threads: bool
    """Whether a second thread may send and receive at the same time as the main thread.

    The owner may set it to False; `split` keeps it.
    """
    is_strict: bool = False
    """Whether the transport checks what MPI trusts, as ranks that are threads do for tests."""
    native_dtypes: Sequence[str]
    """The names of the dtypes that the MPI library's own all-reduce takes."""
    needs_all: str = "these ranks cannot lose one; Start them by mpitrain launch --fault-tolerant"
    """Why the loss of a rank ends the job, and the way out; "" if `survivors` can connect the others."""
    _next_tag: int = FIRST_CLAIMED_TAG
    _last_tag: int = sys.maxsize

    def record(self, recorder: Recorder) -> None:
        """Note the messages and waits of this transport, and of all that are split from it later.

        A message has the name that the recorder had at the `claim_tag` of its tag. Its record lasts
        from its start until this rank has seen it complete. Every call that blocks the recorder's
        thread is recorded as a wait. The wait is for the peer of a message, or for all ranks.
        """
        self.recorder = recorder
        self.names = {
            what: recorder.name(what, self.members) for what in (MESSAGES, *LIBRARY_CALLS)
        }

    def begin_message(self, kind: int, array: Any, tag: int, peer: int) -> "Note":
        """Begin the record of a message; peer: the other rank of the whole job, or -1."""
        recorder, name = self.recorder, self.names.get(tag) or self.recorder.topic
        span = recorder.begin(kind, name, 0, -1, recorder.micro, array.nbytes, peer, tag)
        return name, peer, span

    def claim_tag(self) -> int:
        """Return a tag, from FIRST_CLAIMED_TAG on, that no other caller on this transport uses.

        All ranks get the same tag if they claim tags in the same order. No message is sent.
        """
        tag = self._next_tag
        self._next_tag = tag + 1 if tag < self._last_tag else FIRST_CLAIMED_TAG
        if self.recorder.is_on:
            naming = self.recorder.naming
            self.names[tag] = self.recorder.name(naming, self.members if naming else ())
        return tag

    def send(self, array: np.ndarray, to: int, tag: int = 0) -> None:
        """Send an array, and return when it may be reused.

        Parameters
        ----------
        array : ndarray
            Contiguous, any shape and dtype.
        to : int
            The receiving rank of this transport.
        tag : int
            At the receiver, only a receive with the same tag matches.

        Raises
        ------
        CommError
            If the array is not contiguous, or `to` is no rank of this transport.
        """
        self.start_send(array, to, tag).wait()

    def recv(self, array: np.ndarray, source: int | None, tag: int = 0) -> None:
        """Fill an array with the next message of one sender and tag; arguments as `send`.

        Raises
        ------
        CommError
            If the size of the message differs, the array is not contiguous, or `source` is no rank
            of this transport.
        """
        self.start_recv(array, source, tag).wait()

    def exchange(
        self, outgoing: np.ndarray, to: int, incoming: np.ndarray, source: int, tag: int = 0
    ) -> None:
        """Send one array and receive another at the same time, as MPI_Sendrecv.

        A ring in which every rank calls this cannot deadlock. The arrays must not overlap.
        """
        receive = self.start_recv(incoming, source, tag)
        self.start_send(outgoing, to, tag).wait()
        receive.wait()

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        """Begin to send an array, as MPI_Isend; arguments and errors as `send`.

        The array must stay unchanged until the request is complete.
        """

    def start_recv(self, array: np.ndarray, source: int | None, tag: int = 0) -> Request:
        """Begin to receive into an array, as MPI_Irecv; arguments and errors as `recv`.

        With source None the first rank that sends under `tag` is received from, as with
        MPI_ANY_SOURCE; the request's `source` is that rank once it is complete. The content of the
        array is undefined until then. `test` or `wait` raises CommError if the size of the message
        differs.
        """

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        """Call `done`, which polls messages in progress, repeatedly until it returns True.

        Other threads of this rank may send and receive between the calls.

        Parameters
        ----------
        done : callable
            Returns True when the wait is over.
        pause : float
            Seconds between the first two calls. Pauses grow to LONGEST_PAUSE, and start again at
            `pause` when this rank has sent a message.
        what : object, optional
            `str(what)` is the name of the wait in the report of a deadlock. With None, the report
            names this rank's messages in progress.
        """

    def admit_thread(self) -> None:
        """Allow one more thread of this rank to make point-to-point calls, until `dismiss_thread`.

        Waits of the main thread then no longer lock the thread out. The collective calls of
        start-up and shutdown still do: `split`, `allocate`, `close`, and those of `native.py`.
        """

    def dismiss_thread(self) -> None:
        """End the permission of one admitted thread, which must make no further calls."""

    def barrier(self) -> None:
        """Return once every rank has entered. Collective."""

    def split(self, color: int | None, key: int = 0) -> "Transport | None":
        """Return a transport of the ranks with the same colour, as MPI_Comm_split. Collective.

        Parameters
        ----------
        color : int or None
            Ranks with the same colour form one transport. None joins no transport.
        key : int
            The new ranks are ordered by (key, rank).

        Returns
        -------
        Transport or None
            None for colour None. It shares `traffic` and `windows` with this transport, and must be
            closed before the transport of the whole job.
        """

    def subset(self, ranks: Sequence[int]) -> "Transport":
        """Return a transport of these ranks, in this order, as MPI_Comm_create_group.

        Collective over these ranks alone; close it before the transport of the whole job.
        """

    def gather_text(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, as an all-gather of JSON. Collective.

        The value is any that `json.dumps` accepts; JSON turns tuples into lists.
        """

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        """Return a zeroed 1-D buffer, aligned to 64 bytes. Collective.

        If this host has several ranks, the buffer is in a window of memory that they share, which
        `close` frees. If the host has no room for the window, the buffer is plain memory, and one
        rank of the host prints one line.
        """

    def shares_memory(self) -> bool:
        """Return whether `allocate` gives all ranks a window of memory that they share, or none. Collective."""
        return len({*self.hosts}) == 1

    def close(self) -> None:
        """Free the communicators and windows of this transport; MPI has a limited number of them.
        Collective.

        Objects in `tenants` are closed first.

        Raises
        ------
        CommError
            On every rank, if a transport split from this root is still open on any rank. Then no
            window is freed.

        Notes
        -----
        A window stays open if any rank still has an array in it, or another part of the job has
        borrowed it. The root transport, from which all others were split, then owns it. The root is
        closed last and frees every window. After that, any access to an array in a window crashes.
        """

    def abort(self, message: str, exit_code: int = 1) -> None:
        """Print this rank and a message to standard error, and end every rank of the job at once.

        Does not return. The exit code of the job is not 0.
        """

    def end_rank(self, message: str, exit_code: int = 1) -> None:
        """Print as `abort`, and end this rank; the others go on if they do not need all.

        Does not return. With an empty message, nothing is printed.
        """


class Recorded:
    """A request in a trace, which notes each wait for it, and its end.

    note  its record, which has begun
    """

    def __init__(self, request: Any, recorder: Recorder, note: Note):
        self._request, self._recorder = request, recorder
        self._name, self._peer, self._span = note

    @property
    def source(self) -> int:
        return self._request.source

    def test(self) -> bool:
        if not self._request.test():
            return False
        self._end()
        return True

    def wait(self) -> None:
        wait = self._recorder.wait(self._name, self._peer, self._span)
        self._request.wait()
        self._end()
        self._recorder.go_on(wait)

    def __str__(self) -> str:
        return str(self._request)

    def _end(self) -> None:
        if self._span:
            self._recorder.end(self._span)
            self._span = 0


class Several:
    """One request that stands for several, such as the pieces of a long message."""

    source = -1

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests

    def test(self) -> bool:
        return all(request.test() for request in self._requests)

    def wait(self) -> None:
        for request in self._requests:
            request.wait()

    def __str__(self) -> str:
        return named(self._requests)


def named(requests: Iterable[Any]) -> str:
    return "; ".join(map(str, requests))


def check_message(array: np.ndarray, rank: int, peers: Iterable[int], size: int) -> None:
    """Raise CommError unless the array is one block of plain memory and every peer is a rank."""
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
    """Return a zeroed 1-D host array that starts on a 64-byte boundary (cache line, AVX-512)."""
    dtype = np.dtype(dtype)
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * dtype.itemsize].view(dtype)
