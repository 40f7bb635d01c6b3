"""The scripts of jobs/slurm: each is the output of the command in its head, and bash reads it."""

import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands

HERE = Path(__file__).parents[3] / "jobs"
SCRIPTS = sorted(HERE.glob("slurm/*.sbatch"))
EXAMPLES = {
    "train_ddp": "--nodes 2 --ranks-per-node 2 -- train",
    "train_3d": "--nodes 2 --ranks-per-node 4 -- train --dp 2 --tp 2 --pp 2",
    "train_server": "--nodes 2 --ranks-per-node 2 -- train --set replication.mode=server --set replication.update=async",
    "train_gpu": "--nodes 2 --gpus-per-node 4 --cores-per-rank 8 -- train --device cuda",
    "bench_collectives": "--nodes 2 --ranks-per-node 2 --time 30 -- bench all-reduce --algorithm auto,ring,native",
    "sweep": "--nodes 1 --ranks-per-node 2 --sweep optimizer.lr=0.001,0.002,0.004 -- train",
    "generate": "--time 10 -- generate runs/book --tokens 200",
    "own_program": "--nodes 2 --ranks-per-node 2 --time 8:00:00 --checkpoint own_program.pt -- python jobs/slurm/own_program.py",
    "own_sweep": "--sweep lr=0.1,0.2 --sweep seed=1,2 -- jobs/slurm/own_program.py",
}
"""{script: the words of `mpitrain slurm` that write it}."""
KEPT = ("train_ddp", "bench_collectives", "sweep", "generate", "own_program")
"""The scripts of jobs/slurm: one of each kind."""


@pytest.fixture(autouse=True)
def _at_the_top(monkeypatch):
    """Where the programs of the examples are."""
    monkeypatch.chdir(HERE.parent)


def written(words):
    done = CliRunner().invoke(commands, ["slurm", *words])
    assert done.exit_code == 0, (words, done.output)
    return done.output


@pytest.mark.parametrize("by", ("", "--mpirun "))
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_head_of_a_script_names_the_command_that_writes_it(name, by):
    text = written(shlex.split(by + EXAMPLES[name]))
    command = re.search(r"^# Written by: mpitrain slurm (.*)$", text, re.M)[1]
    assert shlex.split(command) == shlex.split(by + EXAMPLES[name])
    if name in KEPT and not by:
        assert (HERE / "slurm" / f"{name}.sbatch").read_text() == text


def test_there_is_no_other_script():
    assert {path.stem for path in SCRIPTS} == {*KEPT} and len(SCRIPTS) == len(KEPT)
    assert (HERE / "train.sbatch").resolve() == HERE / "slurm/train_ddp.sbatch"


@pytest.mark.parametrize("system", ("--slurm", "--pbs", "--lsf"))
@pytest.mark.parametrize("env", ("venv", "venv:/a b/.venv", "module:a/1,b", "apptainer:x.sif"))
@pytest.mark.parametrize("name", EXAMPLES)
def test_bash_reads_every_form(name, env, system):
    words = [system, "--env", env, "--cores-per-rank", "4", *shlex.split(EXAMPLES[name])]
    text = written(words)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    prefix = {"--slurm": "#SBATCH", "--pbs": "#PBS", "--lsf": "#BSUB"}[system]
    others = {"#SBATCH", "#PBS", "#BSUB"} - {prefix}
    assert prefix in text and not any(other in text for other in others)
    assert ("Not run on" in text) == (system != "--slurm")


def test_a_reason_is_at_each_directive():
    for path in SCRIPTS:
        lines = [line for line in path.read_text().splitlines() if line.startswith("#SBATCH")]
        assert len(lines) > 5 and all(re.search(r"\S +# \w", line) for line in lines)
    lines = written(["--pbs", "--cores-per-rank", "4", "--", "train"]).splitlines()
    for before, line in itertools.pairwise(lines):
        assert not line.startswith("#PBS") or re.match(r"# .*:$", before)


@pytest.mark.parametrize("time, margin, cut", [("40", 600, 0), ("30", 600, 450), ("1", 60, 30)])
def test_a_margin_beyond_a_quarter_of_the_time_is_cut_with_a_note(time, margin, cut):
    words = ["slurm", "--time", time, "--margin", str(margin), "--", "train"]
    done = CliRunner().invoke(commands, words)
    assert f"--signal=B:USR1@{cut or margin} " in done.stdout
    assert (f"{cut} s" in done.stderr) if cut else not done.stderr


def test_spares_are_tasks_of_the_allocation_that_the_layout_does_not_count():
    words = "-N 2 --ranks-per-node 3 --spares 2 -- train --tp 4 --set model.heads=4"
    text = written([*words.split(), "--set", "run.on_failure=continue"])
    assert "start=(mpitrain launch --launcher mpirun --spares 2 --fault-tolerant --)" in text


def test_an_option_of_sbatch_goes_into_the_script_in_place_of_its_own():
    words = "-N 2 -p gpu -q debug --gres gpu:1 --mem 4G --job-name mine -o log --exclusive"
    text = written([*words.split(), "--ntasks-per-node", "3", "--", "train"])
    lines = [line.split("  #")[0].rstrip() for line in text.splitlines() if "#SBATCH" in line]
    wanted = "nodes=2 partition=gpu qos=debug gres=gpu:1 mem=4G job-name=mine output=log exclusive"
    for option in [*wanted.split(), "ntasks-per-node=3"]:
        name = f"#SBATCH --{option.split('=')[0]}"
        assert [line for line in lines if line.split("=")[0] == name] == [f"#SBATCH --{option}"]
    refused = CliRunner().invoke(
        commands, ["slurm", "--pbs", "--cores-per-rank", "1", "--qos", "a", "--", "train"]
    )
    assert "--qos is an option of Slurm" in str(refused.exception)


@pytest.mark.parametrize("out", ("a b", "it's", 'a"b', "$(touch gone)", "`x`", "a\\b"))
def test_a_script_names_the_run_directory_literally(out):
    lines = written(["--", "train", "--out", out]).splitlines()
    line = next(line for line in lines if line.startswith("run="))
    done = subprocess.run(["bash", "-c", f'{line}; echo "$run"'], capture_output=True, text=True)
    assert done.stdout == f"{out}\n"


@pytest.mark.parametrize(
    "words, wanted",
    [
        ("--nodes 2 -- train --dp 3", "needs 3 ranks, but 4"),
        ("-- train --set model.widht=3", "model.width"),
        ("-- train --grace 0", "run.grace"),
        ("-- train --algorithm rign", "did you mean ring"),
        ("-- train --device cuda", "--gpus-per-node"),
        ("-- train missing.toml", "missing.toml"),
        ("--time soon -- train", "'soon'"),
        ("--time 0 -- train", "'0'"),
        ("--env conda -- train", "conda"),
        ("--sweep optimizer.lr=1 -- train", "optimizer.lr=1"),
        ("--sweep optimizer.lr=0.1,x -- train", "optimizer.lr"),
        ("--sweep optimizer.lr=0.1,0.2 -- train --out a", "--out is a"),
        ("--sweep optimizer.lr=0.1,0.2 -- generate a", "generate"),
        ("--spares 2 -- train", "2 rank(s) cannot have 2 spare(s)"),
        ("--spares 1 -- train", "run.on_failure is end"),
        ("--spares 1 -- bench all-reduce", "the command is bench"),
        ("--spares 1 --env apptainer:x.sif -- python -c 1", "apptainer:x.sif starts an image"),
        ("--pbs -- train", "--cores-per-rank"),
        ("--pbs --cores-per-rank 2 --submit -- train", "PBS"),
        ("-- bench alreduce", "alreduce"),
        ("-- bench", "Missing command"),
        ("-- launch -n 2 -- train", "launch"),
        ("-- nothing", "nothing"),
        ("-- mpitrain", "neither an mpitrain command nor a Python file"),
        ("-- python gone.py", "the file gone.py, but there is none here"),
        ("-- /bin/true", "/bin/true is another program"),
        ("--sweep lr=1 -- jobs/slurm/own_program.py", "lr=1"),
        ("--sweep lr=1,2 --checkpoint a -- jobs/slurm/own_program.py", "is a sweep"),
        ("--checkpoint a -- train", "runs train"),
        ("--sweep run.steps=1,2 --sweep run.steps=3,4 -- train", "run.steps"),
        ("--partition 'a#b' -- train", "without #"),
    ],
)
def test_a_wrong_request_is_refused_before_it_waits(words, wanted):
    done = CliRunner().invoke(commands, ["slurm", *shlex.split(words)])
    assert getattr(done.exception, "exit_code", done.exit_code) == 2, done
    said = f"{done.exception} {done.output}"
    assert wanted in " ".join(said.split()) and "#!/bin/bash" not in said
