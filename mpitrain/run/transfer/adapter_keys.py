"""The keys of adapters that a run starts from: read from their folder, and compared."""

from __future__ import annotations  # help() prints signatures as they are written here.

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.config import CONFIG, Config, read_toml
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.formats import peft
from mpitrain.formats.folder import names

OF_ADAPTER = ("rank", "alpha", "targets")
"""The keys of [lora] that the tensors of an adapter determine."""


def with_adapter(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the keys that an adapter determines, if the tables name an adapter to start from.

    Layers have several names each, so lora.targets is compared later, with the model.

    If run.init_from names an adapter, lora.init_from takes its place, and run.init_from becomes the
    base that the adapter was trained on.

    raises  ConfigError for a key with another value than the adapter has, or an adapter without a
            base; CheckpointError if the folder is damaged
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
    """Add the keys that a run took from an adapter, to tables with which the run resumes.

    then  the configuration of the run
    """
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
        return peft.is_own(present)
    lora = read_toml(folder / CONFIG, inner=1).get("lora")
    return isinstance(lora, dict) and bool(lora.get("rank"))


def adapter_keys(folder: Path) -> dict[str, Any]:
    """Return {section.key: value} of the adapters in a folder, and run.init_from, their base.

    raises  CheckpointError if there are none
    """
    if not has_adapter(folder):
        raise CheckpointError(
            f"{folder} has no adapters: it is neither a run with lora.rank nor a folder of PEFT.",
            "Name the directory of a run that trained adapters, or a folder with adapter_config.json.",
        )
    if CONFIG not in names(folder):
        return peft.keys(folder)
    tables = read_toml(folder / CONFIG, inner=1)
    keys = {f"lora.{key}": tables["lora"].get(key) for key in OF_ADAPTER}
    return {**keys, "run.init_from": tables.get("run", {}).get("init_from", "")}
