"""Questions to the ranks of a living run, through files in its directory; needs no MPI.

    RUN/trace/ask             a question, as JSON; a later one replaces it
    RUN/trace/answer-00003    the answer of rank 3, as JSON

A thread of each rank looks for a question once a second. It first gives its trace to the file
system, since some show mapped memory late to other hosts.
"""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field

from mpitrain.files import Directory, opened
from mpitrain.machine.process import ProcessId, process_state
from mpitrain.run.stalls.stacks import stacks
from mpitrain.trace.recorder import Recorder
from mpitrain.trace.timeline import LATEST, TRACE

Model = TypeVar("Model", bound=BaseModel)
ASK, ANSWER = "ask", "answer-{:05d}"
PAUSE = 0.05
"""Seconds between two looks for answers."""


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
    stacks     Python stacks of its threads, as `stacks` returns them; {} if not wanted
    processes  {rank of its host: "running", "stopped", "gone" or ""}
    """

    number: int
    clock: Annotated[float, Field(ge=-LATEST, le=LATEST)]
    stacks: dict[str, list[str]]
    processes: dict[str, str]


class Answering:
    """Answers of one rank; `look` is called by one thread, about once a second."""

    def __init__(self, run_dir: Path, rank: int, recorder: Recorder):
        self._run_dir, self._rank = run_dir, rank
        self._recorder, self._seen = recorder, (0, 0)

    def clocks(self) -> dict[int, float]:
        """Return {this rank: the present time on the clock of its trace}."""
        return {self._rank: self._recorder.clock()}

    def look(self) -> None:
        """Answer a new question; without one, this takes a few system calls."""
        with suppress(OSError), _traces(self._run_dir) as folder:
            facts = folder.facts(ASK)
            if facts is None or (seen := (facts.st_ino, facts.st_mtime_ns)) == self._seen:
                return
            self._seen = seen
            question = _read(folder, ASK, Question)
            if question is None:
                return
            with suppress(ValueError, OSError):  # The trace may move to another file meanwhile.
                self._recorder.flush()
            answer = Answer(
                number=question.number,
                clock=self._recorder.clock(),
                stacks=stacks(self._recorder.owner) if question.stacks else {},
                processes={
                    rank: process_state(process) for rank, process in question.processes.items()
                },
            )
            folder.write_whole(ANSWER.format(self._rank), answer.model_dump_json())


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
    missing = set(ranks)
    with _traces(run_dir) as folder:
        folder.write_whole(ASK, question.model_dump_json())
        try:
            while missing and time.monotonic() < until:
                meanwhile()
                for rank in sorted(missing):
                    answer = _read(folder, ANSWER.format(rank), Answer)
                    if answer and answer.number == question.number:
                        answers[rank] = answer
                missing -= answers.keys() | {
                    int(rank)
                    for answer in answers.values()
                    for rank, state in answer.processes.items()
                    if state in ("stopped", "gone") and rank.isdecimal()
                }
                time.sleep(PAUSE)
        finally:
            with suppress(OSError):
                folder.remove(ASK)
                for rank in ranks:
                    folder.remove(ANSWER.format(rank))
    return answers


def _traces(run_dir: Path) -> Directory:
    """Open the folder of traces anew: network file systems then look for new names."""
    return opened(run_dir / TRACE, inner=1)


def _read(folder: Directory, name: str, model: type[Model]) -> Model | None:
    """Return the contents of a file; None if there is no such file, or if it is damaged."""
    with suppress(OSError, ValueError), folder.open(name) as file:
        return model.model_validate_json(file.read())
    return None
