"""The commands as a user runs them, on several ranks: results, files, exit codes, interruptions, mistakes."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mpitrain.tools.doctor.probes import PROBES
from tests.processes import (
    PROGRAM,
    SECONDS,
    calls_of_one_start,
    launch,
    mpitrain,
    python_ranks,
    run,
    sets,
    shell,
)

TINY = sets(
    model__layers=1,
    model__width=16,
    model__heads=2,
    model__context=16,
    batch__size=12,
    run__steps=12,
    run__log_every=1,
    run__eval_every=-1,
    run__sample=0,
    checkpoint__every=0,
    run__eval_rows=60,
)


def ranks_below(pid):
    """The processes below `pid` that have none below them: what the launcher started."""
    below = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [rank for child in below for rank in ranks_below(child)] or [pid]


def records(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def parameters(checkpoint):
    """Every tensor of a model, by its name."""
    return {
        name: tensor
        for file in checkpoint.glob("model-*")
        for name, tensor in load_file(file).items()
    }


def losses(folder):
    return {r["step"]: (r["loss"], r["grad_norm"], r["lr"]) for r in records(folder) if "loss" in r}


@pytest.mark.parametrize("ranks", (1, 3))
def test_a_run_leaves_what_it_promises(ranks, tmp_path):
    done = launch(
        ranks,
        "train",
        "--out",
        "run",
        *TINY,
        *sets(run__eval_every=0, run__sample=40),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout and "a sample of what" in done.stdout
    lines = records(tmp_path / "run")
    assert lines[0]["event"] == "start" and lines[0]["ranks"] == ranks
    step = next(r for r in lines if r.get("step") == 12 and "loss" in r)
    assert {
        "lr",
        "grad_norm",
        "step_s",
        "samples_per_s",
        "tokens_per_s",
        "peak_activation_bytes",
    } <= step.keys()
    assert lines[-2]["val_loss"] > 0
    assert lines[-1]["event"] == "end" and lines[-1]["replicas_equal"] is True
    resolved = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert (
        resolved["layout"]["dp"] == ranks and resolved["run"]["out"] == "." and len(resolved) == 13
    )
    model = parameters(tmp_path / "run/checkpoints/step-00000012")
    assert model["blocks.0.attention.qkv.weight"].shape == (48, 16)
    evaluated = launch(ranks, "eval", "run", cwd=tmp_path)
    assert f"validation loss {lines[-2]['val_loss']:.4f}" in evaluated.stdout, evaluated.stderr
    written = launch(ranks, "generate", "run", "--prompt", "The ", "--tokens", "20", cwd=tmp_path)
    assert written.returncode == 0 and written.stdout.startswith("The "), written.stderr
    assert len(written.stdout.encode(errors="surrogateescape")) >= 24
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The "}\n{"prompt": "x"}\n')
    several = ["generate", "run", "--prompts", "prompts.jsonl", "--tokens", "20", "--json"]
    lines = [json.loads(line) for line in launch(ranks, *several, cwd=tmp_path).stdout.splitlines()]
    assert [(line["prompt"], len(line["tokens"])) for line in lines] == [("The ", 20), ("x", 20)]
    assert [line["ended"] for line in lines] == ["tokens"] * 2
    refused = launch(ranks, *several, "--stop=", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("ConfigError") == 1, refused.stderr


def test_eval_scores_tasks_and_refuses_a_malformed_line_on_all_ranks(tmp_path):
    done = mpitrain("train", "--out", "run", *TINY, *sets(run__steps=1), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    task = {"context": "The ", "choices": ["cat", "dog"], "answer": 0}
    (tmp_path / "tasks").write_text(f"{json.dumps(task)}\n{json.dumps({**task, 'answer': 1})}\n")
    words = ("eval", "run", "--json", "scores.json")
    done = launch(2, *words, "--tasks", "tasks", cwd=tmp_path)
    assert done.returncode == 0 and "acc 50.0% +- 50.0%" in done.stdout, done.stderr
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["count"] == 2 and scores["acc"] == scores["acc_norm"] == 0.5
    assert scores["log_likelihoods"][0] == scores["log_likelihoods"][1]
    with (tmp_path / "tasks").open("a") as file:
        file.write("{}\n")
    done = launch(2, *words, "--tasks", "tasks", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("Line 3 of tasks") == 1, done.stderr
    done = mpitrain(*words, cwd=tmp_path)
    written = json.loads((tmp_path / "scores.json").read_text())
    assert math.isclose(written["perplexity"], math.exp(written["loss"]))
    assert f"perplexity {written['perplexity']:.4g}" in done.stdout


def test_evaluating_a_diverged_model_fails_with_one_error(tmp_path):
    far = ["optimizer.name=sgd", "optimizer.lr=1e30", "optimizer.warmup=0", "run.steps=1"]
    trained = mpitrain(
        "train",
        "--out",
        "run",
        *TINY,
        *(word for setting in far for word in ("--set", setting)),
        cwd=tmp_path,
    )
    assert trained.returncode == 0, trained.stderr
    done = launch(2, "eval", "run", cwd=tmp_path)
    assert done.returncode == 1 and "at step 1" in done.stdout, done.stdout
    assert (
        done.stderr.count(
            "TrainingError: The model's output is not finite: its validation loss is nan."
        )
        == 1
    ), done.stderr
    assert "lower optimizer.lr" in done.stderr and "Traceback" not in done.stderr


def test_the_curve_is_the_same_on_one_to_four_ranks_over_mpi(tmp_path):
    runs = [(1, "ring"), (2, "native"), (3, "shared"), (4, "ring")]
    for ranks, algorithm in runs:
        done = launch(
            ranks,
            "train",
            "--out",
            f"{algorithm}{ranks}",
            *TINY,
            "--set",
            f"replication.algorithm={algorithm}",
            *sets(precision__compute="float64", run__steps=20),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    curves = [
        np.array(list(losses(tmp_path / f"{algorithm}{ranks}").values()))
        for ranks, algorithm in runs
    ]
    assert curves[0].shape == (20, 3) and np.ptp(curves[0][:, 0]) > 0.05
    for curve in curves[1:]:
        assert np.all(np.abs(curve - curves[0]) <= 1e-9 + 1e-9 * np.abs(curves[0]))


def test_a_tuning_file_is_used_and_kept_with_the_run(tmp_path):
    fitted = launch(
        2,
        "bench",
        "fit",
        "--out",
        "tuning.json",
        "--max-bytes",
        "64K",
        "--sweeps",
        "1",
        cwd=tmp_path,
    )
    assert fitted.returncode == 0, fitted.stderr
    done = launch(
        2, "train", "--out", "run", *TINY, *sets(replication__tuning="tuning.json"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/tuning.json").read_text()) == json.loads(
        (tmp_path / "tuning.json").read_text()
    )
    (tmp_path / "tuning.json").unlink()
    assert (
        launch(
            2, "train", "--out", "run", "--resume", *sets(run__steps=14), cwd=tmp_path
        ).returncode
        == 0
    )


def test_classifier_runs_on_digits(tmp_path):
    pytest.importorskip("sklearn")
    done = launch(
        2,
        "train",
        "--out",
        "run",
        *sets(
            data__source="digits",
            model__layers=1,
            model__width=64,
            run__steps=200,
            optimizer__lr="4e-3",
        ),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert next(r for r in records(tmp_path / "run") if "val_loss" in r)["val_accuracy"] > 0.9


SLOWLY = sets(run__delay="0:20")
"""150 steps without it could end before a signal arrives on a busy machine."""


@pytest.mark.parametrize("ranks, number", [(1, signal.SIGINT), (3, signal.SIGTERM)])
def test_an_interrupted_run_goes_on_bitwise_as_if_it_had_not_stopped(ranks, number, tmp_path):
    many = [*TINY, *sets(run__steps=150)]
    whole = launch(ranks, "train", "--out", "whole", *many, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    run = subprocess.Popen(
        [*PROGRAM, "launch", "-n", str(ranks), "--", "train", "--out", "cut", *many, *SLOWLY],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in run.stdout:
        if line.startswith("step  20/"):
            run.send_signal(number)
            break
    output, _ = run.communicate(timeout=SECONDS)
    assert run.returncode == 85, output
    stopped = records(tmp_path / "cut")[-1]
    assert stopped["event"] == "stopped" and 20 <= stopped["step"] < 150
    at_once = sets(run__delay="")
    went_on = launch(ranks, "train", "--out", "cut", "--resume", *at_once, cwd=tmp_path)
    assert went_on.returncode == 0, went_on.stderr
    assert (
        losses(tmp_path / "cut") == losses(tmp_path / "whole")
        and len(losses(tmp_path / "cut")) == 150
    )
    one, other = (
        parameters(tmp_path / run / "checkpoints/step-00000150") for run in ("whole", "cut")
    )
    assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_a_killed_run_resumes_on_another_number_of_ranks(tmp_path):
    settings = [*TINY, *sets(run__steps=60, checkpoint__every=10, precision__compute="float64")]
    assert launch(3, "train", "--out", "whole", *settings, cwd=tmp_path).returncode == 0
    run = subprocess.Popen(
        [*PROGRAM, "launch", "-n", "2", "--", "train", "--out", "cut", *settings],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in run.stdout:
        if line.startswith("step 23/"):
            os.kill(ranks_below(run.pid)[1], signal.SIGKILL)
            break
    said, _ = run.communicate(timeout=SECONDS)
    assert run.returncode not in (0, 2, 85)
    assert re.search(r"mpitrain launch: rank [01] on \S+ was killed: signal 9", said), said
    went_on = launch(3, "train", "--out", "cut", "--resume=auto", cwd=tmp_path)
    assert went_on.returncode == 0, went_on.stderr
    one, other = losses(tmp_path / "whole"), losses(tmp_path / "cut")
    assert one.keys() == other.keys()
    for step in one:
        assert np.all(np.abs(np.subtract(one[step], other[step])) <= 1e-9), step


def test_a_kill_after_a_checkpoint_loses_no_validation_record(tmp_path):
    settings = [*TINY, *sets(run__eval_every=4, run__eval_rows=30, checkpoint__every=4)]
    code = (
        "import os, signal; import mpitrain.run.trainer as t\n"
        "t.Trainer.evaluate = lambda *rest: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"from mpitrain.cli import main; main(['train', '--out', 'run', *{settings!r}])"
    )
    assert python_ranks(2, code, tmp_path).returncode not in (0, 2, 85)
    assert (tmp_path / "run/checkpoints/step-00000004").exists()
    went_on = launch(2, "train", "--out", "run", "--resume", cwd=tmp_path)
    assert went_on.returncode == 0, went_on.stderr
    assert [r["step"] for r in records(tmp_path / "run") if "val_loss" in r] == [4, 8, 12]


def test_a_bad_target_on_one_rank_ends_a_users_program_by_name(tmp_path):
    program = """
import numpy as np
from mpitrain import Plain, Trainer, Unit, connect, normal, ops_for, parse
transport, layers = connect(), Plain(ops_for("cpu"))
trainer = Trainer(transport, [Unit("out", layers.linear(2, 2, normal(0.2)))], parse({}))
for step in range(3):
    trainer.step(step, np.ones((16, 2), "float32"), np.full(16, -101 if (step, transport.rank) == (1, 1) else 1))
"""
    done = python_ranks(2, program, tmp_path)
    assert done.returncode not in (0, 85) and "Traceback" not in done.stderr
    assert "rank 1: DataError: Targets must lie in 0..1, but step 2 on rank 1 (" in done.stderr


MISTAKES = [
    (sets(model__widht=3), "There is no key model.widht; did you mean model.width?"),
    (
        sets(data__source="text:nowhere.txt"),
        "The data file nowhere.txt cannot be read: No such file or directory.",
    ),
    (["--no-such-option"], "No such option"),
]
MORE_MISTAKES = [
    (["--dp", "2"], "dp 2 x tp 1 x pp 1 needs 2 ranks, but 4 were started."),
    (["--resume", "--out", "nothing"], "There is no run in nothing to resume."),
    (sets(run__steps="soon"), "run.steps must be a valid integer, but is 'soon'."),
    (sets(optimizer__lr="nan"), "optimizer.lr must be a finite number, but is nan."),
    (sets(data__source="text:empty.txt"), "empty.txt is empty."),
    (
        sets(data__source="text:short.txt"),
        "The held-out tenth of short.txt must hold a context of 128 tokens",
    ),
    (
        sets(batch__size=3),
        "Each of dp 4 x micro-batches 1 = 4 shares needs a sequence, but batch.size is 3.",
    ),
    (sets(model__heads=3), "model.heads must divide model.width, but 3 does not divide 128."),
    (["broken.toml"], "broken.toml is not TOML"),
    (["nowhere.toml"], "The configuration file nowhere.toml cannot be read"),
    (
        sets(data__source="digits", model__kind="gpt"),
        "The model.kind for digits is mlp or cnn, but the",
    ),
    (sets(replication__tuning="empty.txt"), "empty.txt is no tuning file"),
    (sets(replication__wire="topk:2"), "it is 'topk:2'"),
    (sets(model__width=4000000), "need"),
    (["--resume"], "--resume needs the directory of the run."),
    (["--out", "empty.txt/run"], "The run directory empty.txt/run cannot be written"),
    (["--dp", "two"], "'two' is not a valid integer"),
    (["--out", "n" * 300], "File name too long"),
    (["--resume", "--out", "n/" * 3000], "File name too long"),
    (["--set", 'run.out="a\\u0000"'], "run.out must be text without NUL"),
    (sets(data__source="idx:" + "n" * 5000), "File name too long"),
    (
        sets(model__layers=9223372036854775808),
        "model.layers must be a whole number of at most 64 bits",
    ),
    (sets(batch__size="9" * 5000), "batch.size must be a valid integer"),
    (["--dp", "1" + "0" * 400], "layout.dp must be a whole number of at most 64 bits"),
    (
        sets(optimizer__epsilon="1e-320"),
        "optimizer.epsilon must be 0 or of a size between 1e-30 and 1e+30, but is 1e-320.",
    ),
    (
        sets(run__stall_seconds="1e-9"),
        "run.stall_seconds must be greater than or equal to 1, but is 1e-09.",
    ),
    (["pipe"], "The configuration file pipe cannot be read: it is not a regular file"),
    (
        sets(replication__tuning="pipe"),
        "The tuning file pipe cannot be read: it is not a regular file.",
    ),
    (sets(replication__tuning="garbage"), "garbage is no tuning file"),
    (["n" * 5000], "File name too long"),
    (["x" * 5000, "y" * 5000], "unexpected extra argument"),
]


@pytest.mark.parametrize(
    "words, complaint", MISTAKES, ids=[complaint[:40] for _, complaint in MISTAKES]
)
def test_a_mistake_is_one_message_and_exit_2_on_four_ranks(words, complaint, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "broken.toml").write_text("[run\nsteps = ")
    done = launch(4, "train", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(complaint) == 1, done.stderr
    assert not any(noise in done.stderr for noise in ("Traceback", "-----", "PMIX", "prterun")), (
        done.stderr
    )
    assert not any(tmp_path.glob("runs/*/metrics.jsonl")), "nothing may be trained"


def test_every_mistake_is_one_message_and_exit_2_on_four_ranks(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "broken.toml").write_text("[run\nsteps = ")
    (tmp_path / "garbage").write_text(
        json.dumps({"machine": {}, "plans": {"y " * 9000: {}}, "whole": {}})
    )
    os.mkfifo(tmp_path / "pipe")
    said, _ = calls_of_one_start(
        4, [["train", *words] for words, _ in MORE_MISTAKES], tmp_path, code=2
    )
    for (_, complaint), text in zip(MORE_MISTAKES, said, strict=True):
        assert text.count(complaint) == 1 and "Traceback" not in text and len(text) < 1200, text
    assert not any(tmp_path.glob("**/metrics.jsonl")), "nothing may be trained"


def test_a_file_that_only_one_rank_misses_is_named_with_that_rank(tmp_path):
    code = (
        "import os; from mpi4py import MPI; r = MPI.COMM_WORLD.rank\n"
        "if r == 1: os.chdir('elsewhere')\n"
        "from mpitrain.cli import main; main(['train', '--set', 'data.source=text:book'])"
    )
    (tmp_path / "book").write_text("word " * 1000)
    (tmp_path / "elsewhere").mkdir()
    done = python_ranks(3, code, tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("On rank 1 (") == 1 and "The data file book" in done.stderr, (
        done.stderr
    )


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(tmp_path):
    code = (
        "from mpi4py import MPI; import mpitrain.run.trainer as t\n"
        "real = t.Trainer.step\n"
        "def step(self, index, *rest):\n"
        "    if index == 5 and self.transport.rank == 2: raise ZeroDivisionError('planned')\n"
        "    if index == 5 and self.transport.rank == 0: print('at step 5', flush=True)\n"
        "    return real(self, index, *rest)\n"
        "t.Trainer.step = step\n"
        f"from mpitrain.cli import main; main(['train', '--out', 'run', *{TINY!r}])"
    )
    run = subprocess.Popen(
        ["mpirun", "-n", "3", sys.executable, "-c", code],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for line in run.stdout:
        if "at step 5" in line:
            break
    _, errors = run.communicate(timeout=SECONDS)
    assert run.returncode != 0
    assert "rank 2: ended by an exception" in errors and "ZeroDivisionError: planned" in errors, (
        errors
    )


def test_a_rank_that_stands_still_is_reported_and_ends_the_job(tmp_path):
    code = (
        "import time; import mpitrain.run.trainer as t\n"
        "real = t.Trainer.step\n"
        "def step(self, index, *rest):\n"
        "    if index == 3 and self.transport.rank == 1: time.sleep(60)\n"
        "    return real(self, index, *rest)\n"
        "t.Trainer.step = step\n"
        f"from mpitrain.cli import main; main(['train', '--out', 'run', '--set', 'run.stall_seconds=3.0', *{TINY!r}])"
    )
    done = python_ranks(2, code, tmp_path)
    assert done.returncode != 0
    said = r"^rank 1 on \S+: the run stands still .*rank 1 on \S+ has not moved for \d+ s: step 4"
    assert re.search(said, done.stderr, re.MULTILINE), done.stderr
    assert len(re.findall(said, done.stderr, re.MULTILINE)) == 1, "one rank reports"
    assert "in step\n" in done.stderr, "the innermost frame of rank 1"


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_still_works(tmp_path):
    done = launch(
        2, "train", "--out", "run", *TINY, *sets(run__steps=6, checkpoint__every=3), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    newest = tmp_path / "run/checkpoints/step-00000006"
    path = newest / "model-00002-of-00002.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:])
    refused = launch(2, "train", "--out", "run", "--resume", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("CheckpointError") == 1, refused.stderr
    assert "from step-00000003" in refused.stderr and "Traceback" not in refused.stderr
    for part in newest.iterdir():
        part.unlink()
    newest.rmdir()
    went_on = launch(2, "train", "--out", "run", "--resume", cwd=tmp_path)
    assert went_on.returncode == 0, went_on.stderr
    assert records(tmp_path / "run")[-1]["event"] == "end"


def test_a_directory_that_holds_a_run_is_refused(tmp_path):
    assert mpitrain("train", "--out", "run", *TINY, cwd=tmp_path).returncode == 0
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    again = launch(2, "train", "--out", "run", *TINY, cwd=tmp_path)
    assert again.returncode == 2 and again.stderr.count("run already holds a run") == 1, (
        again.stderr
    )
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_nonfinite_loss_stops_the_run_or_is_skipped_as_configured(tmp_path):
    wild = [
        *TINY,
        *sets(optimizer__name="sgd", optimizer__lr="1e30", optimizer__clip=0, optimizer__warmup=0),
    ]
    stopped = launch(2, "train", "--out", "stop", *wild, cwd=tmp_path)
    assert stopped.returncode == 1 and stopped.stderr.count("TrainingError") == 1, stopped.stderr
    assert "run.on_nonfinite=skip" in stopped.stderr and "Traceback" not in stopped.stderr
    assert any(r.get("nonfinite") and r["loss"] is None for r in records(tmp_path / "stop"))
    skipped = launch(
        2, "train", "--out", "skip", *wild, *sets(run__on_nonfinite="skip"), cwd=tmp_path
    )
    assert (
        skipped.returncode == 1 and skipped.stderr.count("may not skip 10 steps in a row") == 1
    ), skipped.stderr
    assert sum(r.get("skipped", False) for r in records(tmp_path / "skip")) == 10


def test_ranks_that_read_different_configurations_are_refused(tmp_path):
    code = (
        "from mpi4py import MPI; from mpitrain.cli import main\n"
        "main(['train', '--set', f'optimizer.lr={0.1 + MPI.COMM_WORLD.rank}'])"
    )
    done = python_ranks(2, code, tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr.count("All ranks need one configuration, but optimizer.lr is 0.1 on rank 0")
        == 1
    ), done.stderr


def test_runs_started_together_do_not_share_a_directory(tmp_path):
    together = [
        subprocess.Popen([*PROGRAM, "train", *TINY], cwd=tmp_path, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [process.wait(SECONDS) for process in together] == [0, 0, 0]
    for process in together:
        process.stdout.close()
    folders = list(tmp_path.glob("runs/*"))
    assert len(folders) == 3 and all(records(folder)[-1]["event"] == "end" for folder in folders)
    named = [
        subprocess.Popen(
            [*PROGRAM, "train", "--out", "one", *TINY, *sets(run__steps=100)],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    errors = [run.communicate(timeout=SECONDS)[1] for run in named]
    assert sorted(run.returncode for run in named) == [0, 2], errors
    said = "".join(errors)
    assert "one already holds a" in said or "A run is going" in said or "meanwhile" in said


def test_a_moved_run_evaluates_other_tokens_and_needs_no_data(tmp_path):
    generator = np.random.default_rng(0)
    (tmp_path / "here").mkdir()
    generator.integers(60, size=3000).astype("<u2").tofile(tmp_path / "here/train.bin")
    generator.integers(50, size=3000).astype("<u2").tofile(tmp_path / "here/val.bin")
    done = launch(
        2,
        "train",
        "--out",
        "run",
        *TINY,
        *sets(data__source="tokens:train.bin"),
        cwd=tmp_path / "here",
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "here/run").rename(tmp_path / "moved")
    evaluated = mpitrain("eval", "moved", "--data", "tokens:here/val.bin", cwd=tmp_path)
    assert evaluated.returncode == 0 and "validation loss" in evaluated.stdout, evaluated.stderr
    resumed = launch(3, "train", "--out", "moved", "--resume", *sets(run__steps=14), cwd=tmp_path)
    assert resumed.returncode == 0 and "run.steps 12 -> 14" in resumed.stdout, resumed.stderr
    (tmp_path / "here/train.bin").unlink()
    written = mpitrain("generate", "moved", "--prompt", "3 59", "--tokens", "5", cwd=tmp_path)
    assert written.returncode == 0 and len(written.stdout.split()) == 7, written.stderr
    mistakes = (
        ("60", "Tokens must lie in 0..59"),
        ("x", "takes numbers as its prompt"),
        ("", "at least one token"),
    )
    for prompt, complaint in mistakes:
        refused = launch(2, "generate", "moved", "--prompt", prompt, cwd=tmp_path)
        assert refused.returncode == 2 and refused.stderr.count(complaint) == 1, refused.stderr


def test_a_directory_with_an_odd_name_is_the_one_that_was_named_or_refused(tmp_path):
    odd, unwritable = 'runs/"q" \U0001f600', os.fsdecode(b"runs/\xff")
    assert mpitrain("train", "--out", odd, *TINY, cwd=tmp_path).returncode == 0
    again = mpitrain("train", "--out", odd, "--resume", *sets(run__steps=14), cwd=tmp_path)
    assert again.returncode == 0 and max(losses(tmp_path / odd)) == 14, again.stderr
    refused = mpitrain("train", "--out", unwritable, *TINY, cwd=tmp_path)
    assert refused.returncode == 2 and "run.out must be UTF-8" in refused.stderr, refused.stderr
    assert [path.name for path in tmp_path.glob("runs*")] == ["runs"]
    assert [path.name for path in tmp_path.glob("runs/*")] == [Path(odd).name]
    (tmp_path / odd).rename(tmp_path / unwritable)
    evaluated = mpitrain("eval", unwritable, cwd=tmp_path)
    assert evaluated.returncode == 0 and "at step 14" in evaluated.stdout, evaluated.stderr


def test_another_model_cannot_go_on_with_a_checkpoint(tmp_path):
    assert mpitrain("train", "--out", "run", *TINY, cwd=tmp_path).returncode == 0
    for setting in ("model.heads=4", "optimizer.name=sgd"):
        refused = launch(2, "train", "--out", "run", "--resume", "--set", setting, cwd=tmp_path)
        assert refused.returncode == 2 and "run was trained with" in refused.stderr, refused.stderr
    again = mpitrain("train", "--resume", *sets(run__out="run"), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (
        sum("val_loss" in r for r in records(tmp_path / "run")) == 0
        and records(tmp_path / "run")[-1]["event"] == "end"
    )


def test_rank_0_alone_speaks(tmp_path):
    for words in (["--help"], ["--version"], ["train", "--help-config"], ["no-such-command"]):
        done = run(["mpirun", "-n", 3, *PROGRAM, *words])
        said = done.stdout + done.stderr
        assert said.count("Usage:") + said.count("version 0") + said.count("layout.dp = ") == 1, (
            said
        )


def test_a_picture_is_drawn_or_refused_once_however_many_ranks_are_started(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    drawn = launch(3, "plot", ".", cwd=tmp_path)
    assert drawn.returncode == 0 and drawn.stdout.count("drawn in curves.png") == 1, drawn.stderr
    refused = launch(2, "plot", "nowhere", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("There is no run in nowhere") == 1, (
        refused.stderr
    )


def test_ranks_prepare_the_files_of_one_process_and_refuse_together(tmp_path):
    (tmp_path / "in.txt").write_text("Once upon a time.\n" * 200_000)
    words = ["data", "prepare", "in.txt", "--tokenizer", "bytes", "--out"]
    assert mpitrain(*words, "one", cwd=tmp_path).returncode == 0
    done = launch(3, *words, "three", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("separator") == 1, done.stderr
    for name in ("train.bin", "val.bin", "meta.json", "tokenizer.json"):
        assert (tmp_path / "three" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    for more in (["--workers", "2"], ["--separator", "999"]):
        refused = launch(3, *words, "other", *more, cwd=tmp_path)
        assert refused.returncode == 2 and refused.stderr.count("Error: ") == 1, refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_closed_pipe_a_plain_locale_or_an_empty_environment_is_no_traceback(tmp_path):
    tail = shell(
        f"{sys.executable} -m mpitrain train --out a {' '.join(TINY)} | head -n 2", cwd=tmp_path
    )
    assert "Traceback" not in tail.stderr, tail.stderr
    plain = dict(os.environ, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    (tmp_path / "c.toml").write_text("# größer\n[run]\nseed = 1\n", encoding="utf-8")
    for out, environment in (("b", plain), ("c", {"PATH": os.environ["PATH"]})):
        done = mpitrain("train", "c.toml", "--out", out, *TINY, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr


def test_a_pipe_as_data_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    done = launch(2, "train", *sets(data__source="text:pipe"), cwd=tmp_path)
    assert done.returncode == 2 and "The data file pipe" in done.stderr, done.stderr


def test_processes_that_are_each_alone_are_refused(tmp_path):
    for rank in (0, 1):
        alone = dict(
            os.environ,
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_SIZE="2",
            OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
            OMPI_COMM_WORLD_LOCAL_SIZE="2",
        )
        done = mpitrain("train", cwd=tmp_path, env=alone)
        assert done.returncode == 2
        assert done.stderr.count(
            "started 2 processes, but MPI tells each of them that it is alone"
        ) == (rank == 0), done.stderr
        warned = mpitrain("doctor", env=alone)
        assert warned.stdout.count("warning: Open MPI started 2 processes") == (rank == 0), (
            warned.stdout + warned.stderr
        )


def test_ranks_share_the_cores_between_their_blas_threads(tmp_path):
    free = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    path = tmp_path / "doctor.json"
    done = launch(4, "doctor", "--dir", tmp_path, "--json", path, env=free)
    found = json.loads(path.read_text())
    assert len(found["ranks"]) == 4 and [*found["probes"]] == [*PROBES]
    assert {len(probe["values"]) for probe in found["probes"].values()} == {4}
    assert not found["probes"]["windows"]["problems"] and not found["probes"]["locks"]["problems"]
    assert f", {max(1, os.cpu_count() // 4)} thread(s) per rank" in done.stdout, (
        done.stdout + done.stderr
    )
    assert f"4 rank(s), {len(os.sched_getaffinity(0))}" in done.stdout
    assert "4 rank(s) can train with --device" in done.stdout
