"""Data sources: batches depend on (seed, step) alone, held-out rows are never trained on, bad files are refused."""

import gzip
import itertools
import struct

import numpy as np
import pytest

from mpitrain.data import TENTH, beside, largest_token, open_source
from mpitrain.errors import ConfigError, DataError
from mpitrain.models.table import MODELS
from mpitrain.run.choices import parse
from tests.processes import skip_without


@pytest.fixture(params=["pydocs", "text", "tokens", "digits", "idx"])
def source(request, tmp_path):
    if request.param == "text":
        (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
        return open_source(f"text:{tmp_path}/text", 16, "float32")
    if request.param == "tokens":
        (np.arange(5000) % 900).astype("<u2").tofile(tmp_path / "tokens")
        return open_source(f"tokens:{tmp_path}/tokens", 16, "float32")
    if request.param == "idx":
        write_mnist(tmp_path)
        return open_source(f"idx:{tmp_path}", 16, "float32")
    if request.param == "digits":
        skip_without("sklearn")
    return open_source(request.param, 16, "float32")


def write_mnist(folder, train=50, test=20):
    generator = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        images = generator.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        packed = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + images.tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(packed))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">4BI", 0, 0, 8, 1, count) + labels.tobytes()
        )


@pytest.mark.parametrize("name", ["digits", "idx"])
def test_images_are_the_samples_with_their_shape(name, tmp_path):
    if name == "digits":
        skip_without("sklearn")
    write_mnist(tmp_path)
    name, side = (name, 8) if name == "digits" else (f"idx:{tmp_path}", 28)
    flat, images = (open_source(name, 1, "float32", form=form) for form in (None, "images"))
    assert (flat.form, flat.shape, images.form) == ("samples", (side * side,), "images")
    assert images.shape == (1, side, side) and images.inputs == flat.inputs == side * side
    for rows in (lambda one: one.batch(3, 7, 11, range(11)), lambda one: one.held_out_rows([4, 0])):
        pixels, labels = rows(images)
        np.testing.assert_array_equal(pixels.reshape(len(pixels), -1), rows(flat)[0])
        np.testing.assert_array_equal(labels, rows(flat)[1])


@pytest.mark.product
@pytest.mark.parametrize("ranks", (1, 2, 3, 5))
def test_the_rows_of_all_ranks_put_together_are_the_batch_of_one(source, ranks):
    whole = source.batch(3, 7, 11, range(11))
    cuts = [11 * r // ranks for r in range(ranks + 1)]
    parts = [source.batch(3, 7, 11, range(a, b)) for a, b in itertools.pairwise(cuts)]
    for i in range(2):
        assert np.array_equal(np.concatenate([p[i] for p in parts]), whole[i])


def test_batches_repeat_and_differ_by_step_and_seed(source):
    first = source.batch(0, 0, 8, range(8))[0]
    assert np.array_equal(first, source.batch(0, 0, 8, range(8))[0])
    assert not np.array_equal(first, source.batch(0, 1, 8, range(8))[0])
    assert not np.array_equal(first, source.batch(1, 0, 8, range(8))[0])


def test_held_out_rows_have_the_form_of_a_batch(source):
    inputs, targets = source.batch(0, 0, 2, range(2))
    held, held_targets = source.held_out_rows(range(source.held_out - 2, source.held_out))
    assert held.shape == inputs.shape and held.dtype == inputs.dtype
    assert held_targets.shape == targets.shape and held_targets.dtype == targets.dtype
    assert held_targets.max() < source.classes


def test_targets_are_the_tokens_one_later(tmp_path):
    np.arange(2000, dtype="<u2").tofile(tmp_path / "t")
    inputs, targets = open_source(f"tokens:{tmp_path}/t", 8, "float32").batch(0, 0, 100, range(100))
    assert np.array_equal(inputs + 1, targets)


def test_the_last_tenth_of_the_tokens_is_never_trained_on(tmp_path):
    np.arange(2000, dtype="<u2").tofile(tmp_path / "t")
    source = open_source(f"tokens:{tmp_path}/t", 8, "float32")
    trained = max(source.batch(0, step, 500, range(500))[1].max() for step in range(20))
    assert trained == 1799  # the last training token is reached, and none after it
    assert source.held_out_rows(range(1))[0].min() == 1800


def test_an_epoch_of_samples_visits_each_once():
    skip_without("sklearn")
    source = open_source("digits", 1, "float64")
    steps = [source.batch(0, step, 1438, range(1438))[0] for step in range(2)]
    ordered = [rows[np.lexsort(rows.T)] for rows in steps]
    assert len(source.held_out_rows(range(source.held_out))[1]) == 359
    assert np.array_equal(*ordered) and not np.array_equal(*steps)


@pytest.mark.parametrize("sizes", [(8, 12, 3), (1, 50, 7), (50, 1, 120)])
def test_batches_of_changing_size_neither_skip_nor_repeat_a_sample(tmp_path, sizes):
    write_mnist(tmp_path)
    source = open_source(f"idx:{tmp_path}", 16, "float64")
    before, rows = 0, []
    for step in range(600 // sum(sizes) * 3):
        size = sizes[step % 3]
        rows += [row.tobytes() for row in source.batch(5, step, size, range(size), before)[0]]
        before += size
    whole = source.batch(5, 0, len(rows), range(len(rows)))[0]
    assert rows == [row.tobytes() for row in whole]
    assert len(set(rows[:50])) == 50, "all of them once per epoch"


@pytest.mark.parametrize("size", (7, 50, 120))
def test_steps_that_follow_one_another_draw_the_order_of_each_epoch_once(
    size, tmp_path, monkeypatch
):
    write_mnist(tmp_path)
    steps = 700 // size
    anew = [
        open_source(f"idx:{tmp_path}", 1, "float32").batch(2, step, size, range(size))[0]
        for step in range(steps)
    ]
    source, drawn, generator = (
        open_source(f"idx:{tmp_path}", 1, "float32"),
        [],
        np.random.default_rng,
    )
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed: drawn.append(seed) or generator(seed)
    )
    for step in range(steps):
        assert np.array_equal(source.batch(2, step, size, range(size))[0], anew[step])
    assert drawn == [[2, epoch] for epoch in range(-(-steps * size // 50))]


def test_the_header_of_an_llm_c_file_is_skipped(tmp_path):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 500
    (tmp_path / "t").write_bytes(header.tobytes() + np.full(500, 3, "<u2").tobytes())
    source = open_source(f"tokens:{tmp_path}/t", 8, "float32")
    assert source.inputs == 4 and source.batch(0, 0, 5, range(5))[0].min() == 3


@pytest.mark.parametrize("size", (0, 1, 16, 169))
def test_a_source_shorter_than_ten_contexts_is_refused(tmp_path, size):
    (tmp_path / "t").write_bytes(b"a" * size)
    with pytest.raises(DataError):
        open_source(f"text:{tmp_path}/t", 16, "float32")


def test_the_smallest_source_that_works_works(tmp_path):
    (tmp_path / "t").write_bytes(b"a" * 170)
    assert open_source(f"text:{tmp_path}/t", 16, "float32").held_out == 1


@pytest.mark.parametrize("name", ["", "pydoc", "text", "text:", "idx:", "pydocs:x"])
def test_an_unknown_source_lists_the_known_ones(name):
    with pytest.raises(ConfigError, match="pydocs, digits, text:FILE"):
        open_source(name, 16, "float32")


@pytest.mark.parametrize("kind", ["text", "tokens", "idx"])
def test_a_missing_file_is_named(kind, tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        open_source(f"{kind}:{tmp_path}/nowhere", 16, "float32")


@pytest.mark.parametrize("name", ["pydocs", "text"])
def test_the_vocabulary_of_text_has_at_least_its_bytes(name, tmp_path):
    (tmp_path / "text").write_bytes(b"a" * 500)
    name = "pydocs" if name == "pydocs" else f"text:{tmp_path}/text"
    assert (
        open_source(name, 16, "float32", 256).inputs
        == open_source(name, 16, "float32").inputs
        == 256
    )
    assert open_source(name, 16, "float32", 50257).inputs == 50257
    for vocabulary in (1, 255):
        with pytest.raises(ConfigError, match=rf"data\.vocabulary .* is {vocabulary}\."):
            open_source(name, 16, "float32", vocabulary)


def test_a_vocabulary_too_small_for_the_tokens_names_the_largest(tmp_path):
    tokens = np.zeros(2000, "<u2")
    tokens[1234] = 700
    tokens.tofile(tmp_path / "t")
    assert open_source(f"tokens:{tmp_path}/t", 8, "float32", 701).inputs == 701
    with pytest.raises(DataError, match=r"700, so data\.vocabulary"):
        open_source(f"tokens:{tmp_path}/t", 8, "float32", 700)


@pytest.mark.parametrize("place", ["", ".", "/", ".."])
def test_a_place_of_tokens_that_has_no_name_of_its_own_is_refused(place):
    assert beside(f"tokens:{place}") == TENTH
    with pytest.raises((ConfigError, DataError)):
        open_source(f"tokens:{place}", 8, "float32")


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_the_parts_of_a_scan_cover_the_tokens(count, tmp_path):
    for where in {0, count // 2, count - 1}:
        tokens = np.zeros(count, "<u2")
        tokens[where] = 9
        tokens.tofile(tmp_path / "t")
        for parts in (1, 2, 3, 7):
            found = [largest_token(f"tokens:{tmp_path}/t", part, parts) for part in range(parts)]
            assert found.count(9) == 1 and max(found) == 9


def write_tokens(folder, **lengths):
    for name, length in lengths.items():
        (np.arange(length) % 60 + (name == "val")).astype("<u2").tofile(folder / f"{name}.bin")


def test_a_val_bin_beside_a_train_bin_is_what_is_held_out(tmp_path):
    write_tokens(tmp_path, train=1000, val=100, other=100)
    name = f"tokens:{tmp_path}/train.bin"
    assert (
        beside(name) == f"tokens:{tmp_path}/val.bin"
        and beside(f"tokens:{tmp_path}/other.bin") == TENTH
    )
    source = open_source(name, 16, "float32", validation=beside(name))
    assert (source.tokens, source.held_out_tokens, source.held_out, source.inputs) == (
        1000,
        100,
        6,
        61,
    )
    inputs, targets = source.held_out_rows(range(6))
    np.testing.assert_array_equal(inputs.ravel(), np.arange(96) % 60 + 1)
    np.testing.assert_array_equal(targets.ravel(), np.arange(1, 97) % 60 + 1)
    starts = {int(row[0]) for row in source.batch(0, 0, 4000, range(4000))[0]}
    assert starts == set(range(60)), "all of train.bin is trained on, and nothing else"
    (tmp_path / "val.bin").unlink()
    assert beside(name) == TENTH
    tenth = open_source(name, 16, "float32", validation=TENTH)
    assert (tenth.tokens, tenth.held_out_tokens, tenth.inputs) == (900, 100, 60)


@pytest.mark.parametrize(
    "source, validation, vocabulary, law",
    [
        (
            "pydocs",
            TENTH,
            0,
            "data.validation needs data.source text:FILE, tokens:FILE, jsonl:FILE, npy:X.npy,Y.npy, csv:FILE:TARGET or",
        ),
        (
            "text:train.bin",
            "tokens:val.bin",
            0,
            "data.validation must be text:FILE like data.source, or tenth, or empty, but is 'tokens:val.bin'.",
        ),
        ("text:train.bin", "text:nowhere", 0, "The data file nowhere cannot be read"),
        ("tokens:train.bin", "tokens:nowhere", 0, "The data file nowhere cannot be read"),
        (
            "tokens:train.bin",
            "tokens:short.bin",
            0,
            "A row is 17 tokens, but train.bin has 1000 tokens and short.bin 16.",
        ),
        (
            "tokens:train.bin",
            "tokens:val.bin",
            60,
            "val.bin holds token 60, so data.vocabulary must be at least 61, but is 60.",
        ),
    ],
)
def test_a_validation_that_cannot_be_held_out_is_refused(
    source, validation, vocabulary, law, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path, train=1000, val=100, short=16)
    with pytest.raises((ConfigError, DataError)) as refused:
        open_source(source, 16, "float32", vocabulary, validation=validation)
    assert law in refused.value.law
    if "cannot be read" in law:
        assert refused.value.way_out == "Check data.source and data.validation."


def test_a_second_text_is_what_is_held_out(tmp_path):
    (tmp_path / "train.txt").write_text("a" * 100)
    (tmp_path / "val.txt").write_text("b" * 50)
    names = f"text:{tmp_path}/train.txt", f"text:{tmp_path}/val.txt"
    source = open_source(names[0], 16, "float32", validation=names[1])
    assert (source.tokens, source.held_out_tokens, source.held_out) == (100, 50, 3)
    assert set(source.held_out_rows(range(3))[0].ravel()) == {ord("b")}
    assert set(source.batch(0, 0, 99, range(99))[0].ravel()) == {ord("a")}
    tenth = open_source(names[0], 9, "float32", validation=TENTH)
    assert (tenth.tokens, tenth.held_out_tokens) == (90, 10)


def test_the_kind_of_the_model_follows_the_source_where_nobody_sets_it(source, request):
    name = request.node.callspec.params["source"]
    name = f"{name}:some" if name in ("text", "tokens", "idx") else name
    found = parse({"data": {"source": name}}).model.kind
    assert source.form in MODELS[found].takes
    assert parse({"data": {"source": name}, "model": {"layers": 2}}).model.kind == found
    for kind in MODELS:
        assert parse({"data": {"source": name}, "model": {"kind": kind}}).model.kind == kind, (
            "as it was typed"
        )
