"""The rank that a signal ended first, read from the messages of Open MPI, Slurm and MPICH."""

import re
from typing import NamedTuple

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
    """A process ended by a signal, as Open MPI, Slurm or MPICH reports it. MPICH reports no rank.

    rank  its number. Slurm may list several ranks, as "2-3" or "0,2"; it may have killed some.
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
        """Return whether this rank is listed."""
        ends = [
            [int(end) for end in listed.split("-")] for listed in self.rank.split(",") if listed
        ]
        return any(first <= rank <= last for first, *_, last in ([*pair, *pair] for pair in ends))

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
    """The killed ranks of a job, collected from the lines of both streams."""

    def __init__(self) -> None:
        self._killed: list[Killed] = []
        self._lost: int | None = None
        self._has_left = self._is_aborted = False

    def first(self) -> Killed | None:
        """Return the process that a signal ended first, if known. srun also kills and lists others."""
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
        """Collect from whole lines; lines may come again."""
        lost = LOST.search(text)
        if lost and self._lost is None:
            self._lost = int(lost[1])
        left = LEFT.search(text)
        for pattern in KILLED if not self._has_left else ():
            for match in pattern.finditer(text, 0, left.start() if left else len(text)):
                killed = Killed(
                    **{
                        name: " ".join(value.decode(errors="replace").split())
                        for name, value in match.groupdict().items()
                    }
                )
                if not self._killed:
                    self._is_aborted = bool(ABORTED.search(text, 0, match.start()))
                if killed not in self._killed:
                    self._killed.append(killed)
        self._has_left = self._has_left or bool(left)
