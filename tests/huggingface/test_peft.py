"""Adapters of PEFT and ours are one function, in both directions."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from mpitrain.run.build import build, open_run
from mpitrain.run.build import configured as opened
from mpitrain.run.export import export
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.huggingface.models import llama, loaded, logits, made, rows
from tests.training import configured

FLAT = ["run.steps=6", "batch.size=8", "model.context=16", "device.kind=cpu", "run.eval_every=-1"]
FLAT += ["optimizer.lr=0.05"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of GPT-2: with a tied head, and without; of Qwen2, and of a Llama."""
    folder = tmp_path_factory.mktemp("bases")
    for tied in (True, False):
        made(tie_word_embeddings=tied).save_pretrained(folder / f"gpt2, tied {tied}")
    llama("Qwen2ForCausalLM", tie_word_embeddings=True).save_pretrained(folder / "qwen2")
    llama().save_pretrained(folder / "llama")
    return folder


def ours(transport, folder, tokens):
    """All logits of the first row, of a run."""
    trainer = open_run(transport, folder, lambda: opened(folder, [])).trainer
    return trainer.backend.to_host(trainer.logits(tokens[:1]))[0].copy()


def initial(transport, config, tokens):
    trainer = build(transport, config).trainer
    return trainer.backend.to_host(trainer.logits(tokens[:1]))[0].copy()


def near(found, truth, most):
    return np.abs(found - truth).max() <= most * np.abs(truth).max()


@pytest.mark.parametrize(
    "targets, base",
    [
        ("c_attn", "gpt2, tied True"),
        ("q,v,c_fc", "gpt2, tied False"),
        ("k", "gpt2, tied False"),
        ("c_proj,lm_head,h.1.attn.c_attn", "gpt2, tied True"),
        ("q_proj,v_proj,down_proj,layers.1.mlp.gate_proj", "qwen2"),
        ("qkv,mlp.up,o_proj,lm_head", "llama"),  # q, k and v have one A
        ("all-linear", "qwen2"),
    ],
)
def test_peft_computes_the_logits_of_an_exported_adapter(bases, tmp_path, targets, base):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = bases / base
    run = tmp_path / "run"
    chosen = ["lora.rank=4", "lora.alpha=12.0", f"lora.targets={targets}"]
    config = configured(*FLAT, *chosen, f"run.init_from={base}", f"run.out={run}")
    run_ranks(2, lambda own: train(own, lambda: config, "no", lambda: False))
    tokens, _ = rows(1)
    (found,) = run_ranks(1, ours, run, tokens)
    export(run, "peft", tmp_path / "peft", "float32", 10**9, [])
    bare = logits(loaded(base), tokens)[0]
    if targets == "all-linear":
        get_peft_model(loaded(base), LoraConfig(target_modules=targets)).save_pretrained(
            tmp_path / "own"
        )
        own, same = (
            {*load_file(tmp_path / name / "adapter_model.safetensors")} for name in ("own", "peft")
        )
        assert own == same
    theirs = PeftModel.from_pretrained(loaded(base), tmp_path / "peft").eval()
    truth = logits(theirs, tokens)[0]
    assert near(found, truth, 1e-4)
    assert not near(found, bare, 1e-2)
    family = "gpt2" if "gpt2" in base.name else "llama"
    export(run, family, tmp_path / "merged", "float32", 10**9, [], merge=True)
    assert near(logits(loaded(tmp_path / "merged"), tokens)[0], found, 1e-5)
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path / "peft", tmp_path / "again"):
        again = configured(*FLAT, f"run.init_from={base}", f"lora.init_from={folder}")
        assert near(run_ranks(2, initial, again, tokens)[0], found, 1e-5)


@pytest.mark.parametrize(
    ("base", "chosen"),
    [
        ("gpt2, tied True", ["c_attn", "mlp.c_proj"]),
        ("gpt2, tied True", ["c_attn", "lm_head"]),
        ("llama", ["q_proj", "o_proj", "up_proj", "lm_head"]),
        ("qwen2", ["k_proj", "gate_proj", "down_proj"]),
        ("gpt2, tied False", "all-linear"),
    ],
)
def test_ten_steps_of_peft_and_ours_train_the_same_adapters(bases, tmp_path, base, chosen):
    import torch
    from peft import LoraConfig, get_peft_model

    base = bases / base
    tokens, targets = rows(4)
    adapters = LoraConfig(
        r=3,
        lora_alpha=9,
        target_modules=chosen,
        fan_in_fan_out="gpt2" in base.name,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(loaded(base, "float64"), adapters)
    model.save_pretrained(tmp_path / "begun")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, betas=(0.8, 0.95), weight_decay=0.1)
    losses = []
    for _ in range(10):
        found = model(torch.from_numpy(tokens)).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(found, torch.from_numpy(targets).flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "ended")
    truth = logits(model.eval(), tokens)[0]
    exact = ["precision.compute=float64", "optimizer.warmup=0", "optimizer.schedule=constant"]
    exact += ["optimizer.clip=0.0", "optimizer.beta1=0.8", "batch.size=4"]

    def ten_steps(transport, config):
        trainer = build(transport, config).trainer
        own = trainer.share()
        steps = [
            trainer.step(n, tokens[own.start : own.stop], targets[own.start : own.stop])
            for n in range(10)
        ]
        trainer.sync_parameters()
        rows = trainer.backend.to_host(trainer.logits(tokens[:1]))
        return [one.loss for one in steps], rows[0].copy()

    begun = [f"run.init_from={base}", f"lora.init_from={tmp_path / 'begun'}"]
    begun += [f"lora.targets={chosen}"] * (chosen == "all-linear")
    most = 1e-9 if "gpt2" in base.name else 1e-4  # The norms of a Llama there are in float32.
    for settings in ([], ["layout.tp=2"]):
        for own, found in run_ranks(2, ten_steps, configured(*FLAT, *exact, *begun, *settings)):
            assert np.abs(np.subtract(own, losses)).max() <= most
            assert near(found, truth, most)
    for settings in (
        [f"run.init_from={tmp_path / 'ended'}"],
        [f"run.init_from={base}", f"lora.init_from={tmp_path / 'ended'}"],
    ):
        config = configured(*FLAT, *settings)
        assert (config.lora.rank, config.lora.alpha) == (3, 9.0)
        (found,) = run_ranks(1, initial, config, tokens)
        assert near(found, truth, 1e-4)
    assert not near(truth, logits(loaded(base), tokens)[0], 1e-2)
