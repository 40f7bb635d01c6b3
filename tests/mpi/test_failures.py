"""Ten of the failures of jobs/prove/failures.py: in time, with our line last, and nothing left behind."""

import importlib.util
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.messages import run as says

JOB = Path(__file__).parents[2] / "jobs/prove/failures.py"
CASES = [
    ("segfault", "checkpoint"),
    ("raise", "training"),
    ("exit", "evaluation"),
    ("_exit", "start"),
    ("oom", "start"),
    ("disk", "training"),
    ("deadlock", "training"),
    ("mismatch", "training"),
    ("lose", "training"),
    ("stop", "end"),
]
SILENT = {"stop", "deadlock", "mismatch", "lose"}
"""Kinds that end after run.stall_seconds. The others end at once, so theirs may be long."""
AT_ONCE = 3
"""Jobs at a time: those that stand still use no core."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The module, and the end of every case: {case: Found}."""
    spec = importlib.util.spec_from_file_location("failures", JOB)
    failures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(failures)
    programs = Path(sys.executable).parent

    def end(case):
        folder = tmp_path_factory.mktemp("-".join(case))
        # Between two ranks that start on a busy machine there may be seconds.
        seconds = dict.fromkeys(["run.stall_seconds", "run.grace"], 3 if case[0] in SILENT else 60)
        return failures.job(programs, *case, folder, f"test-{folder}", **seconds)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return failures, dict(zip(CASES, pool.map(end, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_failure_ends_the_job_as_the_table_says(case, ended):
    failures, ends = ended
    found, end = ends[case], failures.expected(*case)
    # Other tests use /dev/shm too, and a busy machine needs time.
    left = [one for one in found.left if not one.startswith("/dev/shm")]
    patient = end._replace(seconds=60)
    assert not failures.verdict(found._replace(left=left), patient), found.lines[-20:]


@pytest.mark.parametrize("kind", ["deadlock", "mismatch", "lose"])
def test_a_silence_is_explained_once_with_its_kind(kind, ended):
    lines = ended[1][kind, "training"].lines
    reports = [line for line in lines if says.STANDS_STILL in line and "launch" not in line]
    assert len(reports) == 1, lines[-20:]
    assert re.search(says.STALLS[kind], reports[0]), reports
