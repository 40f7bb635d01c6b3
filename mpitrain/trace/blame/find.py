"""The search for the first divergence: a pure function of the states of all ranks.

A waiting rank points to the ranks that it waits for. A path over these pointers ends at a rank that
does not wait, or runs in a circle.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpitrain.trace.blame.states import GONE, LEFT, STOPPED, Message, RankState, waited_since

MOVING, SILENT, UNKNOWN = "moving", "silent", "unknown"
CIRCLE, MISSING, MISMATCH = "circle", "missing message", "mismatched collectives"


class Finding(NamedTuple):
    """The first divergence.

    kind      MOVING and UNKNOWN blame no rank; SILENT, GONE, LEFT and STOPPED blame one; CIRCLE:
              ranks that wait for each other; MISSING: a message that will never be sent, or is
              lost; MISMATCH: ranks in different collective calls
    culprits  ranks to look at, the first one first
    waiter    the rank that has waited longest because of them, or None
    message   of MISSING
    sides     of MISMATCH: {name of the call: ranks in it}
    """

    kind: str
    culprits: Sequence[int] = ()
    waiter: int | None = None
    message: Message | None = None
    sides: Mapping[str, Sequence[int]] = {}


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
            first = min(ended, key=_position)
            return Finding(kind, [first.rank], _longest_waiter(states, first.rank))
    silent = [state for state in states if now - state.since >= quiet]
    if not silent:
        return Finding(MOVING)
    if idle := [state for state in silent if not state.wait]:
        first = min(idle, key=_position)
        return Finding(SILENT, [first.rank], _longest_waiter(states, first.rank))
    for circle in _circles(silent, by_rank):
        return _judged(circle, by_rank)
    if any(now - state.since < quiet for state in states):
        return Finding(MOVING)
    pending = (message for state in states for message in state.messages)
    if message := next((one for one in pending if _missing(one, by_rank)), None):
        return _of(message)
    return Finding(UNKNOWN, [], min(states, key=waited_since).rank)


def _position(state: RankState) -> tuple[int, float]:
    """Return the order of divergence: the earlier step first, then the earlier last sign."""
    return state.step, state.since


def _longest_waiter(states: Sequence[RankState], culprit: int) -> int | None:
    """Return the rank that has waited longest; one that waits for the culprit goes first."""
    waiting = [state for state in states if state.wait and state.rank != culprit]
    by_rank = {state.rank: state for state in states}
    direct = [state for state in waiting if culprit in dict(_awaited(state, by_rank))]
    return min(direct or waiting, key=waited_since).rank if waiting else None


def _awaited(
    state: RankState, by_rank: Mapping[int, RankState]
) -> Iterator[tuple[int, Message | None]]:
    """Yield (rank, message or None): the ranks that a rank waits for.

    Within a collective call these are the peers of its open receives, else of its open sends. A
    call of MPI itself has no messages: then these are the ranks that have not entered the call.
    """
    wait = state.wait
    if wait is None:
        return
    if wait.message:
        message = wait.message
        yield (message.receiver if message.is_sent else message.sender), message
        return
    receives = [message for message in state.messages if not message.is_sent]
    sends = [message for message in state.messages if message.is_sent]
    absent = [
        rank
        for rank in wait.ranks
        if rank != state.rank and rank in by_rank and not _is_in(by_rank[rank], state)
    ]
    if receives:
        yield from ((message.sender, message) for message in receives)
    elif absent:
        yield from ((rank, None) for rank in absent)
    else:
        yield from ((message.receiver, message) for message in sends)


def _is_in(other: RankState, state: RankState) -> bool:
    """Return whether another rank is in the collective call of this rank."""
    mine, its = state.wait, other.wait
    return bool(
        mine
        and its
        and not its.message
        and (its.name, its.ordinal, other.step) == (mine.name, mine.ordinal, state.step)
    )


def _circles(
    silent: Sequence[RankState], by_rank: Mapping[int, RankState]
) -> Iterator[list[tuple[RankState, Message | None]]]:
    """Yield circles of waits as (rank, its awaited message or None), the next rank follows."""
    among = {state.rank for state in silent}
    for start in sorted(silent, key=_position):
        path: list[tuple[RankState, Message | None]] = []
        at = start
        while True:
            numbers = [state.rank for state, _ in path]
            if at.rank in numbers:
                yield path[numbers.index(at.rank) :]
                break
            awaited = [pair for pair in _awaited(at, by_rank) if pair[0] in among]
            if not awaited:
                break
            # A message that is missing explains more than one whose sender waits.
            awaited.sort(key=lambda pair: not (pair[1] and _missing(pair[1], by_rank)))
            following, message = awaited[0]
            path.append((at, message))
            at = by_rank[following]


def _judged(
    circle: Sequence[tuple[RankState, Message | None]], by_rank: Mapping[int, RankState]
) -> Finding:
    """Return the finding of a circle of waits.

    A message is missing if its sender has ended it, or has passed the call that awaits it.
    """
    states = [state for state, _ in circle]
    for state, message in circle:
        if message is None or not _missing(message, by_rank):
            continue
        if is_lost(message, by_rank) or _has_passed(by_rank[message.sender], state):
            return _of(message)
    waiter = min(states, key=waited_since).rank
    calls = [state for state in states if state.wait and not state.wait.message]
    if len(calls) == len(states) and (sides := _sides(states, by_rank)):
        return Finding(MISMATCH, [state.rank for state in states], waiter, sides=sides)
    for state, message in circle:
        if calls and message and state.wait and state.wait.message and _missing(message, by_rank):
            return _of(message)
    return Finding(CIRCLE, [state.rank for state in states], waiter)


def _of(message: Message) -> Finding:
    """Return the finding of a missing message."""
    return Finding(MISSING, [message.sender, message.receiver], message.receiver, message)


def _has_passed(other: RankState, state: RankState) -> bool:
    """Return whether another rank has left the collective call that this rank is in."""
    wait = state.wait
    if wait is None or wait.message:
        return False
    return not _is_in(other, state) and other.calls.get(wait.name, 0) >= wait.ordinal


def _sides(states: Sequence[RankState], by_rank: Mapping[int, RankState]) -> dict[str, list[int]]:
    """Return the ranks in each collective call of a circle; {} if all are in the same call.

    Ranks of one call whose numbers of calls differ are on different sides, too.
    """
    calls = {(state.wait.name, state.wait.ordinal) for state in states if state.wait}
    if len(calls) < 2:
        return {}
    is_repeated = len({what for what, _ in calls}) < len(calls)
    sides: dict[str, list[int]] = {}
    for state in by_rank.values():
        if state.wait and not state.wait.message:
            call = state.wait.name, state.wait.ordinal
            if call in calls:
                name = f"{call[0]}, call {call[1]} of its step" if is_repeated else call[0]
                sides.setdefault(name, []).append(state.rank)
    return sides


def _missing(message: Message, by_rank: Mapping[int, RankState]) -> bool:
    """Return whether a message to receive is not under way: not started yet, or ended already."""
    sender, receiver = by_rank.get(message.sender), by_rank.get(message.receiver)
    if message.is_sent or message.ordinal == 0 or not sender or not receiver:
        return False
    if sender.step != receiver.step:
        return False
    return not any(one.is_sent and one.key == message.key for one in sender.messages)


def is_lost(message: Message, by_rank: Mapping[int, RankState]) -> bool:
    """Return whether the sender believes that it has sent the message."""
    return by_rank[message.sender].started.get((message.key, True), 0) >= message.ordinal
