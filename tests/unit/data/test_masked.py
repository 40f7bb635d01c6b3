"""Masked tokens: their statistics, and draws that depend on the seed and the row alone. Labelled texts."""

import numpy as np
import pytest

from mpitrain.data import IGNORED, Request, open_source, without_padding
from mpitrain.data.labelled import open_texts, row_of
from mpitrain.data.masked import MaskedSource
from mpitrain.data.source import DOCUMENT_END, PADDING, SECOND
from mpitrain.data.tokenizer import ByteTokenizer
from mpitrain.errors import MpitrainError
from tests.training import configured


@pytest.fixture
def masked():
    return MaskedSource(open_source("pydocs", 64, "float32"), 0.15, None, [ord("e")])


def test_the_parts_are_those_of_the_paper_within_5_deviations(masked):
    plain, _ = open_source("pydocs", 64, "float32").batch(7, 3, 2000, range(2000))
    inputs, targets = masked.batch(7, 3, 2000, range(2000))
    chosen = targets != IGNORED
    assert np.array_equal(targets[chosen], plain[chosen])
    assert np.array_equal(inputs[~chosen], plain[~chosen])
    assert not (targets == ord("e")).any() and masked.inputs == masked.classes == 257

    def is_share(count, of, share):
        return abs(count - of * share) <= 5 * (of * share * (1 - share)) ** 0.5

    assert is_share(chosen.sum(), (plain != ord("e")).sum(), 0.15)
    hidden, stays = inputs[chosen] == 256, inputs[chosen] == plain[chosen]
    assert is_share(hidden.sum(), chosen.sum(), 0.8 + 0.1 / 257)
    assert is_share(stays.sum(), chosen.sum(), 0.1 + 0.1 / 257)


def test_a_mask_depends_on_the_seed_and_the_row_alone(masked):
    def rows(seed, step, size, own, before=None):
        return np.stack(masked.batch(seed, step, size, own, before))

    whole = rows(5, 2, 12, range(12))
    parts = [rows(5, 2, 12, range(n, n + 4)) for n in (0, 4, 8)]
    assert np.array_equal(np.concatenate(parts, 1), whole)
    assert np.array_equal(rows(5, 2, 12, range(12), 24), whole)
    assert not np.array_equal(rows(6, 2, 12, range(12))[1], whole[1])
    held = [masked.held_out_rows([n])[1] for n in (3, 4)]
    assert np.array_equal(masked.held_out_rows([3, 4])[1], np.concatenate(held))


def test_ends_of_documents_stay_and_what_does_not_count_is_not_hidden():
    class Documents:
        inputs, shape, held_out = 9, (6,), 1

        def held_out_rows(self, rows):
            return np.array([[1, 2, 0, 3, 4, 0]]), np.array([[2, 0, DOCUMENT_END, 4, 0, IGNORED]])

    inputs, targets = MaskedSource(Documents(), 1.0, None).held_out_rows([0])
    assert targets.tolist() == [[1, 2, DOCUMENT_END, 3, 4, IGNORED]]
    assert inputs[0, [2, 5]].tolist() == [0, 0] and (inputs == 9).sum() >= 2


class Words(ByteTokenizer):
    def named(self, name):
        return {"[CLS]": 1, "[SEP]": 2, "[MASK]": 3}.get(name)


@pytest.mark.parametrize(
    ("tokenizer", "text", "pair", "row"),
    [
        (ByteTokenizer, "ab", "", [97, 98, *[PADDING] * 6]),
        (ByteTokenizer, "abcdefghij", "", [*range(97, 105)]),
        (ByteTokenizer, "", "", [PADDING] * 8),
        (Words, "abcdefghij", "", [1, *range(97, 103), 2]),
        (Words, "ab", "c", [1, 97, 98, 2, 99 + SECOND, 2 + SECOND, PADDING, PADDING]),
        (Words, "abcdef", "c", [1, 97, 98, 99, 100, 2, 99 + SECOND, 2 + SECOND]),
        (Words, "abcdef", "cdefgh", [1, 97, 98, 2, *(SECOND + n for n in (99, 100, 101, 2))]),
    ],
)
def test_a_row_of_texts(tokenizer, text, pair, row):
    assert row_of(tokenizer(), text, pair, 8).tolist() == row


def test_padding_is_a_document_of_its_own():
    tokens, starts, types = without_padding(np.array([[5, 6 + SECOND, PADDING, PADDING]]))
    assert tokens.tolist() == [[5, 6, 0, 0]] and types.tolist() == [[0, 1, 0, 0]]
    assert starts.tolist() == [[0, 0, 2, 2]]


def test_labels_that_are_names_are_numbered_in_their_order(tmp_path):
    lines = ['{"text": "a", "label": "c"}', '{"text": "b", "label": null}']
    (tmp_path / "t.jsonl").write_text("\n".join(lines + ['{"text": "d", "label": "b"}'] * 3))
    request = Request(f"jsonl:{tmp_path / 't.jsonl'}", 8, "float32", 0, "", None)
    for known, classes in ((["b", "c"], [1, 0, 0, 0]), (["c", "a", "b"], [0, 2, 2, 2])):
        labels = known if "a" in known else []
        source = open_texts(request._replace(reading=request.reading._replace(labels=labels)))
        targets = [source._rows(part, np.arange(n))[1] for part, n in ((0, 3), (1, 1))]
        assert np.concatenate(targets).tolist() == classes
        assert source.labels == known and source.classes == len(known)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('{"text": "a"\n', "Line 1 of .* must be a labelled text"),
        ('{"text": "a", "label": 1.5}\n', "label"),
        ('{"text": "a", "label": "good"}\n{"text": "b", "label": 0}\n', "label 0, but .* are good"),
        (
            '{"text": "a", "label": "good"}\n{"text": "b", "label": "3"}\n',
            "label good, but .*not known",
        ),
        ('{"text": "a", "label": -1}\n', "label"),
        ('{"prompt": "a", "answer": "b"}\n', "text"),
        ('{"text": "a", "label": 0}\n', "at least 2 texts"),
        ("\n", "has none"),
        ('{"text": "a"}\n', "a text with a label"),
        ('{"text": "a", "label": 0}\n' * 2, "at least 2 classes"),
        ('{"text": "a", "label": 0}\n{"text": "a", "label": 3}\n', "data.classes"),
    ],
)
def test_a_line_that_is_no_labelled_text_is_refused(lines, says, tmp_path):
    (tmp_path / "t.jsonl").write_text(lines)
    config = configured("model.kind=bert", f"data.source=jsonl:{tmp_path / 't.jsonl'}")
    request = Request(config.data.source, 8, "float32", 0, "", None)
    reading = request.reading._replace(classes=2 * ("3" in lines))
    with pytest.raises(MpitrainError, match=says):
        open_texts(request._replace(reading=reading))
