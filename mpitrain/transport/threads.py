"""Ranks as threads of one process: the strictest transport there is, for tests and for trying things out.

A send completes only once its receive is posted. A posted receive is filled with 0xFF bytes (NaN in every float type)
and the message is copied at the last permitted moment, the first completing test or wait of either side: a program that
reuses or reads a buffer too early computes garbage here every time, not once a week on a cluster. When every live rank
waits and nothing can complete, all of them raise at once and name each wait.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.errors import CommError
from mpitrain.transport.base import FIRST_CLAIMED_TAG, Traffic, aligned_zeros, check_message
from mpitrain.transport.shared import Windows

OPS = {"add": np.add, "maximum": np.maximum}


class _World:
    """What the threads share: one lock, the messages that have not met, and who waits for what."""

    def __init__(self, size: int):
        self.changed = threading.Condition()
        self.unmet: dict[tuple, list[_Message]] = defaultdict(list)
        self.meetings: dict[tuple, _Meeting] = {}
        self.live = set(range(size))
        self.waits: dict[int, tuple[Callable[[], bool], str]] = {}
        self.end: str | None = None
        self.first_error: BaseException | None = None

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Block this thread until `ready`; CommError when that can no longer happen. Call with the lock held."""
        self.waits[rank] = ready, what
        try:
            while not ready():
                self.find_deadlock()
                self.check(rank, what)
                self.changed.wait()
        finally:
            del self.waits[rank]

    def check(self, rank: int, what: str) -> None:
        """CommError if the world has ended."""
        if self.end is not None:
            raise CommError(f"rank {rank}: {what} cannot complete: {self.end}")

    def find_deadlock(self) -> None:
        """End the world if every live rank waits and nothing is ready. Call with the lock held."""
        if self.end is not None or not self.live or self.live != self.waits.keys():
            return
        if not any(ready() for ready, _ in self.waits.values()):
            rows = [f"rank {rank} waits in {self.waits[rank][1]}" for rank in sorted(self.waits)]
            self.finish("every rank waits and no message can move.\n" + "\n".join(rows))

    def finish(self, reason: str) -> None:
        """Make every wait that is not ready fail with this reason."""
        self.end = self.end or reason
        self.changed.notify_all()

    def leave(self, rank: int, error: BaseException | None) -> None:
        """A rank's function has returned or raised."""
        with self.changed:
            self.live.discard(rank)
            if error is not None:
                self.first_error = self.first_error or error
                self.finish(f"rank {rank} ended with {type(error).__name__}: {error}")
            self.find_deadlock()


class _Message:
    """One side of a message: it is complete when it has met the other side and the bytes were copied."""

    def __init__(self, transport: "ThreadTransport", array: np.ndarray, peer: int | None, tag: int, sends: bool):
        self.transport, self.peer, self.tag, self.sends = transport, peer, tag, sends
        self.bytes, self.nbytes = array.reshape(-1).view(np.uint8), array.nbytes
        self.other: _Message | None = None
        self.moved = False
        self.source = -1

    def __str__(self) -> str:
        way = "send to" if self.sends else "recv from"
        peer = "any rank" if self.peer is None else f"rank {self.transport.members[self.peer]}"
        return f"{way} {peer}, tag {self.tag}, {self.nbytes} bytes"

    def fits(self, other: "_Message") -> bool:
        """True if a send and a receive on the same transport belong together."""
        send, receive = (self, other) if self.sends else (other, self)
        return (send.sends and not receive.sends and send.tag == receive.tag and send.peer == receive.transport.rank
                and receive.peer in (None, send.transport.rank))

    def post(self) -> "_Message":
        """Meet the earliest message that fits, or wait to be met."""
        world = self.transport.world
        with world.changed:
            unmet = world.unmet[self.transport.context]
            self.other = next((message for message in unmet if self.fits(message)), None)
            if self.other is None:
                unmet.append(self)
            else:
                unmet.remove(self.other)
                self.other.other = self
                world.changed.notify_all()
        return self

    def complete(self) -> None:
        """Copy the bytes unless the other side has. Call with the lock held, after the two have met."""
        send, receive = (self, self.other) if self.sends else (self.other, self)
        receive.source = send.transport.rank
        if send.nbytes != receive.nbytes:
            raise CommError(f"rank {self.transport.me}: a message must fill its receive exactly, but {send} "
                            f"met {receive} on rank {receive.transport.me}.",
                            "Make both arrays of one length and dtype.")
        if not self.moved:
            receive.bytes[:] = send.bytes
            send.moved = receive.moved = True
            send.bytes = receive.bytes = None  # the two messages refer to each other, and must not keep their arrays alive

    def test(self) -> bool:
        world = self.transport.world
        with world.changed:
            if self.other is not None:
                self.complete()
                return True
            world.check(self.transport.me, str(self))
        time.sleep(0)  # a polling loop must let the other threads run
        return False

    def wait(self) -> None:
        world = self.transport.world
        with world.changed:
            world.wait(self.transport.me, lambda: self.other is not None, str(self))
            self.complete()


class _Meeting:
    """One collective call: complete once all have arrived; `combine` of what they brought is then its result."""

    def __init__(self, size: int, what: str, combine: Callable[[list], Any]):
        self.brought: dict[int, Any] = {}
        self.size, self.what, self.combine, self.result = size, what, combine, None
        self.combined = False

    def complete(self) -> Any:
        if not self.combined:  # as late as permitted: an array changed after its start spoils the sum
            self.result = self.combine([self.brought[rank] for rank in range(self.size)])
            self.combined = True
        return self.result


class _Arrival:
    """One rank's part in a meeting: a Request; `deliver(result)` runs at its completion."""

    source = -1

    def __init__(self, transport: "ThreadTransport", what: str, bring: Any, combine: Callable, deliver: Callable):
        self.transport, self.what, self.deliver = transport, what, deliver
        self.done = False
        world = transport.world
        key = transport.context, transport.next_meeting
        transport.next_meeting += 1
        with world.changed:
            self.meeting = world.meetings.setdefault(key, _Meeting(transport.size, what, combine))
            if self.meeting.what != what:
                raise CommError(f"rank {transport.me}: entered {what} while another rank entered {self.meeting.what}.",
                                "Every rank must make the same collective calls in the same order.")
            self.meeting.brought[transport.rank] = bring
            if self.all_here():
                del world.meetings[key]
                world.changed.notify_all()

    def all_here(self) -> bool:
        return len(self.meeting.brought) == self.meeting.size

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self.deliver(self.meeting.complete())

    def test(self) -> bool:
        world = self.transport.world
        with world.changed:
            if self.all_here():
                self.finish()
                return True
            world.check(self.transport.me, self.what)
        time.sleep(0)
        return False

    def wait(self) -> None:
        world = self.transport.world
        with world.changed:
            world.wait(self.transport.me, self.all_here, self.what)
            self.finish()


class ThreadTransport:
    """One rank's transport; `run_ranks` makes them."""

    native_dtypes = frozenset({"float32", "float64", "int32", "int64"})

    def __init__(self, world: _World, context: tuple, members: Sequence[int], rank: int, hosts: Sequence[str],
                 traffic: Traffic, windows: Windows):
        self.world, self.context, self.members = world, context, tuple(members)
        self.rank, self.size, self.me = rank, len(members), members[rank]
        self.hosts, self.traffic, self.windows = tuple(hosts), traffic, windows
        self.next_meeting = 0
        self._next_tag = FIRST_CLAIMED_TAG

    def claim_tag(self) -> int:
        self._next_tag += 1
        return self._next_tag - 1

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> _Message:
        check_message(array, self.me, [to], self.size)
        self.traffic.messages += 1
        self.traffic.nbytes += array.nbytes
        return _Message(self, array, to, tag, sends=True).post()

    def start_recv(self, array: np.ndarray, source: int, tag: int = 0) -> _Message:
        check_message(array, self.me, [source], self.size)
        message = _Message(self, array, source, tag, sends=False)
        message.bytes.fill(0xFF)
        return message.post()

    def start_recv_any(self, array: np.ndarray, tag: int = 0) -> _Message:
        check_message(array, self.me, [], self.size)
        message = _Message(self, array, None, tag, sends=False)
        message.bytes.fill(0xFF)
        return message.post()

    def send(self, array: np.ndarray, to: int, tag: int = 0) -> None:
        self.start_send(array, to, tag).wait()

    def recv(self, array: np.ndarray, source: int, tag: int = 0) -> None:
        self.start_recv(array, source, tag).wait()

    def exchange(self, outgoing: np.ndarray, to: int, incoming: np.ndarray, source: int, tag: int = 0) -> None:
        receive = self.start_recv(incoming, source, tag)
        self.start_send(outgoing, to, tag).wait()
        receive.wait()

    def _meet(self, what: str, bring: Any) -> list[Any]:
        """What every rank brought, by rank."""
        everyone = []
        _Arrival(self, what, bring, list, everyone.extend).wait()
        return everyone

    def barrier(self) -> None:
        self._meet("barrier", None)

    def gather_text(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._meet("gather_text", json.dumps(value))]

    def split(self, color: int | None, key: int = 0) -> "ThreadTransport | None":
        context = (*self.context, self.next_meeting, color)
        everyone = self._meet("split", (color, key))
        if color is None:
            return None
        chosen = sorted((k, rank) for rank, (c, k) in enumerate(everyone) if c == color)
        ranks = [rank for _, rank in chosen]
        return ThreadTransport(self.world, context, [self.members[rank] for rank in ranks], ranks.index(self.rank),
                               [self.hosts[rank] for rank in ranks], self.traffic, self.windows)

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        array = aligned_zeros(count, dtype)
        everyone = zip(self.members, self.hosts, self._meet("allocate", array.view(np.uint8)), strict=True)
        blocks = {member: block for member, host, block in everyone if host == self.hosts[self.rank]}
        if len(blocks) > 1:
            self.windows.add(blocks)
        return array

    def start_native_all_reduce(self, array: np.ndarray, op: str = "add") -> _Arrival:
        check_message(array, self.me, [], self.size)

        def combine(arrays: list[np.ndarray]) -> np.ndarray:
            total = arrays[0].copy()
            for other in arrays[1:]:
                OPS[op](total, other, out=total)
            return total

        return _Arrival(self, "native all-reduce", array, combine, lambda total: np.copyto(array, total))

    def native_all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        self.start_native_all_reduce(array, op).wait()

    def abort(self, message: str) -> None:
        raise CommError(f"rank {self.me}: aborted: {message}")


def run_ranks(n: int, function: Callable, *args: Any, hosts: Sequence[str] | None = None) -> list[Any]:
    """Call function(transport, *args) on n threads, one rank each, and return the results by rank.

    hosts   host names to pretend, by rank; all on one host by default
    raises  the first exception of any rank (those it caused elsewhere are dropped); CommError for a send never received
    """
    world = _World(n)
    hosts = ("localhost",) * n if hosts is None else hosts
    results: list[Any] = [None] * n

    def run(rank: int) -> None:
        error = None
        try:
            results[rank] = function(ThreadTransport(world, (), range(n), rank, hosts, Traffic(), Windows()), *args)
        except BaseException as raised:
            raised.add_note(f"raised on rank {rank} of {n}")
            error = raised
        world.leave(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.first_error is not None:
        raise world.first_error
    unmet = [message for messages in world.unmet.values() for message in messages if world.end is None]
    lost = [f"rank {message.transport.me}: {message}" for message in unmet if message.sends]
    if lost:
        raise CommError("every send must be received, but these were not:\n" + "\n".join(lost))
    return results
