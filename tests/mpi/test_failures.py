"""Ten of the failures of jobs/prove/failures.py: in time, with our line last, and nothing left behind."""

import importlib.util
import re
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
    ("mismatch", "training"),
    ("lose", "training"),
    ("stop", "end"),
]
STAGES = "mismatch", "training of two stages"
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
        stages = {"layout.pp": 2, "batch.micro_batches": 2} if case == STAGES else {}
        phase = case[1].split()[0]
        return failures.job(programs, case[0], phase, folder, f"test-{folder}", **seconds, **stages)

    cases = [*CASES, STAGES]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return failures, dict(zip(cases, pool.map(end, cases), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_failure_ends_the_job_as_the_table_says(case, ended):
    failures, ends = ended
    found, end = ends[case], failures.expected(*case)
    # Other tests use /dev/shm too, and a busy machine needs time.
    left = [one for one in found.left if not one.startswith("/dev/shm")]
    patient = end._replace(seconds=60)
    assert not failures.verdict(found._replace(left=left), patient), found.lines[-20:]
    has_traceback = any(line.startswith("Traceback") for line in found.lines)
    assert has_traceback == (case[0] == "raise"), found.lines


@pytest.mark.parametrize(
    "case",
    [STAGES, *((kind, "training") for kind in ("deadlock", "mismatch", "lose"))],
    ids="-".join,
)
def test_a_silence_is_explained_once_with_its_kind(case, ended):
    lines = ended[1][case].lines
    reports = [line for line in lines if ": the run stands" in line and "launch" not in line]
    assert len(reports) == 1, lines[-20:]
    assert re.search(
        {
            "deadlock": "in a circle: rank (0|1) on .* of rank (1|0) for \\d+ s; rank (1|0) on .* of rank (0|1) for ",
            "mismatch": "different calls: rank (1|0) in .*; rank (0|1) in ",
            (
                "mismatch",
                "training of two stages",
            ): "different calls: rank 1 in a barrier, which rank 0 has not",
            "lose": "A message is missing: rank 0 on \\S+ has waited for .* of rank 1 for .*Rank 1 on \\S+ has sent it",
        }[case if case == STAGES else case[0]],
        reports[0],
    ), reports
