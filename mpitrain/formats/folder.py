"""Model folders of other projects: the description of a format, and readers of a folder's files.

The readers refuse damaged files, and links below the folder.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from pydantic import BaseModel, ConfigDict

from mpitrain.config import Lora
from mpitrain.config import Model as Keys
from mpitrain.errors import CheckpointError
from mpitrain.files import ON_READ, reading, remedy, text_of, without_byte_order_mark
from mpitrain.formats.safetensors_files import BLOCK, FLOATS, Located, located
from mpitrain.formats.tensors import AnyTensor, parts_of
from mpitrain.strict_json import parsed, validated

CONFIGURATION = "config.json"
TEXT = 16 << 20
"""The largest size of a configuration in bytes."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
"""Suffixes of weight files that are not in the safetensors format."""
AGAIN = "Download or save the folder again, or name another one."

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
"""The name of a model on Hugging Face's hub: OWNER/NAME, or NAME alone."""

Model = TypeVar("Model", bound=BaseModel)


class ModelType(BaseModel):
    """The key of config.json that every architecture has."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model_type: str


class Initial(NamedTuple):
    """A model in a folder, from which a run can start.

    keys     {section.key: value}, as the folder determines them
    tensors  {full name: tensor in a file, or several that are joined}
    files    names of the files that determine the model
    notes    one sentence for each property of the folder that the run does not have
    may_lack beginning of the names of tensors that the run draws if the folder lacks them; empty:
             there are none
    """

    folder: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, AnyTensor]
    files: Sequence[str]
    notes: Sequence[str] = ()
    may_lack: str = ""

    @property
    def fingerprint(self) -> int:
        """A number that differs between ranks if they see different files."""
        seen = [
            (name, tensor.shape, *(part.located[1:] for part in parts_of(tensor)))
            for name, tensor in sorted(self.tensors.items())
        ]
        return crc32(repr(seen).encode())


class Trained(NamedTuple):
    """The model of a checkpoint, which an export writes.

    keys     section [model] of the run
    labels   data.labels of the run
    lora     section [lora] of the run
    begun    run.init_from of the run
    tensors  {full name: tensor}, in a file of the checkpoint or computed
    special  {key of config.json: special token, or several}
    dtype    the name of the dtype to write
    base     the folder and the file digests of the model that adapters were trained on; {} if the
             run has no adapters
    """

    keys: Keys
    labels: Sequence[str]
    lora: Lora
    begun: str
    tensors: Mapping[str, AnyTensor]
    special: Mapping[str, Any]
    dtype: str
    base: Mapping[str, Any] = {}


class FolderContents(NamedTuple):
    """The contents of a folder that an export writes.

    tensors  {name in the folder: our tensor}, in the order of writing; `is_transposed` of a tensor
             says whether the folder has its dims in reverse order
    files    {name: content} of the other files
    """

    tensors: Mapping[str, AnyTensor]
    files: Mapping[str, bytes]


class Format(NamedTuple):
    """A kind of folder of another project.

    help     words for the help of `mpitrain export --to`
    weights  name of the safetensors file, without the suffix
    file     name of the file with the configuration, which only such folders have
    keys     (folder) -> {section.key: value}, as its configuration determines them; no tensor is
             read
    read     (folder) -> the model in it; raises CheckpointError if it is damaged, or of a model
             that mpitrain does not have
    write    (model) -> the contents of a new folder; raises ConfigError for a model that this
             format cannot express
    models   if other formats have such a file, too: the values of model_type in it
    kind     the only model.kind that it expresses; empty: it has adapters of several
    """

    help: str
    weights: str
    file: str
    keys: Callable[[Path], Mapping[str, Any]]
    read: Callable[[Path], Initial]
    write: Callable[[Trained], FolderContents]
    models: tuple[str, ...] = ()
    kind: str = ""


class _Index(BaseModel):
    """The index of several safetensors files, as Hugging Face tools write it."""

    weight_map: dict[str, str]


def weight_map(index: Path) -> dict[str, str]:
    """Return {tensor: its file}; ValueError if the index is invalid."""
    try:
        return _Index.model_validate(parsed(text_of(index))).weight_map
    except ValueError:
        raise ValueError(f"{index.name} is no index of tensors") from None


def names(folder: Path) -> list[str]:
    """Return the names of a folder's files; CheckpointError if there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        name = os.path.normpath(folder)
        is_of_hub = isinstance(error, FileNotFoundError) and HUB_NAME.fullmatch(name)
        raise CheckpointError(
            f"The folder {folder} cannot be read: {error.strerror or error}.",
            "Name a folder with a model, or the directory of a run."
            + (
                f" A model of this name on Hugging Face's hub is downloaded by: hf download {name} --local-dir {name}"
                if is_of_hub
                else ""
            ),
        ) from None


class OtherModel(ValueError):
    """A folder has a model that mpitrain does not have; another download would have the same."""

    def __init__(self, law: str, way_out: str = "Name a folder with another model."):
        super().__init__(law)
        self.way_out = way_out


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing.", AGAIN) from None
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError(
            f"{where} cannot be read: {error.strerror or error}.", remedy(error, AGAIN)
        ) from None
    except ValueError as error:
        way_out = error.way_out if isinstance(error, OtherModel) else AGAIN
        raise CheckpointError(f"{folder} cannot be used: {error}.", way_out) from None


def configuration(folder: Path, name: str, model: type[Model]) -> Model:
    """Read a JSON file of a folder as a pydantic model.

    raises  OSError; ValueError, which names the file
    """
    try:
        with reading(folder / name) as file:
            content = file.read(TEXT + 1)
        if len(content) > TEXT:
            raise ValueError(f"{name} has more than {TEXT} bytes")
        return validated(model, without_byte_order_mark(content))
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from None


def tensors(folder: Path, weights: str) -> tuple[list[str], dict[str, Located]]:
    """Locate all tensors of a folder, in one safetensors file or in the files of an index.

    weights  name of the file without its suffix
    returns  the names of the files, and {name of a tensor in the folder: its location}
    raises   OSError; ValueError, which names the file
    """
    present = names(folder)
    single, index = f"{weights}.safetensors", f"{weights}.safetensors.index.json"
    if single in present:
        return [single], located(folder / single)[1]
    if index not in present:
        raise ValueError(_without_weights(present, single))
    listed = weight_map(folder / index)
    files = sorted(set(listed.values()))
    for file in files:
        if "/" in file or not file.endswith(".safetensors"):
            raise ValueError(f"{index} names {file!a}, which is no safetensors file beside it")
    locations: dict[str, Located] = {}
    for file in files:
        inside = located(folder / file)[1]
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
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name!a} is of dtype {tensor.dtype}, but must be {' or '.join(FLOATS)}")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as sha256sum prints it."""
    with reading(path) as file:
        digest = hashlib.sha256()
        while block := file.read(BLOCK):
            digest.update(block)
            ON_READ.get()()
        return digest.hexdigest()


def json_text(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
