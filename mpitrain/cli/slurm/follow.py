"""Submission of a batch script to Slurm; then the log of the job, printed until the job ends."""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import click

from mpitrain.errors import ConfigError
from mpitrain.files import reading, reading_of

STATE_EVERY = 5.0
"""Seconds between two questions about the state of a job."""
LOG_EVERY = 0.5
"""Seconds between two looks at a log."""
UNANSWERED = 60.0
"""Seconds without an answer of Slurm after which `follow` gives up."""
FIELD = re.compile(r"(\w+)=(.*?)(?= \S+=|\s*$)")
"""A field of `scontrol show job`; paths may contain spaces."""
CONTINUES = re.compile(rb"^job (\d+) continues ", re.MULTILINE)
"""The line in a job's log that names the job in which the run continues."""
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REQUEUE_HOLD",
    "TIMEOUT",
}


def expedites() -> bool:
    """Return whether this site's Slurm starts a requeued job before all others (sbatch --requeue=expedite)."""
    return bool(shutil.which("scontrol")) and "enable_expedited_requeue" in (
        _asked(["scontrol", "show", "config"]).stdout
    )


def submit(text: str) -> str:
    """Submit a script to Slurm; return the job's number. ConfigError if it is refused."""
    done = _asked(["sbatch", "--parsable"], text)
    if done.returncode:
        raise ConfigError(
            f"sbatch refuses the script: {done.stderr.strip() or f'it ended with {done.returncode}'}.",
            "Print the script without --submit, and compare its options with those of your site.",
        )
    job = done.stdout.strip().partition(";")[0]
    click.echo(f"job {job}: `squeue -j {job}` shows its state, `scancel {job}` ends it", err=True)
    return job


def follow(job: str) -> int:
    """Print the logs of a job as they grow, until it ends; return its exit code.

    If the run continues in another job, the log of that job is printed, too.
    """
    logs: dict[str, _Log] = {}
    records: list[dict[str, str]] = []
    reason, asked, answered = "", 0.0, time.monotonic()
    try:
        while not records or any(record["JobState"] not in ENDED for record in records):
            if time.monotonic() - asked >= STATE_EVERY:
                asked = time.monotonic()
                if answer := _state(job):
                    records, answered = answer, asked
                    reason = _waiting(job, records, reason)
                elif asked - answered > UNANSWERED:
                    raise ConfigError(
                        f"Slurm does not know job {job}, or has not answered for {UNANSWERED:.0f} s.",
                        f"The log of the job goes on; ask with: scontrol show job {job}",
                    )
            for record in records:
                if record["JobState"] != "PENDING":
                    path = record["StdOut"]
                    logs.setdefault(path, _Log(path)).show()
            time.sleep(LOG_EVERY)
    except KeyboardInterrupt:
        click.echo(f"\njob {job} goes on; `scancel {job}` ends it", err=True)
        return 130
    for log in logs.values():
        log.show()
    following = {log.continued() for log in logs.values()} - {""}
    if following:
        return max(follow(next_job) for next_job in sorted(following))
    for record in records:
        if record["JobState"] != "COMPLETED":
            click.echo(f"job {record['JobId']} ended: {record['JobState']}", err=True)
    return max(map(_code, records))


def _state(job: str) -> list[dict[str, str]]:
    """Return the fields of the job, or of each task of an array; [] if Slurm does not answer."""
    done = _asked(["scontrol", "show", "job", "--oneliner", job])
    return [dict(FIELD.findall(line)) for line in done.stdout.splitlines() if "JobState=" in line]


def _waiting(job: str, records: list[dict[str, str]], before: str) -> str:
    """Print why a job waits, unless that was printed before.

    before   the reason that was printed last
    returns  the reason that was printed last now; "" if the job runs
    """
    waiting = [record["Reason"] for record in records if record["JobState"] == "PENDING"]
    reason = waiting[0] if len(waiting) == len(records) else ""
    if reason not in ("", "None", before):
        click.echo(f"job {job} waits: {reason}", err=True)
    return reason


def _code(record: dict[str, str]) -> int:
    """Return the exit code of an ended job; of a signal, its number plus 128."""
    if record["JobState"] == "COMPLETED":
        return 0
    code, _, signal = record["ExitCode"].partition(":")
    return int(code) or (128 + int(signal or 0) if signal not in ("", "0") else 1)


def _asked(line: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(line, input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(
            f"--submit and --follow need Slurm's commands, but there is no {line[0]} on PATH.",
            "Use a login host of the cluster, or write the script to a file.",
        ) from None


class _Log:
    """A growing log file, printed bit by bit."""

    def __init__(self, path: str):
        self._path, self._read, self._tail = path, 0, b""

    def show(self) -> None:
        """Print the bytes that are new. A log that does not exist yet has none."""
        named = reading_of(f"The log {self._path}", "Let the job write to a file.")
        with named, suppress(FileNotFoundError), reading(Path(self._path)) as file:
            file.seek(self._read)
            while chunk := file.read(1 << 16):
                self._read += len(chunk)
                self._tail = (self._tail + chunk)[-4096:]
                sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()

    def continued(self) -> str:
        """Return the number of the job that continues this one, or ""."""
        jobs = CONTINUES.findall(self._tail)
        return os.fsdecode(jobs[-1]) if jobs else ""
