"""Tokenizers: any text decodes again, whole and token by token; special names in text are text."""

import json
import random

import numpy as np
import pytest

from mpitrain.data.documents import Form
from mpitrain.data.prepare import Options, prepare, processes
from mpitrain.data.tokenizer import ByteTokenizer, open_tokenizer, train_tokenizer
from mpitrain.errors import DataError

TEXTS = ["The cat sat. " * 50, "größer 😀\r\n\n  x\x00y", "<|endoftext|>", "", "日本語 " * 3]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return ByteTokenizer()
    pytest.importorskip("tokenizers")
    return train_tokenizer(TEXTS[:2], 300, tmp_path_factory.mktemp("t") / "tokenizer.json")


def random_texts():
    rng = random.Random(0)
    for _ in range(60):
        yield "".join(
            chr(rng.choice([rng.randrange(128), rng.randrange(0xD800)])) for _ in range(40)
        )


def test_any_text_decodes_to_itself(tokenizer):
    for text in (*TEXTS, *random_texts()):
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.int64 and tokens.ndim == 1
        assert tokenizer.decode(tokens.tolist()).decode() == text
        assert not len(tokens) or tokens.max() < tokenizer.vocabulary
        assert tokenizer.separator not in tokens


def test_a_stream_of_tokens_is_the_text_after_its_prompt(tokenizer):
    for text in (*TEXTS, *random_texts()):
        tokens = tokenizer.encode(text).tolist()
        for cut in (0, 1, len(tokens) // 2):
            shown = list(tokenizer.stream(tokens[cut:], tokens[:cut]))
            try:
                before = tokenizer.decode(tokens[:cut]).decode()
            except UnicodeDecodeError:
                continue
            if not before.endswith("\ufffd"):
                assert (before.encode() + b"".join(shown)).decode() == text


def test_half_a_character_is_text_in_the_end(tokenizer):
    tokens = tokenizer.encode("語").tolist()[:1]
    assert b"".join(tokenizer.stream(tokens, [])) in ("\ufffd".encode(), "語".encode()[:1])


def test_its_file_makes_the_same_tokenizer(tokenizer):
    again = open_tokenizer(tokenizer.data, "tokenizer.json")
    assert (again.data, again.vocabulary, again.separator) == (
        tokenizer.data,
        tokenizer.vocabulary,
        tokenizer.separator,
    )
    for encode in (again.encode, again.encode_marked):
        with pytest.raises(DataError, match="Unicode"):
            encode("a\udcff")


def test_a_bpe_tokenizer_has_every_byte_and_an_end_of_text(tmp_path):
    pytest.importorskip("tokenizers")
    found = train_tokenizer(["aaab" * 90], 258, tmp_path / "t.json")
    assert found.vocabulary == 258 and found.named("<|endoftext|>") == found.separator == 0
    with pytest.raises(DataError):
        train_tokenizer(["a"], 400, tmp_path / "u.json")
    assert not (tmp_path / "u.json").exists()


def test_limits_of_a_tokenizer_file_do_not_cut_documents(tmp_path):
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer

    found = train_tokenizer(["aaab" * 90], 258, tmp_path / "t.json")
    inner = Tokenizer.from_str(found.data.decode())
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    limited = open_tokenizer(inner.to_str().encode(), "t")
    assert limited.encode("b" * 100).tolist() == found.encode("b" * 100).tolist()


def test_prepared_tokens_decode_to_the_documents(tmp_path):
    pytest.importorskip("tokenizers")
    texts = [text for text in (*TEXTS, *random_texts()) if text]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    found = train_tokenizer(texts, 320, tmp_path / "tokenizer.json")
    options = Options([tmp_path / "in.jsonl"], found, 0, Form(0, 0, "text", ""))
    facts = prepare(options, tmp_path, processes(1))
    tokens = np.fromfile(tmp_path / "train.bin", "<u2")
    ends = np.flatnonzero(tokens == 0)
    documents = np.split(tokens, ends + 1)[:-1]
    assert [found.decode(one[:-1].tolist()).decode() for one in documents] == texts
    assert facts.files["train.bin"].bytes == sum(len(text.encode()) for text in texts)
