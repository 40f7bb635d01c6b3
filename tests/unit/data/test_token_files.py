"""Files of tokens: several by a pattern, dtypes by header, meta.json and key; epochs, separators; odd files are refused."""

import itertools
import json
import os
import resource

import numpy as np
import pytest

from mpitrain.data import IGNORED, Reading, absolute, as_it_is, beside, largest_token, open_source
from mpitrain.data.token_files import FileTokens, token_paths, tokens_of
from mpitrain.errors import ConfigError, DataError
from tests.processes import skip_without

CONTEXT = 8
TOKENS = (np.arange(2000) * 7 % 901).astype("<u2")


def opened(place, context=CONTEXT, validation="", **reading):
    reading = Reading()._replace(**reading)
    return open_source(
        f"tokens:{place}", context, "float32", validation=validation, reading=reading
    )


def rows(source, count=50):
    return [
        array.tolist()
        for array in (
            *source.batch(1, 2, count, range(count)),
            *source.held_out_rows(range(source.held_out)),
        )
    ]


def header(magic, version, count):
    found = np.zeros(256, "<i4")
    found[:3] = magic, version, count
    return found.tobytes()


def test_several_files_are_one_sequence_in_the_order_of_their_names(tmp_path):
    TOKENS.tofile(tmp_path / "whole.bin")
    for name, part in zip("bcad", np.split(TOKENS, [500, 507, 507]), strict=True):
        order = {"b": "1", "c": "2", "a": "3", "d": "4"}[name]
        if part.size:
            part.tofile(tmp_path / f"train_{order}.bin")
    assert rows(opened(tmp_path / "train_*.bin")) == rows(opened(tmp_path / "whole.bin"))


def test_a_pattern_may_name_the_held_out_tokens(tmp_path):
    for name in ("train_1", "train_2", "val_1", "val_2"):
        TOKENS.tofile(tmp_path / f"{name}.bin")
    source = opened(tmp_path / "train_*.bin", validation=f"tokens:{tmp_path}/val_*.bin")
    assert source.tokens == source.held_out_tokens == 4000


def test_all_ranks_together_scan_all_files(tmp_path):
    TOKENS.tofile(tmp_path / "a1")
    np.full(10, 5000, "<u4").tofile(tmp_path / "b")
    (tmp_path / "a2").write_bytes(header(20240801, 7, 30) + np.full(30, 70_000, "<u4").tobytes())
    found = [largest_token(f"tokens:{tmp_path}/a*", part, 3) for part in range(3)]
    assert max(found) == 70_000 and found[0] <= 900


def test_a_scan_changes_with_any_of_its_files(tmp_path):
    for name in "ab":
        TOKENS.tofile(tmp_path / name)
    before = as_it_is(f"tokens:{tmp_path}/*")
    TOKENS[:1000].tofile(tmp_path / "a")
    np.concatenate([TOKENS, TOKENS[:1000]]).tofile(tmp_path / "b")
    after = as_it_is(f"tokens:{tmp_path}/*")
    assert before.nbytes == after.nbytes and before != after


WIDE = TOKENS.astype("<u4")


@pytest.mark.parametrize("dtype", ["auto", "uint16", "uint32"])
@pytest.mark.parametrize("kind", ["bare", "llm.c", "npy", "meta.json"])
def test_every_layout_and_dtype_has_the_same_rows(tmp_path, kind, dtype):
    TOKENS.tofile(tmp_path / "truth.bin")
    truth = rows(opened(tmp_path / "truth.bin"))
    for tokens, name, magic, version in (
        (TOKENS, "uint16", 20240520, 1),
        (WIDE, "uint32", 20240801, 7),
    ):
        path = tmp_path / name / "t.bin"
        path.parent.mkdir()
        if kind == "npy":
            with path.open("wb") as file:
                np.save(file, tokens)
        else:
            head = header(magic, version, len(tokens)) if kind == "llm.c" else b""
            path.write_bytes(head + tokens.tobytes())
        if kind == "meta.json":
            path.with_name("meta.json").write_text(json.dumps({"dtype": name, "more": 1}))
        is_known = dtype == name or (dtype == "auto" and (kind != "bare" or name == "uint16"))
        if is_known:
            assert rows(opened(path, dtype=dtype)) == truth
        elif kind in ("llm.c", "npy"):
            with pytest.raises(DataError, match=f"has {name} tokens"):
                opened(path, dtype=dtype)


def test_an_epoch_has_every_window_once_in_any_layout_and_batch_size(tmp_path):
    np.arange(2000, dtype="<u2").tofile(tmp_path / "t")
    source = opened(tmp_path / "t", order="epochs")
    windows = 1799 // CONTEXT
    inputs, targets = source.batch(3, 0, 2 * windows, range(2 * windows))
    assert np.array_equal(inputs + 1, targets)
    for epoch in (inputs[:windows], inputs[windows:]):
        assert np.array_equal(np.sort(epoch[:, 0]), np.arange(windows) * CONTEXT)
    assert not np.array_equal(inputs[:windows], inputs[windows:])
    before = 0
    for step, (size, ranks) in enumerate(itertools.product((5, 8, 13, 200), (1, 2, 3))):
        cuts = [size * rank // ranks for rank in range(ranks + 1)]
        parts = [
            source.batch(3, step, size, range(*cut), before)[0] for cut in itertools.pairwise(cuts)
        ]
        truth = inputs[np.arange(before, before + size) % (2 * windows)]
        if before + size <= 2 * windows:
            assert np.array_equal(np.concatenate(parts), truth)
        before += size


def test_a_window_ends_with_its_document(tmp_path):
    tokens = np.arange(1, 2001) % 10
    tokens.astype("<u2").tofile(tmp_path / "t")
    source = opened(tmp_path / "t", separator=0)
    plain = opened(tmp_path / "t")
    for found, whole in (
        (source.batch(0, 0, 30, range(30)), plain.batch(0, 0, 30, range(30))),
        (source.held_out_rows(range(20)), plain.held_out_rows(range(20))),
    ):
        for inputs, targets, x, y in zip(*found, *whole, strict=True):
            end = [*x, 0].index(0)
            assert np.array_equal(inputs[:end], x[:end]) and not inputs[end:].any()
            assert np.array_equal(targets[:end], y[:end])
            assert (targets[end:] == IGNORED).all()


@pytest.mark.parametrize("separator", [901, 1 << 40])
def test_a_separator_outside_of_the_vocabulary_is_refused(tmp_path, separator):
    TOKENS.tofile(tmp_path / "t")
    with pytest.raises(DataError, match=r"data\.separator"):
        opened(tmp_path / "t", separator=separator)


def test_a_file_that_becomes_shorter_is_an_error_and_no_crash(tmp_path):
    TOKENS.tofile(tmp_path / "t")
    source = opened(tmp_path / "t")
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(DataError, match="shorter"):
        source.batch(0, 0, 4, range(4))


def test_a_damaged_meta_json_is_not_read_where_the_dtype_is_known(tmp_path):
    TOKENS.tofile(tmp_path / "t.bin")
    (tmp_path / "meta.json").write_text("{")
    assert opened(tmp_path / "t.bin", dtype="uint16").inputs == 901


def test_a_dtype_that_contradicts_a_header_is_left_out_of_the_keys(tmp_path):
    np.save(tmp_path / "t.npy", (TOKENS % 200).astype("u1"))
    assert opened(tmp_path / "t.npy").inputs == 200
    with pytest.raises(DataError, match="has uint8 tokens") as raised:
        opened(tmp_path / "t.npy", dtype="uint16")
    assert "uint8" not in raised.value.way_out


def test_more_files_than_a_process_may_open_are_one_error_with_its_remedy(tmp_path):
    for number in range(40):
        TOKENS.tofile(tmp_path / f"t_{number}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened_now + 20, hard))
    try:
        with pytest.raises(DataError, match="open files") as raised:
            opened(tmp_path / "t_*")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in raised.value.way_out


def test_data_patterns_without_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="matches none"):
        opened(tmp_path / "t_*.bin")
    TOKENS.tofile(tmp_path / "t_1.bin")
    (tmp_path / "t_2.bin").mkdir()
    with pytest.raises(DataError, match=r"t_2\.bin"):
        opened(tmp_path / "t_*.bin")


@pytest.mark.parametrize(
    "place", ["run[1]/part_*.bin", "part_*.bin", "run[1]/train.bin", "x[0-1]/*"]
)
def test_only_what_was_written_as_a_pattern_is_one(tmp_path, monkeypatch, place):
    """Of two folders the one with the brackets in its name is meant, also when it has moved."""
    for number, folder in enumerate(("run[1]", "run1", "x0", "x1")):
        for name in ("part_0.bin", "part_1.bin", "train.bin", "val.bin"):
            (tmp_path / folder).mkdir(exist_ok=True)
            np.full(200, number, "<u2").tofile(tmp_path / folder / name)
    monkeypatch.chdir(tmp_path / "run[1]" if "/" not in place else tmp_path)
    whole = absolute(f"tokens:{place}").partition(":")[2]
    assert largest_token(f"tokens:{place}", 0, 1) == (3 if "x" in place else 0)
    assert token_paths(whole) == [path.absolute() for path in token_paths(place)]
    assert absolute(f"tokens:{whole}") == f"tokens:{whole}"
    if "train" in place:
        beside_it = [beside(f"tokens:{one}").partition(":")[2] for one in (place, whole)]
        assert [str(token_paths(one)[0])[-14:] for one in beside_it] == ["run[1]/val.bin"] * 2
    if "x" not in place:
        (tmp_path / "run[1]").rename(tmp_path / "moved")
        with pytest.raises(DataError, match="matches none"):
            token_paths(whole)


def test_a_file_with_a_pattern_in_its_own_name_is_that_file(tmp_path):
    TOKENS.tofile(tmp_path / "t[1].bin")
    assert opened(tmp_path / "t[1].bin").inputs == 901


@pytest.mark.parametrize("key, value", [("order", "epochs"), ("separator", 1), ("dtype", "uint32")])
def test_samples_read_none_of_these_keys(key, value):
    skip_without("sklearn")
    with pytest.raises(ConfigError, match=rf"data\.{key}"):
        open_source("digits", 8, "float32", reading=Reading()._replace(**{key: value}))


@pytest.mark.parametrize(
    ("dtype", "most", "says"),
    [
        ("uint32", 50257, "looks like uint32 numbers: every second uint16 is 0"),
        ("uint32", 128256, "looks like uint32 numbers: every second uint16 is at most 1"),
        ("int64", 300, "looks like 64-bit numbers"),
        ("uint16", 50257, ""),
        ("uint16", 12, ""),
    ],
)
def test_wider_tokens_than_the_default_are_not_read_in_halves(dtype, most, says, tmp_path):
    numbers = np.random.default_rng(0).integers(0, most, 30_000).astype(dtype)
    numbers[:5000] = 0  # a file may begin with padding
    numbers.tofile(tmp_path / "book.bin")
    book = f"{tmp_path}/book.bin"
    if not says:
        assert len(tokens_of(book)) == 30_000
        return
    with pytest.raises(DataError, match=says) as refused:
        tokens_of(book)
    assert "data.dtype to uint32" in refused.value.way_out
    assert len(tokens_of(book, "uint16")) == numbers.nbytes // 2
    (tmp_path / "meta.json").write_text('{"dtype": "uint16"}')
    assert len(tokens_of(book)) == numbers.nbytes // 2


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_file_of_tokens_is_closed_with_its_last_region(tmp_path, monkeypatch):
    unraised = []
    monkeypatch.setattr("sys.unraisablehook", unraised.append)
    TOKENS.tofile(tmp_path / "book")
    whole = FileTokens(tmp_path / "book", TOKENS.dtype, 0, len(TOKENS))
    region, number = whole.region(5, 9), whole._file.number
    del whole
    os.fstat(number)
    del region
    with pytest.raises(OSError):
        os.fstat(number)
    assert not unraised
