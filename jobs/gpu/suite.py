"""Part of the GPU job: the tests marked gpu, in parallel and to the last, whatever fails.

python3 jobs/gpu/suite.py DEVICE
"""

import re
import subprocess
import sys
from collections import Counter

from table import emit

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


if __name__ == "__main__":
    main(sys.argv[1])
