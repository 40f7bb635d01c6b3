"""The probes of doctor on planted values, and its trials in children that crash or hang."""

import sys

import numpy as np
import pytest

from mpitrain.tools.doctor import probes
from mpitrain.tools.doctor.probes import PROBES, Values, examine
from mpitrain.tools.doctor.trials import FAILED, TRIALS, UNLOCKED, WORKS, in_child, outcome
from mpitrain.transport.threads import run_ranks
from mpitrain.transport.windows import Windows
from tests.fakes import cupy

SEEN = {
    "MPI loaded": (["Open MPI v5", "/a"], ["Open MPI v4", "/b"]),
    "start": (
        {"launcher": "Slurm", "interfaces": ["PMIx"], "mpi": ["Open", "MPI"]},
        {"launcher": "Slurm", "interfaces": ["PMI-2"], "mpi": ["Open", "MPI"]},
    ),
    "threads": ("multiple", "funneled"),
    "GPU binding": (["17:00", "18:00"], ["18:00"]),
    "GPU state": (
        [["GPU 0", 1410, 1980, 0, None, ""], ["GPU 1", None, None, None, 12, ""]],
        [["GPU 0", 1410, 1980, 1, 0, ""]],
    ),
    "imports": ({"seconds": "0.5", "files": "7"}, {"seconds": "30.1", "files": "7"}),
    "windows": ("", "crashed"),
    "first message": ([0.01, 0.001], [4.0, 0.001]),
    "network": (["ib0"], ["eth0"]),
    "clocks": (0.001, 5.0),
    "locks": ({"flock": WORKS}, {"flock": "No locks available"}),
    "mapped files": ({"maps": WORKS}, {FAILED: "crashed (SIGBUS)"}),
}


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_names_the_host_with_a_problem_and_no_other(name):
    probe, (good, bad) = PROBES[name], SEEN[name]
    sound = Values("aabc", [good] * 4)
    assert probe.problems(sound) == [] and probe.line(sound)
    faulty = Values("aabbc", [good, good, bad, bad, good])
    if name == "GPU binding":
        faulty = Values("aabbc", [good, good, good, bad, good])
    (problem,) = probe.problems(faulty)
    assert problem.host == "b" and probe.line(faulty)
    assert probe.question.endswith("?") and probe.remedy.endswith(".")


@pytest.mark.parametrize(
    ("seen", "problems"), [(("ab", "ba"), 0), (("a", "b"), 1), (("a", "a"), 0)]
)
def test_gpus_are_compared_by_address_in_any_order(seen, problems, monkeypatch):
    """Where Slurm or a container binds them, each rank calls its own GPU number 0."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy.devices, "count", len(seen[0]))
    probe = PROBES["GPU binding"]

    def look(transport):
        cupy.see(*seen[transport.rank])
        return probe.look(transport, None)

    assert len(probe.problems(Values("xx", run_ranks(2, look)))) == problems


def test_a_clock_is_compared_with_most_hosts_and_not_with_rank_0():
    seen = Values("abcd", [0.0, 5.0, 5.0, 5.0])
    assert [problem.host for problem in PROBES["clocks"].problems(seen)] == ["a"]


@pytest.mark.parametrize("found", ["abcd", "aabb", "a", "aaa"])
@pytest.mark.slow
def test_all_probes_pass_on_sound_ranks(tmp_path, monkeypatch, found):
    def trial(name, argument, seconds=0.0):
        return {"seconds": "1", "files": "2"} if name == "imports" else TRIALS[name](argument)

    monkeypatch.setattr(probes, "in_child", trial)
    for name in ("MPI loaded", "start", "threads", "GPU binding", "imports"):
        look = SEEN[name][0]
        own = PROBES[name]._replace(look=lambda transport, folder, look=look: look)
        monkeypatch.setitem(PROBES, name, own)
    everyone = run_ranks(len(found), examine, tmp_path, hosts=found)
    assert all(seen == everyone[0] for seen in everyone)
    assert [seen.name for seen in everyone[0]] == [*PROBES]
    assert not [problem for seen in everyone[0] for problem in seen.problems]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["locks", "mapped", "shared"])
@pytest.mark.slow
def test_trials_work_here_in_a_child(tmp_path, name):
    assert set(in_child(name, str(tmp_path)).values()) == {WORKS}
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "code, failed",
    [
        ("import os; os.kill(os.getpid(), 7)", "SIGBUS"),
        ("import time; time.sleep(60)", "no answer"),
        ("raise OSError('No locks')", "No locks"),
        ("print('[1]')", "exit code 0"),
        ("", "exit code 0"),
    ],
)
def test_a_trial_that_crashes_or_hangs_is_a_result(code, failed):
    found = outcome((sys.executable, "-c", code), 1.5 if "sleep" in code else 20.0)
    assert failed in found[FAILED]


@pytest.mark.parametrize("name", ["locks", "mapped"])
@pytest.mark.slow
def test_a_folder_without_files_is_named_with_its_reason(tmp_path, name):
    folder = str(tmp_path / "nowhere")
    found = in_child(name, folder)
    assert set(found) == {FAILED} and f"written in {folder}: No such" in found[FAILED]


def test_locks_that_two_processes_get_are_no_locks(tmp_path, monkeypatch):
    from mpitrain.tools.doctor import trials

    monkeypatch.setattr(trials.fcntl, "flock", lambda descriptor, mode: None)
    assert TRIALS["locks"](str(tmp_path)) == {"flock": UNLOCKED, "fcntl": WORKS}


def test_a_lock_that_another_host_gets_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(
        probes,
        "in_child",
        lambda name, argument: {"across": "two hosts"} if name == "locked" else {"flock": WORKS},
    )
    seen = run_ranks(3, probes.look_locks, tmp_path, hosts="aab")
    problems = PROBES["locks"].problems(Values("aab", seen))
    assert [problem.host for problem in problems] == ["b"]


def test_wrong_bytes_in_a_window_are_reported(monkeypatch, tmp_path):
    views = Windows.views

    def wrong(self, location, members, count, dtype):
        return [np.zeros_like(block) for block in views(self, location, members, count, dtype)]

    monkeypatch.setattr(probes, "in_child", lambda name, folder: {})
    assert run_ranks(2, probes.look_windows, tmp_path) == ["", ""]
    monkeypatch.setattr(Windows, "views", wrong)
    assert all("wrong bytes" in seen for seen in run_ranks(2, probes.look_windows, tmp_path))


def test_interfaces_that_carry_the_bytes_are_named(monkeypatch, tmp_path):
    counters = iter([{"lo": 5, "ib0": 100}, {"lo": 9, "ib0": 100 + probes.SENT}])
    monkeypatch.setattr(probes, "sent_bytes", lambda: next(counters))
    monkeypatch.setattr(probes, "_neighbours", lambda own: (0, 0))
    assert run_ranks(1, probes.look_network, tmp_path) == [["ib0"]]
