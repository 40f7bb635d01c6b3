"""Runs that start from a folder and are exported, as a user types it."""

import numpy as np

from tests.processes import PROGRAM, run
from tests.unit.formats.gpt2_folder import shapes, written

ONE_STEP = ["--set", "run.steps=1", "--set", "run.eval_every=-1", "--set", "run.sample=0"]
SMALL = [*ONE_STEP, "--set", "batch.size=4", "--set", "optimizer.lr=1e-20"]


def test_a_wrong_folder_ends_all_ranks_with_one_error(tmp_path):
    folder = written(tmp_path / "gpt2", n_layer=3)
    train = ["train", *SMALL, "--set", f"run.init_from={folder}", "--out", "run"]
    done = run([*PROGRAM, "launch", "-n", "3", "--", *train], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("CheckpointError") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_model_of_a_folder_of_any_vocabulary_generates_also_by_the_old_word(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {
        name: generator.normal(size=shape).astype("<f4")
        for name, shape in shapes(vocabulary=300).items()
    }
    written(tmp_path / "gpt2", arrays, vocab_size=300)
    words = ["--tokens", "3", "--blocks", "1", "--set", "run.init_from=gpt2"]
    done = run([*PROGRAM, "compare", "--generate", *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "vocabulary 300" in done.stdout
    adapters = ["--set", "lora.rank=2", "--set", "lora.targets=q"]
    done = run([*PROGRAM, "bench", "generate", *words, *adapters], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "transformers" not in done.stdout
