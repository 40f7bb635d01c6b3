"""An observation of a living run: traces of all ranks, states of processes and stacks."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from mpitrain.errors import ConfigError
from mpitrain.machine.process import ProcessId, process_state
from mpitrain.run.stalls.questions import Answer, ask
from mpitrain.trace.blame import (
    GONE,
    STOPPED,
    Finding,
    RankState,
    described_finding,
    first_divergence,
    state_of,
)
from mpitrain.trace.timeline import Timeline, Trace, on_the_clock_of_rank_0, read_timeline

PROCESS_ID = TypeAdapter(ProcessId)


class Observation(NamedTuple):
    """A run at one moment.

    states   of the ranks whose traces can be read
    now      time of the moment on the clock of rank 0
    answers  by rank; none before a question
    """

    timeline: Timeline
    states: list[RankState]
    now: float
    answers: Mapping[int, Answer]

    def finding(self, quiet: float) -> Finding:
        """Return the first divergence; a rank with a sign in the last `quiet` seconds moves."""
        return first_divergence(self.states, self.now, quiet)

    def text(self, finding: Finding) -> str:
        return described_finding(finding, self.states, self.now, self.processes)

    @property
    def processes(self) -> dict[int, int]:
        """Return the process number of each rank, as far as it is known."""
        return {
            trace.facts["rank"]: trace.facts["process"]
            for trace in self.timeline.traces
            if type(trace.facts.get("process")) is int
        }


def observe(run_dir: Path, clocks: Mapping[int, float] | None = None) -> Observation:
    """Observe a run only through its files.

    clocks  {rank: the present time on the clock of its trace}, as far as it is known
    raises  ConfigError if the run has no traces that can be read
    """
    return _observed(run_dir, {}, clocks or {})


def question(
    run_dir: Path,
    before: Observation,
    with_stacks: bool,
    seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Observation:
    """Observe a run by asking its ranks; arguments as in `ask`.

    before an observation through files
    raises  OSError if the directory cannot be written; ConfigError if it has no traces any more
    """
    processes = {
        trace.facts["rank"]: process
        for trace in before.timeline.traces
        if (process := _process(trace.facts))
    }
    asked = [state.rank for state in before.states if state.process not in (GONE, STOPPED)]
    answers = ask(run_dir, asked, processes, with_stacks, seconds, meanwhile)
    return _observed(run_dir, answers, {rank: answer.clock for rank, answer in answers.items()})


def _observed(
    run_dir: Path, answers: Mapping[int, Answer], clocks: Mapping[int, float]
) -> Observation:
    timeline = read_timeline(run_dir)
    if not timeline.traces:
        reason = next(iter(timeline.missing.values()), "")
        raise ConfigError(
            f"No trace of the run in {run_dir} can be read. {reason}",
            "Name the directory of another run.",
        )
    known = {
        int(rank): state for answer in answers.values() for rank, state in answer.processes.items()
    }
    states = []
    for trace in timeline.traces:
        process, rank = _process(trace.facts), trace.facts["rank"]
        own = process_state(process) if process else ""
        state = own or known.get(rank, "")
        states.append(state_of(trace, state if state in (GONE, STOPPED) else ""))
    return Observation(timeline, states, _now(timeline, clocks), answers)


def _process(facts: Mapping[str, Any]) -> ProcessId | None:
    with suppress(ValidationError):
        return PROCESS_ID.validate_python(facts.get("process_id"))
    return None


def _now(timeline: Timeline, clocks: Mapping[int, float]) -> float:
    """Return the present time on the clock of rank 0.

    Without a rank's clock it is the time of this host, which may differ from that of rank 0.
    """
    times = [
        _on_rank_0(trace, clocks[trace.facts["rank"]])
        for trace in timeline.traces
        if trace.facts["rank"] in clocks
    ]
    for trace in timeline.traces[: 0 if times else None]:
        wall, clock = trace.facts.get("time"), trace.facts.get("clock_then")
        if isinstance(wall, float) and isinstance(clock, float):
            times = [_on_rank_0(trace, clock + time.time() - wall)]
            break
    return max([*times, timeline.end()])


def _on_rank_0(trace: Trace, seconds: float) -> float:
    return float(on_the_clock_of_rank_0(np.array([seconds]), trace.clocks)[0])
