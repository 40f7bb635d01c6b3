"""Presets: their models have the published sizes, and files and settings override them."""

import math

import pytest
import tomli_w

from mpitrain.cli.job_options import PRESET, configured
from mpitrain.cli.train import _configured
from mpitrain.config import PRESETS, Config, keys, merged, preset, with_settings
from mpitrain.data import Unopened
from mpitrain.errors import ConfigError
from mpitrain.layers.plain import Plain
from mpitrain.models.table import units_of
from mpitrain.ops.device import ops_for
from mpitrain.run.choices import parse


@pytest.mark.parametrize(
    "name, parameters, tokens",
    [
        ("tiny", 875_264, 4_096),
        ("gpt2-124m", 124_439_808, 491_520),
        ("gpt2-350m", 354_823_168, 491_520),
        ("llama-160m", 162_417_408, 524_288),
        ("llama-1b", 1_100_048_384, 2_097_152),
    ],
)
def test_a_preset_has_its_published_number_of_parameters(name, parameters, tokens):
    config = parse(preset(name))
    vocabulary = config.data.vocabulary or 256
    source = Unopened("tokens", (config.model.context,), vocabulary, vocabulary)
    units = units_of(config.model, source, Plain(ops_for("cpu")))  # Layers own no arrays.
    shapes = {
        unit.full_name(own): own.shape
        for unit in units
        for own in unit.layer.parameters()
        if own.name not in unit.tied
    }
    assert sum(map(math.prod, shapes.values())) == parameters
    assert config.batch.size * config.model.context == tokens


def test_tiny_is_the_default_job_in_every_key():
    assert parse(preset("tiny")) == Config()


def test_presets_set_the_same_keys_so_that_no_rate_of_tiny_is_inherited():
    spelled = {
        name: {f"{section}.{key}" for section, table in row.tables.items() for key in table}
        for name, row in PRESETS.items()
    }
    assert len(set(map(frozenset, spelled.values()))) == 1
    assert spelled["tiny"] <= {key.name for key in keys()}
    large = parse(preset("gpt2-124m")).optimizer
    assert (large.lr, large.beta1, large.warmup) == (6e-4, 0.9, 2000)


def test_a_file_overrides_a_preset_and_a_setting_overrides_both(tmp_path):
    (tmp_path / "own.toml").write_text("optimizer.lr = 1e-4\nbatch.size = 80\n")
    found = configured(tmp_path / "own.toml", ["batch.size=40"], "gpt2-350m")
    assert (found.optimizer.lr, found.batch.size, found.model.layers) == (1e-4, 40, 24)
    assert found.batch.micro_batches == 40


def test_merging_changes_neither_table_and_leaves_malformed_ones_to_parse():
    low, high = {"run": {"steps": 1, "seed": 2}, "model": 3}, {"run": {"steps": 4}, "data": {}}
    assert merged(low, high) == {"run": {"steps": 4, "seed": 2}, "model": 3, "data": {}}
    assert low == {"run": {"steps": 1, "seed": 2}, "model": 3} and high["run"] == {"steps": 4}
    with pytest.raises(ConfigError):
        parse(merged(preset("tiny"), {"model": 3}))


def test_the_help_lists_all_presets_and_an_unknown_one_is_refused():
    option = PRESET(lambda: None).__click_params__[0]
    assert all(name in option.help for name in PRESETS)
    with pytest.raises(ConfigError, match="gpt2-1240m"):
        configured(None, [], "gpt2-1240m")


def test_a_preset_overrides_the_keys_of_a_resumed_run(tmp_path):
    run = with_settings(Config().model_dump(), ["optimizer.lr=1e-3", "data.order=epochs"])
    (tmp_path / "config.toml").write_text(tomli_w.dumps(run))
    where = f"run.out={tmp_path}"
    alone = _configured(None, [where], "yes")
    assert (alone.optimizer.lr, alone.data.order) == (1e-3, "epochs"), "presets are not inherited"
    preset_too = _configured(None, [where, "optimizer.clip=2.0"], "yes", "tiny")
    assert (preset_too.optimizer.lr, preset_too.optimizer.clip) == (2e-3, 2.0)
    assert preset_too.data.order == "epochs"
