"""The first failure of a job, read from its output for the last line that `launch` prints."""

import re
import shlex
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import brief

RANK = re.compile(rb"^((?:rank \d+(?: on \S+)?|PeerLost): (?!run\.inject)[^\n]*)\n", re.MULTILINE)
"""A line in which a rank reports its end, or all ranks that no replica is whole."""
TIMER = re.compile(rb"^Timeout \(([\d:.]+)\)!", re.MULTILINE)
"""The line of the timer that limits MPI_Init and MPI_Finalize; the stack of the rank follows."""
TOO_EARLY = re.compile(rb"^rank \d+: ended on \S+ before the ranks were connected", re.MULTILINE)
"""A line about a rank of a fault-tolerant job without which MPI_Init of the others does not end."""
ALL_ENDED = re.compile(
    rb"^rank \d+: (?:ends the stalled job|TrainingError: After a loss the run did not go on)",
    re.MULTILINE,
)
"""A line with which a rank of a fault-tolerant job ends all of them."""
SILENCE = re.compile(
    r"(?:rank \d+ on \S+: no progress|a rank stood still) for (?:(\d+):(\d+):)?(\d+)"
)
"""A report of a rank that may have waited for another one, with the time in seconds or h:mm:ss."""
REFUSED = re.compile(rb"^(srun: error: (?!\S+: tasks? )[^\n]*)\n", re.MULTILINE)
"""A line in which srun itself fails."""
AGREED = re.compile(rb"^(?:Config|Data|Checkpoint|Comm|Training|Kernel)Error: ", re.MULTILINE)
"""The start of an error that rank 0 prints for all ranks."""
LONGEST = 300
"""Largest number of characters of a report in the last line."""


EXITED = re.compile(
    rb"Process name: +\[[^\]]*,(?P<rank>\d+)\]\s+Exit code: +(?P<code>\d+)|"
    rb"process rank (?P<leaver>\d+) with PID \d+ on node \S+\s+exiting\s+improperly"
)
"""What Open MPI says about the rank that exited first."""

LOST_HOST = re.compile(
    rb"daemon[^-]*?^  Remote (?:host: +|daemon: +\S+ on node )(\S+)$", re.MULTILINE
)
"""What Open MPI says about a host whose daemon has gone."""


class Failure:
    """The first failure of a job.

    report     the line in which a rank reported its end; "" without one
    refusal    the line in which srun itself reported a failure; "" without one
    is_agreed  whether rank 0 printed an error of all ranks, which says everything
    aborted    the time at which a rank of a fault-tolerant job, or of a user's program, ended all of
               them; 0: none has
    too_early  whether a rank of such a job ended before the ranks were connected
    exited     which rank exited first, by a message of Open MPI that is not shown; "" without one
    """

    def __init__(self) -> None:
        self.report, self.refusal, self.is_agreed, self.aborted = "", "", False, 0.0
        self.too_early, self.exited = False, ""

    def read_box(self, box: bytes) -> None:
        """Search a message of Open MPI that is not shown."""
        if (match := EXITED.search(box)) and not self.exited:
            rank = (match["rank"] or match["leaver"]).decode()
            how = f"with code {match['code'].decode()}" if match["code"] else "before the others"
            self.exited = f"rank {rank} exited {how}"

    def read(self, text: bytes) -> None:
        """Search whole lines of output. A line may be read again."""
        reported = RANK.search(text)
        if reported and not self.report:
            self.report = brief(reported[1].decode(errors="replace").strip().rstrip("."))[:LONGEST]
        timer = TIMER.search(text)
        if timer and not self.report:
            self.report = f"a rank stood still for {timer[1].decode()} in MPI, with the stack above"
        if (refused := REFUSED.search(text)) and not self.refusal:
            self.refusal = brief(refused[1].decode(errors="replace").strip())[:LONGEST]
        self.is_agreed = self.is_agreed or bool(AGREED.search(text))
        self.too_early = self.too_early or bool(TOO_EARLY.search(text))
        if (self.too_early or ALL_ENDED.search(text)) and not self.aborted:
            self.aborted = time.monotonic()

    @property
    def is_loss(self) -> bool:
        """Whether the first report says that a rank was lost, not that one raised an error."""
        return self.too_early or "PeerLost: " in self.report

    def last_line(self, code: int, run: str, start: Path) -> str:
        """Return the last line of a failed job; "" if an error of all ranks is already the last one.

        code   exit code of the launcher
        run    run directory; "" if there is none yet
        start  folder with the traces of this host's ranks until there is a run directory
        """
        if self.is_agreed:
            return ""
        reason = self.report or self.refusal
        reason = reason or f"exit code {code}{_signal(code)}, and no rank gave a reason"
        if run:
            if not self.report:
                reason += f"; `mpitrain runs report {shlex.quote(run)}` names the rank that fell silent first"
            reason += ". With --resume=auto it goes on from its last checkpoint, if it has one"
        elif silence := SILENCE.match(reason):
            hours, minutes, seconds = (int(digits or 0) for digits in silence.groups())
            from mpitrain.trace.blame import standing

            first = standing(start, 3600 * hours + 60 * minutes + seconds)
            reason += f"; {first or 'which rank stood still first is not known'}"
        return f"the run failed: {reason}"


def _signal(code: int) -> str:
    """Return the signal that an exit code above 128 stands for, in brackets; "" if it stands for none."""
    with suppress(ValueError):
        number = signal.Signals(code - 128)
        return f" ({number.name}: {signal.strsignal(number)})"
    return ""


KILLED = (
    re.compile(
        rb"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+)\s+exited\s+on\s+"
        rb"(?P<how>signal\s+\d+ \([^)]*\))"
    ),
    re.compile(
        rb"^srun: error: (?P<host>\S+): tasks? (?P<rank>[\d,-]+): (?!Exited with)(?P<how>.+)$",
        re.MULTILINE,
    ),
    re.compile(
        rb"PID (?P<process>\d+) RUNNING AT (?P<host>\S+)\n.*TERMINATED WITH THE EXIT STRING: .*\((?P<how>signal \d+)\)",
        re.DOTALL,
    ),
)
# srun and its daemons print ABORTED when they kill the remaining ranks.
# LOST finds the rank that PMIx lost first.
ABORTED = re.compile(rb"^srun: Job step aborted|^slurmstepd-\S+: error: \*\*\* STEP ", re.MULTILINE)
LOST = re.compile(
    rb"^slurmstepd-\S+: error:.* _errhandler: .* source = \[\S+:(\d+)\]", re.MULTILINE
)
# After this message srun itself kills the other ranks.
LEFT = re.compile(rb"^srun: error: \S+: tasks? [\d,-]+: Exited with", re.MULTILINE)


class Killed(NamedTuple):
    """A report of Open MPI, Slurm or MPICH that a signal ended a process.

    rank  its number; "" from MPICH. Slurm may list several ranks, as "2-3" or "0,2", and may have
          killed some of them itself
    """

    how: str
    host: str
    rank: str = ""
    process: str = ""

    @property
    def is_one(self) -> bool:
        """Whether a single rank or process is named."""
        return self.rank.isdigit() or not self.rank

    def has(self, rank: int) -> bool:
        for listed in filter(None, self.rank.split(",")):
            first, _, last = listed.partition("-")
            if int(first) <= rank <= int(last or first):
                return True
        return False

    def __str__(self) -> str:
        if not self.is_one:
            return f"at least one of the ranks {self.rank} on {self.host} was killed: {self.how} (Slurm then ends the others)"
        if self.rank:
            return f"rank {self.rank} on {self.host} was killed: {self.how}"
        return (
            f"process {self.process} on {self.host} was killed: {self.how}. MPICH does not tell its rank, and ends the "
            "others itself when one has left"
        )


class KilledRanks:
    """The reports of killed ranks, collected from both streams of a job."""

    def __init__(self) -> None:
        self._killed: list[Killed] = []
        self._lost: int | None = None
        self._has_left = self._is_aborted = False

    def first(self) -> Killed | None:
        """Return the report on the process that was killed first, if that is known.

        srun also kills other processes, and lists them.
        """
        if self._lost is not None:
            for killed in self._killed:
                if killed.has(self._lost):
                    return killed._replace(rank=str(self._lost))
        if self._is_aborted and len(self._killed) > 1:
            # srun killed all ranks before it listed any, so the first one is unknown.
            return self._killed[0]._replace(
                rank=",".join(killed.rank for killed in self._killed),
                host=", ".join(killed.host for killed in self._killed),
            )
        return self._killed[0] if self._killed else None

    def read(self, text: bytes) -> None:
        """Collect the reports in whole lines of output. A line may be read again."""
        lost = LOST.search(text)
        if lost and self._lost is None:
            self._lost = int(lost[1])
        left = LEFT.search(text)
        for pattern in KILLED if not self._has_left else ():
            for match in pattern.finditer(text, 0, left.start() if left else len(text)):
                found = match.groupdict().items()
                words = {name: value.decode(errors="replace").split() for name, value in found}
                killed = Killed(**{name: " ".join(each) for name, each in words.items()})
                if not self._killed:
                    self._is_aborted = bool(ABORTED.search(text, 0, match.start()))
                if killed not in self._killed:
                    self._killed.append(killed)
        self._has_left = self._has_left or bool(left)
