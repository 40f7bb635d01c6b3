"""A PyTorch program of the user with a checkpoint of its own: jobs/slurm/own_program.py, slowed down by a file."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PROGRAM = (Path(__file__).parents[2] / "jobs/slurm/own_program.py").read_text()
STEP = "    optimizer.step()\n"
SLOW = f"{STEP}    import time; time.sleep(float(open('pause').read()))\n"
LIMITS = 5


def submitted(cluster, folder, pause, program, *options):
    """The number of a job that runs the program in a folder of its own, as `mpitrain slurm` wrote its script."""
    folder.mkdir()
    (folder / "pause").write_text(pause)
    (folder / "own.py").write_text(program)
    cluster.folder = folder
    words = ["--nodes", "2", "--ranks-per-node", "2", *options, "--", "python", "own.py"]
    return cluster.submit(cluster.script(*words))


def restarts(cluster, job):
    return int(cluster.records(job)[0]["Restarts"])


def runs_on(cluster, job):
    """The nodes of the job, once it has made steps after its last start."""
    cluster.until(lambda: cluster.records(job)[0]["JobState"] == "RUNNING", "running again")
    return cluster.records(job)[0]["NodeList"]


def test_a_program_passes_five_time_limits_and_a_lost_node_as_if_there_were_none(cluster, tmp_path):
    program = PROGRAM.replace(STEP, SLOW).replace("20_000", "2_000")
    assert program.count("sleep") == 1
    job = submitted(cluster, tmp_path / "cut", "0.2", program, "--time", "1", "--margin", "30")
    for number in range(1, LIMITS + 1):
        cluster.until(lambda n=number: restarts(cluster, job) >= n, f"time limit {number}")
    runs_on(cluster, job)
    cluster.until(lambda: cluster.ranks(job), "the ranks")
    lost = cluster.records(job)[0]["BatchHost"]
    os.system(f"scontrol update nodename={lost} state=down reason=lost")
    try:
        cluster.until(lambda: restarts(cluster, job) > LIMITS, "the lost node")
        (tmp_path / "cut/pause").write_text("0")
        # On a crowded machine a leg of a minute passes before PyTorch is imported, and makes one step.
        os.system(f"scontrol update jobid={job} timelimit=9")
        (ended,) = cluster.ended(job)
        assert ended[:2] == ("COMPLETED", "0") and ended[2] > LIMITS
    finally:
        os.system(f"scontrol update nodename={lost} state=resume")
    whole = submitted(cluster, tmp_path / "whole", "0", program, "--time", "9")
    assert cluster.ended(whole) == [("COMPLETED", "0", 0)]
    cut, one = (torch.load(tmp_path / name / "own_program.pt") for name in ("cut", "whole"))
    assert cut[2] == one[2] == 2_000 and not list(tmp_path.glob("*/*.leg"))
    for part in (0, 1):
        a, b = (torch.utils._pytree.tree_leaves(state[part]) for state in (cut, one))
        same = [
            torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in zip(a, b, strict=True)
        ]
        assert all(same) and len(same) > 3


@pytest.mark.parametrize(
    "program, ended, said",
    [
        ("import sys; sys.exit(85)", ("FAILED", "1", 1), "is not queued again: twice in a row"),
        ("import sys; sys.exit(3)", ("FAILED", "3", 0), ""),
        ("import time; time.sleep(600)", ("TIMEOUT", "143", 0), "did not exit with 85"),
    ],
    ids=["exits with 85 at once", "fails", "never asks"],
)
def test_a_program_that_cannot_go_on_ends_with_its_reason(program, ended, said, cluster, tmp_path):
    options = ("--time", "1", "--margin", "30")
    job = submitted(cluster, tmp_path / "own", "", program, *options)
    assert cluster.ended(job) == [ended], cluster.logs()
    assert said in "".join(cluster.logs().values())
