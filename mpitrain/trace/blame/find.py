"""The search for the first divergence: a pure function of the states of all ranks.

A waiting rank points to the ranks that it waits for. A path over these pointers ends at a rank that
does not wait, or runs in a circle.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpitrain.trace.blame.states import (
    GONE,
    LEFT,
    STOPPED,
    OpenMessage,
    OpenWait,
    RankState,
    waited_since,
)
from mpitrain.trace.ring_buffer import LIBRARY_CALLS

MOVING, SILENT, UNKNOWN = "moving", "silent", "unknown"
CIRCLE, MISSING, MISMATCH = "circle", "missing message", "mismatched collectives"


class Finding(NamedTuple):
    """The first divergence.

    kind      MOVING and UNKNOWN blame no rank; SILENT, GONE, LEFT and STOPPED blame one; CIRCLE:
              ranks that wait for each other; MISSING: a message that will never be sent, or is
              lost; MISMATCH: ranks in different calls
    culprits  ranks to look at, the first one first
    waiter    the rank that has waited longest because of them, or None
    message   of MISSING
    sides     of MISMATCH: {name of the call: ranks in it}
    absent    of MISMATCH with one side: the ranks of its call that wait for something else
    """

    kind: str
    culprits: Sequence[int] = ()
    waiter: int | None = None
    message: OpenMessage | None = None
    sides: Mapping[str, Sequence[int]] = {}
    absent: Sequence[int] = ()


def first_divergence(states: Sequence[RankState], now: float, quiet: float) -> Finding:
    """Return the first divergence of a job.

    states  of all ranks whose traces can be read
    now     time on the clock of the states
    quiet   a rank whose last sign is younger than these seconds moves
    """
    by_rank = {state.rank: state for state in states}
    for kind in (GONE, LEFT, STOPPED):
        ended = [state for state in states if state.process == kind]
        if ended and len(ended) < len(states):
            first = min(ended, key=_order_of_divergence)
            return Finding(kind, [first.rank], _longest_waiter(states, first.rank))
    silent = [state for state in states if now - state.since >= quiet]
    if not silent:
        return Finding(MOVING)
    if idle := [state for state in silent if not state.wait]:
        first = min(idle, key=_order_of_divergence)
        return Finding(SILENT, [first.rank], _longest_waiter(states, first.rank))
    for circle in _circles(silent, by_rank):
        return _judged(circle, by_rank)
    if any(now - state.since < quiet for state in states):
        return Finding(MOVING)
    pending = (message for state in states for message in state.messages)
    if message := next((message for message in pending if _missing(message, by_rank)), None):
        return _finding_of(message)
    return Finding(UNKNOWN, [], min(states, key=waited_since).rank)


def _order_of_divergence(state: RankState) -> tuple[int, float]:
    return state.step, state.since


def _longest_waiter(states: Sequence[RankState], culprit: int) -> int | None:
    """Return the rank that has waited longest; one that waits for the culprit goes first."""
    waiting = [state for state in states if state.wait and state.rank != culprit]
    by_rank = {state.rank: state for state in states}
    direct = [state for state in waiting if culprit in dict(_awaited(state, by_rank))]
    return min(direct or waiting, key=waited_since).rank if waiting else None


def _awaited(
    state: RankState, by_rank: Mapping[int, RankState]
) -> Iterator[tuple[int, OpenMessage | None]]:
    """Yield (rank, message or None): the ranks that a rank waits for.

    Within a collective call these are the peers of its open receives, else of its open sends. A
    call of MPI itself has no messages: then these are the ranks that have not entered the call.
    A wait for any message is for the peers of all open messages, else for all ranks.
    """
    wait = state.wait
    if wait is None:
        return
    if wait.message:
        message = wait.message
        yield (message.receiver if message.is_sent else message.sender), message
        return
    messages = _messages_of(wait, state.messages)
    receives = [message for message in messages if not message.is_sent]
    sends = [message for message in messages if message.is_sent]
    absent = _absent(state, by_rank)
    if receives:
        yield from ((message.sender, message) for message in receives)
    elif absent:
        yield from ((rank, None) for rank in absent)
    else:
        yield from ((message.receiver, message) for message in sends)


def _messages_of(wait: OpenWait, messages: Sequence[OpenMessage]) -> Sequence[OpenMessage]:
    """Return the open messages that belong to a wait; a pipeline may have others under way."""
    if wait.name in LIBRARY_CALLS:
        return ()
    own = [message for message in messages if message.ranks == wait.ranks]
    return own if own and not wait.is_any else messages


def _absent(state: RankState, by_rank: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that have not entered the collective call of this rank."""
    return [
        rank
        for rank in (state.wait.ranks if state.wait else ())
        if rank != state.rank and rank in by_rank and not _is_in_call_of(by_rank[rank], state)
    ]


def _is_in_call(state: RankState) -> bool:
    return bool(state.wait and state.wait.is_call)


def _is_in_call_of(other: RankState, state: RankState) -> bool:
    wait, other_wait = state.wait, other.wait
    return bool(
        wait
        and other_wait
        and other_wait.is_call
        and (other_wait.name, other_wait.ranks, other_wait.ordinal)
        == (wait.name, wait.ranks, wait.ordinal)
        and other.step == state.step
    )


def _circles(
    silent: Sequence[RankState], by_rank: Mapping[int, RankState]
) -> Iterator[list[tuple[RankState, OpenMessage | None]]]:
    """Yield circles of waits as (rank, its awaited message or None), the next rank follows."""
    among = {state.rank for state in silent}
    for start in sorted(silent, key=_order_of_divergence):
        path: list[tuple[RankState, OpenMessage | None]] = []
        at = start
        while True:
            numbers = [state.rank for state, _ in path]
            if at.rank in numbers:
                yield path[numbers.index(at.rank) :]
                break
            awaited = [pair for pair in _awaited(at, by_rank) if pair[0] in among]
            if not awaited:
                break
            # A message that is missing explains more than one whose sender waits. After it comes a
            # rank in a collective call: it shows whether all ranks of the call have entered.
            awaited.sort(
                key=lambda pair: (
                    not (pair[1] and _missing(pair[1], by_rank)),
                    not _is_in_call(by_rank[pair[0]]),
                )
            )
            following, message = awaited[0]
            path.append((at, message))
            at = by_rank[following]


def _judged(
    circle: Sequence[tuple[RankState, OpenMessage | None]], by_rank: Mapping[int, RankState]
) -> Finding:
    """Return the finding of a circle of waits.

    A message is missing if its sender has ended it, or has passed the call that awaits it. A call
    does not match if one of its ranks waits for something else instead of entering it.
    """
    states = [state for state, _ in circle]
    for state, message in circle:
        if message is None or not _missing(message, by_rank):
            continue
        if is_lost(message, by_rank) or _has_passed_call_of(by_rank[message.sender], state):
            return _finding_of(message)
    waiter = min(states, key=waited_since).rank
    for state, called in zip(states, [*states[1:], states[0]], strict=True):
        absent = [] if _is_in_call(state) else _absent(called, by_rank)
        if _is_in_call(called) and state.rank in absent:
            ranks, sides = [called.rank, state.rank], _sides([called], by_rank)
            return Finding(MISMATCH, ranks, waiter, sides=sides, absent=absent)
    calls = [state for state in states if _is_in_call(state)]
    sides = _sides(calls, by_rank)
    if len(sides) > 1:
        return Finding(MISMATCH, [state.rank for state in calls], waiter, sides=sides)
    if calls and (absent := _absent(calls[0], by_rank)):
        ranks = [calls[0].rank, absent[0]]
        return Finding(MISMATCH, ranks, waiter, sides=sides, absent=absent)
    return Finding(CIRCLE, [state.rank for state in states], waiter)


def _finding_of(message: OpenMessage) -> Finding:
    return Finding(MISSING, [message.sender, message.receiver], message.receiver, message)


def _has_passed_call_of(other: RankState, state: RankState) -> bool:
    wait = state.wait
    if wait is None or not wait.is_call:
        return False
    passed = other.calls.get((wait.name, wait.ranks), 0)
    return not _is_in_call_of(other, state) and passed >= wait.ordinal


def _sides(states: Sequence[RankState], by_rank: Mapping[int, RankState]) -> dict[str, list[int]]:
    """Return the ranks in each collective call that one of these ranks is in.

    Ranks of one call whose numbers of calls differ are on different sides, and so are ranks of
    different groups.
    """
    waits = [state.wait for state in states if state.wait]
    calls = [(wait.name, wait.ordinal, wait.ranks) for wait in waits]
    is_repeated = len({name for name, *_ in calls}) < len(set(calls))
    sides: dict[str, list[int]] = {}
    for state in by_rank.values():
        wait = state.wait
        if wait and wait.is_call and (wait.name, wait.ordinal, wait.ranks) in calls:
            name = f"{wait.name}, call {wait.ordinal} of its step" if is_repeated else wait.name
            sides.setdefault(name, []).append(state.rank)
    return sides


def _missing(message: OpenMessage, by_rank: Mapping[int, RankState]) -> bool:
    """Return whether a message to receive is not under way: not started yet, or ended already."""
    sender, receiver = by_rank.get(message.sender), by_rank.get(message.receiver)
    if message.is_sent or message.ordinal == 0 or not sender or not receiver:
        return False
    if sender.step != receiver.step:
        return False
    return not any(sent.is_sent and sent.key == message.key for sent in sender.messages)


def is_lost(message: OpenMessage, by_rank: Mapping[int, RankState]) -> bool:
    """Return whether the sender believes that it has sent the message."""
    return by_rank[message.sender].started.get((message.key, True), 0) >= message.ordinal
