"""Text of transformers: the same tokens from the same weights, and the same probabilities."""

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.run.build import build
from mpitrain.run.generate import Sampling, probabilities, texts
from mpitrain.transport.threads import run_ranks
from tests.generation import every_text

SHAPE = ["model.layers=2", "model.width=32", "model.heads=4", "model.context=24"]
LLAMA = ["model.kind=llama", "model.kv_heads=2"]
GEMMA = ["model.activation=gelu", "model.scaled_embedding=true", "model.post_norm=true"]
GEMMA += ["model.window=4", "model.window_every=2"]
GRANITE = ["model.embedding_scale=3", "model.residual_scale=0.5", "model.logit_scale=0.25"]
EXPERTS = ["model.experts=4", "model.top_k=2", "model.hidden=40"]
PROMPTS = [[3, 5, 7], [200, 1, 9], [0, 0, 255]]


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["model.hidden=40"],
        ["model.epsilon=0.1", "model.tied=true"],
        [*LLAMA, "model.window=5"],
        [*LLAMA, "model.window=4", "model.window_from=1", "model.qkv_bias=true"],
        [*LLAMA, "model.window=4", "model.window_from=1"],
        [*LLAMA, "model.qk_norm=true", "model.head_dim=6", "model.rope_scaling=[4,32,1,8,1.1]"],
        [*LLAMA, "model.activation=gelu", "model.scaled_embedding=true", "model.tied=true"],
        [*LLAMA, *GEMMA, "model.logit_cap=3", "model.score_cap=2", "model.score_scale=0.5"],
        [*LLAMA, *GEMMA, "model.qk_norm=true", "model.window_theta=50.0"],
        [*LLAMA, "model.pre_norm=false", "model.post_norm=true", "model.qk_norm=joint"],
        [*LLAMA, "model.nope_every=2"],
        [*LLAMA, *GRANITE],
        [*LLAMA, *EXPERTS, "model.window=5"],
        [*LLAMA, *EXPERTS, "model.qk_norm=true", "model.dense_blocks=[0]", "model.dense_hidden=24"],
        [*LLAMA, *EXPERTS, "model.qk_norm=true", "model.router=before"],
        [*LLAMA, *EXPERTS, "model.shared=24", "model.shared_gate=true", "model.qkv_bias=true"],
        [*LLAMA, *EXPERTS, "model.qk_norm=joint", "model.router=before", "model.clip_qkv=1"],
    ],
    ids=str,
)
def test_greedy_tokens_and_the_context_end_equal_those_of_transformers(changes):
    from mpitrain.tools.bench.generate import Transformers

    def write(transport):
        settings = [*SHAPE, *changes, "precision.compute=float64", "batch.size=4"]
        config = parse(with_settings({}, settings))
        trainer = build(transport, config).trainer
        trainer.parameters[:] *= 3  # Larger weights make repeated tokens rarer.
        peer = Transformers(config.model, 256, trainer.tensors())
        drawn = texts(trainer, PROMPTS, Sampling(0, 0), 0, cuts=False)
        return every_text(drawn, len(PROMPTS)), peer.write(PROMPTS, 21)

    ((ours, theirs),) = run_ranks(1, write)
    assert ours == theirs and len({token for text in ours for token in text}) > 5


def test_probabilities_are_those_of_transformers():
    import torch
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(1).standard_normal((5, 300)) * 3
    for temperature, top_k, top_p in ((0.5, 300, 0.3), (1.0, 40, 0.9), (2.0, 7, 0.99)):
        scores = torch.from_numpy(logits.copy())
        warpers = TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)
        for warper in (*warpers, TopPLogitsWarper(top_p)):
            scores = warper(None, scores)
        wanted = scores.softmax(-1).numpy()
        for row, other in zip(logits, wanted, strict=True):
            found = probabilities(row, Sampling(temperature, top_k, top_p))
            assert np.all(np.abs(found - other) <= 1e-12)
