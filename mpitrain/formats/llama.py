"""Llamas of HuggingFace's transformers: their tensors and keys of config.json, and ours.

model_type is llama (as SmolLM has), mistral and ministral, with a window, qwen2, with biases of
queries, keys and values, or qwen3, with norms of queries and keys; both perhaps have a window. Or it
is gemma, with scaled embeddings, gates of GELU, and gains that a folder has minus 1. A tied head has
no tensor of its own.
"""

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.config import Model
from mpitrain.errors import ConfigError
from mpitrain.formats.architecture import (
    HEAD,
    THEIR_HEAD,
    Architecture,
    Size,
    TensorRow,
    check_heads,
    check_only,
    format_of_architecture,
)
from mpitrain.formats.folder import CONFIGURATION, ModelType, OtherModel

FULL, SLIDING = "full_attention", "sliding_attention"
"""The names in layer_types of a layer without a window, and with one."""
GELU = "gelu_pytorch_tanh"
OF_HEADS = ("Qwen3", "Gemma")
"""Names of models whose head_dim has a default that is not hidden_size / num_attention_heads."""
EARLIER = "original_max_position_embeddings"
SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", EARLIER),
    "yarn": ("factor", "beta_fast", "beta_slow", EARLIER, "attention_factor"),
}
"""Keys of each kind of scaled positions, in the order of model.rope_scaling."""


class Rope(BaseModel):
    """Rotary positions, of rope_parameters or of its earlier form rope_scaling."""

    model_config = ConfigDict(strict=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: Size | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    full_attention: Any = None
    sliding_attention: Any = None

    def scaling(self, context: int) -> list[float]:
        """Return model.rope_scaling; ValueError for another kind of scaling.

        context  max_position_embeddings, which transformers takes as the earlier context if there is none
        """
        kind = self.rope_type or self.type or "default"
        check_only("rope_type", kind, ["default", *SCALING])
        for layers in (FULL, SLIDING):  # Positions of their own.
            check_only(layers, getattr(self, layers), [None])
        if kind == "default":  # It does not read the others.
            return []
        check_only("partial_rotary_factor", self.partial_rotary_factor, [1])
        check_only("truncate", self.truncate, [True])
        known = {key: getattr(self, key) for key in SCALING[kind]}
        if kind == "yarn":
            known["beta_fast"] = known["beta_fast"] or 32
            known["beta_slow"] = known["beta_slow"] or 1
            known[EARLIER] = known[EARLIER] or context
            if known["attention_factor"] is None and known["factor"]:
                known["attention_factor"] = self._size(known["factor"])
        for key, value in known.items():
            if value is None:
                raise ValueError(f"{CONFIGURATION} has a rope_type {kind} without {key}")
        return [float(value) for value in known.values()]

    def _size(self, factor: float) -> float:
        """Return the factor of cosines and sines of YaRN that transformers takes by default."""

        def size(scale: float) -> float:
            return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return size(self.mscale) / size(self.mscale_all_dim)
        return size(1)


class _Configuration(ModelType):
    """The keys of config.json that the classes of all types read."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size
    rms_norm_eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-6
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    quantization_config: Any = None


class LlamaConfiguration(_Configuration):
    """The keys that LlamaConfig reads, with its defaults; it has no window."""

    max_position_embeddings: Size = 2048
    attention_bias: bool = False
    mlp_bias: bool = False


class MistralConfiguration(_Configuration):
    """The keys that MistralConfig and MinistralConfig read, with their defaults.

    The window needs no switch. A Mistral with layer_types is read as a Ministral.
    """

    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131_072
    sliding_window: Size | None = 4096
    layer_types: list[str] | None = None


class Qwen2Configuration(_Configuration):
    """The keys that Qwen2Config reads, with its defaults."""

    num_key_value_heads: Size | None = 32
    max_position_embeddings: Size = 32_768
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    layer_types: list[str] | None = None


class Qwen3Configuration(Qwen2Configuration):
    """The keys that Qwen3Config reads, with its defaults."""

    head_dim: Size | None = 128
    attention_bias: bool = False


class GemmaConfiguration(_Configuration):
    """The keys that GemmaConfig reads, with its defaults."""

    num_key_value_heads: Size | None = 16
    head_dim: Size | None = 256
    max_position_embeddings: Size = 8192
    hidden_act: str = GELU
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: bool | None = None


class MixtralConfiguration(_Configuration):
    """The keys that MixtralConfig reads, with its defaults."""

    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131_072
    rms_norm_eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-5
    sliding_window: Size | None = None
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2


class Qwen3MoeConfiguration(Qwen3Configuration):
    """The keys that Qwen3MoeConfig reads, with its defaults."""

    head_dim: Size | None = None
    num_key_value_heads: Size | None = 4
    moe_intermediate_size: Size = 768
    num_experts: Size | None = None
    num_local_experts: Size | None = None
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


TENSORS = (
    TensorRow("embedding.tokens", "model.embed_tokens.weight", "VC"),
    TensorRow("blocks.#.attention.norm.gain", "model.layers.#.input_layernorm.weight", "C"),
    TensorRow("blocks.#.attention.qkv.weight:q", "model.layers.#.self_attn.q_proj.weight", "AC"),
    TensorRow("blocks.#.attention.qkv.weight:k", "model.layers.#.self_attn.k_proj.weight", "GC"),
    TensorRow("blocks.#.attention.qkv.weight:v", "model.layers.#.self_attn.v_proj.weight", "GC"),
    TensorRow("blocks.#.attention.qkv.bias:q", "model.layers.#.self_attn.q_proj.bias", "A"),
    TensorRow("blocks.#.attention.qkv.bias:k", "model.layers.#.self_attn.k_proj.bias", "G"),
    TensorRow("blocks.#.attention.qkv.bias:v", "model.layers.#.self_attn.v_proj.bias", "G"),
    TensorRow("blocks.#.attention.norms.q.gain", "model.layers.#.self_attn.q_norm.weight", "D"),
    TensorRow("blocks.#.attention.norms.k.gain", "model.layers.#.self_attn.k_norm.weight", "D"),
    TensorRow("blocks.#.attention.out.weight", "model.layers.#.self_attn.o_proj.weight", "CA"),
    TensorRow("blocks.#.mlp.norm.gain", "model.layers.#.post_attention_layernorm.weight", "C"),
    TensorRow("blocks.#.mlp.up.weight:gate", "model.layers.#.mlp.gate_proj.weight", "HC"),
    TensorRow("blocks.#.mlp.up.weight:up", "model.layers.#.mlp.up_proj.weight", "HC"),
    TensorRow("blocks.#.mlp.down.weight", "model.layers.#.mlp.down_proj.weight", "CH"),
    TensorRow("head.norm.gain", "model.norm.weight", "C"),
    TensorRow(HEAD, THEIR_HEAD, "VC"),
)


MIXTURE = (
    TensorRow("blocks.#.mlp.experts.router.weight", "model.layers.#.mlp.gate.weight", "EC"),
    TensorRow(
        "blocks.#.mlp.experts.up.weight:gate", "model.layers.#.mlp.experts.*.gate_proj.weight", "HC"
    ),
    TensorRow(
        "blocks.#.mlp.experts.up.weight:up", "model.layers.#.mlp.experts.*.up_proj.weight", "HC"
    ),
    TensorRow(
        "blocks.#.mlp.experts.down.weight", "model.layers.#.mlp.experts.*.down_proj.weight", "CH"
    ),
)
"""In place of the three rows of an MLP, under the names of a Qwen3-MoE."""
OF_MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""{word of a name in MIXTURE: that of a Mixtral}."""


def tensors(keys: Model) -> list[TensorRow]:
    """Return the tensors of a model with these keys."""
    left_out = [*(() if keys.qkv_bias else (".bias:",)), *(() if keys.qk_norm else (".norms.",))]
    if not keys.experts:
        return [row for row in TENSORS if not any(part in row.ours for part in left_out)]
    words = {} if keys.qk_norm else OF_MIXTRAL
    mixture = [
        row._replace(theirs=".".join(words.get(word, word) for word in row.theirs.split(".")))
        for row in MIXTURE
    ]
    left_out += [".mlp.up.", ".mlp.down."]
    rows = [row for row in TENSORS if not any(part in row.ours for part in left_out)]
    after = next(n for n, row in enumerate(rows) if row.ours == "head.norm.gain")
    return [*rows[:after], *mixture, *rows[after:]]


class Window(NamedTuple):
    """Which earlier tokens attention sees.

    tokens  a token sees itself and the `tokens - 1` before it; 0: all before it
    first   the first layer with this limit; earlier layers see all tokens
    """

    tokens: int
    first: int


def window_of(config: _Configuration) -> Window:
    """Return the window that the model of a folder has in transformers; ValueError if ours has not."""
    tokens, first, layers = None, 0, config.num_hidden_layers
    types = None
    if isinstance(config, MistralConfiguration):
        tokens, types = config.sliding_window, config.layer_types
    elif isinstance(config, MixtralConfiguration):
        tokens = config.sliding_window
    elif isinstance(config, Qwen2Configuration):
        tokens = config.sliding_window if config.use_sliding_window else None
        first, types = config.max_window_layers, config.layer_types
    if types is not None:
        first = types.index(SLIDING) if SLIDING in types else layers
        if len(types) != layers or {*types[:first]} - {FULL} or {*types[first:]} - {SLIDING}:
            raise OtherModel(
                f"{CONFIGURATION} says layer_types {json.dumps(types)[:80]}, but mpitrain has {FULL} in "
                f"the first of num_hidden_layers {layers}, and {SLIDING} in the others"
            )
        if first < layers and not tokens:
            raise OtherModel(
                f"{CONFIGURATION} has {SLIDING} in layer_types, but no sliding_window in use"
            )
    return Window(tokens, first) if tokens and first < layers else Window(0, 0)


def keys(config: _Configuration) -> dict[str, Any]:
    window = window_of(config)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if not config.head_dim:
        check_heads(config, "num_attention_heads", "hidden_size")
    each = 0 if heads * (config.head_dim or 0) == config.hidden_size else config.head_dim or 0
    given = [rope for rope in (config.rope_scaling, config.rope_parameters) if rope]
    rope = next((rope for rope in given if rope.model_fields_set), Rope())
    return {
        "model.kind": "llama",
        "model.layers": config.num_hidden_layers,
        "model.width": config.hidden_size,
        "model.heads": heads,
        "model.kv_heads": 0 if shared in (None, heads) else shared,
        "model.head_dim": each,
        "model.activation": "gelu" if config.hidden_act == GELU else "silu",
        "model.scaled_embedding": config.model_type == "gemma",
        "model.qk_norm": isinstance(config, Qwen3Configuration),
        "model.qkv_bias": config.model_type == "qwen2",
        "model.theta": float(rope.rope_theta or config.rope_theta or 10_000),
        "model.rope_scaling": rope.scaling(config.max_position_embeddings),
        "model.context": config.max_position_embeddings,
        "model.tied": config.tie_word_embeddings,
        "model.hidden": config.intermediate_size,
        "model.epsilon": config.rms_norm_eps,
        "model.window": window.tokens,
        "model.window_from": window.first,
        "data.vocabulary": config.vocab_size,
        **_experts(config),
    }


def _experts(config: _Configuration) -> dict[str, Any]:
    """Return the keys of the experts, or that there are none."""
    if isinstance(config, MixtralConfiguration):
        count, router, more = config.num_local_experts, "after", {}
    elif isinstance(config, Qwen3MoeConfiguration):
        check_only("decoder_sparse_step", config.decoder_sparse_step, [1])
        check_only("mlp_only_layers", config.mlp_only_layers or [], [[]])
        count = config.num_experts or config.num_local_experts or 128
        router = "after" if config.norm_topk_prob else "before"
        more = {"model.hidden": config.moe_intermediate_size}
    else:
        return {"model.experts": 0}
    own = {"model.experts": count, "model.top_k": config.num_experts_per_tok}
    return {**more, **own, "model.router": router}


def described(keys: Model, labels: Sequence[str]) -> dict[str, Any]:
    of_window = ("Ministral" if keys.window_from else "Mistral") if keys.window else "Llama"
    if keys.qk_norm and keys.qkv_bias:
        raise ConfigError(
            "A folder of a Qwen3 has no biases without one of the output, but model.qk_norm and model.qkv_bias are true.",
            "Export a run with one of them.",
        )
    if keys.scaled_embedding and (keys.qk_norm or keys.qkv_bias or keys.window):
        raise ConfigError(
            "A folder of a Gemma has no norms or biases of heads and no window, but this run has one.",
            "Export a run without them, or without model.scaled_embedding.",
        )
    if keys.experts:
        return _described_mixture(keys)
    name = "Qwen3" if keys.qk_norm else "Qwen2" if keys.qkv_bias else of_window
    name = "Gemma" if keys.scaled_embedding else name
    return _facts(keys, name, name.lower())


def _described_mixture(keys: Model) -> dict[str, Any]:
    """Return the keys of config.json of a Mixtral, or with normed heads of a Qwen3-MoE."""
    name = "Qwen3Moe" if keys.qk_norm else "Mixtral"
    for key, is_other, has in (
        ("scaled_embedding", keys.scaled_embedding, "no scaled embedding"),
        ("qkv_bias", keys.qkv_bias, "no biases"),
        ("shared", keys.shared, "no shared MLP"),
        ("capacity", keys.capacity, "no capacity"),
        ("window_from", keys.window_from, "one window in all layers"),
        ("router", name == "Mixtral" and keys.router != "after", "weights after the choice"),
    ):
        if is_other:
            raise ConfigError(
                f"A folder of a {name} has {has}, but model.{key} is {getattr(keys, key)}.",
                "Export a run without it.",
            )
    per_token = {"num_experts_per_tok": keys.top_k}
    facts = {**_facts(keys, name, "qwen3_moe" if keys.qk_norm else "mixtral"), **per_token}
    if name == "Mixtral":
        return {**facts, "num_local_experts": keys.experts}
    own = {"num_experts": keys.experts, "moe_intermediate_size": keys.hidden_units}
    return {**facts, **own, "norm_topk_prob": keys.router == "after", "decoder_sparse_step": 1}


def _facts(keys: Model, name: str, model_type: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if keys.rope_scaling:
        kind = next(kind for kind, own in SCALING.items() if len(own) == len(keys.rope_scaling))
        rope = {"rope_type": kind, **dict(zip(SCALING[kind], keys.rope_scaling, strict=True))}
        rope |= {EARLIER: int(rope[EARLIER])} if EARLIER in rope else {}
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": keys.width,
        "intermediate_size": keys.hidden_units,
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.kv_heads or keys.heads,
        "max_position_embeddings": keys.context,
        "rms_norm_eps": keys.epsilon,
        "rope_theta": keys.theta,
        "rope_parameters": {**rope, "rope_theta": keys.theta},
        "hidden_act": GELU if keys.activation == "gelu" else "silu",
        "mlp_bias": False,
        **({} if name == "Qwen2" else {"attention_bias": False}),
        **({"use_sliding_window": False} if name.startswith("Qwen") else {}),
        **({"head_dim": keys.head_channels} if keys.head_dim or name in OF_HEADS else {}),
        **_with_window(keys),
    }


def _with_window(keys: Model) -> dict[str, Any]:
    """Return the keys of a model with a window: a Mistral, or if some layers have none a Ministral,
    and with biases or norms of heads a Qwen.
    """
    if not keys.window:
        return {}
    first, own = keys.window_from, {"sliding_window": keys.window}
    types = {"layer_types": [FULL] * first + [SLIDING] * (keys.layers - first)}
    if keys.qkv_bias or keys.qk_norm:
        return {**own, **types, "use_sliding_window": True, "max_window_layers": first}
    # transformers 5.23 has no default of a Ministral's head_dim.
    return {**own, **types, "head_dim": keys.head_channels} if first else own


LLAMA = Architecture(
    kind="llama",
    noun="Llama",
    configs={
        "llama": LlamaConfiguration,
        "mistral": MistralConfiguration,
        "ministral": MistralConfiguration,
        "qwen2": Qwen2Configuration,
        "qwen3": Qwen3Configuration,
        "gemma": GemmaConfiguration,
        "mixtral": MixtralConfiguration,
        "qwen3_moe": Qwen3MoeConfiguration,
    },
    only={
        "hidden_act": ("silu", GELU),
        "use_bidirectional_attention": (None, False),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "quantization_config": (None,),
    },
    tensors=tensors,
    keys=keys,
    described=described,
    prefix="model.",
    buffers=r".*rotary_emb\.inv_freq",
    added=lambda keys, name: 1.0 if keys.scaled_embedding and name.endswith("norm.gain") else 0.0,
)
FORMAT = format_of_architecture("a Llama of HuggingFace's transformers", LLAMA)
