"""`mpitrain export`: the folder is complete or absent, and wrong usage is one error."""

import json
import os
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.errors import MpitrainError
from mpitrain.formats import writing
from mpitrain.formats.companions import ends, with_context, with_end
from mpitrain.formats.folder import tensors as located
from mpitrain.formats.tensors import StoredTensor, read_whole
from mpitrain.formats.writing import SETTINGS, byte_level
from mpitrain.run.build import build
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.processes import skip_without
from tests.runs import TINY, go
from tests.training import configured
from tests.unit.formats.gpt2_folder import tensors, written

FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 2 ranks that share layers."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    go(
        2,
        [
            *TINY,
            "model.heads=2",
            "layout.tp=2",
            "run.steps=2",
            "run.eval_every=-1",
            f"run.out={folder}",
        ],
    )
    return folder


def export(*words):
    """Run the command; return its result, or raise its error."""
    done = CliRunner().invoke(commands, ["export", *map(str, words)])
    if isinstance(done.exception, MpitrainError):
        raise done.exception
    return done


def values(folder):
    """{name there: array} of all tensors of a folder."""
    found = {name: StoredTensor(one) for name, one in located(folder, "model")[1].items()}
    return {name: read_whole(one) for name, one in found.items()}


@pytest.mark.parametrize("shard", ["5GB", "1KB", "4KB"])
def test_shards_hold_every_tensor_once(run, tmp_path, shard):
    assert (
        export(run, "--to", "gpt2", "--out", tmp_path / "out", "--shard-size", shard).exit_code == 0
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    weights = {name for name in names - FILES if name.endswith(".safetensors")}
    assert (names - FILES - weights == set()) == (shard == "5GB") == (len(weights) == 1)
    assert set(values(tmp_path / "out")) == {*tensors(), "lm_head.weight"} - {
        name for name in tensors() if ".h.1." in name
    }


def test_an_export_that_is_read_and_exported_again_is_the_same(run, tmp_path):
    export(run, "--to", "gpt2", "--out", tmp_path / "first")
    again = tmp_path / "again"
    settings = ["batch.size=6", "run.steps=0", "run.eval_every=-1", "device.kind=cpu"]
    go_on = configured(*settings, f"run.init_from={tmp_path / 'first'}", f"run.out={again}")
    run_ranks(1, lambda own: train(own, lambda: go_on, "no", lambda: False))
    export(again, "--to", "gpt2", "--out", tmp_path / "second")
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_parameters_are_rounded_once(run, tmp_path, dtype):
    export(run, "--to", "gpt2", "--out", tmp_path / "wide")
    export(run, "--to", "gpt2", "--out", tmp_path / "out", "--dtype", dtype)
    wide, found = values(tmp_path / "wide"), values(tmp_path / "out")
    for name, array in wide.items():
        rounded = array.astype(writing.DTYPES[dtype])
        assert np.array_equal(found[name], rounded.astype(found[name].dtype))


def test_conv1d_weights_are_transposed(run, tmp_path):
    export(run, "--to", "gpt2", "--out", tmp_path / "out")
    config = configured(f"run.init_from={run}", "batch.size=2", "device.kind=cpu")
    (ours,) = run_ranks(1, lambda own: build(own, config).trainer.tensors())
    up = ours["blocks.0.mlp.up.weight"]
    found = values(tmp_path / "out")["transformer.h.0.mlp.c_fc.weight"]
    assert found.shape == (8, 32)
    assert np.array_equal(found, up.T)


def test_dropout_rates_are_exported(tmp_path):
    rates = ["model.dropout=0.25", "model.attention_dropout=0.5"]
    trained = [*TINY, *rates, "run.steps=1", "run.eval_every=-1", f"run.out={tmp_path / 'run'}"]
    go(1, trained)
    export(tmp_path / "run", "--to", "gpt2")
    found = json.loads((tmp_path / "run/gpt2/config.json").read_text())
    assert (found["resid_pdrop"], found["embd_pdrop"], found["attn_pdrop"]) == (0.25, 0.25, 0.5)


@pytest.mark.parametrize("kind", ["folder", "file", "link", "empty folder"])
def test_an_existing_name_is_refused_and_left_alone(run, tmp_path, kind):
    out = tmp_path / "out"
    {
        "folder": lambda: written(out),
        "file": lambda: out.write_text("mine"),
        "link": lambda: out.symlink_to(tmp_path / "nowhere"),
        "empty folder": out.mkdir,
    }[kind]()
    with pytest.raises(MpitrainError) as caught:
        export(run, "--to", "gpt2", "--out", out)
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_export_leaves_nothing(run, tmp_path, monkeypatch, failure):
    def fails(*_):
        raise failure

    monkeypatch.setattr(writing, "_converted", fails)
    with pytest.raises((MpitrainError, KeyboardInterrupt, SystemExit)):
        export(run, "--to", "gpt2", "--out", tmp_path / "out")
        raise SystemExit
    assert not [*tmp_path.iterdir()]


def test_values_beyond_float16_are_refused(tmp_path):
    arrays = tensors()
    arrays["transformer.h.1.ln_2.bias"][3] = 1e6
    folder, run = written(tmp_path / "gpt2", arrays), tmp_path / "run"
    config = configured(
        "batch.size=2",
        "run.steps=0",
        "run.eval_every=-1",
        f"run.init_from={folder}",
        f"run.out={run}",
    )
    run_ranks(1, lambda own: train(own, lambda: config, "no", lambda: False))
    with pytest.raises(MpitrainError) as caught:
        export(run, "--to", "gpt2", "--dtype", "float16")
    assert "ln_2.bias" in caught.value.law
    assert not (run / "gpt2").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--to", "llama"],
        ["--to", "gpt2", "--dtype", "int8"],
        ["--to", "gpt2", "--shard-size", "5"],
        ["--to", "gpt2", "--shard-size", "0GB"],
        ["--to", "gpt2", "--out", "no/such/folder"],
        ["--to", "gpt"],
    ],
    ids=" ".join,
)
def test_wrong_options_are_refused(run, words):
    try:
        assert export(run, *words).exit_code == 2
    except MpitrainError as error:
        assert error.exit_code == 2


def test_the_kind_of_a_run_needs_no_name(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    assert "run/gpt2: config.json" in export(tmp_path / "run").output
    with pytest.raises(MpitrainError) as caught:
        export(run, "--to", "gpt")
    assert caught.value.way_out == "For this run: --to gpt2"


@pytest.mark.parametrize("damage", ["altered", "no checkpoint", "no run"])
def test_a_damaged_run_is_not_exported(run, tmp_path, damage):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    saved = next((folder / "checkpoints").iterdir())
    if damage == "altered":
        (model,) = saved.glob("model-00001*")
        model.write_bytes(model.read_bytes()[:-1] + b"!")
    elif damage == "no checkpoint":
        shutil.rmtree(saved)
    else:
        os.remove(folder / "config.toml")
    with pytest.raises(MpitrainError) as caught:
        export(folder, "--to", "gpt2")
    assert caught.value.exit_code == 2
    assert not (folder / "gpt2").exists()


def test_a_model_that_is_no_gpt_is_refused(tmp_path):
    settings = ["data.source=digits", "model.kind=mlp", "run.steps=0", "run.eval_every=-1"]
    skip_without("sklearn")
    go(1, [*settings, f"run.out={tmp_path / 'run'}"])
    with pytest.raises(MpitrainError) as caught:
        export(tmp_path / "run", "--to", "gpt2")
    assert "mlp" in caught.value.law


@pytest.mark.parametrize(
    ("to", "settings", "key"),
    [
        ("gpt2", [], "model.experts is 2"),
        ("llama", ["model.kind=llama", "model.scaled_embedding=true"], "model.scaled_embedding"),
    ],
)
def test_experts_that_a_folder_cannot_have_are_refused_by_their_key(tmp_path, to, settings, key):
    settings = [*settings, "model.experts=2", "run.steps=0", "run.eval_every=-1"]
    go(1, [*TINY, *settings, f"run.out={tmp_path / 'run'}"])
    with pytest.raises(MpitrainError) as caught:
        export(tmp_path / "run", "--to", to)
    assert key in caught.value.law


def test_the_byte_tokenizer_has_each_byte_once():
    vocabulary = json.loads(byte_level())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["A"] == 65


def test_a_checkpoint_that_vanishes_is_not_reported_as_the_new_folder(run, tmp_path, monkeypatch):
    def gone(self, rectangle):
        raise FileNotFoundError(2, "No such file or directory", "model.safetensors")

    monkeypatch.setattr(StoredTensor, "read", gone)
    with pytest.raises(MpitrainError) as caught:
        export(run, "--to", "gpt2", "--out", tmp_path / "new")
    assert caught.value.law.startswith("model.safetensors cannot be read")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("longest", "written"), [(32, 24), (24, 24), (16, 16), (None, None), ("32", "32")]
)
def test_only_a_longer_limit_of_a_tokenizer_is_lowered_to_the_context(longest, written):
    files = {SETTINGS: json.dumps({"model_max_length": longest, "x": 1}).encode()}
    assert json.loads(with_context(files, 24)[SETTINGS]) == {"model_max_length": written, "x": 1}
    assert with_context({}, 24) == {}


@pytest.mark.parametrize(
    ("generation", "last"),
    [(None, [4]), ({}, []), ({"eos_token_id": None}, []), ({"eos_token_id": [3, 0]}, [3, 0])],
)
def test_generation_ends_where_its_own_file_says_if_there_is_one(generation, last):
    files = {"config.json": b'{"eos_token_id": 4}'}
    if generation is not None:
        files["generation_config.json"] = json.dumps(generation).encode()
    assert ends(files) == last and ends(with_end(files, 9)) == [*last, 9]
