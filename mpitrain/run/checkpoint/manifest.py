"""The manifest of a checkpoint, its schema, and the directories of checkpoints.

The manifest lists all files, with the SHA-256 of each of their blocks: it binds them to one run, step
and layout.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.errors import CheckpointError
from mpitrain.files import (
    FOUND_WRONG,
    ON_READ,
    contents,
    own_folder,
    reading,
    refuse_link,
    remedy,
    remove,
    rename,
    sync_folder,
)
from mpitrain.formats.safetensors_files import BLOCK, Writing
from mpitrain.run.checkpoint.regions import Region, part_of_text
from mpitrain.strict_json import validated

CHECKPOINTS, LOCK = "checkpoints", "lock"
"""The names of the folder of checkpoints and of the lock file in a run directory."""
NAME = re.compile(r"step-\d{8,18}", re.ASCII)
UNFINISHED = re.compile(r"\.step-.*\.(partial|dropped)", re.ASCII | re.DOTALL)
REPLACED = re.compile(r"\.(step-\d{8,18})\.replaced", re.ASCII)


def prepare(partial: Path, alive: Callable[[], None]) -> None:
    """Make the temporary directory of a new checkpoint; remove leftovers of killed processes."""
    sweep(own_folder(partial.parent), alive)
    partial.mkdir()


def abandon(partial: Path) -> None:
    """Remove the temporary directory of a checkpoint that cannot be written, if that is possible."""
    with suppress(OSError):
        remove(partial)


def sweep(folder: Path, alive: Callable[[], None] = lambda: None) -> None:
    """Remove what killed processes left: half written, half removed or replaced checkpoints.

    alive  called after each file
    """
    names = os.listdir(folder)
    for name in names:
        replaced = REPLACED.fullmatch(name)
        if UNFINISHED.fullmatch(name) or (replaced and replaced[1] in names):
            _remove(folder / name, alive)


def tidy(run: Path) -> None:
    """Remove the leftovers of a run that has died, unless a process holds the lock of the run."""
    with suppress(OSError), reading(run / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sweep(run / CHECKPOINTS)


def put_in_place(
    partial: Path,
    target: Path,
    keep: int,
    keeps: Callable[[int], bool],
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Rename a finished checkpoint to its final name, and remove old ones, as `drop_old`.

    alive  called after each file
    """
    sync_folder(partial)
    alive()
    replaced = target.with_name(f".{target.name}.replaced")
    if os.path.lexists(target):
        _remove(replaced, alive)
        os.rename(target, replaced)
    rename(partial, target)
    _remove(replaced, alive)
    alive()
    drop_old(target.parent, keep, keeps, alive)


def _remove(checkpoint: Path, alive: Callable[[], None]) -> None:
    """Remove a checkpoint, if there is one, file by file: each may be large."""
    refuse_link(checkpoint.parent)
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        for file in sorted(checkpoint.iterdir()):
            remove(file)
            alive()
    remove(checkpoint)


def drop_old(
    folder: Path, keep: int, keeps: Callable[[int], bool], alive: Callable[[], None] = lambda: None
) -> None:
    """Remove all checkpoints but the newest `keep`, and the steps of which `keeps` is true.

    alive  called after each file
    """
    for old in _finished(folder)[:-keep]:
        if not keeps(step_of(old)):
            dropped = f".{old.strip('.')}.dropped"
            # The rename is atomic: a reader finds all files or none.
            os.rename(folder / old, folder / dropped)
            _remove(folder / dropped, alive)


def step_of(name: str) -> int:
    """Return the step of a checkpoint by the name of its directory."""
    return int("".join(filter(str.isdecimal, name)))


def steps(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, oldest first.

    One that was being replaced when its process died counts.
    """
    try:
        return [folder / name for name in _finished(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _finished(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    checkpoints = {replaced[1]: name for name in names if (replaced := REPLACED.fullmatch(name))}
    checkpoints |= {name: name for name in names if NAME.fullmatch(name)}
    return [checkpoints[name] for name in sorted(checkpoints, key=step_of)]


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a folder; CheckpointError if there is none."""
    checkpoints = steps(folder)
    if not checkpoints:
        raise CheckpointError(
            f"There is no checkpoint in {folder}.",
            "Name a run directory that has one, or train first.",
        )
    return checkpoints[-1]


def way_out(path: Path) -> str:
    """Return the remedy for a checkpoint that cannot be read."""
    finished = steps(path.parent)
    older = [other.name for other in finished[: finished.index(path)]] if path in finished else []
    return f"Remove {path}" + (
        f" to go on from {older[-1]}." if older else " and start the run again."
    )


def unreadable(what: Path, error: OSError, path: Path) -> CheckpointError:
    """Return the error for a file of the checkpoint `path` that could not be read.

    Only what was found to be wrong is damaged. Another error of the system says nothing about the file.
    """
    if isinstance(error, FileNotFoundError):
        if os.path.lexists(path):
            return CheckpointError(f"{what} is missing.", way_out(path))
        return CheckpointError(
            f"The checkpoint {path} cannot be found.",
            "If its run goes on, it has newer ones: start again. Else name the run directory by a full path in a folder "
            "that all ranks share.",
        )
    is_damaged = error.errno in FOUND_WRONG
    fault = "is damaged" if is_damaged else "cannot be read"
    way = way_out(path) if is_damaged else remedy(error, "")
    return CheckpointError(f"{what} {fault}: {error.strerror or error}.", way)


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Size = Annotated[int, Field(ge=1, lt=1 << 63)]
Rank = Annotated[int, Field(ge=0, lt=1 << 31)]
FileName = Annotated[str, Field(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\z")]
Word = Annotated[str, Field(pattern=r"\A[ -~]{1,100}\z")]
"""A short text of printable ASCII characters."""
Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
Pair = tuple[Count, Count]
PartText = tuple[
    str,
    Annotated[list[Count], Field(max_length=32)],
    list[list[Pair]] | None,
    list[tuple[Count, Count, Count]],
]
StoredText = tuple[FileName, str, str, Literal["agreed", "own", "mean", "bound"], PartText]


class BaseRecord(BaseModel):
    """The base model of adapters, if a checkpoint has only these."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    folder: Annotated[str, Field(min_length=1, max_length=4096)]
    sha256: dict[FileName, Digest]


class Structure(BaseModel):
    """The entries of a manifest as JSON; `Manifest` documents their meaning."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    format: str
    step: Count
    samples: Count
    run: Word
    layout: dict[Word, Count]
    scalars: dict[Word, Annotated[float, Field(ge=0, lt=1 << 63)]]
    files: dict[FileName, tuple[Rank, Size, list[Digest]]]
    stored: list[StoredText]
    block: Size
    sha256: Digest
    base: BaseRecord | None = None
    meaning: dict[Word, Any] | None = None
    metrics: tuple[Count, Count] | None = None


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
    block    bytes of a block; each has a SHA-256
    base     of adapters, if only these are saved: the folder of the model under them, and the
             SHA-256 of its files; else empty
    meaning  what the parameters mean, as `run_dir.meaning`; empty in those of earlier versions
    metrics  bytes of the metrics before it, and their CRC-32; empty in those of earlier versions
    """

    done: Done
    layout: Mapping[str, Any]
    scalars: Mapping[str, Any]
    files: Mapping[str, File] = {}
    stored: Sequence[Stored] = ()
    block: int = BLOCK
    base: Mapping[str, Any] = {}
    meaning: Mapping[str, Any] = {}
    metrics: Sequence[int] = ()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = {"format": FORMAT, **manifest._asdict(), **manifest.done._asdict()}
    del body["done"]
    for name in ("base", "meaning", "metrics"):
        if not body[name]:
            del body[name]
    file = Writing(folder / MANIFEST)
    file.write(_text({**body, "sha256": _digest(body)}).encode())
    file.close()


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint; CheckpointError if it is missing, altered or invalid."""
    file = path / MANIFEST
    try:
        text = contents(file).decode()
        body = json.loads(text)
        is_altered = (
            body.pop("sha256") != _digest(body) or _text({**body, "sha256": _digest(body)}) != text
        )
        format_name = body["format"]
    except OSError as error:
        raise unreadable(file, error, path) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file} is damaged: it is no manifest.", way_out(path)) from None
    if is_altered:
        raise CheckpointError(
            f"{file} was altered: its contents do not match its SHA-256.", way_out(path)
        )
    if format_name != FORMAT:
        raise CheckpointError(
            f"{file} is in format {format_name}, but this version of mpitrain reads {FORMAT}.",
            "Go on with the version that wrote it, or start the run again.",
        )
    try:
        read = validated(Structure, text.encode())
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}.", way_out(path)) from None
    done = Done(read.step, read.samples, read.run)
    named = re.search(r"step-(\d+)", path.name)
    if named and int(named[1]) != done.step:
        right = path.with_name(f"step-{done.step:08d}")
        raise CheckpointError(
            f"{path} holds step {done.step}, as {MANIFEST} says, and not the one that its name says.",
            way_out(path) if right.exists() else f"Rename it to {right.name}.",
        )
    files = {name: File(*listed) for name, listed in read.files.items()}
    stored = [
        Stored(file, key, name, kind, part_of_text(part))
        for file, key, name, kind, part in read.stored
    ]
    base = read.base.model_dump() if read.base else {}
    meaning = read.meaning or {}
    return Manifest(
        done,
        read.layout,
        read.scalars,
        files,
        stored,
        read.block,
        base,
        meaning,
        read.metrics or (),
    )


def read_chosen(choose: Callable[[], Path]) -> tuple[Path, Manifest]:
    """Return the checkpoint that `choose` names, and its manifest.

    An active run may remove the checkpoint meanwhile; then `choose` names another one.
    """
    before = None
    while True:
        path = choose()
        try:
            return path, read_manifest(path)
        except CheckpointError:
            if path == before or path in steps(path.parent):
                raise
        before = path


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()


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
    try:
        return [name for name in os.listdir(path) if name.endswith(".safetensors")]
    except OSError as error:
        raise unreadable(path, error, path) from None


def _verify(file: Path, manifest: Manifest, blocks: list[int]) -> None:
    wanted, folder = manifest.files[file.name], file.parent
    try:
        with reading(file) as stored:
            nbytes, altered = os.fstat(stored.fileno()).st_size, -1
            for block in blocks:
                stored.seek(manifest.block * block)
                if hashlib.sha256(stored.read(manifest.block)).hexdigest() != wanted.digests[block]:
                    altered = block
                    break
                ON_READ.get()()
    except OSError as error:
        raise unreadable(file, error, folder) from None
    if nbytes == wanted.nbytes and altered < 0:
        return
    if nbytes != wanted.nbytes:
        raise CheckpointError(
            f"{file} is damaged: it has {nbytes} bytes where {MANIFEST} says {wanted.nbytes}.",
            way_out(folder),
        )
    raise CheckpointError(
        f"{file} was altered: block {altered} does not match its SHA-256 in {MANIFEST}.",
        way_out(folder),
    )
