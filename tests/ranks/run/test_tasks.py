"""Multiple-choice tasks: the log-likelihood of each choice, in every layout."""

import json
import math

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.data.tasks import Task
from mpitrain.data.tokenizer import ByteTokenizer, FileTokenizer
from mpitrain.errors import DataError, TrainingError
from mpitrain.run.build import build
from mpitrain.run.scoring import encoded_pair, requests_of, score, scores
from mpitrain.transport.threads import run_ranks

SETTINGS = [
    "model.layers=2",
    "model.width=16",
    "model.heads=4",
    "model.context=24",
    "batch.size=8",
    "precision.compute=float64",
    "run.seed=4",
]
TASKS = [
    Task(1, "The class", [" of", " that is longer", "es"], 0),
    Task(2, "a much longer context than the window of the model has ", ["room", "for"], 1),
    Task(3, "", ["x", "yz"], 1),
    Task(4, "one", ["1"], 0),
    Task(5, "é ", ["ü", "ab", "abc", "abcdefghijklmnopqrstuvw"], 2),
]


def found(transport, *settings):
    trainer, source, _ = build(transport, parse(with_settings({}, [*SETTINGS, *settings])))
    return score(trainer, TASKS, ByteTokenizer(), source.inputs)


def reference():
    """Log-likelihoods in plain NumPy from the logits of each window alone, without any batch."""

    def compute(transport):
        trainer, _, _ = build(transport, parse(with_settings({}, SETTINGS)))
        values = []
        for task in TASKS:
            values.append([])
            for choice in task.choices:
                before = task.context.rstrip()
                after = (task.context[len(before) :] + choice).encode()
                tokens = [*((before or "\n").encode() + after)][-25:]
                logits = np.asarray(trainer.logits(np.array([tokens[:-1]])))[0]
                log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                places = range(len(tokens) - 1 - len(after), len(tokens) - 1)
                values[-1].append(sum(log_p[at, tokens[at + 1]] for at in places))
        return values

    return run_ranks(1, compute)[0]


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (1, []),
        (1, ["memory.logit_chunks=3"]),
        (2, []),
        (3, []),
        (2, ["layout.tp=2"]),
        (2, ["layout.tp=2", "layout.sequence_parallel=true"]),
        (2, ["layout.cp=2", "memory.logit_chunks=3"]),
        (2, ["layout.pp=2"]),
        (4, ["layout.tp=2"]),
        (4, ["layout.tp=2", "layout.pp=2"]),
        (3, ["layout.pp=3", "pipeline.schedule=gpipe"]),
    ],
)
def test_log_likelihoods_equal_plain_numpy_in_every_layout(ranks, settings):
    wanted = reference()
    for own in run_ranks(ranks, found, *settings):
        for values, right in zip(own.log_likelihoods, wanted, strict=True):
            assert np.abs(np.subtract(values, right)).max() < 1e-9
        best = [float(np.argmax(v) == t.answer) for v, t in zip(wanted, TASKS, strict=True)]
        assert own.acc.mean == sum(best) / 5
        assert math.isclose(own.acc.stderr, np.std(best, ddof=1) / 5**0.5)


def test_acc_norm_divides_by_bytes_and_the_first_of_equals_wins():
    tasks = [Task(1, "", ["ab", "é", "abcd"], 1), Task(2, "", ["a", "b"], 0)]
    result = scores(tasks, [[-2.0, -3.0, -2.4], [-1.0, -1.0]])
    assert result.acc.mean == 0.5 and result.acc_norm.mean == 0.5, "abcd has -0.6 a byte"
    result = scores(tasks[:1], [[-2.0, -1.0, -2.4]])
    assert (result.acc.mean, result.acc.stderr, result.acc_norm.mean) == (1.0, None, 1.0)


def merging():
    """A tokenizer whose merges cross the border of words: "b c" is one token."""
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "c": 3, " ": 4, "b ": 5, "b c": 6}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["b", " "], ["b ", "c"]]}
    special = {"id": 0, "content": "<|endoftext|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {"version": "1.0", "added_tokens": [special | flags], "model": model}
    return FileTokenizer(json.dumps(content).encode(), "tokenizer.json")


@pytest.mark.parametrize(
    "context, choice, before, after",
    [
        ("ab", "a", [1, 2], [1]),
        ("ab ", "a", [1, 2], [1]),
        ("a ", "b", [1], [4, 2]),
        ("", "ab", [0], [1, 2]),
        ("a", " b c", [1], [4, 6]),
    ],
)
def test_context_and_choice_are_encoded_as_the_harness_does(context, choice, before, after):
    """If the context alone has n tokens, the choice has all tokens of the whole text after the
    first n.
    """
    pytest.importorskip("tokenizers")
    found = encoded_pair(merging(), context, choice)
    assert [*map(list, found)] == [before, after]


def test_a_choice_without_a_token_or_longer_than_the_window_is_refused():
    pytest.importorskip("tokenizers")
    for task, tokenizer in (
        (Task(7, "ab", [" c"], 0), merging()),
        (Task(7, "ab", ["c" * 25], 0), ByteTokenizer()),
        (Task(7, "ab", ["é"], 0), ByteTokenizer()),
    ):
        with pytest.raises(DataError, match="choice 0 of line 7"):
            requests_of([Task(1, "a", ["a"], 0), task], tokenizer, 24, 128)


def test_a_diverged_model_is_the_same_error_on_every_rank():
    def evaluate(transport):
        trainer, source, _ = build(transport, parse(with_settings({}, SETTINGS)))
        trainer.parameters[:] = np.inf
        with np.errstate(all="ignore"), pytest.raises(TrainingError) as error:
            score(trainer, TASKS, ByteTokenizer(), source.inputs)
        return error.value.agreed

    assert run_ranks(2, evaluate) == [True] * 2
