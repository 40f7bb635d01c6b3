"""Ranks as threads of one process: the strictest transport, for tests and experiments.

A send completes only once its receive is posted. A posted receive is filled with 0xFF bytes (NaN in
every float type). The message is copied at the last permitted moment: the first successful test or
wait of either side. A program that reuses or reads a buffer too early thus computes garbage every
time, not once a week. When every live rank waits and no message can complete, all of them raise at
once and name each wait.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.errors import CommError
from mpitrain.machine.process import same_gpu
from mpitrain.transport.base import FIRST_CLAIMED_TAG, Transport, aligned_zeros
from mpitrain.transport.native import expected
from mpitrain.transport.rendezvous import Arrival, Message, World
from mpitrain.transport.requests import Traffic, check_message
from mpitrain.transport.windows import Tenants, Windows

OPS = {"add": np.add, "maximum": np.maximum}


class ThreadTransport(Transport):
    """The transport of one rank that is a thread; `run_ranks` makes them."""

    native_dtypes = frozenset({"float32", "float64", "int32", "int64"})
    admits_threads = True

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
        self.world, self.context, self.members = world, context, tuple(members)
        self.rank, self.size, self.me = rank, len(members), members[rank]
        self.hosts, self.traffic, self.windows = tuple(hosts), traffic, windows
        self._made: list[int] = []
        self.tenants = Tenants()
        self.next_meeting = 0
        self._next_tag = FIRST_CLAIMED_TAG

    def claim_tag(self) -> int:
        self._next_tag += 1
        return self._next_tag - 1

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Message:
        check_message(array, self.me, [to], self.size)
        with self.world.lock:  # an admitted thread updates the same counters
            self.traffic.messages += 1
            self.traffic.nbytes += array.nbytes
        return Message(self, array, to, tag, sends=True).post()

    def start_recv(self, array: np.ndarray, source: int, tag: int = 0) -> Message:
        check_message(array, self.me, [source], self.size)
        return self._receive(array, source, tag)

    def start_recv_any(self, array: np.ndarray, tag: int = 0) -> Message:
        check_message(array, self.me, [], self.size)
        return self._receive(array, None, tag)

    def _receive(self, array: np.ndarray, source: int | None, tag: int) -> Message:
        message = Message(self, array, source, tag, sends=False)
        message.bytes.fill(0xFF)
        return message.post()

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        self.world.wait_until(self.me, done, what)

    def admit_thread(self) -> None:
        self.world.admit()

    def dismiss_thread(self) -> None:
        self.world.dismiss()

    def _meet(self, what: str, bring: Any) -> list[Any]:
        """Return the inputs of all ranks, by rank; collective."""
        everyone: list[Any] = []
        Arrival(self, what, bring, list, everyone.extend).wait()
        return everyone

    def barrier(self) -> None:
        self._meet("barrier", None)

    def gather_text(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._meet("gather_text", json.dumps(value))]

    def split(self, color: int | None, key: int = 0) -> ThreadTransport | None:
        context = (*self.context, self.next_meeting, color)
        everyone = self._meet("split", (color, key))
        if color is None:
            return None
        chosen = sorted((k, rank) for rank, (c, k) in enumerate(everyone) if c == color)
        ranks = [rank for _, rank in chosen]
        part = ThreadTransport(
            self.world,
            context,
            [self.members[rank] for rank in ranks],
            ranks.index(self.rank),
            [self.hosts[rank] for rank in ranks],
            self.traffic,
            self.windows,
        )
        self.windows.parts.add(part)
        return part

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        array = aligned_zeros(count, dtype)
        brought = self._meet("allocate", (array.view(np.uint8), self.windows.next_number))
        local = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        if len(local) == 1:
            return array
        number = max(brought[rank][1] for rank in local)
        block = brought[self.rank][0]
        self.windows.add(
            number,
            {self.members[rank]: brought[rank][0] for rank in local},
            lambda: block.fill(0xFF),
        )
        self._made.append(number)
        return self.windows.lend(number, self.me).view(dtype)

    def close(self) -> None:
        self.tenants.close(self)
        if self.context:
            self.windows.leave(self, self._made)
        else:
            self.windows.close(self)

    def start_native_all_reduce(self, array: np.ndarray, op: str = "add") -> Arrival:
        check_message(array, self.me, [], self.size)

        def combine(arrays: list[np.ndarray]) -> np.ndarray:
            total = arrays[0].copy()
            for other in arrays[1:]:
                OPS[op](total, other, out=total)
            return total

        return Arrival(
            self, "native all-reduce", array, combine, lambda total: np.copyto(array, total)
        )

    def native_all_reduce(self, array: np.ndarray, op: str = "add") -> None:
        self.start_native_all_reduce(array, op).wait()

    def bind_native(
        self, operation: str, array: np.ndarray, other: np.ndarray
    ) -> Callable[[], None]:
        brings, receives = (other, array) if operation == "all-to-all" else (array, array)
        receives = other if operation == "reduce-scatter" else receives
        return lambda: np.copyto(
            receives,
            expected(operation, self._meet(f"native {operation}", brings.copy()), self.rank),
        )

    def abort(self, message: str, exit_code: int = 1) -> None:
        raise CommError(f"rank {self.me}: aborted: {message}")


def run_ranks(
    n: int, function: Callable, *args: Any, hosts: Sequence[str] | None = None
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

    Returns
    -------
    list
        The return value of each rank, by rank.

    Raises
    ------
    Exception
        The first error that a rank raises. Errors that it caused on other ranks are dropped.
    CommError
        If all ranks wait for each other, with the wait of each; if a send is never received.

    Notes
    -----
    This is stricter than any MPI: a send ends only once its receive is posted. A receive buffer
    that is read too early holds NaN.
    """
    # An error that is marked as agreed is raised only if no rank has another error. If some ranks
    # returned in spite of it, CommError is raised.
    world = World(n)
    hosts = ("localhost",) * n if hosts is None else hosts
    results: list[Any] = [None] * n
    returned: list[int] = []
    take_gpu = same_gpu()

    def run(rank: int) -> None:
        error = None
        try:
            take_gpu()
            results[rank] = function(
                ThreadTransport(world, (), range(n), rank, hosts, Traffic(), Windows()), *args
            )
            returned.append(rank)
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
