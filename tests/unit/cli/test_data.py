"""`mpitrain data`: from text to tokens and back, and one error for each wrong value."""

import json
import shlex

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.errors import MpitrainError


def called(*words):
    return CliRunner().invoke(commands, ["data", *map(str, words)])


def test_text_becomes_tokens_that_show_prints_again(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "in.txt").write_text("Once upon a time.\n" * 40)
    tokenizer = tmp_path / "tokenizer.json"
    done = called("train-tokenizer", tmp_path / "in.txt", "--vocab", 280, "--out", tokenizer)
    assert done.exit_code == 0
    words = ("prepare", tmp_path / "in.txt", "--tokenizer", tokenizer, "--out", tmp_path / "tokens")
    done = called(*words)
    assert done.exit_code == 0
    train = shlex.split(done.output.splitlines()[-1])[-1].removeprefix("tokens:")
    meta = json.loads((tmp_path / "tokens/meta.json").read_text())
    assert meta["files"]["train.bin"]["bytes"] + meta["files"]["val.bin"]["bytes"] == 720
    shown = called("show", train, "--rows", 2, "--tokens", 30)
    assert shown.exit_code == 0
    assert shown.output.count("--- token") == 2 and "upon a time" in shown.output
    assert called(*words).output == done.output


def test_bare_tokens_are_shown_as_bytes_or_numbers(tmp_path):
    np.frombuffer(b"abc\x1b[1m" * 9, "u1").astype("<u2").tofile(tmp_path / "bytes.bin")
    np.arange(900, 960, dtype="<u2").tofile(tmp_path / "numbers.bin")
    assert r"abc\x1b[1m" in called("show", tmp_path / "bytes.bin", "--rows", 1).output
    assert "900 901" in called("show", tmp_path / "numbers.bin", "--rows", 1).output


@pytest.mark.parametrize(
    "words",
    [
        "prepare missing.txt --tokenizer bytes --out out",
        "prepare in.txt --tokenizer missing.json --out out",
        "prepare in.txt --tokenizer in.txt --out out",
        "prepare in.txt --tokenizer . --out out",
        "prepare in.txt --tokenizer bytes --out in.txt",
        "prepare in.txt --tokenizer bytes --out out --separator 256",
        "prepare in.txt --tokenizer bytes --out out --separator <eos>",
        "prepare in.txt --tokenizer bytes --out out --validation-fraction 1",
        "prepare in.txt --tokenizer bytes --out out --validation-fraction nan",
        "prepare in.txt --tokenizer bytes --out out --workers 0",
        "prepare --tokenizer bytes --out out",
        "prepare in.txt --out out",
        "train-tokenizer in.txt --vocab 257 --out t.json",
        "train-tokenizer in.txt --vocab 300 --out missing/t.json",
        "train-tokenizer missing.txt --vocab 300 --out t.json",
        "show missing.bin",
        "show in.txt",
        "show odd.bin",
        "show in.bin --rows 0",
        "show in.bin --tokenizer in.txt",
    ],
)
def test_a_wrong_value_is_one_error_with_code_2(words, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("abc\n" * 101 + "d")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.arange(9, dtype="<u2").tofile(tmp_path / "in.bin")
    done = called(*words.split())
    code = done.exception.exit_code if isinstance(done.exception, MpitrainError) else done.exit_code
    assert code == 2, (done.exception, done.output)
    assert not (tmp_path / "out/train.bin").exists()


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.data.tokenizer.find_spec", lambda name: None)
    (tmp_path / "in.json").write_text("{}")
    for words in (
        ("prepare", tmp_path / "in.json", "--tokenizer", tmp_path / "in.json", "--out", tmp_path),
        ("train-tokenizer", tmp_path / "in.json", "--vocab", 300, "--out", tmp_path / "t"),
    ):
        found = called(*words).exception
        assert isinstance(found, MpitrainError) and found.exit_code == 2
        assert "mpitrain[text]" in found.way_out
