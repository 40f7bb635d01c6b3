"""The row of a format: its reader and its writer, and the types that pass between them and a run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from mpitrain.config import Config
from mpitrain.formats.computed_tensor import AnyTensor
from mpitrain.formats.stored_tensor import StoredTensor


class Initial(NamedTuple):
    """A model in a folder, from which a run can start.

    keys     {section.key: value}, as the folder determines them
    tensors  {full name: tensor in a file}
    files    names of the files that determine the model
    notes    one sentence for each property of the folder that the run does not have
    """

    folder: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, AnyTensor]
    files: Sequence[str]
    notes: Sequence[str] = ()

    @property
    def fingerprint(self) -> int:
        """A number that differs for ranks which see different files."""
        seen = [
            (name, tensor.shape, *(tensor.located[1:] if isinstance(tensor, StoredTensor) else ()))
            for name, tensor in sorted(self.tensors.items())
        ]
        return crc32(repr(seen).encode())


class Trained(NamedTuple):
    """The model of a checkpoint, which an export writes.

    config      of the run
    tensors     {full name: tensor}, in a file of the checkpoint or computed
    separator   the token that ends a document; -1: there is none
    dtype       the name of the dtype to write
    base        of adapters: the folder and the digests of the model under them
    """

    config: Config
    tensors: Mapping[str, AnyTensor]
    separator: int
    dtype: str
    base: Mapping[str, Any] = {}


class FolderContents(NamedTuple):
    """The contents of a folder that an export writes.

    tensors  {name there: our tensor}, in the order of writing; `is_transposed` of a tensor says
             whether its shape there is the reverse
    files    {name: content} of the other files
    """

    tensors: Mapping[str, AnyTensor]
    files: Mapping[str, bytes]


class Format(NamedTuple):
    """A kind of folder of another project.

    help     words for the help of `mpitrain export --to`
    weights  name of its safetensors file, without the suffix
    is_own   whether a folder with these names of files is of this kind
    keys     (folder) -> {section.key: value}, as its configuration determines them; it reads no
             tensors
    read     (folder) -> the model in it; raises CheckpointError if it is damaged, or of a model
             that mpitrain does not have
    write    (model) -> the contents of a new folder; raises ConfigError for a model that this
             format cannot express
    """

    help: str
    weights: str
    is_own: Callable[[Sequence[str]], bool]
    keys: Callable[[Path], Mapping[str, Any]]
    read: Callable[[Path], Initial]
    write: Callable[[Trained], FolderContents]
