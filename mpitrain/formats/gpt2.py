"""GPT-2 of HuggingFace's transformers: its tensors and keys of config.json, and ours.

Matrices of blocks are transposed, (inputs, outputs). A tied head has no tensor of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from mpitrain.config import Model
from mpitrain.errors import ConfigError
from mpitrain.formats.architecture import (
    HEAD,
    THEIR_HEAD,
    Architecture,
    Depth,
    Rate,
    Size,
    TensorRow,
    check_heads,
    dropout_notes,
    format_of_architecture,
)
from mpitrain.formats.folder import ModelType

DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


OTHER_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Names that GPT2Config has for keys (attribute_map); a value under such a name replaces the other."""


class Gpt2Configuration(ModelType):
    """The keys of config.json that determine the model; the defaults are those of GPT2Config."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: Any) -> Any:
        renamed = {own: values[name] for name, own in OTHER_NAMES.items() if name in values}
        return {**values, **renamed}

    vocab_size: Size
    n_positions: Size
    n_embd: Size
    n_layer: Depth
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


TENSORS = (
    TensorRow("embedding.tokens", "transformer.wte.weight", "VC"),
    TensorRow("embedding.positions", "transformer.wpe.weight", "TC"),
    TensorRow("blocks.#.attention.norm.gain", "transformer.h.#.ln_1.weight", "C"),
    TensorRow("blocks.#.attention.norm.bias", "transformer.h.#.ln_1.bias", "C"),
    TensorRow("blocks.#.mlp.norm.gain", "transformer.h.#.ln_2.weight", "C"),
    TensorRow("blocks.#.mlp.norm.bias", "transformer.h.#.ln_2.bias", "C"),
    TensorRow("blocks.#.attention.qkv.weight", "transformer.h.#.attn.c_attn.weight", "QC"),
    TensorRow("blocks.#.attention.qkv.bias", "transformer.h.#.attn.c_attn.bias", "Q"),
    TensorRow("blocks.#.attention.out.weight", "transformer.h.#.attn.c_proj.weight", "CC"),
    TensorRow("blocks.#.attention.out.bias", "transformer.h.#.attn.c_proj.bias", "C"),
    TensorRow("blocks.#.mlp.up.weight", "transformer.h.#.mlp.c_fc.weight", "HC"),
    TensorRow("blocks.#.mlp.up.bias", "transformer.h.#.mlp.c_fc.bias", "H"),
    TensorRow("blocks.#.mlp.down.weight", "transformer.h.#.mlp.c_proj.weight", "CH"),
    TensorRow("blocks.#.mlp.down.bias", "transformer.h.#.mlp.c_proj.bias", "C"),
    TensorRow("head.norm.gain", "transformer.ln_f.weight", "C"),
    TensorRow("head.norm.bias", "transformer.ln_f.bias", "C"),
    TensorRow(HEAD, THEIR_HEAD, "VC"),
)


def keys(config: Gpt2Configuration) -> dict[str, Any]:
    check_heads(config, "n_head", "n_embd")
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
        "model.window": 0,
        "model.window_from": 0,
        "data.vocabulary": config.vocab_size,
    }


def described(keys: Model, labels: Sequence[str]) -> dict[str, Any]:
    if keys.window:
        raise ConfigError(
            f"A GPT-2 of transformers sees all earlier tokens, but model.window is {keys.window}.",
            "Continue with `mpitrain generate`, or train a run of model.kind=llama: its folder can have a window.",
        )
    if keys.experts:
        raise ConfigError(
            f"A GPT-2 of transformers has one MLP in each block, but model.experts is {keys.experts}.",
            "Continue with `mpitrain generate`, or train a run of model.kind=llama: its folder can have experts.",
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": keys.context,
        "n_embd": keys.width,
        "n_layer": keys.layers,
        "n_head": keys.heads,
        "n_inner": keys.hidden or None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": keys.epsilon,
        "resid_pdrop": keys.dropout,
        "embd_pdrop": keys.dropout,
        "attn_pdrop": keys.attention_dropout,
    }


def notes(config: Gpt2Configuration, folder: Path) -> list[str]:
    return dropout_notes(config, folder, DROPOUT)


GPT2 = Architecture(
    kind="gpt",
    noun="GPT-2",
    configs={"gpt2": Gpt2Configuration},
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    tensors=lambda keys: TENSORS,
    keys=keys,
    described=described,
    prefix="transformer.",
    buffers=r"h\.[0-9]+\.attn\.(bias|masked_bias)",  # of the causal mask
    is_transposed=True,
    notes=notes,
)
FORMAT = format_of_architecture("a GPT-2 of HuggingFace's transformers", GPT2)
