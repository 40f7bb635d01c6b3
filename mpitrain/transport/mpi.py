"""The MPI transport, by mpi4py: connecting the ranks, requests in progress, and the transport itself.

Importing mpi4py.MPI starts MPI. The import therefore waits until `connect` is called: the GPU and
the number of BLAS threads must be chosen first.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

import atexit
import faulthandler
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from os import sched_yield
from types import TracebackType
from typing import Any, NoReturn
from warnings import catch_warnings, simplefilter

import numpy as np

from mpitrain.errors import CommError, ConfigError, MpitrainError, PeerLost, say
from mpitrain.machine import process
from mpitrain.trace.recorder import BARRIER, MESSAGES, RECEIVE, SEND, SILENT, WORDS, Recorder
from mpitrain.transport import ulfm
from mpitrain.transport.agreement import ending_together, listed
from mpitrain.transport.base import (
    FIRST_CLAIMED_TAG,
    LONGEST_PAUSE,
    Recorded,
    Request,
    Traffic,
    Transport,
    aligned_zeros,
    check_message,
)
from mpitrain.transport.failures import (
    ABORT_SECONDS,
    LARGEST,
    Guard,
    MpiJob,
    departures,
    end_job,
    unlink_mapped,
)
from mpitrain.transport.library import family_of, named
from mpitrain.transport.places import DISMISSAL
from mpitrain.transport.windows import Tenants, Windows, no_room

TYPE_BLOCK = 1 << 20
"""Elements per block of the derived type that carries more than 2^31 - 1 elements in one message.
"""

REDUCED = (
    "float32",
    "float64",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
)
"""The names of the dtypes that MPI reduces; all others travel as a type of the same width."""

LEAST_TAG_BOUND = 32767
"""The largest tag that every MPI library allows."""

LAUNCHED = {
    "Open MPI": ("Open MPI",),
    "MVAPICH": ("MPICH", "Intel MPI"),
    "MPICH or Intel MPI": ("MPICH", "Intel MPI"),
}
"""{launcher, as of `process.launched`: families of libraries whose ranks it connects}."""

SPIN = 5e-5
"""Seconds. A wait whose next pause is shorter only yields the processor; else it sleeps."""

LOST, CROWDED = 3e-5, 0.1
"""Seconds. A yield that returns after LOST gave the core to other work: it gives up its place, and may cost milliseconds.

Waits of the next CROWDED seconds therefore sleep at once.
"""


def connect(thread_level: str = "serialized") -> MpiTransport:
    """Start MPI if it is not running, and return a transport over all its ranks; collective.

    thread_level: "serialized", so that threads take turns to call MPI, or "multiple", which costs
    MPI a lock on every call. The level of an MPI that is running already stays.

    From then on an uncaught exception of one rank ends the job. If a rank ends by itself, the others
    go on. A rank that waits for the ended rank in the transport ends the job after 2 seconds. This
    works in jobs of at most 256 ranks.

    In a job that outlives the loss of a rank, all calls return one transport.
    """
    transport = join_world(thread_level)
    refuse_strangers()
    if 1 < transport.size <= LARGEST and transport.needs_all:
        departures(transport.MPI).watch(transport.job, transport.traffic)
    return transport


def join_world(
    thread_level: str = "serialized", meanwhile: Callable[[], object] = bool
) -> MpiTransport:
    """Connect as `connect`, but do not look for ended ranks: for programs whose ranks end together.

    meanwhile  called on a spare before it waits
    """
    import mpi4py

    if _TOLERANT and _TOLERANT[0].comm:
        return _TOLERANT[0]
    if _TOLERANT and process.spares():  # They would not take part.
        raise ConfigError(
            "A job with spares connects once, and its transport was closed.",
            "Close it at the end of the program.",
        ).on_every_rank()
    process.leave_job_of_parent()
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.thread_level = thread_level
        process.silence_ucx()
    with ulfm.watching_siblings():
        transport = _over(_started(mpi4py.rc).COMM_WORLD)
    if transport.hosts.index(transport.hosts[transport.rank]) == transport.rank:
        unlink_mapped(transport.size == 1)
    if transport.size > 1 and sys.excepthook is sys.__excepthook__:
        sys.excepthook = transport.end_by_exception
    if not transport.needs_all:
        _await_place(transport, meanwhile)
        _TOLERANT[:] = [transport]
    return transport


_TOLERANT: list[MpiTransport] = []
"""The transport over all ranks of a job that outlives the loss of one: `survivors` renews it for all its users."""


def _await_place(transport: MpiTransport, meanwhile: Callable[[], object]) -> None:
    """Let a spare wait for a place: it returns when it has one, and exits when the job is over."""
    atexit.register(transport.dismiss_spares)
    if not process.spares():
        return
    transport.set_spares(process.is_spare())
    if not transport.is_spare:
        return
    faulthandler.cancel_dump_traceback_later()  # The ranks are connected, and a spare may wait for days.
    before = {}
    if threading.current_thread() is threading.main_thread():
        # The ranks with a place stop a run, and then dismiss this one.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in process.STOPS}
    meanwhile()
    if not transport.await_place():
        sys.exit(0)
    for number, handler in before.items():
        signal.signal(number, handler)


def _started(rc: Any) -> Any:
    """Return mpi4py's MPI, which runs; ConfigError where its start would crash or hang.

    rc  mpi4py.rc
    """
    if "mpi4py.MPI" not in sys.modules:
        rc.initialize = False
        rc.finalize = not process.outlives_ranks()  # After a loss MPI_Finalize may hang.
    with catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # The launcher's library is checked below.
        from mpi4py import MPI

    if not MPI.Is_initialized():
        version, started = named(MPI.Get_library_version()), process.launched()
        family = family_of(version)
        if family and started.launcher in LAUNCHED and family not in LAUNCHED[started.launcher]:
            by = f"The launcher of {started.launcher} started {started.size} processes"
            _refuse(started, f"{by}, but mpi4py loads {version}.")
        if (family, started.launcher) == ("Open MPI", "none"):
            try:
                process.check_temporary_folder()
            except ConfigError as error:
                raise error.on_every_rank() from None
        MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
    return MPI


@contextmanager
def ranks() -> Iterator[MpiTransport]:
    """Connect all ranks of the MPI job, and end the job if one of them raises an exception.

    Leaving the block is collective: a rank waits there for the others, then closes the transport.
    A rank that raises in the block prints its traceback and aborts the job. Otherwise the others
    would wait for its messages. An error that mpitrain raises on every rank is printed once.

    Examples
    --------
    >>> with mpitrain.ranks() as transport:
    ...     mpitrain.Group(transport, "ring").all_reduce(array)
    """
    try:
        transport = join_world()
    except MpitrainError as error:
        say(error.named())
        sys.exit(error.exit_code)
    with ending_together(transport):
        refuse_strangers()
        yield transport
    transport.close()


def from_communicator(comm: Any) -> MpiTransport:
    """Return a transport over the ranks of an mpi4py intracommunicator; collective.

    The transport duplicates the communicator, and frees the duplicate in its `close()`.
    """
    refuse_strangers()
    return _over(comm)


def _over(comm: Any) -> MpiTransport:
    from mpi4py import MPI

    job, rank = MpiJob(MPI), comm.rank
    with Guard(job, comm, f"rank {rank}", range(comm.size), "MPI_Comm_dup"):
        return MpiTransport(comm.Dup(), rank, job)


def refuse_strangers() -> None:
    """Raise ConfigError if a launcher started N processes, but each is rank 0 of 1 for MPI.

    Such processes would all write the same files.
    """
    from mpi4py import MPI

    started = process.launched()
    if started.size > 1 and MPI.COMM_WORLD.size == 1:
        by = f"{started.launcher} started {started.size} processes"
        typed = f"Type `mpitrain launch -n {started.size} -- {process.own_command()}`."
        _refuse(
            started,
            f"{by}, but MPI tells each of them that it is alone.",
            typed if started.launcher == "torchrun" else LAUNCHER_OF_MPI,
        )


LAUNCHER_OF_MPI = "Use the launcher of the MPI that mpi4py loads: `mpitrain launch` finds it, `mpitrain doctor` shows both."


def _refuse(started: process.Launched, law: str, way_out: str = LAUNCHER_OF_MPI) -> NoReturn:
    """Raise ConfigError in the first process of a launcher; the others exit with the same code."""
    if started.rank > 0:
        # No barrier joins these processes. The first exit may make the launcher end the process
        # that prints the error.
        time.sleep(1)
        sys.exit(ConfigError.exit_code)
    raise ConfigError(law, way_out).on_every_rank()


def _ranks_in(whole: Any, part: Any) -> list[int]:
    """Return the ranks in the communicator `whole` of the ranks of `part`, in their order. Without messages."""
    group, among = part.Get_group(), whole.Get_group()
    ranks: list[int] = group.Translate_ranks(range(part.size), among)
    group.Free()
    among.Free()
    return ranks


def _is_sent(request: Any, mpi: Any) -> bool:
    try:
        return bool(request.Test())
    except mpi.Exception:
        return True  # The other rank is dead.


class SendRequest:
    """A send, or a non-blocking collective of the MPI library, in progress.

    what  its name in messages
    peer  the other rank of a message; negative: any rank. Of a collective: None if no rank leaves it
          while another one still computes, else negative
    """

    source: int = -1
    _status: Any = None
    _done = False
    """Whether a receive has checked its message; MPI itself remembers that a send is complete."""

    def __init__(self, transport: MpiTransport, request: Any, what: str, peer: int | None = None):
        self._transport, self._job = transport, transport.job
        self._request, self._what, self._peer = request, what, peer
        self._job.requests.add(self)

    def needs(self, left: Set[int]) -> bool:
        """Return whether this request cannot complete once the ranks of `left` have ended."""
        members = self._transport.members
        if self._peer is None:
            return any(rank in left for rank in members)
        if self._peer < 0:
            others = (rank for place, rank in enumerate(members) if place != self._transport.rank)
            return all(rank in left for rank in others)
        return members[self._peer] in left

    def cancel(self) -> None:
        """Give the request up; MPI raises an error for a collective, which the loss ends."""
        self._request.Cancel()

    def is_over(self) -> bool:
        """Return whether MPI has ended the request, in whatever way."""
        try:
            with self._job.lock:
                return bool(self._request.Test())
        except self._transport.MPI.Exception as error:
            pending = getattr(self._transport.MPI, "ERR_PROC_FAILED_PENDING", -1)
            return error.Get_error_class() != pending

    def test(self) -> bool:
        try:
            with self._job.lock:
                return self._request.Test(self._status) and self._finish()
        except self._transport.MPI.Exception as error:
            self._fail(error)

    def wait(self) -> None:
        if self._job.admitted:
            self._transport.wait_until(self.test, what=self)
        elif not self._done:
            self._transport.traffic.waits_for = self
            try:
                self._request.Wait(self._status)
            except self._transport.MPI.Exception as error:
                self._fail(error)
            finally:
                self._transport.traffic.waits_for = None
            self._finish()

    def _finish(self) -> bool:
        self._job.requests.discard(self)
        return True

    def __str__(self) -> str:
        return self._what

    def _in_full(self) -> str:
        return f"{self._transport.own_name}: {self._what}"

    def _fail(self, error: Any) -> NoReturn:
        self._job.requests.discard(self)
        raise self._transport.error(error, self._in_full()) from error


class ReceiveRequest(SendRequest):
    """A receive in progress."""

    def __init__(
        self,
        transport: MpiTransport,
        request: Any,
        array: np.ndarray,
        unit: Any,
        what: str,
        peer: int,
    ):
        super().__init__(transport, request, what, peer)
        self._unit, self._count, self._status = unit, array.size, transport.MPI.Status()

    def test(self) -> bool:
        return self._done or super().test()

    def _finish(self) -> bool:
        """Check the size of the message that has arrived, and set `source`. Calls MPI."""
        self._job.requests.discard(self)
        arrived = self._status.Get_elements(self._unit)
        self.source = self._status.source
        if arrived != self._count:
            raise CommError(
                f"{self._in_full()} met a message of {arrived} from rank {self.source}.",
                "Make both arrays of one length and dtype.",
            )
        self._done = True
        return True

    def _in_full(self) -> str:
        return f"{super()._in_full()} of {self._count} elements"


class MpiTransport(Transport):
    """The transport of one rank over an mpi4py communicator, which it owns.

    Elements of a type that MPI lacks travel as a type of the same width. Messages may have more
    than 2^31 elements.
    """

    native_dtypes = REDUCED

    def __init__(self, comm: Any, place: int, job: MpiJob, root: MpiTransport | None = None):
        # The survivors of several losses all come from the first communicator.
        self._base = comm
        self._connect(comm, place, job, root)
        if root is None:
            self.number_ranks()

    def _connect(self, comm: Any, place: int, job: MpiJob, root: MpiTransport | None) -> None:
        self.MPI, self.comm, self._root = job.MPI, job.opened(comm), root or self
        self.job, MPI = job, job.MPI
        self.needs_all, self.recorder = ulfm.needs_all(MPI), SILENT
        self.traffic: Traffic = root.traffic if root else Traffic()
        self.windows: Windows = root.windows if root else Windows()
        self.members: tuple[int, ...] = ()
        self.hosts: tuple[str, ...] = ()
        self.admits_threads = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        self.rank, self.size = comm.rank, comm.size
        self.own_name = f"rank {comm.rank}"
        self.types = {
            np.dtype(name): MPI.Datatype.fromcode(np.dtype(name).char) for name in REDUCED
        }
        self._by_width = {
            1: ("u1", MPI.UINT8_T),
            2: ("u2", MPI.UINT16_T),
            4: ("u4", MPI.UINT32_T),
            8: ("u8", MPI.UINT64_T),
            16: ("c16", MPI.C_DOUBLE_COMPLEX),
        }
        self._large: dict[tuple, Any] = {}
        self._next_tag = FIRST_CLAIMED_TAG
        # Split communicators do not have this attribute.
        self._last_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAG_BOUND
        if root is None:
            self._meet_others(place)
        else:
            ranks = _ranks_in(root.comm, comm)
            self.members = tuple(root.members[rank] for rank in ranks)
            self.hosts = tuple(root.hosts[rank] for rank in ranks)
        self._names = [
            f"rank {rank}" + (f" (of all ranks {place})" if place != rank else "")
            for rank, place in enumerate(self.members)
        ]
        self.own_name = self._names[self.rank]
        self._host: MpiTransport | None = None
        self.tenants = Tenants()
        self._made: list[int] = []
        self._inherited: list[Any] = []

    def _meet_others(self, place: int) -> None:
        """Learn the hosts and places of all ranks, and refuse those with other code; collective."""
        name = self.MPI.Get_processor_name()
        if self.size > 1:
            name += f"\n{process.package()}"  # A rank of an earlier version sends the name alone.
        names, self.members = zip(*self.gather_text((name, place)), strict=True)
        self.hosts, _, packages = zip(*(name.partition("\n") for name in names), strict=True)
        self._refuse_other_code(packages)

    def _refuse_other_code(self, packages: Sequence[str]) -> None:
        """End the job if ranks run different code: they may not understand each other's errors.

        packages  by rank; empty from a version that does not send its own
        """
        if len(set(packages)) == 1:
            return
        versions = "; ".join(
            f"{package or 'an earlier version'} on rank "
            + listed([rank for rank, other in enumerate(packages) if other == package], self.hosts)
            for package in dict.fromkeys(packages)
        )
        if self.rank == next(rank for rank, package in enumerate(packages) if package):
            error = ConfigError(
                f"All ranks need one version of mpitrain with the same files, but there is {versions}.",
                "Install one package on every host, and start all ranks with one Python.",
            )
            say(error.named())
        else:
            time.sleep(ABORT_SECONDS)  # The error must be out before the job ends.
        end_job(self.comm, ConfigError.exit_code)

    def guard(self, what: str) -> Guard:
        """Return the context of an MPI call, which turns an MPI error into a CommError."""
        return Guard(self.job, self.comm, self.own_name, self.members, what)

    def error(self, error: Any, what: str) -> CommError:
        """Return the error of mpitrain for an exception of mpi4py in a request."""
        return self.job.error(error, what, self.comm, self.members)

    def message(self, array: np.ndarray) -> tuple[list, Any]:
        """Return an mpi4py buffer specification of the array, and the MPI type of one element."""
        unit = self.types.get(array.dtype)
        if unit is None:
            code, unit = self._by_width[array.dtype.itemsize]
            array = array.reshape(-1).view(code)
        if array.size < 1 << 31:
            return [array, array.size, unit], unit
        return [array, 1, self._large_type(unit, array.size)], unit

    def _large_type(self, unit: Any, count: int) -> Any:
        """Return one derived type of `count` elements: whole blocks and a remainder."""
        key = unit.handle, count
        if key not in self._large:
            blocks, rest = divmod(count, TYPE_BLOCK)
            block = unit.Create_contiguous(TYPE_BLOCK)
            offsets = [0, blocks * TYPE_BLOCK * unit.Get_size()]
            self._large[key] = self.MPI.Datatype.Create_struct(
                [blocks, rest], offsets, [block, unit]
            ).Commit()
        return self._large[key]

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        check_message(array, self.rank, (to,), self.size)
        recorder = self.recorder
        note = self.begin_message(SEND, array, tag, self.members[to]) if recorder.is_on else None
        with self.job.lock:
            self.traffic.messages += 1
            self.traffic.nbytes += array.nbytes
            message, _ = self.message(array)
            what = f"send to {self._names[to]}, tag {tag}"
            # A guard would cost a microsecond, a tenth of a small message.
            try:
                request = SendRequest(self, self.comm.Isend(message, to, tag), what, to)
            except self.MPI.Exception as error:
                raise self.error(error, f"{self.own_name}: {what}") from error
        return request if note is None else Recorded(request, recorder, note)

    def start_recv(self, array: np.ndarray, source: int | None, tag: int = 0) -> Request:
        check_message(array, self.rank, () if source is None else (source,), self.size)
        if source is None:
            source, name, member = self.MPI.ANY_SOURCE, "any rank", -1
        else:
            name, member = self._names[source], self.members[source]
        recorder = self.recorder
        note = self.begin_message(RECEIVE, array, tag, member) if recorder.is_on else None
        with self.job.lock:
            message, unit = self.message(array)
            what = f"recv from {name}, tag {tag}"
            try:
                receive = self.comm.Irecv(message, source, tag)
            except self.MPI.Exception as error:
                raise self.error(error, f"{self.own_name}: {what}") from error
            request = ReceiveRequest(self, receive, array, unit, what, source)
        return request if note is None else Recorded(request, recorder, note)

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        # No event signals that a message has arrived.
        wait = self.recorder.wait(self.names[MESSAGES]) if self.recorder.is_on else 0
        now, sent, traffic = pause, self.traffic.messages, self.traffic
        traffic.waits_for = self.job if what is None else what
        try:
            while not done():
                if self.job.is_abandoned:
                    raise PeerLost(f"{self.own_name}: this wait was abandoned after a loss.")
                if traffic.messages != sent:
                    now, sent = pause, traffic.messages
                looked = time.monotonic()
                if now < SPIN and looked > self.job.crowded_until:
                    sched_yield()
                    if (back := time.monotonic()) > looked + LOST:
                        self.job.crowded_until = back + CROWDED
                else:
                    now = max(now, SPIN)
                    time.sleep(now)
                now = min(1.1 * now, max(pause, LONGEST_PAUSE))
        finally:
            traffic.waits_for = None
        self.recorder.go_on(wait)

    def admit_thread(self) -> None:
        with self.job.lock:
            self.job.admitted += 1

    def dismiss_thread(self) -> None:
        with self.job.lock:
            self.job.admitted -= 1

    def barrier(self) -> None:
        wait = self.recorder.wait(self.names[BARRIER]) if self.recorder.is_on else 0
        self._barrier()
        if wait:
            self.recorder.go_on(wait)

    def _barrier(self) -> None:
        if self.job.admitted:
            self._wait("Ibarrier")
        else:
            with self.guard("MPI_Barrier"):
                self.comm.Barrier()

    def _wait(self, name: str, *arguments: Any) -> None:
        """Start one of the library's non-blocking collectives and wait for it."""
        with self.job.lock, self.guard(name):
            request = getattr(self.comm, name)(*arguments)
        SendRequest(self, request, name).wait()

    def split(self, color: int | None, key: int = 0) -> MpiTransport | None:
        with self.job.lock, self.guard("MPI_Comm_split"):
            part = self.comm.Split(self.MPI.UNDEFINED if color is None else color, key)
        return None if color is None else self._part(part)

    def subset(self, ranks: Sequence[int]) -> MpiTransport:
        with self.job.lock, self.guard("MPI_Comm_create_group"):
            group = self.comm.Get_group().Incl(ranks)
            part = self.comm.Create_group(group)
            group.Free()
        return self._part(part)

    def _part(self, comm: Any) -> MpiTransport:
        transport = MpiTransport(comm, self.members[self.rank], self.job, self._root)
        transport.admits_threads = self.admits_threads
        if self.recorder.is_on:
            transport.record(self.recorder)
        self.windows.parts.add(transport)
        return transport

    def gather_text(self, value: Any) -> list[Any]:
        wait = self.recorder.wait(self.names[WORDS]) if self.recorder.is_on else 0
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.empty(self.size, np.int32)
        self._wait("Iallgather", np.int32(text.size).reshape(1), lengths)
        texts = np.empty(int(lengths.sum()), np.uint8)
        self._wait("Iallgatherv", text, [texts, lengths])
        self.recorder.go_on(wait)
        ends = np.cumsum(lengths)
        return [
            json.loads(texts[end - length : end].tobytes())
            for end, length in zip(ends, lengths, strict=True)
        ]

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        if not self.needs_all:
            self._barrier()  # ULFM does not end waits for windows, but this notices a loss.
            return aligned_zeros(count, dtype)
        host = self._ranks_of_this_host()
        # Blocks are whole pages, so that every block is aligned.
        nbytes = -(-max(1, count * np.dtype(dtype).itemsize) // 4096) * 4096
        number = self.windows.new_number(host.members[0]) if host.rank == 0 else 0
        facts = nbytes, process.shared_memory(), number
        blocks_of, rooms, (number, *_) = zip(*host.gather_text(facts), strict=True)
        # Groups of one host, such as the replicas of each stage, allocate at the same time.
        at_once = self._root.hosts.count(self.hosts[self.rank]) // host.size
        needed, left = process.room_for(max(1, at_once) * sum(blocks_of), host.size), min(rooms)
        if host.size == 1 or needed > left:
            if host.size > 1 and host.rank == 0:
                say(no_room(self.hosts[self.rank], needed, left))
            return aligned_zeros(count, dtype)
        with self.job.lock, host.guard("MPI_Win_allocate_shared"):
            window = self.MPI.Win.Allocate_shared(nbytes, 1, comm=host.comm)
            blocks = {
                place: np.frombuffer(window.Shared_query(rank)[0], np.uint8)
                for rank, place in enumerate(host.members)
            }

        def free() -> None:
            with host.guard("MPI_Win_free"):
                window.Free()

        self._made.append(number)
        block = self.windows.add(number, blocks, free, self.members[self.rank])
        block[:] = 0
        host.barrier()
        return block[: count * np.dtype(dtype).itemsize].view(dtype)

    def shares_memory(self) -> bool:
        # Containers may have one host name and no common memory.
        is_one = len({*self.hosts}) == 1
        return is_one and (not self.needs_all or self._ranks_of_this_host().size == self.size)

    def _ranks_of_this_host(self) -> MpiTransport:
        """Return the transport of the ranks of this host; collective at the first call."""
        if self._host is None:
            with self.job.lock, self.guard("MPI_Comm_split_type"):
                comm = self.comm.Split_type(self.MPI.COMM_TYPE_SHARED)
            self._host = MpiTransport(comm, self.members[self.rank], self.job, self._root)
        return self._host

    def close(self) -> None:
        self.recorder = SILENT
        self.tenants.close(self)
        host = [] if self._host is None else [self._host.comm]
        if self._root is self:
            self.windows.close(self)
            host += self._inherited
        elif not self.windows.leave(self, self._made):
            # A window needs the communicator that it was made with, so the root frees that one
            # later.
            self._root._inherited += host
            host = []
        with self.job.lock, self.guard("MPI_Comm_free"):
            for comm in (*host, self.comm):
                self.job.free(comm)

    def _connect_living(self) -> MpiTransport:
        ulfm.abandon(self.job)
        self.windows, self.tenants = Windows(), Tenants()
        with self.job.lock, self.guard("MPI_Comm_shrink"):
            comm = self._base.Shrink()
        ulfm.forget(self.job, self._base)
        self.job = MpiJob(self.MPI)
        return MpiTransport(comm, comm.rank, self.job)

    def _settle(self, around: Any, ranks: Sequence[int]) -> None:
        recorder, self.is_spare = self.recorder, around.rank not in ranks
        self._around, self._first = around, ranks[0] if ranks else -1
        place = None if self.is_spare else ranks.index(around.rank)
        with self.job.lock, around.guard("MPI_Comm_split"):
            color = self.MPI.UNDEFINED if place is None else 0
            comm = around.comm.Split(color, place or 0)
        if place is not None:
            self._connect(comm, place, self.job, None)
            if recorder.is_on:
                self.record(Recorder())

    def dismiss_spares(self) -> None:
        if self.rank or self.is_spare or not self.spares:
            return
        placed, word = {place.number for place in self.history[-1]}, np.zeros(1, np.uint8)
        pending = [rank for rank, number in enumerate(self.living) if number not in placed]
        until = time.monotonic() + ulfm.DISMISSED
        with self.job.lock, suppress(self.MPI.Exception):
            # A send that is only buffered would be lost when this process ends.
            requests = [self._around.comm.Issend(word, rank, DISMISSAL) for rank in pending]
            while requests and time.monotonic() < until:
                requests = [one for one in requests if not _is_sent(one, self.MPI)]
                time.sleep(1e-3)

    def end_by_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print an uncaught exception and abort the job, as `sys.excepthook`.

        Otherwise this rank would wait in MPI_Finalize, and the others for its messages.
        """
        sys.stderr = (
            sys.__stderr__
        )  # PyTorch's hook calls this one, and prints what it wrote later.
        sys.__excepthook__(kind, error, trace)
        if not self.MPI.Is_finalized():
            self.end_rank(f"ended by an exception on {self.hosts[self.rank]}")

    def end_rank(self, message: str, exit_code: int = 1) -> NoReturn:
        if not self.needs_all:
            if message:
                print(f"rank {self.members[self.rank]}: {message}", file=sys.stderr, flush=True)
            ulfm.end_alone()
        self.abort(message, exit_code)

    def abort(self, message: str, exit_code: int = 1) -> NoReturn:
        # `launch` reads the number of the rank in the whole job.
        say(f"rank {self.members[self.rank]}: {message}")
        if self.MPI.COMM_WORLD.size == 1:
            # No other rank waits, and MPI_Abort would print a message of its own.
            raise SystemExit(exit_code)
        # The lock has a timeout, because a call of another thread may never end.
        self.job.lock.acquire(timeout=1)
        end_job(self.comm, exit_code)
        raise SystemExit(exit_code)
