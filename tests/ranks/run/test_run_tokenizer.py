"""A run keeps the tokenizer of its data, and knows its loss in bits per byte of text."""

import json
import math
import random
import shutil

import numpy as np
import pytest

from mpitrain.config import Data
from mpitrain.data import bits_per_byte, open_source, tokenizer_of
from mpitrain.data.documents import Form
from mpitrain.data.prepare import Options, prepare, processes
from mpitrain.data.source import Reading
from mpitrain.data.tokenizer import BYTES_FILE, ByteTokenizer, train_tokenizer
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.run.generate import tokenizer_of_run
from tests.runs import TINY, go, records

WORDS = [f"größer{chr(97 + n)}{chr(99 + n)} {n * n}" for n in range(20)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with a text and its tokens, by bytes and by two BPE tokenizers."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    (folder / "in.txt").write_text("".join(f"{rng.choice(WORDS)} \n" for _ in range(900)))
    for name, vocabulary in (("bytes", 0), ("bpe", 300), ("other", 300)):
        texts = [(folder / "in.txt").read_text()]
        texts = [texts[0][::-1]] if name == "other" else texts
        found = (
            train_tokenizer(texts, vocabulary, folder / f"{name}.json")
            if vocabulary
            else ByteTokenizer()
        )
        options = Options([folder / "in.txt"], found, found.separator, Form(0.2, 0, "text", ""))
        prepare(options, folder / name, processes(1))
    return folder


def name_of(corpus, name):
    return f"tokens:{corpus}/{name}/train.bin"


def trained(tmp_path, source, resume="no", steps=2):
    out = tmp_path / "run"
    go(1, [*TINY, f"run.out={out}", f"run.steps={steps}", f"data.source={source}"], resume)
    return out


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_moved_run_has_its_tokenizer_without_its_data(corpus, tmp_path, name):
    (data := tmp_path / "data").mkdir()
    for path in (corpus / name).iterdir():
        shutil.copy(path, data)
    out = trained(tmp_path, f"tokens:{data}/train.bin")
    original = (data / "tokenizer.json").read_bytes()
    shutil.rmtree(data)
    moved = out.rename(tmp_path / "moved")
    found = tokenizer_of_run(moved, Data(source=f"tokens:{data}/train.bin"))
    assert found.data == original == (moved / "tokenizer.json").read_bytes()
    assert found.decode(found.encode("größer7").tolist()).decode() == "größer7"


def test_a_run_on_text_has_bytes_and_one_on_bare_tokens_has_none(corpus, tmp_path):
    out = trained(tmp_path, f"text:{corpus}/in.txt")
    assert not (out / "tokenizer.json").exists()
    assert tokenizer_of_run(out, Data(source="text:x")).data == BYTES_FILE
    assert tokenizer_of_run(out, Data(source="tokens:x")) is None
    np.arange(500, dtype="<u2").tofile(tmp_path / "bare.bin")
    assert tokenizer_of([f"tokens:{tmp_path}/bare.bin"]) is None


def test_a_resumed_run_refuses_another_tokenizer(corpus, tmp_path):
    out = trained(tmp_path, name_of(corpus, "bpe"))
    with pytest.raises(ConfigError):
        trained(tmp_path, f"{name_of(corpus, 'other')}", resume="yes", steps=3)
    before = (out / "tokenizer.json").read_bytes()
    shutil.copy(corpus / "other/tokenizer.json", out)
    with pytest.raises(
        CheckpointError, match=r"belongs to .*run/tokenizer.json, which has another"
    ):
        trained(tmp_path, name_of(corpus, "other"), resume="yes", steps=3)
    (out / "tokenizer.json").write_bytes(before)
    trained(tmp_path, name_of(corpus, "bpe"), resume="yes", steps=3)
    assert (out / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize("name", ["text", "bytes", "bpe"])
def test_bits_per_byte_are_nats_of_all_tokens_over_bytes_of_the_text(corpus, tmp_path, name):
    source = f"text:{corpus}/in.txt" if name == "text" else name_of(corpus, name)
    trained(tmp_path, source)
    (line,) = [record for record in records(tmp_path) if "val_loss" in record]
    ratio = 1.0
    if name == "bpe":
        text = (corpus / "in.txt").read_bytes()
        held_out = np.fromfile(corpus / name / "val.bin", "<u2")
        cut = json.loads((corpus / name / "meta.json").read_text())["files"]["train.bin"]["bytes"]
        ratio = len(held_out) / len(text[cut:])
        assert ratio < 0.5
    bits = line["val_bits_per_byte"]
    assert bits == pytest.approx(line["val_loss"] * ratio / math.log(2), rel=1e-12)


def test_a_source_without_text_has_no_bits_per_byte(corpus, tmp_path):
    np.tile(np.arange(50, dtype="<u2"), 20).tofile(tmp_path / "bare.bin")
    assert bits_per_byte(open_source(f"tokens:{tmp_path}/bare.bin", 8, "float32"), 1.0) is None
    for path in (corpus / "bpe").iterdir():
        shutil.copy(path, tmp_path)
    with (tmp_path / "val.bin").open("ab") as file:
        file.write(b"\0\0")  # which meta.json does not count
    source = open_source(
        f"tokens:{tmp_path}/train.bin", 8, "float32", validation=f"tokens:{tmp_path}/val.bin"
    )
    assert bits_per_byte(source, 1.0) is None


def test_the_bits_of_a_mixture_are_over_the_bytes_of_its_held_out_rows(corpus):
    names = [name_of(corpus, "bpe"), name_of(corpus, "bpe").replace("/train", "/./train")]
    one = open_source(names[0], 8, "float32")
    mixed = open_source("mixture", 8, "float32", reading=Reading(mixture=dict.fromkeys(names, 1.0)))
    assert bits_per_byte(mixed, 2.0) == pytest.approx(bits_per_byte(one, 2.0), rel=1e-12)
    text = {f"text:{corpus}/in.txt": 1.0, "pydocs": 2.0}
    mixed = open_source("mixture", 8, "float32", reading=Reading(mixture=text))
    assert bits_per_byte(mixed, math.log(2)) == pytest.approx(1.0)


def test_tokens_of_different_tokenizers_are_refused(corpus):
    both = {name_of(corpus, name): 1.0 for name in ("bpe", "other")}
    with pytest.raises(DataError):
        open_source("mixture", 8, "float32", reading=Reading(mixture=both))
    with pytest.raises(DataError):
        open_source(
            name_of(corpus, "bpe"), 8, "float32", validation=f"tokens:{corpus}/other/val.bin"
        )


def test_the_vocabulary_is_that_of_the_tokenizer(corpus):
    assert open_source(name_of(corpus, "bytes"), 8, "float32").inputs == 256
    assert open_source(name_of(corpus, "bpe"), 8, "float32").inputs == 300


@pytest.mark.parametrize("name", ["tokenizer.json", "meta.json"])
def test_a_damaged_tokenizer_or_meta_is_one_error(corpus, tmp_path, name):
    for path in (corpus / "bpe").iterdir():
        shutil.copy(path, tmp_path)
    data = (tmp_path / name).read_bytes()
    for damage in (data[:-3], data.replace(b'"format": "mp', b'"format":, "mp'), b"", None):
        if damage == data:
            continue
        (tmp_path / name).unlink()
        if damage is not None:
            (tmp_path / name).write_bytes(damage)
        elif name == "meta.json":
            return  # then these are bare tokens
        with pytest.raises(DataError, match=name):
            open_source(f"tokens:{tmp_path}/train.bin", 8, "float32")
        (tmp_path / name).write_bytes(data)
