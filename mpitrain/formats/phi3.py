"""Phi-3 and Phi-4 of HuggingFace's transformers: Llamas whose folders join queries, keys and values, and gate and up."""

from mpitrain.config import Model
from mpitrain.formats.architecture import Size, TensorRow, check_only, format_of_architecture
from mpitrain.formats.llama import (
    LLAMA,
    LlamaFamily,
    MistralConfiguration,
    Rope,
    described_as,
    keys,
    tensors,
)

JOINED = {
    "blocks.#.attention.qkv.weight": ("model.layers.#.self_attn.qkv_proj.weight", "QC"),
    "blocks.#.mlp.up.weight": ("model.layers.#.mlp.gate_up_proj.weight", "UC"),
}
FAMILY = LlamaFamily(
    "phi3",
    {"window": None, "head_dim": (0,), "rope_scaling": ([],)},
    lambda keys: {"sliding_window": keys.window or None},
)


class Phi3Configuration(MistralConfiguration):
    """The keys that Phi3Config reads, with its defaults."""

    num_key_value_heads: Size | None = None
    max_position_embeddings: Size = 4096
    rms_norm_eps: float = 1e-5
    sliding_window: Size | None = None
    partial_rotary_factor: float = 1.0


def keys_of(config: Phi3Configuration) -> dict[str, object]:
    for section in (config, config.rope_scaling or Rope(), config.rope_parameters or Rope()):
        check_only("partial_rotary_factor", section.partial_rotary_factor, [1])
    return keys(config)


def tensors_of(model: Model) -> list[TensorRow]:
    """Return the tensors of a Llama, with the outputs of a joined layer in one."""
    rows = dict[str, TensorRow]()
    for row in tensors(model):
        ours = row.ours.partition(":")[0]
        rows[ours] = TensorRow(ours, *JOINED[ours]) if ours in JOINED else row
    return [*rows.values()]


PHI3 = LLAMA._replace(
    noun="Phi-3",
    configs={"phi3": Phi3Configuration},
    tensors=tensors_of,
    keys=keys_of,
    described=lambda model, labels: described_as("Phi3", FAMILY, model),
)
FORMAT = format_of_architecture("a Phi-3 of HuggingFace's transformers", PHI3)
