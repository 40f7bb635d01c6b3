"""Jobs that do not train one run: benchmarks, sweeps and generated text."""

import json
import os
import signal

from tests.processes import sets
from tests.slurm.conftest import JOB

TWO = ("--nodes", "2", "--ranks-per-node", "2", "--time", "9")
SMALL = ("--min-bytes", "4", "--max-bytes", "4K", "--factor", "32")


def test_a_benchmark_keeps_its_rows_under_the_number_of_the_job(cluster):
    number = cluster.submit(cluster.script(*TWO, "--", "bench", "allreduce", *SMALL))
    assert cluster.ended(number)[0][:2] == ("COMPLETED", "0")
    found = json.loads((cluster.folder / f"bench-allreduce-{number}.json").read_text())
    assert found["rows"]


def test_a_benchmark_fails_if_a_rank_fails(cluster):
    text = cluster.script(*TWO, "--", "bench", "allreduce", "--max-bytes", "64M")
    number = cluster.submit(text)
    cluster.until(lambda: len(cluster.ranks(number)) >= 4, "the ranks")
    os.kill(max(cluster.ranks(number)), signal.SIGKILL)
    assert cluster.ended(number)[0][0] == "FAILED"


def test_a_sweep_trains_each_run_draws_all_and_generates(cluster):
    words = ["--nodes", "1", "--ranks-per-node", "2", "--time", "9", "--cores-per-rank", "1"]
    text = cluster.script(
        *words, "--sweep", "optimizer.lr=0.001,0.004", "--", "train", *JOB, *sets(run__steps=6)
    )
    number = cluster.submit(text)
    assert [one[:2] for one in cluster.ended(number)] == [("COMPLETED", "0")] * 2
    folder = cluster.folder / f"runs/sweep-{number}"
    names = [f"optimizer.lr={lr}" for lr in ("0.001", "0.004")]
    assert sorted(path.name for path in folder.glob("[!.]*")) == names
    assert (cluster.folder / f"runs/sweep-{number}.png").stat().st_size > 1000
    text = cluster.script("--time", "9", "--", "generate", f"runs/sweep-{number}/{names[0]}")
    job = cluster.submit(text)
    assert cluster.ended(job)[0][:2] == ("COMPLETED", "0")
    assert len((cluster.folder / f"mpitrain-{job}.out").read_text()) > 100
    job = cluster.submit(text.replace(f"sweep-{number}", "gone"))
    assert cluster.ended(job)[0][:2] == ("FAILED", "2")
