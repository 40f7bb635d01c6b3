"""A folder of safetensors files with a configuration: its names, texts and tensors, checked."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from mpitrain.errors import CheckpointError
from mpitrain.files import contents, opened, reading
from mpitrain.formats.header import FLOATS, Located, located
from mpitrain.strict_json import parsed, validated

CONFIGURATION = "config.json"
HASHED = 16 << 20
"""Bytes of a file that are hashed at a time."""
TEXT = 16 << 20
"""The largest size of a text file in bytes, except of an index."""
BENEATH = 1
"""Only the folder that the user names may be reached by links, not the files in it."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
"""Suffixes of files of weights that are no safetensors files."""
AGAIN = "Download or save the folder again, or name another one."

Model = TypeVar("Model", bound=BaseModel)


class _Index(BaseModel):
    """The index of several safetensors files, as Hugging Face tools write it.

    weight_map  the file of each tensor; other entries are ignored
    """

    weight_map: dict[str, str]


def weight_map(index: Path, inner: int) -> dict[str, str]:
    """Return the file of each tensor; ValueError if the index is invalid.

    inner  how many names at the end of the path must not be links
    """
    try:
        return _Index.model_validate(parsed(contents(index, inner))).weight_map
    except ValueError:
        raise ValueError(f"{index.name} is no index of tensors") from None


def names(folder: Path) -> list[str]:
    """Return the names in a folder; CheckpointError if there is no such folder."""
    try:
        with opened(folder) as directory:
            return directory.names()
    except OSError as error:
        raise CheckpointError(
            f"The folder {folder} cannot be read: {error.strerror or error}.",
            "Name a folder with a model, or the directory of a run.",
        ) from None


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Turn an OSError or a ValueError into the CheckpointError of a damaged folder."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing.", AGAIN) from None
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError(
            f"{where} cannot be read: {error.strerror or error}.", AGAIN
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{folder} cannot be used: {error}.", AGAIN) from None


def configuration(folder: Path, name: str, model: type[Model]) -> Model:
    """Read a JSON file of a folder as a pydantic model.

    raises  OSError; ValueError, which names the file
    """
    try:
        return validated(model, text(folder / name, TEXT))
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from None


def text(path: Path, most: int) -> bytes:
    """Return the content of a file in a folder; ValueError if it has more than `most` bytes."""
    with reading(path, BENEATH) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} has more than {most} bytes")
    return content


def tensors(folder: Path, weights: str) -> tuple[list[str], dict[str, Located]]:
    """Locate all tensors of a folder, in one safetensors file or in the files of an index.

    weights  name of the file without its suffix
    returns  the names of the files, and the location of each tensor by its name there
    raises   OSError; ValueError, which names the file
    """
    present = names(folder)
    single, index = f"{weights}.safetensors", f"{weights}.safetensors.index.json"
    if single in present:
        return [single], located(folder / single, BENEATH)[1]
    if index not in present:
        raise ValueError(_without_weights(present, single))
    listed = weight_map(folder / index, BENEATH)
    files = sorted(set(listed.values()))
    for file in files:
        if "/" in file or not file.endswith(".safetensors"):
            raise ValueError(f"{index} names {file!a}, which is no safetensors file beside it")
    locations: dict[str, Located] = {}
    for file in files:
        inside = located(folder / file, BENEATH)[1]
        for name, tensor in inside.items():
            if listed.get(name) != file:
                raise ValueError(f"{file} has a tensor {name!a}, which {index} does not list there")
            locations[name] = tensor
    if missing := sorted(listed.keys() - locations.keys()):
        raise ValueError(f"{listed[missing[0]]} has no tensor {missing[0]!a}, which {index} lists")
    return [index, *files], locations


def _without_weights(present: Sequence[str], single: str) -> str:
    pickles = [name for name in present if name.endswith(PICKLES)]
    if not pickles:
        return f"it has no {single}"
    return (
        f"it has its weights in {pickles[0]}, and no {single}. mpitrain reads no pickles, because a "
        "pickle can run any program. In Python, save_pretrained of transformers writes safetensors"
    )


def check_float(name: str, tensor: Located) -> None:
    """Raise ValueError unless mpitrain reads parameters of this dtype."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name!a} is of dtype {tensor.dtype}, but must be {' or '.join(FLOATS)}")


def sha256(path: Path, inner: int = BENEATH) -> str:
    """Return the SHA-256 of a file, as sha256sum prints it."""
    digest = hashlib.sha256()
    with reading(path, inner) as file:
        while block := file.read(HASHED):
            digest.update(block)
    return digest.hexdigest()
