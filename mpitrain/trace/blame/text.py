"""The first divergence of a job as text."""

from collections.abc import Mapping, Sequence

from mpitrain.trace.blame.find import CIRCLE, MISMATCH, MISSING, MOVING, SILENT, Finding, is_lost
from mpitrain.trace.blame.states import GONE, LEFT, STOPPED, OpenMessage, RankState, waited_since

LISTED = 8
"""Largest number of ranks that a line names."""
ENDS = {
    GONE: "is gone: its process was killed, crashed or called os._exit",
    LEFT: "has left the job: its program has ended by itself",
    STOPPED: "is stopped by a signal: `kill -CONT {process}` on its host lets it go on",
}
"""{kind: the predicate of its rank}."""


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
        return (
            f"No rank is to blame: rank {newest.rank} moved {now - newest.since:.1f} s ago "
            f"({newest.action})."
        )
    if finding.kind in (SILENT, *ENDS):
        state = by_rank[finding.culprits[0]]
        seconds = now - state.since
        if finding.kind == SILENT:
            clause = f"{named(state)} has not moved for {seconds:.0f} s: {state.action}"
        else:
            ends = ENDS[finding.kind].format(process=processes.get(state.rank, "PID"))
            clause = f"{named(state)} {ends}; its last sign was {seconds:.0f} s ago: {state.action}"
        return clause + _waiter(finding, by_rank, now) + "."
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
        states_of = [by_rank[rank] for rank in finding.culprits]
        if finding.absent:
            has = "has" if len(finding.absent) == 1 else "have"
            sides += f", which {_ranks(finding.absent)} {has} not entered"
        return (
            f"Ranks are in different calls: {sides} "
            f"({'; '.join(f'{named(state)}: {state.action}' for state in states_of[:2])})."
        )
    state = min(states, key=lambda state: state.since)
    return (
        f"All ranks wait, and their traces name no culprit; {named(state)} has been silent longest, "
        f"for {now - state.since:.0f} s: {state.action}."
    )


def named(state: RankState) -> str:
    return f"rank {state.rank} on {state.host}"


def _waiter(finding: Finding, by_rank: Mapping[int, RankState], now: float) -> str:
    if finding.waiter is None:
        return ""
    return f"; {_waits(by_rank[finding.waiter], now)}"


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
