"""A run with rows of a plugin trains on two ranks, and goes on only with the same plugin."""

import json
import shutil
from pathlib import Path

from tests.processes import launch, mpitrain

TOYS = Path(__file__).parents[1] / "toys.py"


def test_a_run_with_a_plugin_needs_the_same_file_later(tmp_path):
    plugin = shutil.copy(TOYS, tmp_path)
    (tmp_path / "run.toml").write_text(
        'run = {plugins = ["toys.py"], sample = 0, eval_rows = 8}\n'
        'data = {source = "toy"}\n'
        'model = {kind = "toy-bigrams", layers = 1, width = 16, context = 16}\n'
        'replication = {mode = "toy", algorithm = "toy-ring"}\n'
        'pipeline = {schedule = "toy-gpipe"}\n'
        'optimizer = {name = "toy-sgd"}\n'
    )
    start = ["train", tmp_path / "run.toml", "--out", tmp_path / "run", "--dp", 2]

    def go(*words):
        return launch(2, *start, *words)

    assert go("--set", "run.steps=2").returncode == 0
    assert go("--set", "run.steps=4", "--resume").returncode == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    last = {"event": "end", "step": 4, "replicas_equal": True}
    assert json.loads(lines[-1]).items() >= last.items()
    refused = mpitrain("eval", tmp_path / "run")
    assert (refused.returncode, f"plugin {plugin}" in refused.stderr) == (2, True)
    done = mpitrain("eval", tmp_path / "run", "--plugin", plugin)
    assert done.returncode == 0 and "at step 4" in done.stdout
    with open(plugin, "a") as file:
        file.write("# another\n")
    refused = go("--set", "run.steps=6", "--resume")
    assert refused.returncode == 2 and refused.stderr.count("ConfigError") == 1
    assert "Traceback" not in refused.stderr and f"plugin {plugin}" in refused.stderr
