"""Starts a run from the parameters in the folder of run.init_from, in any layout."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.errors import CheckpointError, ConfigError, say
from mpitrain.formats import peft
from mpitrain.formats.architecture import HEAD
from mpitrain.formats.folder import Initial, refusing, sha256
from mpitrain.formats.table import format_of
from mpitrain.formats.tensors import AnyTensor, StoredTensor, is_copy
from mpitrain.layers.base import Rectangle, Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Backend
from mpitrain.models.table import MODELS
from mpitrain.models.targets import chosen_targets, is_adapter, targets
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.run.checkpoint import loading
from mpitrain.run.checkpoint.loading import parameters, put
from mpitrain.run.checkpoint.manifest import MANIFEST, newest, read_chosen, read_manifest
from mpitrain.run.checkpoint.regions import Region, described, holdings, joined_dim
from mpitrain.run.checkpoint.saving import PARAMETERS
from mpitrain.run.model_keys import adapter_keys, check_keys, determined
from mpitrain.run.run_dir import CHECKPOINTS, check_meaning, is_run
from mpitrain.transport.agreement import from_all_ranks
from mpitrain.transport.base import Transport

POSITIONS = "embedding.positions"
"""The tensor whose first rows are enough for a run with a shorter model.context."""


class Models(NamedTuple):
    """The models that a run starts from, located on this rank.

    base               its parameters, or those under its adapters
    adapter            the adapters; None: they are new, or in a checkpoint, or there are none
    adapter_base       the record of the base that `adapter` was trained on; empty: there is none
    is_under_adapters  whether the run trains adapters
    """

    base: Initial
    adapter: Initial | None
    adapter_base: Mapping[str, Any]
    is_under_adapters: bool

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks."""
        facts: dict[str, Any] = {"run.init_from": self.base.fingerprint}
        return facts | ({"lora.init_from": self.adapter.fingerprint} if self.adapter else {})

    def lack(self, name: str) -> bool:
        """Return whether a run draws this tensor, as none of them has it."""
        if is_adapter(name):
            return not self.adapter
        return name not in self.base.tensors

    def load(
        self, transport: Transport, kept: Sequence[StateBuffer], storage: Storage, backend: Backend
    ) -> dict[str, Any]:
        """Fill the parameters of all ranks; collective; returns the record of the base."""
        buffers = of_base(kept) if self.is_under_adapters else kept
        record = load_initial(transport, self.base, buffers, storage, backend)
        if self.adapter:
            check_base(self.adapter_base, record)
            load_initial(transport, self.adapter, of_adapters(kept), storage, backend)
        return record

    def adapters_of(
        self, kept: Sequence[StateBuffer], then: Mapping[str, Any], now: Mapping[str, Any]
    ) -> list[StateBuffer]:
        """Return the buffers that a checkpoint of adapters fills; see `check_base` for the rest."""
        check_base(then, now)
        return of_adapters(kept)


def open_models(
    config: Config,
    checkpoint: Path | None,
    vocabulary: int,
    units: Callable[[], Sequence[Unit]],
    rank: int,
) -> Models | None:
    """Locate the models that a run starts from on this rank; None if there are none.

    checkpoint  from which the run resumes: it needs only the base of its adapters; None: a new run
    units       returns the units of the whole model, without adapters
    """
    if checkpoint:
        record = base_of(checkpoint) if config.lora.rank else {}
        base = open_base(config, record, vocabulary) if record else None
        return base and Models(base, None, {}, True)
    if not config.run.init_from:
        return None
    base, adapter, record = open_initial(config, vocabulary), None, {}
    if config.lora.rank and base.may_lack:
        _check_head_is_there(base, units())
    if config.lora.init_from:
        adapter, record = open_adapter(config)
        check_adapter(adapter, base, config, units(), rank)
    return Models(base, adapter, record, bool(config.lora.rank))


def _check_head_is_there(base: Initial, units: Sequence[Unit]) -> None:
    """Raise ConfigError if a run would draw tensors under adapters, which nothing would train."""
    for unit in units:
        for parameter in unit.layer.parameters():
            name = unit.full_name(parameter)
            is_own = name.startswith(base.may_lack) and parameter.name not in unit.tied
            if is_own and name not in base.tensors:
                raise ConfigError(
                    f"Adapters train on a whole model, but {base.folder} lacks {name}.",
                    "Train the head first with lora.rank=0, and start from that run.",
                )


def open_initial(config: Config, vocabulary: int, saved: Path | None = None) -> Initial:
    """Locate the model of run.init_from; not collective.

    vocabulary  of the data
    saved       the checkpoint to read if the folder is a run directory; None: its newest
    """
    folder = Path(config.run.init_from)
    if is_run(folder):
        saved, manifest = read_chosen(lambda: saved or newest(folder / CHECKPOINTS))
        keys = determined(folder)
        check_meaning(keys, saved, manifest)
        may_lack = "head." if MODELS[keys["model.kind"]].hides else ""
        initial = Initial(saved, keys, parameters(saved), [MANIFEST], may_lack=may_lack)
    else:
        initial = format_of(folder).read(folder)
    check_keys(config.run.init_from, initial.keys, config.flat())
    wanted = initial.keys.get("data.vocabulary", 0)
    is_fixed = wanted and initial.keys["model.kind"] in peft.ARCHITECTURES
    if is_fixed and vocabulary and wanted != vocabulary:
        raise ConfigError(
            f"The model of run.init_from {config.run.init_from} has {wanted} tokens, but {config.data.source} has {vocabulary}.",
            "Encode the text with the tokenizer of that model: mpitrain data prepare --tokenizer.",
        )
    return initial


def load_initial(
    transport: Transport,
    initial: Initial,
    kept: Sequence[StateBuffer],
    storage: Storage,
    backend: Backend,
) -> dict[str, Any]:
    """Fill the parameters of all ranks from a folder; collective. A checkpoint is verified first.

    returns  {"folder": path, "sha256": {name: digest}} for the record of the run
    """
    if MANIFEST in initial.files:
        loading.read_beside(transport, initial.folder)
    if transport.rank == 0:
        for note in initial.notes:
            say(f"note: {note}.")

    def filled() -> tuple[dict[str, str], list[str]]:
        with refusing(initial.folder):
            drawn = fill(initial, kept, storage, backend)
            names = initial.files[transport.rank :: transport.size]
            return {name: sha256(initial.folder / name) for name in names}, drawn

    every = from_all_ranks(transport, filled)
    digests = {name: digest for own, _ in every for name, digest in own.items()}
    if transport.rank == 0 and (drawn := sorted({name for _, names in every for name in names})):
        say(f"note: {initial.folder} lacks {', '.join(drawn)}, which are drawn.")
    return {"folder": os.path.abspath(initial.folder), "sha256": dict(sorted(digests.items()))}


def fill(
    initial: Initial, kept: Sequence[StateBuffer], storage: Storage, backend: Backend
) -> list[str]:
    """Fill a rank's parameters, and the buffers that start as copies of them; not collective.

    returns  the names of the tensors that stay as they are, because the folder may lack them
    """
    folder, tensors, drawn = initial.folder, initial.tensors, list[str]()
    for held in holdings(described(storage, kept)):
        if PARAMETERS not in (held.name, kept[held.number].like):
            continue
        name, shape = held.part.tensor, held.part.shape
        stored = tensors.get(name)
        if stored is None and initial.may_lack and name.startswith(initial.may_lack):
            drawn.append(name)
            continue
        if stored is None or not _fits(name, stored.shape, shape):
            raise _unfit(folder, name, shape, stored)
        with np.errstate(over="ignore"):
            values = elements(stored, held.part).astype(held.dtype, copy=False)
        _check_finite(folder, name, values)
        put(kept[held.number].array, held, values, backend)
    return drawn


def _unfit(
    folder: Path, name: str, shape: tuple[int, ...], stored: AnyTensor | None
) -> CheckpointError:
    has = f"the shape {stored.shape}" if stored else "no such tensor"
    return CheckpointError(
        f"The model needs {name} of shape {shape}, but {folder} has {has}.",
        "Use the configuration and the data of that model.",
    )


def _check_finite(folder: Path, name: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"Parameters must be finite numbers of {values.dtype}, but {name} in {folder} is not.",
            "Name another folder.",
        )


def elements(stored: AnyTensor, part: Region) -> np.ndarray:
    """Return the elements of a region, 1-D and packed; only rows that have some are read."""
    rectangles = _rectangles(part)
    dim = joined_dim(rectangles)
    width = sum(
        math.prod(_lengths(rectangle)[1:]) for rectangle in rectangles[: None if dim else 1]
    )
    values = []
    for piece in part.pieces:
        first, last = piece.start // width, -(-piece.stop // width)
        if dim:
            blocks = [stored.read(_rows(rectangle, first, last)) for rectangle in rectangles]
        else:
            blocks, before = [], 0
            for rectangle in rectangles:
                count = _lengths(rectangle)[0] if rectangle else 1
                low, high = max(first - before, 0), min(last - before, count)
                before += count
                if low < high:
                    blocks.append(stored.read(_rows(rectangle, low, high)))
        flat = np.concatenate(blocks, dim).reshape(-1) if blocks[0].ndim else blocks[0].reshape(-1)
        values.append(flat[piece.start - first * width : piece.stop - first * width])
    return np.concatenate(values)


def _fits(name: str, there: tuple[int, ...], here: tuple[int, ...]) -> bool:
    if name == POSITIONS:
        return there[1:] == here[1:] and there[0] >= here[0]
    return there == here


def _rectangles(part: Region) -> list[Rectangle]:
    if part.rectangles is None:
        return [tuple(slice(0, length) for length in part.shape)]
    return [tuple(slice(*pair) for pair in rectangle) for rectangle in part.rectangles]


def _lengths(rectangle: Rectangle) -> list[int]:
    return [part.stop - part.start for part in rectangle]


def _rows(rectangle: Rectangle, first: int, last: int) -> Rectangle:
    """Return rows `first` to `last` of a rectangle; a scalar has one."""
    if not rectangle:
        return rectangle
    start = rectangle[0].start
    return (slice(start + first, start + last), *rectangle[1:])


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
    """Return frozen parameters with the chosen tensors alone, other buffers if `otherwise`."""
    chosen = []
    for buffer in kept:
        if buffer.name != "parameters" or not buffer.entries:
            chosen += [buffer] if otherwise(buffer) else []
        elif own := [entry for entry in buffer.entries if is_chosen(entry.name)]:
            chosen.append(buffer._replace(entries=own))
    return chosen


def open_adapter(config: Config) -> tuple[Initial, dict[str, Any]]:
    """Locate the adapters of lora.init_from, and the record of their base; not collective.

    The record is empty if there is none, or if run.init_from names another folder.
    """
    folder = Path(config.lora.init_from)
    if is_run(folder):
        saved, manifest = read_chosen(lambda: newest(folder / CHECKPOINTS))
        check_meaning(adapter_keys(folder), saved, manifest)
        adapter = Initial(saved, {}, parameters(saved), [MANIFEST])
        record = dict(manifest.base)
    else:
        adapter, record = peft.read(folder), peft.base(folder)
    is_same = record and folder_of(record).resolve() == Path(config.run.init_from).resolve()
    return adapter, record if is_same else {}


def check_adapter(
    adapter: Initial, base: Initial, config: Config, units: Sequence[Unit], rank: int
) -> None:
    """Raise an error unless adapters belong to these layers and to this base.

    raises  ConfigError if they belong to other layers than lora.targets names; CheckpointError, on rank 0, if a PEFT
            folder has a head (lm_head) unlike that of the base
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
    head = adapter.tensors.get(HEAD)
    if rank > 0 or not isinstance(head, StoredTensor) or MANIFEST in adapter.files:
        return
    weight = base.tensors.get(HEAD) or base.tensors.get("embedding.tokens")
    with refusing(adapter.folder):
        is_same = weight and is_copy(head, weight)
    if not is_same:
        raise CheckpointError(
            f"Adapters train on the model of run.init_from, but {adapter.folder} has another lm_head than {base.folder}.",
            "Name the model that was under the adapters: --set run.init_from=FOLDER.",
        )


def base_of(checkpoint: Path) -> dict[str, Any]:
    """Return the record of the base in a checkpoint; empty if it has all parameters."""
    return dict(read_manifest(checkpoint).base)


def folder_of(record: Mapping[str, Any]) -> Path:
    folder = Path(record["folder"])
    return folder.parent.parent if MANIFEST in record["sha256"] else folder


def open_base(config: Config, record: Mapping[str, Any], vocabulary: int) -> Initial:
    """Locate the base under the adapters of a checkpoint; not collective.

    The base may have moved, to run.init_from. A run that is the base may have newer checkpoints.
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
    """Raise CheckpointError if files of the base have changed since the adapters were trained.

    then  the record of the base, stored with the adapters; empty: there is none
    now   the record of run.init_from, equal on all ranks
    """
    changed = [
        name
        for name in sorted({*then["sha256"], *now["sha256"]} if then else ())
        if then["sha256"].get(name) != now["sha256"].get(name)
    ]
    if changed:
        raise CheckpointError(
            "Adapters belong to the model that they were trained on, but "
            f"{changed[0]} in {now['folder']} has another content now.",
            "Name the model as it was: --base FOLDER, or --set run.init_from=FOLDER to train.",
        ).on_every_rank()
