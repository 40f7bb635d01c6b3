"""The ranks and hosts that a batch system grants, from its environment variables."""

import os

import pytest

from mpitrain.cli.launch.hosts import Allocation, allocation, ranks_of, slots, slurm_cores
from mpitrain.errors import ConfigError
from tests.processes import mpitrain

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "environ, wanted",
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "6", "SLURM_JOB_NUM_NODES": "2"}, ("Slurm", 6, 2)),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "3"}, ("Slurm", 3, 3)),
        ({"LSB_MCPU_HOSTS": "a 4 b 3"}, ("LSF", 7, 2)),
        ({"LSB_MCPU_HOSTS": "a 4 a 2 b 2"}, ("LSF", 8, 2)),
    ],
)
def test_a_batch_system_grants_ranks_and_hosts(environ, wanted):
    assert allocation(environ) == wanted


def test_pbs_lists_a_host_for_each_rank(tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\n")
    assert allocation({"PBS_NODEFILE": str(tmp_path / "nodes")}) == ("PBS", 3, 2)
    with pytest.raises(ConfigError, match="gone"):
        allocation({"PBS_NODEFILE": str(tmp_path / "gone")})


def test_outside_a_job_launch_needs_a_number_of_ranks():
    with pytest.raises(ConfigError, match="-n"):
        ranks_of(None)
    with pytest.raises(ConfigError, match="-n"):
        ranks_of(None, 4)
    assert ranks_of(Allocation("PBS", 8, 2)) == 8
    assert ranks_of(Allocation("PBS", 8, 2), 3) == 6
    done = mpitrain("launch", "--", "train")
    assert (done.returncode, done.stdout) == (2, "") and "-n" in done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "x"},
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "-2"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "²"},
        {"LSB_MCPU_HOSTS": "a 4 b"},
        {"LSB_MCPU_HOSTS": "a four"},
    ],
)
def test_a_variable_without_a_number_is_one_error(environ):
    with pytest.raises(ConfigError):
        allocation(environ)


def test_a_heterogeneous_slurm_job_is_refused_in_one_error():
    environ = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}
    done = mpitrain("launch", "--", "train", env={**os.environ, **environ, "SLURM_HET_SIZE": "2"})
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert "this job has 2 (#SBATCH hetjob)" in done.stderr and "--het-group=0-1" in done.stderr
    assert done.stderr.count("ConfigError") == 1


def test_cores_of_a_rank_are_a_number():
    assert slurm_cores(2, {"SLURM_CPUS_PER_TASK": "3"}) == 3
    with pytest.raises(ConfigError, match="SLURM_CPUS_PER_TASK"):
        slurm_cores(2, {"SLURM_CPUS_PER_TASK": "many"})


def test_launch_in_a_damaged_job_says_which_variable():
    done = mpitrain(
        "launch", "--", "train", env={**os.environ, "SLURM_JOB_ID": "7", "SLURM_NTASKS": "x"}
    )
    assert done.returncode == 2 and "SLURM_NTASKS" in done.stderr
    assert "Traceback" not in done.stderr


def test_batch_systems_name_their_hosts_with_the_slots_of_each(tmp_path):
    (tmp_path / "nodes").write_text("a\na\n\nb\n")
    assert slots({}) == {}
    assert slots({"PBS_NODEFILE": str(tmp_path / "nodes")}) == {"a": 2, "b": 1}
    assert slots({"LSB_MCPU_HOSTS": "a 4 a 2 b 2"}) == {"a": 6, "b": 2}
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2],m"}
    assert slots(slurm) == {"n1": 0, "n2": 0, "m": 0}
    assert slots({**slurm, "SLURM_TASKS_PER_NODE": "4(x2),3"}) == {"n1": 4, "n2": 4, "m": 3}
    with pytest.raises(ConfigError, match="--hosts"):
        slots({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": ""})
