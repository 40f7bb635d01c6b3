"""Presets: named configurations of well-known models, for `--preset`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpitrain.config.sections import Config
from mpitrain.errors import ConfigError

Tables = Mapping[str, Any]
"""{section: {key: value}}, as a configuration file has them."""


class Preset(NamedTuple):
    """A row of PRESETS.

    help    one phrase
    tables  the keys that the preset sets
    """

    help: str
    tables: Tables


def _gpt2(layers: int, width: int, heads: int, lr: float) -> Tables:
    """Return a GPT-2 with the rates and the batch of nanoGPT's train_gpt2.py.

    A step has 480 x 1,024 = 491,520 tokens. One rank computes 40 micro-batches of 12 sequences.
    """
    own = {"kind": "gpt", "layers": layers, "width": width, "heads": heads, "context": 1024}
    model = {**own, "tied": True, "hidden": 0, "kv_heads": 0, "theta": 10_000.0}
    return _large(model, 50_257, (480, 40), lr)


def _llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    batch: tuple[int, int],
    lr: float,
) -> Tables:
    """Return a Llama with the rates of TinyLlama (Zhang et al. 2024).

    batch  sequences of 2,048 tokens, and micro-batches of one rank
    """
    own = {"kind": "llama", "layers": layers, "width": width, "heads": heads, "context": 2048}
    model = {**own, "tied": False, "hidden": hidden, "kv_heads": kv_heads, "theta": 10_000.0}
    return _large(model, 32_000, batch, lr)


def _large(model: dict[str, Any], vocabulary: int, batch: tuple[int, int], lr: float) -> Tables:
    """Return a job that trains a large model from text.    batch: size and micro-batches"""
    return {
        "model": model,
        "data": {"vocabulary": vocabulary},
        "batch": {"size": batch[0], "micro_batches": batch[1]},
        "optimizer": {
            "name": "adamw",
            "lr": lr,
            "beta1": 0.9,
            "beta2": 0.95,
            "epsilon": 1e-8,
            "weight_decay": 0.1,
            "clip": 1.0,
            "warmup": 2000,
            "schedule": "cosine",
            "final": 0.1,
        },
        "precision": {"compute": "bfloat16"},
        "run": {"steps": 600_000, "eval_every": 1000},
        "checkpoint": {"every": 1000},
    }


def _defaults(tables: Tables) -> Tables:
    """Return the defaults of the keys that another preset sets."""
    default = Config().model_dump()
    return {
        section: {key: default[section][key] for key in table} for section, table in tables.items()
    }


PRESETS: Mapping[str, Preset] = {
    "tiny": Preset("the default job", _defaults(_gpt2(12, 768, 12, 6e-4))),
    "gpt2-124m": Preset("GPT-2 small", _gpt2(12, 768, 12, 6e-4)),
    # Brown et al. 2020 give this learning rate for GPT-3 medium, in table 2.1.
    "gpt2-350m": Preset("GPT-2 medium", _gpt2(24, 1024, 16, 3e-4)),
    "llama-160m": Preset(
        "a Llama as small as GPT-2", _llama(12, 768, 12, 0, 3072, (256, 64), 6e-4)
    ),
    "llama-1b": Preset("TinyLlama", _llama(22, 2048, 32, 4, 5632, (1024, 512), 4e-4)),
}
"""{name: preset}; a new preset needs only a row."""


def preset(name: str | None) -> Tables:
    """Return the tables of a preset; none without a name; ConfigError for an unknown one."""
    if name is None:
        return {}
    if name not in PRESETS:
        raise ConfigError(
            f"A preset is one of {', '.join(PRESETS)}, but got {name!r}.",
            "Leave out --preset, and set keys with --set.",
        )
    return PRESETS[name].tables


def merged(low: Tables, high: Tables) -> dict[str, Any]:
    """Return both tables of tables as one; a key of `high` replaces the one of `low`."""
    tables = dict(low)
    for section, table in high.items():
        below = tables.get(section)
        if isinstance(below, Mapping) and isinstance(table, Mapping):
            tables[section] = {**below, **table}
        else:
            tables[section] = table
    return tables
