"""Part of both GPU jobs: tests on the device, to the last, whatever fails.

python3 jobs/gpu/suite.py DEVICE              the tests marked gpu, in parallel
python3 jobs/gpu/suite.py DEVICE sanitizer    NVIDIA's sanitizer on the cases of the kernels; a refusal by the machine is a result

Each tool of the sanitizer runs once over all groups of cases, and the tools run at the same time: each start takes 10 to 15 s.
"""

import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

from table import emit, micro

from mpitrain.machine.process import processors

PROCESSES = 16
OUTCOME = "(PASSED|FAILED|ERROR|SKIPPED)"
ENDED = re.compile(rf"(?:\[gw\d+\] +\[ *\d+%\] +)?{OUTCOME} +(\S+)|(\S+::\S.*?) {OUTCOME}\b")


def main(kind: str) -> None:
    tests = ["tests/gpu"] if kind == "cuda" else ["tests/gpu/test_kernels.py"]  # skipped there
    workers = ["-n", str(min(PROCESSES, processors()))] if kind == "cuda" else []
    words = [
        sys.executable,
        *["-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short"],
    ]
    counts: Counter[str] = Counter()
    with subprocess.Popen(
        [*words, *workers, *tests], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            if line.startswith(("=", "FAILED", "ERROR")) or not (found := ENDED.match(line)):
                continue  # a summary repeats what failed
            outcome, test = (found[1], found[2]) if found[1] else (found[4], found[3])
            counts[outcome] += 1
            if outcome in ("FAILED", "ERROR"):
                emit(f"test failed: {test.rpartition('::')[2][:100]}", ok=False, test=test)
    said = (
        ", ".join(f"{number} {outcome.lower()}" for outcome, number in sorted(counts.items()))
        or "none ran"
    )
    has_run = counts["PASSED"] > 0 or (kind != "cuda" and bool(counts))
    emit(f"tests marked gpu: {said}", ok=has_run and child.returncode == 0, **counts)


TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
GROUPS = (
    "linears",
    "norms",
    "steps",
    "totals",
    "conversions",
    "losses",
    "embeddings",
    "tensor_attentions",
    "tensor",
)
TEST = "tests/gpu/test_kernels.py::test_a_kernel_computes_on_the_gpu_what_the_reference_says"
SECONDS = 185
FOUND = 9  # the exit code of the sanitizer for errors


class Finding(NamedTuple):
    """A line of the table."""

    what: str
    ok: bool = True


def command(tool: str) -> list[str]:
    start = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    pytest = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    return [*start, *pytest, *(f"{TEST}[{group}]" for group in GROUPS)]


def run(tool: str) -> tuple[str, int | None, float]:
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command(tool),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        said, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        said, code = (late.stdout or b"").decode(errors="replace"), None
    return said, code, time.perf_counter() - start


def findings(tool: str, said: str, code: int | None) -> Iterator[Finding]:
    """A line for the tool, and one for each group that failed under it."""
    for line in said.splitlines():
        if "not supported" in line or "Unable to" in line:
            yield Finding(f"{tool}: refused: {line.strip('= ')[:100]}")
            return
    ended = dict(re.findall(r"\[(\w+)\] (PASSED|FAILED|ERROR)", said))
    errors = len(re.findall("=========     at ", said))
    for group, outcome in ended.items():
        if outcome != "PASSED":
            yield Finding(f"{tool}: the cases {group} failed", False)
    passed = sum(outcome == "PASSED" for outcome in ended.values())
    words = f"{tool}: {passed} of {len(GROUPS)} groups of cases ran"
    if code is None:
        yield Finding(f"{words} within {SECONDS} s, {errors} errors", not errors)
    else:
        yield Finding(f"{words}, {errors} errors", code == 0 and passed == len(GROUPS))


def sanitize(kind: str) -> None:
    if kind != "cuda" or not shutil.which("compute-sanitizer"):
        emit(
            f"compute-sanitizer: skipped, {'it is not installed' if kind == 'cuda' else 'there is no GPU here'}"
        )
        return
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        jobs = {pool.submit(run, tool): tool for tool in TOOLS}
        for job in as_completed(jobs):
            said, code, seconds = job.result()
            print(said, flush=True)
            for found in findings(jobs[job], said, code):
                emit(found.what, micro(seconds), ok=found.ok)


if __name__ == "__main__":
    (sanitize if sys.argv[2:] == ["sanitizer"] else main)(sys.argv[1])
