"""Checkpoints: safetensors by logical name, whole whatever the layout, written beside and renamed into place.

    checkpoints/step-00000400/model.safetensors       parameters under their full names: any tool can read them
    checkpoints/step-00000400/optimizer.safetensors   optimizer state under <buffer>/<full name>
    checkpoints/step-00000400/residuals-0.safetensors what the wire format of rank 0 still owes, and what it expects

Each file's metadata holds what it belongs to (run, step, samples, rank, number of ranks) and a SHA-256 over everything else
in it, so that a truncated or altered file is refused, and one of another run, step or rank too.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mpitrain.errors import CheckpointError, TrainingError
from mpitrain.files import check_regular, sync
from mpitrain.parallel.buckets import AGREED
from mpitrain.run.trainer import Trainer
from mpitrain.transport.agreed import agreed
from mpitrain.transport.base import Transport

FORMAT = "mpitrain-2"
RESIDUALS = "residuals-{}.safetensors"


class Done(NamedTuple):
    """What a run has behind it.

    step     optimizer steps
    samples  rows of all global batches of those steps
    run      the run's identity: drawn when it started from nothing, and the same ever after
    """

    step: int
    samples: int
    run: str


class Checkpoint(NamedTuple):
    """A verified checkpoint in memory.

    done        where it stands
    parameters  whole tensors by full name
    state       of the optimizer, by <buffer>/<full name>
    facts       the metadata that all files of this checkpoint have
    residuals   one rank's; none before `with_residuals`
    """

    done: Done
    parameters: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    facts: dict[str, str]
    residuals: dict[str, np.ndarray] = {}


def save(folder: Path, trainer: Trainer, done: Done, keep: int) -> Path:
    """Write a checkpoint under `folder` and drop all but the newest `keep`; collective.

    Rank 0 writes what replicas share, every rank its residuals, if its wire format has any. Whatever happens on the way,
    the checkpoints that were there stay good until the new one has its final name.

    raises  TrainingError on every rank if any of them cannot write
    """
    step = done.step
    target, unfinished = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    is_root = trainer.transport.rank == 0
    for part in (
        lambda: is_root and _prepare(unfinished),
        lambda: _write_own(unfinished, trainer, done),
        lambda: is_root and _put_in_place(unfinished, target, keep),
    ):
        agreed(trainer.transport, partial(_attempt, part, step, folder))
    return target


def _attempt(part: Callable[[], Any], step: int, folder: Path) -> None:
    try:
        part()
    except OSError as error:
        raise TrainingError(f"The checkpoint of step {step} cannot be written to {folder}: {error}.",
                            "Make room, then go on with --resume; the checkpoints before it are still good.") from None


def _prepare(partial: Path) -> None:
    for left_over in (*partial.parent.glob(".step-*.partial"), *partial.parent.glob(".step-*.dropped")):
        shutil.rmtree(left_over)
    partial.mkdir(parents=True)


def _write_own(partial: Path, trainer: Trainer, done: Done) -> None:
    entries, to_host, rank = trainer.storage.entries, trainer.backend.to_host, trainer.transport.rank
    residuals = trainer.replication.buckets.residuals()
    metadata = {"format": FORMAT, "run": done.run, "step": str(done.step), "samples": str(done.samples), "rank": str(rank),
                "ranks": str(trainer.transport.size), "residuals": "yes" if residuals else "no"}
    if residuals:
        _write(partial / RESIDUALS.format(rank), residuals, metadata)
    if rank != 0:
        return
    flat = to_host(trainer.parameters)
    _write(partial / "model.safetensors", {e.name: e.view(flat) for e in entries}, metadata)
    buffers = {name: to_host(buffer) for name, buffer in trainer.optimizer.state.items()}
    _write(partial / "optimizer.safetensors",
           {f"{name}/{e.name}": e.view(buffer) for name, buffer in buffers.items() for e in entries}, metadata)


def _put_in_place(partial: Path, target: Path, keep: int) -> None:
    folder = target.parent
    sync(partial)
    replaced = folder / f".{target.name}.replaced"
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    sync(folder)
    for old in steps(folder)[:-keep]:
        dropped = old.rename(folder / f".{old.name.strip('.')}.dropped")  # at once: a reader finds all of it or none
        shutil.rmtree(dropped)


def steps(folder: Path) -> list[Path]:
    """The finished checkpoints of a folder, oldest first.

    One that was being replaced when its process died counts until the new one has its name.
    """
    found: dict[str, Path] = {}
    for form in (r"(step-\d{8,18})", r"\.(step-\d{8,18})\.replaced"):
        for path in folder.glob("*"):
            if path.is_dir() and (name := re.fullmatch(form, path.name, re.ASCII)):
                found.setdefault(name[1], path)
    return [found[name] for name in sorted(found, key=lambda name: int(name.removeprefix("step-")))]


def newest(folder: Path) -> Path:
    """The newest checkpoint of a folder; CheckpointError if there is none."""
    found = steps(folder)
    if not found:
        raise CheckpointError(f"There is no checkpoint in {folder}.", "Name a run directory that has one, or train first.")
    return found[-1]


def read_beside(transport: Transport, path: Path, read: Callable[[Path], Checkpoint]) -> Checkpoint:
    """What `read` makes of a checkpoint, or of the newest one if a run that goes on drops it meanwhile; collective.

    raises  CheckpointError with `agreed` set, if one that is still there cannot be read
    """
    while True:
        try:
            return agreed(transport, partial(read, path))
        except CheckpointError:
            listed = steps(path.parent)
            successor = transport.gather_text(str(listed[-1]) if listed and path not in listed else "")[0]
            if not successor:
                raise
            path = Path(successor)


def read(path: Path) -> Checkpoint:
    """Read and verify what replicas share; CheckpointError names what is wrong with it."""
    facts, parameters = _read(path / "model.safetensors", 0)
    state = _read(path / "optimizer.safetensors", 0, facts)[1]
    named = re.search(r"step-(\d+)", path.name)
    if named and int(named[1]) != int(facts["step"]):
        raise CheckpointError(f"{path} holds step {facts['step']}, and not the one that its name says.", _way_out(path))
    return Checkpoint(Done(int(facts["step"]), int(facts["samples"]), facts["run"]), parameters, state, facts)


def with_residuals(path: Path, rank: int, ranks: int) -> Checkpoint:
    """The same with what the wire format of one of `ranks` ranks still owes: its own residuals, or, with another number of
    ranks than before, an equal part of the sum of all."""
    found = read(path)
    written = int(found.facts["ranks"]) if found.facts["residuals"] == "yes" else 0
    expected = [path / RESIDUALS.format(writer) for writer in range(written)]
    for extra in sorted({*path.glob(RESIDUALS.format("*"))} - {*expected}):
        raise CheckpointError(f"{extra} is none of the {written} files of residuals that this checkpoint was written with.",
                              _way_out(path))
    if written == ranks:
        return found._replace(residuals=_read(expected[rank], rank, found.facts)[1])
    total: dict[str, np.ndarray] = {}
    for writer, file in enumerate(expected):
        for name, tensor in _read(file, writer, found.facts)[1].items():
            if name.startswith(AGREED):
                total[name] = tensor
            else:
                total[name] = total[name] + tensor / ranks if name in total else tensor / ranks
    return found._replace(residuals=total)


def load(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Put a checkpoint into a trainer of any layout: each rank keeps its part of every tensor."""
    _fill(trainer, trainer.parameters, "", checkpoint.parameters)
    for name, buffer in trainer.optimizer.state.items():
        _fill(trainer, buffer, f"{name}/", checkpoint.state)
    trainer.replication.buckets.load_residuals(checkpoint.residuals)


def _fill(trainer: Trainer, flat: np.ndarray, prefix: str, tensors: Mapping[str, np.ndarray]) -> None:
    for entry in trainer.storage.entries:
        tensor, wanted = tensors.get(prefix + entry.name), entry.parameter.shape
        if tensor is None or tensor.shape != wanted:
            has = "none" if tensor is None else f"shape {tensor.shape}"
            raise CheckpointError(f"The model needs {prefix}{entry.name} of shape {wanted}, but the checkpoint has {has}.",
                                  "Use the configuration that the checkpoint was trained with.")
        part = tensor if entry.parameter.slices is None else tensor[entry.parameter.slices]
        entry.view(flat)[...] = trainer.backend.from_host(part)


def _write(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, {**metadata, "sha256": _digest(tensors, metadata)})
    except SafetensorError as error:  # what a full disk becomes there
        raise OSError(str(error)) from None
    sync(path)


def _read(path: Path, rank: int, facts: dict[str, str] | None = None) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata, without the rank, and tensors of a file that `rank` wrote; the metadata must be `facts`, where given."""
    try:
        check_regular(path)
        with safe_open(path, "numpy") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.", _way_out(path.parent)) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.", _way_out(path.parent)) from None
    if metadata.pop("sha256", None) != _digest(tensors, metadata):
        raise CheckpointError(f"{path} was altered: its contents do not match its SHA-256.", _way_out(path.parent))
    if metadata["format"] != FORMAT:
        raise CheckpointError(f"{path} is in format {metadata['format']}, but this version of mpitrain reads {FORMAT}.",
                              "Go on with the version that wrote it, or start the run again.")
    wanted = {**(facts or metadata), "rank": str(rank)}
    if others := [f"{name} {metadata[name]} where {wanted[name]} is wanted"
                  for name in sorted(wanted) if metadata[name] != wanted[name]]:
        raise CheckpointError(f"{path} belongs to another checkpoint or rank: it has {', '.join(others)}.",
                              _way_out(path.parent))
    del metadata["rank"]
    return metadata, tensors


def _way_out(path: Path) -> str:
    finished = steps(path.parent)
    older = [other.name for other in finished[:finished.index(path)]] if path in finished else []
    return f"Remove {path}" + (f" to go on from {older[-1]}." if older else " and start the run again.")


def _digest(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), tensor.shape]).encode())
        digest.update(np.ascontiguousarray(tensor).data if tensor.size else b"")
    return digest.hexdigest()
