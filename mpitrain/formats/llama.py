"""Llama folders of HuggingFace: tensor names and keys of config.json, and their counterparts here.

    name here                        names in LlamaForCausalLM, below model.layers.0.
    blocks.0.attention.norm.gain     input_layernorm.weight
    blocks.0.attention.qkv.weight    self_attn.q_proj.weight, k_proj, v_proj: one after another
    blocks.0.attention.out.weight    self_attn.o_proj.weight
    blocks.0.mlp.norm.gain           post_attention_layernorm.weight
    blocks.0.mlp.up.weight           mlp.gate_proj.weight, up_proj: one after another
    blocks.0.mlp.down.weight         mlp.down_proj.weight

    embedding.tokens                 model.embed_tokens.weight
    head.norm.gain                   model.norm.weight
    head.logits.weight               lm_head.weight; a tied head has no tensor of its own

All shapes are (outputs, inputs), as ours. Folders of mistral without sliding windows have the same
names; smollm says llama.
"""

import json
from collections.abc import Iterator
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
from mpitrain.formats.gpt2 import HEAD, THEIR_HEAD, is_own
from mpitrain.formats.safetensors_files import Located
from mpitrain.formats.tensors import AnyTensor, JoinedTensor, RowsOfTensor, StoredTensor

WEIGHTS, MODEL_TYPES = "model", ("llama", "mistral")
WINDOW = "sliding_window"
Size = Annotated[int, Field(ge=1, lt=1 << 31)]


class LlamaConfiguration(ModelType):
    """The keys of config.json that determine the model; the defaults are those of LlamaConfig."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size = 2048
    rms_norm_eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-6
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    quantization_config: Any = None

    @property
    def theta(self) -> float:
        """The base of the angles, which transformers 5 has in rope_parameters."""
        return float((self.rope_parameters or {}).get("rope_theta", self.rope_theta or 10_000.0))


ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}
"""Keys of config.json, and the only value of each that mpitrain's model supports."""


class FolderPart(NamedTuple):
    """A tensor of a folder: the rows of one of ours that it has."""

    name: str
    shape: tuple[int, ...]


def counterparts(keys: Model, vocabulary: int) -> Iterator[tuple[str, list[FolderPart]]]:
    """Yield each tensor of a Llama, in the order of the model: (our name, its parts)."""
    width, hidden = keys.width, keys.hidden_units
    shared = width // keys.heads * (keys.kv_heads or keys.heads)
    yield "embedding.tokens", [FolderPart("model.embed_tokens.weight", (vocabulary, width))]
    for block in range(keys.layers):
        at, own = f"model.layers.{block}.", f"blocks.{block}."
        rows = {"q": width, "k": shared, "v": shared}
        yield f"{own}attention.norm.gain", [FolderPart(f"{at}input_layernorm.weight", (width,))]
        yield (
            f"{own}attention.qkv.weight",
            [FolderPart(f"{at}self_attn.{n}_proj.weight", (rows[n], width)) for n in rows],
        )
        yield (
            f"{own}attention.out.weight",
            [FolderPart(f"{at}self_attn.o_proj.weight", (width, width))],
        )
        yield f"{own}mlp.norm.gain", [FolderPart(f"{at}post_attention_layernorm.weight", (width,))]
        yield (
            f"{own}mlp.up.weight",
            [FolderPart(f"{at}mlp.{n}_proj.weight", (hidden, width)) for n in ("gate", "up")],
        )
        yield f"{own}mlp.down.weight", [FolderPart(f"{at}mlp.down_proj.weight", (width, hidden))]
    yield "head.norm.gain", [FolderPart("model.norm.weight", (width,))]
    if not keys.tied:
        yield HEAD, [FolderPart(THEIR_HEAD, (vocabulary, width))]


def keys(folder: Path) -> dict[str, Any]:
    with refusing(folder):
        return _keys(_configuration(folder))


def read(folder: Path) -> Initial:
    with refusing(folder):
        config = _configuration(folder)
        files, located = folders.tensors(folder, WEIGHTS)
        determined = _keys(config)
        model = {key.removeprefix("model."): v for key, v in determined.items() if "model." in key}
        tensors = _matched(Model(**model), config.vocab_size, dict(located))
    return Initial(folder, determined, tensors, [CONFIGURATION, *files])


def _matched(keys: Model, vocabulary: int, left: dict[str, Located]) -> dict[str, AnyTensor]:
    """Return {our name: tensor}; ValueError if a tensor is missing, unknown or of a wrong shape."""
    matched: dict[str, AnyTensor] = {}
    for ours, parts in counterparts(keys, vocabulary):
        stored = []
        for name, shape in parts:
            if name not in left:
                raise ValueError(f"it has no tensor {name}, which {CONFIGURATION} asks for")
            check_float(name, tensor := left.pop(name))
            if tensor.shape != shape:
                raise ValueError(
                    f"{name!a} has the shape {tensor.shape}, but {CONFIGURATION} asks for {shape}"
                )
            stored.append(StoredTensor(tensor))
        matched[ours] = stored[0] if len(stored) == 1 else JoinedTensor(tuple(stored))
    left.pop(THEIR_HEAD, None)  # A tied head may be there as a copy.
    if strange := sorted(name for name in left if not name.endswith("rotary_emb.inv_freq")):
        raise ValueError(f"it has a tensor {strange[0]!a}, which no Llama has")
    return matched


def write(model: Trained) -> FolderContents:
    keys, tensors = model.config.model, model.tensors
    if keys.kind != "llama":
        raise ConfigError(
            f"A folder of kind llama has a model of kind llama, but model.kind is {keys.kind}.",
            "Name another run.",
        )
    vocabulary = tensors["embedding.tokens"].shape[0]
    renamed: dict[str, AnyTensor] = {}
    for ours, parts in counterparts(keys, vocabulary):
        first = 0
        for name, shape in parts:
            whole = tensors[ours]
            rows = range(first, first + shape[0])
            renamed[name] = whole if len(parts) == 1 else RowsOfTensor(whole, rows)
            first += shape[0]
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


def described(keys: Model, vocabulary: int, ends: int | None) -> dict[str, Any]:
    """Return the keys of config.json that describe a model.

    ends  the token that ends a document, if there is one
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": keys.width,
        "intermediate_size": keys.hidden_units,
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.kv_heads or keys.heads,
        "max_position_embeddings": keys.context,
        "rms_norm_eps": keys.epsilon,
        "rope_theta": keys.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": keys.theta},
        "tie_word_embeddings": keys.tied,
        **{key: value for key, value in ONLY.items() if value is not None},
        "bos_token_id": ends,
        "eos_token_id": ends,
    }


def _configuration(folder: Path) -> LlamaConfiguration:
    config = configuration(folder, CONFIGURATION, LlamaConfiguration)
    for key, value in ONLY.items():
        _check(key, getattr(config, key), value)
    for key in ("rope_scaling", "rope_parameters"):
        named = getattr(config, key) or {}
        _check(f"{key} of type", named.get("rope_type", named.get("type", "default")), "default")
    # Its absence means 4,096 in a folder of mistral.
    if config.model_type == "mistral" and WINDOW not in config.model_fields_set:
        raise ValueError(f"{CONFIGURATION} has no {WINDOW}, but mpitrain has {WINDOW} null")
    _check(WINDOW, config.sliding_window, None)
    heads, width = config.num_attention_heads, config.hidden_size
    if width % heads:
        raise ValueError(
            f"{CONFIGURATION} says num_attention_heads {heads}, which does not divide hidden_size {width}"
        )
    _check("head_dim", config.head_dim or width // heads, width // heads)
    return config


def _check(key: str, value: Any, only: Any) -> None:
    if value != only:
        raise ValueError(
            f"{CONFIGURATION} says {key} {json.dumps(value)[:80]}, but mpitrain has {json.dumps(only)}"
        )


def _keys(config: LlamaConfiguration) -> dict[str, Any]:
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    return {
        "model.kind": "llama",
        "model.layers": config.num_hidden_layers,
        "model.width": config.hidden_size,
        "model.heads": heads,
        "model.kv_heads": 0 if shared in (None, heads) else shared,
        "model.theta": config.theta,
        "model.context": config.max_position_embeddings,
        "model.tied": config.tie_word_embeddings,
        "model.hidden": config.intermediate_size,
        "model.epsilon": config.rms_norm_eps,
        "data.vocabulary": config.vocab_size,
    }


LLAMA = Format(
    "a Llama of HuggingFace's transformers", WEIGHTS, is_own, keys, read, write, MODEL_TYPES
)
