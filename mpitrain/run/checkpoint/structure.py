"""The schema of a manifest: types and ranges of its entries, and the rules between them.

The manifest's own SHA-256 detects accidents only, since an editor of the text can recompute it.
"""

from collections.abc import Iterable
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.formats.safetensors_files import INDEX
from mpitrain.parallel.replication.records import DynamicLossScale
from mpitrain.run.checkpoint.writers import PARAMETERS
from mpitrain.strict_json import validated

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
    """Parse the text of a manifest.

    largest_block  limit for the bytes of a block, since a block is read into memory
    raises         ValueError with a message of one line, if an entry breaks a rule
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
    """Raise ValueError unless rectangles are disjoint and inside the tensor, and pieces fit.

    The pieces must be ascending ranges of the rectangles' elements, with packed offsets.
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
    """Count the elements of rectangles.

    raises  ValueError unless they differ in one dim at most, and do not overlap there
    """
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
