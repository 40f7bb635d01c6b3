"""Runs that start from a folder: values, bytes read, keys, tokenizer and record."""

import hashlib
import shutil
import threading
from collections import Counter

import numpy as np
import pytest

from mpitrain.cli.compare import TrainingJob
from mpitrain.cli.train import _configured as resumed
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.formats.safetensors_files import read_into
from mpitrain.run.build import build
from mpitrain.run.job import with_hyper_parameters
from mpitrain.run.loop import train
from mpitrain.run.run_dir import configuration
from mpitrain.tools.plan.memory import count
from mpitrain.transport.threads import run_ranks
from tests.runs import records
from tests.training import configured
from tests.unit.formats.gpt2_folder import shapes, sharded, tensors, written

TINY = ["batch.size=12", "device.kind=cpu", "run.steps=2", "run.eval_every=-1", "run.log_every=1"]
LAYOUTS = {
    "one rank": (1, []),
    "tp 2": (2, ["layout.tp=2"]),
    "pp 2": (2, ["layout.pp=2"]),
    "ZeRO-1": (3, ["replication.zero=1"]),
    "ZeRO-3": (3, ["replication.zero=3"]),
    "tp 2, pp 2, ZeRO-3": (
        8,
        ["layout.tp=2", "layout.pp=2", "replication.zero=3", "pipeline.schedule=gpipe"],
    ),
    "servers": (3, ["replication.mode=server", "replication.servers=2"]),
    "local": (2, ["replication.mode=local"]),
    "frozen": (2, ['model.freeze=["blocks.0.*"]']),
}
OURS = {
    "transformer.wte.weight": "embedding.tokens",
    "transformer.wpe.weight": "embedding.positions",
    "transformer.h.1.attn.c_attn.weight": "blocks.1.attention.qkv.weight",
    "transformer.h.0.attn.c_proj.bias": "blocks.0.attention.out.bias",
    "transformer.h.0.mlp.c_proj.weight": "blocks.0.mlp.down.weight",
    "transformer.h.1.ln_2.bias": "blocks.1.mlp.norm.bias",
    "transformer.ln_f.weight": "head.norm.gain",
}


def trained(ranks, *settings, resume="no"):
    config = configured(*TINY, *settings)
    run_ranks(ranks, lambda own: train(own, lambda: config, resume, lambda: False))


def begun(transport, config):
    """The regions of a rank's tensors, {name: (slices, array)}, and its share of all elements."""
    trainer = build(transport, config).trainer
    if trainer.grid.is_server:
        return {}
    trainer.sync_parameters()
    arrays = trainer.tensors()
    trainer.replica.begin(0)
    computed = trainer.replica.open(0, 0)
    if "tokens" in computed:  # A worker that averages has its own, too.
        assert np.array_equal(computed["tokens"], arrays["embedding.tokens"])
    return {one.name: (one.parameter, arrays[one.name]) for one in trainer.storage.tensors}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_has_its_regions_of_the_folder_bit_for_bit(tmp_path, layout):
    folder, wanted = sharded(tmp_path / "gpt2"), tensors()
    ranks, settings = LAYOUTS[layout]
    found = run_ranks(ranks, begun, configured(*TINY, f"run.init_from={folder}", *settings))
    for theirs, name in OURS.items():
        whole = wanted[theirs].T if wanted[theirs].ndim > 1 and ".c_" in theirs else wanted[theirs]
        regions = [own[name] for own in found if name in own]
        assert regions
        for parameter, array in regions:
            assert np.array_equal(array, parameter.part_of(whole))


@pytest.mark.parametrize("layout", ["one rank", "tp 2", "pp 2", "ZeRO-1", "ZeRO-3"])
def test_each_rank_reads_the_elements_that_it_stores(tmp_path, monkeypatch, layout):
    folder, total = sharded(tmp_path / "gpt2"), sum(map(np.prod, shapes().values()))
    nbytes = Counter()

    def counted(descriptor, array, start):
        nbytes[threading.get_ident()] += array.nbytes
        read_into(descriptor, array, start)

    monkeypatch.setattr("mpitrain.formats.tensors.read_into", counted)
    ranks, settings = LAYOUTS[layout]
    config = configured(*TINY, f"run.init_from={folder}", *settings)
    stored = run_ranks(ranks, lambda own: build(own, config).trainer.replica.state())
    sizes = [sum(one.array.size for one in kept if one.name == "parameters") for kept in stored]
    # A shard may begin or end within a row of a tensor; padding counts as stored.
    slack = 4 * 40 * 8 if layout.startswith("ZeRO") else 0
    assert all(
        0 < read <= 4 * size + slack
        for read, size in zip(sorted(nbytes.values()), sorted(sizes), strict=True)
    )
    assert layout != "one rank" or sum(nbytes.values()) == 4 * total


def test_a_run_starts_from_another_run_of_any_layout(tmp_path):
    first = tmp_path / "first"
    shape = ["model.layers=2", "model.width=8", "model.heads=2", "model.context=12"]
    trained(4, *shape, "layout.tp=2", "replication.zero=1", "model.hidden=24", f"run.out={first}")
    (wanted,) = run_ranks(1, begun, configured(*TINY, f"run.init_from={first}"))
    config = configured(*TINY, f"run.init_from={first}", "layout.pp=2")
    assert (config.model.layers, config.model.hidden, config.model.context) == (2, 24, 12)
    found = {}
    for own in run_ranks(2, begun, config):
        found |= own
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name][1], wanted[name][1]) for name in wanted)
    trained(2, f"run.init_from={first}", f"run.out={tmp_path / 'run'}")
    record = records(tmp_path)[0]["init_from"]
    manifest = first / "checkpoints/step-00000002/manifest.json"
    assert record["folder"] == str(manifest.parent)
    assert record["sha256"] == {"manifest.json": hashlib.sha256(manifest.read_bytes()).hexdigest()}


def test_a_shorter_context_takes_the_first_positions(tmp_path):
    folder = written(tmp_path / "gpt2")
    config = configured(*TINY, f"run.init_from={folder}", "model.context=5")
    (found,) = run_ranks(1, begun, config)
    wanted = tensors()["transformer.wpe.weight"][:5]
    assert np.array_equal(found["embedding.positions"][1], wanted)


@pytest.mark.parametrize(
    "setting",
    [
        "model.layers=3",
        "model.width=16",
        "model.heads=4",
        "model.context=13",
        "model.tied=false",
        "model.hidden=31",
        "model.epsilon=1e-6",
        "model.kind=mlp",
    ],
)
def test_a_key_with_another_value_is_refused_by_name(tmp_path, setting):
    folder = written(tmp_path / "gpt2")
    with pytest.raises(ConfigError) as caught:
        configured(*TINY, f"run.init_from={folder}", setting)
    assert setting.partition("=")[0] in caught.value.law


def test_a_key_equal_to_the_folder_is_accepted(tmp_path):
    folder = written(tmp_path / "gpt2")
    config = configured(*TINY, f"run.init_from={folder}", "model.hidden=32", "model.tied=true")
    run_ranks(1, begun, config)


def test_the_folder_determines_the_model_of_the_job_gpt(tmp_path):
    folder = written(tmp_path / "gpt2")
    config = TrainingJob([f"run.init_from={folder}", "device.kind=cpu"], 1, 1).configured(1)
    assert (config.model.layers, config.model.width, config.model.context) == (2, 8, 12)
    assert TrainingJob([], 1, 1).configured(1).model.width == 256


def test_a_preset_with_another_model_is_named_in_the_advice(tmp_path):
    folder = written(tmp_path / "gpt2")
    with pytest.raises(ConfigError) as caught:
        resumed(None, [f"run.init_from={folder}"], "no", "tiny")
    assert "preset" in caught.value.way_out


def test_data_of_another_vocabulary_are_refused(tmp_path):
    folder = written(tmp_path / "gpt2")
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "many.bin")
    many = configured(*TINY, f"run.init_from={folder}", f"data.source=tokens:{tmp_path}/many.bin")
    with pytest.raises(MpitrainError):
        run_ranks(1, begun, many)
    with pytest.raises(MpitrainError):
        count(many)


def test_plan_memory_counts_the_model_of_a_folder_and_its_adapters(tmp_path):
    own = [*TINY, f"run.init_from={written(tmp_path / 'gpt2')}"]
    for settings in ([], ["lora.rank=2"]):
        config = configured(*own, *settings)
        (wanted,) = run_ranks(
            1, lambda one, config=config: build(one, config).trainer.parameter_count
        )
        assert count(config).parameters == wanted
    with pytest.raises(MpitrainError) as raised:
        configured(*TINY, "run.init_from=openai-community/gpt2")
    assert "hf download openai-community/gpt2 " in raised.value.way_out


def test_tokens_without_tokenizer_get_that_of_the_folder(tmp_path):
    folder = written(tmp_path / "gpt2")
    (folder / "tokenizer.json").write_text("any text")
    (np.arange(4000) % 99).astype(np.uint16).tofile(tmp_path / "few.bin")
    run = tmp_path / "run"
    trained(
        2, f"run.init_from={folder}", f"data.source=tokens:{tmp_path}/few.bin", f"run.out={run}"
    )
    assert (run / "tokenizer.json").read_text() == "any text"
    assert configuration(run).data.vocabulary == 256
    files = records(tmp_path)[0]["init_from"]["sha256"]
    for name, digest in files.items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("has_file", [True, False], ids=["file", "settings"])
def test_a_resumed_run_does_not_need_the_folder(tmp_path, has_file):
    folder, run = written(tmp_path / "gpt2"), tmp_path / "run"
    trained(2, f"run.init_from={folder}", "checkpoint.keep=1", f"run.out={run}")
    shutil.rmtree(folder)
    file = tmp_path / "job.toml"
    file.write_text(f'[run]\ninit_from = "gpt2"\nout = "{run}"\n[batch]\nsize = 12\n')
    settings = ["run.steps=4", "device.kind=cpu", "run.eval_every=-1", f"run.out={run}"]
    config = resumed(file if has_file else None, settings, "yes")
    then = configuration(run)
    assert config.model.hidden == then.model.hidden
    assert then.optimizer.lr == with_hyper_parameters(config).optimizer.lr == 5e-5
    adapters = configured(*TINY, f"run.init_from={run}", "lora.rank=2")
    assert with_hyper_parameters(adapters).optimizer.lr == 2e-4
    run_ranks(1, lambda own: train(own, lambda: config, "yes", lambda: False))
    assert records(tmp_path)[-1]["event"] == "end"


def test_a_run_without_init_from_has_no_record_of_it(tmp_path):
    trained(1, "model.layers=1", "model.width=8", f"run.out={tmp_path / 'run'}")
    assert "init_from" not in records(tmp_path)[0]
