"""Claim: recorder and watchdog take less than 1% of a step, for the default job and for one of about 5 ms a step.

    python jobs/prove/recorder_cost.py [--ranks N]

Each job runs under `mpitrain launch`. Its traces have the number of records of a step, and the time of the fastest step. The
cost of a record is the processor time of one of 10^6. The looks of the watchdog, which come once a second, and the readings
of slow ranks, one for each logged step, are counted and measured in the same way. The exit code is 1 if any job is above 1%.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mpitrain.config import Run
from mpitrain.run.observation import Answering
from mpitrain.run.slow_ranks import SlowRanks
from mpitrain.run.watchdog import LONGEST
from mpitrain.trace.recorder import STEP, Recorder
from mpitrain.trace.timeline import read_timeline, trace_file, within

MOST = 0.01
"""Largest cost as a fraction of a step."""
COUNT, CHUNKS = 10**6, 100
"""Number of records that are measured, and of chunks of them; the fastest chunk counts."""
SMALL = ["model.layers=1", "model.width=16", "model.context=16", "batch.size=8"]
JOBS = {
    "the default job": (["run.steps=6"], None),
    "5 ms a step": (["run.steps=200", *SMALL], 0.005),
}
"""{name: (settings, seconds of a step)}; None: those of the fastest step."""
QUIET = ["run.sample=0", "run.eval_every=-1", "checkpoint.every=0"]


def seconds_of(function: Callable[[], object], count: int) -> float:
    """Return the processor time of one call in the fastest chunk."""
    found = []
    for _ in range(CHUNKS):
        began = time.thread_time()
        for _ in range(count // CHUNKS):
            function()
        found.append((time.thread_time() - began) / (count // CHUNKS))
    return min(found)


def costs(folder: Path, ranks: int) -> tuple[float, float, float]:
    """Return the seconds of a record, of a look of the watchdog, and of a reading of all ranks."""
    (folder / "trace").mkdir()
    recorders = [Recorder() for _ in range(ranks)]
    for rank, recorder in enumerate(recorders):
        recorder.keep(trace_file(folder, rank))
    own = recorders[0]
    name, answering = own.name("a record", range(ranks)), Answering(folder, 0, own)
    slow = SlowRanks(folder, ["host"] * ranks, [range(ranks)])
    record = max(
        seconds_of(lambda: own.end(own.compute(name, 1, 2, 3)), COUNT),
        seconds_of(lambda: own.go_on(own.wait(name)), COUNT),
    )
    look = seconds_of(answering.look, COUNT // 100)
    reading = seconds_of(lambda: slow.record(1), COUNT // 100)
    slow.close()
    return record, look, reading


def job(ranks: int, settings: list[str], folder: Path) -> tuple[float, float]:
    """Run a job; return the records of a step on the busiest rank, and the seconds of its fastest step."""
    words = [word for setting in (*QUIET, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "mpitrain", "launch", "-n", str(ranks), "--", "train"]
    subprocess.run(
        [*command, "--out", str(folder), *words], check=True, timeout=300, capture_output=True
    )
    timeline = read_timeline(folder)
    steps = timeline.steps()
    records = max(len(within(trace, steps)) for trace in timeline.traces) / len(steps)
    spans = [
        trace.records[(trace.records["kind"] == STEP) & (trace.records["end"] > 0)]
        for trace in timeline.traces
    ]
    return records, min(float((span["end"] - span["start"]).min()) for span in spans)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    ranks, worst = parser.parse_args().ranks, 0.0
    with tempfile.TemporaryDirectory() as folder:
        record, look, reading = costs(Path(folder), ranks)
        print(
            f"processor time: a record {1e6 * record:.2f} us, a look {1e6 * look:.1f} us, "
            f"a reading of {ranks} rank(s) {1e6 * reading:.1f} us"
        )
        for number, (name, (settings, given)) in enumerate(JOBS.items()):
            records, step_s = job(ranks, settings, Path(folder) / f"run-{number}")
            step_s = given or step_s
            looks = step_s / LONGEST
            cost = records * record + looks * look + reading / Run().log_every
            worst = max(worst, cost / step_s)
            print(
                f"{name}: {1e3 * step_s:.2f} ms a step, {records:.1f} records, {looks:.4f} looks, "
                f"{1 / Run().log_every:.1f} readings: {1e6 * cost:.1f} us, {cost / step_s:.2%} of a step",
                flush=True,
            )
    print(f"the largest cost is {worst:.2%} of a step; at most {MOST:.0%} is allowed")
    return int(not worst <= MOST)


if __name__ == "__main__":
    sys.exit(main())
