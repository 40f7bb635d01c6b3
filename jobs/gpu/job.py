"""Runs the parts of a GPU job one after another, each within its own seconds and all within those of the job.

python3 jobs/gpu/job.py JOB DEVICE FOLDER SINCE    JOB: of JOBS; SINCE: when the job began, seconds since 1970

A part is a program that prints results, a line of JSON each (table.py), as they are known. Here each is added to
FOLDER/results.jsonl at once, and the table is printed again; everything else that is said goes to FOLDER/log.txt. Whoever
kills the job, or a part, loses what was not measured yet and nothing else.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from table import misses, read, shortfalls, table

WITHOUT_GPU = 5
"""Times as many seconds for each part and for all, where kernels are compiled by g++ on few cores: nobody pays for them."""

HERE = Path(__file__).parent


class Part(NamedTuple):
    """One part.

    seconds  it may take, counted from its start
    program  beside this file, and what follows the kind of device on its command line
    ranks    more than 0: started by mpirun, where there is an MPI
    cases    whether it prints one result for each of its cases, and begins with the case of the
             number at the end of its command line; a case that ends it loses only its own result
    """

    name: str
    seconds: float
    program: str
    words: tuple[str, ...] = ()
    ranks: int = 0
    cases: bool = False


TABLE = (
    Part("machine", 40, "kernels.py", ("first",)),
    # What decides comes first: a lent machine may be taken back at any time.
    Part("suite", 90, "suite.py"),
    Part("compiled", 60, "compiled.py"),
    Part("losses", 50, "training.py", ("losses",)),
    Part("profile of a product", 40, "profiles.py"),
    Part("training", 90, "training.py"),
    Part("graphs", 40, "training.py", ("graph",)),
    Part("ring, IPC", 20, "ring.py", ("ipc",), 2),
    Part("process group", 60, "process_group.py", (), 2),
    Part("products", 50, "kernels.py", ("products",)),
    Part("attention", 45, "kernels.py", ("attention",)),
    Part("memory", 75, "kernels.py", ("memory",)),
    Part("ring, staged", 20, "ring.py", ("staged",), 2),
    Part("ring, pointers", 20, "ring.py", ("pointers",), 2),
    # It compiles for a minute or two, so it takes the seconds that the others have left.
    Part("torch.compile", 150, "training.py", ("compiled",)),
)
HOPPER = (
    Part("machine", 40, "kernels.py", ("first",)),
    # All processors compile what the others would wait for, one module at a time.
    Part("compiled", 80, "compiled.py", ("hopper",)),
    Part("first run", 50, "hopper.py", ("first",)),
    Part("attention", 45, "hopper.py", ("attention",)),
    Part("products", 80, "hopper.py", ("products",)),
    # torch.compile takes a minute or two of these, behind all other rows.
    Part("training", 265, "hopper.py", ("training",)),
)
MODES = tuple(
    Part(f"modes, {way}", 100, "modes.py", (way,), 2, True) for way in ("ipc", "pointers", "staged")
)


class Work(NamedTuple):
    """What a job does.

    seconds  from its begin to the end of its last part; the last lines take some more
    """

    seconds: float
    parts: tuple[Part, ...]


JOBS = {"table": Work(560, TABLE), "modes": Work(170, MODES), "hopper": Work(560, HOPPER)}


class Results:
    def __init__(self, path: Path, device: str):
        self._path, self._device = path, device
        path.write_text("", encoding="utf-8")

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Write a result, and print the table."""
        if self._device != "cuda":  # there times say nothing about a GPU
            row = row | {"required": None, "goal": None, "predicted": "-"}
        with self._path.open("a") as file:
            file.write(json.dumps({"part": part, **row}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print("\n".join(["", *table(read(self._path))]), flush=True)

    def note(self, part: str, what: str, ok: bool) -> None:
        self.add(
            part,
            {"what": what, "ours": "-", "peer": "-", "ratio": None, "required": None, "ok": ok},
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read(self._path)

    @property
    def misses(self) -> int:
        return misses(self.rows)


def command(part: Part, device: str) -> list[str]:
    start = ["mpirun", "-n", str(part.ranks)] if part.ranks else []
    if "pointers" in part.words:
        start += os.environ.get("POINTERS", "").split()
    return [*start, sys.executable, str(HERE / part.program), device, *part.words]


def run_cases(
    part: Part, words: Sequence[str], seconds: float, results: Results, log: Path
) -> None:
    """Run a part, and begin it again behind each case that ends it; not if it ends before a result twice in a row."""
    deadline, first, idle = time.monotonic() + seconds, 0, 0
    while idle < 2:
        if (left := deadline - time.monotonic()) < 1:
            return
        found, goes_on = run(part, [*words, str(first)], left, results, log)
        if not goes_on:
            return
        first, idle = first + found + 1, 0 if found else idle + 1


def run(
    part: Part, words: Sequence[str], seconds: float, results: Results, log: Path
) -> tuple[int, bool]:
    """Run a part to its end or that of its seconds, and take down what it finds: (results, whether it crashed)."""
    with log.open("ab") as file:
        file.write(f"\n=== {part.name}: {' '.join(words)}\n".encode())
        file.flush()
        begins = file.tell()
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, start_new_session=True)
        assert child.stdout is not None
        try:
            found, ended = listen(
                child, time.monotonic() + seconds, lambda row: results.add(part.name, row), file
            )
        finally:
            if child.poll() is None or part.ranks:
                stop(child)
    if not ended:
        results.note(part.name, f"{part.name}: stopped after its {seconds:.0f} s", False)
    elif child.returncode or not (found or part.cases):
        said = [
            line.strip()
            for line in log.read_bytes()[begins:].decode(errors="replace").splitlines()
            if line.strip()
        ]
        word = next(
            (line for line in reversed(said) if "Error" in line or "error:" in line),
            said[-1] if said else "no result",
        )
        results.note(part.name, f"{part.name}: exit code {child.returncode}: {word[:110]}", False)
    return found, ended and child.returncode != 0


def listen(child: subprocess.Popen, deadline: float, take: Any, log: Any) -> tuple[int, bool]:
    """(results that a program has printed, whether it has ended by itself); other lines go to the log."""
    found, rest = 0, b""
    with selectors.DefaultSelector() as waits:
        waits.register(child.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not waits.select(left):
                continue
            said = os.read(child.stdout.fileno(), 1 << 16)
            *lines, rest = (rest + said).split(b"\n")
            for line in lines:
                try:
                    row = json.loads(line) if line.startswith(b"{") else None
                except ValueError:
                    row = None
                if row is None:
                    log.write(line + b"\n")
                    log.flush()
                else:
                    take(row)
                    found += 1
            if not said:
                child.wait(max(1.0, deadline - time.monotonic()))
                return found, True
    return found, False


def stop(child: subprocess.Popen) -> None:
    """End a part with everything that it has started; mpirun first hears of it, and ends its ranks."""
    for word in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, word)
            child.wait(2)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def main(work: Work, device: str, folder: Path, since: float) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results, log = Results(folder / "results.jsonl", device), folder / "log.txt"
    has_mpi = bool(shutil.which("mpirun") and find_spec("mpi4py"))
    factor = 1 if device == "cuda" else WITHOUT_GPU
    for part in work.parts:
        left = work.seconds * factor - (time.time() - since)
        if part.ranks and not has_mpi:
            results.note(
                part.name, f"{part.name}: skipped, there is no MPI here (mpirun and mpi4py)", True
            )
        elif part.program == "process_group.py" and not find_spec("torch"):
            results.note(part.name, f"{part.name}: skipped, there is no PyTorch here", True)
        elif left < 5:
            results.note(
                part.name, f"{part.name}: not begun, the seconds of the job are over", False
            )
        else:
            begin = run_cases if part.cases else run
            begin(part, command(part, device), min(part.seconds * factor, left), results, log)
    if lines := shortfalls(results.rows):
        print("\n".join(["", *lines]), flush=True)
    return 1 if results.misses else 0


if __name__ == "__main__":
    name, device, folder, since = sys.argv[1:]
    sys.exit(main(JOBS[name], device, Path(folder), float(since)))
