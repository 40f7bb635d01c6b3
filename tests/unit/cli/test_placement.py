"""Options of `launch` for hosts, ranks of each and binding, in the words of each launcher."""

import os

import pytest

from mpitrain.cli.launch.command import cores_of, ranks_of_fullest
from mpitrain.cli.launch.hosts import (
    Allocation,
    Placement,
    allocation,
    described,
    exported,
    mpich_options,
    open_mpi_options,
    placement,
    slots,
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
        ("nid[001024-001025]", 0, {"nid001024": 1, "nid001025": 1}),
        (
            "n[1-2]:4,m[08-09]x[1-2].lan",
            2,
            dict.fromkeys(["n1", "n2", "m08x1.lan", "m08x2.lan", "m09x1.lan", "m09x2.lan"], 2),
        ),
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
    path.write_text(
        "a slots=4 max_slots=8\nb max-slots = 2\nc max_slots=3 slots=3\nn[1-2,7] slots=2\n"
    )
    wanted = {"a": 4, "b": 2, "c": 3, "n1": 2, "n2": 2, "n7": 2}
    assert placement(None, path, 0, "").hosts == wanted
    assert placement("n[1-2,7]:2,b", None, 0, "").hosts == {"n1": 2, "n2": 2, "n7": 2, "b": 1}


@pytest.mark.parametrize("kind", ("pipe", "device", "long"))
def test_hosts_come_from_a_regular_file_of_at_most_a_mebibyte(kind, tmp_path):
    path = tmp_path / "hosts"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("# a host\na slots=2\n".ljust(1 << 20, "\n"))
        assert placement(None, path, 0, "").ranks == 2
        assert allocation({"PBS_NODEFILE": str(path)}) == ("PBS", 1, 1)
        path.write_text("a slots=2\n".ljust((1 << 20) + 1, "\n"))
    with pytest.raises(ConfigError, match="--hostfile"):
        placement(None, path, 0, "")
    with pytest.raises(ConfigError, match=f"PBS_NODEFILE.*{path}"):
        slots({"PBS_NODEFILE": str(path)})


WRONG = "n[3-1]|n[1|n[]|a slots=4 max_slots=2|a:0|a:00|a:9999999999|-v|a b c|-o x|a:x|a;b|a,"


@pytest.mark.parametrize("text", [*WRONG.split("|"), " ", ""])
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


def test_the_cores_of_this_host_are_not_those_of_named_hosts(monkeypatch):
    monkeypatch.setattr(process, "cores", lambda: 8)
    far, here = Placement({"far": 4, "localhost": 4}), Placement({"localhost": 4})
    assert cores_of(8, None, far) is None and cores_of(4, None, here) == 2
    assert cores_of(8, Allocation("PBS", 8, 2), far) == 2, "in a job, hosts are alike"
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "12(x2)")
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    slurm = Allocation("Slurm", 2, 2)
    assert cores_of(4, slurm, Placement()) == 6 and cores_of(4, slurm, Placement({"n": 4})) == 3
    assert "core" not in described(8, 2, 4, None, "") and "; 1 core" in described(8, 2, 4, 0, "")


@pytest.mark.parametrize("ranks, yields", ((2, None), (3, "1")))
def test_ranks_of_a_crowded_host_leave_its_cores_while_they_wait(ranks, yields, monkeypatch):
    names = process.LAUNCHERS[0][1:]
    environ = dict(zip(names, ("1", str(ranks), "1", "8"), strict=True))
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(process, "processors", lambda: 2)
    monkeypatch.setattr(process, "_CHOSEN", set())
    process.yield_crowded_cores()
    assert environ.get("OMPI_MCA_mpi_yield_when_idle") == yields
    assert environ.get("MPIR_CVAR_ENABLE_HEAVY_YIELD") == yields
    process.poll_without_yielding()  # whose waits sleep
    assert environ["OMPI_MCA_mpi_yield_when_idle"] == "0"


def test_what_the_user_says_of_yielding_stays(monkeypatch):
    environ = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(process, "_CHOSEN", set())
    process.poll_without_yielding()
    assert environ == {"OMPI_MCA_mpi_yield_when_idle": "1"}


def test_the_component_of_ucx_is_left_out_unless_a_device_or_the_user_wants_it(
    tmp_path, monkeypatch
):
    for devices, wish, left in (
        ("none", {}, "^ucx"),
        ("mlx5_0", {}, None),
        ("none", {"OMPI_MCA_osc": "ucx"}, "ucx"),
    ):
        monkeypatch.setattr(os, "environ", wish)
        monkeypatch.setattr(process, "UCX_DEVICES", tmp_path / devices)
        (tmp_path / devices).mkdir(exist_ok=True)
        if devices != "none":
            (tmp_path / devices / devices).mkdir()
        process.silence_ucx()
        assert wish.get("OMPI_MCA_osc") == left, (devices, wish)


def test_variables_of_libraries_are_exported_alone():
    given = {"PATH", "HOME", "SLURM_JOB_ID", "UCX_TLS", "MKL_NUM_THREADS", "MPITRAIN_X"}
    assert exported(dict.fromkeys(given, "1")) == ["MKL_NUM_THREADS", "MPITRAIN_X", "UCX_TLS"]


def test_a_rank_of_mpi_gets_its_own_local_rank_and_a_process_of_torchrun_keeps_its_own(monkeypatch):
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"}
    for more, wanted in (({}, "1"), ({"TORCHELASTIC_RUN_ID": "x"}, "3")):
        monkeypatch.setattr(os, "environ", {**slurm, "LOCAL_RANK": "3", **more})
        process.name_local_rank()
        assert os.environ["LOCAL_RANK"] == wanted


@pytest.mark.parametrize(
    "variables, wanted",
    [
        ("", ("none", 0, 1, 0, 1)),
        ("SLURM_PROCID=5 SLURM_LOCALID=1", ("none", 0, 1, 0, 1)),  # of a batch shell
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", ("none", 0, 1, 0, 1)),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none",
            ("torchrun", 1, 2, 1, 2),
        ),
        (
            "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=2(x4)",
            ("Slurm", 1, 2, 5, 8),
        ),
        ("PALS_LOCAL_RANKID=1 PMI_LOCAL_SIZE=4 PALS_RANKID=5 PMI_SIZE=8", ("PALS", 1, 4, 5, 8)),
        (
            "FLUX_TASK_LOCAL_ID=2 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=5 FLUX_JOB_SIZE=7",
            ("Flux", 2, 4, 5, 7),
        ),
    ],
)
def test_the_launchers_variables_tell_rank_and_size(variables, wanted, monkeypatch):
    environ = dict(variable.split("=") for variable in variables.split())
    monkeypatch.setattr(os, "environ", environ)
    assert process.launched() == wanted
