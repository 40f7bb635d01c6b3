"""Checkpoints and metrics: atomic, verified, strict."""

import errno
import itertools
import json
import math
import os
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from mpitrain.config import parse, with_settings
from mpitrain.errors import CheckpointError, TrainingError
from mpitrain.files import ON_READ
from mpitrain.formats import safetensors_files
from mpitrain.formats.safetensors_files import INDEX
from mpitrain.run import run_dir
from mpitrain.run.build import build
from mpitrain.run.checkpoint import loading, manifest, saving
from mpitrain.run.checkpoint.loading import parameters
from mpitrain.run.checkpoint.manifest import MANIFEST, Done, newest, steps
from mpitrain.run.metrics import MetricsFile, cut_after, read_metrics, strict
from mpitrain.run.run_dir import checkpoints_of
from mpitrain.transport.threads import run_ranks
from tests.saving import load, save
from tests.saving import manifest as manifest_of

TINY = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "batch.size=4",
    "run.steps=4",
]


def after(step):
    return Done(step, 4 * step, "run")


def trained(*settings, steps=2, seed=0):
    """A trainer of one rank after a few steps."""

    def run(transport):
        trainer, source, _ = build(
            transport, parse(with_settings({}, [*TINY, f"run.seed={seed}", *settings]))
        )
        for index in range(steps):
            trainer.step(index, *source.batch(0, index, 4, range(4)))
        return trainer

    return run_ranks(1, run)[0]


MODEL, STATE = "model-00001-of-00001.safetensors", "state-00000.safetensors"


def read(path):
    """A verified checkpoint; of one rank."""
    return run_ranks(1, loading.read_beside, path)[0]


def test_any_tool_can_read_the_parameters(tmp_path):
    trainer = trained("model.tied=true")
    folder = save(tmp_path, trainer, after(2), keep=1)
    index = json.loads((folder / INDEX).read_text())
    tensors = load_file(folder / MODEL)
    assert index["weight_map"] == dict.fromkeys(
        (entry.name for entry in trainer.storage.entries), MODEL
    )
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for entry in trainer.storage.entries:
        assert np.array_equal(tensors[entry.name], entry.view(trainer.parameters))
    with safe_open(folder / STATE, "numpy") as file:
        assert file.metadata()["step"] == "2"
        assert file.get_tensor("first_moment/embedding.tokens/0").shape == (256 * 16,)


def test_only_the_newest_are_kept_and_one_can_be_written_again(tmp_path):
    trainer = trained()
    for step in (1, 2, 3, 10, 10):
        save(tmp_path, trainer, after(step), keep=2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000003", "step-00000010"]


def test_one_that_was_given_another_steps_name_is_refused_and_gets_its_own_again(tmp_path):
    """Its parameters are whole: it is removed only if its own name is taken."""
    right, wrong = tmp_path / "step-00000002", tmp_path / "step-00000003"
    save(tmp_path, trained(), after(2), keep=1)
    right.rename(wrong)
    for way_out in ("Rename it to step-00000002.", f"Remove {wrong} to go on from {right.name}."):
        with pytest.raises(CheckpointError, match="step-00000003 holds step 2") as refusal:
            read(newest(tmp_path))
        assert refusal.value.way_out == way_out
        shutil.copytree(wrong, right, dirs_exist_ok=True)
        read(right)


@pytest.mark.parametrize(
    "module, moment", [(os, "fsync"), (safetensors_files, "created"), (manifest, "sync_folder")]
)
def test_a_save_that_fails_half_way_leaves_the_one_before_it(tmp_path, monkeypatch, module, moment):
    trainer = trained()
    save(tmp_path, trainer, after(1), keep=1)

    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, moment, full)
    with pytest.raises(TrainingError, match=r"cannot be written.*No space left"):
        save(tmp_path, trainer, after(2), keep=1)
    monkeypatch.undo()
    assert read(newest(tmp_path)).done == after(1)
    save(tmp_path, trainer, after(2), keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_everything_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def noted(file):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(
        os, "rename", lambda old, new: (events.append(os.path.basename(new)), rename(old, new))[1]
    )
    save(tmp_path / "c", trained(), after(5), keep=1)
    listed = ["written-00000.json.partial", "written-00000.json", ".step-00000005.partial"]
    last = [".step-00000005.partial", "step-00000005", "c"]
    assert events == [MODEL, STATE, *listed, INDEX, MANIFEST, *last]


def test_the_watchdog_hears_of_each_block_that_a_load_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "MOVED", 1 << 12)
    monkeypatch.setattr(loading, "MOVED", 1 << 12)
    heard = []
    trainer = trained()
    folder = save(tmp_path, trainer, after(1), keep=1)
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    token = ON_READ.set(lambda: heard.append(1))
    read_manifest_of = manifest.read_manifest(folder)
    manifest.verify(folder, read_manifest_of, 0, 1)
    assert len(heard) == sum(len(file.digests) for file in read_manifest_of.files.values())
    kept = trainer.replica.state()
    axes = trainer.job.axes.sizes
    loading.fill(folder, read_manifest_of, kept, trainer.storage, trainer.backend, axes, 0)
    assert len(heard) > nbytes / (1 << 12) * 0.9
    ON_READ.reset(token)


@pytest.mark.parametrize("is_copied", (False, True))
def test_the_watchdog_hears_of_each_file_and_block_that_a_disk_takes(
    tmp_path, monkeypatch, is_copied
):
    for name, value in {"BLOCK": 1 << 12, "SYNCED": 2, "MOVED": 1 << 13}.items():
        monkeypatch.setattr(safetensors_files, name, value)
    monkeypatch.setattr(saving, "MOVED", 1 << 13)
    trainer = trained()
    save(tmp_path, trainer, after(1), keep=1)
    (tmp_path / ".step-00000000.partial").mkdir()
    (tmp_path / ".step-00000000.partial/a").touch()
    heard, waits, now, main = 0, [], {}, threading.get_ident()

    def noted(real, what):
        def wait(*arguments, **more):
            real(*arguments, **more)
            waits.append((what, now["save"].progress() if "save" in now else heard))

        return wait

    def hear():
        nonlocal heard
        assert threading.get_ident() == main
        heard += 1

    for name in ("fsync", "fdatasync", "unlink"):
        monkeypatch.setattr(os, name, noted(getattr(os, name), name))
    room = saving.HostRoom(1 << 40, 0, 0) if is_copied else None
    arguments = trainer.replica.state(), trainer.storage, trainer.transport, trainer.backend
    more = manifest_of(trainer, after(2)), 1, lambda step: False, room, 0, hear
    now["save"] = saved = saving.begin(tmp_path, *arguments, *more)
    if is_copied:
        saved.start(lambda point, step: None)
    saved.wait()
    monkeypatch.undo()
    assert heard and {what for what, _ in waits} == {"fsync", "fdatasync", "unlink"}
    # A file or list may be synced together with its folder.
    assert max(Counter(moves for what, moves in waits).values()) <= 2, waits
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_what_is_dropped_is_gone_at_once_and_left_overs_are_swept(tmp_path, monkeypatch):
    trainer = trained()
    save(tmp_path, trainer, after(1), keep=1)
    listed = []
    monkeypatch.setattr(
        shutil, "rmtree", lambda name, **_: listed.append([p.name for p in steps(tmp_path)])
    )
    save(tmp_path, trainer, after(2), keep=1)
    monkeypatch.undo()
    assert listed == [["step-00000002"]]
    assert (tmp_path / ".step-00000001.dropped").exists(), "the process died here"
    save(tmp_path, trainer, after(3), keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("moment", ("_verified", "fill"))
@pytest.mark.parametrize("ranks", (1, 3))
def test_a_checkpoint_removed_while_read_is_replaced_by_the_next(
    tmp_path, monkeypatch, ranks, moment
):
    trainer = trained()
    first = save(tmp_path, trainer, after(1), keep=1)
    real, calls = getattr(loading, moment), []

    def look(path, *rest):
        rank = rest[-1] if moment == "fill" else rest[0]
        if rank == 0:
            calls.append(path.name)
            if len(calls) < 3:
                save(tmp_path, trainer, after(1 + len(calls)), keep=1)
        return real(path, *rest)

    monkeypatch.setattr(loading, moment, look)

    def run(transport):
        other = build(transport, parse(with_settings({}, TINY))).trainer
        assert load(first, other).done == after(3)
        for one, same in zip(trainer.storage.entries, other.storage.entries, strict=True):
            assert np.array_equal(one.view(trainer.parameters), same.view(other.parameters))

    run_ranks(ranks, run)
    assert calls == ["step-00000001", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("name", (MODEL, STATE, INDEX, MANIFEST))
def test_one_that_is_still_listed_and_cannot_be_read_is_called_damaged(tmp_path, name):
    trainer = trained()
    for step in (1, 2):
        last = save(tmp_path, trainer, after(step), keep=2)
    (last / name).unlink()

    def run(transport):
        with pytest.raises(
            CheckpointError, match=f"{name} is missing.[^$]*to go on from step-00000001"
        ) as raised:
            loading.read_beside(transport, last)
        return raised.value.agreed

    assert run_ranks(2, run) == [True, True]


def test_a_rank_that_does_not_see_the_run_directory_advises_no_removal(tmp_path):
    """Another rank does see it, as where ranks start in different folders."""
    saved = save(tmp_path, trained(), after(1), keep=1)

    def run(transport):
        path = saved if transport.rank == 0 else tmp_path / "elsewhere" / saved.name
        with pytest.raises(CheckpointError) as raised:
            loading.read_beside(transport, path)
        return str(raised.value)

    for said in run_ranks(2, run, hosts="ab"):
        assert "On rank 1 (b): " in said and "cannot be found" in said and "Remove" not in said


def test_a_checkpoint_of_a_later_format_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", "mpitrain-4")
    folder = save(tmp_path, trained(), after(1), keep=1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format mpitrain-4,"):
        read(folder)


def test_one_that_was_being_replaced_still_counts_and_other_names_do_not(tmp_path):
    trainer = trained()
    for step in (1, 2):
        save(tmp_path, trainer, after(step), keep=3)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.replaced")
    others = (
        "step-00000009.bak",
        ".step-junk.replaced",
        ".step-.replaced",
        "step-٠٠٠٠٠٠٠٩",
        "step-" + "9" * 200,
    )
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").touch()
    assert read(newest(tmp_path)).done == after(2)
    save(tmp_path, trainer, after(2), keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000002", "step-00000008", *others}


@pytest.mark.parametrize("name", (STATE, MANIFEST))
def test_a_pipe_in_a_checkpoint_is_refused_at_once(tmp_path, name):
    folder = save(tmp_path, trained(), after(1), keep=1)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is damaged: .*it is not a regular file"):
        read(folder)


@pytest.mark.parametrize("number", (errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE))
@pytest.mark.parametrize("name", (MODEL, STATE, INDEX, MANIFEST, "step-00000002"))
def test_what_the_system_does_not_let_one_read_is_not_damaged(tmp_path, monkeypatch, name, number):
    trainer = trained()
    for step in (1, 2):
        folder = save(tmp_path / "checkpoints", trainer, after(step), keep=2)
    MetricsFile(tmp_path / "metrics.jsonl").close()
    checkpoint, real = read(folder), os.open

    def refused(path, *arguments, **more):
        if name in Path(path).parts:
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refused)
    readers = [lambda: read(folder)]
    readers += [lambda: parameters(folder)] * (name not in (STATE, MANIFEST))
    if name != MANIFEST:
        axes = trainer.job.axes.sizes
        state = trainer.replica.state(), trainer.storage, trainer.backend, axes, 0
        readers.append(lambda: loading.fill(folder, checkpoint.manifest, *state))
    for reader in readers:
        with pytest.raises(
            CheckpointError, match=f"cannot be read: {os.strerror(number)}"
        ) as raised:
            reader()
        assert "Remove" not in str(raised.value) and "damaged" not in str(raised.value)
    *_, last = checkpoints_of(tmp_path, does_verify=True)
    assert last.note == "newest, not readable" and os.strerror(number) in last.problem


def test_a_checkpoint_that_a_run_replaces_while_it_is_listed_is_no_problem(tmp_path, monkeypatch):
    trainer = trained()
    MetricsFile(tmp_path / "metrics.jsonl").close()
    save(tmp_path / "checkpoints", trainer, after(1), keep=1)

    def replaced(*arguments):
        monkeypatch.undo()
        save(tmp_path / "checkpoints", trainer, after(2), keep=1)
        return manifest.verify(*arguments)

    monkeypatch.setattr(run_dir, "verify", replaced)
    (only,) = checkpoints_of(tmp_path, does_verify=True)
    assert (only.step, only.note, only.problem) == (2, "newest, verified", "")


def test_another_models_checkpoint_names_the_first_tensor_that_differs(tmp_path):
    folder = save(tmp_path, trained(), after(1), keep=1)
    with pytest.raises(CheckpointError, match=r"needs embedding.tokens of shape \(256, 32\)"):
        load(folder, trained("model.width=32"))
    with pytest.raises(
        CheckpointError, match=r"blocks.1.attention.\S+ of shape .* but the checkpoint has none"
    ):
        load(folder, trained("model.layers=2"))
    with pytest.raises(
        CheckpointError,
        match=r"needs momentum/embedding.tokens of shape .* but the checkpoint has none",
    ):
        load(folder, trained("optimizer.name=momentum"))


def test_metrics_are_strict_json_and_a_cut_drops_what_came_after(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for record in (
        {"event": "start", "step": 0},
        {"step": 1, "loss": math.nan},
        {"step": 2, "loss": 0.5},
        {"step": 1, "val_loss": 2.0},
        {"event": "stopped", "step": 2},
    ):
        metrics.write(record)
    metrics.close()
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert read_metrics(path)[1] == {"step": 1, "loss": None, "nonfinite": True}
    cut_after(path, 1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 1]


GOOD = [
    '{"step": 1, "loss": 1.0}',
    '{"event": "start", "step": 0, "note": "a\u2028b\x85c"}',
    '{"step": 2.0}',
    '{"note": 3}',
    '{"step": 1e-400, "a": 1e999, "b": "\\ud800"}',
]
ODD = [
    b"3",
    b"null",
    b'"text"',
    b"[1, 2]",
    b"",
    b"\x00\x00",
    b"\xff\xfe{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"step": "5"}',
    b'{"step": null}',
    b'{"step": [1]}',
    b'{"step": {"a": 1}}',
    b'{"step": 1, "loss": NaN}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": 3, "lo',
]


def test_lines_that_are_not_status_records_pass_unchanged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    mixed = [
        line
        for pair in zip(ODD, itertools.cycle(line.encode() for line in GOOD), strict=False)
        for line in pair
    ]
    path.write_bytes(b"\n".join(mixed[:-1]))
    wanted = (GOOD * 4)[: len(ODD) - 1]
    assert len(read_metrics(path)) == len(wanted)
    cut_after(path, 2)
    assert path.read_bytes().decode() == "".join(line + "\n" for line in wanted)
    path.write_text(
        '{"val_loss": 3}\n{"step": 5, "event": ["end"]}\n{"step": 2, "event": ["end"]}\n'
    )
    cut_after(path, 2)
    assert path.read_text() == '{"val_loss": 3}\n{"step": 2, "event": ["end"]}\n'


def test_infinities_are_null_and_numbers_stay():
    assert strict({"a": math.inf, "b": 1.0, "c": None}) == {
        "a": None,
        "b": 1.0,
        "c": None,
        "nonfinite": True,
    }
    assert strict({"b": 1.0, "c": None}) == {"b": 1.0, "c": None}
