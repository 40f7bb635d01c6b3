"""Options of `launch` for hosts, ranks of each and binding, in the words of each launcher."""

import pytest

from mpitrain.cli.launch.allocation import Allocation
from mpitrain.cli.launch.command import ranks_of_fullest
from mpitrain.cli.launch.placement import (
    Placement,
    described,
    exported,
    mpich_options,
    open_mpi_options,
    placement,
    srun_options,
)
from mpitrain.errors import ConfigError
from mpitrain.machine import process

TWO = Placement({"a": 4, "b": 4})


@pytest.mark.parametrize(
    "hosts, ppn, wanted",
    [
        ("a:4,b:4", 0, {"a": 4, "b": 4}),
        ("a,b:3", 0, {"a": 1, "b": 3}),
        ("a,b", 2, {"a": 2, "b": 2}),
        ("a:4,b:1", 2, {"a": 2, "b": 2}),
        ("node-1.site:2,10.0.0.3", 0, {"node-1.site": 2, "10.0.0.3": 1}),
        (None, 3, {}),
    ],
)
def test_hosts_have_their_ranks(hosts, ppn, wanted, tmp_path):
    assert placement(hosts, None, ppn, "").hosts == wanted
    if wanted:
        (tmp_path / "hosts").write_text(hosts.replace(",", "\n"))
        assert placement(None, tmp_path / "hosts", ppn, "").hosts == wanted


def test_a_hostfile_has_the_forms_of_open_mpi_and_mpich(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# of the lab\n\na slots=4  # fast\nb:3\nc 2\nd\nd\n")
    assert placement(None, path, 0, "").hosts == {"a": 4, "b": 3, "c": 2, "d": 2}
    assert placement(None, path, 0, "").ranks == 11


@pytest.mark.parametrize(
    "text", ("a:0", "a:00", "a:9999999999", "-v", "a b c", "-o x", "a:x", "a;b", " ", "", "a,")
)
def test_a_wrong_host_is_refused(text, tmp_path):
    with pytest.raises(ConfigError):
        placement(text, None, 0, "")
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match="hosts"):
        placement(None, tmp_path / "hosts", 0, "")
    with pytest.raises(ConfigError, match="both"):
        placement("a", tmp_path / "hosts", 0, "")


def test_each_launcher_has_its_own_words():
    bound = Placement({}, ppn=2, bind="core")
    assert open_mpi_options(Placement(), {}, 4) == ["--bind-to", "none"]
    assert mpich_options(Placement(), 4) == srun_options(Placement()) == []
    wanted = "--bind-to core --map-by ppr:2:node:PE=4"
    assert " ".join(open_mpi_options(bound, {}, 4)) == wanted
    assert mpich_options(bound, 4) == ["-ppn", "2", "-bind-to", "core:4"]
    assert srun_options(bound) == ["--ntasks-per-node=2", "--cpu-bind=cores"]
    wanted = "--bind-to none --host a:4,b:4 -x OMP_NUM_THREADS"
    given = {"PATH": "/bin", "OMP_NUM_THREADS": "2"}
    assert " ".join(open_mpi_options(TWO, given, 4)) == wanted
    assert mpich_options(TWO, 4) == ["-hosts", "a:4,b:4"]
    assert srun_options(TWO) == ["--nodelist=a,b", "--nodes=2", "--ntasks-per-node=4"]
    with pytest.raises(ConfigError, match="a:4,b:2"):
        srun_options(Placement({"a": 4, "b": 2}))


def test_more_ranks_than_the_named_hosts_take_are_refused():
    assert ranks_of_fullest(8, None, TWO) == ranks_of_fullest(5, None, TWO) == 4
    assert ranks_of_fullest(3, None, TWO) == ranks_of_fullest(3, None, Placement()) == 3
    assert ranks_of_fullest(6, Allocation("PBS", 8, 2), Placement()) == 3
    for ranks, placed in ((9, TWO), (6, Placement({}, ppn=4))):
        with pytest.raises(ConfigError, match=f"-n is {ranks}"):
            ranks_of_fullest(ranks, None, placed)
    assert "most 4 on" in described(5, 2, 4, 1, "")
    assert ", 4 on" in described(8, 2, 4, 1, "")


def test_variables_of_libraries_are_exported_alone():
    given = {"PATH", "HOME", "SLURM_JOB_ID", "UCX_TLS", "MKL_NUM_THREADS", "MPITRAIN_X"}
    assert exported(dict.fromkeys(given, "1")) == ["MKL_NUM_THREADS", "MPITRAIN_X", "UCX_TLS"]


@pytest.mark.parametrize(
    "variables, wanted",
    [
        (
            {"PALS_LOCAL_RANKID": 1, "PMI_LOCAL_SIZE": 4, "PALS_RANKID": 5, "PMI_SIZE": 8},
            ("PALS", 1, 4, 5, 8),
        ),
        (
            {
                "FLUX_TASK_LOCAL_ID": 2,
                "FLUX_JOB_NNODES": 2,
                "FLUX_TASK_RANK": 5,
                "FLUX_JOB_SIZE": 7,
            },
            ("Flux", 2, 4, 5, 7),
        ),
    ],
)
def test_pals_and_flux_tell_the_local_rank(variables, wanted, monkeypatch):
    for _, *names in process.LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert process.launched() == wanted
