"""Eight of the failures of jobs/prove/failures.py: in time, with our line last, and nothing left behind."""

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "jobs/prove/failures.py"
CASES = [
    ("segfault", "checkpoint"),
    ("raise", "training"),
    ("exit", "evaluation"),
    ("_exit", "start"),
    ("oom", "start"),
    ("disk", "training"),
    ("deadlock", "training"),
    ("stop", "end"),
]
AT_ONCE = 3
"""Jobs at a time: those that stand still use no core."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The module, and the end of every case: {case: Found}."""
    spec = importlib.util.spec_from_file_location("failures", JOB)
    failures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(failures)
    failures.SETTINGS |= {"run.stall_seconds": 2.0, "run.grace": 2.0}
    programs = Path(sys.executable).parent

    def end(case):
        folder = tmp_path_factory.mktemp("-".join(case))
        return failures.job(programs, *case, folder, f"test-{folder}")

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
