"""GPT-2 folders of HuggingFace: tensor names and keys of config.json, and their counterparts here.

    name here                         name in GPT2LMHeadModel       shape in GPT2LMHeadModel
    embedding.tokens                  transformer.wte.weight        (vocabulary, width)
    embedding.positions               transformer.wpe.weight        (context, width)
    blocks.0.attention.norm.gain      transformer.h.0.ln_1.weight   (width,)
    blocks.0.attention.qkv.weight     transformer.h.0.attn.c_attn   (width, 3 width): transposed
    blocks.0.attention.out.weight     transformer.h.0.attn.c_proj   (width, width): transposed
    blocks.0.mlp.up.weight            transformer.h.0.mlp.c_fc      (width, hidden): transposed
    blocks.0.mlp.down.weight          transformer.h.0.mlp.c_proj    (hidden, width): transposed
    head.norm.gain                    transformer.ln_f.weight       (width,)
    head.logits.weight                lm_head.weight                (vocabulary, width)

A folder of GPT2Model has these names without the prefix `transformer.`. Buffers of the causal mask,
attn.bias and attn.masked_bias, are ignored. A tied head has no tensor of its own.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
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
    Trained,
    check_float,
    configuration,
    json_text,
    refusing,
)
from mpitrain.formats.safetensors_files import Located
from mpitrain.formats.tensors import StoredTensor, reversed_dims

WEIGHTS, PREFIX = "model", "transformer."
BUFFERS = re.compile(r"h\.[0-9]+\.attn\.(bias|masked_bias)", re.ASCII)
OUTSIDE = {
    "embedding.tokens": "wte.weight",
    "embedding.positions": "wpe.weight",
    "head.norm.gain": "ln_f.weight",
    "head.norm.bias": "ln_f.bias",
}
"""Names outside of the blocks: ours, and theirs without the prefix."""
HEAD, THEIR_HEAD = "head.logits.weight", "lm_head.weight"
NORMS = {"attention.norm": "ln_1", "mlp.norm": "ln_2"}
LINEARS = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
Size = Annotated[int, Field(ge=1, lt=1 << 31)]
Rate = Annotated[float, Field(ge=0, le=1)]


class Counterpart(NamedTuple):
    """The tensor of a folder that corresponds to one of ours.

    name           in the folder, without the prefix
    is_transposed  whether the folder has its dims in reverse order
    """

    name: str
    is_transposed: bool

    @property
    def full_name(self) -> str:
        """The name in GPT2LMHeadModel, which has the prefix."""
        return self.name if self.name == THEIR_HEAD else PREFIX + self.name


class Gpt2Configuration(ModelType):
    """The keys of config.json that determine the model; the defaults are those of GPT2Config."""

    vocab_size: Size
    n_positions: Size
    n_embd: Size
    n_layer: Size
    n_head: Size
    n_inner: Size | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: Annotated[float, Field(ge=1e-30, le=1)] = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: bool = False
    quantization_config: Any = None
    resid_pdrop: Rate = 0.1
    embd_pdrop: Rate = 0.1
    attn_pdrop: Rate = 0.1


ONLY = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
"""Keys of config.json, and the only values of each that mpitrain's model supports."""
DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def counterparts(layers: int, tied: bool) -> Iterator[tuple[str, Counterpart]]:
    """Yield each tensor of a GPT-2, in the order of the model: (our name, its counterpart).

    tied  whether the head has no tensor of its own
    """
    yield from ((ours, Counterpart(OUTSIDE[ours], False)) for ours in [*OUTSIDE][:2])
    for block in range(layers):
        for ours, theirs in NORMS.items():
            for own, name in (("gain", "weight"), ("bias", "bias")):
                yield (
                    f"blocks.{block}.{ours}.{own}",
                    Counterpart(f"h.{block}.{theirs}.{name}", False),
                )
        for ours, theirs in LINEARS.items():
            for name in ("weight", "bias"):
                yield (
                    f"blocks.{block}.{ours}.{name}",
                    Counterpart(f"h.{block}.{theirs}.{name}", name == "weight"),
                )
    yield from ((ours, Counterpart(OUTSIDE[ours], False)) for ours in [*OUTSIDE][2:])
    if not tied:
        yield HEAD, Counterpart(THEIR_HEAD, False)


def module_of(layer: str) -> str:
    """Return the module of GPT2LMHeadModel for our name of a linear layer; empty if there is none."""
    if layer == HEAD.removesuffix(".weight"):
        return THEIR_HEAD.removesuffix(".weight")
    match = re.fullmatch(r"blocks\.([0-9]+)\.(.+)", layer, re.ASCII)
    if not match or match[2] not in LINEARS:
        return ""
    return f"{PREFIX}h.{match[1]}.{LINEARS[match[2]]}"


def layer_of(module: str) -> str:
    """Return our name for a module of GPT2LMHeadModel; empty unless it is a linear layer."""
    if module == THEIR_HEAD.removesuffix(".weight"):
        return HEAD.removesuffix(".weight")
    match = re.fullmatch(r"(?:transformer\.)?h\.([0-9]+)\.(.+)", module, re.ASCII)
    ours = {theirs: own for own, theirs in LINEARS.items()}
    return f"blocks.{match[1]}.{ours[match[2]]}" if match and match[2] in ours else ""


def is_own(names: Sequence[str]) -> bool:
    return CONFIGURATION in names and "adapter_config.json" not in names


def keys(folder: Path) -> dict[str, Any]:
    with refusing(folder):
        return _keys(_configuration(folder))


def read(folder: Path) -> Initial:
    with refusing(folder):
        config = _configuration(folder)
        files, located = folders.tensors(folder, WEIGHTS)
        tensors = _matched(config, located)
    rates = {key: rate for key in DROPOUT if (rate := getattr(config, key))}
    listed = ", ".join(f"{key} {rate:g}" for key, rate in rates.items())
    notes = [f"the dropout rates are those of [model], not of {folder}: {listed}"] if rates else []
    return Initial(folder, _keys(config), tensors, [CONFIGURATION, *files], notes)


def write(model: Trained) -> FolderContents:
    keys, tensors = model.config.model, model.tensors
    if keys.kind != "gpt":
        raise ConfigError(
            f"A folder of kind gpt2 has a model of kind gpt, but model.kind is {keys.kind}.",
            "Name another run.",
        )
    pairs = dict(counterparts(keys.layers, keys.tied))
    renamed = {
        theirs.full_name: reversed_dims(tensors[ours]) if theirs.is_transposed else tensors[ours]
        for ours, theirs in pairs.items()
    }
    if strange := sorted(tensors.keys() - pairs.keys() - {HEAD}):
        raise ConfigError(
            f"A folder of kind gpt2 has no tensor for {strange[0]}, which this run has.",
            "Name another run.",
        )
    vocabulary = tensors["embedding.tokens"].shape[0]
    ends = model.separator if 0 <= model.separator < vocabulary else None
    texts = {
        CONFIGURATION: {**described(keys, vocabulary, ends), "dtype": model.dtype},
        "generation_config.json": {
            "_from_model_config": True,
            "bos_token_id": ends,
            "eos_token_id": ends,
        },
    }
    return FolderContents(renamed, {name: json_text(content) for name, content in texts.items()})


def _configuration(folder: Path) -> Gpt2Configuration:
    kind = configuration(folder, CONFIGURATION, ModelType).model_type
    _check_only("model_type", kind)
    config = configuration(folder, CONFIGURATION, Gpt2Configuration)
    for key in ONLY:
        _check_only(key, getattr(config, key))
    if config.n_embd % config.n_head:
        raise ValueError(
            f"{CONFIGURATION} says n_head {config.n_head}, which does not divide n_embd {config.n_embd}"
        )
    return config


def _check_only(key: str, value: Any) -> None:
    if value not in ONLY[key]:
        law = " or ".join(json.dumps(one) for one in ONLY[key])
        raise ValueError(
            f"{CONFIGURATION} says {key} {json.dumps(value)[:80]}, but mpitrain has {law}"
        )


def _keys(config: Gpt2Configuration) -> dict[str, Any]:
    inner = config.n_inner or 4 * config.n_embd
    return {
        "model.kind": "gpt",
        "model.layers": config.n_layer,
        "model.width": config.n_embd,
        "model.heads": config.n_head,
        "model.context": config.n_positions,
        "model.tied": config.tie_word_embeddings,
        "model.hidden": 0 if inner == 4 * config.n_embd else inner,
        "model.epsilon": config.layer_norm_epsilon,
        "data.vocabulary": config.vocab_size,
    }


def _matched(config: Gpt2Configuration, located: Mapping[str, Located]) -> dict[str, StoredTensor]:
    """Return {our name: tensor}; ValueError if a tensor is missing, unknown or of a wrong shape."""
    left = {name.removeprefix(PREFIX): (name, tensor) for name, tensor in located.items()}
    if len(left) < len(located):
        raise ValueError(f"it has a tensor with and without the prefix {PREFIX}")
    matched: dict[str, StoredTensor] = {}
    # A wrong n_layer may be huge: the first missing tensor ends the iteration.
    for ours, theirs in counterparts(config.n_layer, config.tie_word_embeddings):
        if theirs.name not in left:
            raise ValueError(f"it has no tensor {theirs.name}, which {CONFIGURATION} asks for")
        name, tensor = left.pop(theirs.name)
        check_float(name, tensor)
        if tensor.shape != (shape := _shape(theirs.name, config)):
            raise ValueError(
                f"{name!a} has the shape {tensor.shape}, but {CONFIGURATION} asks for {shape}"
            )
        matched[ours] = StoredTensor(tensor, theirs.is_transposed)
    left.pop(THEIR_HEAD, None)  # A tied head may be there as a copy.
    if strange := sorted(name for name in left if not BUFFERS.fullmatch(name)):
        raise ValueError(f"it has a tensor {left[strange[0]][0]!a}, which no GPT-2 has")
    return matched


def _shape(name: str, config: Gpt2Configuration) -> tuple[int, ...]:
    width, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    columns = {
        "attn.c_attn": 3 * width,
        "attn.c_proj": width,
        "mlp.c_fc": inner,
        "mlp.c_proj": width,
    }
    if name in ("wte.weight", THEIR_HEAD):
        return config.vocab_size, width
    if name == "wpe.weight":
        return config.n_positions, width
    layer, _, kind = name.removeprefix("h.").partition(".")[2].rpartition(".")
    if layer not in columns:
        return (width,)
    rows = inner if layer == "mlp.c_proj" else width
    return (rows, columns[layer]) if kind == "weight" else (columns[layer],)


def described(keys: Model, vocabulary: int, ends: int | None) -> dict[str, Any]:
    """Return the keys of config.json that describe a model.

    ends  the token that ends a document, if there is one
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_positions": keys.context,
        "n_embd": keys.width,
        "n_layer": keys.layers,
        "n_head": keys.heads,
        "n_inner": keys.hidden or None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": keys.epsilon,
        "tie_word_embeddings": keys.tied,
        "resid_pdrop": keys.dropout,
        "embd_pdrop": keys.dropout,
        "attn_pdrop": keys.attention_dropout,
        "bos_token_id": ends,
        "eos_token_id": ends,
    }


GPT2 = Format("a GPT-2 of HuggingFace's transformers", WEIGHTS, is_own, keys, read, write)
