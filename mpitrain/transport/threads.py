"""Ranks as threads of one process: the strictest transport, for tests and experiments.

A send completes only once its receive is posted. A posted receive is filled with 0xFF bytes (NaN in
every float type). The message is copied at the last permitted moment: the first successful test or
wait of either side. A program that reuses or reads a buffer too early thus computes garbage every
time, not once a week. When every live rank waits and no message can complete, all of them raise at
once and name each wait.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import CommError, PeerLost
from mpitrain.machine.process import same_gpu
from mpitrain.trace.recorder import BARRIER, MESSAGES, RECEIVE, SEND, SILENT, WORDS, Recorder
from mpitrain.transport.base import (
    FIRST_CLAIMED_TAG,
    LONGEST_PAUSE,
    Recorded,
    Request,
    Traffic,
    Transport,
    aligned_zeros,
    check_message,
    named,
)
from mpitrain.transport.places import DISMISSAL
from mpitrain.transport.windows import Tenants, Windows

NOTHING = np.empty(0, np.uint8)
AROUND = ("around",)
"""The context of messages of all living ranks, with a place or without one."""


class Gone(BaseException):
    """Stands for a signal that ends one rank of a world that outlives it."""


class Wait(NamedTuple):
    """A blocked thread of a rank.

    ready  returns whether the thread may continue
    what   object whose str() names the wait; None: the wait for any message in progress
    woken  condition that wakes only this thread
    """

    rank: int
    ready: Callable[[], bool]
    what: Any
    woken: threading.Condition


class World:
    """The state shared by the threads: a lock, the unmatched messages, and the blocked threads.

    When every thread waits and no message can move, it ends all waits with an error. A world that
    `outlives` a rank begins anew when all living ranks want to go on without it.

    numbers  {rank at the start: present rank} of the living ranks
    """

    def __init__(self, size: int, outlives: bool = False):
        self.lock = threading.RLock()
        self.outlives, self.numbers = outlives, {rank: rank for rank in range(size)}
        self.epoch, self._going_on = 0, set[int]()
        self._changed = threading.Condition(self.lock)
        self._admitted: Counter[int] = Counter()
        self.unmet: dict[tuple, list[Message]] = defaultdict(list)
        self.meetings: dict[tuple, tuple[str, dict[int, Any]]] = {}
        # Threads that have not ended: one per rank, and those that `admit_thread` let in.
        self.live = size
        self.waits: dict[int, Wait] = {}  # by thread identifier
        self.posts = 0
        self.end: str | None = None
        # The ranks that have ended: with an error, or while another rank waits.
        self.lost: set[int] = set()
        self.first_error: BaseException | None = None

    def post(self) -> None:
        """Wake only the threads that a new post allows to continue. The caller holds the lock."""
        self.posts += 1
        for wait in self.waits.values():
            if wait.ready():
                wait.woken.notify()

    def has_news(self, seen: int) -> bool:
        """Return whether there have been posts after the first `seen`."""
        return self.posts != seen

    def wait(
        self, rank: int, ready: Callable[[], bool], what: Any, seconds: float | None = None
    ) -> None:
        """Block this thread until `ready`, or for some seconds; CommError when it can no longer be.

        The caller holds the lock. The other arguments are those of `Wait`.
        """
        me, woken = threading.get_ident(), threading.Condition(self.lock)
        self.waits[me] = Wait(rank, ready, what, woken)
        try:
            while not ready():
                self.find_deadlock()
                if self.end is not None:
                    raise self.failure(rank, what)
                if not woken.wait(seconds) and self.end is None:
                    return
        finally:
            del self.waits[me]

    def failure(self, rank: int, what: Any) -> CommError:
        """Return the error of a wait in a world that has ended: PeerLost if a rank has ended before."""
        law = f"rank {rank}: {self.name_of(rank, what)} cannot complete: {self.end}"
        return PeerLost(law, ranks=tuple(sorted(self.lost))) if self.lost else CommError(law)

    def name_of(self, rank: int, what: Any) -> str:
        """Return the name of a wait; without one, that of the rank's messages in progress."""
        if what is not None:
            return str(what)
        unmet = [one for queue in self.unmet.values() for one in queue if one.transport.me == rank]
        return named(unmet) or "no message"

    def find_deadlock(self) -> None:
        """End the world if every live thread waits and none is ready. The caller holds the lock."""
        all_wait = self.end is None and 0 < self.live == len(self.waits)
        if all_wait and not any(wait.ready() for wait in self.waits.values()):
            self.finish("every rank waits and no message can move.\n" + self._all_waits())

    def _all_waits(self) -> str:
        """Return a line for each thread that waits, and for each rank that has ended."""
        stacks = sys._current_frames()
        rows = sorted(
            f"rank {wait.rank} waits in {self.name_of(wait.rank, wait.what)}{_written(stacks[thread])}"
            for thread, wait in self.waits.items()
        )
        return "\n".join([*rows, *(f"rank {rank} has ended" for rank in sorted(self.lost))])

    def finish(self, reason: str) -> None:
        """End the world: every wait that is not ready fails with this reason."""
        self.end = self.end or reason
        for wait in self.waits.values():
            wait.woken.notify()

    def admit(self, rank: int) -> None:
        with self.lock:
            self.live += 1
            self._admitted[rank] += 1

    def dismiss(self, rank: int) -> None:
        with self.lock:
            self.live -= 1
            self._admitted[rank] -= 1
            self._changed.notify_all()
            self.find_deadlock()

    def give_up(self, rank: int) -> None:
        """Let all waits fail, and return when the admitted threads of this rank have ended."""
        with self.lock:
            self.finish(f"rank {rank} goes on without the lost ranks")
            self._changed.wait_for(lambda: not self._admitted[rank])

    def go_on(self, rank: int) -> None:
        """Wait until every living rank has called this, so that `numbers` are new."""
        with self.lock:
            epoch = self.epoch
            self._going_on.add(rank)
            self._begin_anew()
            self._changed.wait_for(lambda: self.epoch != epoch)

    def _begin_anew(self) -> None:
        """Begin anew if all living ranks want it. The caller holds the lock."""
        living = sorted({*self.numbers.values()} - self.lost)
        if not living or self._going_on != {*living}:
            return
        self.numbers = {
            first: living.index(rank) for first, rank in self.numbers.items() if rank in living
        }
        self.unmet.clear()
        self.meetings.clear()
        self.lost.clear()
        self._going_on.clear()
        self.end, self.epoch = None, self.epoch + 1
        self._changed.notify_all()

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Record the end of a rank's function, with its error if it raised.

        An error that all ranks agree on does not end the world. Each rank raises it by itself, or
        waits for the ranks that have left.

        rank  at the start
        """
        with self.lock:
            self.live -= 1
            rank = self.numbers[rank]
            if self.end is None or self.outlives:
                self.lost.add(rank)
            if error is not None:
                is_agreed = getattr(error, "agreed", False)
                if not isinstance(error, Gone) and (
                    self.first_error is None
                    or (getattr(self.first_error, "agreed", False) and not is_agreed)
                ):
                    self.first_error = error
                if not is_agreed:
                    self.finish(f"rank {rank} ended with {type(error).__name__}: {error}")
            self._begin_anew()
            self.find_deadlock()


def _written(frame: FrameType | None) -> str:
    """Return the call into this package that its user wrote, such as `, for Group.all_reduce in line
    3 of a.py`; empty if that call is a transport's own, or if no user wrote one.

    frame  the innermost frame of a thread that waits
    """
    package, inner = __name__.split(".")[0], None
    while frame and frame.f_globals.get("__name__") == threading.__name__:
        frame = frame.f_back
    while frame and frame.f_globals.get("__name__", "").split(".")[0] == package:
        inner, frame = frame, frame.f_back
    if frame is None or inner is None or frame.f_globals.get("__name__") == threading.__name__:
        return ""
    if inner.f_globals["__name__"].startswith(f"{package}.transport."):
        return ""
    file = os.path.basename(frame.f_code.co_filename)
    return f", for {inner.f_code.co_qualname} in line {frame.f_lineno} of {file}"


class Meets:
    """A request that other ranks complete: the base of `Message` and `Meeting`."""

    transport: Any
    source = -1

    def is_ready(self) -> bool:
        """Return whether `complete` can finish the request."""
        raise NotImplementedError

    def complete(self) -> None:
        """Finish the request; a second call does nothing. The caller holds the lock."""

    def test(self) -> bool:
        world = self.transport.world
        with world.lock:
            if self.is_ready():
                self.complete()
                return True
            if world.end is not None:
                raise world.failure(self.transport.me, self)
        time.sleep(0)  # a polling loop must let the other threads run
        return False

    def wait(self) -> None:
        world = self.transport.world
        with world.lock:
            world.wait(self.transport.me, self.is_ready, self)
            self.complete()


class Message(Meets):
    """One side of a message: complete when it has met the other side and the bytes are copied.

    A new one matches the earliest message that fits, or waits in a queue for a later match.

    sender  rank of the transport; a receive from any rank has none
    """

    sender: int | None

    def __init__(self, transport: Any, array: np.ndarray, peer: int | None, tag: int, sends: bool):
        self.transport, self.peer, self.tag, self.sends = transport, peer, tag, sends
        self.sender, receiver = (transport.rank, peer) if sends else (peer, transport.rank)
        self.bytes, self.nbytes = array.reshape(-1).view(np.uint8), array.nbytes
        self.other: Message | None = None
        self.moved = False
        world, route = transport.world, (transport.context, receiver, tag)
        with world.lock:
            if sends:  # an admitted thread updates the same counters
                transport.traffic.messages += 1
                transport.traffic.nbytes += array.nbytes
            else:
                self.bytes.fill(0xFF)
            opposite = world.unmet[(*route, not sends)]
            for other in opposite:
                if self.sender == other.sender or None in (self.sender, other.sender):
                    opposite.remove(other)
                    self.other, other.other = other, self
                    world.post()
                    return
            world.unmet[(*route, sends)].append(self)

    def __str__(self) -> str:
        way = "send to" if self.sends else "recv from"
        peer = "any rank" if self.peer is None else f"rank {self.transport.members[self.peer]}"
        return f"{way} {peer}, tag {self.tag}, {self.nbytes} bytes"

    def is_ready(self) -> bool:
        return self.moved or self.other is not None

    def complete(self) -> None:
        """Copy the bytes, unless the other side has done so."""
        if self.other is None:
            return
        send, receive = (self, self.other) if self.sends else (self.other, self)
        receive.source = send.transport.rank
        if send.nbytes != receive.nbytes:
            raise CommError(
                f"rank {self.transport.me}: a message must fill its receive exactly, but {send} "
                f"met {receive} on rank {receive.transport.me}.",
                "Make both arrays of one length and dtype.",
            )
        receive.bytes[:] = send.bytes
        for side in (send, receive):  # The arrays and the other transport can then be freed.
            side.moved, side.other, side.bytes = True, None, NOTHING


class Meeting(Meets):
    """One rank's part in a collective call: complete when every rank has entered the call.

    everyone  {rank: what it brings}, one dict for all ranks
    """

    def __init__(self, transport: Any, what: str, brings: Any):
        self.transport, self.what = transport, what
        world, key = transport.world, (transport.context, transport.next_meeting)
        transport.next_meeting += 1
        with world.lock:
            entered, self.everyone = world.meetings.setdefault(key, (what, {}))
            if entered != what:
                raise CommError(
                    f"rank {transport.me}: entered {what} while another rank entered {entered}.",
                    "Every rank must make the same collective calls in the same order.",
                )
            self.everyone[transport.rank] = brings
            if self.is_ready():
                del world.meetings[key]
                world.post()

    def is_ready(self) -> bool:
        return len(self.everyone) == self.transport.size

    def __str__(self) -> str:
        return self.what


class Sum(Meeting):
    """An all-reduce that stands for the MPI library's own.

    The arrays are combined as late as permitted: a change to an array after its start then corrupts
    the result.
    """

    def __init__(self, transport: Any, array: np.ndarray, op: str):
        self.array: np.ndarray | None = array
        self.combine = getattr(np, op)
        super().__init__(transport, "native all-reduce", array)

    def complete(self) -> None:
        if self.array is None:
            return
        everyone, ranks = self.everyone, range(self.transport.size)
        if everyone[self.transport.rank] is self.array:  # This rank is the first to complete.
            total = everyone[0].copy()
            for rank in ranks[1:]:
                self.combine(total, everyone[rank], out=total)
            everyone.update(dict.fromkeys(ranks, total))
        np.copyto(self.array, everyone[self.transport.rank])
        # The request may outlive the call, but the reference to the array must not.
        self.array = None


class Exchange(Meeting):
    """An all-to-all of unequal counts that stands for the MPI library's own.

    The parts are copied as late as permitted: a change to `outgoing` after the start corrupts the
    result, and `incoming` has 0xFF bytes until the end.

    outgoing, sent  the elements for each rank, in the order of ranks, and their numbers
    """

    def __init__(
        self, transport: Any, outgoing: np.ndarray, sent: Sequence[int], incoming: np.ndarray
    ):
        self.parts = np.split(outgoing, np.cumsum(sent)[:-1])
        self.incoming: np.ndarray | None = incoming
        incoming.view(np.uint8).fill(0xFF)
        super().__init__(transport, "native all-to-all", self.parts)

    def complete(self) -> None:
        if self.incoming is None:
            return
        everyone, own = self.everyone, self.transport.rank
        if everyone[own] is self.parts:  # This rank is the first to complete.
            for rank, parts in everyone.items():
                everyone[rank] = [part.copy() for part in parts]
        np.concatenate([everyone[rank][own] for rank in sorted(everyone)], out=self.incoming)
        # The request may outlive the call, but the references to the arrays must not.
        self.incoming, self.parts = None, []


class ThreadTransport(Transport):
    """The transport of one rank that is a thread; `run_ranks` makes them."""

    admits_threads = True
    is_strict = True
    native_dtypes = ("float32", "float64", "int32", "int64")

    def __init__(
        self,
        world: World,
        context: tuple,
        members: Sequence[int],
        rank: int,
        hosts: Sequence[str],
        traffic: Traffic,
        windows: Windows,
    ):
        self.world, self.traffic, self.windows = world, traffic, windows
        if world.outlives:
            self.needs_all = ""
        self.me = members[rank]
        self._connect(context, members, rank, hosts)
        self.number_ranks()

    def _connect(
        self, context: tuple, members: Sequence[int], rank: int, hosts: Sequence[str]
    ) -> None:
        self.context, self.members, self.hosts = context, tuple(members), tuple(hosts)
        self.rank, self.size = rank, len(members)
        self._made: list[int] = []
        self._subsets: Counter[tuple] = Counter()
        self.tenants = Tenants()
        self.next_meeting = 0
        if self.recorder.is_on:
            self.record(self.recorder)
        self._next_tag = FIRST_CLAIMED_TAG

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        check_message(array, self.me, (to,), self.size)
        if not self.recorder.is_on:
            return Message(self, array, to, tag, sends=True)
        note = self.begin_message(SEND, array, tag, self.members[to])
        return Recorded(Message(self, array, to, tag, sends=True), self.recorder, note)

    def start_recv(self, array: np.ndarray, source: int | None, tag: int = 0) -> Request:
        check_message(array, self.me, () if source is None else (source,), self.size)
        if not self.recorder.is_on:
            return Message(self, array, source, tag, sends=False)
        member = -1 if source is None else self.members[source]
        note = self.begin_message(RECEIVE, array, tag, member)
        return Recorded(Message(self, array, source, tag, sends=False), self.recorder, note)

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        wait = self.recorder.wait(self.names[MESSAGES]) if self.recorder.is_on else 0
        world, seen = self.world, self.world.posts
        while not done():  # It polls messages: after every post, and at intervals.
            with world.lock:
                world.wait(self.me, partial(world.has_news, seen), what, LONGEST_PAUSE)
            seen = world.posts
        if wait:
            self.recorder.go_on(wait)

    def admit_thread(self) -> None:
        self.world.admit(self.me)

    def dismiss_thread(self) -> None:
        self.world.dismiss(self.me)

    def meet(self, what: str, bring: Any) -> list[Any]:
        """Return what each rank brings, by rank. Collective."""
        meeting = Meeting(self, what, bring)
        meeting.wait()
        return [meeting.everyone[rank] for rank in range(self.size)]

    def barrier(self) -> None:
        wait = self.recorder.wait(self.names[BARRIER]) if self.recorder.is_on else 0
        Meeting(self, "barrier", None).wait()
        if wait:
            self.recorder.go_on(wait)

    def gather_text(self, value: Any) -> list[Any]:
        wait = self.recorder.wait(self.names[WORDS]) if self.recorder.is_on else 0
        texts = self.meet("gather_text", json.dumps(value))
        if wait:
            self.recorder.go_on(wait)
        return [json.loads(text) for text in texts]

    def split(self, color: int | None, key: int = 0) -> ThreadTransport | None:
        context = (*self.context, self.next_meeting, color)
        everyone = self.meet("split", (color, key))
        if color is None:
            return None
        chosen = sorted((k, rank) for rank, (c, k) in enumerate(everyone) if c == color)
        return self._part(context, [rank for _, rank in chosen])

    def subset(self, ranks: Sequence[int]) -> ThreadTransport:
        self._subsets[(*ranks,)] += 1
        return self._part((*self.context, (*ranks,), self._subsets[(*ranks,)]), ranks)

    def _part(self, context: tuple, ranks: Sequence[int]) -> ThreadTransport:
        part = copy(self)
        part._connect(
            context,
            [self.members[rank] for rank in ranks],
            ranks.index(self.rank),
            [self.hosts[rank] for rank in ranks],
        )
        self.windows.parts.add(part)
        return part

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        array = aligned_zeros(count, dtype)
        if not self.needs_all:
            self.meet("barrier", None)
            return array
        brought = self.meet("allocate", (array.view(np.uint8), self.windows.new_number(self.me)))
        local = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        if len(local) == 1:
            return array
        number = brought[local[0]][1]
        block = brought[self.rank][0]
        blocks = {self.members[rank]: brought[rank][0] for rank in local}
        self._made.append(number)
        return self.windows.add(number, blocks, lambda: block.fill(0xFF), self.me).view(dtype)

    def close(self) -> None:
        self.recorder = SILENT
        self.tenants.close(self)
        if self.context:
            self.windows.leave(self, self._made)
        else:
            self.windows.close(self)

    def start_all_reduce(self, array: np.ndarray, op: str) -> Sum:
        """Begin the all-reduce that stands for the MPI library's own. Collective."""
        check_message(array, self.me, [], self.size)
        return Sum(self, array, op)

    def start_exchange(
        self, outgoing: np.ndarray, sent: Sequence[int], incoming: np.ndarray
    ) -> Exchange:
        """Begin the all-to-all of unequal counts that stands for the MPI library's own. Collective."""
        check_message(outgoing, self.me, [], self.size)
        return Exchange(self, outgoing, sent, incoming)

    def abort(self, message: str, exit_code: int = 1) -> None:
        raise CommError(f"rank {self.me}: aborted: {message}")

    def end_rank(self, message: str, exit_code: int = 1) -> None:
        if not message:
            raise Gone
        self.abort(message, exit_code)

    def _connect_living(self) -> ThreadTransport:
        self.world.give_up(self.me)
        self.windows = Windows()
        self.world.go_on(self.me)
        numbers = self.world.numbers
        self.me = numbers[self.number]
        around = copy(self)
        around._connect(
            AROUND, range(len(numbers)), self.me, [self._hosts[number] for number in numbers]
        )
        return around

    def _settle(self, around: Any, ranks: Sequence[int]) -> None:
        self._around, self._first = around, ranks[0] if ranks else -1
        around.context = AROUND
        self.is_spare = self.me not in ranks
        if self.is_spare:
            return
        if self.recorder.is_on:
            self.recorder = Recorder()
        hosts = [around.hosts[rank] for rank in ranks]
        self._connect((), range(len(ranks)), ranks.index(self.me), hosts)

    def dismiss_spares(self) -> None:
        if self.rank or self.is_spare:
            return
        placed = {place.number for place in self.history[-1]}
        for rank, number in enumerate(self.living):
            if number not in placed:
                self._around.start_send(np.zeros(1, np.uint8), rank, DISMISSAL)


def run_ranks(
    n: int,
    function: Callable,
    *args: Any,
    hosts: Sequence[str] | None = None,
    outlives: bool = False,
    spares: int = 0,
) -> list[Any]:
    """Call function(transport, *args) on n threads of this process, one rank each; needs no MPI.

    Parameters
    ----------
    n : int
        The number of ranks.
    function : callable
        The function that each rank runs.
    hosts : sequence of str, optional
        A pretended host name of each rank. None: one host.
    outlives : bool
        Whether the others may go on without a rank, as under ULFM. `Gone` ends one.
    spares : int
        The number of last ranks that wait until one is lost; they call the function then.

    Returns
    -------
    list
        The return value of each rank, by rank; None of a spare that was not needed.

    Raises
    ------
    Exception
        The first error that a rank raises, without errors that it caused on other ranks.
    CommError
        If all ranks wait for each other, with the wait of each; if a send is never received.

    Notes
    -----
    This is stricter than any MPI: a send ends only once its receive is posted. A receive buffer
    that is read too early holds NaN.
    """
    # An error that is marked as agreed is raised only if no rank has another error. If some ranks
    # returned in spite of it, CommError is raised.
    world = World(n, outlives)
    hosts = ("localhost",) * n if hosts is None else hosts
    results: list[Any] = [None] * n
    returned: list[int] = []
    take_gpu = same_gpu()

    def run(rank: int) -> None:
        error = None
        try:
            take_gpu()
            transport = ThreadTransport(world, (), range(n), rank, hosts, Traffic(), Windows())
            if spares:
                transport.set_spares(rank >= n - spares)
            if transport.await_place():
                results[rank] = function(transport, *args)
                returned.append(rank)
                transport.dismiss_spares()
        except BaseException as raised:
            raised.add_note(f"raised on rank {rank} of {n}")
            error = raised
        world.leave(rank, error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(n)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.first_error is not None:
        if returned and getattr(world.first_error, "agreed", False):
            raise CommError(
                f"ranks {sorted(returned)} returned, but an error of every rank was raised."
            ) from world.first_error
        raise world.first_error
    unmet = [
        message for messages in world.unmet.values() for message in messages if world.end is None
    ]
    lost = [f"rank {message.transport.me}: {message}" for message in unmet if message.sends]
    if lost:
        raise CommError("every send must be received, but these were not:\n" + "\n".join(lost))
    return results
