"""The failure that a job reports first, read from standard error for the last line of `launch`."""

import re

from mpitrain.errors import brief

RANK = re.compile(rb"^(rank \d+(?: on \S+)?: (?!run\.inject)[^\n]*)\n", re.MULTILINE)
"""A line in which a rank reports its end."""
TIMER = re.compile(rb"^Timeout \(([\d:.]+)\)!", re.MULTILINE)
"""The line of the timer that limits MPI_Init and MPI_Finalize; the stack of the rank follows."""
AGREED = re.compile(rb"^(?:Config|Data|Checkpoint|Comm|Training|Kernel)Error: ", re.MULTILINE)
"""The start of an error that rank 0 prints for all ranks."""
LONGEST = 300
"""Largest number of characters of a report in the last line."""


class Failure:
    """The first failure of a job.

    report     the line in which a rank reported its end, or ""
    is_agreed  whether rank 0 printed an error for all ranks; that is a whole message
    """

    def __init__(self) -> None:
        self.report, self.is_agreed = "", False

    def read(self, text: bytes) -> None:
        """Search whole lines; lines may come again."""
        found = RANK.search(text)
        if found and not self.report:
            self.report = brief(found[1].decode(errors="replace").strip().rstrip("."))[:LONGEST]
        timer = TIMER.search(text)
        if timer and not self.report:
            self.report = f"a rank stood still for {timer[1].decode()} in MPI, with the stack above"
        self.is_agreed = self.is_agreed or bool(AGREED.search(text))

    def last_line(self, code: int, began: bool) -> str:
        """Return the last line of a failed job; "" if an error of all ranks is the last one.

        code   exit code of the launcher; began as in `LauncherOutput`
        """
        if self.is_agreed:
            return ""
        reason = self.report or (
            f"exit code {code}, and no rank gave a reason; `mpitrain report` names the rank that "
            "fell silent first"
        )
        way_on = ". With --resume=auto it goes on from its last checkpoint, if it has one"
        return f"the run failed: {reason}{way_on if began else ''}"
