"""Ranks that are threads stay on one core: one at a time holds Python's lock, and a lock between cores costs twice the time.

Ranks that do run at the same time are in `mpi/`, under the same laws.
"""

import os

import pytest

from mpitrain.run import utilisation
from mpitrain.run.count import step
from tests.runs import TEXT, TINY


@pytest.fixture(autouse=True)
def one_core():
    """For this thread and those it starts; workers of pytest-xdist, which have one parent, take different cores."""
    allowed = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    os.sched_setaffinity(0, {sorted(allowed)[(os.getppid() + worker) % len(allowed)]})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.fixture(autouse=True)
def uncounted(request, monkeypatch):
    """No job counts its step or measures the rate of products before it begins, which takes long.

    Those of tests that are marked `counted` do, on kernels or with a limit of memory.
    """
    if not request.node.get_closest_marker("counted"):
        monkeypatch.setattr(step, "check_activations", lambda job, *_: job.counts)
        monkeypatch.setattr(utilisation, "gemm_peak", lambda *_: None)


@pytest.fixture
def book(tmp_path):
    """Settings of a run in tmp_path / "run" on a small text: 20 held-out rows."""
    (tmp_path / "book").write_text("".join(TEXT))
    return [*TINY, f"data.source=text:{tmp_path / 'book'}", f"run.out={tmp_path / 'run'}"]
