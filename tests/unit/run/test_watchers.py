"""Watchers: what a run calls and when, and TensorBoard event files read by an independent parser."""

import math
import struct
import sys

import pytest

from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError, TrainingError
from mpitrain.run.loop import train
from mpitrain.run.tensorboard import crc32c
from mpitrain.run.watcher import Watcher, watchers_of
from mpitrain.run.whole import SavedRun
from mpitrain.transport.threads import run_ranks
from tests.runs import TEXT, TINY, go, records


class Notes(Watcher):
    """Notes the name and the step of every call."""

    def __init__(self):
        self.calls = []

    def on_agreed(self, config, hosts):
        self.calls.append(("agreed", len(hosts)))

    def on_begin(self, config, run_dir, record):
        self.calls.append(("begin", record["step"]))

    def on_step(self, step, result):
        assert result.updated and math.isfinite(result.grad_norm)
        self.calls.append(("step", step))

    def on_log(self, record):
        self.calls.append(("log", record["step"]))

    def on_evaluation(self, record):
        self.calls.append(("evaluation", record["step"]))

    def on_checkpoint(self, step, path):
        assert (path / "manifest.json").exists()
        self.calls.append(("checkpoint", step))

    def on_end(self, record):
        self.calls.append((record["event"], record["step"]))

    def close(self):
        self.calls.append(("close", 0))


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text("".join(TEXT))
    return [
        *TINY,
        f'data.source="text:{tmp_path}/book.txt"',
        f'run.out="{tmp_path}/run"',
        "run.steps=4",
        "run.log_every=2",
        "run.eval_every=2",
        "checkpoint.every=3",
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_watcher_sees_each_event_once_in_its_order(book, ranks):
    notes = Notes()
    go(ranks, book, watchers=[notes])
    evaluated = ("evaluation", 2)
    assert notes.calls == [
        ("agreed", ranks),
        ("begin", 0),
        *[("step", 1), ("log", 1), ("step", 2), ("log", 2), evaluated, ("step", 3)],
        *[("checkpoint", 3), ("step", 4), ("log", 4), ("checkpoint", 4), ("evaluation", 4)],
        *[("end", 4), ("close", 0)],
    ]


def test_a_watcher_stops_a_run_early_and_is_closed_after_an_error(book, capsys):
    class Patient(Notes):
        is_enough = False

        def on_step(self, step, result):
            self.is_enough = step == 2

    class Broken(Notes):
        def on_log(self, record):
            raise ZeroDivisionError

    watcher, config = Patient(), parse(with_settings({}, book))
    done = run_ranks(
        1, lambda own: train(own, lambda: config, "no", lambda: watcher.is_enough, [watcher])
    )
    assert done[0].stopped and watcher.calls[-2:] == [("stopped", 2), ("close", 0)]
    stopped = repr(SavedRun(done[0].folder))
    broken = Broken()
    with pytest.raises(ZeroDivisionError):
        go(1, book, "yes", watchers=[broken])
    assert broken.calls[-1] == ("close", 0)
    (ended,) = run_ranks(1, lambda own: train(own, lambda: config, "yes"))
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("step 4: validation loss ")
    assert ", stopped; loss " in stopped and "validation loss" in repr(SavedRun(ended.folder))


def masked(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def fields(message):
    """The fields of a protobuf message: [(number, value)]."""

    def varint(at):
        value = shift = 0
        while True:
            value |= (message[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 128:
                return value, at

    found, at = [], 0
    while at < len(message):
        key, at = varint(at)
        if key & 7 == 0:
            value, at = varint(at)
        elif key & 7 == 2:
            size, at = varint(at)
            value, at = message[at : at + size], at + size
        else:
            form, size = {1: ("<d", 8), 5: ("<f", 4)}[key & 7]
            (value,) = struct.unpack(form, message[at : at + size])
            at += size
        found.append((key >> 3, value))
    return found


def events(tmp_path):
    """Read the only event file of the run: [(step, {tag: value}, seconds)], and its incomplete rest."""
    (path,) = (tmp_path / "run/tensorboard").iterdir()
    assert "tfevents" in path.name
    data, found = path.read_bytes(), []
    while len(data) >= 12:
        (size,) = struct.unpack("<Q", data[:8])
        if len(data) < size + 16:
            break
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        message = data[12 : 12 + size]
        assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked(message)
        data, event = data[16 + size :], fields(message)
        if not found:
            assert event[1] == (3, b"brain.Event:2")
        summary = [dict(fields(one)) for n, v in event if n == 5 for k, one in fields(v) if k == 1]
        found.append(
            (dict(event).get(2, 0), {one[1].decode(): one[2] for one in summary}, event[0][1])
        )
    return found[1:], data


def series_of(found, tag):
    return [(step, values[tag]) for step, values, _ in found if tag in values]


def expected(tmp_path, key):
    return [
        (line["step"], struct.unpack("<f", struct.pack("<f", line[key]))[0])
        for line in records(tmp_path)
        if key in line and "event" not in line
    ]


def test_crc32c_equals_the_published_values():
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(bytes(32)) == 0x8A9136AA


def test_event_files_have_the_numbers_of_the_metrics_after_a_resume_too(book, tmp_path):
    board = [*book, "run.tensorboard=true", "checkpoint.keep=3"]
    assert not go(2, board)
    found, rest = events(tmp_path)
    for tag, key in (("train/loss", "loss"), ("validation/loss", "val_loss")):
        assert series_of(found, tag) == expected(tmp_path, key) != []
    for tag in ("train/lr", "train/grad_norm", "train/tokens_per_s", "validation/bits_per_byte"):
        assert series_of(found, tag), tag
    assert rest == b""
    seconds = [when for *_, when in found]
    assert seconds == sorted(seconds)

    # A killed run has an incomplete last record, and steps after its last checkpoint.
    (path,) = (tmp_path / "run/tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    again, rest = events(tmp_path)
    assert again == found[:-1] and rest
    assert not go(1, [*board, "run.steps=8"], "yes")
    resumed, rest = events(tmp_path)
    assert resumed[0][:2] == found[0][:2] and rest == b""
    assert [step for step, _ in series_of(resumed, "train/loss")] == [1, 2, 4, 6, 8]
    assert series_of(resumed, "train/loss") == expected(tmp_path, "loss")


def test_a_loss_that_is_not_finite_is_nan_and_no_key_means_no_file(book, tmp_path):
    go(1, book)
    assert not (tmp_path / "run/tensorboard").exists()
    diverging = [
        "optimizer.lr=1e30",
        "optimizer.clip=0",
        "optimizer.name=sgd",
        "optimizer.warmup=0",
    ]
    with pytest.raises(TrainingError):
        go(1, [*book, f'run.out="{tmp_path}/wild/run"', "run.tensorboard=true", *diverging])
    found, _ = events(tmp_path / "wild")
    assert any(math.isnan(loss) for _, loss in series_of(found, "train/loss"))


def test_event_files_follow_no_link(book, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrainingError, match="symbolic link"):
        go(1, [*book, "run.tensorboard=true"])
    assert not [*(tmp_path / "elsewhere").iterdir()]


@pytest.mark.slow
def test_wandb_has_the_numbers_of_a_run_in_its_offline_files(book, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    go(1, [*book, "run.watchers=wandb"])
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    data = file.read_bytes()
    for name in (b"train/loss", b"validation/loss", b"optimizer.lr"):
        assert name in data


@pytest.mark.slow
def test_mlflow_has_the_numbers_of_a_run_in_its_files(book, monkeypatch, tmp_path):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    go(1, [*book, "run.watchers=[mlflow]"])
    (losses,) = tmp_path.glob("mlruns/*/*/metrics/train/loss")
    logged = [record for record in records(tmp_path) if "loss" in record]
    assert [float(line.split()[1]) for line in losses.read_text().splitlines()] == [
        record["loss"] for record in logged
    ]
    assert (losses.parents[2] / "params" / "optimizer.lr").exists()
    (meta,) = tmp_path.glob("mlruns/*/*/meta.yaml")
    assert "status: 3" in meta.read_text(), "finished"


def test_a_watcher_without_its_package_is_refused_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install 'mpitrain\\[wandb\\]'"):
        watchers_of(["wandb"])


@pytest.mark.parametrize(
    "key, text, entries",
    [
        ("watchers", "wandb", ["wandb"]),
        ("watchers", "[wandb, own.py:Notes]", ["wandb", "own.py:Notes"]),
        ("watchers", '["a, b"]', ["a, b"]),
        ("sample_prompt", "Once upon a time, there", ["Once upon a time, there"]),
        ("watchers", "[]", []),
    ],
)
def test_the_texts_of_a_list_need_no_quotes_behind_set(key, text, entries):
    assert with_settings({}, [f"run.{key}={text}"]) == {"run": {key: entries}}
