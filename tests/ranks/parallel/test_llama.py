"""Llama: the numbers of transformers and of a plain PyTorch program, in every layout the same."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from mpitrain.run.rules import check_each, of_model
from mpitrain.transport.threads import run_ranks
from tests.ranks.run import test_documents
from tests.ranks.run.test_documents import CUT, Alone, Packed
from tests.training import configured, trained

pytestmark = pytest.mark.slow

SHAPE = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "context": 12}
LLAMA = ["model.kind=llama", "precision.compute=float64"]
LLAMA += [f"model.{key}={value}" for key, value in SHAPE.items()]
LLAMA += [
    "batch.size=12",
    "run.eval_rows=20",
    "optimizer.lr=0.01",
    "optimizer.warmup=2",
    "model.theta=50.0",
]
THETA = 50.0


def logits_of(torch, tensors, tokens, tied, windows=(99, 99)):
    """A plain PyTorch program for the logits; `tensors` have our names."""
    heads, groups, width = SHAPE["heads"], SHAPE["kv_heads"], SHAPE["width"]
    half = width // heads // 2
    dtype = tensors["embedding.tokens"].dtype
    frequencies = (1 / THETA ** (torch.arange(half, dtype=torch.float64) / half)).float()
    angles = (torch.arange(tokens.shape[1]).float()[:, None] * frequencies).double()
    cos, sin = (each.to(dtype) for each in (angles.cos(), angles.sin()))

    def norm(x, gain):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def split(x, count):
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    x = tensors["embedding.tokens"][tokens]
    for block in range(SHAPE["layers"]):
        w = {
            name.removeprefix(f"blocks.{block}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"blocks.{block}.")
        }
        qkv = norm(x, w["attention.norm.gain"]) @ w["attention.qkv.weight"].T
        q, k, v = qkv.split([2 * half * count for count in (heads, groups, groups)], -1)
        q, k, v = turned(split(q, heads)), turned(split(k, groups)), split(v, groups)
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / (2 * half) ** 0.5
        every = torch.ones(scores.shape[-2:]).bool()
        hidden = every.triu(1) | every.tril(-windows[block])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).flatten(-2) @ w["attention.out.weight"].T
        gate, up = (norm(x, w["mlp.norm.gain"]) @ w["mlp.up.weight"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down.weight"].T
    head = tensors["embedding.tokens" if tied else "head.logits.weight"]
    return norm(x, tensors["head.norm.gain"]) @ head.T


def a_step(transport, *settings):
    """A batch, its logits, and what a step of plain gradient descent subtracts from each tensor."""
    config = configured(*LLAMA, "optimizer.name=sgd", "optimizer.weight_decay=0.0", *settings)
    trainer, source, _ = build(transport, config)
    before = {name: tensor.copy() for name, tensor in trainer.tensors().items()}
    tokens, targets = source.batch(config.run.seed, 0, 12, range(12))
    logits = trainer.logits(tokens).copy()
    result = trainer.step(0, tokens, targets)
    return tokens, targets, logits, before, trainer.tensors(), result


@pytest.mark.parametrize(
    ("tied", "windows"), [(False, (99, 99)), (True, (99, 99)), (False, (4, 4)), (False, (99, 4))]
)
def test_logits_loss_and_gradients_are_those_of_a_pytorch_program(tied, windows):
    torch = pytest.importorskip("torch")
    exact = ["optimizer.warmup=0", "optimizer.schedule=constant", "optimizer.clip=0.0"]
    exact += [f"model.window={windows[1]}", f"model.window_from={int(windows[0] != windows[1])}"]
    ((tokens, targets, logits, before, after, result),) = run_ranks(
        1, a_step, *exact, "optimizer.lr=1.0", f"model.tied={str(tied).lower()}"
    )
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in before.items()}
    truth = logits_of(torch, tensors, torch.tensor(tokens), tied, windows)
    assert np.abs(logits - truth.detach().numpy()).max() <= 1e-12
    loss = torch.nn.functional.cross_entropy(truth.flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    assert abs(result.loss - loss.item()) <= 1e-12
    for name, tensor in tensors.items():
        found = before[name] - after[name]
        assert np.abs(found - tensor.grad.numpy()).max() <= 1e-12, name


RING = "layout.cp_mode=ring"
GEMMA = ["model.activation=gelu", "model.scaled_embedding=true", "model.tied=true"]
QWEN3 = ["model.qk_norm=true", "model.head_dim=6"]


@pytest.mark.compile
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["layout.tp=2", *QWEN3, *GEMMA],
        ["model.window=3"],
        ["layout.cp=2", RING, "model.window=4"],
    ],
    ids=str,
)
def test_the_simulator_trains_as_the_host(settings):
    common = [*LLAMA, *settings, "precision.compute=float32", "optimizer.name=sgd"]
    ranks = 2 if "layout" in " ".join(settings) else 1
    host, simulated = (
        run_ranks(ranks, trained, configured(*common, f"device.kind={kind}"), 5)
        for kind in ("cpu", "cuda-sim")
    )
    for own, other in zip(host, simulated, strict=True):
        assert np.abs(own.told[:-1] - other.told[:-1]).max() <= 1e-4


def test_packed_documents_train_as_in_rows_of_their_own():
    shape = [one for one in LLAMA if one.startswith("model") and "context" not in one]
    steps, evaluated, tensors = test_documents.trained(1, Alone(), *shape, "batch.size=21")[0]
    for ranks, settings in (
        (1, ["memory.attention=tiled"]),
        (2, ["layout.tp=2"]),
        (2, ["layout.cp=2"]),
    ):
        for own, own_evaluated, own_tensors in test_documents.trained(
            ranks, Packed(), *CUT, *shape, *settings
        ):
            assert np.abs(np.subtract(own, steps)).max() <= 1e-12
            assert np.abs(np.subtract(own_evaluated, evaluated)).max() <= 1e-12
            for name, tensor in own_tensors.items():
                if tensor.shape == tensors[name].shape:
                    assert np.abs(tensor - tensors[name]).max() <= 1e-12, name


@pytest.mark.parametrize(
    ("settings", "law"),
    [
        (["model.kv_heads=3"], "model.kv_heads must divide model.heads"),
        (["layout.tp=4"], "layout.tp must divide model.kv_heads"),
        (["model.width=36"], "a head has 9"),
        (["model.head_dim=7"], r"a head has 7.(.|\n)*head_dim to 6 or 8"),
        (["model.kind=gpt"], "model.kv_heads is 2, but a model of kind gpt"),
        (["model.window_from=1"], "model.window_from is the first"),
        (["model.window=3", "model.window_from=2"], "is 2 of 2 layers"),
        (["model.kind=bert", "model.kv_heads=0", "model.window=3"], "model.window is for a gpt"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(settings, law):
    with pytest.raises(ConfigError, match=law):
        check_each(of_model(configured(*LLAMA, *settings)))


def test_heads_that_a_folder_fixes_are_no_way_out():
    """The layouts that are named have as many ranks, and fit."""
    config = configured(*LLAMA)
    config = config.model_copy(update={"layout": config.layout.model_copy(update={"tp": 4})})
    begun = config.model_copy(update={"run": config.run.model_copy(update={"init_from": "a"})})
    for one, more in ((config, "; or of a new model model.kv_heads to 4."), (begun, ".")):
        with pytest.raises(ConfigError) as raised:
            check_each(of_model(one))
        assert raised.value.way_out == (
            "Set layout.tp to 1 or 2; or for as many ranks layout.tp to 2 and layout.pp to 2, "
            f"or layout.tp to 2, layout.cp to 2 and layout.cp_mode to ring{more}"
        )
    for settings in (["layout.pp=2"], ["layout.cp=2", "layout.cp_mode=ring"]):
        check_each(of_model(configured(*LLAMA, "layout.tp=2", *settings)))
