"""The ranks and hosts that a batch system grants, from its environment variables."""

import pytest

from mpitrain.cli.launch.allocation import Allocation, allocation, ranks_of
from mpitrain.errors import ConfigError
from tests.processes import mpitrain


@pytest.mark.parametrize(
    "environ, wanted",
    [
        ({}, None),
        (
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "6", "SLURM_JOB_NUM_NODES": "2"},
            ("Slurm", 6, 2),
        ),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "3"}, ("Slurm", 3, 3)),
        ({"LSB_MCPU_HOSTS": "a 4 b 3"}, ("LSF", 7, 2)),
        ({"PE_HOSTFILE": "file", "NSLOTS": "5", "NHOSTS": "2"}, ("Grid Engine", 5, 2)),
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
