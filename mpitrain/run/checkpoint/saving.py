"""Saving of sharded checkpoints, as torch.distributed.checkpoint does; loading.py reads them in any layout.

    checkpoints/step-00000400/
        model-00001-of-00003.safetensors  whole parameter tensors under their full names
        model.safetensors.index.json      the usual index of several files; any tool can read it
        state-00000.safetensors           regions of optimizer state and residuals, by rank 0
        manifest.json                     the list of these regions, the SHA-256 of each block of
                                          each file, and the progress of the run

All ranks write in parallel. One rank writes each replicated element, and no rank needs memory for
the whole model. A checkpoint is written to a temporary directory, and then renamed.

    all ranks  gather the descriptions of their state        regions.described
    all ranks  assign each element to a writer               shared_out
    all ranks  send parameters to the writers, which write
               model files                                   join
    all ranks  write state files                             _write
    rank 0     writes index and manifest, renames            _finish
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import TrainingError
from mpitrain.files import mend
from mpitrain.formats.safetensors_files import BLOCK, MOVED, Writing, WritingTensors, WrittenFile
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Backend
from mpitrain.parallel.replication.protocol import StateBuffer
from mpitrain.regions import Common, Piece, Runs, common, cut, one_run, without
from mpitrain.run.checkpoint.manifest import (
    FORMAT,
    INDEX,
    Done,
    File,
    Manifest,
    Stored,
    abandon,
    prepare,
    put_in_place,
    write_manifest,
)
from mpitrain.run.checkpoint.regions import PARAMETERS, HeldRegion, described, holdings, runs
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

PIECE = "a piece of the checkpoint"
"""The name of each write in the trace."""


class Saved(NamedTuple):
    """A published checkpoint.

    nbytes  of the model and state files of all ranks
    """

    path: Path
    nbytes: int


Holders = list[tuple[int, HeldRegion]]
"""(rank, its region of one tensor), ascending by rank."""


class Joined(NamedTuple):
    """A whole parameter tensor, and the rank that gathers and writes it.

    writer   the rank; -1 before it is assigned
    holders  the regions of all ranks, from which the tensor is joined
    """

    writer: int
    dtype: np.dtype
    shape: tuple[int, ...]
    holders: Holders

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Shares(NamedTuple):
    """The assignment of all elements to writers; the same on all ranks.

    tensors  whole parameter tensors by full name, with their writers
    pieces   for each rank, the regions of its own state that it writes
    """

    tensors: dict[str, Joined]
    pieces: list[list[HeldRegion]]


class Contribution(NamedTuple):
    """The elements of a tensor that one rank contributes.

    number  index of the `StateBuffer` on that rank
    runs    the elements, and their offsets in its array
    """

    rank: int
    number: int
    runs: Runs


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
    best: int = -1,
) -> Saved:
    """Write a checkpoint under `folder`, and remove all but the newest `keep` and `best`; collective.

    kept     the state of this rank; buffers named "parameters" are written as whole tensors
    done     the progress of the run, from which the checkpoint has its name
    layout   the size of each mesh axis. `load` restores "own" and "mean" state exactly, and "bound"
             state at all, only in the same layout.
    scalars  numbers by name
    base     as in `Manifest`
    best     the step of another checkpoint to keep
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
        attempt(lambda: is_root and _finish(unfinished, target, shares, manifest, keep, best))
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
    """Write this rank's files, which stay open, and send elements to other writers; collective."""
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


def _finish(
    unfinished: Path, target: Path, shares: Shares, manifest: Manifest, keep: int, best: int
) -> None:
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
    put_in_place(unfinished, target, keep, best)


def shared_out(everyone: Sequence[Sequence[HeldRegion]]) -> Shares:
    """Assign the state of all ranks to writers, greedily to the rank with the fewest bytes.

    State that only one rank has is assigned first, then whole parameter tensors, the largest
    first, then replicated state.

    everyone  the regions of each rank
    """
    nbytes = [0] * len(everyone)
    shares = Shares({}, [[] for _ in everyone])
    tensors: dict[str, Holders] = defaultdict(list)
    states: dict[tuple[str, str], Holders] = defaultdict(list)
    for rank, regions in enumerate(everyone):
        for held in regions:
            if held.name == PARAMETERS:
                tensors[held.part.tensor].append((rank, held))
            elif held.kind == "agreed":
                states[held.name, held.part.tensor].append((rank, held))
            else:
                _give(held, rank, shares, nbytes)
    for name, holders in tensors.items():
        shares.tensors[name] = Joined(-1, holders[0][1].dtype, holders[0][1].part.shape, holders)
    for name, joined in sorted(shares.tensors.items(), key=lambda item: -item[1].nbytes):
        writer = _least(joined.holders, nbytes)[0]
        nbytes[writer] += joined.nbytes
        shares.tensors[name] = joined._replace(writer=writer)
    for holders in states.values():
        _share_out(holders, shares, nbytes)
    return shares


def _least(holders: Holders, nbytes: list[int]) -> tuple[int, HeldRegion]:
    return min(holders, key=lambda holder: (nbytes[holder[0]], holder[0]))


def _give(held: HeldRegion, rank: int, shares: Shares, nbytes: list[int]) -> None:
    shares.pieces[rank].append(held)
    nbytes[rank] += held.part.length * held.dtype.itemsize


def _share_out(holders: Holders, shares: Shares, nbytes: list[int]) -> None:
    """Assign one replicated state tensor to writers, in regions of at most a block."""
    alike: dict[Any, Holders] = defaultdict(list)
    for rank, held in holders:
        alike[
            held.part.rectangles, tuple((piece.start, piece.stop) for piece in held.part.pieces)
        ].append((rank, held))
    taken: dict[Any, list[Piece]] = defaultdict(list)
    for (rectangles, _), group in alike.items():
        left = without(group[0][1].part.pieces, taken[rectangles])
        for unit in cut(left, BLOCK // group[0][1].dtype.itemsize):
            rank, held = _least(group, nbytes)
            enclosing = next(
                piece for piece in held.part.pieces if piece.start <= unit.start < piece.stop
            )
            # `offset` becomes the offset in this rank's array.
            piece = unit._replace(offset=enclosing.offset + unit.start - enclosing.start)
            _give(held._replace(part=held.part._replace(pieces=(piece,))), rank, shares, nbytes)
        taken[rectangles] += left


def sources(name: str, joined: Joined) -> list[Contribution]:
    """Return which rank contributes which elements: the writer all it has, the next ranks the rest.

    raises  TrainingError, on every rank alike, if an element is on no rank
    """
    ranks = 1 + max(rank for rank, _ in joined.holders)
    taken: dict[Any, list[Piece]] = defaultdict(list)
    contributions, missing = [], prod(joined.shape)
    for rank, held in sorted(
        joined.holders, key=lambda holder: (holder[0] - joined.writer) % ranks
    ):
        part = held.part._replace(
            pieces=tuple(without(held.part.pieces, taken[held.part.rectangles]))
        )
        if missing > 0 and part.pieces:
            contributions.append(Contribution(rank, held.number, runs(part)))
            taken[part.rectangles] += part.pieces
            missing -= part.length
    if missing > 0:
        raise TrainingError(
            f"Every element of {name} must be on a rank, but {missing} of {prod(joined.shape)} are on none.",
            "The checkpoint is not written. This is a fault of mpitrain; please report it.",
        )
    return contributions


def join(
    shares: Shares,
    kept: Sequence[StateBuffer],
    file: Writing | None,
    transport: Transport,
    backend: Backend,
) -> None:
    """Gather and write the tensors of this rank to `file`, and send elements to other writers.

    Collective. All ranks go through tensors, windows and sources in the same order, so that the
    first pending message can always be delivered. It takes 2 x MOVED bytes of memory.
    """
    me = transport.rank
    for name, joined in shares.tensors.items():
        if all(rank != me for rank, _ in joined.holders):
            continue
        contributions = sources(name, joined)
        for window in _windows(joined):
            chunk = np.empty(window.length[0] if joined.writer == me else 0, joined.dtype)
            for source in contributions:
                shared = common(source.runs, window)
                if shared.length.size and me in (source.rank, joined.writer):
                    _bring(source, shared, chunk, joined, kept, transport, backend)
            if file:
                with transport.recorder.working(PIECE):
                    file.write(chunk)


def _bring(
    source: Contribution,
    shared: Common,
    chunk: np.ndarray,
    joined: Joined,
    kept: Sequence[StateBuffer],
    transport: Transport,
    backend: Backend,
) -> None:
    """Copy or send elements from their source into the writer's chunk.

    shared  `one` has offsets in the source's array, `other` offsets in `chunk`
    """
    if source.rank == transport.rank:
        values = _picked(kept[source.number].array, shared, backend)
        values = values.astype(joined.dtype, copy=False)
    else:
        values = np.empty(shared.length.sum(), joined.dtype)
        transport.recv(values, source.rank)
    if joined.writer != transport.rank:
        transport.send(values, joined.writer)
        return
    done = 0
    for offset, length in zip(shared.other.tolist(), shared.length.tolist(), strict=True):
        chunk[offset : offset + length] = values[done : done + length]
        done += length


def _picked(array: Any, shared: Common, backend: Backend) -> np.ndarray:
    """Copy runs of elements of a backend array to host memory: 1-D, packed."""
    first = int(shared.one.min())
    held = backend.to_host(array[first : int((shared.one + shared.length).max())])
    if len(shared.length) == 1:
        return held
    return np.concatenate(
        [
            held[offset - first : offset - first + length]
            for offset, length in zip(shared.one.tolist(), shared.length.tolist(), strict=True)
        ]
    )


def _windows(joined: Joined) -> Iterator[Runs]:
    length, count = prod(joined.shape), MOVED // joined.dtype.itemsize
    for start in range(0, length, count):
        yield one_run(start, min(count, length - start))
