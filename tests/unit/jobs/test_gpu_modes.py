"""jobs/gpu-table.sh modes on the fake GPU: whatever way messages take, losses are the CPU's, and bytes are counted."""

import json
import sys
from pathlib import Path

import pytest

from mpitrain.machine import cuda
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu
from tests.fakes.pointers import PointerThreads

pytestmark = pytest.mark.compile


@pytest.fixture
def modes(monkeypatch):
    """The program of the job, with few small steps on the fake GPU."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "jobs/gpu"))
    for name in ("modes", "table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import modes

    monkeypatch.setattr(modes, "STEPS", 3)
    monkeypatch.setitem(modes.SMALL, "cuda", modes.SMALL["cuda-sim"])
    gpu.play(monkeypatch)
    monkeypatch.setattr(cuda, "_allocation_start", cupy.allocation_start)
    return modes


def row(modes, capsys, way, name):
    """What the job says of a mode."""
    ((_, settings, mode),) = [each for each in modes.modes(way) if each[0] == name]
    run_ranks(
        2, lambda threads: modes.measure(PointerThreads(threads), "cuda", way, name, settings, mode)
    )
    assert cupy.faults == []
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("pointers", "servers, async"),
        ("pointers", "pp 2, async"),
        ("pointers", "cp 2, ring"),
        ("staged", "all-reduce, star"),
        ("ipc", "ZeRO 3"),
    ],
)
def test_a_mode_on_a_gpu_has_the_losses_of_the_cpu_and_its_bytes_are_counted(
    way, name, modes, capsys
):
    found = row(modes, capsys, way, name)
    assert found["ok"], found["what"]
    assert any(found["by_pointer"]) == (way == "pointers")


def test_a_ring_sends_gradients_by_pointers(modes, capsys):
    """Of its bytes, all but the numbers of an update are gradients."""
    found = row(modes, capsys, "pointers", "all-reduce, ring")
    assert found["ok"]
    for sent, by_pointer in zip(found["nbytes"], found["by_pointer"], strict=True):
        assert 0.99 * sent < by_pointer <= sent


def test_a_wrong_loss_fails(modes, capsys, monkeypatch):
    right = modes.truth
    monkeypatch.setattr(
        modes, "truth", lambda *of: [[1e-3 + x for x in each] for each in right(*of)]
    )
    assert not row(modes, capsys, "staged", "master")["ok"]
