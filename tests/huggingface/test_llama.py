"""A Llama of transformers and ours are one function: read, trained a step, written and loaded again."""

import json

import numpy as np
import pytest

from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.formats import phi3
from mpitrain.formats.llama import LLAMA
from mpitrain.run.build import build
from mpitrain.run.export import export
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.huggingface.models import exact, llama, loaded, logits, loss_and_gradients, rows
from tests.huggingface.test_round_trip import computed
from tests.training import configured

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FLAT = ["run.steps=2", "batch.size=4", "model.context=16", "device.kind=cpu", "run.eval_every=-1"]
FLAT += ["optimizer.warmup=0"]


def ours(transport, *settings):
    trainer, source, _ = build(transport, configured(*FLAT, *settings))
    tokens, _ = source.batch(0, 0, 4, range(4))
    return tokens, trainer.logits(tokens)


def assert_one_function(model, folder, ranks, *settings):
    found = run_ranks(ranks, ours, f"run.init_from={folder}", *settings)
    assert any(own is not None for _, own in found)
    for tokens, own in found:
        if own is None:  # of a stage before the last
            continue
        truth = logits(model, tokens)
        assert np.abs(own - truth).max() <= 1e-5 * np.abs(truth).max()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0}
YARN["original_max_position_embeddings"] = 8


WINDOW = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
"""Of a Qwen2."""
LATER = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"], "head_dim": 6}
GEMMA = {"head_dim": 8, "hidden_size": 36, "hidden_act": "gelu_pytorch_tanh", "pad_token_id": None}
TIED_QWEN3 = {**WINDOW, "head_dim": 6, "tie_word_embeddings": True}
MOE = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 8}
OLMOE = {"num_experts": 4, "num_experts_per_tok": 3}
CLIPPED = {**OLMOE, "clip_qkv": 0.9}
QWEN2_MOE = {**OLMOE, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 16}
LATER_GEMMA = {
    "hidden_size": 36,
    "head_dim": 8,
    "pad_token_id": None,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
}
LATER_GEMMA |= {"num_hidden_layers": 3}
GEMMA2 = {**LATER_GEMMA, "query_pre_attn_scalar": 3, "attn_logit_softcapping": 0.5}
GEMMA2["final_logit_softcapping"] = 0.7
LOCAL = {"rope_type": "default", "rope_theta": 70.0}
GEMMA3 = {**LATER_GEMMA, "query_pre_attn_scalar": 9}
GEMMA3 |= {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}}
GEMMA3["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
OLMO3 = {"pad_token_id": None, "num_hidden_layers": 4, "sliding_window": 5}
OLMO3["rope_parameters"] = {"full_attention": YARN, "sliding_attention": LOCAL}
SMOLLM3 = {"pad_token_id": None, "num_hidden_layers": 3, "no_rope_layer_interval": 2}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0}
GRANITE |= {"attention_multiplier": 0.3, "pad_token_id": None}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
PHI3 = {"sliding_window": 5, "pad_token_id": None}
DENSE = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
OF_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


@pytest.mark.parametrize(
    ("changes", "ranks", "settings", "dtype"),
    [
        ({}, 2, ["layout.tp=2"], "float32"),
        ({"tie_word_embeddings": True, "num_key_value_heads": 4}, 2, ["layout.pp=2"], "bfloat16"),
        ({"kind": "MistralForCausalLM", "sliding_window": None}, 1, [], "float32"),
        ({"kind": "Qwen2ForCausalLM", "tie_word_embeddings": True}, 2, ["layout.tp=2"], "float32"),
        ({"rope_parameters": LLAMA3}, 1, [], "float32"),
        ({"rope_parameters": LINEAR}, 1, [], "float32"),
        ({"kind": "Qwen3ForCausalLM", "head_dim": 8, "rope_parameters": YARN}, 1, [], "float32"),
        ({"kind": "MistralForCausalLM", "sliding_window": 5}, 2, ["layout.tp=2"], "float32"),
        ({"kind": "Qwen2ForCausalLM", **WINDOW}, 2, ["layout.pp=2"], "float32"),
        ({"kind": "MinistralForCausalLM", **LATER}, 1, [], "float32"),
        ({"head_dim": 10}, 1, [], "float32"),
        ({"kind": "Qwen3ForCausalLM", "head_dim": 8}, 2, ["layout.tp=2"], "float32"),
        ({"kind": "Qwen3ForCausalLM", **TIED_QWEN3}, 2, ["layout.pp=2"], "float32"),
        ({"kind": "GemmaForCausalLM", **GEMMA}, 2, ["layout.tp=2"], "float32"),
        ({"hidden_act": "gelu_pytorch_tanh"}, 1, [], "float32"),
        ({"kind": "MixtralForCausalLM", "num_local_experts": 4}, 2, ["layout.ep=2"], "float32"),
        ({"kind": "Qwen3MoeForCausalLM", **MOE}, 2, ["layout.ep=2"], "float32"),
        ({"kind": "Qwen2MoeForCausalLM", **QWEN2_MOE}, 2, ["layout.ep=2"], "float32"),
        ({"kind": "OlmoeForCausalLM", **CLIPPED}, 2, ["layout.ep=2"], "float32"),
        ({"kind": "Qwen3MoeForCausalLM", **MOE, **DENSE}, 2, ["layout.pp=2"], "float32"),
        ({"kind": "Qwen2MoeForCausalLM", **QWEN2_MOE, **DENSE}, 2, ["layout.tp=2"], "float32"),
        ({"kind": "Olmo2ForCausalLM", "pad_token_id": None}, 2, ["layout.pp=2"], "float32"),
        ({"kind": "Olmo3ForCausalLM", **OLMO3}, 1, [], "float32"),
        ({"kind": "SmolLM3ForCausalLM", **SMOLLM3}, 2, ["layout.tp=2"], "float32"),
        ({"kind": "GraniteForCausalLM", **GRANITE}, 2, ["layout.tp=2"], "float32"),
        ({"kind": "Phi3ForCausalLM", **PHI3}, 2, ["layout.tp=2"], "bfloat16"),
        ({"kind": "Gemma2ForCausalLM", **GEMMA2}, 2, ["layout.tp=2"], "float32"),
        ({"kind": "Gemma3ForCausalLM", **GEMMA3}, 2, ["layout.pp=2"], "float32"),
    ],
    ids=[
        "llama",
        "tied, bfloat16",
        "mistral",
        "qwen2",
        "llama3",
        "linear",
        "yarn",
        "window",
        "from layer 1",
        "ministral",
        "head_dim",
        "qwen3",
        "qwen3, tied, window",
        "gemma",
        "gates of gelu",
        "mixtral",
        "qwen3 with experts",
        "qwen2 with experts",
        "olmoe",
        "qwen3, some blocks with experts",
        "qwen2, some blocks with experts",
        "olmo 2",
        "olmo 3",
        "smollm3",
        "granite",
        "phi 3",
        "gemma 2",
        "gemma 3",
    ],
)
def test_logits_and_a_round_trip(changes, ranks, settings, dtype, tmp_path):
    model = llama(**changes).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    model = model.float()
    assert_one_function(model, tmp_path / "theirs", ranks, *settings)
    run = ["run.init_from=" + str(tmp_path / "theirs"), f"run.out={tmp_path / 'run'}"]
    config = configured(*FLAT, *settings, *run)
    run_ranks(ranks, lambda own: train(own, lambda: config, "no", lambda: False))
    to = "phi3" if model.config.model_type == "phi3" else "llama"
    export(tmp_path / "run", to, tmp_path / "back", dtype, 20_000, [])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="float32")
    if model.config.to_dict().get("sliding_window"):
        assert [getattr(again.config, key, None) for key in OF_WINDOWS] == [
            getattr(model.config, key, None) for key in OF_WINDOWS
        ]
        assert type(again) is type(model)
    else:  # A Mistral without windows is written as a Llama.
        assert type(again).__name__ == type(model).__name__.replace("Mistral", "Llama")
    assert_one_function(again, tmp_path / "back", 1)
    trained = [
        abs(a - b).max() for a, b in zip(again.parameters(), model.parameters(), strict=True)
    ]
    assert max(trained) > 0, "the steps must move the parameters"


def test_a_small_run_is_written_as_a_phi3_which_transformers_loads(tmp_path):
    config = configured(*FLAT, "model.kind=llama", f"run.out={tmp_path / 'run'}")
    run_ranks(1, lambda own: train(own, lambda: config, "no", lambda: False))
    export(tmp_path / "run", "phi3", tmp_path / "back", "float32", 20_000, [])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert_one_function(again, tmp_path / "back", 1)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("hidden_act", "gelu", 'hidden_act "gelu"'),
        ("attention_bias", True, "attention_bias true"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, 'rope_type "dynamic"'),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "truncate": False}, "truncate false"),
        ("num_key_value_heads", 3, "kv_heads must divide"),
        ("rope_scaling", {"type": "llama3"}, "without factor"),
        ("model_type", "gpt_oss", "sinks in attention, biases of experts, clamped gates"),
        (
            "model_type",
            "qwen4",
            "has gpt2, llama, mistral, ministral, qwen2, qwen3, gemma, mixtral, gemma2, gemma3_text, smollm3, granite, olmo2, "
            "olmo3, qwen2_moe, qwen3_moe, olmoe, phi3, bert",
        ),
    ],
)
def test_a_folder_that_is_another_model_is_refused_by_name(key, value, says, tmp_path):
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(MpitrainError, match=says):
        run_ranks(1, ours, f"run.init_from={tmp_path}")


@pytest.mark.parametrize(
    ("kind", "keys", "says"),
    [
        ("Qwen2Moe", {"mlp_only_layers": [1]}, "no tensor model.layers.1.mlp.gate_proj.weight"),
        ("SmolLM3", {"no_rope_layers": [0, 1, 1]}, r"no_rope_layers \[0, 1, 1\], but mpitrain"),
        ("Phi3", {"partial_rotary_factor": 0.75}, r"partial_rotary_factor 0.75, but mpitrain"),
        ("Phi3", {"rope_parameters": LONGROPE}, 'rope_type "longrope", but mpitrain'),
        ("Granite", {"residual_multiplier": 0}, "residual_multiplier.*greater than 0"),
        ("Qwen2Moe", {"num_experts_per_tok": 9}, "9 of 4 do not exist"),
        ("Olmoe", {"clip_qkv": -8.0}, "clip_qkv.*greater than 0"),
        ("Gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping.*greater than 0"),
        ("Qwen2Moe", {"experts.1.up_proj": None}, "no tensor .*experts.1.up_proj.weight"),
        ("Mixtral", {"experts.3.w2": None}, "no tensor .*block_sparse_moe.experts.3.w2.weight"),
        ("Mixtral", {"experts.2.w1": (3, 4)}, r"2.w1.weight' has the shape \(3, 4\), but config"),
        ("Olmoe", {"num_experts": 3}, r"0.mlp.gate.weight' has the shape \(4, 24\), but config"),
        ("Qwen2Moe", {"shared_expert_gate": None}, "no tensor .*shared_expert_gate.weight"),
    ],
)
def test_a_mixture_that_is_damaged_or_another_one_is_refused_by_name(kind, keys, says, tmp_path):
    """A name of a tensor means that tensor of layer 0: None takes it out, else it gets another shape."""
    from safetensors.numpy import load_file, save_file

    of_kind = {"Olmoe": OLMOE, "Qwen2Moe": QWEN2_MOE, "Qwen3Moe": MOE, "Gemma2": GEMMA2}
    of_kind |= {
        "Phi3": PHI3,
        "Granite": GRANITE,
        "SmolLM3": SMOLLM3,
        "Gemma3": GEMMA3,
        "Mixtral": {"num_local_experts": 4},
    }
    llama(f"{kind}ForCausalLM", **of_kind[kind]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for key, value in keys.items():
        if found := [name for name in tensors if ".layers.0." in name and key in name]:
            del tensors[found[0]]
            if value:
                tensors[found[0]] = np.zeros(value, np.float32)
        else:
            config[key] = value
    save_file(tensors, path, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MpitrainError, match=says):
        run_ranks(1, ours, f"run.init_from={tmp_path}")


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Gemma3"])
def test_a_long_context_in_float32_has_the_logits_of_transformers_with_its_angles(kind, tmp_path):
    """transformers rounds frequencies twice to float32: at 2,000 tokens that alone is more than 1e-5."""
    own, tokens = MOE if kind == "Qwen3Moe" else GEMMA3, 2000
    model = llama(f"{kind}ForCausalLM", **own, max_position_embeddings=tokens)
    model.save_pretrained(tmp_path)
    rotary = model.model.rotary_emb
    for name, theirs in [*rotary.named_buffers()]:
        if name.endswith("inv_freq") and "original" not in name:
            ropes = model.config.rope_parameters
            rope = ropes.get(name.removesuffix("_inv_freq"), ropes)
            count = len(theirs)
            powers = (1 / rope["rope_theta"] ** (np.arange(count) / count)).astype(np.float32)
            theirs.copy_(torch.from_numpy(powers / np.float32(rope.get("factor", 1))))

    def found(transport):
        long = ["model.context=2000", "batch.size=1"]
        settings = [*FLAT, *long, f"run.init_from={tmp_path}"]
        trainer, source, _ = build(transport, configured(*settings))
        inputs, _ = source.batch(0, 0, 1, range(1))
        return inputs, trainer.logits(inputs)

    ((inputs, own_logits),) = run_ranks(1, found)
    truth = logits(model, inputs)
    assert np.abs(own_logits - truth).max() <= 1e-5 * np.abs(truth).max()


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("Llama", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}),
        ("Llama", {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}),
        ("Llama", {"model_type": "mistral"}),
        ("Mistral", {"sliding_window": None, "use_sliding_window": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": 32, "attention_bias": True}),
        ("Mistral", {"sliding_window": 4, "layer_types": ["full_attention"] * 2}),
        ("Mistral", {"sliding_window": 4, "use_sliding_window": False}),
        ("Mistral", {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}),
        ("Qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}),
        ("Qwen2", {"sliding_window": 4, "max_window_layers": 0}),
        ("Qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}),
        ("Qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ],
)
def test_a_key_means_what_the_class_of_its_type_reads(kind, keys, tmp_path):
    llama(
        f"{kind}ForCausalLM", **({"sliding_window": None} if kind == "Mistral" else {})
    ).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_window_layers": 2, **keys}))
    assert_one_function(loaded(tmp_path), tmp_path, 1)


@pytest.mark.parametrize(
    ("kind", "keys", "says"),
    [
        ("Qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window"),
    ],
)
def test_layers_with_other_windows_than_ours_are_refused(kind, keys, says, tmp_path):
    llama(f"{kind}ForCausalLM").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    with pytest.raises(MpitrainError, match=says):
        run_ranks(1, ours, f"run.init_from={tmp_path}")


SHAPES = {
    "mistral": {"kind": "MistralForCausalLM", "sliding_window": 4},
    "qwen2": {"kind": "Qwen2ForCausalLM", **WINDOW},
    "qwen3": {"kind": "Qwen3ForCausalLM", **WINDOW, "head_dim": 8},
    "gemma": {"kind": "GemmaForCausalLM", **GEMMA},
    "gemma2": {"kind": "Gemma2ForCausalLM", **GEMMA2},
    "gemma3": {"kind": "Gemma3ForCausalLM", **GEMMA3},
    "smollm3": {"kind": "SmolLM3ForCausalLM", **SMOLLM3},
    "granite": {"kind": "GraniteForCausalLM", **GRANITE, "tie_word_embeddings": True},
    "phi3": {"kind": "Phi3ForCausalLM", **PHI3},
}
UNDIVIDED = {"olmo2": {"kind": "Olmo2ForCausalLM", "pad_token_id": None}}
"""Shapes whose norms of queries no rank of layout.tp has whole."""
EXACT = ["precision.compute=float64"]


@pytest.mark.parametrize("changes", [*SHAPES, *UNDIVIDED])
def test_every_shape_has_the_loss_and_gradients_of_transformers(changes, tmp_path):
    model = exact(llama(**{**SHAPES, **UNDIVIDED}[changes]))
    model.save_pretrained(tmp_path)
    config = configured(*FLAT, *EXACT, f"run.init_from={tmp_path}")
    (inputs, targets), largest = rows(4), 0.0
    ((found, loss, gradients),) = run_ranks(1, computed, config, inputs, targets)
    own = phi3.PHI3 if changes == "phi3" else LLAMA
    right, wanted = loss_and_gradients(model, inputs, targets, own, config.model)
    assert np.abs(found - logits(model, inputs[:1])[0]).max() <= 1e-12
    assert abs(loss - right) <= 1e-12 and gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert np.abs(gradient - wanted[name]).max() <= 1e-11, name
        largest = max(largest, np.abs(gradient).max())
    assert largest > 0.01


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, ["layout.tp=2", "layout.sequence_parallel=true"]),
        (2, ["layout.pp=2"]),
        (2, ["layout.cp=2"]),
        (2, ["layout.cp=2", "layout.cp_mode=ring"]),
        (4, ["layout.cp=4", "layout.cp_mode=ring"]),
        (2, ["replication.zero=3"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("changes", SHAPES)
def test_every_shape_has_the_logits_of_transformers_in_every_layout(
    changes, ranks, settings, tmp_path
):
    model = exact(llama(**SHAPES[changes]))
    model.save_pretrained(tmp_path)
    found = run_ranks(ranks, ours, f"run.init_from={tmp_path}", *EXACT, *settings)
    assert any(own is not None for _, own in found)
    for tokens, own in found:
        if own is not None:
            assert np.abs(own - logits(model, tokens)).max() <= 1e-11


EXPERTS = {
    "mixtral": {"kind": "MixtralForCausalLM", "num_local_experts": 4},
    "qwen3, after": {"kind": "Qwen3MoeForCausalLM", **MOE, "norm_topk_prob": True},
    "qwen3, before": {"kind": "Qwen3MoeForCausalLM", **MOE, "norm_topk_prob": False},
    "qwen2, after": {"kind": "Qwen2MoeForCausalLM", **QWEN2_MOE, "norm_topk_prob": True},
    "qwen2, before": {"kind": "Qwen2MoeForCausalLM", **QWEN2_MOE, "qkv_bias": False},
    "olmoe": {"kind": "OlmoeForCausalLM", **OLMOE},
}


@pytest.mark.parametrize("changes", EXPERTS)
def test_experts_have_the_logits_of_transformers_in_float64(changes, tmp_path, monkeypatch):
    """Their routers compute in float32 otherwise, which chooses alike and rounds the weights."""
    own = EXPERTS[changes]
    model, softmax = exact(llama(**own)), torch.nn.functional.softmax
    model.config._experts_implementation = "eager"  # the grouped product has no float64
    model.save_pretrained(tmp_path)
    in_float32 = torch.Tensor.float
    monkeypatch.setattr(
        torch.Tensor,
        "float",
        lambda tensor: tensor if tensor.is_floating_point() else in_float32(tensor),
    )
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim)
    )
    layouts = ((1, []), (2, ["layout.ep=2"]), (2, ["replication.zero=3"]))
    for ranks, settings in layouts:
        found = run_ranks(ranks, ours, f"run.init_from={tmp_path}", *EXACT, *settings)
        for tokens, own_logits in found:
            assert np.abs(own_logits - logits(model, tokens)).max() <= 1e-12


@pytest.mark.parametrize(
    ("settings", "law"),
    [
        (["model.shared=8"], "Mixtral.* model.shared 0, but model.shared is 8"),
        (["model.router=before"], 'Mixtral.* model.router is "before"'),
        (["model.qk_norm=true", "model.qkv_bias=true"], "Qwen3Moe.* model.qkv_bias is true"),
        (["model.capacity=1.5"], "model.capacity 0.0, but model.capacity is 1.5"),
    ],
)
def test_experts_that_a_folder_cannot_hold_are_refused(settings, law):
    keys = configured("model.kind=llama", "model.experts=4", *settings).model
    with pytest.raises(ConfigError, match=law):
        LLAMA.described(keys, [])


def test_a_window_that_a_folder_cannot_hold_is_refused(tmp_path):
    run = ["model.window=3", "model.layers=2", f"run.out={tmp_path / 'run'}"]
    config = configured(*FLAT, *run)
    run_ranks(1, lambda own: train(own, lambda: config, "no", lambda: False))
    with pytest.raises(ConfigError, match=r"model.window is 3.(.|\n)*model.kind=llama"):
        export(tmp_path / "run", "gpt2", tmp_path / "back", "float32", 20_000, [])
    assert not (tmp_path / "back").exists()
