"""The state of each rank at the end of its trace: its last action, its wait and its messages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.trace.read import Trace
from mpitrain.trace.ring_buffer import COMPUTE, MESSAGES, PAUSE, RECEIVE, SEND, STEP, WAIT
from mpitrain.trace.timeline import described, is_open, last_sign

GONE, LEFT, STOPPED = "gone", "left", "stopped"
"""States of a process that blame knows: dead, ended by itself, and stopped by a signal."""

ACTIONS = (COMPUTE, WAIT, PAUSE)
"""Kinds of spans of the main thread within a step."""


Call = tuple[str, tuple[int, ...]]
"""The name of a collective call, and its ranks."""


class OpenMessage(NamedTuple):
    """An open message of a rank.

    name     as recorded, such as "activation"
    ranks    the ranks of the collective call that sends the message; else the ranks in its name
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
    is_any   the wait is for any of several messages, and no collective call
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
    """Return the state of a rank from its trace."""
    records, facts = trace.records, trace.facts
    steps = records[records["kind"] == STEP]
    step = int(steps[-1]["step"]) + 1 if len(steps) else 0
    started: Counter[tuple] = Counter()
    messages = []
    now = records[records["step"] == records["step"][-1]] if len(records) else records
    for record in now[np.isin(now["kind"], (SEND, RECEIVE)) & (now["peer"] >= 0)]:
        message = _message(trace, record, started)
        if record["end"] == 0:
            messages.append(message)
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


def _message(trace: Trace, record: Any, started: Counter[tuple]) -> OpenMessage:
    """Return a message, and count it in `started`."""
    rank, peer, is_sent = trace.facts["rank"], int(record["peer"]), record["kind"] == SEND
    sender, receiver = (rank, peer) if is_sent else (peer, rank)
    (what, ranks), tag = _call(trace, record["what"]), int(record["tag"])
    started[(what, sender, receiver, tag), is_sent] += 1
    ordinal = started[(what, sender, receiver, tag), is_sent]
    return OpenMessage(what, int(record["micro"]), sender, receiver, tag, is_sent, ordinal, ranks)


def _call(trace: Trace, what: int) -> Call:
    name, ranks = trace.names[what]
    return name, tuple(ranks)


def _wait(trace: Trace, record: Any, now: np.ndarray, calls: Mapping[Call, int]) -> OpenWait:
    """Return an open wait.

    now    the records of the rank's newest step
    calls  as in RankState
    """
    (what, ranks), message = _call(trace, record["what"]), None
    # A wait that is linked to a receive, but has no peer, is for a message of any rank.
    is_any = record["peer"] < 0 and (what == MESSAGES or record["nbytes"] > 0)
    if record["peer"] >= 0:
        started: Counter[tuple] = Counter()
        for other in now[np.isin(now["kind"], (SEND, RECEIVE)) & (now["peer"] >= 0)]:
            candidate = _message(trace, other, started)
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
        inner = spans[-1]
        phrases.append(("waiting for " if inner["kind"] == WAIT else "") + described(trace, inner))
    else:
        began = steps[-1]["number"] if len(steps) else 0
        ended = records[np.isin(records["kind"], ACTIONS) & (records["number"] > began)]
        if len(ended):
            phrases.append(f"after {described(trace, ended[-1])}")
    return ", ".join(phrases) or "its start"
