"""A GPT-2 of transformers and ours are one function, in both directions."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.formats.gpt2 import GPT2
from mpitrain.run.build import build
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.huggingface.models import loaded, logits, loss_and_gradients, loss_of, made, output, rows
from tests.training import configured

FLAT = ["run.steps=3", "batch.size=8", "model.context=16", "device.kind=cpu", "run.eval_every=-1"]
NEAR = {"float32": 1e-5, "float64": 1e-12}
"""Largest difference of logits and gradients, relative to the largest."""
VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "n_inner and epsilon": {"n_inner": 48, "layer_norm_epsilon": 1e-2},
    "gelu_pytorch_tanh": {"activation_function": "gelu_pytorch_tanh"},
}


def trained(ranks, *settings):
    """Train on so many threads."""
    config = configured(*FLAT, *settings)
    run_ranks(ranks, lambda own: train(own, lambda: config, "no", lambda: False))


def near(ours, theirs, dtype):
    """Whether arrays are equal to rounding; NaN is not."""
    return np.abs(ours - theirs).max() <= NEAR[dtype] * np.abs(theirs).max()


def computed(transport, config, inputs, targets):
    """All logits of the first row, the loss, and the gradients by name; on one rank."""
    trainer = build(transport, config).trainer
    found = trainer.backend.to_host(trainer.logits(inputs[:1]))[0].copy()
    loss = trainer.step(0, inputs, targets).loss
    gradients = {one.name: one.view(trainer.gradients).copy() for one in trainer.storage.entries}
    return found, loss, gradients


@pytest.mark.product
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path, variant, dtype):
    model = made(dtype, **VARIANTS[variant])
    model.save_pretrained(tmp_path / "gpt2")
    inputs, targets = rows(8)
    config = configured(*FLAT, f"run.init_from={tmp_path / 'gpt2'}", f"precision.compute={dtype}")
    ((found, loss, gradients),) = run_ranks(1, computed, config, inputs, targets)
    right, wanted = loss_and_gradients(model, inputs, targets, GPT2, config.model)
    assert near(found, logits(model, inputs[:1])[0], dtype)
    assert abs(loss - right) <= NEAR[dtype] * right
    assert gradients.keys() == wanted.keys()
    largest = max(np.abs(one).max() for one in wanted.values())
    wanted["embedding.positions"] = wanted["embedding.positions"][:16]  # of a shorter context
    for name, gradient in gradients.items():
        assert np.abs(gradient - wanted[name]).max() <= NEAR[dtype] * largest, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float32"])
def test_sharded_folders_of_any_dtype_and_without_a_prefix_are_read(tmp_path, dtype):
    model = made(dtype)
    saved = model.transformer if dtype == "float32" else model  # a GPT2Model has no prefix
    saved.save_pretrained(tmp_path / "gpt2", max_shard_size="40KB")
    assert len(list((tmp_path / "gpt2").glob("*.safetensors"))) > 1
    (inputs, targets), model = rows(8), model.float()
    right = loss_of(output(model, inputs), targets).item()
    config = configured(*FLAT, f"run.init_from={tmp_path / 'gpt2'}", f"precision.compute={dtype}")
    ((_, loss, _),) = run_ranks(1, computed, config, inputs, targets)
    assert abs(loss - right) <= (2e-3 if config.precision.is_half else 1e-5) * right


@pytest.mark.parametrize(
    ("ranks", "settings", "dtype", "shard"),
    [
        (1, ["model.tied=true"], "float32", "5GB"),
        (2, ["layout.tp=2", "model.hidden=48", "model.epsilon=0.01"], "float64", "20KB"),
        (2, ["layout.pp=2"], "bfloat16", "30KB"),
        (2, ["replication.zero=3"], "float16", "5GB"),
    ],
    ids=lambda value: None if isinstance(value, int) else str(value),
)
def test_transformers_loads_an_export_and_computes_the_same(
    tmp_path, ranks, settings, dtype, shard
):
    compute = "float64" if dtype == "float64" else "float32"
    settings = ["model.layers=2", "model.width=32", f"precision.compute={compute}", *settings]
    run = tmp_path / "run"
    trained(ranks, *settings, f"run.out={run}")
    words = ["export", run, "--to", "gpt2", "--dtype", dtype, "--shard-size", shard]
    done = CliRunner().invoke(commands, [*map(str, words)])
    assert done.exit_code == 0, done.output
    again = [one for one in settings if not one.startswith(("layout", "replication"))]
    inputs, targets = rows(8)
    config = configured(*FLAT, *again, f"run.init_from={run}")
    ((found, _, _),) = run_ranks(1, computed, config, inputs, targets)
    theirs = logits(loaded(run / "gpt2", compute), inputs[:1])[0]
    if dtype in NEAR:
        assert near(found, theirs, dtype)
    assert np.abs(found - theirs).max() <= 2e-2 * np.abs(theirs).max()
    written = json.loads((run / "gpt2" / "config.json").read_text())
    assert written["tie_word_embeddings"] == config.model.tied


@pytest.mark.parametrize(("kind", "family"), [("gpt", "gpt2"), ("bert", "bert")])
def test_autotokenizer_gives_the_bytes_of_text(kind, family, tmp_path):
    from transformers import AutoTokenizer, BertForMaskedLM, pipeline

    small = [f"model.kind={kind}", "model.layers=1", "model.width=8"]
    trained(1, *small, f"run.out={tmp_path / 'run'}")
    words = ["export", str(tmp_path / "run"), "--to", family, "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(commands, words).exit_code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "".join(map(chr, range(1, 600))) + "  \n\n\t don't 😀 <|endoftext|>"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode()), clean_up_tokenization_spaces=False) == text
    assert configured(*FLAT, f"run.init_from={tmp_path / 'out'}").data.tokenizer == ""
    if kind == "bert":
        found = pipeline("fill-mask", model=str(tmp_path / "out"), top_k=257)("a [MASK]b")
        model = BertForMaskedLM.from_pretrained(tmp_path / "out").eval()
        right = output(model, np.array([[*b"a ", 256, *b"b"]]))[0, 2].softmax(0)
        scores = [one["score"] for one in sorted(found, key=lambda one: one["token"])]
        assert np.abs(right.detach().numpy() - scores).max() <= 1e-6


def test_a_fine_tune_of_four_commands_goes_through(tmp_path):
    """data prepare with the model's tokenizer, train from the folder, export, load."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    text = " ".join(f"word{n % 17} and {n % 5}." for n in range(900))
    (tmp_path / "book.txt").write_text(text)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], 280, special_tokens=["<|endoftext|>"])
    ends = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
    theirs = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **ends)
    theirs.save_pretrained(tmp_path / "gpt2")
    made(vocab_size=len(theirs)).save_pretrained(tmp_path / "gpt2")

    prepared = [
        "data",
        "prepare",
        "book.txt",
        "--tokenizer",
        "gpt2/tokenizer.json",
        "--out",
        "tokens",
    ]
    export = ["export", "run", "--to", "gpt2", "--out", "new"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert CliRunner().invoke(commands, prepared).exit_code == 0
        data = "data.source=tokens:tokens/train.bin"
        trained(2, data, "run.init_from=gpt2", "run.out=run")
        done = CliRunner().invoke(commands, export)
        assert done.exit_code == 0, done.output
    new = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert new(text)["input_ids"] == theirs(text)["input_ids"]
    assert new.eos_token == "<|endoftext|>"
    tokens = np.array([new(text)["input_ids"][:16]])
    assert logits(loaded(tmp_path / "new"), tokens).shape == (1, 16, len(theirs))
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert sorted(first["init_from"]["sha256"]) == ["config.json", "model.safetensors"]
