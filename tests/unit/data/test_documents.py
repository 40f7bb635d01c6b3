"""The targets of documents: the last one of each document marks its end, all others are as before."""

import json

import numpy as np
import pytest

from mpitrain.data import DOCUMENT_END, IGNORED, Reading, open_source, positions_of, without_ends


def test_starts_and_positions_follow_from_the_ends():
    targets = np.array([[5, DOCUMENT_END, 3, IGNORED], [DOCUMENT_END] * 4, [1, 2, 3, DOCUMENT_END]])
    found, starts = without_ends(targets)
    assert np.array_equal(found, np.where(targets == DOCUMENT_END, IGNORED, targets))
    assert starts.tolist() == [[0, 0, 2, 2], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert starts.dtype == np.int32 == positions_of(starts).dtype
    assert positions_of(starts).tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 2, 3]]
    for shape in ((0, 3), (2, 0), (1, 1)):
        assert without_ends(np.zeros(shape, np.int64))[1].shape == shape


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_a_separator_ends_a_document_and_later_ones_count(tmp_path, order):
    (tmp_path / "text").write_text("".join(f"line {n % 13} here\n" for n in range(400)))
    sources = [
        open_source(
            f"text:{tmp_path / 'text'}", 40, "float32", reading=Reading(order=order, **given)
        )
        for given in ({}, {"separator": 10, "attend": "document"})
    ]
    for call in (lambda one: one.batch(3, 1, 4, range(4)), lambda one: one.held_out_rows([0, 2])):
        (x, y), (inputs, targets) = map(call, sources)
        assert np.array_equal(x, inputs) and (x == 10).any()
        assert np.array_equal(targets, np.where(x == 10, DOCUMENT_END, y))


@pytest.mark.parametrize("context", [33, 64, 97])
def test_each_packed_conversation_ends_a_document(tmp_path, context):
    pairs = [{"prompt": f"{n} + 1?", "answer": str(n) * (n % 5 + 1)} for n in range(40)]
    (tmp_path / "data").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    found = []
    for attend in ("window", "document"):
        reading = Reading(packing=True, attend=attend)
        source = open_source(f"jsonl:{tmp_path / 'data'}", context, "float32", reading=reading)
        found.append(source.batch(0, 0, source.samples, range(source.samples)))
    (x, y), (inputs, targets) = found
    plain, starts = without_ends(targets)
    assert np.array_equal(x, inputs) and np.array_equal(plain, y)
    begins = bytes(inputs.astype(np.uint8)).count(b"user:\n")
    of_padding = inputs[np.arange(len(inputs)), starts[:, -1]] == 0
    assert begins == sum(len(np.unique(row)) for row in starts) - of_padding.sum() == 36
