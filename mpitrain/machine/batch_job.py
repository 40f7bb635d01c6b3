"""The end of this process's batch job, as Slurm announces it."""

import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

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
        """End the thread, and an `squeue` that has not answered."""
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
