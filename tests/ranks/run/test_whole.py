"""A run as one object of Python: `mpitrain.train`, `mpitrain.load`, and what they return."""

import doctest
import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest

import mpitrain
from mpitrain.run import whole
from mpitrain.run.export import export
from mpitrain.transport.threads import run_ranks
from tests.runs import TEXT

SMALL = {
    "run": {"steps": 4, "eval_every": 2, "log_every": 1},
    "run.out": "run",
    "data.source": "text:book.txt",
    "model": {"layers": 1, "width": 16, "heads": 2, "context": 16},
    "batch.size": 4,
    "device.kind": "cpu",
}


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("".join(TEXT))


def test_a_run_of_two_ranks_writes_and_is_evaluated_by_one(book):
    settings = SMALL | {"layout": {"tp": 2}}

    def made(transport):
        run = mpitrain.train(settings, watchers=(), transport=transport)
        return run.generate("the", tokens=8), run.evaluate()

    (text, numbers), (of_other, _) = run_ranks(2, made)
    assert text == of_other and len(text.encode()) >= 8

    def opened(transport):
        run = mpitrain.load("run", transport=transport)
        before, numbers = run.generate("the", tokens=8, temperature=0), run.evaluate()
        assert run.generate("the", tokens=8, temperature=0) == before
        return run, before, numbers

    [(run, likeliest, alone)] = run_ranks(1, opened)
    assert alone["loss"] == pytest.approx(numbers["loss"], rel=1e-5)
    metrics = run.metrics
    assert metrics["step"].tolist() == [1, 2, 3, 4] and metrics["step"].dtype == np.int64
    assert metrics["val_loss"][3] == pytest.approx(alone["loss"], rel=1e-5)
    assert math.isnan(metrics["val_loss"][0]) and len(metrics["lr"]) == 4
    assert "validation loss" in repr(run) and likeliest


def test_settings_and_folders_that_are_wrong_are_named(book, tmp_path):
    def train(settings, **more):
        run_ranks(1, lambda transport: mpitrain.train(settings, transport=transport, **more))

    for settings, named in (
        ([("run.steps", 3)], "got a list"),
        ({"run": {"stepz": 3}}, "run.steps"),
        ({"run.stepz": 3}, "did you mean run.steps?"),
    ):
        with pytest.raises(mpitrain.MpitrainError, match=named):
            train(settings)
    train(SMALL, watchers=())
    with pytest.raises(mpitrain.MpitrainError, match="already holds a run"):
        train(SMALL)
    for folder, named in (("none", "no folder none"), (tmp_path, "neither a run nor a model")):
        with pytest.raises(mpitrain.MpitrainError, match=named):
            mpitrain.load(folder)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.toml").write_bytes((tmp_path / "run/config.toml").read_bytes())
    with pytest.raises(mpitrain.MpitrainError, match="checkpoint"):
        run_ranks(1, lambda transport: mpitrain.load("begun", transport=transport).generate("a"))

    def without_data(transport):
        run = mpitrain.load("run", transport=transport)
        text = run.generate("a", tokens=4, temperature=0)
        (tmp_path / "book.txt").unlink()
        with pytest.raises(mpitrain.MpitrainError, match=r"book\.txt"):
            run.evaluate()
        assert run.generate("a", tokens=4, temperature=0) == text

    run_ranks(1, without_data)


def test_the_folder_of_a_chat_run_on_bytes_answers_as_the_run_does(book, tmp_path):
    said = [{"instruction": "say", "input": "", "output": "red"}] * 8
    (tmp_path / "said.json").write_text(json.dumps(said))
    keys = {"model.kind": "llama", "model.context": 192, "data.source": "jsonl:said.json"}
    settings = {name: value for name, value in SMALL.items() if name != "model"} | keys
    settings |= {"model.layers": 1, "model.width": 16, "model.heads": 2}

    def answers(transport):
        mpitrain.train(settings, watchers=(), transport=transport)
        folder = export(Path("run"), "", None, "float32", 10**9, []).folder
        runs = [mpitrain.load(each, transport=transport) for each in ("run", folder)]
        return [run.generate("say", tokens=8, chat=True) for run in runs]

    ((own, of_folder),) = run_ranks(1, answers)
    assert own == of_folder != ""


def test_the_examples_of_the_docstrings_run(book, monkeypatch):
    def run(transport):
        monkeypatch.setattr(whole, "_all_ranks", lambda: transport)
        parser, names = doctest.DocTestParser(), {"mpitrain": mpitrain}
        for function in (mpitrain.train, mpitrain.load):
            for example in parser.get_examples(inspect.getdoc(function)):
                exec(example.source.replace("200", "2"), names)
        return names["run"].folder.name

    assert run_ranks(1, run) == ["a"]
