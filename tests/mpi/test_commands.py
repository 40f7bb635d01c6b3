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
from safetensors.numpy import load_file

from mpitrain.cli.launch.command import library
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
    skip_without,
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


def test_a_run_leaves_what_it_promises(tmp_path):
    ranks = 2
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The "}\n{"prompt": "x"}\n')
    several = ["generate", "run", "--prompts", "prompts.jsonl", "--tokens", "20", "--json"]
    calls = [
        ["train", "--out", "run", *TINY, *sets(run__eval_every=0, run__sample=40)],
        ["eval", "run"],
        ["generate", "run", "--prompt", "The ", "--tokens", "20"],
        several,
        [*several, "--stop="],
    ]
    said, printed = calls_of_one_start(ranks, calls, tmp_path, [0, 0, 0, 0, 2])
    trained, evaluated, written, listed, _ = printed
    assert "validation loss" in trained and "sample of what it writes" in trained
    assert "the run is in run; next:\n  mpitrain eval run\n  mpitrain generate run\n" in trained
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
    assert f"validation loss {lines[-2]['val_loss']:.4f}" in evaluated
    assert written.startswith("The ") and len(written.encode(errors="surrogateescape")) >= 24
    texts = [json.loads(line) for line in listed.splitlines()]
    assert [(text["prompt"], len(text["tokens"])) for text in texts] == [("The ", 20), ("x", 20)]
    assert [text["ended"] for text in texts] == ["tokens"] * 2
    assert said[-1].count("ConfigError") == 1


def test_a_run_is_evaluated_and_goes_on_with_its_own_model_alone(tmp_path):
    task = {"context": "The ", "choices": ["cat", "dog"], "answer": 0}
    tasks = f"{json.dumps(task)}\n{json.dumps({**task, 'answer': 1})}\n"
    (tmp_path / "tasks").write_text(tasks)
    (tmp_path / "malformed").write_text(f"{tasks}{{}}\n")
    train = ["train", "--out", "run"]
    refused = {
        "run already holds a run": [*train, *TINY],
        "model: model.heads 2 -> 4": [*train, "--resume", *sets(model__heads=4)],
        "model: optimizer.name 'adamw' -> 'sgd'": [
            *train,
            "--resume",
            *sets(optimizer__name="sgd"),
        ],
        "Line 3 of malformed": ["eval", "run", "--tasks", "malformed"],
    }
    calls = [
        [*train, *TINY],
        *refused.values(),
        ["eval", "run", "--json", "scores.json", "--tasks", "tasks"],
        ["eval", "run", "--json", "loss.json"],
        ["train", "--resume", *sets(run__out="run", run__steps=14)],
    ]
    said, printed = calls_of_one_start(2, calls, tmp_path, [0, 2, 2, 2, 2, 0, 0, 0])
    for complaint, text in zip(refused, said[1:], strict=False):
        assert text.count(complaint) == 1, text
    assert "acc 50.0% +- 50.0%" in printed[-3]
    scores, loss = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("scores", "loss")
    )
    assert scores["count"] == 2 and scores["acc"] == scores["acc_norm"] == 0.5
    assert scores["log_likelihoods"][0] == scores["log_likelihoods"][1]
    assert math.isclose(loss["perplexity"], math.exp(loss["loss"]))
    assert f"perplexity {loss['perplexity']:.4g}" in printed[-2]
    lines = records(tmp_path / "run")
    events = [r["event"] for r in lines if r.get("event") in ("start", "resume", "end")]
    assert events == ["start", "resume", "end"] and [*losses(tmp_path / "run")] == [*range(1, 15)]


def test_classifier_runs_on_digits(tmp_path):
    skip_without("sklearn")
    shape = sets(data__source="digits", model__layers=1, model__width=64)
    rate = sets(run__steps=200, optimizer__lr="4e-3")
    done = mpitrain("train", "--out", "run", *shape, *rate, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert next(r for r in records(tmp_path / "run") if "val_loss" in r)["val_accuracy"] > 0.9


SLOWLY = sets(run__delay="0:100")
"""Steps without it could end before a signal arrives on a busy machine."""


def interrupted(ranks, settings, begins, stop, folder):
    """The exit code of a launched run in cut/ and what it said, if `stop(process)` is called at a line that begins so."""
    run = subprocess.Popen(
        [*PROGRAM, "launch", "-n", str(ranks), "--", "train", "--out", "cut", *settings, *SLOWLY],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in run.stdout:
        if line.startswith(begins):
            stop(run)
            break
    said, _ = run.communicate(timeout=SECONDS)
    return run.returncode, said


def test_an_interrupted_run_goes_on_bitwise_as_if_it_had_not_stopped(tmp_path):
    ranks, number = 2, signal.SIGTERM
    many = [*TINY, *sets(run__steps=30)]
    code, said = interrupted(ranks, many, "step  3/", lambda run: run.send_signal(number), tmp_path)
    assert code == 85, said
    stopped = records(tmp_path / "cut")[-1]
    assert stopped["event"] == "stopped" and 3 <= stopped["step"] < 30
    calls = [
        ["train", "--out", "whole", *many],
        ["train", "--out", "cut", "--resume", *sets(run__delay="")],
    ]
    calls_of_one_start(ranks, calls, tmp_path, code=0)
    assert (
        losses(tmp_path / "cut") == losses(tmp_path / "whole")
        and len(losses(tmp_path / "cut")) == 30
    )
    one, other = (
        parameters(tmp_path / run / "checkpoints/step-00000030") for run in ("whole", "cut")
    )
    assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_a_killed_run_resumes_on_another_number_of_ranks(tmp_path):
    settings = [
        *TINY,
        *sets(run__steps=15, run__eval_every=5, checkpoint__every=5, precision__compute="float64"),
    ]
    code, said = interrupted(
        2,
        settings,
        "step  7/",
        lambda run: os.kill(ranks_below(run.pid)[1], signal.SIGKILL),
        tmp_path,
    )
    assert code not in (0, 2, 85)
    assert re.search(r"mpitrain launch: rank [01] on \S+ was killed: signal 9", said), said
    calls = [
        ["train", "--out", "whole", *settings],
        ["train", "--out", "cut", "--resume=auto", *sets(run__delay="")],
    ]
    calls_of_one_start(3, calls, tmp_path, code=0)
    one, other = losses(tmp_path / "whole"), losses(tmp_path / "cut")
    assert one.keys() == other.keys() and len(one) == 15
    for step in one:
        assert np.all(np.abs(np.subtract(one[step], other[step])) <= 1e-9), step
    assert [r["step"] for r in records(tmp_path / "cut") if "val_loss" in r] == [5, 10, 15]


MISTAKES = [
    (sets(model__widht=3), "There is no key model.widht; did you mean model.width?"),
    (
        sets(data__source="text:nowhere.txt"),
        "The data file nowhere.txt cannot be read: No such file or directory.",
    ),
    (sets(data__source="text:pipe"), "The data file pipe cannot be read: it is not a regular file"),
    (["--no-such-option"], "No such option"),
    (["--gemm", "blas"], "device.gemm must be 'tiled', '3xtf32', 'library' or 'auto',"),
    (["--dp", "3"], "dp 3 x tp 1 x pp 1 needs 3 ranks, but 2 were started."),
    (["--resume", "--out", "nothing"], "There is no run in nothing to resume."),
    (sets(data__source="text:empty.txt"), "empty.txt is empty."),
    (
        sets(data__source="text:short.txt"),
        "The held-out tenth of short.txt must hold a context of 128 tokens",
    ),
    (["broken.toml"], "broken.toml is not TOML"),
    (["nowhere.toml"], "The configuration file nowhere.toml cannot be read"),
    (sets(replication__tuning="empty.txt"), "empty.txt is no tuning file"),
    (sets(model__width=4000000), "need"),
    (["--resume"], "--resume needs the directory of the run."),
    (["--out", "empty.txt/run"], "The run directory empty.txt/run cannot be written"),
    (["--dp", "two"], "'two' is not a valid integer"),
    (["--out", "n" * 300], "File name too long"),
    (["--resume", "--out", "n/" * 3000], "File name too long"),
    (sets(data__source="idx:" + "n" * 5000), "File name too long"),
    (sets(batch__size="9" * 5000), "batch.size must be a valid integer"),
    (["--dp", "1" + "0" * 400], "layout.dp must be a whole number of at most 64 bits"),
    (["pipe"], "The configuration file pipe cannot be read: it is not a regular file"),
    (
        sets(replication__tuning="pipe"),
        "The tuning file pipe cannot be read: it is not a regular file.",
    ),
    (sets(replication__tuning="garbage"), "garbage is no tuning file"),
    (["n" * 5000], "File name too long"),
    (["x" * 5000, "y" * 5000], "unexpected extra argument"),
]


def test_every_mistake_is_one_message_and_exit_2_on_all_ranks(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "broken.toml").write_text("[run\nsteps = ")
    (tmp_path / "garbage").write_text(
        json.dumps({"machine": {}, "plans": {"y " * 9000: {}}, "whole": {}})
    )
    os.mkfifo(tmp_path / "pipe")
    said, _ = calls_of_one_start(2, [["train", *words] for words, _ in MISTAKES], tmp_path, code=2)
    for (_, complaint), text in zip(MISTAKES, said, strict=True):
        assert text.count(complaint) == 1 and "Traceback" not in text and len(text) < 1200, text
    words, complaint = MISTAKES[0]
    done = launch(2, "train", *words, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count(complaint) == 1, done.stderr
    assert not any(noise in done.stderr for noise in ("Traceback", "-----", "PMIX", "prterun")), (
        done.stderr
    )
    assert not any(tmp_path.glob("**/metrics.jsonl")), "nothing may be trained"


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


def test_a_diverging_run_stops_or_skips_steps_and_is_evaluated_with_one_error(tmp_path):
    wild = sets(optimizer__name="sgd", optimizer__lr="1e30", optimizer__warmup=0)
    unclipped = [*TINY, *wild, *sets(optimizer__clip=0)]
    complaints = (
        "run.on_nonfinite=skip",
        "may not skip 10 steps in a row",
        "TrainingError: The model's output is not finite: its validation loss is nan.",
    )
    calls = [
        ["train", "--out", "stop", *unclipped],
        ["train", "--out", "skip", *unclipped, *sets(run__on_nonfinite="skip")],
        ["train", "--out", "run", *TINY, *wild, *sets(run__steps=1)],
        ["eval", "run"],
    ]
    said, printed = calls_of_one_start(2, calls, tmp_path, [1, 1, 0, 1])
    for complaint, text in zip(complaints, (said[0], said[1], said[3]), strict=True):
        assert text.count("TrainingError") == text.count(complaint) == 1, text
        assert "Traceback" not in text
    assert any(r.get("nonfinite") and r["loss"] is None for r in records(tmp_path / "stop"))
    assert sum(r.get("skipped", False) for r in records(tmp_path / "skip")) == 10
    assert "at step 1" in printed[-1] and "lower optimizer.lr" in said[-1]


def test_runs_started_together_do_not_share_a_directory(tmp_path):
    def started(*words):
        runs = [
            subprocess.Popen(
                [*PROGRAM, "train", *TINY, *words],
                cwd=tmp_path,
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for _ in range(2)
        ]
        said = "".join(run.communicate(timeout=SECONDS)[1] for run in runs)
        return sorted(run.returncode for run in runs), said

    codes, said = started()
    assert codes == [0, 0], said
    folders = list(tmp_path.glob("runs/*"))
    assert len(folders) == 2 and all(records(folder)[-1]["event"] == "end" for folder in folders)
    codes, said = started("--out", "one")
    assert codes == [0, 2], said
    assert "one already holds a" in said or "A run is going" in said or "meanwhile" in said


def test_a_moved_run_evaluates_other_tokens_and_needs_no_data(tmp_path):
    generator = np.random.default_rng(0)
    (tmp_path / "here").mkdir()
    generator.integers(60, size=3000).astype("<u2").tofile(tmp_path / "here/train.bin")
    generator.integers(50, size=3000).astype("<u2").tofile(tmp_path / "here/val.bin")
    source = sets(data__source="tokens:train.bin")
    done = mpitrain("train", "--out", "run", *TINY, *source, cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    (tmp_path / "here/run").rename(tmp_path / "moved")
    resumed = mpitrain("train", "--out", "moved", "--resume", *sets(run__steps=14), cwd=tmp_path)
    assert resumed.returncode == 0 and "run.steps 12 -> 14" in resumed.stdout, resumed.stderr
    (tmp_path / "here/train.bin").unlink()
    mistakes = {
        "60": "Tokens must lie in 0..59",
        "x": "takes numbers as its prompt",
        "": "at least one token",
    }
    calls = [
        ["eval", "moved", "--data", "tokens:here/val.bin"],
        ["generate", "moved", "--prompt", "3 59", "--tokens", "5"],
        *(["generate", "moved", "--prompt", prompt] for prompt in mistakes),
    ]
    said, (evaluated, written, *_) = calls_of_one_start(2, calls, tmp_path, [0, 0, 2, 2, 2])
    assert "validation loss" in evaluated and len(written.split()) == 7
    for complaint, text in zip(mistakes.values(), said[2:], strict=True):
        assert text.count(complaint) == 1, text


def test_a_directory_with_an_odd_name_is_the_one_that_was_named_or_refused(tmp_path):
    odd, unwritable = 'runs/"q" \U0001f600', os.fsdecode(b"runs/\xff")
    calls = [
        ["train", "--out", odd, *TINY],
        ["train", "--out", unwritable, *TINY],
        ["train", "--out", odd, "--resume", *sets(run__steps=14)],
    ]
    said, _ = calls_of_one_start(1, calls, tmp_path, [0, 2, 0])
    assert "run.out must be UTF-8" in said[1] and max(losses(tmp_path / odd)) == 14
    assert [path.name for path in tmp_path.glob("runs*")] == ["runs"]
    assert [path.name for path in tmp_path.glob("runs/*")] == [Path(odd).name]
    (tmp_path / odd).rename(tmp_path / unwritable)
    evaluated = mpitrain("eval", unwritable, cwd=tmp_path)
    assert evaluated.returncode == 0 and "at step 14" in evaluated.stdout, evaluated.stderr


def test_ranks_prepare_the_files_of_one_process_and_refuse_together(tmp_path):
    (tmp_path / "in.txt").write_text("Once upon a time.\n" * 200_000)
    words = ["data", "prepare", "in.txt", "--tokenizer", "bytes", "--out"]
    assert mpitrain(*words, "one", cwd=tmp_path).returncode == 0
    wrong = [[*words, "other", *more] for more in (["--workers", "2"], ["--separator", "999"])]
    said, printed = calls_of_one_start(2, [[*words, "two"], *wrong], tmp_path, [0, 2, 2])
    assert printed[0].count("separator") == 1
    for name in ("train.bin", "val.bin", "meta.json", "tokenizer.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    for text in said[1:]:
        assert text.count("Error: ") == 1 and "Traceback" not in text, text


def test_a_run_needs_no_locale_and_no_environment(tmp_path):
    plain = dict(os.environ, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    (tmp_path / "c.toml").write_text("# größer\n[run]\nseed = 1\n", encoding="utf-8")
    for out, environment in (("b", plain), ("c", {"PATH": os.environ["PATH"]})):
        done = mpitrain("train", "c.toml", "--out", out, *TINY, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr


def test_processes_that_are_each_alone_are_refused(tmp_path):
    def alone(rank, *program):
        variables = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        world = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in variables.items()}
        return run(program, cwd=tmp_path, env={**os.environ, **world})

    for rank in (0, 1):
        done = alone(rank, *PROGRAM, "train")
        assert done.returncode == 2
        assert done.stderr.count(
            "started 2 processes, but MPI tells each of them that it is alone"
        ) == (rank == 0), done.stderr
    import_it = "import mpitrain\nfrom mpi4py import MPI\n"
    for door in (
        "with mpitrain.ranks(): pass",
        "mpitrain.connect()",
        "mpitrain.from_communicator(MPI.COMM_SELF)",
    ):
        done = alone(0, sys.executable, "-c", f"{import_it}{door}\nprint(1)")
        assert "tells each of them that it is alone" in done.stderr and not done.stdout, done
    code = "from mpitrain.machine import blas_kernels; blas_kernels._child = lambda kernels: 1.0\n"
    code += "from mpitrain.cli import main; main(['doctor'])"  # without the seconds of the products
    warned = alone(0, sys.executable, "-c", code)
    assert warned.stdout.count("warning: Open MPI started 2 processes") == 1, warned


def test_ranks_of_another_library_s_launcher_are_refused_before_mpi_starts(tmp_path):
    by_mpich = {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_RANK": "0", "PMI_SIZE": "2"}
    other = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    is_open = library().family == "Open MPI"
    environment = {**os.environ, **(by_mpich if is_open else other)}
    for program in ("with mpitrain.ranks(): pass", "mpitrain.connect()"):
        code = f"import mpitrain\n{program}\nprint(1)"
        done = run([sys.executable, "-c", code], cwd=tmp_path, env=environment)
        assert done.returncode and not done.stdout and "but mpi4py loads" in done.stderr, done
        assert ("Traceback" in done.stderr) == ("ranks" not in program)


def test_doctor_probes_ranks_that_share_the_cores_between_their_blas_threads(tmp_path):
    free = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    path = tmp_path / "doctor.json"
    done = launch(2, "doctor", "--dir", tmp_path, "--json", path, env=free)
    found = json.loads(path.read_text())
    assert len(found["ranks"]) == 2 and [*found["probes"]] == [*PROBES]
    assert {len(probe["values"]) for probe in found["probes"].values()} == {2}
    assert not found["probes"]["windows"]["problems"] and not found["probes"]["locks"]["problems"]
    wanted = (
        f", {max(1, os.cpu_count() // 2)} thread(s) per rank",
        f"2 rank(s), {len(os.sched_getaffinity(0))}",
        "2 rank(s) can train with --device",
        "CUDA-aware   no, says MPIX_",
        sys.executable,
    )
    assert all(text in done.stdout for text in wanted), done.stdout + done.stderr
