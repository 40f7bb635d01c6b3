"""Loading of checkpoints: each rank reads the ranges it needs, in any layout (resharding)."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mpitrain.errors import CheckpointError, say
from mpitrain.files import reading
from mpitrain.formats.folder import weight_map
from mpitrain.formats.safetensors_files import INDEX, MOVED, Located, located, read_into
from mpitrain.formats.tensors import StoredTensor
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Backend
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.regions import Piece, common
from mpitrain.run.checkpoint.manifest import (
    MANIFEST,
    Done,
    Manifest,
    Stored,
    read_manifest,
    steps,
    unreadable,
    verify,
    way_out,
)
from mpitrain.run.checkpoint.regions import (
    PARAMETERS,
    HeldRegion,
    Region,
    described,
    holdings,
    runs,
)
from mpitrain.transport.agreement import from_all_ranks, on_all_ranks
from mpitrain.transport.base import Transport

OPEN = 64
"""The largest number of files that are open at the same time."""

ANEW, FROM_MEAN = "starts anew: it is bound to", "starts from its mean over"


def fill(
    path: Path,
    manifest: Manifest,
    kept: Sequence[StateBuffer],
    storage: Storage,
    backend: Backend,
    layout: Mapping[str, Any],
    rank: int,
) -> dict[str, str]:
    """Fill the arrays of a rank from a verified checkpoint; not collective.

    kept     the state of this rank; arrays for which the checkpoint has nothing stay as they are
    layout   the present layout; each copy of the parameters takes an equal part of summed "own" state
    returns  {name of state that is not restored exactly: `ANEW` or `FROM_MEAN`}
    raises   CheckpointError if a tensor is missing or of another shape, or a file cannot be read
    """
    changed: dict[str, str] = {}
    files = _Files(path, manifest)
    is_same = manifest.layout == json.loads(json.dumps(layout))
    try:
        for held in holdings(described(storage, kept)):
            regions = files.regions_of(held)
            own_regions = [
                stored for stored in regions if is_same and manifest.files[stored.file].rank == rank
            ]
            like, is_needed = kept[held.number].like, kept[held.number].needed
            if held.kind == "bound" and [stored.part.length for stored in own_regions] != [
                held.part.length
            ]:
                if regions if like else any(stored.kind == "bound" for stored in manifest.stored):
                    changed[held.name] = FROM_MEAN if like else ANEW
                regions = own_regions = []
            if like and not regions:
                regions = files.regions_of(held._replace(name=like))
            kind = regions[0].kind if regions else held.kind
            if own_regions and kind == held.kind != "agreed":
                values = _joined(files, held, own_regions)
            elif regions and kind == "mean":
                values = _summed(files, held, regions) / _copies(manifest.layout)
                changed[held.name] = FROM_MEAN
            elif regions and kind == "own":
                values = _summed(files, held, regions) / _copies(layout)
            elif regions or (is_needed and kind in ("agreed", "mean")):
                values = _joined(files, held, regions)
            else:
                continue
            put(kept[held.number].array, held, values, backend)
    except OSError as error:
        raise unreadable(Path(error.filename or path), error, path) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.", way_out(path)) from None
    finally:
        files.close()
    return changed


def taken(array: Any, held: HeldRegion, backend: Backend) -> np.ndarray:
    """Return the elements of a region, 1-D and packed, from the array of its `StateBuffer`."""
    return np.concatenate(
        [
            backend.to_host(array[piece.offset : piece.offset + piece.stop - piece.start])
            for piece in held.part.pieces
        ]
    )


def _copies(layout: Mapping[str, Any]) -> int:
    """Return the number of ranks that have the same parameters, each with state of its own."""
    return layout["dp"] * layout.get("cp", 1)


def put(array: Any, held: HeldRegion, values: np.ndarray, backend: Backend) -> None:
    """Write `values`, a region's elements, 1-D and packed, into the array of its `StateBuffer`."""
    values = values.astype(array.dtype, copy=False)
    for piece, packed in zip(held.part.pieces, held.part.packed().pieces, strict=True):
        array[piece.offset : piece.offset + piece.stop - piece.start] = backend.from_host(
            values[packed.offset : packed.offset + piece.stop - piece.start]
        )


def parameters(path: Path) -> dict[str, StoredTensor]:
    """Locate the parameters of a checkpoint by full names; CheckpointError if it is damaged."""
    try:
        listed = weight_map(path / INDEX)
        files = {file: located(path / file)[1] for file in sorted(set(listed.values()))}
        return {name: StoredTensor(files[file][name]) for name, file in listed.items()}
    except KeyError as error:
        raise CheckpointError(f"{path} has no tensor {error}.", way_out(path)) from None
    except OSError as error:
        raise unreadable(Path(error.filename or path), error, path) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.", way_out(path)) from None


def _joined(files: "_Files", held: HeldRegion, regions: Sequence[Stored]) -> np.ndarray:
    """Read a rank's elements of a tensor, bit for bit: 1-D, packed.

    raises  CheckpointError unless `regions` have each element exactly once
    """
    joined, done = np.empty(held.part.length, held.dtype), list[tuple[int, int]]()
    for offset, values in files.elements(held, regions):
        joined[offset : offset + len(values)] = values
        done.append((offset, offset + len(values)))
    ends = [0, *(stop for _, stop in sorted(done))]
    if ends[-1] != len(joined) or ends[:-1] != sorted(
        start for start, _ in done
    ):  # An element is missing or duplicated.
        raise files.unfit(held, regions)
    return joined


def _summed(files: "_Files", held: HeldRegion, regions: Sequence[Stored]) -> np.ndarray:
    """Read a rank's elements of a tensor, summed over all ranks that saved them: 1-D, packed."""
    if any(stored.part.shape != held.part.shape for stored in regions):
        raise files.unfit(held, regions)
    total = np.zeros(held.part.length, held.dtype)
    for offset, values in files.elements(held, regions):
        total[offset : offset + len(values)] += values
    return total


class _Files:
    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._listed = path, manifest.files
        self._weight_map: dict[str, str] = {}
        self._stored: dict[tuple[str, str], list[Stored]] = defaultdict(list)
        for stored in manifest.stored:
            self._stored[stored.name, stored.part.tensor].append(stored)
        self._located: dict[str, dict[str, Located]] = {}
        self._open: dict[str, BinaryIO] = {}

    def regions_of(self, held: HeldRegion) -> list[Stored]:
        """Return the stored regions of the tensor to which `held` belongs."""
        tensor = held.part.tensor
        if held.name != PARAMETERS:
            return self._stored.get((held.name, tensor), [])
        self._weight_map = self._weight_map or weight_map(self._path / INDEX)
        if tensor not in self._weight_map:
            return []
        file = self._weight_map[tensor]
        shape = self._tensor(file, tensor).shape
        return [
            Stored(
                file,
                tensor,
                PARAMETERS,
                "agreed",
                Region(tensor, shape, None, (Piece(0, prod(shape), 0),)),
            )
        ]

    def elements(
        self, held: HeldRegion, regions: Sequence[Stored]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Read the elements of a region, at most MOVED bytes at a time.

        yields   the offset of the values in the packed region, and the values, 1-D
        raises   ValueError if an array has another dtype or shape than the region needs
        """
        wanted = runs(held.part.packed())
        for stored in regions:
            if stored.part.shape != held.part.shape:
                continue
            shared, array = common(wanted, runs(stored.part)), self._tensor(stored.file, stored.key)
            dtype = array.numpy
            shape = held.part.shape if stored.name == PARAMETERS else (stored.part.length,)
            if dtype.kind != held.dtype.kind or array.shape != shape:
                raise ValueError(
                    f"{stored.file} has {stored.key!a} as {array.dtype} of shape {array.shape}, but "
                    f"{held.dtype} of shape {shape} is wanted"
                )
            for offset, place, length in zip(*(column.tolist() for column in shared), strict=True):
                for start in range(0, length, MOVED // dtype.itemsize):
                    values = np.empty(min(MOVED // dtype.itemsize, length - start), dtype)
                    read_into(
                        self._descriptor(stored.file),
                        values,
                        array.start + (place + start) * dtype.itemsize,
                    )
                    yield offset + start, values

    def unfit(self, held: HeldRegion, regions: Sequence[Stored]) -> CheckpointError:
        shape = regions[0].part.shape if regions else None
        has = (
            "none"
            if shape is None
            else f"shape {shape}"
            if shape != held.part.shape
            else "not each element of it once"
        )
        full = held.part.tensor if held.name == PARAMETERS else f"{held.name}/{held.part.tensor}"
        return CheckpointError(
            f"The model needs {full} of shape {held.part.shape}, but the checkpoint has {has}.",
            f"Use the configuration that {self._path} was trained with.",
        )

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _tensor(self, file: str, key: str) -> Located:
        if file not in self._listed:
            raise ValueError(f"{INDEX} names {file!a}, which {MANIFEST} does not list")
        if file not in self._located:
            self._located[file] = located(self._path / file)[1]
        if key not in self._located[file]:
            raise ValueError(f"{file} has no tensor {key!a}")
        return self._located[file][key]

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            if len(self._open) == OPEN:
                self.close()
            self._open[file] = reading(self._path / file)
        return self._open[file].fileno()


class Checkpoint(NamedTuple):
    """A verified checkpoint on disk, with its manifest."""

    path: Path
    manifest: Manifest

    @property
    def done(self) -> Done:
        return self.manifest.done


def read_beside(transport: Transport, path: Path) -> Checkpoint:
    """Verify a checkpoint; collective. Each block is read once, by one of the ranks.

    An active run may remove the checkpoint meanwhile; then the newest one is verified instead.
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
    """Return the newest checkpoint if `path` was removed, as rank 0 sees it; collective."""
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

    Each rank reads only the ranges that it needs. State that is "agreed", and all state in the same
    layout, is restored bit for bit. In another layout each replica gets an equal part of the sum of
    "own" state, and the mean of "mean" state; "bound" state starts anew or from a mean, which rank 0
    prints. An active run may remove the checkpoint meanwhile; then the newest one is loaded instead.

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
            say(f"note: {names} in {checkpoint.path} {what} the ranks of {then}.")
        return checkpoint
