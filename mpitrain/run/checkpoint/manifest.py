"""The manifest of a checkpoint, its schema, and the directories of checkpoints.

The manifest lists all files, with the SHA-256 of each of their blocks: it binds them to one run, step
and layout.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.errors import CheckpointError
from mpitrain.files import Directory, contents, opened, reading
from mpitrain.formats.safetensors_files import BLOCK, INDEX, INNER, Writing, located
from mpitrain.parallel.replication.step_end import DynamicLossScale
from mpitrain.run.checkpoint.regions import PARAMETERS, Region, part_of_text
from mpitrain.strict_json import validated

CHECKPOINTS, LOCK = "checkpoints", "lock"
"""The names of the folder of checkpoints and of the lock file in a run directory."""
NAME = re.compile(r"step-\d{8,18}", re.ASCII)
UNFINISHED = re.compile(r"\.step-.*\.(partial|dropped)", re.ASCII | re.DOTALL)
REPLACED = re.compile(r"\.(step-\d{8,18})\.replaced", re.ASCII)


def prepare(partial: Path) -> None:
    """Make the temporary directory of a new checkpoint; remove leftovers of killed processes."""
    with opened(partial.parent.parent) as run, run.make(partial.parent.name) as folder:
        sweep(folder)
        folder.make(partial.name).close()


def abandon(partial: Path) -> None:
    """Remove the temporary directory of a checkpoint that cannot be written, if that is possible."""
    with suppress(OSError), opened(partial.parent, inner=1) as folder:
        folder.remove_tree(partial.name)


def sweep(folder: Directory) -> None:
    """Remove what killed processes left: half written, half removed or replaced checkpoints."""
    names = folder.names()
    for name in names:
        replaced = REPLACED.fullmatch(name)
        if UNFINISHED.fullmatch(name) or (replaced and replaced[1] in names):
            folder.remove_tree(name)


def tidy(run: Path) -> None:
    """Remove the leftovers of a run that has died, unless a process holds the lock of the run."""
    with suppress(OSError), opened(run) as folder, folder.open(LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with folder.subdirectory(CHECKPOINTS) as checkpoints:
            sweep(checkpoints)


def put_in_place(partial: Path, target: Path, keep: int, keeps: Callable[[int], bool]) -> None:
    """Rename a finished checkpoint to its final name, and remove old ones, as `drop_old`."""
    with opened(target.parent, inner=1) as folder:
        with folder.subdirectory(partial.name) as written:
            written.sync()
        replaced = f".{target.name}.replaced"
        if folder.facts(target.name):
            folder.remove_tree(replaced)
            folder.rename(target.name, replaced)
        folder.rename(partial.name, target.name)
        folder.remove_tree(replaced)
        folder.sync()
        drop_old(folder, keep, keeps)


def drop_old(folder: Directory, keep: int, keeps: Callable[[int], bool]) -> None:
    """Remove all checkpoints but the newest `keep`, and the steps of which `keeps` is true."""
    for old in _finished(folder)[:-keep]:
        if not keeps(step_of(old)):
            dropped = f".{old.strip('.')}.dropped"
            folder.rename(old, dropped)  # The rename is atomic: a reader finds all files or none.
            folder.remove_tree(dropped)


def step_of(name: str) -> int:
    """Return the step of a checkpoint by the name of its directory."""
    return int("".join(filter(str.isdecimal, name)))


def steps(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, oldest first; OSError if the folder is a link.

    One that was being replaced when its process died counts.
    """
    try:
        with opened(folder, inner=1) as directory:
            return [folder / name for name in _finished(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _finished(folder: Directory) -> list[str]:
    names = [
        name
        for name in folder.names()
        if (facts := folder.facts(name)) and stat.S_ISDIR(facts.st_mode)
    ]
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


def structure_of(text: bytes, largest_block: int) -> Structure:
    """Parse the text of a manifest; ValueError with a message of one line if it breaks a rule.

    largest_block  limit for the bytes of a block, since a block is read into memory
    """
    structure = validated(Structure, text)
    _check_numbers(structure, largest_block)
    _check_stored(structure)
    return structure


def _check_numbers(structure: Structure, largest_block: int) -> None:
    if structure.block > largest_block:
        raise ValueError(f"a block has at most {largest_block} bytes, and not {structure.block}")
    if structure.layout.get("dp", 0) < 1:
        raise ValueError("the layout has no number of replicas, dp")
    scale = structure.scalars.get("loss_scale", DynamicLossScale.FIRST)
    if not DynamicLossScale.LEAST <= scale <= DynamicLossScale.MOST:
        raise ValueError(
            f"the loss scale is {scale:g}, and not from {DynamicLossScale.LEAST:g} to {DynamicLossScale.MOST:g}"
        )
    for name, (_, nbytes, digests) in structure.files.items():
        if len(digests) != -(-nbytes // structure.block):
            raise ValueError(
                f"{name} of {nbytes} bytes has {len(digests)} digests, for blocks of {structure.block}"
            )
    if INDEX not in structure.files:
        raise ValueError(f"it lists no {INDEX}")


def _check_stored(structure: Structure) -> None:
    keys, kinds, shapes = set(), dict[tuple[str, str], str](), dict[tuple[str, str], list[int]]()
    for file, key, name, kind, (tensor, shape, rectangles, pieces) in structure.stored:
        where = f"{key!a} in {file}"
        if file not in structure.files or file == INDEX:
            raise ValueError(f"{where} is in no file that it lists")
        if (file, key) in keys:
            raise ValueError(f"it has {where} twice")
        keys.add((file, key))
        if name == PARAMETERS:
            raise ValueError(
                f"{where} is a parameter, but parameters are whole, in files of their own"
            )
        if kinds.setdefault((name, tensor), kind) != kind:
            raise ValueError(
                f"{where} is {kind} where another part of its tensor is {kinds[name, tensor]}"
            )
        if tensor and shapes.setdefault((name, tensor), shape) != shape:
            raise ValueError(
                f"{where} is of shape {shape} where another part of its tensor is of {shapes[name, tensor]}"
            )
        _check_part(where, shape, rectangles, pieces)


def _check_part(
    where: str, shape: list[int], rectangles: Any, pieces: list[tuple[int, int, int]]
) -> None:
    """Raise ValueError unless rectangles are disjoint and inside the tensor, and pieces are
    ascending ranges of the rectangles' elements, with packed offsets.
    """
    local = prod(shape) if rectangles is None else _held(where, shape, rectangles)
    done = before = 0
    for start, stop, offset in pieces:
        if not before <= start < stop <= local or offset != done:
            raise ValueError(f"{where} has elements {start} to {stop} of {local} at {offset}")
        before, done = stop, done + stop - start
    if not pieces:
        raise ValueError(f"{where} has no elements")


def _held(where: str, shape: list[int], rectangles: list[list[tuple[int, int]]]) -> int:
    """Count the elements of rectangles, which may differ in one dim and must not overlap there."""
    for rectangle in rectangles:
        if len(rectangle) != len(shape) or any(
            not 0 <= a <= b <= n for (a, b), n in zip(rectangle, shape, strict=True)
        ):
            raise ValueError(
                f"{where} has the rectangle {rectangle}, which is not inside of {shape}"
            )
    differ = {
        dim for other in rectangles for dim in range(len(shape)) if other[dim] != rectangles[0][dim]
    }
    dim = next(iter(differ), 0)
    overlap = _overlap(rectangle[dim] for rectangle in rectangles) if shape else len(rectangles) > 1
    if not rectangles or len(differ) > 1 or overlap:
        raise ValueError(f"{where} has rectangles that overlap or differ in several dims")
    return sum(prod(stop - start for start, stop in rectangle) for rectangle in rectangles)


def _overlap(ranges: Iterable[tuple[int, int]]) -> bool:
    return any(stop > start for (_, stop), (start, _) in pairwise(sorted(ranges)))


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
    """

    done: Done
    layout: Mapping[str, Any]
    scalars: Mapping[str, Any]
    files: Mapping[str, File] = {}
    stored: Sequence[Stored] = ()
    block: int = BLOCK
    base: Mapping[str, Any] = {}


def write_manifest(folder: Path, manifest: Manifest) -> None:
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
    """Return the differences of a file's metadata as text; [] without valid metadata."""
    try:
        metadata = located(file)[0]
        return [
            f"{name} {metadata[name]} where {wanted[name]} is wanted"
            for name in wanted
            if metadata[name] != str(wanted[name])
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
