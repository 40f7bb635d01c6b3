"""The manifest of a checkpoint: it lists all files, with the SHA-256 of each of their blocks.

It binds the files to one run, step and layout.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import CheckpointError
from mpitrain.files import contents, opened, reading
from mpitrain.formats.safetensors_files import BLOCK, INNER, Writing, located
from mpitrain.formats.safetensors_files import INDEX as INDEX
from mpitrain.run.checkpoint.directories import way_out
from mpitrain.run.checkpoint.regions import Region, part_of_text
from mpitrain.run.checkpoint.structure import structure_of

FORMAT = "mpitrain-3"
MANIFEST = "manifest.json"


class Done(NamedTuple):
    """The progress of a run.

    step     number of optimizer steps so far
    samples  number of rows in the global batches of those steps
    run      the identity of the run: drawn at its first start, and the same after each resume
    """

    step: int
    samples: int
    run: str


class File(NamedTuple):
    """A file of a checkpoint: the rank that wrote it, its size, and the SHA-256 of each block."""

    rank: int
    nbytes: int
    digests: list[str]


class Stored(NamedTuple):
    """A stored region of a state tensor: a 1-D array in a file.

    key         name of the array in the file
    name, kind  as in `StateBuffer`
    part        the elements of the tensor in the array
    """

    file: str
    key: str
    name: str
    kind: str
    part: Region


class Manifest(NamedTuple):
    """The contents of a checkpoint.

    done     the progress of the run
    layout   the size of each mesh axis; "own", "mean" and "bound" state depends on it
    scalars  numbers by name
    files    all files by name, except the manifest
    stored   all stored regions of state, except parameters
    block    bytes of a block with one SHA-256
    base of adapters, if only these are saved: the folder of the model under them, and the SHA-256
             of its files; else empty
    """

    done: Done
    layout: Mapping[str, Any]
    scalars: Mapping[str, Any]
    files: Mapping[str, File]
    stored: list[Stored]
    block: int = BLOCK
    base: Mapping[str, Any] = {}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder of the files that it lists; OSError if that fails."""
    body = {"format": FORMAT, **manifest._asdict(), **manifest.done._asdict()}
    del body["done"]
    if not manifest.base:
        del body["base"]
    file = Writing(folder / MANIFEST)
    file.write(_text({**body, "sha256": _digest(body)}).encode())
    file.close()


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint; CheckpointError if it is missing, altered or invalid."""
    file = path / MANIFEST
    try:
        text = contents(file, INNER).decode()
        body = json.loads(text)
        is_altered = (
            body.pop("sha256") != _digest(body) or _text({**body, "sha256": _digest(body)}) != text
        )
        format_name = body["format"]
    except FileNotFoundError:
        if not path.is_dir():
            raise CheckpointError(
                f"The checkpoint {path} cannot be found.",
                "Name the run directory by a full path in a folder that all ranks share.",
            ) from None
        _refuse_earlier(path)
        raise CheckpointError(f"{file} is missing.", way_out(path)) from None
    except OSError as error:
        raise CheckpointError(f"{file} is damaged: {error}.", way_out(path)) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file} is damaged: it is no manifest.", way_out(path)) from None
    if is_altered:
        raise CheckpointError(
            f"{file} was altered: its contents do not match its SHA-256.", way_out(path)
        )
    if format_name != FORMAT:
        raise _of_another_format(file, str(format_name))
    try:
        read = structure_of(text.encode(), BLOCK)
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}.", way_out(path)) from None
    done = Done(read.step, read.samples, read.run)
    named = re.search(r"step-(\d+)", path.name)
    if named and int(named[1]) != done.step:
        raise CheckpointError(
            f"{path} holds step {done.step}, as {MANIFEST} says, and not the one that its name says.",
            way_out(path),
        )
    files = {name: File(*listed) for name, listed in read.files.items()}
    stored = [
        Stored(file, key, name, kind, part_of_text(part))
        for file, key, name, kind, part in read.stored
    ]
    base = read.base.model_dump() if read.base else {}
    return Manifest(done, read.layout, read.scalars, files, stored, read.block, base)


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()


def _refuse_earlier(path: Path) -> None:
    """Raise CheckpointError if the checkpoint is of a version without manifests."""
    file = path / "model.safetensors"
    try:
        format_name = located(file)[0]["format"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    raise _of_another_format(file, format_name)


def _of_another_format(file: Path, format_name: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is in format {format_name}, but this version of mpitrain reads {FORMAT}.",
        "Go on with the version that wrote it, or start the run again.",
    )


def verify(path: Path, manifest: Manifest, rank: int, ranks: int) -> None:
    """Verify the SHA-256 of the `rank`-th of `ranks` equal slices of all blocks.

    Rank 0 also looks for files that the manifest does not list.

    raises  CheckpointError that names the file
    """
    blocks = [
        (name, block)
        for name, file in sorted(manifest.files.items())
        for block in range(len(file.digests))
    ]
    own_blocks = blocks[rank * len(blocks) // ranks : (rank + 1) * len(blocks) // ranks]
    for name, group in groupby(own_blocks, lambda block: block[0]):
        _verify(path / name, manifest, [block for _, block in group])
    listed = {path / name for name in manifest.files}
    for extra in sorted(
        {path / name for name in _tensor_files(path)} - listed if rank == 0 else ()
    ):
        raise CheckpointError(
            f"{extra} is none of the {len(listed)} files that {MANIFEST} lists.", way_out(path)
        )


def _tensor_files(path: Path) -> list[str]:
    """Return the names of the safetensors files in a checkpoint, which other tools would read."""
    try:
        with opened(path, INNER - 1) as folder:
            return [name for name in folder.names() if name.endswith(".safetensors")]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.", way_out(path)) from None


def _verify(file: Path, manifest: Manifest, blocks: list[int]) -> None:
    wanted, folder = manifest.files[file.name], file.parent
    try:
        with reading(file, INNER) as stored:
            nbytes, altered = os.fstat(stored.fileno()).st_size, -1
            for block in blocks:
                stored.seek(manifest.block * block)
                if hashlib.sha256(stored.read(manifest.block)).hexdigest() != wanted.digests[block]:
                    altered = block
                    break
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing.", way_out(folder)) from None
    except OSError as error:
        raise CheckpointError(f"{file} is damaged: {error}.", way_out(folder)) from None
    if nbytes == wanted.nbytes and altered < 0:
        return
    if others := _other_facts(file, {**manifest.done._asdict(), "rank": wanted.rank}):
        raise CheckpointError(
            f"{file} and {MANIFEST} belong to different checkpoints or ranks: it has {', '.join(others)}.",
            way_out(folder),
        )
    if nbytes != wanted.nbytes:
        raise CheckpointError(
            f"{file} is damaged: it has {nbytes} bytes where {MANIFEST} says {wanted.nbytes}.",
            way_out(folder),
        )
    raise CheckpointError(
        f"{file} was altered: block {altered} does not match its SHA-256 in {MANIFEST}.",
        way_out(folder),
    )


def _other_facts(file: Path, wanted: Mapping[str, Any]) -> list[str]:
    """Return the differences between a file's metadata and the wanted values, as text.

    They are [] if the file has no valid metadata.
    """
    try:
        metadata = located(file)[0]
        return [
            f"{name} {metadata[name]} where {wanted[name]} is wanted"
            for name in wanted
            if metadata[name] != str(wanted[name])
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
