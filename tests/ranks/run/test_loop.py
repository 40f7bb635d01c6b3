"""A run from start to end on ranks that are threads: what it evaluates, what it writes, when it stops and when it fails."""

import json
import os
import re
import shlex
import shutil
import socket
import threading
import time
import warnings
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.train import _say_next
from mpitrain.config import with_settings
from mpitrain.data import Unopened, as_it_is
from mpitrain.errors import MpitrainError, TrainingError
from mpitrain.layers.base import backward
from mpitrain.models.table import units_of
from mpitrain.ops.device import device_for
from mpitrain.parallel.replica import Replica
from mpitrain.run import choices, inference, loop, watchdog
from mpitrain.run.build import build, configured, open_run
from mpitrain.run.checkpoint import manifest, saving
from mpitrain.run.checkpoint.manifest import newest
from mpitrain.run.choices import parse
from mpitrain.run.loop import train
from mpitrain.run.metrics import read_metrics
from mpitrain.run.run_dir import checkpoint_of, noted_largest
from mpitrain.run.trainer import Trainer
from mpitrain.tools.report.text import goodput, losses, spent
from mpitrain.trace.recorder import SILENT
from mpitrain.transport.base import Traffic
from mpitrain.transport.threads import run_ranks
from tests.processes import PROGRAM, SECONDS, run
from tests.runs import TINY, go, records, validated


def test_a_stop_request_during_a_step_ends_the_run_after_it(book, tmp_path, monkeypatch):
    computing, begin = set(), Replica.begin

    def compute(self, step, *facts):
        begin(self, step, *facts)
        if step == 2 and self.grid.world.rank == 1:
            computing.add(1)

    monkeypatch.setattr(Replica, "begin", compute)
    assert go(2, book, stop=lambda rank: rank in computing)
    assert newest(tmp_path / "run/checkpoints").name == "step-00000003"


class Killed(BaseException):
    """Stands for a job that dies: no rank hears of it."""


def dies(*arguments, **more):
    raise Killed


@pytest.mark.parametrize(
    "ranks, keys",
    [
        (1, []),
        (2, ["replication.mode=local", "replication.period=5"]),
        (2, ["layout.pp=2", "pipeline.schedule=async", "batch.micro_batches=2"]),
    ],
)
def test_an_evaluation_follows_each_epoch_also_of_a_resume_with_another_batch(
    ranks, keys, tmp_path
):
    lines = [json.dumps({"prompt": f"{n}?", "answer": "yes"}) for n in range(30)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    settings = [*TINY, *keys, f"data.source=jsonl:{tmp_path}/data.jsonl", "data.template={content}"]
    settings += ["model.layers=2", "run.eval_every=epoch", f"run.out={tmp_path}/run"]
    go(ranks, [*settings, "batch.size=8", "run.steps=8"])
    go(ranks, [*settings, "batch.size=4", "run.steps=25"], "yes")
    assert validated(tmp_path) == [4, 7, 8, 13, 19, 25]  # 27 rows are an epoch; the last step, too


@pytest.mark.parametrize("ranks", (1, 3))
@pytest.mark.parametrize("every, due, all_of_them", [(2, 2, [2, 4, 6]), (0, 6, [6])])
def test_a_run_killed_before_its_evaluation_evaluates_on_resume(
    ranks, every, due, all_of_them, book, tmp_path, monkeypatch
):
    settings = [*book, f"run.eval_every={every}", "checkpoint.every=2"]
    monkeypatch.setattr(Trainer, "evaluate", dies)
    with pytest.raises(Killed):
        go(ranks, settings)
    monkeypatch.undo()
    assert newest(tmp_path / "run/checkpoints").name == f"step-{due:08d}" and not validated(
        tmp_path
    )
    for _ in range(2):  # A finished run has nothing left to evaluate.
        go(ranks, settings, "yes")
        assert validated(tmp_path) == all_of_them
    losses = [record["val_loss"] for record in records(tmp_path) if "val_loss" in record]
    go(ranks, [*settings, f"run.out={tmp_path / 'whole' / 'run'}"])
    assert losses == [
        record["val_loss"] for record in records(tmp_path / "whole") if "val_loss" in record
    ]


def test_a_stop_at_an_evaluation_leaves_it_to_the_resumed_run(book, tmp_path):
    steps = []

    def from_step_two(rank):
        steps.append(1)
        return len(steps) >= 2

    settings = [*book, "run.eval_every=2"]
    assert go(1, settings, stop=from_step_two)
    assert (
        records(tmp_path)[-1]["event"] == "stopped"
        and records(tmp_path)[-1]["step"] == 2
        and not validated(tmp_path)
    )
    assert not go(1, settings, "yes")
    assert validated(tmp_path) == [2, 4, 6]


@pytest.mark.parametrize("every, at", [(4, 4), (0, 6)])
def test_a_stop_on_one_rank_ends_the_evaluation_until_the_resume(
    every, at, book, tmp_path, monkeypatch
):
    settings = [*book, f"run.eval_every={every}"]
    batches = Counter()
    losses = inference._losses
    monkeypatch.setattr(
        inference,
        "_losses",
        lambda own, *asked: (batches.update([own.grid.world.rank]), losses(own, *asked))[1],
    )
    assert go(3, settings, stop=lambda rank: rank == 1 and batches[1] == 2)
    assert batches == {0: 3, 1: 3, 2: 3}, (
        "an evaluation of 20 rows by 3 ranks, 2 rows at a time, takes 4 batches"
    )
    assert records(tmp_path)[-1] == {**records(tmp_path)[-1], "event": "stopped", "step": at}
    assert newest(tmp_path / "run/checkpoints").name == f"step-{at:08d}" and not validated(tmp_path)
    assert not go(3, settings, "yes")
    assert validated(tmp_path) == sorted({at, 6})


@pytest.mark.parametrize("ranks", (1, 2, 5))
def test_an_evaluation_has_the_same_rows_on_any_number_of_ranks(ranks, book):
    seen, widest = set(), []

    def run(transport):
        trainer, source, _ = build(
            transport,
            parse(
                with_settings(
                    {}, [*book, "run.eval_rows=7", "batch.size=10", "batch.micro_batches=2"]
                )
            ),
        )
        held_out = source.held_out_rows
        source.held_out_rows = lambda rows: (
            seen.update(rows),
            widest.append(len(rows)),
            held_out(rows),
        )[2]
        return trainer.evaluate(source)

    (alone,) = run_ranks(1, run)
    widest.clear()
    found = run_ranks(ranks, run)
    assert seen == {row * 20 // 7 for row in range(7)}, (
        "spread evenly over the 20 that are held out"
    )
    assert max(widest) <= max(1, 10 // (ranks * 2))
    assert len(set(found)) == 1 and found[0] == pytest.approx(alone, rel=1e-6)


def test_eval_rows_is_a_bound_and_zero_means_all(book):
    def run(transport, rows):
        trainer, source, _ = build(
            transport, parse(with_settings({}, [*book, f"run.eval_rows={rows}"]))
        )
        return trainer.evaluate(source)

    whole = run_ranks(1, run, 0)
    assert run_ranks(1, run, 20) == whole == run_ranks(1, run, 1000) != run_ranks(1, run, 19)


def test_an_opened_run_evaluates_rows_of_a_training_micro_batch(book, tmp_path):
    go(3, [*book, "batch.size=18", "batch.micro_batches=2", "run.eval_every=-1"])
    alone = partial(configured, tmp_path / "run", [])
    for ranks in (1, 2, 4):
        config = run_ranks(ranks, open_run, tmp_path / "run", alone)[0].trainer.config
        assert config.batch.size // (ranks * (config.batch.micro_batches or 1)) == 3


def test_step_time_excludes_checkpoints_and_evaluations(book, tmp_path, monkeypatch):
    now = 0.0

    def takes(place, name, seconds):
        real = getattr(place, name)

        def call(*rest):
            nonlocal now
            now += seconds
            return real(*rest)

        monkeypatch.setattr(place, name, call)

    takes(saving, "begin", 100)
    takes(Trainer, "evaluate", 10)
    takes(Trainer, "step", 1)
    # The clock of the loop alone: others measure with the real one.
    clock = SimpleNamespace(perf_counter=lambda: now, time=time.time)
    monkeypatch.setattr(loop, "time", clock)
    every = ["checkpoint.every=1", "checkpoint.background=false", "run.eval_every=1"]
    go(1, [*book, *every, "run.steps=3", "run.log_every=3"])
    steps = [record for record in records(tmp_path) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 3]
    assert [record["step_s"] for record in steps] == [1, 1]
    assert records(tmp_path)[-1]["wall_s"] == 3 * 111, "the wall clock goes on meanwhile"


def test_a_step_record_has_time_samples_and_communication(book, tmp_path):
    settings = [*book, "checkpoint.every=2", "run.eval_every=2"]
    go(2, settings)
    go(2, [*settings, "run.steps=8"], "yes")
    lines = records(tmp_path)
    walls = [record["wall_s"] for record in lines]
    assert len(walls) == len(lines) and walls == sorted(walls) and walls[0] >= 0, (
        "the clock of a resumed run goes on"
    )
    for record in lines:
        if "loss" in record:
            assert (
                record["samples_seen"] == 6 * record["step"]
                and record["tokens_seen"] == 48 * record["step"]
            )
            assert 0 < record["comm_s"] < record["step_s"]


def test_waiting_for_a_slow_rank_is_communication_that_was_not_hidden(book, tmp_path, monkeypatch):
    step = Trainer.step

    def slow(trainer, *rest):
        if trainer.transport.rank == 1:
            time.sleep(0.2)
        return step(trainer, *rest)

    monkeypatch.setattr(Trainer, "step", slow)
    go(2, [*book, "run.steps=5"])
    waits = [record["comm_s"] for record in records(tmp_path) if "loss" in record]
    assert len(waits) == 5 and median(waits) > 0.1  # a busy machine makes rank 0 late, too


class NotFinite:
    """Makes the losses of the steps in `steps`, counted from 1, NaN."""

    def __init__(self, monkeypatch, steps):
        loss, step = Replica.loss, Trainer.step

        def spoilt(rows, *rest):
            value, gradient = loss(rows, *rest)
            return np.nan if rows.counted in steps else value, gradient

        def counted(trainer, index, *rest):
            trainer.replica.counted = index + 1
            return step(trainer, index, *rest)

        monkeypatch.setattr(Replica, "loss", spoilt)
        monkeypatch.setattr(Trainer, "step", counted)


class Planted:
    """A layer with a NaN in its output, in the gradient of its input, or in that of a parameter."""

    def __init__(self, layer, at, is_now):
        self._layer, self._at, self._is_now = layer, at, is_now

    def __getattr__(self, name):
        return getattr(self._layer, name)

    def forward(self, w, x, now, arena):
        if self._at == "parameter" and self._is_now():
            w["up"]["weight"][-1, -1] = np.nan
        y, saved = self._layer.forward(w, x, now, arena)
        if self._at == "output" and self._is_now():
            y[-1] = np.nan
        return y, saved

    def backward(self, w, dy, saved, dw, arena):
        dx = backward(self._layer, w, dy, saved, dw, arena)
        return self._spoilt(dx, dw)

    def backward_input(self, w, dy, saved, arena):
        dx, pending = self._layer.backward_input(w, dy, saved, arena)
        return self._spoilt(dx, None), pending

    def backward_weight(self, pending, dw, arena):
        self._layer.backward_weight(pending, dw, arena)
        self._spoilt(None, dw)

    def _spoilt(self, dx, dw):
        if self._is_now():
            if self._at == "gradient" and dw is not None:
                dw["up"]["weight"].array[-1, -1] = np.nan
            if self._at == "input" and dx is not None:
                dx[-1] = np.nan
        return dx


UNIT = "blocks.0.mlp"
PLANTED = {
    "parameter": f"the parameter {UNIT}.up.weight",
    "output": f"the output of {UNIT}",
    "input": f"the gradient of the input of {UNIT}",
    "gradient": f"the gradient of {UNIT}.up.weight",
}
MICRO = ["batch.micro_batches=3", "model.layers=2", "model.heads=2"]


@pytest.mark.parametrize("at", PLANTED)
@pytest.mark.parametrize(
    "ranks, planted, settings",
    [
        (1, 0, ["memory.recompute=unit"]),
        (2, 1, []),
        (2, 1, ["layout.tp=2"]),
        (2, 0, ["layout.pp=2", "pipeline.schedule=zero-bubble"]),
        (3, 2, ["replication.zero=2", "batch.size=9"]),
        (2, 0, ["replication.zero=3"]),
        (3, 1, ["replication.mode=master", "batch.micro_batches=1"]),
    ],
    ids=str,
)
def test_a_bad_step_is_located(ranks, planted, settings, at, book, monkeypatch):
    step, micro = Trainer.step, 0 if "batch.micro_batches=1" in settings else 1

    steps = []

    def stepping(trainer, index, *rest):
        steps.append(index)
        if not index and trainer.transport.rank == planted:
            is_now = lambda: steps[-1] == 2 and trainer.pipe.micro == micro  # noqa: E731
            for stage in trainer.pipe.stages.values():
                stage.replace_layers(
                    lambda layer, unit: Planted(layer, at, is_now) if unit == UNIT else layer
                )
        return step(trainer, index, *rest)

    monkeypatch.setattr(Trainer, "step", stepping)
    with pytest.raises(TrainingError, match=r"Step 3 has loss") as error:
        go(ranks, [*book, *MICRO, *settings])
    assert error.value.agreed
    # A parameter stays bad, so it is found in the first micro-batch.
    within = r"\d" if at == "parameter" else micro + 1
    where = rf"{PLANTED[at]} on rank {planted} \(localhost\) in micro-batch {within}\."
    assert re.search(rf"repeated, it has {where}$", error.value.law), error.value.law


def test_a_step_that_is_finite_when_repeated_accuses_no_array(book):
    with pytest.raises(
        TrainingError, match=r"not finite; repeated, no rank computes such an array"
    ):
        go(2, [*book, "run.inject=nan:1@2"])


@pytest.mark.parametrize("mode", ["all-reduce", "server"])
def test_a_run_that_diverges_says_so_in_its_own_words_alone(mode, book):
    diverging = [
        "optimizer.name=sgd",
        "optimizer.lr=1e9",
        "optimizer.clip=0",
        "optimizer.warmup=0",
        f"replication.mode={mode}",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TrainingError, match="that are not finite"):
            go(2, [*book, *diverging])


@pytest.mark.parametrize("settings", [(), ("layout.pp=3", "batch.micro_batches=3")])
def test_a_loss_that_is_not_finite_names_its_rank(settings, book, monkeypatch):
    loss = Replica.loss

    def spoilt(rows, *rest):
        value, gradient = loss(rows, *rest)
        return np.nan if rows.grid.world.rank == 2 else value, gradient

    monkeypatch.setattr(Replica, "loss", spoilt)
    with pytest.raises(TrainingError) as failure:
        go(3, [*book, "batch.size=9", *settings])
    named = "it has the loss on rank 2 (localhost) in micro-batch 1."
    assert failure.value.agreed and named in failure.value.law


SKIP = ["run.on_nonfinite=skip", "run.log_every=1000", "run.eval_every=-1"]


@pytest.mark.parametrize("ranks", (1, 2))
def test_ten_skipped_steps_in_a_row_end_the_run(ranks, book, tmp_path, monkeypatch):
    NotFinite(monkeypatch, range(3, 1000))
    with pytest.raises(
        TrainingError, match=r"10 of 12 had .* the last 10 up to step 12"
    ) as failure:
        go(ranks, [*book, *SKIP, "run.steps=60", "checkpoint.every=2"])
    assert (
        failure.value.agreed
        and "optimizer.lr" in failure.value.way_out
        and "--resume" in failure.value.way_out
    )
    assert records(tmp_path)[-1]["event"] == "failed" and records(tmp_path)[-1]["step"] == 12
    monkeypatch.undo()
    assert not go(ranks, [*book, *SKIP, "run.steps=60", "optimizer.lr=1e-4"], "yes")
    assert records(tmp_path)[-1]["event"] == "end"


@pytest.mark.parametrize(
    "skipped, of, end",
    [(range(1, 7), 6, "failed"), ({1, 2, 4, 5}, 6, "failed"), ({1, *range(3, 12), 20}, 22, "end")],
    ids=("all", "most", "half"),
)
def test_a_run_that_skipped_more_steps_than_it_took_fails(
    skipped, of, end, book, tmp_path, monkeypatch
):
    NotFinite(monkeypatch, skipped)
    fails = pytest.raises(TrainingError, match=f"{len(skipped)} of {of} had")
    with fails if end == "failed" else nullcontext():
        go(2, [*book, *SKIP, f"run.steps={of}"])
    lines = records(tmp_path)
    assert lines[-1]["event"] == end and sum("skipped" in one for one in lines) == len(skipped)


def test_skipped_steps_count_alike_whether_or_not_a_run_was_resumed(book, tmp_path, monkeypatch):
    NotFinite(monkeypatch, {22, *range(24, 33), 60})
    asks = iter(range(1, 1000))
    assert go(1, [*book, *SKIP, "run.steps=60"], stop=lambda rank: next(asks) == 59)
    assert not go(1, [*book, *SKIP, "run.steps=60"], "yes"), (
        "one step is left, is skipped, and is not half of the run"
    )
    assert records(tmp_path)[-1]["event"] == "end"


def test_a_resume_does_not_break_a_row_of_skipped_steps(book, tmp_path, monkeypatch):
    NotFinite(monkeypatch, range(3, 1000))
    asks = iter(range(1, 1000))
    assert go(1, [*book, *SKIP, "run.steps=60"], stop=lambda rank: next(asks) == 8)
    with pytest.raises(TrainingError, match=r"10 of 12 had .* the last 10 up to step 12"):
        go(2, [*book, *SKIP, "run.steps=60"], "yes")


def test_a_finished_run_says_that_nothing_is_left(book, tmp_path, capsys):
    from mpitrain.cli.terminal.progress import Progress

    go(1, book)
    capsys.readouterr()
    model = tmp_path / "run/checkpoints/step-00000006/model-00001-of-00001.safetensors"
    before = model.stat().st_mtime_ns
    assert not go(1, book, "yes", watchers=[Progress()])
    said = capsys.readouterr().out
    assert "all 6 steps were done before" in said
    assert records(tmp_path)[-1]["event"] == "end" and model.stat().st_mtime_ns == before


@pytest.mark.compile
def test_what_moves_reductions_is_by_kernels_and_shares_no_scratch_with_what_computes(book):
    def arenas(transport):
        trainer = build(
            transport, parse(with_settings({}, [*book, "device.kind=cuda-sim"]))
        ).trainer
        kernels = device_for("cuda-sim").kernels
        before, launches = (trainer.arena.live, trainer.arena.allocations), kernels.launches
        trainer.grid.copies.arithmetic.largest(np.arange(4096, dtype=np.float32), 5)
        assert kernels.launches > launches
        return before == (trainer.arena.live, trainer.arena.allocations)

    assert run_ranks(1, arenas) == [True]


def test_a_watchdog_that_is_told_how_long_to_wait_begins_to_wait_then(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(watchdog.os, "_exit", ended.append)
    one = watchdog.Watchdog(0, 0.4)
    for _ in range(10):
        time.sleep(0.1)
        one.patience(0.4)
    one.patience(SECONDS)
    time.sleep(0.5)
    one.close()
    assert not ended


def test_a_watchdog_says_which_message_a_rank_waits_for(monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.set())
    one = watchdog.Watchdog(
        4,
        SECONDS,
        Traffic(waits_for="recv from rank 2, tag 7", content="the gradient of micro-batch 3"),
    )
    one.alive("step 5")
    one.traces(Path("runs/my run"), SILENT)  # a directory without traces
    one.patience(
        0.01
    )  # not before: on a busy machine it would end the job in what comes before step 5
    assert ended.wait(SECONDS)
    one.close()
    said = capfd.readouterr().err
    assert said.startswith(f"rank 4 on {socket.gethostname()}: no progress for ")
    assert "in step 5, waiting for the gradient of micro-batch 3: recv from rank 2, tag 7" in said
    assert (
        " `mpitrain runs report 'runs/my run'` names the rank that the others waited for.\nIts stacks:\n"
        in said
    )


@pytest.fixture
def tokens(tmp_path):
    """A data.source of ten tokens, of which the run directory `tmp_path` has noted the largest."""
    np.arange(10, dtype="<u2").tofile(tmp_path / "book")
    source = f"tokens:{tmp_path / 'book'}"
    scan = as_it_is(source)._replace(largest=9)
    (tmp_path / "tokens.json").write_text(json.dumps(scan._asdict()))
    assert noted_largest(tmp_path, source, "auto") == 9
    return source


@pytest.mark.parametrize("text", (b"[" * 100_000, b"{}", b"\xff", b"[1]", b"", None))
def test_a_note_of_tokens_that_cannot_be_read_is_none(text, tokens, tmp_path):
    (tmp_path / "tokens.json").unlink()
    if text is None:
        os.mkfifo(tmp_path / "tokens.json")
    else:
        (tmp_path / "tokens.json").write_bytes(text)
    assert noted_largest(tmp_path, tokens, "auto") is None


def test_a_note_of_a_file_of_tokens_that_is_gone_is_none(tokens, tmp_path):
    (tmp_path / "book").unlink()
    assert noted_largest(tmp_path, tokens, "auto") is None


def test_async_steps_that_finish_together_have_their_own_times(book, tmp_path):
    go(
        2,
        [
            *book,
            "layout.pp=2",
            "pipeline.schedule=async",
            "batch.micro_batches=2",
            "run.delay=0:60",
            "run.eval_every=3",
        ],
    )
    took = {record["step"]: record["step_s"] for record in records(tmp_path) if "lr" in record}
    assert sorted(took) == [1, 2, 3, 4, 5, 6]
    assert all(seconds > 0.03 for step, seconds in took.items() if step % 3), (
        took,
        "but the last before all meet, which goes back in the call before",
    )


def test_a_checkpoint_has_its_time_and_bytes_in_the_metrics(book, tmp_path):
    go(2, [*book, "checkpoint.every=4"])
    saved = [one for one in records(tmp_path) if one.get("event") == "checkpoint"]
    assert [one["step"] for one in saved] == [4, 6]
    for one in saved:
        folder = tmp_path / f"run/checkpoints/step-{one['step']:08d}"
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        assert one["checkpoint_bytes"] == sum(sizes) and len(sizes) > 1
        assert 0 < one["checkpoint_pause_s"] <= one["checkpoint_s"] < one["wall_s"]


def test_the_parts_of_five_interrupted_starts_add_up_to_their_wall_time(
    book, tmp_path, monkeypatch
):
    """Two die, the first of them without a checkpoint, and two are stopped.

    On a clock of the test's own: a step takes 0.05 s, a save 0.03 s, and 0.2 s lie between starts.
    """
    step, put_in_place, seconds, dying = Trainer.step, saving.put_in_place, [1e6], None

    def now():
        seconds[0] += 1e-6
        return seconds[0]

    def takes(duration, function):
        seconds[0] += duration
        return function

    def dies_at(trainer, index, *rest):
        if index + 1 == dying:
            raise Killed
        return takes(0.05, step)(trainer, index, *rest)

    monkeypatch.setattr(Trainer, "step", dies_at)
    monkeypatch.setattr(saving, "put_in_place", lambda *given: takes(0.03, put_in_place)(*given))
    monkeypatch.setattr(time, "time", now)
    monkeypatch.setattr(time, "perf_counter", now)
    keys = [*book, "run.steps=40", "checkpoint.every=10", "run.eval_every=20"]
    keys += ["run.log_every=3", "run.on_spike=back"]
    began = seconds[0]
    for last, stops in ((7, 0), (18, 0), (26, 0), (0, 9), (0, 0)):
        asks, dying = iter(range(1000)), last
        with suppress(Killed):
            go(1, keys, "auto", lambda rank, asks=asks, stops=stops: next(asks) + 1 == stops)
        seconds[0] += 0.2
    parts = spent(records(tmp_path))
    assert sum(parts.values()) == pytest.approx(seconds[0] - began - 0.2, abs=1e-3), parts
    # Of 18 lost steps a start that died left no line of its last 3, which pass for waiting.
    exact = {
        "useful steps": 40 * 0.05,
        "repeated or undone steps": 15 * 0.05,
        "waiting between starts": 4 * 0.2 + 3 * 0.05,
        "checkpoints": 5 * 0.03,
    }
    assert {name: parts[name] for name in exact} == pytest.approx(exact, abs=1e-3)
    (line,) = goodput(records(tmp_path))
    assert " useful steps, " in line


def test_checkpoints_stay_every_so_often_and_are_listed_and_verified(book, tmp_path):
    keys = ["checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=4"]
    go(2, [*book, *keys, "run.steps=10", "run.eval_every=5", "checkpoint.background=true"])
    words = ["runs", "checkpoints", str(tmp_path / "run")]
    listed = CliRunner().invoke(commands, words)
    assert listed.exit_code == 0 and "verified" not in listed.output
    rows = [line.split() for line in listed.output.splitlines()[1:]]
    assert [row[0] for row in rows] == ["4", "8", "10"] and rows[2][-2:] == ["best,", "newest"]
    nbytes = sum(
        file.stat().st_size for file in (tmp_path / "run/checkpoints/step-00000008").iterdir()
    )
    assert abs(float(rows[1][1]) - nbytes / 1e6) < 0.06
    assert CliRunner().invoke(commands, [*words, "--verify"]).output.count("verified") == 3
    damaged = tmp_path / "run/checkpoints/step-00000008/state-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    listed = CliRunner().invoke(commands, [*words, "--verify"])
    assert listed.exit_code == 1 and listed.output.count("verified") == 2
    assert f"{damaged} was altered: block 0" in listed.output
    with pytest.raises(
        MpitrainError, match=r"keep_every 4 must be a multiple of checkpoint.every 3"
    ):
        choices.parse(with_settings({}, [*keys, "checkpoint.every=3"]))


@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("fails", (False, True))
def test_steps_go_on_while_a_disk_stands_still(ranks, fails, book, tmp_path, monkeypatch):
    """Saves that are due meanwhile are skipped; if it fails on a rank, all ranks raise that."""
    moves, close, begin = threading.Event(), saving.Copies.close, Replica.begin

    def slow(self):
        assert moves.wait(SECONDS)
        if fails and "state-00000" in str(self._arguments[0]):
            raise OSError(28, "No space left on device")
        return close(self)

    def step(self, index, *facts):
        begin(self, index, *facts)
        if index == 4:
            moves.set()

    monkeypatch.setattr(saving.Copies, "close", slow)
    monkeypatch.setattr(Replica, "begin", step)
    settings = [*book, "checkpoint.every=1", "checkpoint.background=true"]
    if not fails:
        go(ranks, settings)
        saved = [one for one in records(tmp_path) if one.get("event") == "checkpoint"]
        assert saved[0]["step"] == 1 and saved[-1]["step"] == 6
        assert saved[-1]["checkpoints_skipped"] >= 3
        return
    with pytest.raises(TrainingError, match=r"step 1 cannot be written.*No space left") as error:
        go(ranks, [*settings, "run.steps=1000"])
    assert error.value.agreed and not list((tmp_path / "run/checkpoints").iterdir())
    assert records(tmp_path)[-1]["step"] < 1000


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_save_without_a_thread_is_written_before_training_goes_on(
    ranks, book, tmp_path, monkeypatch, capfd
):
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "checkpoint":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    go(ranks, [*book, "checkpoint.every=2", "checkpoint.background=true"])
    saved = [one for one in records(tmp_path) if one.get("event") == "checkpoint"]
    assert [one["step"] for one in saved] == [2, 4, 6]
    said = capfd.readouterr().err
    assert said.count("step 2 while training waits: can't start new thread") == ranks, said


@pytest.mark.parametrize(
    ("keys", "copies", "named"),
    [
        (["checkpoint.background=true"], "checkpoint.saving.Copies.write", "background=false"),
        (["run.on_spike=back"], "checkpoint.snapshot.Snapshots.take", "run.on_spike to skip"),
    ],
    ids=["checkpoint", "snapshots"],
)
def test_copies_that_find_no_memory_name_the_key_that_asks_for_them(
    keys, copies, named, book, monkeypatch
):
    def refused(*arguments):
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(f"mpitrain.run.{copies}", refused)
    with pytest.raises(TrainingError, match=r"no memory for .*: Unable to allocate 9 GiB") as error:
        go(2, [*book, "checkpoint.every=2", *keys])
    assert named in error.value.way_out


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_text(""),
        lambda path: path.write_text(path.read_text()[:300]),
        lambda path: path.write_text(path.read_text().replace('"val_loss": ', '"val_loss": 1')),
        lambda path: shutil.copy(path, copied := path.with_name("new")) and copied.replace(path),
    ],
    ids=["removed", "emptied", "cut", "edited", "replaced by its copy"],
)
def test_metrics_that_another_program_changes_are_not_taken_silently(
    damage, book, tmp_path, capfd, request
):
    path, asked = tmp_path / "run/metrics.jsonl", []
    every = [*book, "checkpoint.every=2", "run.eval_every=2"]
    go(2, every)
    go(2, [*every, "run.steps=8"], resume="yes")
    assert "warning" not in capfd.readouterr().err
    damage(path)
    go(2, [*every, "run.steps=10"], resume="yes")
    is_whole = "copy" in request.node.callspec.id
    assert capfd.readouterr().err.count("is not as it was at step 8") == (not is_whole)

    def stop(rank):
        asked.append(rank)
        if rank == 0 and asked.count(0) == 2:
            damage(path)
        return False

    go(2, [*every, "run.steps=14"], resume="yes", stop=stop)
    said = capfd.readouterr().err
    assert said.count("was changed, cut or removed by another program; the run goes on") == 1, said
    assert "is not as it was" not in said and read_metrics(path)[-1]["event"] == "end"
    go(2, [*every, "run.steps=16"], resume="yes")
    assert "warning" not in capfd.readouterr().err


@pytest.mark.counted
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_copies_without_room_are_refused_or_not_made(ranks, book, tmp_path):
    limit = f"memory.limit_gb={(9e4 * ranks + 1e5) / 1e9}"
    with pytest.raises(MpitrainError, match=r"copy [\d.]+ GB .* but [\d.]+ GB are left") as error:
        go(ranks, [*book, "checkpoint.background=true", limit])
    assert error.value.agreed
    go(ranks, [*book, "checkpoint.every=2", limit])
    saved = [one for one in records(tmp_path) if one.get("event") == "checkpoint"]
    assert [one["step"] for one in saved] == [2, 4, 6]


@pytest.mark.parametrize("mode, at", [("all-reduce", 1), ("local", 2)])
def test_a_run_stops_by_itself_near_the_end_of_its_job(mode, at, book, tmp_path):
    """Rank 0 alone knows the end; the ranks of mode local agree to stop after a period."""
    settings = [*book, f"replication.mode={mode}", "replication.period=2"]
    config = parse(with_settings({}, settings))

    def run(transport, ends):
        ends = ends if transport.rank == 0 else lambda: None
        return train(
            transport, lambda: config, "auto", lambda: False, (), lambda: None, ends
        ).stopped

    assert all(run_ranks(2, lambda own: run(own, lambda: time.time() - 1)))
    last = records(tmp_path)[-1]
    assert (last["event"], last["step"]) == ("stopped", at) and last["before_limit_s"] < 0
    assert not any(run_ranks(2, lambda own: run(own, lambda: time.time() + 10 * SECONDS)))
    assert records(tmp_path)[-1]["event"] == "end"


TOKENS = Unopened("tokens", (128,), 256, 256)


@pytest.mark.parametrize(
    "call",
    [
        lambda transport, config, make: train(transport, lambda: make(config)),
        lambda transport, config, make: Trainer(
            transport, lambda layers: make(units_of(config.model, TOKENS, layers)), config
        ),
    ],
    ids=["configuration", "units"],
)
def test_code_of_a_caller_that_raises_on_one_rank_is_an_error_on_all(call, tmp_path):
    config = parse(with_settings({}, [f"run.out={tmp_path}/run"]))

    def run(transport):
        def make(result):
            if transport.rank == 1:
                raise KeyError("absent")
            return result

        with pytest.raises(MpitrainError) as error:
            call(transport, config, make)
        assert error.value.agreed and "On rank 1 (" in error.value.law
        assert "KeyError: 'absent'" in error.value.law
        assert isinstance(error.value.__cause__, KeyError) == (transport.rank == 1)

    run_ranks(3, run)
    assert not (tmp_path / "run").exists()


LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: float("nan"), 10: 1.0, 12: 0.5}
"""{step: its validation loss}: three evaluations after step 4 are not better."""
BEST = ["run.eval_every=2", "run.steps=12", "run.patience=3", "checkpoint.best=true"]
BEST += ["checkpoint.keep=1", "checkpoint.every=3", "model.heads=2"]


def falling(monkeypatch, copies):
    """Let evaluations find LOSSES, and copy the checkpoint of step 4 when it is complete."""
    evaluate, place = loop.Run._evaluate, saving.put_in_place

    def fake(self, step):
        self.trainer.loss = LOSSES[step]
        return evaluate(self, step)

    def copying(partial, target, *arguments):
        try:
            place(partial, target, *arguments)
        finally:
            if target.name == "step-00000004" and target.exists():
                shutil.copytree(target, copies, dirs_exist_ok=True)

    monkeypatch.setattr(loop.Run, "_evaluate", fake)
    monkeypatch.setattr(Trainer, "evaluate", lambda self, *arguments: (self.loss, 0.5))
    monkeypatch.setattr(saving, "put_in_place", copying)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_ended(tmp_path, *more):
    """The run ended by its patience, and has its newest checkpoint and the best one, as it was."""
    run = tmp_path / "run"
    assert records(tmp_path)[-1]["event"] == "end" and records(tmp_path)[-1]["step"] == 10
    assert validated(tmp_path) == [2, 4, 6, 8, 10]
    saved = {path.name[-2:] for path in (run / "checkpoints").iterdir()}
    assert {"04", "10"} <= saved <= {"04", "10", *more}
    best = checkpoint_of(run, True)
    assert best.name == "step-00000004" and files(best) == files(tmp_path / "copy")


@pytest.mark.parametrize(
    "ranks, settings",
    [(1, []), (2, ["layout.pp=2"]), (5, ["replication.zero=3", "batch.size=10"])],
    ids=str,
)
def test_patience_ends_all_ranks_and_leaves_the_best_checkpoint(
    ranks, settings, book, tmp_path, monkeypatch, capsys
):
    falling(monkeypatch, tmp_path / "copy")
    assert not go(ranks, [*book, *BEST, *settings])
    assert_ended(tmp_path)
    go(ranks, [*book, *BEST, *settings], "yes")  # There is nothing left to do.
    assert_ended(tmp_path)
    trainer = SimpleNamespace(config=parse(with_settings({}, [*book, *BEST, *settings])))
    job = SimpleNamespace(trainer=trainer, data=SimpleNamespace(form="tokens"))
    _say_next(SimpleNamespace(job=job, folder=tmp_path / "run"))
    named = [line.endswith(" --best") for line in capsys.readouterr().out.splitlines()[-4:]]
    assert named == [True, True, False, False], "eval and generate, not plot and report"
    go(ranks, [*book, *BEST, *settings, "run.patience=4"], "yes")
    assert (
        records(tmp_path)[-1]["step"] == 12
        and checkpoint_of(tmp_path / "run", True).name[-2:] == "12"
    )


@pytest.mark.parametrize(
    "owner, name, counts, ranks, layout",
    [
        (Trainer, "step", (5, 8), 1, "layout.dp=1"),
        (saving, "prepare", (2, 3, 5), 2, "layout.tp=2"),
        (saving, "_finish", (3, 6), 2, "layout.pp=2"),
        (saving, "put_in_place", (3,), 3, "replication.zero=1"),
        (manifest, "drop_old", (3, 4, 6), 3, "replication.zero=3"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("background", ("true", "false"))
def test_a_kill_at_any_time_leaves_the_best_checkpoint(
    owner, name, counts, ranks, layout, background, book, tmp_path, monkeypatch
):
    falling(monkeypatch, tmp_path / "copy")
    calls, real = [], getattr(owner, name)

    def killed(*arguments):
        calls.append(1)
        if len(calls) in counts:
            raise Killed
        return real(*arguments)

    monkeypatch.setattr(owner, name, killed)
    settings = [*book, *BEST, layout, f"checkpoint.background={background}"]
    for resume in ("no", *["auto"] * len(counts)):
        with suppress(Killed):
            go(ranks, settings, resume)
    assert len(calls) >= counts[0]
    assert_ended(tmp_path, "09")  # A kill while old checkpoints are removed may leave one.


def test_best_and_patience_need_evaluations(book):
    for settings in (["run.patience=2"], ["checkpoint.best=true", "run.eval_every=-1"]):
        with pytest.raises(MpitrainError, match=r"run\.eval_every"):
            choices.parse(with_settings({}, [*book, *settings]))


def test_steps_that_only_the_living_ranks_remember_are_not_waited_for():
    start = {"event": "start", "step": 0, "time": 10.0, "startup_s": 1.0, "wall_s": 0.0}
    lines = [{"step": 1, "lr": 1.0, "step_s": 0.5, "wall_s": 0.5}]
    resume = {"event": "resume", "step": 9, "startup_s": 0.25, "wall_s": 0.5}
    for waited, counted in ((5.0, 4.0), (2.0, 2.0)):
        resume |= {"waited_s": waited, "time": 10.5 + waited + 0.25}
        parts = spent([start, *lines, resume])
        assert parts["useful steps"] == 0.5 + counted
        assert parts["waiting between starts"] == waited - counted and abs(parts["other"]) < 1e-9


def test_the_goodput_of_all_ranks_counts_those_that_wait_as_spares():
    start = {"event": "start", "step": 0, "time": 10.0, "startup_s": 2.0, "wall_s": 0.0}
    lines = [start | {"ranks": 3, "spares": 1}, {"step": 4, "lr": 1, "step_s": 1.0, "wall_s": 4.0}]
    (of_time, of_ranks) = goodput(lines)
    assert "Goodput: of 6.0 s since the first start 66.7% useful steps" in of_time
    assert of_ranks == "Of the time of all 4 ranks, of which 1 waited as spares, 50.0% was useful."
    resume = {
        "event": "resume",
        "step": 4,
        "time": 17.0,
        "startup_s": 1.0,
        "waited_s": 2.0,
        "wall_s": 4.0,
    }
    lost = {"lost": 1, "replaced": [[2, 3]], "filled_from": "ranks", "parts_s": {"build": 0.7}}
    lines += [
        resume | lost | {"ranks": 3, "spares": 0},
        {"step": 6, "lr": 1, "step_s": 1.0, "wall_s": 6.0},
    ]
    assert [*losses(lines)] == [
        "After step 4 1 rank(s) were lost: rank 2 is now process 3 of the start, 0 spare(s) were left; "
        "3 ranks went on after 3.0 s (build 0.7), from ranks."
    ]
    resume |= {"step": 6, "time": 20.0, "wall_s": 6.0, "startup_s": 1.0, "waited_s": 0.0}
    lines += [resume | {"lost": 1, "filled_from": "ranks", "ranks": 2, "spares": 0}]
    lines += [{"step": 8, "lr": 1, "step_s": 1.5, "wall_s": 9.0}]
    of_time, of_ranks = goodput(lines)
    useful = (3 * 6 + 2 * 3) / (4 * 15)
    assert "of 15.0 s" in of_time and f"{100 * useful:.1f}% was useful" in of_ranks
    assert len([*goodput([start | {"ranks": 3}, lines[1]])]) == 1


def test_a_disk_that_fills_is_one_message_and_whole_lines(book, tmp_path):
    chosen = [*book, "run.steps=2000", "run.eval_every=-1", "run.trace=false"]
    words = [word for setting in chosen for word in ("--set", setting)]
    line = shlex.join([*PROGRAM, "train", *words])
    done = run(["bash", "-c", f"ulimit -f 16; exec {line}"])
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    full = "metrics.jsonl cannot be written: File too large"
    told = [line for line in done.stderr.splitlines() if full in line]
    assert len(told) == 1 and told[0].startswith("rank 0: TrainingError: ")
    assert "with --resume=auto" in done.stderr
    text = (tmp_path / "run/metrics.jsonl").read_text()
    assert text.endswith("\n") and json.loads(text.splitlines()[-1])["step"] > 10
