"""jobs/train.sbatch without Slurm: where it finds its environment, and when it queues itself again."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import SECONDS, run

ROOT = Path(__file__).parents[3]
NONE = {
    name: value
    for name, value in os.environ.items()
    if name not in ("MPITRAIN_VENV", "VIRTUAL_ENV")
}


def environment(folder, programs):
    """A virtual environment with these programs, by their text."""
    (folder / "bin").mkdir(parents=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "bin/activate").write_text(f"PATH={folder}/bin:$PATH\n")
    return folder


@pytest.mark.parametrize(
    "variable, at, runs",
    [
        ("MPITRAIN_VENV", "elsewhere/env", True),
        ("VIRTUAL_ENV", "elsewhere/env", True),
        ("", "here/.venv", True),
        ("", "elsewhere/.venv", False),
        ("MPITRAIN_VENV", "", False),
    ],
)
def test_the_batch_script_works_from_any_folder(variable, at, runs, tmp_path):
    """Slurm runs a copy, from whose place nothing can be told; mpitrain is on PATH only where the environment puts it there."""
    (tmp_path / "here").mkdir()
    (tmp_path / "spool").mkdir()
    script = shutil.copy(ROOT / "jobs/train.sbatch", tmp_path / "spool/slurm_script")
    named = {variable: str(tmp_path / (at or "nowhere"))} if variable else {}
    if at:
        environment(tmp_path / at, {"mpitrain": 'echo "$PWD: $@"; exit 0'})
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path / "here"), "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"}
    done = run(
        ["bash", script, "own.toml"],
        cwd=tmp_path / "spool",
        env={**NONE, "PATH": "/usr/bin:/bin", **slurm, **named},
    )
    if runs:
        line = f"{tmp_path}/here: launch -n 4 -- train --out runs/slurm-17 --resume=auto own.toml\n"
        assert done.returncode == 0 and done.stdout.startswith(line), done
    else:
        wanted = named.get("MPITRAIN_VENV", tmp_path / "here/.venv")
        assert done.returncode == 2 and done.stdout == "", done
        assert done.stderr == (
            f"train.sbatch: no mpitrain in {wanted}. Name its environment: "
            "MPITRAIN_VENV=/path/to/.venv sbatch ...\n"
        )


@pytest.mark.parametrize(
    "asked, ends, requeued",
    [
        ("USR1", 85, True),
        ("TERM", 85, False),
        ("USR1 TERM", 85, False),
        ("", 0, False),
        ("", 1, False),
        ("USR1", 1, False),
    ],
)
def test_the_batch_script_queues_itself_again_only_near_its_time_limit(
    asked, ends, requeued, tmp_path
):
    """With a launcher that waits to be asked as often as it will be, and a scontrol that notes its words."""
    programs = {
        "mpitrain": f"n=0; trap 'n=$((n+1))' USR1 TERM; echo $$ > pid\nwhile [ ! -e go ]; do sleep 0.02; done; exit {ends}",
        "scontrol": 'echo "$@" > requeued',
    }
    environment(tmp_path / ".venv", programs)
    job = subprocess.Popen(
        ["bash", str(ROOT / "jobs/train.sbatch")],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        env={**NONE, "SLURM_NTASKS": "2", "SLURM_JOB_ID": "17"},
    )
    deadline = time.monotonic() + SECONDS
    while (
        not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    for name in asked.split():
        job.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.2)  # the shell takes one after the other
    (tmp_path / "go").touch()
    assert job.wait(SECONDS) == (0 if requeued else ends)
    assert (tmp_path / "requeued").exists() == requeued
