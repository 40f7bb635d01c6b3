"""Jobs on the Slurm that `cluster.sh` brings up: submitted by the scripts of `mpitrain slurm`, and watched."""

import json
import os
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import SECONDS, TINY_STEPS, mpitrain, run, sets

ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED"}
# Root may start ranks with mpirun, and nodes have more cores than the machine.
ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # All nodes are on one host: its cores are fewer, and other interfaces may come and go.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "MPITRAIN_VENV": sys.prefix,
}
JOB = [*TINY_STEPS, *sets(run__log_every=1, run__sample=0, run__eval_rows=6)]
"""Options of a small job, whose steps take no time."""


def pytest_collection_modifyitems(items):
    """A test waits for the queue and for time limits, so it has more time than others."""
    for item in items:
        if "tests/slurm" in str(item.path):
            item.add_marker(pytest.mark.slow)
            item.add_marker(
                pytest.mark.skipif(
                    not os.environ.get("MPITRAIN_SLURM"), reason="needs tests/slurm/run.sh"
                )
            )


class Cluster:
    """The Slurm of a test, with a folder in which jobs are submitted."""

    def __init__(self, folder):
        self.folder = folder
        # The tests of one host set OMPI_MCA_ variables that exclude the network.
        plain = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_MCA_")}
        self.environment = {**plain, **ROOT}

    def script(self, *words, drop=()):
        """The text of a batch script, without the lines that contain one of `drop`."""
        done = mpitrain("slurm", *words, cwd=self.folder, env=self.environment)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines(keepends=True)
        return "".join(line for line in lines if not any(word in line for word in drop))

    def submit(self, text, *words):
        """Submit a script with more options of sbatch, and return the job's number."""
        path = self.folder / "job.sbatch"
        path.write_text(text)
        done = run(["sbatch", "--parsable", *words, path], cwd=self.folder, env=self.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @contextmanager
    def configured(self, line):
        """Add a line to the configuration of the site, and take it out again."""
        path = Path("/etc/slurm/slurm.conf")
        before = path.read_text()
        try:
            path.write_text(f"{before}{line}\n")
            assert run(["scontrol", "reconfigure"]).returncode == 0
            yield
        finally:
            path.write_text(before)
            assert run(["scontrol", "reconfigure"]).returncode == 0

    def records(self, job):
        """The fields of the job, or of each task of its array."""
        done = run(["scontrol", "show", "job", "--oneliner", job])
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in done.stdout.splitlines() if line]

    def until(self, claim, what):
        deadline = time.monotonic() + SECONDS
        while not claim():
            assert time.monotonic() < deadline, (what, self.logs())
            time.sleep(0.3)

    def ended(self, job):
        """Wait for the end; return (state, exit code, restarts) of each task."""
        self.until(lambda: not any(r["JobState"] in ACTIVE for r in self.records(job)), job)
        return [
            (r["JobState"], r["ExitCode"].split(":")[0], int(r["Restarts"]))
            for r in self.records(job)
        ]

    def logs(self):
        return {path.name: path.read_text()[-3000:] for path in self.folder.glob("*.out")}

    def metrics(self, run_dir):
        path = self.folder / run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def losses(self, run_dir):
        return {one["step"]: one["loss"] for one in self.metrics(run_dir) if "loss" in one}

    def trains(self, run_dir, step):
        """Wait until the run has done this step."""
        self.until(lambda: any(s >= step for s in self.losses(run_dir)), run_dir)

    def ranks(self, job):
        """{process: its environment} of the ranks that srun started for the job."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                texts = (folder / "environ").read_text(errors="replace").split("\0")
            except OSError:
                continue
            environ = dict(text.split("=", 1) for text in texts if "=" in text)
            if environ.get("SLURM_JOB_ID") == job and b"mpitrain_launched" in words:
                if words[0].endswith(b"srun") or b"mpirun" in words[0]:
                    continue
                found[int(folder.name)] = environ
        return found


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    run(["scancel", "--user=root"])
