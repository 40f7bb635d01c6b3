"""Llamas of HuggingFace's transformers: their tensors and keys of config.json, and ours.

Each model_type is a Llama with other parts, which FAMILIES lists: windows, biases or norms of queries
and keys, experts. The gains of a Gemma are minus 1 in its folders. A tied head has no tensor of its own.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.config import Model
from mpitrain.errors import ConfigError
from mpitrain.formats.architecture import (
    HEAD,
    THEIR_HEAD,
    Architecture,
    Depth,
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
OF_HEADS = ("Qwen3", "Gemma", "Gemma2", "Gemma3")
"""Names of models whose head_dim has a default that is not hidden_size / num_attention_heads."""
EARLIER = "original_max_position_embeddings"
Factor = Annotated[float, Field(gt=0)]
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
    full_attention: "Rope | None" = None
    sliding_attention: "Rope | None" = None

    def scaling(self, context: int) -> list[float]:
        """Return model.rope_scaling; ValueError for another kind of scaling.

        context  max_position_embeddings, which transformers takes as the earlier context if there is none
        """
        kind = self.rope_type or self.type or "default"
        check_only("rope_type", kind, ["default", *SCALING])
        for layers in (FULL, SLIDING):  # Positions of their own.
            own: Rope | None = getattr(self, layers)
            check_only(layers, own and own.model_dump(exclude_unset=True), [None])
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
    num_hidden_layers: Depth
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


class Gemma2Configuration(GemmaConfiguration):
    """The keys that Gemma2Config reads, with its defaults."""

    num_key_value_heads: Size | None = 4
    hidden_activation: str = GELU
    query_pre_attn_scalar: Size = 256
    sliding_window: Size | None = 4096
    layer_types: list[str] | None = None
    final_logit_softcapping: Factor | None = 30.0
    attn_logit_softcapping: Factor | None = 50.0


class Gemma3Configuration(Gemma2Configuration):
    """The keys that Gemma3TextConfig reads, with its defaults."""

    max_position_embeddings: Size = 131_072
    sliding_window_pattern: Size = 6
    rope_theta: Annotated[float, Field(gt=1)] | None = 1_000_000.0
    rope_local_base_freq: Annotated[float, Field(gt=1)] = 10_000.0
    final_logit_softcapping: Factor | None = None
    attn_logit_softcapping: Factor | None = None


class Olmo2Configuration(_Configuration):
    """The keys that Olmo2Config reads, with its defaults."""

    max_position_embeddings: Size = 2048
    rms_norm_eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-5
    attention_bias: bool = False
    rope_theta: Annotated[float, Field(gt=1)] | None = 500_000.0


class Olmo3Configuration(Olmo2Configuration):
    """The keys that Olmo3Config reads, with its defaults."""

    sliding_window: Size | None = 4096
    layer_types: list[str] | None = None
    sliding_window_pattern: Size = 4


class SmolLM3Configuration(_Configuration):
    """The keys that SmolLM3Config reads, with its defaults."""

    num_key_value_heads: Size | None = 4
    max_position_embeddings: Size = 32_768
    rope_theta: Annotated[float, Field(gt=1)] | None = 2_000_000.0
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Size = 4
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def nope_every(self) -> int:
        """model.nope_every; ValueError if layers without positions have another order."""
        check_only("use_sliding_window", self.use_sliding_window, [False])
        every = range(1, self.num_hidden_layers + 1)
        turned = self.no_rope_layers or [int(n % self.no_rope_layer_interval != 0) for n in every]
        first = turned.index(0) + 1 if 0 in turned else 0
        like = [int(not first or n % first > 0) for n in every]
        check_only("no_rope_layers", turned, [like])
        return first


class GraniteConfiguration(_Configuration):
    """The keys that GraniteConfig reads, with its defaults."""

    max_position_embeddings: Size = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0


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


class Qwen2MoeConfiguration(Qwen2Configuration):
    """The keys that Qwen2MoeConfig reads, with its defaults."""

    sliding_window: Annotated[int, Field(ge=0)] | None = 4096  # 0 where it is not in use
    num_key_value_heads: Size | None = 16
    moe_intermediate_size: Size = 1408
    shared_expert_intermediate_size: Size = 5632
    num_experts: Size = 60
    num_experts_per_tok: Size = 4
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    qkv_bias: bool = True


class OlmoeConfiguration(_Configuration):
    """The keys that OlmoeConfig reads, with its defaults."""

    max_position_embeddings: Size = 4096
    rms_norm_eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-5
    attention_bias: bool = False
    clip_qkv: Factor | None = None
    num_experts: Size = 64
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False


DENSE = ("blocks.#.mlp.up.", "blocks.#.mlp.down.")
AFTER_ATTENTION = "model.layers.#.post_attention_layernorm.weight"
SHARED, THEIR_SHARED = "blocks.#.mlp.experts.shared", "model.layers.#.mlp.shared_expert"
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
    TensorRow("blocks.#.attention.post.gain", AFTER_ATTENTION, "C"),
    TensorRow("blocks.#.mlp.norm.gain", AFTER_ATTENTION, "C"),
    TensorRow("blocks.#.mlp.up.weight:gate", "model.layers.#.mlp.gate_proj.weight", "FC"),
    TensorRow("blocks.#.mlp.up.weight:up", "model.layers.#.mlp.up_proj.weight", "FC"),
    TensorRow("blocks.#.mlp.down.weight", "model.layers.#.mlp.down_proj.weight", "CF"),
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
    TensorRow(f"{SHARED}.up.weight:gate", f"{THEIR_SHARED}.gate_proj.weight", "SC"),
    TensorRow(f"{SHARED}.up.weight:up", f"{THEIR_SHARED}.up_proj.weight", "SC"),
    TensorRow(f"{SHARED}.down.weight", f"{THEIR_SHARED}.down_proj.weight", "CS"),
    TensorRow(f"{SHARED}.row_gate.weight", f"{THEIR_SHARED}_gate.weight", "1C"),
    TensorRow("blocks.#.mlp.post.gain", "model.layers.#.post_feedforward_layernorm.weight", "C"),
    TensorRow("head.norm.gain", "model.norm.weight", "C"),
    TensorRow(HEAD, THEIR_HEAD, "VC"),
)
"""All tensors that a Llama may have, under the names of transformers where these have no other below."""
OF_MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""{word of a name of the experts' tensors: that of a Mixtral}."""


def tensors(keys: Model) -> list[TensorRow]:
    """Return the tensors of a model with these keys."""
    parts = {
        ".bias:": keys.qkv_bias,
        ".norms.": keys.qk_norm,
        ".attention.norm.": keys.pre_norm,
        ".mlp.norm.": keys.pre_norm,
        ".post.": keys.post_norm,
        ".mlp.up.": not keys.experts or keys.dense_blocks,
        ".mlp.down.": not keys.experts or keys.dense_blocks,
        ".experts.": keys.experts,
        ".shared.": keys.shared,
        ".row_gate.": keys.shared_gate,
    }
    lacks = [part for part, has in parts.items() if not has]
    rows = [row for row in TENSORS if not any(part in row.ours for part in lacks)]
    words = OF_MIXTRAL if family_of(keys)[0] == "Mixtral" else {}
    return [_renamed(row, keys, words) for row in rows]


def is_of_block(keys: Model, ours: str, block: int) -> bool:
    """Return whether a block has a tensor: one without experts has an MLP in their place."""
    if not keys.dense_blocks or not ours.startswith(("blocks.#.mlp.experts", *DENSE)):
        return True
    return (block in keys.dense_blocks) == ours.startswith(DENSE)


def _renamed(row: TensorRow, keys: Model, of_experts: Mapping[str, str]) -> TensorRow:
    """Return a row with the names and shapes that it has in the folder of this model."""
    if ".experts." in row.ours:
        words = [of_experts.get(word, word) for word in row.theirs.split(".")]
        return row._replace(theirs=".".join(words))
    if keys.qk_norm == "joint" and ".norms." in row.ours:
        return row._replace(shape="A" if ".q." in row.ours else "G")
    if keys.post_norm and row.ours.endswith(".mlp.norm.gain"):
        return row._replace(theirs="model.layers.#.pre_feedforward_layernorm.weight")
    return row


class Window(NamedTuple):
    """Which earlier tokens attention sees.

    tokens  a token sees itself and the `tokens - 1` before it; 0: all before it
    first   the first layer with this limit; earlier layers see all tokens
    every   the last of each so many layers has no limit; 0: there is no such layer
    """

    tokens: int
    first: int = 0
    every: int = 0

    def types(self, layers: int) -> list[str]:
        """Return the layer_types of a model with so many layers."""
        every = self.every or layers + 1
        return [
            SLIDING if self.tokens and n >= self.first and (n + 1) % every else FULL
            for n in range(layers)
        ]


def window_of(config: _Configuration) -> Window:
    """Return the window that the model of a folder has in transformers; ValueError if ours has not."""
    tokens, first, layers = None, 0, config.num_hidden_layers
    types = None
    if isinstance(config, MistralConfiguration):
        tokens, types = config.sliding_window, config.layer_types
    elif isinstance(config, MixtralConfiguration):
        tokens = config.sliding_window
    elif isinstance(config, Gemma2Configuration | Olmo3Configuration):
        tokens, types = config.sliding_window, config.layer_types
        every = getattr(config, "sliding_window_pattern", 2)
        types = types or Window(1, every=every).types(layers)
    elif isinstance(config, Qwen2Configuration):
        tokens = config.sliding_window if config.use_sliding_window else None
        first, types = config.max_window_layers, config.layer_types
        if isinstance(config, Qwen3MoeConfiguration):  # All its layers are alike.
            first, types = 0, None
        elif isinstance(config, Qwen2MoeConfiguration) and not types and tokens:
            last = config.max_window_layers
            types = [FULL if n % 2 or n >= last else SLIDING for n in range(layers)]
    if types is None:
        return Window(tokens, first) if tokens and first < layers else Window(0)
    if SLIDING not in types and types == [FULL] * layers:
        return Window(0)
    first = types.index(SLIDING) if SLIDING in types else 0
    fitting = (Window(1, first, every) for every in (0, *range(2, layers + 1)))
    window = next((window for window in fitting if window.types(layers) == types), None)
    if not window:
        raise OtherModel(
            f"{CONFIGURATION} says layer_types {json.dumps(types)[:80]}, but mpitrain has {SLIDING} in the "
            f"num_hidden_layers {layers} from one on, perhaps but for each n-th, and {FULL} in the others"
        )
    if not tokens:
        raise OtherModel(
            f"{CONFIGURATION} has {SLIDING} in layer_types, but no sliding_window in use"
        )
    return window._replace(tokens=tokens)


def keys(config: _Configuration) -> dict[str, Any]:
    window = window_of(config)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if not config.head_dim:
        check_heads(config, "num_attention_heads", "hidden_size")
    each = 0 if heads * (config.head_dim or 0) == config.hidden_size else config.head_dim or 0
    given = [rope for rope in (config.rope_scaling, config.rope_parameters) if rope]
    rope = next((rope for rope in given if rope.model_fields_set), Rope())
    of_windows = 0.0
    if isinstance(config, Gemma3Configuration | Olmo3Configuration):
        rope, of_windows = _ropes(config, given, window)
    each_of_head = config.head_dim or config.hidden_size // heads
    scalar = getattr(config, "query_pre_attn_scalar", each_of_head)
    scale = getattr(config, "attention_multiplier", scalar**-0.5)
    return {
        "model.kind": "llama",
        "model.layers": config.num_hidden_layers,
        "model.width": config.hidden_size,
        "model.heads": heads,
        "model.kv_heads": 0 if shared in (None, heads) else shared,
        "model.head_dim": each,
        "model.activation": "gelu" if config.hidden_act == GELU else "silu",
        "model.scaled_embedding": isinstance(config, GemmaConfiguration),
        "model.qk_norm": QK_NORM.get(config.model_type, False),
        "model.pre_norm": not isinstance(config, Olmo2Configuration),
        "model.post_norm": isinstance(config, Gemma2Configuration | Olmo2Configuration),
        "model.nope_every": getattr(config, "nope_every", 0),
        "model.score_scale": 0.0 if scale == each_of_head**-0.5 else scale,
        "model.embedding_scale": getattr(config, "embedding_multiplier", 1.0),
        "model.residual_scale": getattr(config, "residual_multiplier", 1.0),
        "model.logit_scale": 1 / getattr(config, "logits_scaling", 1.0),
        "model.clip_qkv": getattr(config, "clip_qkv", None) or 0.0,
        "model.score_cap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "model.logit_cap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "model.qkv_bias": getattr(config, "qkv_bias", config.model_type == "qwen2"),
        "model.theta": float(rope.rope_theta or config.rope_theta or 10_000),
        "model.rope_scaling": rope.scaling(config.max_position_embeddings),
        "model.context": config.max_position_embeddings,
        "model.tied": config.tie_word_embeddings,
        "model.hidden": config.intermediate_size,
        "model.epsilon": config.rms_norm_eps,
        "model.window": window.tokens,
        "model.window_from": window.first,
        "model.window_every": window.every,
        "model.window_theta": of_windows,
        "data.vocabulary": config.vocab_size,
        **_experts(config),
    }


def _ropes(config: Any, given: list[Rope], window: Window) -> tuple[Rope, float]:
    """Return the positions of a Gemma 3 or OLMo 3 in layers without a window, and their base in the others.

    given  of rope_scaling and of rope_parameters; the latter has those of both kinds of layers
    """
    of_both = [rope for rope in given if rope.full_attention or rope.sliding_attention]
    both = of_both[0] if of_both else Rope()
    full, within = both.full_attention or Rope(), both.sliding_attention or Rope()
    if scaled := config.rope_scaling:  # The form of earlier versions, for layers without a window.
        full = full.model_copy(update=scaled.model_dump(exclude_unset=True))
    check_only(f"{SLIDING}.rope_type", within.rope_type or within.type or "default", ["default"])
    theta = within.rope_theta or getattr(config, "rope_local_base_freq", config.rope_theta)
    return full, float(theta) if window.tokens else 0.0


def _experts(config: _Configuration) -> dict[str, Any]:
    """Return the keys of the experts, or that there are none."""
    more: dict[str, Any] = {}
    if isinstance(config, MixtralConfiguration):
        count, router = config.num_local_experts, "after"
    elif isinstance(config, OlmoeConfiguration | Qwen2MoeConfiguration | Qwen3MoeConfiguration):
        router = "after" if config.norm_topk_prob else "before"
        count = config.num_experts or getattr(config, "num_local_experts", None) or 128
        if not isinstance(config, OlmoeConfiguration):
            step, named = config.decoder_sparse_step, config.mlp_only_layers or []
            every = range(config.num_hidden_layers)
            dense = [n for n in every if n in named or (n + 1) % step]
            if len(dense) == len(every):
                return {"model.experts": 0}
            hidden = config.intermediate_size if dense else 0
            more = {"model.dense_blocks": dense, "model.dense_hidden": hidden}
            more["model.hidden"] = config.moe_intermediate_size
        if isinstance(config, Qwen2MoeConfiguration):
            shared = config.shared_expert_intermediate_size
            more |= {"model.shared": shared, "model.shared_gate": True}
    else:
        return {"model.experts": 0}
    own = {"model.experts": count, "model.top_k": config.num_experts_per_tok}
    return {"model.shared": 0, "model.shared_gate": False, **more, **own, "model.router": router}


class LlamaFamily(NamedTuple):
    """A class of transformers that is like a Llama.

    model_type  of its config.json
    has         {key of [model]: the values that it can have; None: any}; of other keys below it has the
                defaults
    more        (section [model]) -> keys of config.json that no other class has
    """

    model_type: str
    has: Mapping[str, tuple[Any, ...] | None] = {}
    more: Callable[[Model], dict[str, Any]] = lambda keys: {}


def _of_qwen(keys: Model) -> dict[str, Any]:
    """Return the keys of the windows of a Qwen."""
    if not keys.window:
        return {"use_sliding_window": False}
    first = keys.window_from
    return {**_of_layers(keys), "use_sliding_window": True, "max_window_layers": first}


def _of_layers(keys: Model) -> dict[str, Any]:
    window = Window(keys.window, keys.window_from, keys.window_every)
    return {"sliding_window": keys.window or None, "layer_types": window.types(keys.layers)}


def _of_gemma(keys: Model) -> dict[str, Any]:
    """Return the keys of a Gemma 2 or 3."""
    scalar = round(keys.score_scale**-2) if keys.score_scale else keys.head_channels
    if keys.score_scale and not math.isclose(scalar * keys.score_scale**2, 1):
        raise ConfigError(
            "A Gemma's query_pre_attn_scalar is 1 / model.score_scale^2 and a whole number, but model.score_scale is "
            f"{keys.score_scale:g}.",
            f"Export a run with model.score_scale={max(1, scalar) ** -0.5:g}, for example.",
        )
    return {
        **_of_layers(keys),
        "hidden_activation": GELU,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": keys.score_cap or None,
        "final_logit_softcapping": keys.logit_cap or None,
    }


def _of_gemma3(keys: Model) -> dict[str, Any]:
    return {**_of_gemma(keys), **_of_olmo3(keys)}


def _of_olmo3(keys: Model) -> dict[str, Any]:
    within = (
        {"rope_type": "default", "rope_theta": keys.window_theta}
        if keys.window_theta
        else _rope(keys)
    )
    return {**_of_layers(keys), "rope_parameters": {FULL: _rope(keys), SLIDING: within}}


def _of_smollm3(keys: Model) -> dict[str, Any]:
    every = keys.nope_every or keys.layers + 1
    return {
        "no_rope_layers": [int(n % every > 0) for n in range(1, keys.layers + 1)],
        "no_rope_layer_interval": every,
        "use_sliding_window": False,
    }


def _of_granite(keys: Model) -> dict[str, Any]:
    return {
        "embedding_multiplier": keys.embedding_scale,
        "residual_multiplier": keys.residual_scale,
        "attention_multiplier": keys.score_scale or keys.head_channels**-0.5,
        "logits_scaling": 1 / keys.logit_scale,
    }


def _chosen(keys: Model) -> dict[str, Any]:
    """Return the keys of experts that are not those of a Mixtral."""
    facts = {"num_experts": keys.experts, "num_experts_per_tok": keys.top_k}
    return {**facts, "norm_topk_prob": keys.router == "after"}


def _of_qwen_moe(keys: Model) -> dict[str, Any]:
    return {
        **_chosen(keys),
        "moe_intermediate_size": keys.hidden_units,
        "intermediate_size": keys.dense_units,
        "decoder_sparse_step": 1,
        "mlp_only_layers": keys.dense_blocks,
    }


Parts = dict[str, tuple[Any, ...] | None]
WINDOWS: Parts = {"window": None, "window_from": None}
EXPERTS: Parts = {"experts": None, "router": None}
DENSER: Parts = {**EXPERTS, "dense_blocks": None}
NORMED: Parts = {"qk_norm": (True,)}
GEMMA: Parts = {"scaled_embedding": (True,)}
LATER_GEMMA: Parts = {**GEMMA, "activation": ("gelu",), "post_norm": (True,)}
LATER_GEMMA |= {**WINDOWS, "window_every": None, "score_scale": None, "logit_cap": None}
GRANITE: Parts = dict.fromkeys(("embedding_scale", "residual_scale", "score_scale", "logit_scale"))
OLMO: Parts = {"pre_norm": (False,), "post_norm": (True,), "qk_norm": ("joint",), "head_dim": (0,)}
FAMILIES = {
    "Llama": LlamaFamily("llama"),
    "Mistral": LlamaFamily(
        "mistral", {"window": None}, lambda keys: {"sliding_window": keys.window}
    ),
    "Ministral": LlamaFamily(
        "ministral",
        {**WINDOWS, "window_every": None},
        # transformers 5.23 has no default of its head_dim.
        lambda keys: {**_of_layers(keys), "head_dim": keys.head_channels},
    ),
    "Qwen2": LlamaFamily("qwen2", {"qkv_bias": (True,), **WINDOWS, "window_every": None}, _of_qwen),
    "Qwen3": LlamaFamily("qwen3", {**NORMED, **WINDOWS, "window_every": None}, _of_qwen),
    "Gemma": LlamaFamily("gemma", GEMMA),
    "Gemma2": LlamaFamily("gemma2", {**LATER_GEMMA, "score_cap": None}, _of_gemma),
    "Gemma3": LlamaFamily(
        "gemma3_text", {**LATER_GEMMA, **NORMED, "window_theta": None}, _of_gemma3
    ),
    "SmolLM3": LlamaFamily("smollm3", {"nope_every": None}, _of_smollm3),
    "Granite": LlamaFamily("granite", GRANITE, _of_granite),
    "Olmo2": LlamaFamily("olmo2", OLMO),
    "Olmo3": LlamaFamily(
        "olmo3", {**OLMO, **WINDOWS, "window_every": None, "window_theta": None}, _of_olmo3
    ),
    "Mixtral": LlamaFamily(
        "mixtral",
        {"experts": None, "window": None},
        lambda keys: {
            "num_local_experts": keys.experts,
            "num_experts_per_tok": keys.top_k,
            "sliding_window": keys.window or None,
        },
    ),
    "Qwen3Moe": LlamaFamily(
        "qwen3_moe",
        {**DENSER, **NORMED, "window": None},
        lambda keys: {**_of_qwen_moe(keys), **_of_qwen(keys)},
    ),
    "Qwen2Moe": LlamaFamily(
        "qwen2_moe",
        {**DENSER, **WINDOWS, "window_every": None, "shared": None, "shared_gate": (True,)}
        | {"qkv_bias": None},
        lambda keys: {
            **_of_qwen_moe(keys),
            **_of_qwen(keys),
            "shared_expert_intermediate_size": keys.shared,
            "qkv_bias": keys.qkv_bias,
        },
    ),
    "Olmoe": LlamaFamily(
        "olmoe",
        {**EXPERTS, "qk_norm": ("joint",), "head_dim": (0,), "clip_qkv": None},
        lambda keys: {**_chosen(keys), "clip_qkv": keys.clip_qkv or None},
    ),
}
"""{name of the class: what it has}; of several that have what a run has, a folder gets the first."""
QK_NORM = {
    own.model_type: values[0] for own in FAMILIES.values() if (values := own.has.get("qk_norm"))
}
"""{model_type: model.qk_norm}."""
FREE = ("head_dim", "activation")
"""Keys of [model] of which a class has any value unless it says otherwise."""
DISTINCT = sorted({key for own in FAMILIES.values() for key in own.has} | {"capacity"})
"""The keys of [model] in which the classes differ."""


def family_of(keys: Model) -> tuple[str, str]:
    """Return the name of the class that is nearest to a model, and the first key in which they differ, or
    nothing.
    """
    differing = {
        name: _differing(own, keys)
        for name, own in FAMILIES.items()
        if ("experts" in own.has) == bool(keys.experts)
    }
    name = min(differing, key=lambda name: len(differing[name]))
    return name, next(iter(differing[name]), "")


def _differing(own: LlamaFamily, keys: Model) -> list[str]:
    every = [*DISTINCT, *(key for key in own.has if key not in DISTINCT)]
    return [key for key in every if getattr(keys, key) not in _values(own, key, keys)]


def _values(own: LlamaFamily, key: str, keys: Model) -> tuple[Any, ...]:
    """Return the values of a key that a class can have; if it can have all, that of this model."""
    default = None if key in FREE else (Model.model_fields[key].default,)
    values = own.has.get(key, default)
    return (getattr(keys, key),) if values is None else values


def described(keys: Model, labels: Sequence[str]) -> dict[str, Any]:
    name, _ = family_of(keys)
    return described_as(name, FAMILIES[name], keys)


def described_as(name: str, own: LlamaFamily, keys: Model) -> dict[str, Any]:
    """Return the keys of config.json of a class; ConfigError if the model has what the class has not."""
    if key := next(iter(_differing(own, keys)), ""):
        has, value = (json.dumps(one) for one in (_values(own, key, keys)[0], getattr(keys, key)))
        raise ConfigError(
            f"The class of transformers that is nearest to this run is {name}ForCausalLM, which has model.{key} {has}, "
            f"but model.{key} is {value}.",
            f"Export a run with model.{key}={has}; mpitrain/formats/README.md lists the classes.",
        )
    return _facts(keys, name, own)


def _rope(keys: Model) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if keys.rope_scaling:
        kind = next(kind for kind, own in SCALING.items() if len(own) == len(keys.rope_scaling))
        rope = {"rope_type": kind, **dict(zip(SCALING[kind], keys.rope_scaling, strict=True))}
        rope |= {EARLIER: int(rope[EARLIER])} if EARLIER in rope else {}
    return {**rope, "rope_theta": keys.theta}


def _facts(keys: Model, name: str, own: LlamaFamily) -> dict[str, Any]:
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": own.model_type,
        "hidden_size": keys.width,
        "intermediate_size": keys.hidden_units,
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.kv_heads or keys.heads,
        "max_position_embeddings": keys.context,
        "rms_norm_eps": keys.epsilon,
        "rope_theta": keys.theta,
        "rope_parameters": _rope(keys),
        "hidden_act": GELU if keys.activation == "gelu" else "silu",
        "mlp_bias": False,
        "pad_token_id": None,  # Defaults of classes are above the tokens of small runs.
        **({} if name.startswith("Qwen2") else {"attention_bias": False}),
        **({"head_dim": keys.head_channels} if keys.head_dim or name in OF_HEADS else {}),
        **own.more(keys),
    }


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
        "gemma2": Gemma2Configuration,
        "gemma3_text": Gemma3Configuration,
        "smollm3": SmolLM3Configuration,
        "granite": GraniteConfiguration,
        "olmo2": Olmo2Configuration,
        "olmo3": Olmo3Configuration,
        "qwen2_moe": Qwen2MoeConfiguration,
        "qwen3_moe": Qwen3MoeConfiguration,
        "olmoe": OlmoeConfiguration,
    },
    only={
        "hidden_act": ("silu", GELU),
        "hidden_activation": (GELU,),
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
    is_of_block=is_of_block,
    added=lambda keys, name: 1.0 if keys.scaled_embedding and name.endswith(".gain") else 0.0,
)
FORMAT = format_of_architecture("a Llama of HuggingFace's transformers", LLAMA)
