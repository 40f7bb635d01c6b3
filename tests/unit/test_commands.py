"""The command line without ranks: help, keys, the launcher's line, what a bar shows, how texts are drawn."""

import sys

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain import device
from mpitrain.cli import commands, launch
from mpitrain.cli.ending import settings_of
from mpitrain.config import keys, with_settings
from mpitrain.errors import ConfigError, TrainingError
from mpitrain.generate import _draw
from mpitrain.optim import learning_rate


@pytest.mark.parametrize("name", commands.list_commands(None))
def test_every_command_explains_itself(name):
    shown = CliRunner().invoke(commands, [name, "--help"])
    assert shown.exit_code == 0 and "Usage:" in shown.output


@pytest.mark.parametrize("name", ['"q"', "'", "\U0001f600", "a\nb\r", "back\\slash", "end ", '"""', "x = 1\ny = 2", "\udcff", ""])
def test_a_path_of_an_option_reaches_the_configuration_as_it_was_named(name):
    assert with_settings({}, settings_of(("run.out", name), ("layout.dp", 3), ("data.source", None))) == {
        "run": {"out": name}, "layout": {"dp": 3}}


def test_help_config_lists_every_key():
    shown = CliRunner().invoke(commands, ["train", "--help-config"])
    assert shown.exit_code == 0
    for key in keys():
        assert key.name in shown.output and key.help in shown.output


def line_for(monkeypatch, family, ranks, cores=2, root=False, slurm=False, extra=()):
    """The words of the launcher's line, without paths."""
    monkeypatch.setattr(launch, "library", lambda: launch.Mpi(family, family))
    monkeypatch.setattr(launch, "launcher", lambda name, sign: name)
    monkeypatch.setattr(launch.shutil, "which", lambda name: name)
    monkeypatch.setattr(device, "cores", lambda: cores)
    monkeypatch.setattr(launch.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    line, settings = launch.command_line(ranks, list(extra), ["train"])
    assert line[-4:] == [sys.executable, "-m", "mpitrain", "train"]
    return " ".join(line[:-4]), settings


def test_open_mpi_gets_what_the_machine_needs(monkeypatch):
    line, _ = line_for(monkeypatch, "Open MPI", 2)
    assert line.startswith("mpirun -n 2 --bind-to none --mca osc ^ucx")
    assert "--oversubscribe" not in line and "--allow-run-as-root" not in line
    line, _ = line_for(monkeypatch, "Open MPI", 4, root=True)
    assert "--oversubscribe" in line and "--allow-run-as-root" in line
    line, _ = line_for(monkeypatch, "Open MPI", 4, extra=["--hostfile", "hosts"])
    assert "--hostfile hosts" in line and "btl" not in line, "several hosts need their network"
    monkeypatch.setattr(device, "has_driver", lambda: True)
    assert "btl" not in line_for(monkeypatch, "Open MPI", 2)[0], "GPU memory needs other ways"


def test_mpich_gets_what_the_machine_needs(monkeypatch):
    assert line_for(monkeypatch, "MPICH", 2) == ("mpiexec -n 2", {})
    assert line_for(monkeypatch, "MPICH", 3) == ("mpiexec -n 3", {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"})


@pytest.mark.parametrize("family, kind", [("Open MPI", "pmix"), ("MPICH", "pmi2")])
def test_inside_a_slurm_allocation_srun_starts_the_ranks(monkeypatch, family, kind):
    assert line_for(monkeypatch, family, 4, slurm=True) == (f"srun --mpi={kind} -n 4", {})


def test_a_missing_launcher_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="No mpiexec of the MPI that mpi4py loads"):
        launch.launcher("mpiexec", "of no MPI at all")


@pytest.mark.parametrize("last, code, returned", [
    ("end", 0, 0), ("stopped", 85, 85), ("stopped", 0, 85), ("end", 1, 1), ("end", -9, 137), ("failed", 1, 1),
    (None, 0, 1), (None, 2, 2), ("stopped", 1, 1), ("start", 0, 1),
])
def test_the_last_line_of_the_run_decides_the_exit_code(tmp_path, last, code, returned):
    report = tmp_path / "report"
    if last:
        (tmp_path / "metrics.jsonl").write_text(f'{{"event": "start", "step": 0}}\n{{"event": "{last}", "step": 1}}\n')
        report.write_text(str(tmp_path / "metrics.jsonl"))
    assert launch.training_code(report, code) == returned


def test_the_launchers_variables_tell_rank_and_size(monkeypatch):
    for _, *names in device.LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert device.launched() == ("none", 0, 1, 0, 1)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert device.launched().size == 1, "a batch shell is not a rank"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x4)")
    assert device.launched() == ("Slurm", 1, 2, 5, 8)


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    from mpitrain.config import Optimizer

    for schedule in ("cosine", "linear"):
        settings = Optimizer(lr=1.0, warmup=10, schedule=schedule)
        rates = [learning_rate(settings, step, 100) for step in range(101)]
        assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and abs(rates[100] - 0.1) < 1e-12
        assert rates[10:] == sorted(rates[10:], reverse=True)
    constant = Optimizer(lr=2.0, warmup=0, schedule="constant")
    assert {learning_rate(constant, step, 5) for step in range(5)} == {2.0}


def test_draws_follow_temperature_and_top_k():
    logits, generator = np.array([0.0, 3.0, 2.0, -1.0]), np.random.default_rng(0)
    assert _draw(logits, 0, 0, generator) == 1
    assert {_draw(logits, 5.0, 2, generator) for _ in range(200)} == {1, 2}
    drawn = np.bincount([_draw(logits, 1.0, 0, generator) for _ in range(4000)], minlength=4) / 4000
    wanted = np.exp(logits) / np.exp(logits).sum()
    assert np.all(np.abs(drawn - wanted) < 0.04)


def test_a_diverged_model_writes_nothing():
    from mpitrain.generate import tokens
    from tests.unit.test_checkpoint import trained

    trainer = trained(steps=0)
    trainer.parameters[:] = np.inf
    with np.errstate(all="ignore"), pytest.raises(TrainingError, match="not finite"):
        next(tokens(trainer, [1], 1.0, 0, 0))
