"""Damaged or foreign folders: each is refused by one clear message.

Damages of JSON and of headers are those of tests/unit/readers, and some of each are here.
"""

import json
import os
import shutil

import numpy as np
import pytest

from mpitrain.errors import MpitrainError
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.training import configured
from tests.unit.formats.gpt2_folder import CONFIGURATION, safetensors, sharded, tensors, written

TINY = ["batch.size=2", "device.kind=cpu"]
SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
FIRST = "transformer.h.0.attn.c_attn.weight"
MODEL, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


def started(folder):
    """Build a run from a folder, on one rank."""
    config = configured(*TINY, f"run.init_from={folder}")
    run_ranks(1, lambda own: build(own, config).close())


def damages():
    """Yield (name, function that damages a folder, names of which the message must contain one)."""
    for key in ("model_type", *SIZES):
        yield f"no {key}", edited(lambda found, key=key: found.pop(key)), key
    for key in SIZES:
        for value in (0, -1, 1.5, "8", True, None, [8], 1 << 40):
            yield f"{key} {value}", changed(key, value), key
    for key, value in (
        ("n_layer", 3),
        ("n_layer", 2**31 - 1),
        ("n_embd", 16),
        ("n_positions", 13),
        ("vocab_size", 255),
        ("n_head", 3),
        ("n_inner", 16),
        ("n_inner", -8),
        ("tie_word_embeddings", False),
        ("tie_word_embeddings", "yes"),
        ("layer_norm_epsilon", 0),
        ("layer_norm_epsilon", "tiny"),
        ("layer_norm_epsilon", 1e99),
        ("activation_function", "relu"),
        ("activation_function", "gelu"),
        ("activation_function", ["gelu_new"]),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("reorder_and_upcast_attn", True),
        ("add_cross_attention", True),
        ("quantization_config", {"bits": 4}),
        ("resid_pdrop", 2.0),
    ):
        yield f"{key} {value}", changed(key, value), "tensor|shape|head|" + key
    for kind in ("roberta", "qwen4", "gpt_neo", "opt", "t5", "", "GPT2"):
        yield f"model_type {kind}", changed("model_type", kind), "model_type"
    for data in (b"", b"{", b"[]"):
        yield f"config.json {data}", replaced(CONFIG, data), CONFIG
    for file in (CONFIG, MODEL):
        yield f"{file} missing", lambda folder, file=file: (folder / file).unlink(), file
        yield f"{file} a directory", as_directory(file), file
        yield f"{file} a pipe", as_pipe(file), "regular"
    for pickle in ("pytorch_model.bin", "model.ckpt", "tf_model.h5", "flax_model.msgpack"):
        yield pickle, moved(MODEL, pickle), pickle
    for length in (0, 9, -1):
        yield f"cut at {length}", cut(length), MODEL
    yield "longer", lambda folder: append(folder / MODEL, b"xx"), MODEL
    for name in (
        "transformer.wte.weight",
        "transformer.ln_f.bias",
        "transformer.h.1.mlp.c_fc.bias",
    ):
        yield f"without {name}", rewritten(lambda found, name=name: found.pop(name)), name[12:]
    for dtype in ("<i4", "|u1"):
        yield f"dtype {dtype}", rewritten(retyped(dtype)), "dtype"
    yield "transposed", rewritten(lambda found: found.update({FIRST: found[FIRST].T.copy()})), FIRST
    yield "flat", rewritten(lambda found: found.update({FIRST: found[FIRST].ravel()})), FIRST
    for value in (np.nan, np.inf, -np.inf):
        yield f"value {value}", rewritten(poisoned(value)), "finite"
    for name in (
        "score.weight",
        "transformer.h.2.ln_1.bias",
        "transformer.h.0.crossattention.bias",
    ):
        extra = {name: np.zeros(3, np.float32)}
        yield f"extra {name}", rewritten(lambda found, extra=extra: found.update(extra)), name
    twice = {"wte.weight": np.zeros(3, np.float32)}
    yield "two prefixes", rewritten(lambda found: found.update(twice)), "prefix"


def damages_of_shards():
    """Yield the same for a folder with several files and an index."""
    yield "shard missing", lambda folder: (folder / SHARD).unlink(), SHARD
    yield "shard a directory", as_directory(SHARD), SHARD
    yield "shard empty", replaced(SHARD, b""), SHARD
    yield "shards swapped", swapped, "tensor"
    yield "index a directory", as_directory(INDEX), INDEX
    yield "index empty", replaced(INDEX, b""), INDEX
    yield "index a list", replaced(INDEX, b"[]"), INDEX
    yield "index of numbers", replaced(INDEX, b'{"weight_map": {"a": 1}}'), INDEX
    yield "index of nothing", replaced(INDEX, b'{"weight_map": {}}'), "tensor"
    yield "index names a shard outside", outside, f"../{SHARD}"
    for place in ("/etc/passwd", "config.json", "", "no.safetensors"):
        yield f"index names {place}", indexed(FIRST, place), f"{place or INDEX}|{FIRST}"
    yield "tensor not in its file", indexed(FIRST, "model-00001-of-00003.safetensors"), FIRST
    yield "tensor in no file", indexed("transformer.ghost", SHARD), "ghost"
    yield "tensor unlisted", indexed(FIRST, None), FIRST


def edited(edit):
    def damage(folder):
        found = dict(CONFIGURATION)
        edit(found)
        (folder / CONFIG).write_text(json.dumps(found))

    return damage


def changed(key, value):
    return edited(lambda found: found.update({key: value}))


def replaced(file, data):
    return lambda folder: (folder / file).write_bytes(data)


def outside(folder):
    (folder / SHARD).rename(folder.parent / SHARD)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(SHARD, f"../{SHARD}"))


def as_directory(file):
    def damage(folder):
        (folder / file).unlink()
        (folder / file).mkdir()

    return damage


def as_pipe(file):
    def damage(folder):
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return damage


def moved(file, name):
    return lambda folder: (folder / file).rename(folder / name)


def cut(length):
    return lambda folder: replaced(MODEL, (folder / MODEL).read_bytes()[:length])(folder)


def append(path, data):
    path.write_bytes(path.read_bytes() + data)


def rewritten(edit):
    def damage(folder):
        found = tensors()
        edit(found)
        (folder / MODEL).write_bytes(safetensors(found))

    return damage


def retyped(dtype):
    return lambda found: found.update({FIRST: found[FIRST].astype(dtype)})


def poisoned(value):
    def edit(found):
        found[FIRST][3, 5] = value

    return edit


def swapped(folder):
    first, second = folder / "model-00001-of-00003.safetensors", folder / SHARD
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def indexed(name, file):
    def damage(folder):
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= {name: file}
        if file is None:
            del index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))

    return damage


@pytest.fixture(scope="module", params=[written, sharded], ids=lambda make: make.__name__)
def sound(request, tmp_path_factory):
    """A folder without damage, and its damages."""
    path = request.param(tmp_path_factory.mktemp("sound") / "gpt2")
    return path, [*damages()] if request.param is written else [*damages_of_shards()]


def test_a_sound_folder_is_read(sound):
    started(sound[0])


def test_damaged_folders_are_refused_by_one_message(sound, tmp_path):
    path, every = sound
    for number, (name, damage, named) in enumerate(every):
        folder = tmp_path / str(number) / "gpt2"
        shutil.copytree(path, folder)
        damage(folder)
        with pytest.raises(MpitrainError) as caught:
            started(folder)
        said = caught.value.law
        assert caught.value.exit_code == 2, name
        assert caught.value.way_out, name
        assert str(folder) in said or MODEL in said or CONFIG in said, (name, said)
        assert any(part in said for part in named.split("|")), (name, said)
        assert len(said) < 600 and said.isprintable(), (name, said)
