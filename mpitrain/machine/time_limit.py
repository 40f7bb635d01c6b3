"""The time limit of a batch job: a run stops early enough to save a checkpoint before it."""

import math
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

SAVES = 3
"""Time reserved for the last checkpoint, as a multiple of the slowest one so far."""
EXCHANGES = 2
"""Number of exchanges of stop requests between the ranks for which time is reserved."""
LEAVING = 5.0
"""Seconds for the ranks and their launcher to leave after the checkpoint."""
UNMEASURED = 30.0
"""Assumed time of a checkpoint in seconds, until one is measured."""


class TimeLimit:
    """Decides on rank 0 whether the run must stop because its batch job, or run.max_hours, ends soon.

    It reserves time for 3 of the slowest checkpoints, two exchanges of stop requests, and a few
    seconds. The run trains for at least half of the time that was left when the
    end was first known. So even a job that is too short makes progress.

    ends          returns the end of the job in seconds since 1970, or None; None: there is none
    checkpoint_s  seconds of the slowest checkpoint before this job resumed the run; 0: none
    steps         steps between two exchanges of stop requests
    seconds       of this start after which the run ends in any case; 0: there is no such end
    """

    def __init__(
        self,
        ends: Callable[[], float | None] | None,
        checkpoint_s: float,
        steps: int,
        seconds: float = 0.0,
    ):
        self._ends, self._steps = ends, steps
        self._at = time.time() + seconds if seconds else math.inf
        self._checkpoint_s, self._step_s = checkpoint_s, 0.0
        self._first_s: float | None = None
        self._most: float | None = None
        self._left: float | None = None

    def shorten(self, seconds: float) -> None:
        """Count time before this start as part of it."""
        self._at -= seconds

    def stepped(self, seconds: float) -> None:
        """Note the time of a step.

        The first step also compiles and allocates. It is the estimate until a second one has ended.
        """
        if self._first_s is None:
            self._first_s = seconds
        else:
            self._step_s = max(self._step_s, seconds)

    def saved(self, seconds: float) -> None:
        self._checkpoint_s = max(self._checkpoint_s, seconds)

    @property
    def margin(self) -> float:
        """Seconds before the end of the job at which the run stops."""
        step_s = self._step_s or self._first_s or 0.0
        needed = SAVES * (self._checkpoint_s or UNMEASURED) + EXCHANGES * self._steps * step_s
        needed += LEAVING
        return needed if self._most is None else min(needed, self._most)

    def left(self) -> float | None:
        end = self._ends() if self._ends else None
        end = self._at if end is None else min(end, self._at)
        return None if end == math.inf else end - time.time()

    def is_near(self) -> bool:
        left = self.left()
        if left is None:
            return False
        if self._most is None:
            self._most = max(0.0, left / 2)
        if left <= self.margin and self._left is None:
            self._left = left
        return self._left is not None

    def reason(self) -> dict[str, float]:
        """Return {"before_limit_s": seconds left} if the limit stopped the run, else {}."""
        return {} if self._left is None else {"before_limit_s": self._left}


EVERY = 300.0
"""Seconds between two questions: `scontrol update` can move the end of a job."""
PATIENCE = 30.0
"""Seconds to wait for one answer of a busy scheduler."""
FORMAT = "%Y-%m-%dT%H:%M:%S"


class JobEnd:
    """The end of a Slurm job, which a thread asks for again and again; None if there is none.

    The thread makes no MPI call, and the caller never waits for it. Without `squeue`, outside a
    job, or without a time limit, the end stays None.
    """

    def __init__(self, environment: Mapping[str, str], every: float = EVERY):
        """Start the thread if `environment` is that of a Slurm job."""
        self._at: float | None = None
        self._child: subprocess.Popen[str] | None = None
        self._closed = threading.Event()
        self._environment = {**environment, "SLURM_TIME_FORMAT": "standard"}
        if job := environment.get("SLURM_JOB_ID"):
            threading.Thread(
                target=self._ask, args=(job, every), name="job end", daemon=True
            ).start()

    def __call__(self) -> float | None:
        """Return the end in seconds since 1970, or None if it is not known."""
        return self._at

    def close(self) -> None:
        self._closed.set()
        if child := self._child:
            child.kill()

    def _ask(self, job: str, every: float) -> None:
        line = ["squeue", "--noheader", f"--jobs={job}", "--format=%e"]
        while not self._closed.is_set():
            # A question without an answer leaves the last known end.
            with suppress(OSError, ValueError, subprocess.TimeoutExpired):
                self._at = self._parsed(self._answer(line))
            self._closed.wait(every)

    def _answer(self, line: list[str]) -> str:
        with subprocess.Popen(
            line,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as self._child:
            try:
                return self._child.communicate(timeout=PATIENCE)[0].strip()
            except subprocess.TimeoutExpired:
                self._child.kill()
                raise

    @staticmethod
    def _parsed(answer: str) -> float | None:
        """Return the time that `squeue` prints in the zone of this host; None for N/A."""
        if answer in ("N/A", "NONE", "Unknown"):
            return None
        return time.mktime(time.strptime(answer, FORMAT))
