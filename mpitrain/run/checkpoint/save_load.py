"""Saving and loading of sharded checkpoints, as torch.distributed.checkpoint does; in any layout.

    checkpoints/step-00000400/
        model-00001-of-00003.safetensors  whole parameter tensors under their full names
        model.safetensors.index.json      the usual index of several files; any tool can read it
        state-00000.safetensors           regions of optimizer state and residuals, by rank 0
        manifest.json                     the list of these regions, the SHA-256 of each block of
                                          each file, and the progress of the run

All ranks write in parallel. One rank writes each replicated element, and no rank needs memory for
the whole model. A checkpoint is written to a temporary directory, and then renamed.

    all ranks  gather the descriptions of their state        regions.described
    all ranks  assign each element to a writer               writers.shared_out
    all ranks  send parameters to the writers of tensors     writers.join
    all ranks  write and sync their model and state files    _write
    rank 0     writes index and manifest, renames            _finish
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import CheckpointError, TrainingError
from mpitrain.files import mend
from mpitrain.formats.safetensors_files import MOVED, Writing, WritingTensors, WrittenFile
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Backend
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.run.checkpoint.directories import abandon, prepare, put_in_place, steps
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
from mpitrain.run.checkpoint.writers import PIECE, Shares, join, shared_out
from mpitrain.transport.agreement import from_all_ranks, on_all_ranks
from mpitrain.transport.base import Transport


class Checkpoint(NamedTuple):
    """A verified checkpoint on disk, with its manifest."""

    path: Path
    manifest: Manifest

    @property
    def done(self) -> Done:
        """The progress of the run at this checkpoint."""
        return self.manifest.done


class Saved(NamedTuple):
    """A published checkpoint.

    nbytes  size of its files of tensors and state, of all ranks
    """

    path: Path
    nbytes: int


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
    base: Mapping[str, Any] | None = None,
) -> Saved:
    """Write a checkpoint under `folder`, and remove all but the newest `keep`; collective.

    kept     the state of this rank; buffers named "parameters" are written as whole tensors
    done     the progress of the run, from which the checkpoint has its name
    layout   the size of each mesh axis. `load` restores "own" and "mean" state exactly, and "bound"
             state at all, only in the same layout.
    scalars  numbers by name
    base     as in `Manifest`
    raises   TrainingError on every rank if any of them cannot write; older checkpoints stay valid
    """
    step = done.step
    target, unfinished = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    is_root = transport.rank == 0

    def attempt(part: Callable[[], Any]) -> Any:
        return on_all_ranks(transport, partial(_attempt, part, step, folder))

    def closed(file: Writing) -> WrittenFile:
        with transport.recorder.working(PIECE):
            return file.close()

    try:
        shares = shared_out(
            [holdings(listed) for listed in transport.gather_text(described(storage, kept))]
        )
        attempt(lambda: is_root and prepare(unfinished))
        files, stored = _write(unfinished, shares, kept, transport, backend, done)
        own_files = attempt(
            lambda: {name: File(transport.rank, *closed(file)) for name, file in files.items()}
        )
        everyone = transport.gather_text([own_files, stored])
        written = {name: file for files, _ in everyone for name, file in files.items()}
        manifest = Manifest(
            done,
            layout,
            scalars,
            written,
            [region for _, stored in everyone for region in stored],
            base=base or {},
        )
        attempt(lambda: is_root and _finish(unfinished, target, shares, manifest, keep))
    except TrainingError:
        # All ranks raise it together, so no rank still writes.
        if is_root:
            abandon(unfinished)
        raise
    return Saved(target, sum(nbytes for _, nbytes, _ in written.values()))


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
    """Write this rank's files, and send elements to the ranks that write them; collective.

    returns  the files by name, still open, and the regions of state in them
    """
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
    regions = {_key(held): held for held in shares.pieces[rank]}
    name = f"state-{rank:05d}.safetensors"
    if regions:
        arrays = {key: (region.dtype, (region.part.length,)) for key, region in regions.items()}
        files[name] = WritingTensors(folder / name, arrays, metadata)
    for region in regions.values():
        count = MOVED // region.dtype.itemsize
        for piece in region.part.pieces:
            for start in range(
                piece.offset, stop := piece.offset + piece.stop - piece.start, count
            ):
                with transport.recorder.working(PIECE):
                    files[name].write(
                        backend.to_host(kept[region.number].array[start : min(start + count, stop)])
                    )
    return files, [
        Stored(name, key, region.name, region.kind, region.part.packed())
        for key, region in regions.items()
    ]


def _model_files(shares: Shares) -> dict[int, str]:
    """Return the name of each file of whole tensors, by the rank that writes it."""
    writers = sorted({joined.writer for joined in shares.tensors.values()})
    return {
        rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors"
        for number, rank in enumerate(writers, 1)
    }


def _key(held: HeldRegion) -> str:
    """Return the key of a region in its file; regions of one rank start at different elements."""
    return (
        f"{held.name}/{held.part.tensor}/{held.part.pieces[0].start}"
        if held.part.tensor
        else held.name
    )


def _finish(unfinished: Path, target: Path, shares: Shares, manifest: Manifest, keep: int) -> None:
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
    """Verify a checkpoint; collective. Each block is read once, by one of the ranks.

    An active run may remove the checkpoint meanwhile; then the newest one is verified instead.

    raises  CheckpointError on every rank, if an existing checkpoint is damaged or unreadable
    """
    while True:
        try:
            manifest = on_all_ranks(
                transport,
                partial(_verified, path, transport.rank, transport.size),
                "checkpoint",
                lambda manifest: manifest.done._asdict(),
            )
        except CheckpointError:
            successor = _successor(transport, path)
            if not successor:
                raise
            path = successor
            continue
        return Checkpoint(path, manifest)


def _verified(path: Path, rank: int, ranks: int) -> Manifest:
    manifest = read_manifest(path)
    verify(path, manifest, rank, ranks)
    return manifest


def _successor(transport: Transport, path: Path) -> Path | None:
    """Return the newest checkpoint if `path` was removed, None if it exists; collective.

    Rank 0 decides for all ranks.
    """
    listed = steps(path.parent)
    successor = transport.gather_text(str(listed[-1]) if listed and path not in listed else "")[0]
    return Path(successor) if successor else None


def load(
    checkpoint: Checkpoint,
    kept: Sequence[StateBuffer],
    storage: Storage,
    transport: Transport,
    backend: Backend,
    layout: Mapping[str, Any],
) -> Checkpoint:
    """Fill the state of any layout from a checkpoint; collective.

    Each rank reads only the ranges that it needs. "agreed" state is restored bit for bit. In the
    same layout the other kinds are, too. In another layout each replica gets an equal part of the
    sum of "own" state. It gets the mean of "mean" state. "bound" state then starts anew or from a
    mean. Rank 0 prints a note about state that starts anew or from a mean.

    An active run may remove the checkpoint meanwhile; then the newest one is loaded instead.

    returns  the checkpoint that was loaded
    raises   CheckpointError on every rank, if it is of another model or cannot be read
    """
    while True:
        try:
            everyone = from_all_ranks(
                transport,
                partial(
                    fill,
                    checkpoint.path,
                    checkpoint.manifest,
                    kept,
                    storage,
                    backend,
                    layout,
                    transport.rank,
                ),
            )
        except CheckpointError:
            successor = _successor(transport, checkpoint.path)
            if not successor:
                raise
            checkpoint = read_beside(transport, successor)
            continue
        changed = {name.split("/")[0]: what for named in everyone for name, what in named.items()}
        then = ", ".join(f"{axis} {size}" for axis, size in checkpoint.manifest.layout.items())
        for what in sorted({*changed.values()}) if transport.rank == 0 else ():
            names = ", ".join(sorted(name for name in changed if changed[name] == what))
            print(
                f"note: {names} in {checkpoint.path} {what} the ranks of {then}.",
                file=sys.stderr,
                flush=True,
            )
        return checkpoint
