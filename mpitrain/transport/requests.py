"""Requests: messages in progress, the waits for them, and the count of messages sent."""

import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from os import sched_yield
from typing import Any, Protocol

import numpy as np

from mpitrain.errors import CommError
from mpitrain.transport.failures.guard import needs

SPIN, LONGEST_PAUSE = 5e-5, 1e-3
"""Seconds. While its pauses are shorter than SPIN, a wait only yields the processor. Then it
sleeps, at most LONGEST_PAUSE at a time.
"""


@dataclass
class Traffic:
    """A count of the point-to-point messages that this rank has sent, with their payload bytes.

    Empty messages count too. A transport and the transports split from it share one object.
    Barriers, `gather_text` and the library's own reductions are not point-to-point and do not
    count.

    waits_for  the request that this rank is blocked on, or None; the watchdog prints it
    content    a description of the payload that this rank waits for, such as an activation, or ""
    """

    messages: int = 0
    nbytes: int = 0
    waits_for: Any = None
    content: str = ""


class Request(Protocol):
    """A message in progress, as an MPI_Request; `str` returns its name.

    Notes
    -----
    The transport owns the array until `test` has returned True or `wait` has returned.
    """

    @property
    def source(self) -> int:
        """The rank that sent a received message, once the receive is complete; -1 for sends.

        `start_recv_any` reports its sender here.
        """

    def test(self) -> bool:
        """Return True once the message is complete, and at every later call. Never blocks.

        The call also makes progress on messages, as MPI_Test.
        """

    def wait(self) -> None:
        """Block until the message is complete."""


class Several:
    """One request that stands for several, such as the pieces of a long message."""

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


class AnyOf:
    """The name of a wait for any of several requests, built only when a report needs it."""

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests

    def needs(self, left: Set[int]) -> bool:
        """Return whether each request needs a rank of `left`, the ranks that have ended."""
        return all(needs(request, left) for request in self._requests)

    def __str__(self) -> str:
        return f"wait_any of ({named(self._requests)})"


def named(requests: Iterable[Any]) -> str:
    return "; ".join(map(str, requests))


def poll_until(done: Callable[[], bool], traffic: Traffic, pause: float, what: Any = None) -> None:
    """Implement `Transport.wait_until` by polling: no event signals that a message has arrived."""
    now, sent = pause, traffic.messages
    traffic.waits_for = what
    try:
        while not done():
            if traffic.messages != sent:
                now, sent = pause, traffic.messages
            if now < SPIN:
                sched_yield()
            else:
                time.sleep(now)
            now = min(1.1 * now, LONGEST_PAUSE)
    finally:
        traffic.waits_for = None


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
