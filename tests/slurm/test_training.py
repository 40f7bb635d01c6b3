"""Training jobs on Slurm: time limit, requeue, cancellation, a killed rank, GPUs."""

import os
import signal
import sys

import pytest

from mpitrain.cli.launch.command import library
from tests.processes import sets
from tests.slurm.conftest import JOB

TWO = ("--nodes", "2", "--ranks-per-node", "2")


def events(cluster, run_dir):
    return [one["event"] for one in cluster.metrics(run_dir) if "event" in one]


@pytest.mark.parametrize("requeue", ("--requeue", "--no-requeue", "JobRequeue=0"))
def test_a_run_stops_before_its_limit_and_goes_on_to_the_same_curve(cluster, requeue):
    """The run reads its end from squeue, without a signal. Where a requeue is forbidden, a second
    job continues it.
    """
    job, is_site = [*JOB, *sets(run__steps=320)], requeue == "JobRequeue=0"
    drop = ["--signal", "--requeue"] if is_site else ["--signal"]
    text = cluster.script(*TWO, "--time", "1", "--", "train", *job, drop=drop)
    slow = text.replace('"$@" & P', '--set run.delay=1:200 "$@" & P')
    if is_site:
        with cluster.configured(requeue):
            first = cluster.submit(slow)
            assert cluster.records(first)[0]["Requeue"] == "0"
    else:
        first = cluster.submit(slow, requeue)
    run_dir = f"runs/slurm-{first}"
    state = cluster.ended(first)
    if requeue == "--requeue":
        assert state[0][:2] == ("COMPLETED", "0") and state[0][2] >= 1
    else:
        assert state[0][:2] == ("FAILED", "85")
        cluster.until(lambda: "end" in events(cluster, run_dir), "the second job")
    assert events(cluster, run_dir).count("resume") >= 1
    assert events(cluster, run_dir)[-1] == "end"
    whole = cluster.submit(cluster.script(*TWO, "--time", "9", "--", "train", *job))
    assert cluster.ended(whole)[0][:2] == ("COMPLETED", "0")
    losses = cluster.losses(run_dir)
    assert losses == cluster.losses(f"runs/slurm-{whole}") and len(losses) == 320


@pytest.mark.parametrize("by", ([], ["--mpirun"]), ids=("srun", "mpirun"))
def test_a_warning_of_slurm_stops_requeues_and_resumes(cluster, by):
    job = [*JOB, *sets(run__steps=60, run__delay="1:100")]
    number = cluster.submit(cluster.script(*by, *TWO, "--time", "9", "--", "train", *job))
    cluster.trains(f"runs/slurm-{number}", 5)
    os.system(f"scancel --batch --signal=USR1 {number}")
    assert cluster.ended(number) == [("COMPLETED", "0", 1)]
    assert [e for e in events(cluster, f"runs/slurm-{number}") if e != "checkpoint"] == [
        "start",
        "resume",
        "end",
    ]


@pytest.mark.parametrize("by, saves", (([], True), (["--mpirun"], False)), ids=("srun", "mpirun"))
def test_a_cancelled_job_ends_and_a_new_one_goes_on(cluster, by, saves):
    """A run under mpirun resumes from its last periodic checkpoint."""
    job = [*JOB, *sets(run__steps=60, run__delay="1:100", checkpoint__every=4)]
    text = cluster.script(*by, *TWO, "--time", "9", "--", "train", *job)
    first = cluster.submit(text)
    run_dir = f"runs/slurm-{first}"
    cluster.trains(run_dir, 10)
    os.system(f"scancel {first}")
    assert cluster.ended(first)[0][0] == "CANCELLED"
    if saves:
        assert events(cluster, run_dir)[-1] == "stopped"
    text = text.replace("run.delay=1:100", "run.delay=1:0")
    again = cluster.submit(text.replace('"$@" & P', f"--out {run_dir} & P"))
    assert cluster.ended(again)[0][0] == "COMPLETED"
    assert {"resume", "end"} <= {*events(cluster, run_dir)}
    assert [*cluster.losses(run_dir)] == [*range(1, 61)]


@pytest.mark.parametrize("by", ([], ["--mpirun"]), ids=("srun", "mpirun"))
def test_a_killed_rank_fails_the_job(cluster, by):
    job = [*JOB, *sets(run__steps=600, run__delay="1:100")]
    number = cluster.submit(cluster.script(*by, *TWO, "--time", "9", "--", "train", *job))
    cluster.trains(f"runs/slurm-{number}", 3)
    os.kill(max(cluster.ranks(number)), signal.SIGKILL)
    state, code, restarts = cluster.ended(number)[0]
    assert (state, restarts) == ("FAILED", 0) and code not in ("0", "85")


def test_a_container_trains_on_two_hosts(cluster):
    """With an apptainer that starts the command as it is, for the MPI of this environment."""
    (cluster.folder / "apptainer").write_text('#!/bin/bash\nshift 4; exec "$@"\n')
    (cluster.folder / "apptainer").chmod(0o755)
    paths = (str(cluster.folder), f"{sys.prefix}/bin", os.environ["PATH"])
    cluster.environment |= {"PATH": os.pathsep.join(paths), "UCX_TLS": "tcp,self"}
    words = ["--time", "9", "--env", "apptainer:image", "--", "train", *JOB, *sets(run__steps=5)]
    text = cluster.script(*TWO, *words)
    if library().family == "Open MPI":
        text = text.replace("--mpi=pmi2", "--mpi=pmix")
    number = cluster.submit(text)
    assert cluster.ended(number) == [("COMPLETED", "0", 0)], cluster.logs()
    assert [*cluster.losses(f"runs/slurm-{number}")] == [1, 2, 3, 4, 5]


def test_ranks_see_all_gpus_of_their_host(cluster):
    job = [*JOB, *sets(run__steps=400, run__delay="1:50")]
    words = ["--nodes", "2", "--gpus-per-node", "2", "--time", "9"]
    text = cluster.script(*words, "--", "train", "--device", "cuda-sim", *job)
    number = cluster.submit(text)
    cluster.trains(f"runs/slurm-{number}", 2)
    found = sorted(
        (one["SLURM_PROCID"], one["SLURM_LOCALID"], one["CUDA_VISIBLE_DEVICES"])
        for one in cluster.ranks(number).values()
    )
    assert found == [("0", "0", "0,1"), ("1", "1", "0,1"), ("2", "0", "0,1"), ("3", "1", "0,1")]
    os.system(f"scancel {number}")
    assert cluster.ended(number)[0][0] == "CANCELLED"


def test_follow_prints_the_log_and_returns_the_code_of_the_job(cluster):
    from tests.processes import mpitrain

    words = ["slurm", *TWO, "--time", "5", "--follow", "--", "train", *JOB]
    done = mpitrain(*words, *sets(run__steps=5), cwd=cluster.folder, env=cluster.environment)
    assert done.returncode == 0 and "step 5/5" in done.stdout and "bitwise equal" in done.stdout
    done = mpitrain(
        *words, *sets(data__source="text:gone"), cwd=cluster.folder, env=cluster.environment
    )
    assert done.returncode == 2 and "gone" in done.stdout and "FAILED" in done.stderr


def test_launch_in_a_login_shell_takes_the_ranks_of_salloc(cluster):
    from tests.processes import PROGRAM, run

    words = ["salloc", "--nodes=2", "--ntasks-per-node=2", *PROGRAM, "launch", "--", "train"]
    done = run([*words, *JOB, *sets(run__steps=2)], cwd=cluster.folder, env=cluster.environment)
    assert done.returncode == 0 and "4 rank(s)" in done.stdout, done.stderr
