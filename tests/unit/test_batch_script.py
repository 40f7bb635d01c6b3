"""jobs/train.sbatch without Slurm: when it queues itself again."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import SECONDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("asked, ends, requeued", [
    ("USR1", 85, True), ("TERM", 85, False), ("USR1 TERM", 85, False), ("", 0, False), ("", 1, False), ("USR1", 1, False),
])
def test_the_batch_script_queues_itself_again_only_near_its_time_limit(asked, ends, requeued, tmp_path):
    """With a launcher that waits to be asked as often as it will be, and a scontrol that notes its words."""
    programs = {
        "mpitrain": f"n=0; trap 'n=$((n+1))' USR1 TERM; echo $$ > pid\nwhile [ ! -e go ]; do sleep 0.02; done; exit {ends}",
        "scontrol": 'echo "$@" > requeued',
    }
    folder = tmp_path / ".venv/bin"
    folder.mkdir(parents=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "activate").write_text(f"PATH={folder}:$PATH\n")
    job = subprocess.Popen(["bash", str(ROOT / "jobs/train.sbatch")], cwd=tmp_path, stdout=subprocess.DEVNULL,
                           env={**os.environ, "SLURM_NTASKS": "2", "SLURM_JOB_ID": "17"})
    deadline = time.monotonic() + SECONDS
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for name in asked.split():
        job.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.2)    # the shell takes one after the other
    (tmp_path / "go").touch()
    assert job.wait(SECONDS) == (0 if requeued else ends)
    assert (tmp_path / "requeued").exists() == requeued
