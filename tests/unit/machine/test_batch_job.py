"""The end of a Slurm job, read from a stand-in for `squeue`."""

import os
import time
from contextlib import closing

import pytest

from mpitrain.machine.time_limit import JobEnd
from tests.processes import SECONDS

END = 1_800_000_000


def job(folder, body):
    """The environment of job 17, with an squeue of this text, if there is any."""
    if body is not None:
        (folder / "squeue").write_text(f"#!/bin/bash\n{body}\n")
        (folder / "squeue").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "17"}


def wait(claim):
    until = time.monotonic() + SECONDS
    while not claim() and time.monotonic() < until:
        time.sleep(0.01)
    assert claim()


def test_the_end_of_the_job_is_asked_of_squeue_again_and_again(tmp_path):
    ends = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(END + more)) for more in (0, 60)]
    body = f"""[ "$SLURM_TIME_FORMAT $*" = "standard --noheader --jobs=17 --format=%e" ] || exit 1
if [ -e '{tmp_path}/moved' ]; then echo {ends[1]}; else echo {ends[0]}; fi"""
    with closing(JobEnd(job(tmp_path, body), every=0.05)) as end:
        wait(lambda: end() == END)
        (tmp_path / "moved").touch()
        wait(lambda: end() == END + 60)


@pytest.mark.parametrize("body", (None, "echo N/A", "echo nonsense", "echo >&2 down; exit 1"))
def test_without_an_answer_no_end_is_known(body, tmp_path, capfd):
    environment = {**job(tmp_path, body), "PATH": str(tmp_path) if body is None else os.defpath}
    if body is not None:
        environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    with closing(JobEnd(environment, every=0.01)) as end:
        time.sleep(0.3)
        assert end() is None
    assert capfd.readouterr() == ("", "")


def test_outside_a_job_nothing_is_asked(tmp_path):
    environment = job(tmp_path, f"touch '{tmp_path}/asked'")
    del environment["SLURM_JOB_ID"]
    with closing(JobEnd(environment, every=0.01)) as end:
        time.sleep(0.1)
        assert end() is None and not (tmp_path / "asked").exists()


def test_an_squeue_that_hangs_delays_neither_calls_nor_the_close(tmp_path):
    began = time.monotonic()
    environment = job(tmp_path, f"echo $$ > '{tmp_path}/pid'; exec sleep {10 * SECONDS:.0f}")
    with closing(JobEnd(environment)) as end:
        wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        assert end() is None
    pid = int((tmp_path / "pid").read_text())
    wait(lambda: not os.path.exists(f"/proc/{pid}"))
    assert time.monotonic() - began < SECONDS
