"""What each rank of a process group says of its calls, in the store: who made another call, who failed, who is absent.

A rank writes its call there once it has waited long, and reads those of the others.
"""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch.distributed as dist

from mpitrain.errors import CommError, MpitrainError
from mpitrain.torch.calls import Call
from mpitrain.transport.base import Transport

ANSWER = 2.0
"""Seconds in which the store must answer a rank whose call is late."""

DESTROY = "destroy_process_group"
"""The last call of each rank."""


NAME = "comparison"
"""The name of each thread that asks the store."""


def start(function: Callable[[], object]) -> None:
    """Call the function in a thread; it has ANSWER seconds to end when the process exits.

    Python ends a thread that is still within C++, as in a store of PyTorch, and C++ then aborts.
    """
    _join_at_exit()
    threading.Thread(target=function, name=NAME, daemon=True).start()


@cache
def _join_at_exit() -> None:
    atexit.register(join)


def join() -> None:
    """Wait until the threads that ask the store have ended, at most ANSWER seconds."""
    deadline = time.monotonic() + ANSWER
    for thread in threading.enumerate():
        if thread.name == NAME and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


class Said(NamedTuple):
    """What a rank has said.

    number   of its call, -1: none yet
    failure  why the group has failed there, or why that rank has refused the next call; or ""
    refused  how often it has refused the next call, before a message
    """

    number: int
    name: str
    failure: str
    refused: int


class Notices:
    """The calls of a process group's ranks, as they have written them to a store of the group's own."""

    def __init__(self, store: dist.Store, transport: Transport):
        self._store, self._transport = store, transport
        self._rank, self._ranks, self.members = (
            transport.rank,
            range(transport.size),
            transport.members,
        )
        self._writing, self._written = threading.Lock(), (-2, False, 0)
        # The last refusal of another rank that was read, and its rank.
        self.refusal: tuple[Any, ...] = ()
        self._refused = -1, 0  # the last call before a refused one, and how often that was refused

    def write(self, call: Call, failure: str = "", refused: int = 0) -> None:
        with self._writing:
            # The thread of a failure may come before that of an earlier look.
            if (latest := (call.number, bool(failure), refused)) > self._written:
                said = f"{call.number} {refused} {call.name}\n{failure}"
                self._store.set(f"call/{self._rank}", said)
                self._written = latest

    def refused_behind(self, call: Call) -> int:
        """Return how often this rank has refused a call in the place of this one."""
        number, times = self._refused
        return times if number == call.number - 1 else 0

    def write_corrected(self, call: Call) -> None:
        """Tell the other ranks, if this one has refused a call in the place of this one, that it makes it now."""
        if self.refused_behind(call):
            start(partial(self.write, call))

    def write_failure(self, call: Call) -> None:
        """Tell the other ranks that the group has failed, or a call is refused; does not wait for the store."""
        error, refused = call.error, 0
        text = error.law if isinstance(error, MpitrainError) else repr(error)
        if call.is_refused:
            number, times = self._refused
            refused = times + 1 if number == call.number else 1
            self._refused = call.number, refused

        def write() -> None:
            with suppress(Exception):  # The error itself is raised in any case.
                self.write(call, text, refused)

        start(write)

    def read(self) -> list[Said]:
        """Return what each rank has said, by rank."""
        return [self._read(f"call/{rank}") for rank in self._ranks]

    def leaving(self) -> set[int]:
        """Return the ranks, of the whole job, that wait in destroy_process_group."""
        said = zip(self.members, self.read(), strict=True)
        return {member for member, one in said if one.name == DESTROY and not one.failure}

    def _read(self, key: str) -> Said:
        if not self._store.check([key]):
            return Said(-1, "", "", 0)
        call, _, failure = self._store.get(key).decode().partition("\n")
        number, refused, name = call.split(" ", 2)
        return Said(int(number), name, failure, int(refused))


class Comparison:
    """One reading of the notices, in a thread of its own, since the store may not answer.

    call         of this rank, to be written first; None: no call, but a message
    others       notices of the groups that this rank destroys after this one
    said         by rank; None before the answer
    are_crossed  whether a rank that is awaited here waits for this one to destroy one of the others
    """

    are_crossed = False

    def __init__(self, notices: Notices, call: Call | None, others: Sequence[Notices] = ()):
        self._notices, self._call, self._others = notices, call, others
        self.began, self.is_over = time.monotonic(), False
        self.said: list[Said] | None = None
        self._error: Exception | None = None
        start(self._read)

    def _read(self) -> None:
        try:
            if self._call:
                self._notices.write(self._call)
            said = self._notices.read()
            if self._call:
                absent = self._absent(said, self._call)
                self.are_crossed = any(absent & other.leaving() for other in self._others)
            self.said = said
        except Exception as error:
            self._error = error
        self.is_over = True

    def check(self, call: Call, me: int, members: Sequence[int]) -> None:
        """Raise an error if another rank's call is not this one.

        me       this rank
        members  for each rank, its rank in the whole job
        """
        for rank, said in enumerate(self.said or ()):
            has_given_up = call.name == DESTROY and said.failure
            is_other = said.number == call.number and said.name != call.name
            if is_other and not said.refused and not has_given_up:
                raise CommError(
                    f"rank {members[me]}: all ranks make the same calls in one order, but call {call.number} of "
                    f"this process group is {call.name} here, and {said.name} on rank {members[rank]}.",
                    "Let all ranks make as many calls before they destroy the group."
                    if DESTROY in (call.name, said.name)
                    else "Let all ranks call with tensors of the same shape, dtype and kind of device.",
                )

    def check_failures(self, call: Call, me: int, members: Sequence[int]) -> None:
        """Raise an error if another rank has refused this call, or the group has failed there; arguments as of `check`."""
        here, why = self._notices.refused_behind(call), ""
        for rank, said in enumerate(self.said or ()):
            member = f"rank {members[rank]}"
            text = said.failure.removeprefix(f"{member}: ")
            if said.refused:
                # All ranks may have refused a call alike, and then made another one.
                # A rank that has just refused a call may make it in the next moment: it has until the next reading.
                if said.number == call.number - 1 and said.refused > here:
                    before, self._notices.refusal = self._notices.refusal, (rank, *said)
                    if before == self._notices.refusal:
                        why = f"{member} has refused it: {text}"
                    break  # The groups of other ranks may have failed because of it.
            elif said.failure and said.number <= call.number and rank != me and not why:
                why = f"this process group has failed on {member}: {text}"
        if why:
            raise CommError(
                f"rank {members[me]}: {call} cannot end, since {why}", "Look at that rank first."
            )

    def absent(self, call: Call) -> str:
        """Return who has not made a call that is late, as text."""
        if self.said is None:
            return (
                f"the store failed: {self._error}"
                if self._error
                else "the rank that keeps the store, usually rank 0, does not answer"
            )
        absent = sorted(self._absent(self.said, call))
        if not absent:
            return "no rank is missing"
        return f"rank {', '.join(map(str, absent))} has not made it"

    def _absent(self, said: list[Said], call: Call) -> set[int]:
        """Return the ranks, of the whole job, that have not made the call."""
        of_rank = zip(self._notices.members, said, strict=True)
        return {member for member, one in of_rank if one.number < call.number}
