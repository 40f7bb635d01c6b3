"""A living run, observed through files: traces, states of processes, and answers of its ranks; needs no MPI.

    RUN/trace/ask             a question, as JSON; a later one replaces it
    RUN/trace/answer-00003    the answer of rank 3, as JSON

A thread of each rank looks for a question once a second. It first gives its trace to the file
system, since some show mapped memory late to other hosts.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from mpitrain.errors import ConfigError
from mpitrain.files import contents, remove, write_whole
from mpitrain.machine.process import ProcessId, process_state
from mpitrain.trace.blame import (
    GONE,
    STOPPED,
    Finding,
    RankState,
    described_finding,
    first_divergence,
    state_of,
)
from mpitrain.trace.recorder import Recorder
from mpitrain.trace.timeline import (
    LATEST,
    TRACE,
    Timeline,
    Trace,
    on_the_clock_of_rank_0,
    read_timeline,
)

Model = TypeVar("Model", bound=BaseModel)
PROCESS_ID = TypeAdapter(ProcessId)
ASK, ANSWER = "ask", "answer-{:05d}"
PAUSE = 0.05
"""Seconds between two looks for answers."""
DEEPEST, THREADS = 40, 32
"""Largest number of frames of a thread, and of threads, in an answer."""


class Question(BaseModel):
    """A question.

    number     differs from those of earlier questions
    stacks     whether the ranks answer with their Python stacks
    processes  {rank: a ProcessId}; a rank answers for all ranks of its host
    """

    number: int
    stacks: bool
    processes: dict[str, ProcessId]


class Answer(BaseModel):
    """The answer of a rank.

    clock      time of the answer, on the clock of the rank's trace
    stacks     {thread: its frames as text, the most recent call last}; {} if not wanted
    processes  {rank of its host: "running", "stopped", "gone" or ""}
    """

    number: int
    clock: Annotated[float, Field(ge=-LATEST, le=LATEST)]
    stacks: dict[str, list[str]]
    processes: dict[str, str]


class Answering:
    """Answers of one rank; `look` is called by one thread, about once a second."""

    def __init__(self, run_dir: Path, rank: int, recorder: Recorder):
        self._run_dir, self.rank = run_dir, rank
        self.recorder, self._seen = recorder, (0, 0)

    def look(self) -> None:
        """Answer a new question; without one, this takes a few system calls."""
        folder = self._run_dir / TRACE
        with suppress(OSError):
            os.scandir(folder).close()  # Network file systems then look for new names.
            facts = (folder / ASK).stat()
            if (seen := (facts.st_ino, facts.st_mtime_ns)) == self._seen:
                return
            self._seen = seen
            question = read_model(folder / ASK, Question)
            if question is None:
                return
            with suppress(ValueError, OSError):  # The trace may move to another file meanwhile.
                self.recorder.flush()
            answer = Answer(
                number=question.number,
                clock=self.recorder.clock(),
                stacks=_stacks(self.recorder.owner) if question.stacks else {},
                processes={
                    rank: process_state(process) for rank, process in question.processes.items()
                },
            )
            write_whole(folder / ANSWER.format(self.rank), answer.model_dump_json())


def _stacks(main: int) -> dict[str, list[str]]:
    """Return the stacks of all threads but the calling one; that of thread `main` comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return {
        f"{names.get(ident, 'thread')} ({ident})": traceback.format_stack(frame)[-DEEPEST:]
        for ident, frame in frames[:THREADS]
        if ident != threading.get_ident()
    }


def ask(
    run_dir: Path,
    ranks: Collection[int],
    processes: Mapping[int, ProcessId],
    with_stacks: bool,
    seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[int, Answer]:
    """Ask the ranks of a run, and return the answers that come in time.

    A rank whose process an answer calls stopped or gone is not waited for.

    processes  of the ranks, as far as they are known
    seconds    longest time to wait
    meanwhile  called between two looks
    raises     OSError if the directory cannot be written
    """
    question = Question(
        number=time.time_ns(),
        stacks=with_stacks,
        processes={str(rank): process for rank, process in processes.items()},
    )
    until, answers = time.monotonic() + seconds, dict[int, Answer]()
    missing, folder = set(ranks), run_dir / TRACE
    write_whole(folder / ASK, question.model_dump_json())
    try:
        while missing:
            meanwhile()
            for rank in sorted(missing):
                answer = read_model(folder / ANSWER.format(rank), Answer)
                if answer and answer.number == question.number:
                    answers[rank] = answer
            missing -= answers.keys() | {
                int(rank)
                for answer in answers.values()
                for rank, state in answer.processes.items()
                if state in (STOPPED, GONE) and rank.isdecimal()
            }
            if time.monotonic() > until:  # Also a late rank has looked once, and knows its clock.
                break
            time.sleep(PAUSE)
    finally:
        with suppress(OSError):
            for name in (ASK, *map(ANSWER.format, ranks)):
                remove(folder / name)
    return answers


def read_model(file: Path, model: type[Model]) -> Model | None:
    """Return the contents of a file; None if there is no such file, or if it is damaged."""
    with suppress(OSError, ValueError):
        return model.model_validate_json(contents(file))
    return None


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
        """Return the first divergence; a rank that left a sign in the last `quiet` seconds moves."""
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

    def stack(self, rank: int, threads: int | None = None, frames: int = 0) -> list[str]:
        """Return a heading and the Python stacks of a rank as lines; 0 frames means all."""
        state = next(state for state in self.states if state.rank == rank)
        process = f", process {self.processes[rank]}" if rank in self.processes else ""
        where = f"rank {rank} on {state.host}{process}"
        answer = self.answers.get(rank)
        if not answer or not answer.stacks:
            return [f"The Python stack of {where} is unknown: the process did not answer."]
        lines = [f"Python stack of {where}, the most recent call last:"]
        for name, stack in list(answer.stacks.items())[:threads]:
            lines += [f"  {name}:", *(line.rstrip() for line in stack[-frames:])]
        return lines


def observe(
    run_dir: Path, clocks: Mapping[int, float] = {}, answers: Mapping[int, Answer] = {}
) -> Observation:
    """Observe a run only through its files.

    clocks  {rank: the present time on the clock of its trace}, as far as it is known
    raises  ConfigError if the run has no traces that can be read
    """
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
        process = _process(trace.facts)
        own = process_state(process) if process else ""
        state = own or known.get(trace.facts["rank"], "")
        states.append(state_of(trace, state if state in (GONE, STOPPED) else ""))
    return Observation(timeline, states, _now(timeline, clocks), answers)


def question(
    run_dir: Path,
    before: Observation,
    with_stacks: bool,
    seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Observation:
    """Observe a run by asking its ranks; arguments as in `ask`.

    before  an observation through files
    raises  OSError if the directory cannot be written; ConfigError if it has no traces any more
    """
    processes = {
        trace.facts["rank"]: process
        for trace in before.timeline.traces
        if (process := _process(trace.facts))
    }
    asked = [state.rank for state in before.states if state.process not in (GONE, STOPPED)]
    answers = ask(run_dir, asked, processes, with_stacks, seconds, meanwhile)
    return observe(run_dir, {rank: answer.clock for rank, answer in answers.items()}, answers)


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
