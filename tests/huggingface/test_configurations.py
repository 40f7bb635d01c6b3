"""A key of config.json means what the class of its type reads: the logits are those of transformers, or it is refused."""

import json

import numpy as np
import pytest

from mpitrain.errors import MpitrainError
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.huggingface.models import llama, loaded, logits, made
from tests.training import configured

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
OF_EVERY_CLASS = [
    {"tie_word_embeddings": True},  # The head of its own is in the folder: version 5 takes it.
    {"use_cache": False},
    {"initializer_range": 0.5},
    {"pad_token_id": 3},
    {"chunk_size_feed_forward": 4},
    {"dtype": "bfloat16"},
    {"quantization_config": {"quant_method": "gptq"}},
]
OF_LLAMAS = [
    *OF_EVERY_CLASS,
    {"hidden_act": "gelu"},
    {"rms_norm_eps": 0.1},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"head_dim": 6},
    {"max_position_embeddings": 64},
    {"attention_dropout": 0.5},
    {"pretraining_tp": 2},
    {"rope_theta": 77.0},
    {"rope_parameters": None, "rope_theta": 77.0},
    {"rope_parameters": None},
    {"rope_parameters": {"rope_theta": 77.0}, "rope_theta": 5.0},
    {"rope_parameters": {**LLAMA3, "rope_theta": 77.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 77.0}}},
    {"rope_scaling": {"type": "default"}},  # The theta of rope_parameters is not read.
    {"rope_scaling": {"type": "default"}, "rope_theta": 77.0},
    {"rope_scaling": {"type": "yarn", "rope_type": "default", "factor": 3.0}},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {**LLAMA3, "partial_rotary_factor": 0.5}},
    {"rope_scaling": {}},
    {"partial_rotary_factor": 0.5},
    {"sliding_window": 4},
    {"sliding_window": None},
    {"sliding_window": 4, "use_sliding_window": False},
    {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 4, "layer_types": ["full_attention"] * 2},
    {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
]
KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")
OF_GPT2 = [
    *OF_EVERY_CLASS,
    {"activation_function": "relu"},
    {"activation_function": "gelu"},
    {"activation_function": "gelu_pytorch_tanh"},
    {"layer_norm_epsilon": 0.1},
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"reorder_and_upcast_attn": True},
    {"add_cross_attention": True},
    {"n_inner": 128},
    {"n_head": 2},
    {"num_attention_heads": 2},  # another name of n_head
    {"resid_pdrop": 0.5},
    {"n_ctx": 7},
    {"summary_use_proj": False},
]


def small(kind):
    if kind == "GPT2":
        return made(tie_word_embeddings=False)
    more = {"head_dim": 6} if kind in ("Qwen3", "Gemma") else {}
    return llama(f"{kind}ForCausalLM", num_key_value_heads=4, **more)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("GPT2", OF_GPT2), *((kind, OF_LLAMAS) for kind in KINDS)],
    ids=["gpt2", *map(str.lower, KINDS)],
)
def test_every_key_has_the_meaning_of_its_class_or_is_refused(kind, keys, tmp_path):
    small(kind).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written.pop("layer_types", None)
    tokens = np.random.default_rng(0).integers(256, size=(2, 12))
    settings = ["batch.size=2", "device.kind=cpu", f"run.init_from={tmp_path}"]

    def ours(own):
        return np.array(build(own, configured(*settings)).trainer.logits(tokens))

    refused = []
    for changed in keys:
        (tmp_path / "config.json").write_text(json.dumps({**written, **changed}))
        try:
            (found,) = run_ranks(1, ours)
        except MpitrainError as error:
            refused.append(changed)
            assert "Download" not in error.way_out, changed
            continue
        truth = logits(loaded(tmp_path), tokens)
        assert np.abs(found - truth).max() <= 1e-4 * np.abs(truth).max(), changed
    meaningful = [one for one in keys if one not in refused]
    assert len(meaningful) > len(keys) / 2, refused
