"""Claim: every failure of run.inject ends a launched job in time, with our line last, and leaves nothing behind.

Each kind of failure happens at each phase of a run of 2 ranks. A death, an exception or an exit ends
the job within 5 s; a silence within run.stall_seconds + 5 s. The table ENDS has the expected answer.
The whole matrix takes about 5 minutes for one MPI. /dev/shm should be private, as here:

    unshare -m sh -c 'mount -t tmpfs none /dev/shm && python jobs/prove/failures.py --mpi BIN [--only KIND ...]'

BIN is the folder of mpirun and python. Without it, these are the ones of this interpreter.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
STALL = 4.0
TRIES = 3
"""Runs of a job that is only late: on a busy machine the launcher needs seconds to start and end."""
PHASES = {
    "start": "@0",
    "training": "@3",
    "checkpoint": "@3:save",
    "evaluation": "@3:evaluation",
    "end": "@3:end",
}
TRACE = re.compile(r"rank-\d{5}")
MARK = "MPITRAIN_FAILURE"
SETTINGS = {
    "model.layers": 1,
    "model.width": 16,
    "model.context": 16,
    "batch.size": 6,
    "run.steps": 8,
    "run.log_every": 1,
    "run.sample": 0,
    "run.stall_seconds": STALL,
    "run.grace": STALL,
    "run.eval_every": 4,
    "run.eval_rows": 12,
    "checkpoint.every": 4,
    "replication.algorithm": "ring",
}


class End(NamedTuple):
    """The expected end of a job.

    seconds  from the failure to the end of the job, at most; with a full disk this contains the
             steps to the next checkpoint
    last     pattern of the last line on the terminal, with Open MPI and with MPICH
    codes    the possible exit codes
    """

    seconds: float
    last: str
    codes: tuple[int, ...] = (1,)


RESUME = r"(\. With --resume=auto .*)?"
KILLED = r"mpitrain launch: (rank 1|process \d+) on \S+ was killed: signal {}\b.*"
FAILED = r"mpitrain launch: the run failed: rank 1{}.*"
SILENT = End(STALL + 5, r"mpitrain launch: the run failed: (rank [01]|a rank)\b.*")
"""The rank that reports a silence may be a victim. A lost message may also meet the next receive."""
ENDS = {
    "kill": End(5, KILLED.format(9), (9, 137)),
    "segfault": End(5, KILLED.format(11), (11, 139)),
    "raise": End(5, FAILED.format(": ended by an exception")),
    "exit": End(5, FAILED.format(": left the job")),
    "_exit": End(5, r"mpitrain launch: (the run failed|the launcher returned 0)\b.*"),
    "oom": End(5, FAILED.format(": out of memory")),
    "disk": End(30, r".*then go on with --resume.*"),
    "stop": SILENT,
    "deadlock": SILENT,
    "mismatch": SILENT,
    "lose": SILENT,
}
"""The expected end by kind of failure; the same at each phase."""
UNLIKE: dict[tuple[str, str], End | str] = {
    # The run is complete. MPICH takes an exit code of 0 for a success.
    ("_exit", "end"): End(5, r"(mpitrain launch: the run failed|done): .*", (0, 1)),
    ("disk", "end"): "all files are written",
    ("lose", "end"): "no message follows",
}
"""Exceptions, by (kind, phase): another end, or the reason why there is none."""


class Found(NamedTuple):
    """A job that has ended: seconds since the failure, exit code, printed lines, and leftovers."""

    seconds: float
    code: int
    lines: list[str]
    left: list[str]


def environment(programs: Path, mark: str, temporary: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(temporary),
        MARK: mark,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def processes(mark: str) -> list[str]:
    """Return the command lines of the processes that this mark's job has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if int(folder.name) != os.getpid() and any(words):
                    found.append(f"process {folder.name}: {b' '.join(words).decode()[:60]}")
        except OSError:
            continue
    return found


def job(programs: Path, kind: str, phase: str, folder: Path, mark: str, **more: object) -> Found:
    """Run a job that fails, and return its end.

    more  settings besides SETTINGS
    """
    temporary = folder / "tmp"
    temporary.mkdir()
    before = {*os.listdir("/dev/shm")}
    settings = SETTINGS | more | {"run.inject": f"{kind}:1{PHASES[phase]}"}
    words = [
        str(programs / "python"),
        "-m",
        "mpitrain",
        "launch",
        "-n",
        "2",
        "--",
        "train",
        "--out",
        "run",
    ]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    lines: list[str] = []
    failed: list[float] = []
    running = subprocess.Popen(
        words,
        cwd=folder,
        env=environment(programs, mark, temporary),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert running.stdout
    deadline = threading.Timer(90, lambda: os.killpg(running.pid, signal.SIGKILL))
    deadline.start()
    for line in running.stdout:
        lines.append(line.rstrip("\n"))
        if "run.inject: " in line and not failed:
            failed.append(time.monotonic())
    code = running.wait()
    seconds = time.monotonic() - failed[0] if failed else float("inf")
    deadline.cancel()
    left = processes(mark)
    left += [f"/dev/shm/{name}" for name in sorted({*os.listdir("/dev/shm")} - before)]
    # `mpitrain runs report` reads the traces of a job that had no run directory; they go after a day.
    files = [path for path in temporary.rglob("*") if not TRACE.fullmatch(path.name)]
    left += [str(path.relative_to(folder)) for path in files if path.is_file()]
    left += [path.name for path in folder.glob("run/checkpoints/.*")]
    return Found(seconds, code, [line for line in lines if line.strip()], left)


def last_line(found: Found) -> str:
    """Return the last line but for those of steps: MPI forwards standard output and error in no order."""
    return next((line for line in reversed(found.lines) if not line.startswith("step ")), "")


def verdict(found: Found, end: End) -> str:
    """Return "" for the expected end, or the differences."""
    wrong = []
    if not found.seconds <= end.seconds:
        wrong.append(f"{found.seconds:.1f} s")
    if found.code not in end.codes:
        wrong.append(f"exit code {found.code}")
    if not re.fullmatch(end.last, last_line(found)):
        wrong.append("another last line")
    return ", ".join([*wrong, *found.left])


def expected(kind: str, phase: str) -> End | str:
    """Return the expected end, or the reason why there is none."""
    return UNLIKE.get((kind, phase), ENDS[kind])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mpi", type=Path, default=Path(sys.executable).parent)
    parser.add_argument("--only", nargs="*", default=[*ENDS])
    parser.add_argument("--phases", nargs="*", default=[*PHASES])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--output", action="store_true", help="print the output of jobs that differ"
    )
    options = parser.parse_args()
    version = subprocess.run([options.mpi / "mpirun", "--version"], capture_output=True, text=True)
    mpi = "Open MPI" if "Open MPI" in version.stdout else "MPICH"
    print(f"{mpi}\n{'failure':<10} {'phase':<11} {'s':>5} {'code':>4}  last line", flush=True)
    differences, rows = 0, []
    for kind in options.only:
        for phase in options.phases:
            end = expected(kind, phase)
            if isinstance(end, str):
                print(f"{kind:<10} {phase:<11} n/a: {end}", flush=True)
                continue
            for attempt in range(TRIES):
                with tempfile.TemporaryDirectory() as folder:
                    mark = f"{os.getpid()}-{kind}-{phase}-{attempt}"
                    found = job(options.mpi, kind, phase, Path(folder), mark)
                wrong = verdict(found, end)
                if not re.fullmatch(r"[\d.]+ s", wrong):
                    break
            differences += bool(wrong)
            print(
                f"{kind:<10} {phase:<11} {found.seconds:5.1f} {found.code:4d}  {last_line(found)[:110]}"
                + (f"\n    DIFFERS: {wrong}" if wrong else ""),
                flush=True,
            )
            if wrong and options.output:
                print("\n".join(f"    | {line}" for line in found.lines[-40:]), flush=True)
            rows.append(
                {"mpi": mpi, "kind": kind, "phase": phase, **found._asdict(), "wrong": wrong}
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"{differences} of {len(rows)} differ")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
