"""The command line without ranks: help, keys, the launcher's line, what a bar shows, how texts are drawn."""

import io
import re
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import LEARN, RUNS, commands, train
from mpitrain.cli.config_help import EXPERT
from mpitrain.cli.generate import readable
from mpitrain.cli.job_options import changes
from mpitrain.cli.launch import command as launch_command
from mpitrain.cli.launch.restarts import Restart
from mpitrain.cli.terminal.progress import way
from mpitrain.config import Config, with_settings
from mpitrain.data import Unopened
from mpitrain.errors import ConfigError, TrainingError
from mpitrain.machine import process
from mpitrain.optim import learning_rate
from mpitrain.run import inference
from mpitrain.run.choices import keys, parse
from mpitrain.transport.library import FAMILIES
from tests.processes import mpitrain


def test_the_version_has_one_place_and_all_that_it_runs_on():
    from mpitrain import __version__

    shown = CliRunner().invoke(commands, ["--version", "-v"]).output.splitlines()
    assert shown[0] == f"mpitrain, version {__version__}"
    names = ["Python", "NumPy", "mpi4py", "CuPy", "PyTorch", "MPI"]
    assert [line.split()[0] for line in shown[1:]] == names
    assert (
        f"version: {__version__}\n"
        in (Path(train.__file__).parents[1] / "CITATION.cff").read_text()
    )
    assert CliRunner().invoke(commands, ["--version"]).output == f"{shown[0]}\n"


NAMES = [
    '"q"',
    "'",
    "\U0001f600",
    "a\nb\r",
    "back\\slash",
    "end ",
    '"""',
    "x = 1\ny = 2",
    "\udcff",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_of_an_option_reaches_the_configuration_as_it_was_named(name):
    assert with_settings({}, changes((), out=name, dp=3, data=None, algorithm=name)) == {
        "run": {"out": name},
        "layout": {"dp": 3},
        "replication": {"algorithm": name},
    }


def test_help_config_lists_every_key():
    shown = CliRunner().invoke(commands, ["train", "--help-config"])
    assert shown.exit_code == 0
    said = " ".join(shown.output.split())
    for key in keys():
        assert f"{key.name} = " in said and key.help in said and key.range in said


def test_help_config_lists_basic_keys_before_advanced_ones_and_those_for_experts_last():
    for section in Config.model_fields.values():
        assert set(section.annotation.basic) <= set(section.annotation.model_fields)
    shown = CliRunner().invoke(commands, ["train", "--help-config"]).output.splitlines()
    listed = [line.split()[0] for line in shown if " = " in line and line[2:3].strip()]
    basic = [key.name for key in keys() if key.is_basic]
    assert len(basic) == 25
    expert = [name for names in EXPERT.values() for name in names]
    rest = [key.name for key in keys() if key.name not in {*basic, *expert}]
    assert listed == [*basic, *rest, *expert]
    starts = [
        next(at for at, line in enumerate(shown) if line.startswith(f"  {names[0]} = "))
        for names in (rest, expert)
    ]
    assert shown.index("advanced") < starts[0] < shown.index("for experts") < starts[1]


def test_help_config_of_a_section_lists_its_keys_alone_in_lines_that_fit():
    shown = CliRunner().invoke(
        commands, ["train", "--help-config", "replication"], env={"COLUMNS": "80"}
    )
    assert shown.exit_code == 0 and max(map(len, shown.output.splitlines())) <= 80
    assert 'replication.algorithm = "auto"' in shown.output and "optimizer." not in shown.output
    refused = CliRunner().invoke(commands, ["train", "--help-config", "optimiser"])
    assert refused.exit_code == 2 and "'optimiser'" in refused.output


def test_the_list_of_commands_has_whole_first_sentences():
    shown = " ".join(CliRunner().invoke(commands, ["--help"], env={"COLUMNS": "60"}).output.split())
    for name in commands.list_commands(None):
        assert f" {name} {commands.get_command(None, name).get_short_help_str(1000)}" in shown


@pytest.mark.parametrize("group", ["bench", "plan"])
def test_a_command_of_a_group_is_told_by_its_whole_first_sentence(group):
    done = CliRunner().invoke(commands, [group, "--help"], env={"COLUMNS": "60"})
    shown = " ".join(done.output.split())
    for name, command in commands.get_command(None, group).commands.items():
        is_listed = f" {name} {command.get_short_help_str(1000)}" in shown
        assert is_listed == (not command.hidden)


@pytest.mark.parametrize("word, wanted", [("trian", "train"), ("zzz", None)])
def test_a_mistyped_command_gets_a_suggestion(word, wanted):
    shown = CliRunner().invoke(commands, [word, "--set", "run.steps=1"])
    assert shown.exit_code == 2 and f"No such command '{word}'" in shown.output
    assert (f"did you mean {wanted}?" if wanted else f"'{word}'.\n") in shown.output


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["--clip", "0.5"], "--set optimizer.clip=0.5"),
        (["--clip=0.5"], "--set optimizer.clip=0.5"),
        (["--out", "run", "--grace", "5", "--dp", "2"], "--set run.grace=5"),
        (["--batch-size", "64"], "--set batch.size=64"),
        (["--optimizer.lr", "1"], "--set optimizer.lr=1"),
        (["--weight-deccay", "1"], "--set optimizer.weight_decay=1"),
        (["--kind", "mlp"], "--set model.kind=mlp or --set device.kind=mlp"),
        (["--tied", "--dp", "2"], "--set model.tied=VALUE"),
        (["--model-kind", "rnn"], "--set model.kind=rnn"),
    ],
)
def test_an_option_that_is_a_configuration_key_is_told_how_to_be_set(words, wanted):
    shown = CliRunner().invoke(commands, ["train", *words])
    said = " ".join(shown.output.split())
    assert shown.exit_code == 2 and f"did you mean {wanted}?" in said, said


def test_another_unknown_option_gets_clicks_own_answer():
    shown = CliRunner().invoke(commands, ["train", "--rezume"])
    assert shown.exit_code == 2 and "--resume" in shown.output


@pytest.mark.parametrize(
    "words, resume, file",
    [
        (["--resume"], "yes", None),
        (["--resume=auto"], "auto", None),
        (["--resume", "auto"], "auto", None),
        (["--resume", "auto", "c.toml"], "auto", "c.toml"),
        (["c.toml", "--resume"], "yes", "c.toml"),
        (["--resume", "c.toml"], "yes", "c.toml"),
        (["--resume", "--out", "auto"], "yes", None),
        (["--resume", "./auto"], "yes", "auto"),
    ],
)
def test_resume_takes_auto_with_or_without_an_equals_sign(words, resume, file):
    found = train.command.make_context("train", list(words)).params
    assert found["resume"] == resume and str(found["config_file"] or "") == (file or "")


def test_what_is_no_text_is_escaped_and_text_is_not(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    text = b"a\tb\n\x1b[31m \xff\x00\r " + "größe €\xa0\u200f".encode() + b"\xe2\x82"
    shown = b"".join(readable(bytes([byte]) for byte in text)).decode()
    assert shown == "a\tb\n\\x1b[31m \\xff\\x00\\r größe €\xa0\\u200f\\xe2\\x82"
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert b"".join(readable(["größe".encode()])) == b"gr\\xf6\\xdfe"


class Finished:
    """What `_print_sample` needs of a finished run."""

    folder = Path("none")

    def __init__(self, trainer):
        self.job = SimpleNamespace(trainer=trainer, source=Unopened("tokens", (8,), 256, 256))


def test_the_sample_is_as_long_as_asked_for_and_ends_when_a_stop_is(monkeypatch, capsys):
    from tests.unit.run.test_checkpoint import trained

    drawn = []
    trainer = trained("run.sample=30", steps=0)
    sure = np.where(np.arange(256) == 65, 1e6, 0.0)[None]
    certain = SimpleNamespace(read=lambda windows, context: drawn.append(windows) or sure)
    monkeypatch.setattr("mpitrain.run.inference.reader", lambda *sizes: certain)
    train._print_sample(Finished(trainer), lambda: False)
    assert capsys.readouterr().out == "a sample of what it writes:\n{}\n".format("A" * 30)
    assert len(drawn) == 30
    train._print_sample(Finished(trainer), lambda: len(drawn) >= 35)
    assert len(drawn) == 35
    monkeypatch.setattr("mpitrain.run.generate.SAMPLE_SECONDS", 0)
    train._print_sample(Finished(trainer), lambda: False)
    assert len(drawn) == 36, "it may not keep the ranks for long"
    sure[0, 200] = 2e6
    train._print_sample(Finished(trainer), lambda: False)
    assert capsys.readouterr().out.endswith("no text yet\n")


def test_windows_without_a_cache_are_no_wider_than_they_need(monkeypatch):
    from tests.generation import tokens
    from tests.unit.run.test_checkpoint import trained

    monkeypatch.setattr("mpitrain.pipeline.decoder.can_decode", lambda chunks: False)
    trainer = trained("model.context=128", steps=1)
    widths = []
    logits = inference.infer
    monkeypatch.setattr(
        inference,
        "infer",
        lambda trainer, rows: (widths.append(rows.shape[1]), logits(trainer, rows))[1],
    )
    narrow = list(islice(tokens(trainer, [10], 0.0, 0, 0), 150))
    assert sorted(set(widths)) == [16, 32, 64, 128]
    whole = np.zeros((1, 128), np.int64)
    whole[0, :20] = [10, *narrow[:19]]
    assert int(logits(trainer, whole)[0, 19].argmax()) == narrow[19]


def line_for(monkeypatch, family, ranks, cores=2, root=False, slurm=False, extra=(), **placed):
    """The words of the launcher's line, without paths."""
    monkeypatch.setattr(launch_command, "library", lambda: launch_command.Mpi(family, family))
    start = FAMILIES[family].launcher
    monkeypatch.setattr(launch_command, "launcher_of", lambda version, path: start)
    monkeypatch.setattr(launch_command.shutil, "which", lambda name: name)
    monkeypatch.setattr(process, "cores", lambda: cores)
    monkeypatch.setattr(launch_command.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    line, settings = launch_command.command_line(
        ranks, list(extra), ["python", "own.py"], "", launch_command.Placement(**placed)
    )
    assert line[-2:] == ["python", "own.py"]
    return " ".join(line[:-2]), settings


def test_open_mpi_gets_what_the_machine_needs(monkeypatch):
    crowded = "--oversubscribe", "--mca mpi_yield_when_idle 1", "--allow-run-as-root"
    line, _ = line_for(monkeypatch, "Open MPI", 2)
    assert line.startswith("mpirun -n 2 --bind-to none") and "--mca osc ^ucx" in line
    assert not any(option in line for option in crowded)
    line, _ = line_for(monkeypatch, "Open MPI", 4, root=True)
    assert all(option in line for option in crowded)
    line, _ = line_for(monkeypatch, "Open MPI", 4, extra=["--hostfile", "hosts"])
    assert "--hostfile hosts" in line and "btl" not in line, "several hosts need their network"
    monkeypatch.setattr(process, "has_driver", lambda: True)
    assert "btl" not in line_for(monkeypatch, "Open MPI", 2)[0], "GPU memory needs other ways"


@pytest.mark.parametrize("version, btl", [("4.1.4", "vader"), ("5.0.11", "sm"), ("3.1", "vader")])
def test_open_mpi_before_5_has_another_name_for_shared_memory(version, btl):
    assert launch_command.shared_memory_btl(f"Open MPI v{version}, package: Debian") == btl


@pytest.mark.parametrize(
    "family, wanted",
    [("Open MPI", "--map-by slot:PE=1 --host far:4"), ("MPICH", "-bind-to core:1")],
)
def test_ranks_of_other_hosts_are_bound_and_crowded_by_their_own_cores(monkeypatch, family, wanted):
    line, settings = line_for(monkeypatch, family, 4, cores=1, hosts={"far": 4}, bind="core")
    assert wanted in line and "oversubscribe" not in line and "yield" not in f"{line}{settings}"
    with pytest.raises(ConfigError):
        line_for(monkeypatch, family, 4, cores=1, hosts={"localhost": 4}, bind="core")


def test_fault_tolerant_ranks_are_started_by_mpirun_of_open_mpi_5(monkeypatch):
    for slurm in (False, True):
        line_for(monkeypatch, "Open MPI", 2, slurm=slurm)
        mpi = launch_command.Mpi("Open MPI", "Open MPI v5.0.11")
        monkeypatch.setattr(launch_command, "library", lambda mpi=mpi: mpi)
        line, _ = launch_command.command_line(2, [], ["train"], fault_tolerant=True)
        assert line[0] == "mpirun" and " ".join(launch_command.ULFM) in " ".join(line)


@pytest.mark.parametrize(
    "family, version, by, why",
    [
        ("MPICH", "MPICH Version 5", "", "mpi4py loads MPICH Version 5"),
        ("Open MPI", "Open MPI v4.1.4", "", "mpi4py loads Open MPI v4.1.4"),
        ("Open MPI", "Open MPI v5.0.11", "srun", "srun cannot start"),
    ],
)
def test_what_cannot_start_fault_tolerant_ranks_is_refused(family, version, by, why):
    with pytest.raises(ConfigError, match=why):
        launch_command.check_fault_tolerant(launch_command.Mpi(family, version), by)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("-n 3 --spares 1 -- train", "--spares 1 needs ranks that outlive a lost one"),
        (
            "-n 2 --spares 2 --fault-tolerant -- train",
            "2 rank(s) cannot have 2 spare(s) among them",
        ),
        ("--hosts a:2,b:2 --spares-per-host 2 --fault-tolerant -- train", "cannot have 4 spare(s)"),
        ("--hosts a:5,b:1 --spares-per-host 2 --fault-tolerant -- train", "host b has 1 of the 6"),
        ("-n 4 --hosts a:4,b:4 --spares-per-host 1 --fault-tolerant -- train", "host b has 0"),
        ("a 4 b 4| -n 4 --spares-per-host 1 --fault-tolerant -- train", "host b has 0 of the 4"),
        ("-n 3 --spares 1 --fault-tolerant -- bench all-reduce", "but the command is bench"),
        ("-n 9 --spares 1 --spares-per-host 1 --fault-tolerant -- train", "in all or on each host"),
        ("-n 3 --spares 1 --fault-tolerant --launcher srun -- train", "srun cannot start"),
    ],
)
def test_spares_that_could_not_take_a_place_are_refused(words, why, monkeypatch):
    mpi = launch_command.Mpi("Open MPI", "Open MPI v5.0.11")
    monkeypatch.setattr(launch_command, "library", lambda: mpi)
    job, _, words = words.rpartition("| ")
    if job:
        monkeypatch.setenv("LSB_MCPU_HOSTS", job)
    done = CliRunner().invoke(commands, ["launch", "--dry-run", *words.split()])
    assert done.exit_code == 2 and why in done.stderr, done.stderr


def test_mpich_gets_what_the_machine_needs(monkeypatch):
    assert line_for(monkeypatch, "MPICH", 2) == ("mpiexec -n 2", {})
    crowded = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    assert line_for(monkeypatch, "MPICH", 3) == ("mpiexec -n 3", crowded)


@pytest.mark.parametrize(
    "family, kind, always, crowded",
    [
        ("Open MPI", "pmix", {"OMPI_MCA_osc": "^ucx"}, {"OMPI_MCA_mpi_yield_when_idle": "1"}),
        ("MPICH", "pmi2", {}, {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}),
    ],
)
def test_inside_a_slurm_allocation_launch_uses_srun(monkeypatch, family, kind, always, crowded):
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    for cores, ranks, settings in (
        ("2(x3),4", 10, always),
        ("2(x3),4", 11, always | crowded),
        ("8(x2),6", 5, always | {"SRUN_CPUS_PER_TASK": "3"}),
        ("", 11, always),
    ):
        monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", cores)
        wanted = f"srun --mpi={kind} -n {ranks}", settings
        assert line_for(monkeypatch, family, ranks, slurm=True) == wanted
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    wanted = {**settings, "SRUN_CPUS_PER_TASK": "8"}
    assert line_for(monkeypatch, family, ranks, slurm=True)[1] == wanted


def test_shared_memory_too_small_for_mpi_is_refused_before_the_start(monkeypatch):
    monkeypatch.setattr(process, "shared_memory", lambda: 16 << 20)
    with pytest.raises(ConfigError, match=r"/dev/shm has 16\.8"):
        line_for(monkeypatch, "Open MPI", 2)
    assert line_for(monkeypatch, "Open MPI", 1), "one rank shares nothing"
    assert line_for(monkeypatch, "Open MPI", 2, extra=["--mca", "btl", "tcp,self"]), "the way out"


@pytest.mark.parametrize(
    ("module", "name", "value", "law"),
    [
        (process, "interfaces", list, "needs a network interface that is up"),
        (
            launch_command,
            "largest_file",
            lambda: 10240,
            r"1\.0 MB, but `ulimit -f` allows 0\.010 MB",
        ),
        (
            launch_command,
            "largest_file",
            lambda: 5e6,
            r"16\.8 MB, but `ulimit -f` .*(.|\n)*tcp,self",
        ),
    ],
)
def test_a_host_on_which_mpirun_cannot_start_is_refused_in_our_words(
    module, name, value, law, monkeypatch
):
    monkeypatch.setattr(module, name, value)
    with pytest.raises(ConfigError, match=law):
        line_for(monkeypatch, "Open MPI", 2)


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP", "TMP"])
def test_a_folder_for_temporary_files_that_mpi_cannot_use_is_refused(name, monkeypatch, tmp_path):
    for other in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(other, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv(name, str(tmp_path / "file/folder"))
    with pytest.raises(
        ConfigError, match=f"but {tmp_path}/file/folder cannot be written"
    ) as refused:
        line_for(monkeypatch, "Open MPI", 2)
    assert "set TMPDIR" in refused.value.way_out
    monkeypatch.setenv(name, str(tmp_path / "new"))
    assert line_for(monkeypatch, "Open MPI", 2) and not [*(tmp_path / "new").iterdir()]


@pytest.mark.parametrize(("codes", "last"), [([2], 2), ([1, 2], 1), ([1, 0], 0)])
def test_a_start_after_a_loss_is_never_wrong_usage(codes, last, monkeypatch):
    class Lost:
        is_first, step = True, -1

        def __init__(self, *arguments): ...

        def after(self, output, code):
            if code != 1:
                return None
            self.is_first = False
            return Restart({}, 2, [])

    left = [*codes]
    monkeypatch.setattr(
        launch_command, "command_line", lambda *arguments: (["mpirun", "train"], {})
    )
    monkeypatch.setattr(launch_command, "run", lambda *arguments: left.pop(0))
    monkeypatch.setattr(launch_command, "Restarts", Lost)
    words = ["launch", "-n", "2", "--fault-tolerant", "--", "train"]
    assert CliRunner().invoke(commands, words).exit_code == last and not left


@pytest.mark.parametrize(
    "words, before, again, started, option",
    [
        (  # host b is lost
            "--hosts a:2,b:2,c:2 --spares-per-host 1",
            ({"a": 1, "b": 1, "c": 1}, 3),
            ({"a": 1, "c": 1}, 2),
            (4, {"a": 2, "c": 2}),
            "1/host",
        ),
        (  # ranks in replicas of 4
            "--hosts a,b --ppn 5 --spares-per-host 2",
            ({"a": 3, "b": 3}, 6),
            ({"a": 3, "b": 3}, 4),
            (8, {"a": 5, "b": 3}),
            "2/host",
        ),
        ("-n 4 --spares-per-host 1", ({}, 3), ({}, 2), (3, {}), "1/host"),
        (
            "--hosts a:2,b:2,c:2 --spares 2",
            ({"a": 2, "b": 2, "c": 2}, 4),
            ({"a": 2, "c": 2}, 4),
            (4, {"a": 2, "c": 2}),
            None,
        ),
        ("-n 4 --spares 2", ({}, 2), ({}, 2), (4, {}), "2"),
    ],
)
def test_a_start_after_a_loss_has_spares_of_the_form_that_was_asked_for(
    words, before, again, started, option, monkeypatch
):
    first, placements, lines = [], [], []

    class Lost:
        is_first, step = False, 10

        def __init__(self, hosts, ranks, *others):
            first.append((hosts, ranks))

        def after(self, output, code):
            return Restart(*again, []) if code else None

    def command_line(ranks, extra, program, by, placed, fault_tolerant):
        placements.append((ranks, placed.hosts))
        return ["mpirun", *program], {}

    def run(line, *others):
        lines.append(line)
        return 2 - len(lines)

    monkeypatch.setattr(launch_command, "command_line", command_line)
    monkeypatch.setattr(launch_command, "run", run)
    monkeypatch.setattr(launch_command, "Restarts", Lost)
    words = ["launch", *words.split(), "--fault-tolerant", "--", "train"]
    assert CliRunner().invoke(commands, words).exit_code == 0
    assert (first, placements[1:]) == ([before], [started])
    asked = [word for word in lines[1] if word.startswith("mpitrain_spares=")]
    assert asked == [f"mpitrain_spares={option}"] * bool(option)


def test_a_bar_is_not_held_back_on_a_terminal(monkeypatch):
    assert "--stream-buffering" not in line_for(monkeypatch, "Open MPI", 2)[0]
    monkeypatch.setattr(launch_command.sys.stderr, "isatty", lambda: True, raising=False)
    assert "--stream-buffering 0" in line_for(monkeypatch, "Open MPI", 2)[0]


@pytest.mark.parametrize(
    "words, shown",
    [
        ("-n 2 --dry-run -- mpitrain train --dp 2", "-m mpitrain train --dp 2"),
        ("-n 2 --dry-run train --dp 2", "-m mpitrain train --dp 2"),
        ("-n 4 --mca a b -- train", "No such option: --mca. --with: Options for mpirun"),
        ("-np 0 -- train", "Invalid value for '-n' / '-np': 0 is not in the range x>=1"),
    ],
)
@pytest.mark.slow
def test_options_and_a_second_mpitrain_go_where_they_belong(words, shown):
    done = mpitrain("launch", *words.split())
    assert shown in done.stderr and "mpitrain mpitrain" not in done.stderr, done.stderr


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    from mpitrain.config import Optimizer

    for schedule in ("cosine", "linear"):
        settings = Optimizer(lr=1.0, warmup=10, schedule=schedule)
        rates = [learning_rate(settings, step, 100) for step in range(101)]
        assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and abs(rates[100] - 0.1) < 1e-12
        assert rates[10:] == sorted(rates[10:], reverse=True)
    constant = Optimizer(lr=2.0, warmup=0, schedule="constant")
    assert {learning_rate(constant, step, 5) for step in range(5)} == {2.0}


def test_a_diverged_model_writes_nothing():
    from tests.generation import tokens
    from tests.unit.run.test_checkpoint import trained

    trainer = trained(steps=0)
    trainer.parameters[:] = np.inf
    with np.errstate(all="ignore"), pytest.raises(TrainingError, match="not finite"):
        next(tokens(trainer, [1], 1.0, 0, 0))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "auto all-reduce"),
        (
            ["replication.algorithm=ring", "layout.pp=2", "batch.micro_batches=4"],
            "2 stages by 1f1b, 4 micro-batches, ring all-reduce",
        ),
        (
            ["layout.tp=2", "layout.algorithm=shared", "layout.sequence_parallel=true"],
            "2 of them share layers by shared all-reduce, rows of norms divided",
        ),
        (["replication.mode=server", "replication.update=async"], "1 of them async server(s)"),
        (["replication.mode=local"], "mode local"),
        (["replication.mode=master"], "mode master"),
    ],
)
def test_a_run_says_how_its_ranks_share_the_work(settings, said):
    assert way(parse(with_settings({}, settings))) == said


def test_the_words_that_moved_into_groups_still_work_at_the_top_and_are_not_listed_there():
    shown = CliRunner().invoke(commands, ["--help"]).output.partition("Commands:")[2]
    listed = re.findall(r"^  (\w+) ", shown, re.M)
    assert " ".join(listed) == (
        "train launch slurm eval predict generate chat export data bench compare plan doctor certify runs learn"
    )
    for group, words in (("runs", RUNS), ("learn", LEARN)):
        for word in words:
            assert word not in listed
            old, new = (
                CliRunner().invoke(commands, [*way, word, "--help"]) for way in ([], [group])
            )
            assert old.exit_code == new.exit_code == 0
            assert old.output == new.output.replace(f"commands {group} {word}", f"commands {word}")
