"""Blame: who is to blame for a job that stands still or has died, from the last actions of its ranks.

The watchdog of a run, `runs report`, `report --now` and the last line of `launch` all ask here. The state
of a rank (`state_of`) is read from the end of its trace: its last action, wait and messages. The first
divergence (`first_divergence`) is a pure function of all states. A waiting rank points to the ranks that
it waits for. A path over these pointers ends at a rank that does not wait, or runs in a circle.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.trace.recorder import (
    COMPUTE,
    CONNECTING,
    LIBRARY_CALLS,
    MESSAGES,
    PAUSE,
    RECEIVE,
    REDUCTION,
    SEND,
    STEP,
    WAIT,
)
from mpitrain.trace.timeline import Trace, described, is_open, last_sign, read_timeline

GONE, LEFT, STOPPED = "gone", "left", "stopped"
"""States of a process that blame knows: dead, ended by itself, and stopped by a signal."""

ACTIONS = (COMPUTE, WAIT, PAUSE)
"""Kinds of spans of the main thread within a step."""

Call = tuple[str, tuple[int, ...]]
"""The name of a collective call, and its ranks."""


class OpenMessage(NamedTuple):
    """An open message of a rank.

    name     as recorded, such as "activation"
    ranks    the ranks of the collective call that sends the message; else those recorded with the
             name
    is_sent  whether this rank sends it
    ordinal  number of messages with the same ends, name and tag in this step, this one included
    """

    name: str
    micro: int
    sender: int
    receiver: int
    tag: int
    is_sent: bool
    ordinal: int
    ranks: tuple[int, ...] = ()

    @property
    def key(self) -> tuple:
        """Return the same value for all messages with these ends, name and tag."""
        return self.name, self.sender, self.receiver, self.tag


class OpenWait(NamedTuple):
    """An open wait of a rank.

    name     as recorded; that of the collective call, if `message` is None
    ranks    ranks of the collective call, if `message` is None
    message  the awaited message, or None
    since    time at which it began
    ordinal  number of waits with this name in this step, this one included
    is_any   whether the wait is for any of several messages, outside collective calls
    """

    name: str
    ranks: tuple[int, ...]
    message: OpenMessage | None
    since: float
    ordinal: int
    is_any: bool = False

    @property
    def is_call(self) -> bool:
        """Return whether the rank is in a collective call."""
        return self.message is None and not self.is_any

    @property
    def call(self) -> tuple[str, int, tuple[int, ...]]:
        """Return the same value for all ranks in one collective call."""
        return self.name, self.ordinal, self.ranks


class RankState(NamedTuple):
    """State of a rank.

    step      number of its optimizer step as printed, from 1; 0 before the first
    since     time of its last sign: the begin or the end of a record
    action    its last action as text
    wait      its open wait, or None while it computes
    messages  open messages with a known peer
    started   messages of this step that this rank has started: {(key, is_sent): number}
    calls     collective calls of this step that this rank has entered: {(name, ranks): number}
    process   GONE, LEFT, STOPPED, or "" if the process runs or is not known
    """

    rank: int
    host: str
    step: int
    since: float
    action: str
    wait: OpenWait | None
    messages: Sequence[OpenMessage]
    started: Mapping[tuple, int]
    calls: Mapping[Call, int]
    process: str = ""


def waited_since(state: RankState) -> float:
    """Return the begin of a rank's wait; without one the time of its last sign."""
    return state.wait.since if state.wait else state.since


def state_of(trace: Trace, process: str = "") -> RankState:
    """Return the state of a rank from its trace; `process` is as in RankState."""
    records, facts = trace.records, trace.facts
    steps = records[records["kind"] == STEP]
    step = int(steps[-1]["step"]) + 1 if len(steps) else 0
    started: Counter[tuple] = Counter()
    now = records[records["step"] == records["step"][-1]] if len(records) else records
    messages = [message for record, message in _messages(trace, now, started) if record["end"] == 0]
    entered = now[(now["kind"] == WAIT) & (now["peer"] < 0)]
    calls = Counter(_call(trace, what) for what in entered["what"])
    # The spans of the main thread are nested, so the newest open one is the innermost.
    spans = records[is_open(records) & np.isin(records["kind"], ACTIONS)]
    waits = len(spans) > 0 and spans[-1]["kind"] == WAIT
    wait = _wait(trace, spans[-1], now, calls) if waits else None
    return RankState(
        facts["rank"],
        facts["host"],
        step,
        last_sign(trace),
        _action(trace, spans),
        wait,
        messages,
        started,
        calls,
        LEFT if facts.get("left") else process,
    )


def _messages(
    trace: Trace, records: np.ndarray, started: Counter[tuple]
) -> Iterator[tuple[Any, OpenMessage]]:
    """Yield the record of each message with a known peer, and the message, which `started` counts."""
    rank = trace.facts["rank"]
    for record in records[np.isin(records["kind"], (SEND, RECEIVE)) & (records["peer"] >= 0)]:
        peer, is_sent, micro = int(record["peer"]), record["kind"] == SEND, int(record["micro"])
        sender, receiver = (rank, peer) if is_sent else (peer, rank)
        (what, ranks), tag = _call(trace, record["what"]), int(record["tag"])
        key = (what, sender, receiver, tag), is_sent
        started[key] += 1
        yield record, OpenMessage(what, micro, sender, receiver, tag, is_sent, started[key], ranks)


def _call(trace: Trace, what: int) -> Call:
    name, ranks = trace.names[what]
    return name, tuple(ranks)


def _wait(trace: Trace, record: Any, now: np.ndarray, calls: Mapping[Call, int]) -> OpenWait:
    """Return the open wait that this record describes.

    now    the records of the rank's newest step
    calls  as in RankState
    """
    (what, ranks), message = _call(trace, record["what"]), None
    # A wait that is linked to a receive, but has no peer, is for a message of any rank.
    is_any = record["peer"] < 0 and (what == MESSAGES or record["nbytes"] > 0)
    if record["peer"] >= 0:
        for other, candidate in _messages(trace, now, Counter()):
            if other["number"] == record["nbytes"]:
                message = candidate
        if message is None:  # Its record belongs to an earlier step, or has been overwritten.
            rank, peer = trace.facts["rank"], int(record["peer"])
            message = OpenMessage(what, int(record["micro"]), peer, rank, -1, False, 0)
    since = float(record["start"])
    return OpenWait(what, ranks, message, since, calls.get((what, ranks), 0), is_any)


def _action(trace: Trace, spans: np.ndarray) -> str:
    """Return the last action of a rank as text.

    spans  open spans of its main thread
    """
    records = trace.records
    steps = records[records["kind"] == STEP]
    phrases = []
    if len(steps) and steps[-1]["end"] == 0:
        phrases.append(f"step {steps[-1]['step'] + 1}")
    elif len(steps):
        phrases.append(f"after step {steps[-1]['step'] + 1}")
    phrases += [described(trace, span) for span in spans[:-1] if span["kind"] == PAUSE]
    if len(spans):
        waits = "waiting for " if spans[-1]["kind"] == WAIT else ""
        phrases.append(waits + described(trace, spans[-1]))
    else:
        began = steps[-1]["number"] if len(steps) else 0
        ended = records[np.isin(records["kind"], ACTIONS) & (records["number"] > began)]
        if len(ended):
            phrases.append(f"after {described(trace, ended[-1])}")
    return ", ".join(phrases) or "its start"


def under_way(trace: Trace) -> str:
    """Return a rank's open messages, else its open reductions, as the end of a line; "" without any."""
    lasting = trace.records[is_open(trace.records)]
    messages = lasting[np.isin(lasting["kind"], (SEND, RECEIVE))]
    shown = messages if len(messages) else lasting[lasting["kind"] == REDUCTION]
    texts = "; ".join(described(trace, record) for record in shown[:UNDER_WAY])
    more = f" and {len(shown) - UNDER_WAY} more" if len(shown) > UNDER_WAY else ""
    return f"; under way: {texts}{more}" if len(shown) else ""


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
    """Return the rank that has waited longest: of those that wait for the culprit, else of all."""
    waiting = [state for state in states if state.wait and state.rank != culprit]
    by_rank = {state.rank: state for state in states}
    direct = [state for state in waiting if culprit in dict(_awaited(state, by_rank))]
    return min(direct or waiting, key=waited_since).rank if waiting else None


def _awaited(
    state: RankState, by_rank: Mapping[int, RankState]
) -> Iterator[tuple[int, OpenMessage | None]]:
    """Yield each rank that a rank waits for, with the awaited message or None.

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
    if not (wait and other_wait and other_wait.is_call and other.step == state.step):
        return False
    return other_wait.call == wait.call


def _circles(
    silent: Sequence[RankState], by_rank: Mapping[int, RankState]
) -> Iterator[list[tuple[RankState, OpenMessage | None]]]:
    """Yield circles of waits: lists of (rank, the message that it awaits or None).

    Each rank waits for the next in the list, and the last for the first.
    """
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

    A message is missing if its sender believes that it has sent it, or if the sender has already
    passed the call in which the receiver awaits it. Calls do not match if a rank of one call waits
    elsewhere and has not entered it.
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
    """Return {call: all ranks in it}, for the collective calls that these ranks are in.

    Ranks of one call whose numbers of calls differ are on different sides, and so are ranks of
    different groups.
    """
    waits = [state.wait for state in states if state.wait]
    calls = [wait.call for wait in waits]
    is_repeated = len({name for name, *_ in calls}) < len(set(calls))
    sides: dict[str, list[int]] = {}
    for state in by_rank.values():
        wait = state.wait
        if wait and wait.is_call and wait.call in calls:
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


LISTED, UNDER_WAY = 8, 4
"""Largest number of ranks that a line names, and of messages under way."""
ENDS = {
    GONE: "is gone: its process was killed, crashed or called os._exit",
    LEFT: "has left the job: its program has ended by itself",
    STOPPED: "is stopped by a signal: `kill -CONT {process}` on its host lets it go on",
}
"""{kind of finding: the words that follow the name of the rank}."""


def described_finding(
    finding: Finding, states: Sequence[RankState], now: float, processes: Mapping[int, int]
) -> str:
    """Return a finding as one or two sentences.

    now        time on the clock of the states
    processes  {rank: process number}
    """
    by_rank = {state.rank: state for state in states}
    if finding.kind == MOVING:
        newest = max(states, key=lambda state: state.since)
        moved = f"rank {newest.rank} moved {now - newest.since:.1f} s ago"
        return f"No rank is to blame: {moved} ({newest.action})."
    if finding.kind in (SILENT, *ENDS):
        state = by_rank[finding.culprits[0]]
        seconds = now - state.since
        if finding.kind == SILENT:
            clause = f"{named(state)} has not moved for {seconds:.0f} s: {state.action}"
        else:
            ends = ENDS[finding.kind].format(process=processes.get(state.rank, "PID"))
            clause = f"{named(state)} {ends}; its last sign was {seconds:.0f} s ago: {state.action}"
        if finding.waiter is not None:
            clause += f"; {_waits(by_rank[finding.waiter], now)}"
        return f"{clause}."
    if finding.kind == CIRCLE:
        waits = "; ".join(
            _waits(by_rank[rank], now, finding.culprits[(at + 1) % len(finding.culprits)])
            for at, rank in enumerate(finding.culprits)
        )
        return f"Ranks wait for each other in a circle: {waits}."
    if finding.kind == MISSING and finding.message:
        message = finding.message
        sender, receiver = by_rank[message.sender], by_rank[message.receiver]
        seconds = now - waited_since(receiver)
        return (
            f"A message is missing: {named(receiver)} has waited for {_content(message)} of rank "
            f"{sender.rank} for {seconds:.0f} s (tag {message.tag}; {receiver.action}). "
            f"R{named(sender)[1:]} has {'sent it' if is_lost(message, by_rank) else 'not sent it'}: "
            f"{sender.action}."
        )
    if finding.kind == MISMATCH:
        sides = "; ".join(
            f"{_ranks(ranks)} in {call}" for call, ranks in sorted(finding.sides.items())
        )
        if finding.absent:
            has = "has" if len(finding.absent) == 1 else "have"
            sides += f", which {_ranks(finding.absent)} {has} not entered"
        first_two = [by_rank[rank] for rank in finding.culprits[:2]]
        actions = "; ".join(f"{named(state)}: {state.action}" for state in first_two)
        return f"Ranks are in different calls: {sides} ({actions})."
    state = min(states, key=lambda state: state.since)
    silent = f"{named(state)} has been silent longest, for {now - state.since:.0f} s"
    return f"All ranks wait, and their traces name no culprit; {silent}: {state.action}."


def named(state: RankState) -> str:
    return f"rank {state.rank} on {state.host}"


def _waits(state: RankState, now: float, awaited: int | None = None) -> str:
    wait = state.wait
    if wait is None:
        return f"{named(state)} does not wait"
    content = _content(wait.message) if wait.message else wait.name
    of = f" of rank {awaited}" if awaited is not None else ""
    if awaited is None and wait.message:
        peer = wait.message.receiver if wait.message.is_sent else wait.message.sender
        of = f" of rank {peer}"
    return f"{named(state)} has waited for {content}{of} for {now - wait.since:.0f} s"


def _content(message: OpenMessage) -> str:
    content = message.name or (
        f"a message of tag {message.tag}" if message.tag >= 0 else "a message"
    )
    return content + (f" of micro-batch {message.micro}" if message.micro >= 0 else "")


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
    numbers = ", ".join(map(str, ranks[:LISTED]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers}{more}"


def standing(start: Path, seconds: float) -> str:
    """Return the ranks of this host that others waited for in a start, as text; "" if unknown.

    A stopped rank goes on when the launcher ends it: then its last sign is later than all others'.

    start    the folder of their traces
    seconds  for which others waited
    """
    try:
        traces, missing = read_timeline(start)
        facts = traces[0].facts
    except (ConfigError, IndexError):
        return ""
    absent = facts.get("local_ranks", 0) - len(traces)
    if absent > 0:
        is_alone = facts["local_ranks"] == facts["ranks"]
        listed = ", ".join(map(str, missing)) if is_alone else f"{absent} more"
        return f"rank {listed} on {facts['host']} had not begun to connect"
    *others, last = sorted(map(state_of, traces), key=lambda state: state.since)
    if others and last.since - others[-1].since >= seconds:
        return f"{named(last)} stood still and came later than all others"
    idle = [state for state in [*others, last] if not state.wait and state.action != CONNECTING]
    return f"{named(idle[0])} stood still: {idle[0].action}" if len(idle) == 1 else ""
