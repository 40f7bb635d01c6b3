"""Checkpoints: written by all ranks together, whole whatever the layout, beside their place and renamed into it.

    checkpoints/step-00000400/
        model-00001-of-00003.safetensors  parameters, whole, under their full names, with the index that is usual for
        model.safetensors.index.json      several files: any tool can read them
        state-00000.safetensors           what rank 0 wrote of the optimizer's state and of residuals, in pieces
        manifest.json                     which pieces these are; the SHA-256 of every block of every file; where the run stands

Of elements that several ranks hold, one writes: no rank needs the whole model, neither to write nor to read it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import CheckpointError, TrainingError
from mpitrain.files import mend
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Backend
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.run.checkpoint.directories import prepare, put_in_place, steps
from mpitrain.run.checkpoint.load import fill
from mpitrain.run.checkpoint.manifest import (
    FORMAT,
    INDEX,
    Done,
    File,
    Manifest,
    Stored,
    read_manifest,
    verify,
    write_manifest,
)
from mpitrain.run.checkpoint.regions import HeldRegion, described, holdings
from mpitrain.run.checkpoint.safetensors_files import MOVED, Writing, WritingTensors
from mpitrain.run.checkpoint.writers import Shares, join, shared_out
from mpitrain.transport.agreement import check_same, on_all_ranks
from mpitrain.transport.base import Transport


class Checkpoint(NamedTuple):
    """A verified checkpoint on disk, and what it consists of."""

    path: Path
    manifest: Manifest

    @property
    def done(self) -> Done:
        """Where it stands."""
        return self.manifest.done


def save(
    folder: Path,
    kept: Sequence[StateBuffer],
    storage: Storage,
    transport: Transport,
    backend: Backend,
    done: Done,
    layout: Mapping[str, Any],
    scalars: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint under `folder` and drop all but the newest `keep`; collective.

    kept     what this rank holds; those named "parameters" are written as whole tensors
    layout   what must be the same for "own" state to be taken over as it is, and for "bound" state to be taken over at all
    scalars  numbers by name
    raises   TrainingError on every rank if any of them cannot write; the checkpoints that were there stay good
    """
    step = done.step
    target, unfinished = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    is_root = transport.rank == 0

    def attempt(part: Callable[[], Any]) -> Any:
        return on_all_ranks(transport, partial(_attempt, part, step, folder))

    shares = shared_out(
        [holdings(listed) for listed in transport.gather_text(described(storage, kept))]
    )
    attempt(lambda: is_root and prepare(unfinished))
    files, stored = _write(unfinished, shares, kept, transport, backend, done)
    mine = attempt(
        lambda: {name: File(transport.rank, *file.close()) for name, file in files.items()}
    )
    everyone = transport.gather_text([mine, stored])
    written = {name: file for files, _ in everyone for name, file in files.items()}
    manifest = Manifest(
        done, layout, scalars, written, [one for _, stored in everyone for one in stored]
    )
    attempt(lambda: is_root and _finish(unfinished, target, shares, manifest, keep))
    return target


def _attempt(part: Callable[[], Any], step: int, folder: Path) -> Any:
    try:
        return part()
    except OSError as error:
        raise TrainingError(
            f"The checkpoint of step {step} cannot be written to {folder}: {error.strerror or error}.",
            f"{mend(error)}, then go on with --resume; the checkpoints before it are still good.",
        ) from None


def _write(
    folder: Path,
    shares: Shares,
    kept: Sequence[StateBuffer],
    transport: Transport,
    backend: Backend,
    done: Done,
) -> tuple[dict[str, Writing], list[Stored]]:
    """Write this rank's files, which have to be closed, and send what others write; collective."""
    rank = transport.rank
    metadata = {
        "format": FORMAT,
        **{name: str(value) for name, value in done._asdict().items()},
        "rank": str(rank),
        "ranks": str(transport.size),
    }
    files: dict[str, Writing] = {}
    model = None
    names = _model_files(shares)
    if rank in names:
        tensors = {
            name: (joined.dtype, joined.shape)
            for name, joined in shares.tensors.items()
            if joined.writer == rank
        }
        model = files[names[rank]] = WritingTensors(folder / names[rank], tensors, metadata)
    join(shares, kept, model, transport, backend)
    held = {_key(held): held for held in shares.pieces[rank]}
    name = f"state-{rank:05d}.safetensors"
    if held:
        arrays = {key: (one.dtype, (one.part.length,)) for key, one in held.items()}
        files[name] = WritingTensors(folder / name, arrays, metadata)
    for one in held.values():
        count = MOVED // one.dtype.itemsize
        for piece in one.part.pieces:
            for start in range(piece.place, stop := piece.place + piece.stop - piece.start, count):
                files[name].write(
                    backend.to_host(kept[one.number].array[start : min(start + count, stop)])
                )
    return files, [
        Stored(name, key, one.name, one.kind, one.part.packed()) for key, one in held.items()
    ]


def _model_files(shares: Shares) -> dict[int, str]:
    """The name of each file of whole tensors, by the rank that writes it."""
    writers = sorted({joined.writer for joined in shares.tensors.values()})
    return {
        rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors"
        for number, rank in enumerate(writers, 1)
    }


def _key(held: HeldRegion) -> str:
    """The name of a piece in its file: of those that one rank writes, no two begin at one element."""
    return (
        f"{held.name}/{held.part.tensor}/{held.part.pieces[0].start}"
        if held.part.tensor
        else held.name
    )


def _finish(unfinished: Path, target: Path, shares: Shares, manifest: Manifest, keep: int) -> None:
    """Write what binds the files together, and give the checkpoint its name."""
    names = _model_files(shares)
    index = {
        "metadata": {"total_size": sum(joined.nbytes for joined in shares.tensors.values())},
        "weight_map": {name: names[joined.writer] for name, joined in shares.tensors.items()},
    }
    file = Writing(unfinished / INDEX)
    file.write(json.dumps(index, indent=1).encode())
    write_manifest(
        unfinished, manifest._replace(files={**manifest.files, INDEX: File(0, *file.close())})
    )
    put_in_place(unfinished, target, keep)


def read_beside(transport: Transport, path: Path) -> Checkpoint:
    """Verify a checkpoint, or the newest one if a run that goes on drops it meanwhile; collective.

    Every block is read once, by one of the ranks.
    raises  CheckpointError with `on_all_ranks` set, if one that is still there cannot be read
    """
    while True:
        try:
            manifest = on_all_ranks(
                transport, partial(_verified, path, transport.rank, transport.size)
            )
        except CheckpointError:
            successor = _successor(transport, path)
            if not successor:
                raise
            path = successor
            continue
        check_same(transport, "checkpoint", manifest.done._asdict())
        return Checkpoint(path, manifest)


def _verified(path: Path, rank: int, ranks: int) -> Manifest:
    manifest = read_manifest(path)
    verify(path, manifest, rank, ranks)
    return manifest


def _successor(transport: Transport, path: Path) -> Path | None:
    """The newest checkpoint beside one that is there no more; None if it is there, as rank 0 sees it; collective."""
    listed = steps(path.parent)
    successor = transport.gather_text(str(listed[-1]) if listed and path not in listed else "")[0]
    return Path(successor) if successor else None


def load(
    found: Checkpoint,
    kept: Sequence[StateBuffer],
    storage: Storage,
    transport: Transport,
    backend: Backend,
    layout: Mapping[str, Any],
) -> Checkpoint:
    """Fill the arrays of any layout from a checkpoint, or from the newest one if a run drops it meanwhile; collective.

    Each rank reads the ranges that it needs: "agreed" state and, at the same layout, "own" state bit for bit; else of the sum
    of "own" state its equal part, and of "mean" state the mean. A line each says what starts from a mean, and what "bound"
    state starts anew.

    returns  the checkpoint that was loaded
    raises   CheckpointError with `on_all_ranks` set, if it is of another model or cannot be read
    """
    while True:
        try:
            mine = on_all_ranks(
                transport,
                partial(
                    fill, found.path, found.manifest, kept, storage, backend, layout, transport.rank
                ),
            )
        except CheckpointError:
            successor = _successor(transport, found.path)
            if not successor:
                raise
            found = read_beside(transport, successor)
            continue
        changed = {
            name.split("/")[0]: what
            for named in transport.gather_text(mine)
            for name, what in named.items()
        }
        then = ", ".join(f"{axis} {size}" for axis, size in found.manifest.layout.items())
        for what in sorted({*changed.values()}) if transport.rank == 0 else ():
            names = ", ".join(sorted(name for name in changed if changed[name] == what))
            print(
                f"note: {names} in {found.path} {what} the ranks of {then}.",
                file=sys.stderr,
                flush=True,
            )
        return found
