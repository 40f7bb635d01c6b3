"""A BERT of transformers and ours are one function: logits, gradients, 20 steps, and folders in and out."""

import copy
import json
import shutil

import numpy as np
import pytest

from mpitrain.data import without_padding
from mpitrain.data.labelled import row_of
from mpitrain.data.tokenizer import read_tokenizer
from mpitrain.errors import MpitrainError
from mpitrain.formats.bert import BERT
from mpitrain.run.build import build, open_run
from mpitrain.run.build import configured as from_run
from mpitrain.run.export import export
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.huggingface.models import loss_and_gradients, loss_of, named, output
from tests.training import configured, held, stepped

NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(32))]
SHAPE = {
    "vocab_size": len(NAMES),
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
    "id2label": {0: "bad", 1: "mixed", 2: "good"},
    "pad_token_id": None,  # else the embedding of token 0 gets no gradient
}
FLAT = ["run.steps=20", "batch.size=8", "device.kind=cpu", "run.eval_every=-1"]
EXACT = ["precision.compute=float64", "batch.size=12", "device.kind=cpu", "run.eval_every=-1"]
EXACT += ["optimizer.name=sgd", "optimizer.clip=0", "optimizer.warmup=0"]
EXACT += ["optimizer.weight_decay=0", "optimizer.schedule=constant"]
"""Settings of SGD in float64: an update is the rate times the gradient."""
PIPE = ["batch.micro_batches=4", "layout.pp=2"]
LAYOUTS = {
    "dp 3": (3, []),
    "tp 2, recomputed": (2, ["layout.tp=2", "memory.recompute=unit", "batch.micro_batches=3"]),
    "naive": (2, [*PIPE, "pipeline.schedule=naive"]),
    "gpipe": (2, [*PIPE, "pipeline.schedule=gpipe", "memory.recompute=attention"]),
    "interleaved": (2, [*PIPE, "pipeline.schedule=interleaved"]),
    "zero-bubble": (3, [*PIPE, "layout.pp=3", "pipeline.schedule=zero-bubble"]),
    "dp x tp x pp": (8, [*PIPE, "layout.tp=2", "batch.micro_batches=2"]),
    "ZeRO-1": (2, ["replication.zero=1", "batch.micro_batches=3"]),
    "ZeRO-2": (2, ["replication.zero=2", "batch.micro_batches=2"]),
    "ZeRO-3": (3, ["replication.zero=3", "memory.recompute=unit"]),
    "server": (3, ["replication.mode=server"]),
    "master": (2, ["replication.mode=master"]),
}
KINDS = {"masked": "BertForMaskedLM", "classes": "BertForSequenceClassification"}


def words(generator):
    return " ".join(f"w{n}" for n in generator.integers(32, size=generator.integers(1, 12)))


@pytest.fixture(scope="module", params=KINDS)
def given(request, tmp_path_factory):
    """A model of transformers, its folder, and settings of the data."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder, generator = tmp_path_factory.mktemp(request.param), np.random.default_rng(0)
    torch.manual_seed(0)
    model = getattr(transformers, KINDS[request.param])(transformers.BertConfig(**SHAPE)).double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(2).add_(0.01 * torch.randn_like(tensor))
    model.eval().save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordPiece({name: n for n, name in enumerate(NAMES)}, unk_token=NAMES[1])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(NAMES[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    if request.param == "masked":
        generator.integers(5, 36, size=4000).astype(np.uint16).tofile(folder / "train.bin")
        return model, folder, [f"data.source=tokens:{folder / 'train.bin'}"]
    with (folder / "train.jsonl").open("w") as file:
        for number in range(60):
            pair = {"text_pair": words(generator)} if number % 2 else {}
            label = SHAPE["id2label"][int(generator.integers(3))]
            line = {"text": words(generator), "label": label, **pair}
            file.write(json.dumps(line) + "\n")
    return model, folder, [f"data.source=jsonl:{folder / 'train.jsonl'}"]


def first_step(transport, *settings):
    """A batch, its logits here or None, its loss, and {name: (description, gradient)} of what is here.

    SGD subtracts the gradient, at a rate at which the rounding of parameters says nothing.
    """
    trainer, source, _ = build(transport, configured(*EXACT, "optimizer.lr=1000", *settings))
    batch = source.batch(trainer.config.run.seed, 0, 12, range(12))
    logits = None if trainer.grid.is_server else trainer.logits(batch[0])
    logits = None if logits is None else np.array(logits)
    trainer.sync_parameters()
    before = {name: values.copy() for name, (_, values) in held(trainer).items()}
    (result,) = stepped(trainer, source, range(1))
    trainer.sync_parameters()
    gradients = {
        name: (described, (before[name] - values) / 1000)
        for name, (described, values) in held(trainer).items()
    }
    return batch, logits, result.loss, gradients


@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_in_every_layout_equals_that_of_transformers(layout, given):
    model, folder, data = given
    settings = [f"run.init_from={folder}", *data]
    ranks, more = LAYOUTS[layout]
    found = run_ranks(ranks, first_step, *settings, *more)
    inputs, targets = found[0][0]
    keys = configured(*EXACT, *settings).model
    loss, gradients = loss_and_gradients(model, inputs, targets, BERT, keys)
    truth, compared = output(model, inputs).detach().numpy(), set()
    assert any(logits is not None for _, logits, _, _ in found)
    for _, logits, own_loss, parts in found:
        assert logits is None or np.abs(logits - truth).max() <= 1e-12 * np.abs(truth).max()
        assert abs(own_loss - loss) <= 1e-12 * loss
        for name, (described, gradient) in parts.items():
            compared.add(name)
            difference = np.abs(gradient - described.part_of(gradients[name])).max(initial=0)
            assert difference <= 1e-12 * np.abs(gradients[name]).max(), name
    assert compared == gradients.keys()


def twenty_steps(transport, *settings):
    """20 batches, losses and gradient norms of their steps, and the final tensors."""
    trainer, source, _ = build(transport, configured(*settings, "memory.limit_gb=1e6"))
    batches = [source.batch(0, step, 12, range(12)) for step in range(20)]
    results = stepped(trainer, source, range(20))
    assert trainer.job.counts.peak == trainer.pipe.peak_bytes
    return batches, [(one.loss, one.grad_norm) for one in results], trainer.tensors()


def test_20_steps_are_those_of_transformers(given):
    import torch

    model, folder, data = given
    settings = [*EXACT, "optimizer.lr=0.1", f"run.init_from={folder}", *data]
    ((batches, steps, tensors),) = run_ranks(1, twenty_steps, *settings)
    model, results = copy.deepcopy(model), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches:
        sgd.zero_grad()
        loss = loss_of(output(model, inputs), targets)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append((loss.item(), sum(float((g**2).sum()) for g in gradients) ** 0.5))
        sgd.step()
    assert np.abs(np.array(steps) - results).max() <= 1e-9
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = named(state, BERT, configured(*settings).model)
    assert expected.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.abs(tensor - expected[name]).max() <= 1e-9, name


def test_a_round_trip(given, tmp_path):
    import torch
    import transformers

    model, folder, data = given
    run = [*FLAT, *data, f"run.init_from={folder}", f"run.out={tmp_path / 'run'}", "run.steps=1"]
    config = configured(*run, "optimizer.lr=1e-12")
    run_ranks(1, lambda own: train(own, lambda: config, "no", lambda: False))
    export(tmp_path / "run", "bert", tmp_path / "back", "float32", 20_000, [])
    again = type(model).from_pretrained(tmp_path / "back", dtype="float32").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        difference = again(tokens).logits - model(tokens).logits
    assert float(difference.abs().max()) <= 1e-5
    if again.config.architectures != ["BertForMaskedLM"]:
        assert again.config.id2label == model.config.id2label
        assert again.config.label2id == {"bad": 0, "mixed": 1, "good": 2}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.mask_token_id == 4 and tokenizer.cls_token == "[CLS]"
    row = row_of(read_tokenizer(str(tmp_path / "back/tokenizer.json")), "w1 w2", "w3", 6)
    ids, _, types = without_padding(row[None])
    found = tokenizer("w1 w2", "w3")
    assert found["input_ids"] == ids[0].tolist() and found["token_type_ids"] == types[0].tolist()


@pytest.mark.parametrize("mask", ["[MASK]", "w3"])
def test_the_tokenizer_of_a_folder_says_which_raw_tokens_are_special(mask, given, tmp_path):
    model, folder, _ = given
    if model.config.architectures != ["BertForMaskedLM"]:
        return
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    shutil.copytree(folder, theirs)
    (theirs / "tokenizer_config.json").write_text(json.dumps({"mask_token": mask}))
    np.arange(4000, dtype=np.uint16).__mod__(37).tofile(tmp_path / "train.bin")
    settings = [*FLAT, f"data.source=tokens:{tmp_path}/train.bin", f"run.init_from={theirs}"]

    config = configured(*settings, f"run.out={run}", "run.steps=1")
    (job,) = run_ranks(1, lambda own: train(own, lambda: config, "no", lambda: False).job)
    number = NAMES.index(mask)

    def assert_hides(source):
        inputs, targets = map(
            np.concatenate,
            zip(*(source.batch(0, step, 8, range(8)) for step in range(9)), strict=True),
        )
        shown = inputs[(targets >= 0) & (inputs != targets)]
        assert np.mean(shown == number) > 0.8
        assert not np.isin(targets, [*range(5), number]).any()

    assert_hides(job.source)
    shutil.rmtree(theirs)  # A run that is opened again knows them without the folder.
    (job,) = run_ranks(1, lambda own: open_run(own, run, lambda: from_run(run, [])))
    assert_hides(job.source)


def test_raw_tokens_need_a_tokenizer_that_says_which_are_special(given, tmp_path):
    model, _, data = given
    if model.config.architectures != ["BertForMaskedLM"]:
        return
    model.save_pretrained(tmp_path)
    with pytest.raises(MpitrainError, match=r"mask token.*tokenizer\.json"):
        run_ranks(1, lambda own: build(own, configured(*FLAT, *data, f"run.init_from={tmp_path}")))


@pytest.mark.parametrize("tied", [True, False])
def test_the_bias_of_a_decoder_counts_in_both_ways(tied, given, tmp_path):
    import torch
    import transformers
    from safetensors.torch import load_file

    if given[0].config.architectures != ["BertForMaskedLM"]:
        return
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(**{**SHAPE, "tie_word_embeddings": tied})
    )
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(2).add_(0.01 * torch.randn_like(tensor))
        model.cls.predictions.decoder.bias.add_(torch.randn(len(NAMES)))
    model.eval().save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/tokenizer.json").write_bytes((given[1] / "tokenizer.json").read_bytes())
    run = [*FLAT, *given[2], f"run.init_from={tmp_path}/theirs", f"run.out={tmp_path / 'run'}"]
    config = configured(*run, "run.steps=1", "optimizer.lr=0.1")

    def computed(own):
        trainer, source, _ = build(own, config)
        inputs, _ = source.batch(0, 0, 8, range(8))
        return inputs, np.array(trainer.logits(inputs))

    ((inputs, logits),) = run_ranks(1, computed)
    assert np.abs(logits - output(model, inputs).detach().numpy()).max() <= 1e-4
    run_ranks(1, lambda own: train(own, lambda: config, "no", lambda: False))
    export(tmp_path / "run", "bert", tmp_path / "back", "float32", 20_000_000, [])
    again, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    bias = again.cls.predictions.decoder.bias.detach().numpy()
    tensors = load_file(tmp_path / "back/model.safetensors")
    for name in ("decoder.bias", "bias"):  # transformers 4 reads the second
        assert np.array_equal(tensors[f"cls.predictions.{name}"], bias)
    assert np.abs(bias - model.cls.predictions.decoder.bias.detach().numpy()).max() > 1e-3
    config = configured(*run[:-2], "run.steps=1", f"run.init_from={tmp_path}/back")
    ((_, logits),) = run_ranks(1, computed)
    assert np.abs(logits - output(again.eval(), inputs).detach().numpy()).max() <= 1e-4


def test_peft_computes_the_logits_of_an_exported_adapter(given, tmp_path):
    import torch
    from peft import PeftModel

    model, folder, data = given
    run = [*FLAT, *data, f"run.init_from={folder}", f"run.out={tmp_path / 'run'}", "run.steps=3"]
    config = configured(*run, "lora.rank=2", "lora.targets=query,c_fc", "optimizer.lr=0.1")
    run_ranks(1, lambda own: train(own, lambda: config, "no", lambda: False))
    export(tmp_path / "run", "peft", tmp_path / "adapter", "float32", 20_000, [])
    export(tmp_path / "run", "bert", tmp_path / "merged", "float32", 20_000, [], merge=True)
    base, merged = (
        type(model).from_pretrained(one, dtype="float32").eval()
        for one in (folder, tmp_path / "merged")
    )
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        plain, truth = base(tokens).logits, merged(tokens).logits
        found = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(tokens).logits
    assert float((found - truth).abs().max()) <= 1e-5 < float((plain - truth).abs().max())


def test_all_linear_is_what_it_is_in_peft(given, tmp_path):
    from peft import LoraConfig, get_peft_model

    model, folder, data = given
    if model.config.architectures != ["BertForMaskedLM"]:  # PEFT would save the classes, too.
        return
    theirs = type(model).from_pretrained(folder)
    adapters = LoraConfig(r=2, lora_alpha=2, target_modules="all-linear")
    get_peft_model(theirs, adapters).save_pretrained(tmp_path / "every")
    settings = [f"run.init_from={folder}", f"lora.init_from={tmp_path / 'every'}"]
    begun = configured(*FLAT, *data, *settings, "lora.targets=all-linear")
    run_ranks(1, lambda own: build(own, begun))  # An error if a layer lacks or has an adapter.


def test_the_head_that_a_folder_lacks_is_drawn_and_named(given, tmp_path, capsys):
    model, folder, _ = given
    if model.config.architectures != ["BertForMaskedLM"]:
        return
    (tmp_path / "t.jsonl").write_text('{"text": "w1 w2", "label": 1}\n{"text": "w3", "label": 0}\n')
    settings = [f"run.init_from={folder}", f"data.source=jsonl:{tmp_path / 't.jsonl'}"]

    def shape(transport):
        job = build(transport, configured(*FLAT, *settings, "batch.size=1"))
        return job.trainer.tensors()["head.classes.weight"].shape

    assert run_ranks(1, shape) == [(2, 24)]
    assert "lacks head.classes.bias, head.classes.weight, head.pooler" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", "relu"), ("type_vocab_size", 1), ("is_decoder", True)]
)
def test_a_folder_that_is_another_model_is_refused_by_name(key, value, given, tmp_path):
    config = json.loads((given[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(MpitrainError, match=key):
        configured(*FLAT, f"run.init_from={tmp_path}")
