"""Runs with adapters: they save the adapters alone, and need the base that they were trained on."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpitrain.cli.train import _configured
from mpitrain.config import with_settings
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.models.targets import is_adapter
from mpitrain.run.build import build, open_run
from mpitrain.run.build import configured as opened
from mpitrain.run.checkpoint.manifest import Done, newest, read_manifest
from mpitrain.run.choices import parse
from mpitrain.run.export import export
from mpitrain.run.initial import of_adapters
from mpitrain.run.loop import train
from mpitrain.run.run_dir import CHECKPOINTS, configuration
from mpitrain.transport.threads import run_ranks
from tests.saving import manifest, publish
from tests.training import TINY, configured

FLAT = [*TINY, "run.steps=4", "run.eval_every=-1", "checkpoint.every=2", "optimizer.lr=0.05"]
FLAT += ["precision.compute=float64"]
LORA = ["lora.rank=3", "lora.targets=c_attn,c_fc,mlp.c_proj", "lora.dropout=0.1"]


def started(ranks, resume, *settings):
    config = configured(*settings)
    run_ranks(ranks, lambda own: train(own, lambda: config, resume, lambda: False))


def resumed(ranks, folder, *settings):
    tables = {**configuration(folder).model_dump(), "layout": {}}
    config = parse(with_settings(tables, [f"run.out={folder}", *settings]))
    run_ranks(ranks, lambda own: train(own, lambda: config, "yes", lambda: False))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a trained run, and its model as a GPT-2 folder."""
    folder = tmp_path_factory.mktemp("base")
    started(1, "no", *FLAT, f"run.out={folder / 'run'}")
    export(folder / "run", "gpt2", folder / "gpt2", "float64", 10**9, [])
    return folder


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """A run with adapters on the folder."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    started(1, "no", *FLAT, *LORA, f"run.init_from={base / 'gpt2'}", f"run.out={folder}")
    return folder


def saved(folder):
    """The tensors in the newest checkpoint."""
    found = {}
    for file in newest(folder / CHECKPOINTS).glob("*.safetensors"):
        found |= load_file(file)
    return found


def held(transport, config, path=None):
    """This rank's parameters, with their descriptions, and its state."""
    trainer = build(transport, config, path).trainer
    entries = {entry.name: entry.parameter for entry in trainer.storage.tensors}
    return {name: (entries[name], value) for name, value in trainer.tensors().items()}


def test_a_checkpoint_has_the_adapters_alone_and_the_base_keeps_its_bits(base, adapted):
    found = saved(adapted)
    assert all(is_adapter([*name.split("/"), name][1]) for name in found)
    state = [name for name in found if "_moment/" in name]
    assert len(found) - len(state) == 2 * 2 * 3 and len(state) == 2 * (len(found) - len(state))
    config = configured(*FLAT, *LORA, f"run.init_from={base / 'gpt2'}")
    (own,) = run_ranks(1, held, config, newest(adapted / CHECKPOINTS))
    whole = saved(base / "run")
    for name, (_, value) in own.items():
        assert np.array_equal(value, (found if is_adapter(name) else whole)[name])


def resaved(transport, config, path, folder):
    """Load a checkpoint with adapters, and save it again from this layout."""
    trainer = build(transport, config, path).trainer
    return publish(
        folder,
        of_adapters(trainer.replica.state()),
        trainer.storage,
        transport,
        trainer.backend,
        manifest(trainer, Done(4, 0, "run"), base=trainer.begun_from),
        1,
    )


@pytest.mark.parametrize("rule", ("adamw", "momentum"))
def test_another_layout_has_the_same_bits_of_optimizer_state(base, tmp_path, rule):
    """One rank saves, another layout loads and saves, and one rank loads that."""
    own = [*FLAT, *LORA, f"optimizer.name={rule}", f"run.init_from={base / 'gpt2'}"]
    started(1, "no", *own, f"run.out={tmp_path / 'run'}")
    first = newest(tmp_path / "run" / CHECKPOINTS)
    truth = {
        name: one for file in first.glob("*.safetensors") for name, one in load_file(file).items()
    }
    assert any("moment" in name and np.any(one) for name, one in truth.items())
    for ranks, layout in ((2, "layout.tp=2"), (3, "replication.zero=3"), (4, "layout.pp=2")):
        folder = tmp_path / layout
        path, *_ = run_ranks(ranks, resaved, configured(*own, layout), first, folder)
        run_ranks(1, resaved, configured(*own), path, folder / CHECKPOINTS)
        found = saved(folder)
        assert found.keys() == truth.keys()
        assert all(np.array_equal(one, found[name]) for name, one in truth.items())


def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(base, adapted, tmp_path):
    begun = [*FLAT, *LORA, f"run.init_from={base / 'gpt2'}", f"run.out={tmp_path / 'run'}"]
    started(1, "no", *begun, "run.steps=2", "optimizer.schedule=constant")
    started(1, "no", *begun, f"run.out={tmp_path / 'whole'}", "optimizer.schedule=constant")
    started(1, "yes", *begun, "optimizer.schedule=constant")
    one, other = saved(tmp_path / "run"), saved(tmp_path / "whole")
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def evaluated(transport, folder, settings=()):
    trainer = open_run(transport, folder, lambda: opened(folder, [*settings])).trainer
    return trainer.backend.to_host(trainer.logits(np.arange(8)[None])).copy()


def test_a_moved_or_changed_base_is_refused_until_it_is_named(base, tmp_path):
    there = tmp_path / "base"
    shutil.copytree(base / "gpt2", there)
    begun = [*FLAT, *LORA, f"run.init_from={there}", f"run.out={tmp_path / 'run'}"]
    started(1, "no", *begun)
    (truth,) = run_ranks(1, evaluated, tmp_path / "run")
    there.rename(tmp_path / "moved")
    for action in (
        lambda: run_ranks(2, evaluated, tmp_path / "run"),
        lambda: resumed(2, tmp_path / "run", "run.steps=6"),
    ):
        with pytest.raises(CheckpointError, match="init_from") as raised:
            action()
        assert raised.value.agreed
    moved = f"run.init_from={tmp_path / 'moved'}"
    (again,) = run_ranks(1, evaluated, tmp_path / "run", [moved])
    assert np.array_equal(truth, again)
    with open(tmp_path / "moved" / "config.json", "a") as file:
        file.write("\n")
    with pytest.raises(CheckpointError, match=r"config\.json") as raised:
        run_ranks(2, evaluated, tmp_path / "run", [moved])
    assert raised.value.agreed


def test_a_base_that_trains_on_keeps_the_checkpoint_of_the_adapters(base, tmp_path):
    shutil.copytree(base / "run", tmp_path / "base")
    started(
        1, "no", *FLAT, *LORA, f"run.init_from={tmp_path / 'base'}", f"run.out={tmp_path / 'a'}"
    )
    (truth,) = run_ranks(1, evaluated, tmp_path / "a")
    resumed(1, tmp_path / "base", "run.steps=6")
    (again,) = run_ranks(1, evaluated, tmp_path / "a")
    assert np.array_equal(truth, again)
    resumed(1, tmp_path / "base", "run.steps=12")
    with pytest.raises(CheckpointError, match="init_from"):
        run_ranks(1, evaluated, tmp_path / "a")


def test_adapters_alone_find_their_base_and_continue(base, adapted, tmp_path):
    export(adapted, "peft", tmp_path / "peft", "float64", 10**9, [])
    (truth,) = run_ranks(1, evaluated, adapted)
    for name in (adapted, tmp_path / "peft"):
        config = configured(*[one for one in FLAT if "model." not in one], f"run.init_from={name}")
        assert config.run.init_from == str(base / "gpt2") and config.model.layers == 2
        (job,) = run_ranks(1, lambda own, config=config: logits(own, config))
        assert np.abs(job - truth).max() <= 1e-12
    record = json.loads((tmp_path / "peft" / "mpitrain.json").read_text())["base"]
    assert record["folder"] == str(base / "gpt2") and len(record["sha256"]) == 2
    (tmp_path / "peft" / "mpitrain.json").write_text(
        json.dumps({"base": {**record, "sha256": {"config.json": "0" * 64}}})
    )
    with pytest.raises(CheckpointError):
        run_ranks(2, build, configured("run.steps=1", f"run.init_from={tmp_path / 'peft'}"))
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        configured(f"run.init_from={adapted}", "lora.rank=7")


def logits(transport, config):
    trainer = build(transport, config).trainer
    return trainer.backend.to_host(trainer.logits(np.arange(8)[None])).copy()


def test_adapters_of_several_ranks_return_from_peft_with_the_rank_of_each(base, tmp_path):
    """Those of q and v become one of twice their rank, so c_fc gets zeros, which stay."""
    own = [*FLAT, "lora.rank=3", "lora.alpha=7", f"run.init_from={base / 'gpt2'}"]
    started(1, "no", *own, "lora.targets=q,v,c_fc", f"run.out={tmp_path / 'run'}")
    export(tmp_path / "run", "peft", tmp_path / "peft", "float64", 10**9, [])
    (truth,) = run_ranks(1, evaluated, tmp_path / "run")
    begun = [*FLAT, f"run.init_from={tmp_path / 'peft'}", f"run.out={tmp_path / 'next'}"]
    config = configured(*begun)
    assert (config.lora.rank, config.lora.alpha) == (6, 14)
    (found,) = run_ranks(2, logits, config)[:1]
    assert np.abs(found - truth).max() <= 1e-12
    started(2, "no", *begun)
    after = saved(tmp_path / "next")
    pairs = [after[f"blocks.1.mlp.up.{one}"] for one in ("lora_A", "lora_B")]
    assert pairs[0].any() and not pairs[0][3:].any() and not pairs[1][:, 3:].any()
    file = tmp_path / "peft" / "adapter_config.json"
    keys = json.loads(file.read_text())
    for key, value in (("alpha_pattern", {}), ("rank_pattern", {}), ("rank_pattern", {".*": 3})):
        file.write_text(json.dumps({**keys, key: value}))
        with pytest.raises(CheckpointError, match="alpha" if "alpha" in key else "rank|r 3|r 6"):
            configured(*begun)


@pytest.mark.parametrize(
    "names, missing",
    [
        ("mlp.down,qkv,h.0.mlp.c_fc,h.1.mlp.c_fc", ""),
        ("c_attn,c_fc", "blocks.0.mlp.down"),
        ("c_attn,c_fc,c_proj", "blocks.0.attention.out"),
        ("q,k,v,c_fc,mlp.c_proj", "blocks.0.attention.qkv"),
    ],
)
def test_targets_are_the_layers_of_the_adapters_however_they_are_spelled(
    base, adapted, names, missing
):
    config = configured(
        *FLAT,
        f"run.init_from={base / 'gpt2'}",
        f"lora.init_from={adapted}",
        f"lora.targets={names}",
    )
    if not missing:
        (truth,) = run_ranks(1, evaluated, adapted)
        assert np.abs(run_ranks(1, logits, config)[0] - truth).max() <= 1e-12
        return
    with pytest.raises(ConfigError, match=missing) as raised:
        run_ranks(2, build, config)
    assert raised.value.agreed


def test_a_copy_of_the_head_in_a_folder_of_peft_is_that_of_the_base(base, adapted, tmp_path):
    export(adapted, "peft", tmp_path / "peft", "float64", 10**9, [])
    file = tmp_path / "peft" / "adapter_model.safetensors"
    pair = {f"base_model.model.lm_head.lora_{one}.weight" for one in "AB"}
    head = saved(base / "run")["head.logits.weight"]
    vocabulary, width = head.shape
    tensors = load_file(file) | dict.fromkeys(pair, np.zeros((3, width)))
    tensors["base_model.model.lm_head.lora_B.weight"] = np.zeros((vocabulary, 3))
    (truth,) = run_ranks(1, evaluated, adapted)
    for dtype, change in ((np.float64, 0), (np.float16, 0), (np.float64, 1e-9)):
        copy = head.astype(dtype)
        copy[-1, -1] += change
        save_file({**tensors, "base_model.model.lm_head.base_layer.weight": copy}, file)
        config = configured(*FLAT, f"run.init_from={tmp_path / 'peft'}")
        if not change:
            assert np.abs(run_ranks(2, logits, config)[0] - truth).max() <= 1e-12
            continue
        with pytest.raises(CheckpointError, match="lm_head"):
            run_ranks(2, build, config)


def test_the_command_that_started_from_adapters_resumes_the_run(adapted, tmp_path):
    export(adapted, "peft", tmp_path / "peft", "float64", 10**9, [])
    for name, source in (("a", adapted), ("b", tmp_path / "peft")):
        own = [one for one in FLAT if "model." not in one]
        own += [f"run.init_from={source}", f"run.out={tmp_path / name}"]
        started(1, "no", *own)
        for more in ([], [f"lora.init_from={source}"]):
            again = _configured(None, [*own, *more, "run.steps=5"], "auto")
            assert again.run.init_from == configuration(adapted).run.init_from
            assert again.lora.init_from == str(source)
        run_ranks(1, lambda rank, c=again: train(rank, lambda: c, "auto", lambda: False))
        assert read_manifest(newest(tmp_path / name / CHECKPOINTS)).done.step == 5


def test_a_base_is_refused_for_a_run_without_adapters(base, tmp_path):
    with pytest.raises(ConfigError, match="--base"):
        opened(base / "run", [f"run.init_from={base / 'gpt2'}"])
    with pytest.raises(ConfigError, match="--base"):
        export(base / "run", "gpt2", tmp_path / "out", "float32", 10**9, [], base=str(base))


def test_an_adapter_that_peft_puts_on_an_altered_base_is_refused(adapted, tmp_path):
    export(adapted, "peft", tmp_path / "peft", "float64", 10**9, [])
    file = tmp_path / "peft" / "adapter_config.json"
    keys = json.loads(file.read_text())
    for key, value in (
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 2], [1, 2]]),
    ):
        file.write_text(json.dumps({**keys, key: value}))
        with pytest.raises(CheckpointError, match=key):
            configured(f"run.init_from={tmp_path / 'peft'}")
    file.write_text(json.dumps({**keys, "init_lora_weights": "gaussian"}))
    assert configured(f"run.init_from={tmp_path / 'peft'}").lora.rank == 3


@pytest.mark.parametrize("setting", ("lora.alpha=8.0", "lora.targets=c_fc", "lora.dropout=0.1"))
def test_a_key_of_adapters_is_refused_without_a_rank(setting):
    with pytest.raises(ConfigError, match=r"lora\.rank is 0"):
        configured(*FLAT, setting)


def test_merged_parameters_compute_the_same_logits(base, adapted, tmp_path):
    (truth,) = run_ranks(1, evaluated, adapted)
    export(adapted, "gpt2", tmp_path / "merged", "float64", 10**9, [], merge=True)
    config = configured("precision.compute=float64", f"run.init_from={tmp_path / 'merged'}")
    (found,) = run_ranks(1, logits, config)
    assert np.abs(found - truth).max() <= 1e-12 * np.abs(truth).max()
    (other,) = run_ranks(1, evaluated, base / "run")
    assert np.abs(other - truth).max() > 1e-3
    with pytest.raises(ConfigError, match="--merge"):
        export(adapted, "gpt2", tmp_path / "none", "float64", 10**9, [])
    with pytest.raises(ConfigError, match="--merge"):
        export(base / "run", "gpt2", tmp_path / "none", "float64", 10**9, [], merge=True)
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        export(base / "run", "peft", tmp_path / "none", "float64", 10**9, [])
    assert configuration(adapted).lora.targets == ["c_attn", "c_fc", "mlp.c_proj"]
