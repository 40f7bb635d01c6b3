"""`data prepare`: its tokens decode to the text, on any number of processes, and after SIGKILL anywhere it goes on."""

import json
import os
import random
import signal
import sys
import threading
from contextlib import closing

import numpy as np
import pytest

from mpitrain.cli.rank_encoders import RankEncoders, serve
from mpitrain.data.documents import Form, Position, chunks, inputs
from mpitrain.data.prepare import Options, prepare, processes
from mpitrain.data.tokenizer import ByteTokenizer
from mpitrain.errors import ConfigError, DataError
from mpitrain.transport.threads import run_ranks

LINES = [f"{n}: größer 😀 {'x' * (n % 40)}\n" for n in range(300)]
TEXT = "".join(LINES)
PLAIN = Form(0.1, 0, "text", "")


def written(path, kind, texts=LINES):
    path = path / f"in.{kind}"
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.table({"text": [*texts, None]}), path, row_group_size=70)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n\n" for text in texts))
    else:
        path.write_text("".join(texts))
    return path


def made(folder, paths, form=PLAIN, separator=-1, workers=1, tokenizer=None, **more):
    options = Options(paths, tokenizer or ByteTokenizer(), separator, form)
    return prepare(options, folder, processes(workers, 0), **more)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def text_of(folder, name):
    return np.fromfile(folder / name, "<u2").astype("u1").tobytes().decode()


@pytest.fixture
def small_chunks(monkeypatch):
    for room in ("documents", "records"):
        monkeypatch.setattr(f"mpitrain.data.{room}.CHUNK", 700)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a kill does not lose pages of the system


def test_a_text_file_is_its_bytes_again_and_its_last_lines_are_held_out(tmp_path, small_chunks):
    facts = made(tmp_path / "out", [written(tmp_path, "txt")])
    train, held_out = (text_of(tmp_path / "out", name) for name in ("train.bin", "val.bin"))
    assert train + held_out == TEXT and train.endswith("\n")
    assert len(TEXT.encode()) * 0.09 < facts.files["val.bin"].bytes < len(TEXT.encode()) * 0.101
    assert sum(one.tokens for one in facts.files.values()) == len(TEXT.encode())
    assert sorted(files(tmp_path / "out")) == [
        "meta.json",
        "tokenizer.json",
        "train.bin",
        "val.bin",
    ]


@pytest.mark.parametrize("text", ["one line " * 90, "ü" * 999, "a\n" + "b" * 500])
def test_a_long_last_line_is_cut_at_a_character(tmp_path, text):
    (tmp_path / "in.txt").write_text(text)
    made(tmp_path, [tmp_path / "in.txt"])
    assert text_of(tmp_path, "train.bin") + text_of(tmp_path, "val.bin") == text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_document_is_once_in_either_file_with_its_separator(tmp_path, kind, small_chunks):
    facts = made(tmp_path / "out", [written(tmp_path, kind)], separator=0)
    found = {name: text_of(tmp_path / "out", name).split("\0") for name in facts.files}
    assert found["train.bin"].pop() == found["val.bin"].pop() == ""
    assert sorted(found["train.bin"] + found["val.bin"]) == sorted(LINES)
    assert 10 < len(found["val.bin"]) < 60
    assert [one.documents for one in facts.files.values()] == [*map(len, found.values())]


def test_kinds_of_files_and_marks_give_the_same_documents(tmp_path, small_chunks):
    marked = [f"<|end|>{line}" for line in LINES]
    tokens = [
        files(tmp_path / kind)["train.bin"]
        for kind, texts in (("jsonl", [line.strip("\n") for line in LINES]), ("txt", marked))
        if made(
            tmp_path / kind,
            [written(tmp_path, kind, texts)],
            Form(0, 0, "text", "<|end|>"),
            separator=7,
        )
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("mark", ["", "1"])
def test_chunks_may_begin_at_any_position(tmp_path, kind, mark, small_chunks):
    (source,) = inputs([written(tmp_path, kind)])
    form = PLAIN._replace(mark=mark)
    whole = list(chunks(source, form))
    assert len(whole) > 5
    for number, chunk in enumerate(whole):
        rest = [piece for after in chunks(source, form, chunk.end) for piece in after.pieces]
        assert rest == [piece for after in whole[number + 1 :] for piece in after.pieces]
    assert list(chunks(source, form, Position(0, 0))) == whole


def test_the_seed_draws_the_documents(tmp_path):
    path = written(tmp_path, "jsonl")
    held_out = [
        made(tmp_path / str(n), [path], PLAIN._replace(seed=seed)) and files(tmp_path / str(n))
        for n, seed in enumerate((0, 1, 0))
    ]
    assert held_out[0] == held_out[2] and held_out[0]["val.bin"] != held_out[1]["val.bin"]


def test_processes_give_the_same_files(tmp_path, small_chunks):
    paths = [written(tmp_path, "txt"), written(tmp_path, "jsonl")]
    for workers in (1, 3):
        made(tmp_path / str(workers), paths, workers=workers)
    assert files(tmp_path / "1") == files(tmp_path / "3")


def by_ranks(folder, paths, ranks, form=PLAIN, **more):
    """Prepare with encoders on other ranks."""

    def work(transport):
        if transport.rank > 0:
            return serve(transport)
        with closing(RankEncoders(transport)) as encoders:
            return prepare(options, folder, encoders.start, **more)

    options = Options(paths, ByteTokenizer(), -1, form)
    return run_ranks(ranks, work)[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_give_the_files_of_one_process(tmp_path, small_chunks, ranks):
    paths = [written(tmp_path, "txt"), written(tmp_path, "jsonl")]
    assert made(tmp_path / "one", paths) == by_ranks(tmp_path / "ranks", paths, ranks)
    assert files(tmp_path / "one") == files(tmp_path / "ranks")


def test_errors_of_inputs_and_of_ranks_end_all_ranks(tmp_path, small_chunks, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"text": "' + "a" * 2000 + '"}\n{"body": "b"}\n')
    with pytest.raises(DataError, match="Line 2"):
        by_ranks(tmp_path / "line", [tmp_path / "in.jsonl"], 3)
    with pytest.raises(DataError, match="missing"):
        by_ranks(tmp_path / "missing", [tmp_path / "missing"], 3)

    def full(*arguments):
        raise MemoryError("full")

    monkeypatch.setattr("mpitrain.cli.rank_encoders.encoded_pieces", full)
    with pytest.raises(DataError, match=r"rank 1 .* full"):
        by_ranks(tmp_path / "full", [written(tmp_path, "txt")], 3)


def killed_at(line, call):
    """Call in a child that SIGKILL ends at the given line of the room or of files.py; the lines it ran, else -1."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        _, status = os.waitpid(child, 0)
        with os.fdopen(read, "rb") as end:
            return -1 if os.WIFSIGNALED(status) else int(end.read())
    ran = 0

    def trace(frame, event, _):
        nonlocal ran
        if not frame.f_code.co_filename.endswith(("data/prepare.py", "files.py")):
            return None
        if event == "line":
            ran += 1
            if ran == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    try:
        threading.settrace(trace)
        sys.settrace(trace)
        call()
        sys.settrace(None)
        os.write(write, str(ran).encode())
    finally:
        os._exit(0)


def by_two_ranks(folder, paths, **more):
    return by_ranks(folder, paths, 2, **more)


@pytest.mark.parametrize("make, last, before", [(made, 20, 5), (by_two_ranks, 4, 3)])
@pytest.mark.slow
def test_after_a_kill_anywhere_no_file_is_incomplete_and_it_continues(
    tmp_path, small_chunks, make, last, before
):
    """Killed in each of the last lines, which put the files in their place, and in some before them."""
    paths, every_chunk = [written(tmp_path, "txt"), written(tmp_path, "jsonl")], []
    make(tmp_path / "truth", paths, progress=every_chunk.append)
    truth = files(tmp_path / "truth")
    total = killed_at(0, lambda: make(tmp_path / "counted", paths, every=2))
    assert total > 300 and files(tmp_path / "counted") == truth
    rng, went_on = random.Random(1), 0
    points = [*range(total - last, total), *rng.sample(range(1, total - 20), before)]
    for point in points:
        out = tmp_path / f"{point}"
        assert killed_at(point, lambda: make(out, paths, every=2)) == -1  # noqa: B023
        found = files(out) if out.exists() else {}
        assert all(found[name] == truth[name] for name in truth.keys() & found.keys())
        assert "train.bin" not in found or truth.keys() <= found.keys()
        read = []
        make(out, paths, every=2, progress=read.append)
        went_on += len(read) < len(every_chunk)
        assert files(out) == truth
    assert went_on >= last


def test_another_configuration_starts_anew_and_other_data_is_not_replaced(tmp_path):
    path = written(tmp_path, "txt")
    out = tmp_path / "out"
    assert killed_at(300, lambda: made(out, [path], every=1)) == -1
    made(out, [path], PLAIN._replace(fraction=0.2))
    before = files(out)
    assert made(out, [path], PLAIN._replace(fraction=0.2)) and files(out) == before
    with pytest.raises(ConfigError, match=r"train\.bin"):
        made(out, [path])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/val.bin").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"val\.bin"):
        made(tmp_path / "other", [path])
    assert files(tmp_path / "other") == {"val.bin": b"mine"}


@pytest.mark.parametrize("kind", ["missing", "pipe", "folder"])
def test_inputs_that_are_no_files_are_refused(tmp_path, kind):
    path = tmp_path / "in"
    {"missing": lambda p: None, "pipe": os.mkfifo, "folder": os.mkdir}[kind](path)
    with pytest.raises(DataError, match=str(path)):
        made(tmp_path / "out", [path])
