"""The keys that the folders of run.init_from and lora.init_from determine: read, and compared."""

from __future__ import annotations  # help() prints signatures as they are written here.

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.config import CONFIG, Config, Model, read_toml
from mpitrain.data import source_kind
from mpitrain.data.templates import without_day
from mpitrain.data.tokenizer import TOKENIZER
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.files import text_of
from mpitrain.formats import peft
from mpitrain.formats.chat import chat_template
from mpitrain.formats.folder import names, refusing
from mpitrain.formats.table import format_of
from mpitrain.formats.writing import is_of_bytes

OF_EVERY_RUN = [
    "kind",
    "layers",
    "width",
    "heads",
    "context",
    "tied",
    "hidden",
    "epsilon",
    "channels",
    "kernel",
    "pool",
]
OF_RUN = [
    *OF_EVERY_RUN,
    "kv_heads",
    "head_dim",
    "qk_norm",
    "activation",
    "scaled_embedding",
    "qkv_bias",
    "theta",
    "rope_scaling",
    "window",
    "window_from",
    "window_every",
    "window_theta",
    "pre_norm",
    "post_norm",
    "nope_every",
    "clip_qkv",
    "score_scale",
    "score_cap",
    "logit_cap",
]
OF_RUN += ["embedding_scale", "residual_scale", "logit_scale"]
OF_RUN += ["experts", "top_k", "router", "capacity", "shared", "shared_gate"]
OF_RUN += ["dense_blocks", "dense_hidden"]
"""The keys of [model] that the parameters of a run determine; runs of earlier versions lack some."""


def determined(folder: Path) -> dict[str, Any]:
    """Return {section.key: value} of the model in a folder: of a run, or of a row of FORMATS."""
    if CONFIG not in (present := names(folder)):
        keys = {**format_of(folder).keys(folder), "data.template": chat_template(folder)}
        return {**keys, "data.tokenizer": _tokenizer(folder) if TOKENIZER in present else ""}
    tables = read_toml(folder / CONFIG)
    model, data = tables.get("model"), tables.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        raise CheckpointError(
            f"{folder / CONFIG} is not the configuration of a run: it lacks [model] or [data].",
            "Name the directory of another run.",
        )
    # A run of an earlier version has the defaults of newer keys.
    keys = {f"model.{key}": model.get(key, Model.model_fields[key].default) for key in OF_RUN}
    return {
        **keys,
        "data.vocabulary": data.get("vocabulary", 0),
        "data.template": without_day(str(data.get("template", ""))),
        "data.classes": data.get("classes", 0),
        "data.labels": data.get("labels", []),
        "data.tokenizer": str(folder / TOKENIZER) if TOKENIZER in present else "",
    }


def _tokenizer(folder: Path) -> str:
    """Return the path of a folder's tokenizer; empty if its tokens are bytes."""
    with refusing(folder):
        is_bytes = is_of_bytes(text_of(folder / TOKENIZER))
    return "" if is_bytes else str(folder / TOKENIZER)


def with_keys_of_folder(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the keys that run.init_from and lora.init_from determine, to tables that lack them.

    Tables that already have all keys of a model come from a run directory: its folder may be gone.

    raises  ConfigError for a key with another value than in the folder
    """
    model = tables.get("model", {})
    if not isinstance(model, Mapping) or set(OF_EVERY_RUN) <= set(model):
        return tables
    tables = with_adapter(tables)
    run = tables.get("run")
    name = run.get("init_from") if isinstance(run, Mapping) else None
    if not isinstance(name, str) or not name:
        return tables
    try:
        keys = determined(Path(name))
    except ValueError:  # No path can have this name, and the check of keys says so.
        return tables
    lora = tables.get("lora")
    adapter = lora.get("init_from") if isinstance(lora, Mapping) else None
    if isinstance(adapter, str) and adapter:
        template = _template_of_adapter(Path(adapter), Path(name))
        keys["data.template"] = template or keys["data.template"]
    configured = {f"model.{key}": value for key, value in model.items()}
    check_keys(name, keys, configured)
    return with_keys(tables, keys)


def _template_of_adapter(folder: Path, base: Path) -> str:
    if CONFIG in names(folder):
        return str(determined(folder)["data.template"])
    return chat_template(folder, base)


def with_keys(tables: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the tables with the keys of a model that they lack.

    keys  {section.key: value}, as `determined` returns it; the keys of [data] are taken only if
          data.source reads them
    """
    model, data = tables.get("model", {}), tables.get("data", {})
    if not isinstance(model, Mapping) or not isinstance(data, Mapping):
        return dict(tables)
    own = {key: keys[f"model.{key}"] for key in OF_RUN if f"model.{key}" in keys}
    joined = {**tables, "model": {**own, **model}}
    source = data.get("source")
    kind = source_kind(source) if isinstance(source, str) else None
    if not kind:
        return joined
    read = {
        key: keys[f"data.{key}"]
        for key in ("template", "tokenizer")
        if kind.does_read("tokenizer") and keys.get(f"data.{key}") and key not in data
    }
    is_file = (
        kind.is_token_file or data.get("mixture") or read.get("tokenizer", data.get("tokenizer"))
    )
    if is_file and not data.get("vocabulary"):
        read["vocabulary"] = keys["data.vocabulary"]
    for key in ("classes", "labels"):
        if kind.does_read(key) and keys.get(f"data.{key}") and not data.get(key):
            read[key] = keys[f"data.{key}"]
    return {**joined, "data": {**data, **read}} if read else joined


def check_keys(name: str, stored: Mapping[str, Any], configured: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key of [model] with another value than in the folder `name`.

    A shorter model.context is allowed: the run then takes the first positions.
    """
    for key in (f"model.{key}" for key in OF_RUN):
        then, now = stored.get(key), configured.get(key)
        if key not in stored or key not in configured or then == now:
            continue
        if key == "model.context" and isinstance(now, int) and 0 < now < stored[key]:
            continue
        if key == "model.hidden":
            model = {own.removeprefix("model."): stored[own] for own in _SIZES}
            units = {Model(**model, hidden=hidden or 0).hidden_units for hidden in (then, now)}
            if len(units) == 1:
                continue
        raise ConfigError(
            f"The model of run.init_from {name} has {key} {then!r}, but the configuration says {now!r}.",
            f"Leave out {key}, or the preset that sets it; or start without run.init_from.",
        )


_SIZES = ("model.kind", "model.width")
"""Keys that the number of hidden units follows from."""


OF_ADAPTER = ("rank", "alpha", "targets")
"""The keys of [lora] that the tensors of an adapter determine."""


def with_adapter(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the keys that an adapter determines, if the tables name an adapter to start from.

    If run.init_from names an adapter, lora.init_from takes its place, and run.init_from becomes the
    base that the adapter was trained on. Layers have several names each, so lora.targets is compared
    later, with the model.
    """
    run, lora = tables.get("run", {}), tables.get("lora", {})
    if not isinstance(run, Mapping) or not isinstance(lora, Mapping):
        return tables
    base, folder = run.get("init_from", ""), lora.get("init_from", "")
    if not isinstance(base, str) or not isinstance(folder, str):
        return tables
    if not folder and base and has_adapter(Path(base)):
        base, folder = "", base
    if not folder:
        return tables
    keys = adapter_keys(Path(folder))
    base = base or keys["run.init_from"]
    if not base or not Path(base).is_dir():
        raise ConfigError(
            f"Adapters need the model that they were trained on, but {folder} names {base or 'none'}, which is no folder here.",
            f"Name both: --set run.init_from=BASE --set lora.init_from={folder}.",
        )
    own = {key: keys[f"lora.{key}"] for key in OF_ADAPTER}
    for key in ("rank", "alpha"):
        if key in lora and lora[key] != own[key]:
            raise ConfigError(
                f"The adapter {folder} has lora.{key} {own[key]!r}, but the configuration says {lora[key]!r}.",
                f"Leave out lora.{key}, or start without the adapter.",
            )
    return {
        **tables,
        "run": {**run, "init_from": base},
        "lora": {**own, **lora, "init_from": folder},
    }


def with_adapter_of_run(tables: dict[str, Any], then: Config) -> dict[str, Any]:
    """Add the keys that a run took from an adapter, to tables with which it resumes."""
    run, lora = tables.get("run", {}), tables.get("lora", {})
    if not then.lora.init_from or not isinstance(lora, Mapping):
        return tables
    own = {key: getattr(then.lora, key) for key in (*OF_ADAPTER, "init_from")}
    named = os.path.abspath(str(run.get("init_from")))
    base = then.run.init_from if named == then.lora.init_from else run.get("init_from")
    return {**tables, "run": {**run, "init_from": base}, "lora": {**own, **lora}}


def has_adapter(folder: Path) -> bool:
    """Return whether a folder has adapters, of a run or of PEFT; False if it cannot be read."""
    try:
        present = names(folder)
    except CheckpointError:
        return False
    if CONFIG not in present:
        return peft.CONFIGURATION in present
    lora = read_toml(folder / CONFIG).get("lora")
    return isinstance(lora, dict) and bool(lora.get("rank"))


def adapter_keys(folder: Path) -> dict[str, Any]:
    """Return {section.key: value} of the adapters in a folder, and run.init_from, their base."""
    if not has_adapter(folder):
        raise CheckpointError(
            f"{folder} has no adapters: it is neither a run with lora.rank nor a folder of PEFT.",
            "Name the directory of a run that trained adapters, or a folder with adapter_config.json.",
        )
    if CONFIG not in names(folder):
        return peft.keys(folder)
    tables = read_toml(folder / CONFIG)
    keys = {f"lora.{key}": tables["lora"].get(key) for key in OF_ADAPTER}
    return {**keys, "run.init_from": tables.get("run", {}).get("init_from", "")}
