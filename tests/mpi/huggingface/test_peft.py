"""Adapters of PEFT and ours are one function, in both directions."""

import numpy as np
import pytest

from mpitrain.run.build import build, open_run
from mpitrain.run.build import configured as opened
from mpitrain.run.export import export
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.mpi.huggingface.models import loaded, logits, made, rows
from tests.training import configured

FLAT = ["run.steps=6", "batch.size=8", "model.context=16", "device.kind=cpu", "run.eval_every=-1"]
FLAT += ["optimizer.lr=0.05"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A folder with a tied head, and one without."""
    folder = tmp_path_factory.mktemp("bases")
    for tied in (True, False):
        made(tie_word_embeddings=tied).save_pretrained(folder / str(tied))
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
    "targets, tied",
    [("c_attn", True), ("q,v,c_fc", False), ("k", False), ("c_proj,lm_head,h.1.attn.c_attn", True)],
)
def test_peft_computes_the_logits_of_an_exported_adapter(bases, tmp_path, targets, tied):
    from peft import PeftModel

    base = bases / str(tied)
    run = tmp_path / "run"
    chosen = ["lora.rank=4", "lora.alpha=12.0", f"lora.targets={targets}"]
    config = configured(*FLAT, *chosen, f"run.init_from={base}", f"run.out={run}")
    run_ranks(2, lambda own: train(own, lambda: config, "no", lambda: False))
    tokens, _ = rows(1)
    (found,) = run_ranks(1, ours, run, tokens)
    export(run, "peft", tmp_path / "peft", "float32", 10**9, [])
    bare = logits(loaded(base), tokens)[0]
    theirs = PeftModel.from_pretrained(loaded(base), tmp_path / "peft").eval()
    truth = logits(theirs, tokens)[0]
    assert near(found, truth, 1e-4)
    assert not near(found, bare, 1e-2)
    export(run, "gpt2", tmp_path / "merged", "float32", 10**9, [], merge=True)
    assert near(logits(loaded(tmp_path / "merged"), tokens)[0], found, 1e-5)
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path / "peft", tmp_path / "again"):
        again = configured(*FLAT, f"run.init_from={base}", f"lora.init_from={folder}")
        assert near(run_ranks(2, initial, again, tokens)[0], found, 1e-5)


@pytest.mark.parametrize("chosen", [["c_attn", "mlp.c_proj"], ["c_attn", "lm_head"]])
def test_an_adapter_that_peft_trained_is_read_here(bases, tmp_path, chosen):
    import torch
    from peft import LoraConfig, get_peft_model

    base = bases / "True"
    tokens, targets = rows(4)
    model = get_peft_model(
        loaded(base),
        LoraConfig(
            r=3, lora_alpha=9, target_modules=chosen, fan_in_fan_out=True, task_type="CAUSAL_LM"
        ),
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(5):
        found = model(torch.from_numpy(tokens)).logits.flatten(0, 1)
        torch.nn.functional.cross_entropy(found, torch.from_numpy(targets).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "peft")
    truth = logits(model.eval(), tokens)[0]
    for settings in (
        [f"run.init_from={tmp_path / 'peft'}"],
        [f"run.init_from={base}", f"lora.init_from={tmp_path / 'peft'}"],
    ):
        config = configured(*FLAT, *settings)
        assert (config.lora.rank, config.lora.alpha) == (3, 9.0)
        for ranks, layout in ((1, []), (2, ["layout.tp=2"])):
            config = configured(*FLAT, *settings, *layout)
            found = run_ranks(ranks, initial, config, tokens)[0]
            assert near(found, truth, 1e-4)
    assert not near(truth, logits(loaded(base), tokens)[0], 1e-2)
