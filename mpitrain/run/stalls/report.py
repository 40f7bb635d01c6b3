"""The report of a stall: one rank judges the traces of all ranks, and prints the finding once.

The ranks elect the reporter of a stall by a file that only one of them can create:

    RUN/trace/stall-1    the first judgement: {"verdict": "moving", "seconds": 2.0, "time": ...}
    RUN/trace/stall-2    the next one
"""

import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from mpitrain.errors import visible
from mpitrain.files import Directory, opened
from mpitrain.run.stalls.observation import Observation, observe, question
from mpitrain.run.stalls.questions import Answering
from mpitrain.trace.blame import MOVING, Finding, RankState, named
from mpitrain.trace.timeline import TRACE

PREFIX = "stall-"
ANSWERED = 2.5
"""Longest time in seconds that the reporter waits for the stacks of all ranks."""
BLAMED, INNERMOST = 2, 8
"""Largest number of ranks whose stacks the report shows, and of frames of each."""
LEAST = 0.25
"""Shortest time in seconds between two judgements."""
WARNING = "warning: "
"""The begin of a report after which the job goes on; `launch` takes any other as the failure."""


class Verdict(BaseModel):
    """The decision of the judging rank about a stall; the other ranks read it.

    verdict  "moving": no rank is to blame yet, so they judge again later; else the finding has been
             printed, and the job goes on ("warned") or ends ("ends")
    seconds  until the next judgement, for "moving"
    time     of the judgement, in seconds since 1970
    """

    verdict: Literal["moving", "warned", "ends"]
    seconds: float
    time: float


class StallReport:
    """The judgements of one run, as one rank sees them."""

    def __init__(self, run_dir: Path, seconds: float, on_stall: str, answering: Answering):
        """Prepare judgements.

        seconds    run.stall_seconds
        on_stall   run.on_stall
        answering  of this rank
        """
        self._run_dir, self._seconds, self._answering = run_dir, seconds, answering
        self._verdict: Literal["warned", "ends"] = "ends" if on_stall == "end" else "warned"

    def verdict(self, since: float) -> Verdict | None:
        """Return the verdict about the present stall; None while another rank judges.

        since   begin of the stall, in seconds since 1970; an earlier warning was of another stall
        raises  OSError if the directory cannot be used; ConfigError if it has no traces
        """
        with opened(self._run_dir / TRACE, inner=1) as folder:
            number = _newest(folder)
            if number:
                verdict = _read(folder, number)
                if verdict is None or verdict.verdict == "ends":
                    return verdict
                if verdict.time + verdict.seconds > time.time():
                    return verdict
                if verdict.verdict == "warned" and verdict.time >= since:
                    return verdict
            return self._judge(folder, number + 1)

    def _judge(self, folder: Directory, number: int) -> Verdict | None:
        """Make a judgement, and print its finding; None if another rank makes it."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(f"{PREFIX}{number}", flags, 0o644, dir_fd=folder.descriptor))
        except FileExistsError:
            return None
        seen = observe(self._run_dir, self._answering.clocks())
        finding = seen.finding(self._seconds)
        if finding.kind != MOVING:
            # Some file systems show traces late, so a question comes before blame.
            seen = question(self._run_dir, seen, True, ANSWERED, self._answering.look)
            finding = seen.finding(self._seconds)
        if finding.kind == MOVING:
            verdict = Verdict(verdict="moving", seconds=self._rest(seen), time=time.time())
        else:
            verdict = Verdict(verdict=self._verdict, seconds=0.0, time=time.time())
            print(visible(self._text(seen, finding)), file=sys.stderr, flush=True)
        folder.write_whole(f"{PREFIX}{number}", verdict.model_dump_json())
        return verdict

    def _rest(self, seen: Observation) -> float:
        """Return the seconds until the rank with the oldest sign among the moving may stall."""
        ages = [seen.now - state.since for state in seen.states]
        rest = min((self._seconds - age for age in ages if age < self._seconds), default=0.0)
        return max(LEAST, rest)

    def _text(self, seen: Observation, finding: Finding) -> str:
        run = shlex.quote(str(self._run_dir))
        begin = "" if self._verdict == "ends" else WARNING
        lines = [
            # `launch` repeats a line that begins with a rank as its last line.
            f"{begin}{named(_first(seen, finding))}: the run stands still (run.stall_seconds is "
            f"{self._seconds:g}). {seen.text(finding)}",
            *_stacks(seen, finding),
        ]
        if self._verdict == "ends":
            lines.append(f"The job ends now. `mpitrain runs report {run}` shows the last actions.")
        else:
            lines.append(
                f"The job goes on (run.on_stall is warn). Now: `mpitrain runs report {run} --now --stacks`."
            )
        return "\n".join(lines)


def _newest(folder: Directory) -> int:
    """Return the number of the newest judgement; 0 before the first."""
    suffixes = (name.removeprefix(PREFIX) for name in folder.names() if name.startswith(PREFIX))
    return max((int(digits) for digits in suffixes if digits.isdecimal()), default=0)


def _read(folder: Directory, number: int) -> Verdict | None:
    """Return a verdict; None if its rank still judges."""
    with suppress(OSError, ValueError), folder.open(f"{PREFIX}{number}") as file:
        return Verdict.model_validate_json(file.read())
    return None


def _first(seen: Observation, finding: Finding) -> RankState:
    """Return the state of the culprit; without one, of the rank that has waited longest."""
    first = finding.culprits[0] if finding.culprits else finding.waiter
    return next((state for state in seen.states if state.rank == first), seen.states[0])


def _stacks(seen: Observation, finding: Finding) -> list[str]:
    """Return the innermost frames of the culprits; without one, those of the waiting rank."""
    culprits = finding.culprits or ([] if finding.waiter is None else [finding.waiter])
    return [
        line
        for rank in culprits[:BLAMED]
        for line in stack_of(seen, rank, threads=1, frames=INNERMOST)
    ]


def stack_of(
    seen: Observation, rank: int, threads: int | None = None, frames: int = 0
) -> list[str]:
    """Return a heading and the Python stacks of a rank; 0 frames means all."""
    state = next(state for state in seen.states if state.rank == rank)
    process = f", process {seen.processes[rank]}" if rank in seen.processes else ""
    where = f"rank {rank} on {state.host}{process}"
    answer = seen.answers.get(rank)
    if not answer or not answer.stacks:
        return [f"The Python stack of {where} is unknown: the process did not answer."]
    lines = [f"Python stack of {where}, the most recent call last:"]
    for name, stack in list(answer.stacks.items())[:threads]:
        lines.append(f"  {name}:")
        lines += [line.rstrip() for line in stack[-frames:]]
    return lines
