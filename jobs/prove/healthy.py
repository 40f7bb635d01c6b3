"""Claim: 50 healthy but unusual runs end by themselves, and the watchdog blames no rank of them.

    python jobs/prove/healthy.py [--runs N] [--first K]

The kinds of ODD come in turns, each in the next of LAYOUTS. Every run has something that takes longer than run.stall_seconds
in all, or nearly as long at once: evaluations, writes to a slow disk, computations, pauses by SIGSTOP, or 40 busy processes
that share the cores. All of it takes about ten minutes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STALL = 3.0
SMALL = {
    "model.layers": 2,
    "model.width": 16,
    "model.context": 16,
    "batch.size": 8,
    "batch.micro_batches": 2,
    "run.steps": 8,
    "run.log_every": 1,
    "run.sample": 0,
    "run.stall_seconds": STALL,
    "run.eval_every": -1,
    "checkpoint.every": 0,
}
LAUNCH = [sys.executable, "-m", "mpitrain", "launch", "-n"]
LAYOUTS: list[tuple[int, dict[str, object]]] = [
    (2, {}),
    (1, {}),
    (4, {"layout.pp": 2}),
    (3, {"replication.mode": "server", "replication.update": "async"}),
    (2, {"layout.tp": 2}),
    (2, {"replication.zero": 1}),
    (3, {"replication.mode": "local"}),
]
"""Ranks and settings."""


class Odd(NamedTuple):
    """A kind of unusual run.

    settings  of the run
    patch     code that each rank executes first
    disturb   called with the process numbers of the ranks once the first step is printed
    """

    settings: dict[str, object]
    patch: str = ""
    disturb: Callable[[list[int]], None] = lambda ranks: None


def pause(ranks: list[int], seconds: float = 5.0) -> None:
    """Stop processes, and let them go on."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        if number == signal.SIGSTOP:
            time.sleep(seconds)


SLOW_ASKED = (
    "import time; from mpitrain.cli.terminal.stop_requests import Stop\n"
    "Stop.asked = lambda self: time.sleep(0.4) or self.requested\n"
)
SLOW_DISK = (
    "import os, time; from mpitrain.formats.safetensors_files import Writing\n"
    "sync, write = os.fsync, Writing.write\n"
    "def slow_sync(file): time.sleep(0.3); sync(file)\n"
    "def slow_write(*rest): time.sleep(0.15); write(*rest)\n"
    "os.fsync, Writing.write = slow_sync, slow_write\n"
)
ODD = {
    "long evaluation": Odd({"run.eval_every": 4, "run.eval_rows": 64}, SLOW_ASKED),
    "slow disk": Odd({"checkpoint.every": 4}, SLOW_DISK),
    "long computation": Odd({"run.delay": f"0:{600 * STALL:.0f}", "run.steps": 4}),
    "a rank paused": Odd(
        {"run.steps": 60, "run.stall_seconds": 9.0}, disturb=lambda ranks: pause(ranks[-1:])
    ),
    "all ranks paused": Odd({"run.steps": 60}, disturb=pause),
    "a load of 40": Odd({"run.steps": 20, "run.stall_seconds": 8.0}),
}
"""The kinds of unusual runs. In the last one 40 processes compute meanwhile."""


def ranks_of(folder: Path) -> list[int]:
    """Return the process numbers of the ranks of a run, by its traces."""
    from mpitrain.trace.timeline import read_timeline

    return [trace.facts["process"] for trace in read_timeline(folder).traces]


def blamed(kind: str, layout: tuple[int, dict[str, object]], folder: Path) -> str:
    """Run a job; return the reason if a rank was blamed or the run did not end, else ""."""
    odd, (ranks, more) = ODD[kind], layout
    words = ["train", "--out", str(folder)]
    for key, value in {**SMALL, **more, **odd.settings}.items():
        words += ["--set", f"{key}={str(value).lower() if value is True else value}"]
    code = f"{odd.patch}from mpitrain.cli import main; main({words!r})"
    count = 40 if kind == "a load of 40" else 0
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        job = subprocess.Popen(
            [*LAUNCH, str(ranks), "--", "python", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, is_disturbed = list[str](), False
        for line in job.stdout or ():
            said.append(line)
            if line.startswith("step") and "loss" in line and not is_disturbed:
                is_disturbed = True
                odd.disturb(ranks_of(folder))
        job.wait(timeout=300)
    finally:
        for one in load:
            one.kill()
            one.wait()
    text = "".join(said)
    if job.returncode or "stands still" in text or "no progress" in text:
        return f"exit code {job.returncode}:\n{text[-3000:]}"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return "" if last.get("event") == "end" else f"the last record is {last}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=50, metavar="N")
    parser.add_argument("--first", type=int, default=1, metavar="K", help="begin with run K")
    options = parser.parse_args()
    runs, wrong = options.runs, 0
    for number in range(options.first - 1, runs):
        kind, layout = list(ODD)[number % len(ODD)], LAYOUTS[number % len(LAYOUTS)]
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            reason = blamed(kind, layout, Path(folder) / "run")
        wrong += bool(reason)
        print(
            f"{number + 1:>3} of {runs}: {kind} on {layout[0]} rank(s), {layout[1] or 'all-reduce'}: "
            f"{reason or 'no blame'} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    print(f"{wrong} of {runs} healthy runs were blamed")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
