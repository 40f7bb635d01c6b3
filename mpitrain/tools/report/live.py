"""The state of a living run as text: which rank the others wait for, and the state of each rank."""

from collections.abc import Iterator
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.run.metrics import CLOSING, METRICS, read_metrics
from mpitrain.run.stalls.observation import Observation, observe, question
from mpitrain.run.stalls.report import stack_of
from mpitrain.trace.blame import GONE, RankState, named
from mpitrain.trace.recorder import COMPUTE
from mpitrain.trace.timeline import Timeline

SECONDS = 10.0
"""Longest time to wait for the answers of the ranks."""
QUIET = 3.0
"""A rank with a sign in the last QUIET seconds moves; in a run with long computations, more."""


def what_happens_now(run: Path, with_stacks: bool) -> Iterator[str]:
    """Yield lines: the first divergence, the state of each rank and perhaps its Python stacks.

    raises  ConfigError unless the run has traces and has not ended
    """
    records = read_metrics(run / METRICS)
    if records and records[-1].get("event") in CLOSING:
        raise ConfigError(
            f"--now asks a living run, but the run in {run} has ended.",
            f"Leave --now out: `mpitrain runs report {run}`.",
        )
    seen, problem = observe(run), ""
    try:
        seen = question(run, seen, with_stacks, SECONDS)
    except OSError as error:
        problem = f"The ranks cannot be asked: {error.filename}: {error.strerror}."
    if problem:
        yield f"{problem} The following is from their traces alone."
    yield from seen.timeline.missing.values()
    if all(state.process == GONE for state in seen.states):
        yield "No process of this run is left: it was killed, or it crashed."
    yield seen.text(seen.finding(max(QUIET, 2 * longest(seen.timeline))))
    yield f"The last sign of each of {len(seen.states)} rank(s):"
    for state in seen.states:
        age = f"{seen.now - state.since:.1f} s ago"
        yield f"  {named(state)}{_process(seen, state)}, {age}: {state.action}"
    if with_stacks:
        for state in seen.states:
            yield from stack_of(seen, state.rank)


def longest(timeline: Timeline) -> float:
    """Return the seconds of the longest computation in the traces."""
    seconds = 0.0
    for trace in timeline.traces:
        spans = trace.records[(trace.records["kind"] == COMPUTE) & (trace.records["end"] > 0)]
        seconds = max(seconds, float((spans["end"] - spans["start"]).max(initial=0.0)))
    return seconds


def _process(seen: Observation, state: RankState) -> str:
    process = f", process {seen.processes[state.rank]}" if state.rank in seen.processes else ""
    reason = state.process or ("" if state.rank in seen.answers else "no answer")
    return f"{process} ({reason})" if reason else process
