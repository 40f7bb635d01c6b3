"""Model folders of HuggingFace's transformers: the reader and the writer of every architecture.

gpt2.py, llama.py and bert.py have what differs: names and shapes of tensors, and keys of config.json.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from mpitrain.config import Model
from mpitrain.errors import ConfigError
from mpitrain.formats import folder as folders
from mpitrain.formats.folder import (
    CONFIGURATION,
    FolderContents,
    Format,
    Initial,
    ModelType,
    OtherModel,
    Trained,
    check_float,
    configuration,
    json_text,
    refusing,
)
from mpitrain.formats.safetensors_files import Located
from mpitrain.formats.tensors import (
    AnyTensor,
    JoinedTensor,
    RowsOfTensor,
    StackedTensor,
    StoredTensor,
    UnstackedTensor,
    is_copy,
    reversed_dims,
    shifted,
)

WEIGHTS = "model"
HEAD, THEIR_HEAD = "head.logits.weight", "lm_head.weight"
CLASSES = "head.classes.weight"
Size = Annotated[int, Field(ge=1, lt=1 << 31)]
Depth = Annotated[int, Field(ge=1, le=10_000)]  # as model.layers
Rate = Annotated[float, Field(ge=0, le=1)]


class TensorRow(NamedTuple):
    """A tensor of a folder, and ours that has its elements.

    ours    the name here, with # for the number of a block. Behind a colon stands the output of a
            joined layer, of which the folder has a tensor of its own: attention.qkv.weight:q
    theirs  the name in the folder. A star stands for the number of an expert: our tensor has the
            matrices of all experts, (E, rows, columns)
    shape   here, in letters: V vocabulary, T context, C width, H hidden units of an MLP, A columns of
            the queries, G of the keys, Q of queries, keys and values, D channels of a head, K classes,
            2 token types, E experts, S hidden units of their shared MLP, 1 its gate, F hidden units of an
            MLP in a block without experts, U twice as many
    """

    ours: str
    theirs: str
    shape: str


def is_stack(ours: str) -> bool:
    """Return whether a tensor has the matrices of all experts."""
    return ours.endswith((".experts.up.weight", ".experts.down.weight"))


class Counterpart(NamedTuple):
    """A tensor of a folder, which has rows of one of ours.

    shape          in the folder
    rows           of our tensor
    is_transposed  whether the folder has its dims in reverse order
    """

    name: str
    shape: tuple[int, ...]
    rows: slice
    is_transposed: bool


class Architecture(NamedTuple):
    """A kind of model in transformers: its names and keys, and ours.

    kind          model.kind here
    noun          of such a model, for messages
    configs       {model_type: the keys of config.json that determine such a model}
    only          {key of config.json: the only values that our model supports}
    tensors       (section [model]) -> all tensors, in the order of the model
    keys          (config) -> {section.key: value}; raises ValueError for a model that is not ours
    described     (section [model], names of the classes) -> the keys of config.json that describe a model
    prefix        of names; the folder of a model without a head lacks it
    buffers       pattern of the names, without the prefix, of tensors that are no parameters
    is_transposed  whether folders have the matrices of blocks in reverse order of dims
    notes         (config) -> sentences about properties of a folder that the run does not have
    heads         beginnings of names: a folder has all tensors with this beginning, or none
    earlier       {part of a name in earlier folders: now}
    is_of_block   (section [model], our name with #, block) -> whether this block has the tensor
    added         (section [model], our name) -> what is added to a tensor of a folder to have ours
    again         {name of a tensor that a folder may have twice: the other name, which counts}
    """

    kind: str
    noun: str
    configs: Mapping[str, type[ModelType]]
    only: Mapping[str, tuple[Any, ...]]
    tensors: Callable[[Model], Sequence[TensorRow]]
    keys: Callable[[Any], dict[str, Any]]
    described: Callable[[Model, Sequence[str]], dict[str, Any]]
    prefix: str
    buffers: str
    is_transposed: bool = False
    notes: Callable[[Any, Path], list[str]] = lambda config, folder: []
    heads: Sequence[str] = ()
    earlier: Mapping[str, str] = {}
    again: Mapping[str, str] = {}
    added: Callable[[Model, str], float] = lambda keys, name: 0.0
    is_of_block: Callable[[Model, str, int], bool] = lambda keys, name, block: True

    def counterparts(
        self,
        keys: Model,
        vocabulary: int,
        classes: int = 0,
        has: Callable[[TensorRow], bool] = lambda row: True,
    ) -> Iterator[tuple[str, list[Counterpart]]]:
        """Yield each tensor, in the order of the model: (our name, its parts in a folder).

        has  whether a tensor of a head is there; a head of which none is there is left out
        """
        each, width = keys.head_channels, keys.width
        inside, shared = each * keys.heads, each * (keys.kv_heads or keys.heads)
        sizes = {"V": vocabulary, "T": keys.context, "C": width, "H": keys.hidden_units}
        sizes |= {"A": inside, "G": shared, "Q": inside + 2 * shared, "D": each}
        sizes |= {"K": classes, "1": 1, "2": 2, "E": keys.experts, "S": keys.shared}
        sizes |= {"F": keys.dense_units, "U": 2 * keys.dense_units}
        for ours, rows in groupby(self._rows(keys, has), lambda row: row.ours.partition(":")[0]):
            parts, first = [], 0
            for row in rows:
                shape = tuple(sizes[letter] for letter in row.shape)
                turns = self.is_transposed and ours.startswith("blocks.") and len(shape) == 2
                own = slice(first, first + shape[0])
                parts.append(Counterpart(row.theirs, shape[::-1] if turns else shape, own, turns))
                first = own.stop
            yield ours, parts

    def facts(
        self, keys: Model, vocabulary: int, special: Mapping[str, Any], labels: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the keys of config.json for a model.    special: those of special tokens"""
        sizes = {"vocab_size": vocabulary, "tie_word_embeddings": keys.tied}
        return {**self.described(keys, labels), **sizes, **special}

    def _rows(self, keys: Model, has: Callable[[TensorRow], bool]) -> Iterator[TensorRow]:
        every = self.tensors(keys)
        for head in self.heads:
            own = [row for row in every if row.theirs.startswith(head)]
            if not any(map(has, own)):
                every = [row for row in every if row not in own]
        for repeats, rows in groupby(every, lambda row: "#" in row.ours):
            known = [row for row in rows if row.ours != HEAD or not keys.tied]
            for block in range(keys.layers if repeats else 1):
                numbered = [
                    TensorRow(*(text.replace("#", str(block)) for text in row))
                    for row in known
                    if not repeats or self.is_of_block(keys, row.ours, block)
                ]
                for _, parts in groupby(numbered, lambda row: row.ours.partition(":")[0]):
                    yield from _of_each_expert([*parts], keys.experts)

    def module_of(self, layer: str) -> str:
        """Return the module of a linear layer, or of an output of a joined one; empty: none."""
        return _renamed(layer, _modules(self.tensors))

    def layer_of(self, module: str) -> str:
        """Return our name for a module; empty unless it is a linear layer."""
        ours = {theirs: layer for layer, theirs in _modules(self.tensors).items()}
        return _renamed(module, ours) or _renamed(self.prefix + module, ours)


@cache
def _modules(tensors: Callable[[Model], Sequence[TensorRow]]) -> dict[str, str]:
    """Return {linear layer, or output of a joined one: its module} of an architecture, with # for a block."""
    return {
        row.ours.replace(".weight", "").replace(":", "."): row.theirs.removesuffix(".weight")
        for row in tensors(Model())
        if ".weight" in row.ours
    }


def _of_each_expert(parts: Sequence[TensorRow], experts: int) -> Iterator[TensorRow]:
    """Yield the rows of one of our tensors, once for each expert if they have a star."""
    for number in range(experts if "*" in parts[0].theirs else 1):
        for row in parts:
            yield row._replace(theirs=row.theirs.replace("*", str(number)))


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return the counterpart of a name with the number of a block."""
    number = re.search(r"(?<=\.)[0-9]+(?=\.)", name, re.ASCII)
    block = number[0] if number else "#"
    return names.get(name.replace(f".{block}.", ".#.", 1), "").replace("#", block)


def format_of_architecture(help: str, own: Architecture) -> Format:
    """Return the row of FORMATS for folders of an architecture."""
    reading, keys, writing = partial(read, own), partial(keys_of, own), partial(write, own)
    return Format(
        help, WEIGHTS, CONFIGURATION, keys, reading, writing, tuple(own.configs), own.kind
    )


def keys_of(own: Architecture, folder: Path) -> dict[str, Any]:
    with refusing(folder):
        return own.keys(_configuration(own, folder))


def _configuration(own: Architecture, folder: Path) -> Any:
    model_type = configuration(folder, CONFIGURATION, ModelType).model_type
    config = configuration(folder, CONFIGURATION, own.configs[model_type])
    for key, values in own.only.items():
        if hasattr(config, key):  # Types of one architecture read different keys.
            check_only(key, getattr(config, key), values)
    return config


def check_only(key: str, value: Any, values: Sequence[Any]) -> None:
    """Raise OtherModel if config.json has another value for a key than mpitrain's model."""
    if value not in values:
        law = " or ".join(json.dumps(one) for one in values)
        raise OtherModel(
            f"{CONFIGURATION} says {key} {json.dumps(value)[:80]}, but mpitrain has {law}"
        )


def check_heads(config: Any, heads: str, width: str) -> None:
    if getattr(config, width) % getattr(config, heads):
        raise ValueError(
            f"{CONFIGURATION} says {heads} {getattr(config, heads)}, which does not divide {width} {getattr(config, width)}"
        )


def dropout_notes(config: Any, folder: Path, keys: Sequence[str]) -> list[str]:
    rates = {key: rate for key in keys if (rate := getattr(config, key))}
    listed = ", ".join(f"{key} {rate:g}" for key, rate in rates.items())
    return [f"the dropout rates are those of [model], not of {folder}: {listed}"] if rates else []


def read(own: Architecture, folder: Path) -> Initial:
    with refusing(folder):
        config = _configuration(own, folder)
        files, located = folders.tensors(folder, WEIGHTS)
        keys = own.keys(config)
        model = {key.removeprefix("model."): v for key, v in keys.items() if "model." in key}
        tensors = _matched(own, Model(**model), config.vocab_size, located)
    notes, may_lack = own.notes(config, folder), "head." if own.heads else ""
    return Initial(folder, keys, tensors, [CONFIGURATION, *files], notes, may_lack)


def _matched(
    own: Architecture, keys: Model, vocabulary: int, located: Mapping[str, Located]
) -> dict[str, AnyTensor]:
    """Return {our name: tensor}; ValueError if a tensor is missing, unknown or of a wrong shape."""
    left = {}
    for name, tensor in located.items():
        short = name.removeprefix(own.prefix)
        for then, now in own.earlier.items():
            short = short.replace(then, now)
        left[short] = name, tensor
    if len(left) < len(located):
        raise ValueError(f"it has a tensor with and without the prefix {own.prefix}")
    left |= {name: left.pop(other) for name, other in own.again.items() if other in left}
    matched: dict[str, AnyTensor] = {}
    classes, has = 0, lambda row: row.theirs.removeprefix(own.prefix) in left
    for row in own.tensors(keys):
        if row.shape == "KC" and has(row):
            classes = left[row.theirs][1].shape[0]
    # A wrong number of layers may be huge: the first missing tensor ends the iteration.
    for ours, parts in own.counterparts(keys, vocabulary, classes, has):
        stored = []
        for part in parts:
            if (short := part.name.removeprefix(own.prefix)) not in left:
                raise ValueError(f"it has no tensor {part.name}, which {CONFIGURATION} asks for")
            name, tensor = left.pop(short)
            check_float(name, tensor)
            if tensor.shape != part.shape:
                raise ValueError(
                    f"{name!a} has the shape {tensor.shape}, but {CONFIGURATION} asks for {part.shape}"
                )
            stored.append(StoredTensor(tensor, part.is_transposed))
        joined = stored[0] if len(stored) == 1 else JoinedTensor(tuple(stored))
        matched[ours] = StackedTensor(joined, keys.experts) if is_stack(ours) else joined
        if more := own.added(keys, ours):
            matched[ours] = shifted(matched[ours], more)
    for head in (row for row in own.tensors(keys) if keys.tied and row.ours == HEAD):
        _check_copy(left.pop(head.theirs.removeprefix(own.prefix), None), matched)
    if strange := sorted(name for name in left if not re.fullmatch(own.buffers, name, re.ASCII)):
        raise ValueError(f"it has a tensor {left[strange[0]][0]!a}, which no {own.noun} has")
    return matched


def _check_copy(head: tuple[str, Located] | None, matched: Mapping[str, AnyTensor]) -> None:
    """Raise ValueError if a tied head has other values than the embedding, to which it is tied."""
    if not head:
        return
    name, located = head
    check_float(name, located)
    if not is_copy(StoredTensor(located), matched["embedding.tokens"]):
        raise OtherModel(
            f"{CONFIGURATION} says tie_word_embeddings true, but {name} has other values than the embedding",
            "To have a head of its own, as version 5 of transformers has it, write false there.",
        )


def numbered(classes: Sized) -> list[str]:
    """Return the names that transformers gives to classes without names."""
    return [f"LABEL_{number}" for number in range(len(classes))]


def write(own: Architecture, model: Trained) -> FolderContents:
    keys, tensors = model.keys, model.tensors
    if keys.kind != own.kind:
        raise ConfigError(
            f"A folder of a {own.noun} has a model of kind {own.kind}, but model.kind is {keys.kind}.",
            "Leave out --to, or name another run.",
        )
    vocabulary = tensors["embedding.tokens"].shape[0]
    renamed: dict[str, AnyTensor] = {}
    classes = tensors[CLASSES].shape[0] if CLASSES in tensors else 0

    def has(row: TensorRow) -> bool:
        return row.ours in tensors

    labels = model.labels
    names = [*labels, *numbered(range(classes))[len(labels) :]][:classes]
    facts = own.facts(keys, vocabulary, model.special, names)
    pairs = dict(own.counterparts(keys, vocabulary, classes, has))
    if strange := sorted((tensors.keys() ^ pairs.keys()) - {HEAD}):
        raise ConfigError(
            f"A folder of a {own.noun} has the tensors of its run, but only one of them has {strange[0]}.",
            "Name another run.",
        )
    for ours, parts in pairs.items():
        for part in parts:
            whole = UnstackedTensor(tensors[ours]) if is_stack(ours) else tensors[ours]
            tensor = whole if len(parts) == 1 else RowsOfTensor(whole, part.rows)
            renamed[part.name] = reversed_dims(tensor) if part.is_transposed else tensor
            if more := own.added(keys, ours):
                renamed[part.name] = shifted(renamed[part.name], -more)
    renamed |= {other: renamed[name] for name, other in own.again.items() if name in renamed}
    return FolderContents(renamed, {CONFIGURATION: json_text({**facts, "dtype": model.dtype})})
