"""Tests that take `mpi_ranks` run on that many ranks of mpirun: one start runs all that this session wants on them.

A rank that fails ends its start, and what comes after the failed test gets another: no failure hides another.
"""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mpitrain.machine import process
from mpitrain.transport.mpi import connect
from tests.processes import SECONDS, begun

FOLDER = os.environ.get("MPITRAIN_TEST_OUTCOMES")
"""Where each rank of a start writes down what came of each test; None in the session that starts the ranks."""
RANK = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
OUTCOMES = pytest.StashKey[dict[str, tuple[str, str]]]()


@pytest.fixture(scope="session", autouse=True)
def transport():
    """The one that tests of a start share; None in the session that starts the ranks, where no such test is called."""
    if not FOLDER:
        return None
    process.choose_gpu("cuda")  # a CUDA-aware MPI looks for the GPU in use when it starts
    return connect()


@pytest.fixture(scope="session", autouse=True)
def alone(tmp_path_factory):
    """Fail on all workers of pytest-xdist but one: two starts at a time are more ranks than the cores bear."""
    if FOLDER or "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with (tmp_path_factory.getbasetemp().parent / "mpi.lock").open(
        "w"
    ) as lock:  # a folder that the workers share
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "Two workers run tests of mpi/ at a time: they do not use the scheduler of tests/conftest.py."
            pytest.fail(why, pytrace=False)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """In place of a call: report what came of the test on its ranks."""
    if FOLDER or not _ranks(pyfuncitem):
        return None
    ranks, name = _ranks(pyfuncitem), pyfuncitem.nodeid
    known = pyfuncitem.config.stash.setdefault(OUTCOMES, {})
    if name not in known:
        wanted = [item.nodeid for item in pyfuncitem.session.items if _ranks(item) == ranks]
        known |= _start(ranks, wanted[wanted.index(name) :])
    outcome, text = known[name]
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)
    return True


def _ranks(item):
    """The number of ranks of mpirun that a test wants, or None."""
    return item.callspec.params.get("mpi_ranks") if hasattr(item, "callspec") else None


def _start(ranks, names):
    """What came of the tests of one start, by name: of all, or of those up to the first that failed on a rank."""
    options = [
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--no-header",
        f"--timeout={SECONDS}",
        "--timeout-method=thread",
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            said = begun(
                lambda: subprocess.run(
                    ["mpirun", "-n", str(ranks), sys.executable, "-m", "pytest", *options, *names],
                    env={**os.environ, "MPITRAIN_TEST_OUTCOMES": folder},
                    cwd=Path(__file__).parents[2],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=2 * SECONDS,
                )
            ).stdout
        except subprocess.TimeoutExpired as expired:
            said = expired.stdout or b""
        lines = [
            json.loads(line)
            for path in Path(folder).iterdir()
            for line in path.read_text().splitlines()
        ]
    found = {}
    for name in names:
        here = [(outcome, text) for where, outcome, text in lines if where == name]
        failures, skips = (
            [text for outcome, text in here if outcome == kind] for kind in ("failed", "skipped")
        )
        if len(here) < ranks and not failures:
            failures = [
                f"only {len(here)} of {ranks} ranks ended the test:\n{said.decode(errors='replace')[-4000:]}"
            ]
        if failures:
            found[name] = "failed", "\n".join(failures)
            break
        found[name] = ("skipped", skips[0]) if skips else ("passed", "")
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """On a rank: write the outcome down, and after a failure leave, which ends the ranks that would wait for this one."""
    report = yield
    if FOLDER and (report.when == "call" or not report.passed):
        text = report.longrepr[2] if report.skipped else f"rank {RANK}: {report.longreprtext}"
        with (Path(FOLDER) / f"rank-{RANK}").open("a") as file:
            file.write(json.dumps([item.nodeid, report.outcome, text]) + "\n")
        if report.failed:
            time.sleep(1)  # others may have failed, too, and are about to say so
            os._exit(1)
    return report


@pytest.fixture(autouse=True, scope="module")
def own_choice_of_yielding(request):
    """Programs of PyTorch choose whether MPI yields, unless the user has: see `poll_without_yielding`."""
    with pytest.MonkeyPatch.context() as patch:
        if "test_torch" in request.module.__name__:
            patch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
        yield
