"""The adapters of a run and the base under them: the folders that both are read from.

A run with lora.rank and run.init_from saves only its adapters. Its checkpoints have the folder of
the base, and the SHA-256 of each file. Every later start reads the base again, and compares.
"""

from __future__ import annotations  # help() prints signatures as they are written here.

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.config import Config
from mpitrain.errors import CheckpointError, ConfigError, on_every_rank
from mpitrain.formats import peft
from mpitrain.formats.folder import Initial, refusing
from mpitrain.formats.gpt2 import HEAD
from mpitrain.formats.safetensors_files import FLOATS
from mpitrain.formats.tensors import StoredTensor
from mpitrain.layers.base import Unit
from mpitrain.models.targets import chosen_targets, is_adapter, targets
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.run.checkpoint.directories import newest
from mpitrain.run.checkpoint.load import parameters
from mpitrain.run.checkpoint.manifest import MANIFEST, read_manifest
from mpitrain.run.run_dir import CHECKPOINTS, is_run
from mpitrain.run.transfer.initial import open_initial

ROWS = 4096
"""Rows of a head that are compared at a time."""


def of_base(kept: Sequence[StateBuffer]) -> list[StateBuffer]:
    """Return the buffers of parameters without the adapters."""
    return _chosen(kept, lambda name: not is_adapter(name), lambda buffer: False)


def of_adapters(kept: Sequence[StateBuffer]) -> list[StateBuffer]:
    """Return the state without the base: adapters, optimizer state and the like."""
    return _chosen(kept, is_adapter, lambda buffer: True)


def _chosen(
    kept: Sequence[StateBuffer],
    is_chosen: Callable[[str], bool],
    otherwise: Callable[[StateBuffer], bool],
) -> list[StateBuffer]:
    """Return the chosen buffers. A buffer of frozen parameters has only the chosen tensors.

    is_chosen  whether a tensor of this name is chosen
    otherwise  whether a buffer of any other state is chosen
    """
    chosen = []
    for buffer in kept:
        if buffer.name != "parameters" or not buffer.entries:
            chosen += [buffer] if otherwise(buffer) else []
        elif own := [entry for entry in buffer.entries if is_chosen(entry.name)]:
            chosen.append(buffer._replace(entries=own))
    return chosen


def open_adapter(config: Config) -> tuple[Initial, dict[str, Any]]:
    """Locate the adapters of lora.init_from; not collective.

    returns  the adapters, and the record of the base that they were trained on; the record is empty
             if there is none, or if run.init_from names another folder
    """
    folder = Path(config.lora.init_from)
    if is_run(folder):
        saved = newest(folder / CHECKPOINTS)
        adapter = Initial(saved, {}, parameters(saved), [MANIFEST])
        record = base_of(saved)
    else:
        adapter, record = peft.read(folder), peft.base(folder)
    is_same = record and folder_of(record).resolve() == Path(config.run.init_from).resolve()
    return adapter, record if is_same else {}


def check_layers(adapter: Initial, config: Config, units: Sequence[Unit]) -> None:
    """Raise ConfigError unless adapters belong to the layers that lora.targets names.

    units  of the whole model, without adapters
    """
    chosen = chosen_targets([*targets(units)], config.lora.targets)
    configured = {f"{target.layer}.{target.region}".removesuffix(".") for target in chosen}
    stored = {name.rpartition(".")[0] for name in adapter.tensors if is_adapter(name)}
    if different := sorted(configured ^ stored):
        which, way = ("lacks", "names") if different[0] in configured else ("has", "does not name")
        raise ConfigError(
            f"The adapter {config.lora.init_from} {which} {different[0]}, but lora.targets {way} this layer.",
            "Leave out lora.targets, or start without the adapter.",
        )


def check_head(adapter: Initial, base: Initial) -> None:
    """Raise CheckpointError if a folder of PEFT has a copy of another head than the base has."""
    head = adapter.tensors.get(HEAD)
    if not isinstance(head, StoredTensor) or MANIFEST in adapter.files:
        return
    weight = base.tensors.get(HEAD) or base.tensors.get("embedding.tokens")
    dtype = FLOATS[head.located.dtype]
    with refusing(adapter.folder):
        is_same = (
            weight
            and head.shape == weight.shape
            and all(
                np.array_equal(head.read(rows), weight.read(rows).astype(dtype))
                for first in range(0, head.shape[0], ROWS)
                for rows in [(slice(first, min(first + ROWS, head.shape[0])), head.whole[1])]
            )
        )
    if not is_same:
        raise CheckpointError(
            f"Adapters train on the model of run.init_from, but {adapter.folder} has another lm_head than {base.folder}.",
            "Name the model that was under the adapters: --set run.init_from=FOLDER.",
        )


def base_of(checkpoint: Path) -> dict[str, Any]:
    """Return the record of the base in a checkpoint; empty if it has all parameters."""
    return dict(read_manifest(checkpoint).base)


def folder_of(record: Mapping[str, Any]) -> Path:
    """Return the folder or the run directory of a recorded base."""
    folder = Path(record["folder"])
    return folder.parent.parent if MANIFEST in record["sha256"] else folder


def open_base(config: Config, record: Mapping[str, Any], vocabulary: int) -> Initial:
    """Locate the base under the adapters of the checkpoint in run.init_from; not collective.

    The base may have moved. A run that is the base may have newer checkpoints.

    record      from the checkpoint
    vocabulary  of the data
    raises      CheckpointError if there is no such model
    """
    folder, saved = Path(config.run.init_from), None
    try:
        if is_run(folder):
            saved = folder / CHECKPOINTS / Path(record["folder"]).name
            read_manifest(saved)
        return open_initial(config, vocabulary, saved)
    except CheckpointError as error:
        raise CheckpointError(
            f"Adapters need the model that they were trained on, but {config.run.init_from} cannot be read: {error.law}",
            "If it has moved, name it: --base FOLDER, or --set run.init_from=FOLDER to train.",
        ) from None


def check_base(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless two records of a base have the same digests.

    then  of the adapters; empty: there is nothing to compare
    now   of run.init_from, equal on all ranks
    """
    changed = [
        name
        for name in sorted({*then["sha256"], *now["sha256"]} if then else ())
        if then["sha256"].get(name) != now["sha256"].get(name)
    ]
    if changed:
        raise on_every_rank(
            CheckpointError(
                "Adapters belong to the model that they were trained on, but "
                f"{changed[0]} in {now['folder']} has another content now.",
                "Name the model as it was: --base FOLDER, or --set run.init_from=FOLDER to train.",
            )
        )
