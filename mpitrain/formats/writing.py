"""Writes a folder of safetensors files; it appears under its name when it is complete."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.files import cannot_write, opened
from mpitrain.formats.computed_tensor import AnyTensor
from mpitrain.formats.format import FolderContents
from mpitrain.formats.safetensors_files import Writing, WritingTensors

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}
"""The dtypes in which parameters can be written."""
METADATA = {"format": "pt"}
"""transformers refuses a safetensors file without these metadata."""
INNER = 2
"""Neither a file nor the temporary folder may be a link."""


def check_new(folder: Path) -> None:
    """Raise ConfigError unless a folder can be made under this name."""
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists already.", "Choose another --out, or remove it.")
    if not folder.parent.is_dir():
        raise ConfigError(
            f"{folder} needs a folder to be in, but there is no {folder.parent}.",
            "Make it, or choose another --out.",
        )


def write_folder(
    folder: Path, weights: str, written: FolderContents, dtype: str, shard_bytes: int
) -> list[str]:
    """Write the contents of a new folder.

    weights      name of the safetensors file without its suffix
    dtype        name of the dtype in the files, one of DTYPES
    shard_bytes  the largest sum of tensors in a file; a larger tensor has a file of its own
    memory       one tensor
    returns      the names of the files
    raises       ConfigError if the folder cannot be written or a value is beyond the dtype;
                 CheckpointError if a tensor cannot be read
    """
    check_new(folder)
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            files = _write(partial, weights, written, DTYPES[dtype], shard_bytes)
            _put_in_place(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise cannot_write(folder, error, "Choose another --out.") from None
    return files


def _write(
    partial: Path, weights: str, written: FolderContents, dtype: np.dtype, shard_bytes: int
) -> list[str]:
    shards = _shards(written.tensors, dtype.itemsize, shard_bytes)
    names = (
        [f"{weights}.safetensors"]
        if len(shards) == 1
        else [
            f"{weights}-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    )
    files = dict(written.files)
    if len(shards) > 1:
        total = sum(math.prod(tensor.shape) for tensor in written.tensors.values()) * dtype.itemsize
        files[f"{weights}.safetensors.index.json"] = _index(
            total, dict(zip(names, shards, strict=True))
        )
    for name, shard in zip(names, shards, strict=True):
        own = {key: written.tensors[key] for key in shard}
        shapes = {key: (dtype, tensor.shape) for key, tensor in own.items()}
        file: Writing = WritingTensors(partial / name, shapes, METADATA, INNER)
        for key, tensor in own.items():
            values = _converted(key, tensor, dtype)
            file.write(values.view(np.uint16) if dtype.itemsize == 2 else values)
        file.close()
    for name, content in files.items():
        file = Writing(partial / name, INNER)
        file.write(content)
        file.close()
    return sorted([*names, *files])


def _shards(tensors: Mapping[str, AnyTensor], width: int, shard_bytes: int) -> list[list[str]]:
    """Divide the names of tensors into files, in order.    width: bytes of an element"""
    shards: list[list[str]] = [[]]
    nbytes = 0
    for name, tensor in tensors.items():
        own = math.prod(tensor.shape) * width
        if shards[-1] and nbytes + own > shard_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += own
    return shards


def _index(total: int, shards: Mapping[str, Sequence[str]]) -> bytes:
    places = {tensor: name for name, shard in shards.items() for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return (json.dumps(index, indent=2) + "\n").encode()


def _converted(name: str, tensor: AnyTensor, dtype: np.dtype) -> np.ndarray:
    """Read a tensor, rounded to a dtype; ConfigError if a value is not finite there."""
    try:
        values = tensor.read(tensor.whole)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or name} cannot be read: {error.strerror or error}.",
            "Export again: a run in progress may have replaced its checkpoint.",
        ) from None
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.ascontiguousarray(values).astype(dtype)
    if not np.isfinite(rounded.astype(np.float64) if dtype.itemsize == 2 else rounded).all():
        largest = np.abs(values).max()
        raise ConfigError(
            f"Parameters must be finite numbers of {dtype.name}, but {name} has {largest:g}.",
            "Train again with a lower optimizer.lr."
            if not math.isfinite(largest)
            else "Choose --dtype float32.",
        )
    return rounded


def _put_in_place(partial: Path, folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    with opened(partial.parent) as parent:
        with parent.subdirectory(partial.name) as directory:
            os.fchmod(directory.descriptor, 0o777 & ~mask)
            directory.sync()
        check_new(folder)
        parent.rename(partial.name, folder.name)
        parent.sync()
