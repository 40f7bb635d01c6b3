"""The directory of a run: what is in it is checked before it is believed, and it can be anywhere."""

import errno
import fcntl
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from mpitrain.cli.train import _configured
from mpitrain.collectives.selection.tuning import DEFAULT, write_tuning
from mpitrain.config import read_toml, with_settings
from mpitrain.data.samples import SampleSource
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.ops.cuda.tiles import write_tiles
from mpitrain.pipeline.schedule_files import find_plan, write_plan
from mpitrain.run.build import configured, open_run
from mpitrain.run.checkpoint.manifest import MANIFEST, newest, read_manifest, write_manifest
from mpitrain.run.choices import parse
from mpitrain.run.export import export
from mpitrain.run.loop import train
from mpitrain.run.metrics import MetricsFile, read_metrics
from mpitrain.run.run_dir import configuration, look
from mpitrain.run.watcher import Watcher
from mpitrain.transport.threads import run_ranks
from tests.processes import skip_without

TINY = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "batch.size=4",
    "run.steps=3",
    "run.log_every=1",
    "run.eval_every=-1",
    "device.kind=cpu",
]


def trained(folder, *settings, resume="no", ranks=1, base=TINY):
    """Train in a directory; the losses of its metrics by step."""
    tables = configuration(folder).model_dump() if resume == "yes" else {}
    config = parse(
        with_settings(
            {**tables, "layout": {}}, [*([] if tables else base), *settings, f'run.out="{folder}"']
        )
    )
    run_ranks(ranks, train, lambda: config, resume, lambda: False)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["loss"] for r in map(json.loads, lines) if "loss" in r}


@pytest.fixture
def folder(tmp_path):
    """A run of three steps."""
    trained(tmp_path / "run")
    return tmp_path / "run"


def test_data_below_a_folder_whose_name_is_not_utf_8_are_refused(tmp_path, monkeypatch):
    (tmp_path / "\udcff").mkdir()
    (tmp_path / "\udcff/book").write_bytes(bytes(1000))
    monkeypatch.chdir(tmp_path / "\udcff")
    with pytest.raises(
        ConfigError, match=r"data.source must be UTF-8, but is 'text:.*\\udcff/book'"
    ):
        trained(tmp_path / "run", "data.source=text:book")


def test_a_resume_with_another_batch_size_continues_after_its_samples(tmp_path, monkeypatch):
    skip_without("sklearn")
    drawn = []
    batch = SampleSource.batch

    def noted(source, seed, step, size, rows, before):
        drawn.append((step, size, before))
        return batch(source, seed, step, size, rows, before)

    monkeypatch.setattr(SampleSource, "batch", noted)
    mlp = [
        "data.source=digits",
        "model.kind=mlp",
        "model.layers=1",
        "run.eval_every=-1",
        "device.kind=cpu",
        "run.steps=3",
    ]
    trained(tmp_path / "run", "batch.size=10", base=mlp)
    trained(tmp_path / "run", "batch.size=7", "run.steps=5", resume="yes")
    trained(tmp_path / "run", "batch.size=20", "run.steps=7", resume="yes")
    assert drawn == [
        (0, 10, 0),
        (1, 10, 10),
        (2, 10, 20),
        (3, 7, 30),
        (4, 7, 37),
        (5, 20, 44),
        (6, 20, 64),
    ]


@pytest.mark.parametrize("size", [2, 18, 100])
@pytest.mark.parametrize("source", ["text", "mixture", "jsonl"])
def test_epochs_are_counted_in_samples_whatever_the_batches_were(tmp_path, source, size):
    text, other, talk = (tmp_path / name for name in ("text", "other", "talk"))
    text.write_text("0123456789abcde\n" * 40)
    other.write_text("edcba9876543210\n" * 20)
    turns = [{"role": role, "content": "b"} for role in ("user", "assistant")]
    talk.write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    data = {
        "text": [f"data.source=text:{text}"],
        "mixture": [
            "data.source=mixture",
            f'data.mixture={{"text:{text}":1.0,"text:{other}":2.0}}',
        ],
        "jsonl": [f"data.source=jsonl:{talk}", "data.template={role}{content}"],
    }[source]
    decay = ["optimizer.warmup=1", "optimizer.decay_steps=3"]  # An evaluation makes no such steps.
    trained(tmp_path / "run", "batch.size=9", "run.epochs=1.0", *data, *decay)
    trained(tmp_path / "run", f"batch.size={size}", "run.epochs=1.9", resume="yes")
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    begun = [record for record in records if record.get("event") in ("start", "resume")]
    rows = begun[0].get("conversations") or begun[0]["tokens"] / 16
    wanted = math.ceil(1.9 * rows)
    (seen,) = (
        r["samples_seen"] for r in records if r["step"] == records[-1]["step"] and "loss" in r
    )
    assert rows <= begun[1]["samples_seen"] < wanted <= seen < wanted + size
    assert configuration(tmp_path / "run").run.steps == records[-1]["step"]
    opened(tmp_path / "run")
    if source == "jsonl":
        with pytest.raises(ConfigError, match=r"data\.packing was False .* is True"):
            trained(tmp_path / "run", "data.packing=true", resume="yes")


@pytest.mark.slow
def test_a_resumed_run_holds_out_what_it_began_with(tmp_path):
    """Whatever lies beside its tokens by then: a val.bin that came later, or none; a run of an older version the last tenth."""
    np.arange(2000, dtype="<u2").tofile(tmp_path / "train.bin")
    tokens = [*TINY, f"data.source=tokens:{tmp_path}/train.bin", "data.vocabulary=2000"]

    def held_out(name):
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [r["held_out_tokens"] for r in lines if r.get("event") in ("start", "resume")]

    trained(tmp_path / "before", base=tokens)
    trained(tmp_path / "older", base=tokens)
    was = [
        line
        for line in (tmp_path / "older/config.toml").read_text().splitlines(True)
        if "validation" not in line
    ]
    was[0] = re.sub(r"\d+", lambda keys: str(int(keys[0]) - 1), was[0])
    (tmp_path / "older/config.toml").write_text("".join(was))
    np.arange(50, dtype="<u2").tofile(tmp_path / "val.bin")
    trained(tmp_path / "after", base=tokens)
    assert configuration(tmp_path / "after").data.validation == f"tokens:{tmp_path}/val.bin"
    for name in ("before", "older", "after"):
        trained(tmp_path / name, "run.steps=5", resume="yes")
        typed = parse(
            with_settings({}, [*tokens, "run.steps=6", f'run.out="{tmp_path / name}"'])
        )  # as a file says it
        run_ranks(1, train, lambda typed=typed: typed, "yes", lambda: False)
        opened = run_ranks(
            1,
            lambda transport, name: (
                open_run(
                    transport, tmp_path / name, lambda: configured(tmp_path / name, [])
                ).data.held_out_tokens
            ),
            name,
        )
        assert [*held_out(name), *opened] == [50 if name == "after" else 200] * 4, name
    trained(
        tmp_path / "before",
        "run.steps=7",
        f"data.validation=tokens:{tmp_path}/val.bin",
        resume="yes",
    )
    assert held_out("before")[-1] == 50, "what is typed counts"


def killed_at(step):
    """A watcher under which a run dies in `step`."""

    class Killed(Watcher):
        def on_step(self, now, result):
            if now == step:
                raise KeyboardInterrupt

    return Killed()


@pytest.mark.parametrize("resume", ["no", "yes"])
def test_a_run_without_a_checkpoint_prints_how_to_start_it_again(tmp_path, resume):
    tables = with_settings({}, [*TINY, f'run.out="{tmp_path}"'])
    with pytest.raises(KeyboardInterrupt):
        run_ranks(1, train, lambda: parse(tables), "no", lambda: False, [killed_at(2)])
    with pytest.raises(ConfigError, match="--resume=auto"):
        run_ranks(1, train, lambda: parse(tables), resume, lambda: False)
    run_ranks(1, train, lambda: parse(tables), "auto", lambda: False)
    with pytest.raises(ConfigError, match="Add --resume"):
        run_ranks(1, train, lambda: parse(tables), "no", lambda: False)


def test_a_run_whose_configuration_is_gone_is_not_started_over(folder):
    (folder / "config.toml").unlink()
    tables = with_settings({}, [*TINY, f'run.out="{folder}"'])
    for resume, complaint in (
        ("auto", "config.toml cannot be read"),
        ("no", "already holds a run"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            run_ranks(1, train, lambda: parse(tables), resume, lambda: False)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL])
def test_where_nothing_can_be_locked_a_run_warns_once_and_goes_on(
    tmp_path, monkeypatch, capfd, number
):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert len(trained(tmp_path / "run", ranks=2)) == 3
    warned = capfd.readouterr().err
    assert warned.count("warning") == warned.count(f"cannot be locked ({os.strerror(number)})") == 1


def test_a_run_that_could_not_begin_leaves_its_directory_to_the_next_one(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        trained(tmp_path)
    (tmp_path / "metrics.jsonl").rmdir()
    assert len(trained(tmp_path, resume="auto")) == 3


def evaluated(folder, *settings, ranks=1):
    """Held-out loss of a run, as `eval` opens it."""

    def run(transport):
        trainer, source, _ = open_run(transport, folder, lambda: configured(folder, list(settings)))
        source.held_out = 8
        return trainer.evaluate(source)[0]

    return run_ranks(ranks, run)[0]


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["cpu", "cuda-sim"])
def test_a_run_takes_its_tuning_and_its_tiles_along(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    write_tuning(tmp_path / "mine/t.json", DEFAULT)
    write_tiles(tmp_path / "mine/g.json", "none", [])
    (tmp_path / "mine/c.toml").write_text(
        'replication.tuning = "t.json"\ndevice.tiles = "g.json"\n'
    )
    named = read_toml(Path("mine/c.toml"))
    trained(
        Path("run"),
        *(f'{s}.{k}="{value}"' for s, table in named.items() for k, value in table.items()),
        f"device.kind={kind}",
        "run.steps=1",
    )
    before = evaluated(Path("run"))
    Path("mine").rename("gone")
    Path("run").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    assert evaluated(tmp_path / "moved") == before
    assert len(trained(tmp_path / "moved", "run.steps=2", resume="yes")) == 2
    (tmp_path / "moved").rename(tmp_path / "again")
    assert configuration(tmp_path / "again").replication.tuning == str(
        tmp_path / "again/tuning.json"
    )
    assert configuration(tmp_path / "again").device.tiles == str(tmp_path / "again/tiles.json")


@pytest.mark.parametrize(
    "key, named, found",
    [
        ("data.source", "text:book", "text:{}/book"),
        ("data.source", "idx:/data", "idx:/data"),
        ("data.source", "pydocs", "pydocs"),
        ("replication.tuning", "t.json", "{}/t.json"),
        ("device.tiles", "../g.json", "{}/../g.json"),
        ("run.out", "runs/a", "{}/runs/a"),
        ("run.out", "", ""),
        ("pipeline.schedule", "gpipe", "gpipe"),
        ("pipeline.schedule", "own.json", "{}/own.json"),
        ("pipeline.schedule", "beside", "{}/beside"),
        ("pipeline.schedule", "/s/own.json", "/s/own.json"),
    ],
)
def test_every_path_in_a_configuration_file_counts_from_its_folder(key, named, found, tmp_path):
    (tmp_path / "beside").touch()
    path = tmp_path / "mine.toml"
    path.write_text(f'{key} = "{named}"\n')
    section, name = key.split(".")
    assert read_toml(path) == {section: {name: found.format(tmp_path)}}


def test_a_run_with_a_schedule_file_opens_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_plan(tmp_path / "own.json", find_plan("gpipe", 1, 1))
    trained(Path("run"), "pipeline.schedule=own.json", "run.steps=1")
    before = evaluated(Path("run"))
    monkeypatch.chdir("/")
    assert configuration(tmp_path / "run").pipeline.schedule == f"{tmp_path}/own.json"
    assert evaluated(tmp_path / "run") == before
    with pytest.raises(ConfigError, match="run already holds a"):
        look(parse(read_toml(tmp_path / "run/config.toml")), "no", 1)


def test_only_what_the_user_changed_is_told_when_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book").write_bytes(bytes(1000))
    own = [*TINY, "data.source=text:book", "run.out=run"]
    trained(Path("run"), base=own)
    config = parse(with_settings({}, [*own, "run.steps=5", "optimizer.lr=0.5"]))
    assert look(config, "yes", 1)["changed"] == {"run.steps": [3, 5], "optimizer.lr": [0.002, 0.5]}


def test_a_run_that_goes_on_is_told_from_one_that_ended(folder):
    config = parse(with_settings({}, [*TINY, f'run.out="{folder}"']))
    for held, complaint in ((True, "A run is going on in"), (False, "already holds a run")):
        with (folder / "lock").open() as lock:
            if held:
                fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(ConfigError, match=complaint):
                look(config, "no", 1)


def test_what_only_training_needs_does_not_stop_an_evaluation(tmp_path):
    write_tuning(tmp_path / "t.json", DEFAULT)
    trained(
        tmp_path / "run",
        "replication.wire=topk",
        "replication.algorithm=shared",
        f'replication.tuning="{tmp_path}/t.json"',
    )
    before = evaluated(tmp_path / "run")
    assert configured(tmp_path / "run", ["device.kind=cuda"]).replication.wire == "none"
    (tmp_path / "run/tuning.json").unlink()
    assert abs(evaluated(tmp_path / "run", ranks=2) - before) < 1e-6


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda text: "", "lacks run.seed, run.steps, .* and [0-9]+ more"),
        (lambda text: text[: text.index("[model]")], r"lacks model.kind, model.layers"),
        (lambda text: text.replace("width = 16\n", ""), r"lacks model.width\."),
        (lambda text: text[: text.index("context = ") + 8], "is not TOML"),
    ],
)
def test_a_configuration_that_does_not_say_everything_is_refused(folder, damage, complaint):
    path = folder / "config.toml"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=complaint):
        configuration(folder)
    config = parse(with_settings({}, [*TINY, f'run.out="{folder}"', "run.steps=4"]))
    with pytest.raises(ConfigError, match=complaint):
        run_ranks(2, train, lambda: config, "yes", lambda: False)


def opened(folder):
    return run_ranks(2, open_run, folder, lambda: configured(folder, []))


def resumed(folder):
    return trained(folder, resume="yes")


def exported(folder):
    return export(folder, "gpt2", folder / "gpt2", "float32", 1 << 30, [])


def begun(folder):
    return trained(folder.with_name("next"), f'run.init_from="{folder}"', base=TINY[4:])


@pytest.mark.parametrize("door", [opened, resumed, exported, begun])
@pytest.mark.parametrize(
    "key, then, now",
    [("model.epsilon", "1e-05", "0.1"), ("model.heads", "2", "4"), ("model.context", "16", "8")],
)
def test_a_run_is_bound_to_the_configuration_of_its_parameters(folder, door, key, then, now):
    path, name = folder / "config.toml", key.partition(".")[2]
    text = path.read_text()
    path.write_text(text.replace(f"{name} = {then}\n", f"{name} = {now}\n"))
    refusal = rf"step-00000003 was trained with .*config.toml says: {key} {then} -> {now}\."
    with pytest.raises(CheckpointError, match=refusal) as raised:
        door(folder)
    assert f"what it was trained with: {key} = {then}." in raised.value.way_out
    path.write_text(text)
    door(folder)


def test_a_checkpoint_of_a_version_that_noted_no_meaning_is_opened(folder):
    saved = newest(folder / "checkpoints")
    manifest = read_manifest(saved)
    assert manifest.meaning["model.epsilon"] == 1e-05 and manifest.meaning["data.vocabulary"] == 256
    write_manifest(saved, manifest._replace(meaning={}))
    assert "meaning" not in (saved / MANIFEST).read_text()
    opened(folder), resumed(folder), exported(folder), begun(folder)


def test_keys_that_a_later_version_has_added_are_no_damage(folder):
    path = folder / "config.toml"
    kept, dropped = path.read_text().split("\n", 1), 'progress_thread = "auto"\n'
    assert dropped in kept[1]
    count = int(kept[0].split()[2])
    whole = configuration(folder)
    path.write_text(
        f"{kept[0].replace(str(count), str(count - 1))}\n{kept[1].replace(dropped, '')}"
    )
    assert configuration(folder) == whole


@pytest.mark.parametrize(
    "settings, found",
    [
        ([], 1),
        (["layout.pp=2"], 0),
        (["layout.pp=2", "batch.micro_batches=1"], 1),
        (["layout.tp=2"], 1),
    ],
)
def test_a_run_that_goes_on_in_more_stages_has_micro_batches_for_them(folder, settings, found):
    assert configuration(folder).batch.micro_batches == 1
    assert _configured(None, [f'run.out="{folder}"', *settings], "yes").batch.micro_batches == found


def test_resume_without_a_directory_prints_the_newest_runs_command(tmp_path, monkeypatch):
    def refusal(ranks):
        with pytest.raises(ConfigError) as raised:
            look(parse({}), "yes", ranks)
        return str(raised.value)

    monkeypatch.chdir(tmp_path)
    assert "Add --out" in refusal(1)
    for age, name in ((50, "old"), (10, "new est"), (0, "none yet")):
        folder = tmp_path / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        if age:
            (folder / "step-00000004").mkdir()
            os.utime(folder / "step-00000004", (1e9 - age, 1e9 - age))
    assert refusal(1).endswith("type: mpitrain train --resume --out 'runs/new est'")
    assert refusal(3).endswith("type: mpitrain launch -n 3 -- train --resume --out 'runs/new est'")


def test_metrics_that_became_a_directory_are_one_error(tmp_path):
    """The end of the run closes the file once more."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError, match="in the way"):
        metrics.write({"step": 1})
    metrics.close()
