"""Compares the tensors of two checkpoints: bit for bit, or by numbers that no layout changes."""

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.errors import CheckpointError
from mpitrain.files import reading
from mpitrain.formats.safetensors_files import Located, located, read_into
from mpitrain.formats.tensors import StoredTensor
from mpitrain.run.checkpoint.loading import parameters
from mpitrain.run.checkpoint.manifest import read_manifest, verify
from mpitrain.run.checkpoint.saving import PARAMETERS
from mpitrain.tools.report.diff.sides import order

CHUNK = 1 << 20
"""Elements of a projection's random signs that are drawn at once."""


class Apart(NamedTuple):
    """A tensor that differs between two checkpoints.

    name      buffer/tensor
    elements  number of different elements; -1: one run lacks the tensor, or has another shape
    of        all its elements
    most      largest absolute difference
    """

    name: str
    elements: int
    of: int
    most: float


class TensorSums(NamedTuple):
    """The sum, the 2-norm and the projection of a tensor on random signs, in float64.

    The projection of a difference of one element has the size of this difference.
    """

    sum: float
    norm: float
    projection: float


class Beyond(NamedTuple):
    """A tensor whose numbers differ by more than the tolerance.

    measure  the number that differs most: sum, norm or projection
    apart    its difference, relative to the norm of the tensor
    """

    name: str
    measure: str
    apart: float


def different_bits(one: Path, other: Path) -> list[Apart]:
    """Compare all tensors of two checkpoints of one layout, parameters and state, bit for bit.

    raises  CheckpointError if one of them is damaged
    """
    first, second = _stored(one), _stored(other)
    differing = [Apart(name, -1, 0, math.inf) for name in sorted(first.keys() ^ second.keys())]
    for name in sorted(first.keys() & second.keys(), key=order):
        left, right = _read(first[name]), _read(second[name])
        if first[name].shape != second[name].shape or left.dtype != right.dtype:
            differing.append(Apart(name, -1, left.size, math.inf))
        elif left.tobytes() != right.tobytes():
            bits = f"u{left.dtype.itemsize}"
            differ = left.view(bits) != right.view(bits)
            with np.errstate(invalid="ignore", over="ignore"):
                most = np.abs(left.astype(np.float64) - right.astype(np.float64)).max()
            differing.append(Apart(name, int(differ.sum()), left.size, float(most)))
    return differing


def _stored(path: Path) -> dict[str, Located]:
    """Return the location of each array in a verified checkpoint: {its file and key: location}."""
    manifest = read_manifest(path)
    verify(path, manifest, 0, 1)
    arrays = {f"{PARAMETERS}/{name}": tensor.located for name, tensor in parameters(path).items()}
    try:
        tensors = {
            file: located(path / file)[1] for file in {piece.file for piece in manifest.stored}
        }
        for piece in manifest.stored:
            name = f"{piece.name}/{piece.part.tensor}"
            # Several files may have regions of one tensor.
            name += f" in {piece.file}, {piece.key}" if name in arrays else ""
            arrays[name] = tensors[piece.file][piece.key]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}.", "Compare runs with whole checkpoints."
        ) from None
    return arrays


def _read(located: Located) -> np.ndarray:
    """Read a tensor: 1-D, in the dtype of the file."""
    array = np.empty(math.prod(located.shape), located.numpy)
    with reading(located.file, located.inner) as file:
        read_into(file.fileno(), array, located.start)
    return array


def beyond(one: Path, other: Path, tolerance: float, skips_keys: bool) -> tuple[list[Beyond], int]:
    """Compare the parameters of two checkpoints of any layouts by three numbers of each.

    tolerance   of a difference, relative to the 2-norm of the tensor; of sums to sqrt(size) norms
    skips_keys  leave out the key biases, whose gradient is only rounding error
    returns     the tensors beyond it, the farthest first; and the number of compared tensors
    """
    for path in (one, other):
        verify(path, read_manifest(path), 0, 1)
    first, second = parameters(one), parameters(other)
    exceeding = [Beyond(name, "shape", math.inf) for name in first.keys() ^ second.keys()]
    for name in sorted(first.keys() & second.keys()):
        left, right = _flat(first[name], name, skips_keys), _flat(second[name], name, skips_keys)
        if left.shape != right.shape:
            exceeding.append(Beyond(name, "shape", math.inf))
            continue
        a, b = numbers(left, name), numbers(right, name)
        scale = max(a.norm, b.norm) or 1.0
        gaps = {
            "sum": abs(a.sum - b.sum) / (scale * math.sqrt(max(1, left.size))),
            "norm": abs(a.norm - b.norm) / scale,
            "projection": abs(a.projection - b.projection) / scale,
        }
        worst = max(gaps, key=lambda key: (not math.isfinite(gaps[key]), gaps[key]))
        if not gaps[worst] <= tolerance:
            exceeding.append(Beyond(name, worst, gaps[worst]))
    return sorted(exceeding, key=lambda tensor: -tensor.apart), len(first)


def _flat(stored: StoredTensor, name: str, skips_keys: bool) -> np.ndarray:
    """Return the elements of a tensor, 1-D; without its key biases if these are skipped."""
    array = _read(stored.located)
    if skips_keys and name.endswith("qkv.bias") and array.size % 3 == 0:
        return np.delete(array.reshape(3, -1), 1, 0).reshape(-1)
    return array


def numbers(array: np.ndarray, name: str) -> TensorSums:
    """Return the numbers of a tensor, 1-D; the random signs depend only on its name."""
    total, squares, projection = 0.0, 0.0, 0.0
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    for values in _chunks(array):
        signs = 1.0 - 2.0 * draw.integers(0, 2, len(values))
        total += float(values.sum())
        squares += float(values @ values)
        projection += float(values @ signs)
    return TensorSums(total, math.sqrt(squares), projection)


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(array), CHUNK):
        yield array[start : start + CHUNK].astype(np.float64)
