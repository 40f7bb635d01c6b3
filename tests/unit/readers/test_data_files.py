"""Damaged and hostile data files: a table for each family of formats, and one test that refuses every row of every table.

A refusal is one line, which has what the law of its family says, such as the file or the number of the line. Arrays (.npy, .npz,
CSV, HDF5) have their table in tests/ranks/run/test_arrays.py: they are refused on every rank.
"""

import gzip
import io
import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpitrain.data import open_source
from mpitrain.data.documents import Form
from mpitrain.data.prepare import Options, prepare, processes
from mpitrain.data.tokenizer import ByteTokenizer, open_tokenizer
from mpitrain.errors import DataError

CONTEXT, COUNT, LARGEST = 8, 2000, 900
TOKENS = (np.arange(COUNT) * 7 % (LARGEST + 1)).astype("<u2")
NARROW, WIDE = (20240520, 1), (20240801, 7)


def llm_c(kind, count, tokens=b"", version=None):
    """A file of llm.c: 256 int32, then the tokens."""
    head = np.zeros(256, "<i4")
    head[:3] = kind[0], version or kind[1], count
    return head.tobytes() + (tokens if isinstance(tokens, bytes) else tokens.tobytes())


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npy_header(text, version=1):
    return b"\x93NUMPY" + bytes((version, 0)) + struct.pack("<H", len(text)) + text


def edited(old, new):
    """The NumPy file of the tokens with another header."""
    assert old in npy(TOKENS)
    return npy(TOKENS).replace(old, new, 1)


DAMAGED_TOKENS = {
    "empty": b"",
    "one byte": b"\0",
    "odd": bytes(2001),
    "magic alone": llm_c(NARROW, 0)[:4],
    "header alone": llm_c(NARROW, 0),
    "header cut": llm_c(NARROW, 5)[:800],
    "wide header alone": llm_c(WIDE, 0),
    "one token less": llm_c(NARROW, COUNT + 1, TOKENS),
    "one token more": llm_c(NARROW, COUNT - 1, TOKENS),
    "negative count": llm_c(NARROW, -1, TOKENS),
    "half a token more": llm_c(WIDE, 1000, TOKENS.tobytes() + b"\0\0"),
    "narrow version of wide": llm_c(WIDE, 1000, TOKENS, version=1),
    "wide version of narrow": llm_c(NARROW, COUNT, TOKENS, version=7),
    "too short": TOKENS[:CONTEXT].tobytes(),
    "npy magic alone": b"\x93NUMPY",
    "npy version": npy_header(bytes(500), version=9),
    "npy cut": npy(TOKENS)[:100],
    "npy without tokens": npy(TOKENS[:0]),
    "npy less": npy(TOKENS)[:-1],
    "npy more": npy(TOKENS) + b"\0\0",
    "npy count less": edited(b"(2000", b"(1999"),
    "npy count more": edited(b"(2000", b"(2001"),
    "npy negative count": edited(b"(2000", b"(-200"),
    "npy other key": edited(b"descr", b"descs"),
    "npy other type": edited(b"'<u2'", b"'<u3'"),
    "npy no bool": edited(b"False", b"Falsy"),
    "npy 2-D": npy(TOKENS.reshape(2, -1)),
    "npy 0-D": npy(np.uint16(3)),
    "npy float": npy(TOKENS.astype(float)),
    "npy complex": npy(TOKENS.astype("<c8")),
    "npy bool": npy(TOKENS.astype(bool)),
    "npy signed": npy(TOKENS.astype("<i4")),
    "npy of 64 bits": npy(TOKENS.astype("<u8")),
    "npy big-endian": npy(TOKENS.astype(">u2")),
    "npy object": npy(np.array([1, "a", None], object)),
    "npy structured": npy(np.zeros(9, [("a", "<u2")])),
    "npy text": npy(np.array(["a"] * 99)),
    "npy header of code": npy_header(b"__import__('os').abort()".ljust(64)),
    "npy header no dict": npy_header(b"[]".ljust(63) + b"\n"),
    "npy deep header": npy_header(b"(" * 0x1FFF),
}


PAIR = {"prompt": "1 + 1?", "answer": "2"}
GOOD = json.dumps(PAIR).encode()
LINES = [
    b"{",
    GOOD[:-1],
    b"[]",
    b"3",
    b"null",
    b"true",
    b'"prompt"',
    b"{}",
    b'{"prompt": "a"}',
    b'{"prompt": "a", "answer": 3}',
    b'{"prompt": null, "answer": "b"}',
    b'{"prompt": "a", "answered": "b", "more": 1}',
    b'{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}',
    b'{"conversations": [{"from": "who", "value": "a"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]}',
    b'{"messages": [{"role": "assistant", "content": "a", "weight": 2}]}',
    b'{"instruction": "a", "input": 1, "output": "b"}',
    b'{"prompt": "a", "completion": "b", "label": false}',
    b'{"instruction": "a", "output": "b", "history": [["c"]]}',
    b'{"prompt": "a", "prompt": "a", "answer": "b"}',
    b'{"prompt": "a", "answer": NaN}',
    b'{"prompt": "a", "answer": 1e999}',
    b'{"prompt": "\\ud800", "answer": "b"}',
    b'{"prompt": "\xff", "answer": "b"}',
    b'{"messages": {}}',
    b'{"messages": null}',
    b'{"messages": [3]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": ["a"]}]}',
    b'{"messages": [{"role": 1, "content": "a"}]}',
    b"[" * 100_000,
    GOOD + GOOD,
    b"\xef\xbb\xbf" + GOOD,
    GOOD.decode().encode("utf-16-le"),
    b"\x00",
]


def test_blank_lines_and_other_line_ends_change_no_conversation(tmp_path):
    found = []
    for text in (b"%s\n%s", b"\n%s\r\n  \n%s\r\n\t\n"):
        (tmp_path / "data").write_bytes(text % (GOOD, GOOD))
        source = open_source(f"jsonl:{tmp_path}/data", 40, "float32")
        found.append([rows.tolist() for rows in source.batch(0, 0, 1, range(1))])
    assert found[0] == found[1]


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(*shape, kind=8, dims=None, data=None):
    """A file of the MNIST format; its elements are 0, 1, 2, ... modulo 10."""
    head = struct.pack(f">4B{len(shape)}I", 0, 0, kind, dims or len(shape), *shape)
    return head + (
        (np.arange(np.prod(shape)) % 10).astype("u1").tobytes() if data is None else data
    )


PACKED = gzip.compress(idx(20, 3, 2), mtime=0)
SOUND = {
    IMAGES: idx(20, 3, 2),
    LABELS: idx(20),
    "t10k-images-idx3-ubyte": idx(6, 3, 2),
    "t10k-labels-idx1-ubyte": idx(6),
}
DAMAGED_IMAGES = {
    "missing": {IMAGES: None},
    "empty": {IMAGES: b""},
    "header cut": {IMAGES: SOUND[IMAGES][:15]},
    "cut": {IMAGES: SOUND[IMAGES][:-1]},
    "labels cut": {LABELS: SOUND[LABELS][:-1]},
    "more behind": {IMAGES: SOUND[IMAGES] + b"\0"},
    "magic": {IMAGES: b"\1" + SOUND[IMAGES][1:]},
    "second byte of the magic": {LABELS: b"\0\1" + SOUND[LABELS][2:]},
    "floats": {IMAGES: idx(20, 3, 2, kind=13)},
    "two dims": {IMAGES: idx(20, 3, 2, dims=2)},
    "labels of images": {LABELS: idx(20, 3, 2)},
    "fewer images": {IMAGES: idx(19, 3, 2)},
    "fewer labels": {LABELS: idx(19)},
    "count beyond the data": {IMAGES: idx(2**31, 3, 2, data=bytes(120))},
    "size that wraps around": {IMAGES: idx(2**32 - 1, 2**32 - 1, 2, data=bytes(120))},
    "train of another size": {IMAGES: idx(20, 2, 3)},
    "test of another size": {"t10k-images-idx3-ubyte": idx(6, 6, 1)},
    "no images": {IMAGES: idx(0, 3, 2), LABELS: idx(0)},
    "no rows": {IMAGES: idx(20, 0, 2)},
    "no elements in huge dims": {IMAGES: idx(0, 2**32 - 1, 2**32 - 1, data=b"")},
    "gzip cut": {IMAGES: None, f"{IMAGES}.gz": PACKED[:-10]},
    "gzip cut in its head": {IMAGES: None, f"{IMAGES}.gz": PACKED[:5]},
    "gzip checksum": {IMAGES: None, f"{IMAGES}.gz": PACKED[:-8] + b"x" + PACKED[-7:]},
    "gzip length": {IMAGES: None, f"{IMAGES}.gz": PACKED[:-1] + b"x"},
    "gzip data": {IMAGES: None, f"{IMAGES}.gz": PACKED[:12] + b"\xff" * 20 + PACKED[32:]},
    "no gzip": {IMAGES: None, f"{IMAGES}.gz": SOUND[IMAGES]},
}


ODD_DOCUMENTS = {
    "latin1.txt": "größer".encode("latin1"),
    "list.jsonl": b"[1]\n",
    "number.jsonl": b'{"text": 1}\n',
    "keys.jsonl": b'{"body": "a"}\n',
    "cut.jsonl": b'{"text": "a"}\n{"text": "b\n',
    "bytes.jsonl": b'{"text": "\xff"}\n',
    "surrogate.jsonl": b'{"text": "\\ud800"}\n',
}
NO_TOKENIZERS = {
    "nothing": b"",
    "an empty object": b"{}",
    "no text": b"\xff",
    "no vocabulary": b'{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}',
}
NO_META = [
    "",
    "{",
    "[]",
    "3",
    '{"dtype": "int8"}',
    '{"dtype": 16}',
    '{"dtype": null}',
    "\xff",
    "NaN",
]
NO_ARRAYS = ["[", "[{}", '[{"messages": 1}]x', '[{"a": 1, "a": 2}]', "[{},]"]


class Family(NamedTuple):
    """A family of formats.

    read     (folder) reads the files
    law      what a refusal must have, as a pattern; {folder} and {file} are paths, {file} that of the only damaged file
    damages  {damage: {file: its bytes; None: it is missing}}
    sound    the files beside those that are damaged
    needs    a package without which nothing of the family is read
    """

    read: Callable[[Path], Any]
    law: str
    damages: Mapping[str, Mapping[str, bytes | None]]
    sound: Mapping[str, bytes] = {}
    needs: str = ""


def opened(source, validation="", context=CONTEXT):
    """Read a source of this name in a folder."""

    def read(folder):
        beside = validation and f"tokens:{folder}/{validation}"
        return open_source(source.format(folder), context, "float32", validation=beside)

    return read


def prepared(folder):
    """Prepare the one file of a folder; nothing is written if it is refused."""
    (path,) = folder.iterdir()
    options = Options([path], ByteTokenizer(), -1, Form(0.1, 0, "text", ""))
    try:
        prepare(options, folder / "out", processes(1, 0))
    finally:
        assert not (folder / "out/train.bin").exists()


def file(name, damages):
    """The damages of one file."""
    return {damage: {name: data} for damage, data in damages.items()}


FAMILIES = {
    "tokens": Family(opened("tokens:{}/a.bin"), r"a\.bin", file("a.bin", DAMAGED_TOKENS)),
    "held-out tokens": Family(
        opened("tokens:{}/b.bin", "a.bin"),
        r"a\.bin",
        file("a.bin", DAMAGED_TOKENS),
        {"b.bin": TOKENS.tobytes()},
    ),
    "the dtype of tokens": Family(
        opened("tokens:{}/a.bin"),
        r"meta\.json",
        file("meta.json", {text: text.encode("latin-1") for text in NO_META}),
        {"a.bin": TOKENS.tobytes()},
    ),
    "conversations": Family(
        opened("jsonl:{}/data", context=40),
        r"Line 3 of .*/data",
        file("data", {repr(line): b"\n".join([GOOD, b"", line, GOOD]) for line in LINES}),
    ),
    "an array of conversations": Family(
        opened("jsonl:{}/data"), "/data", file("data", {text: text.encode() for text in NO_ARRAYS})
    ),
    "images": Family(opened("idx:{}"), "{folder}", DAMAGED_IMAGES, SOUND),
    "documents to prepare": Family(
        prepared, "{file}", {name: {name: data} for name, data in ODD_DOCUMENTS.items()}
    ),
    "documents without a text": Family(
        prepared, "inputs must have text", file("a.txt", {"empty": b""})
    ),
    "tables of documents": Family(
        prepared,
        "{file}",
        file("a.parquet", {"text": b"no parquet at all", "empty": b""}),
        needs="pyarrow",
    ),
    "tokenizers": Family(
        lambda folder: open_tokenizer((folder / "tok").read_bytes(), f"{folder}/tok"),
        "/tok",
        file("tok", NO_TOKENIZERS),
        needs="tokenizers",
    ),
}


def refusal_of(family, folder, damaged):
    """What is wrong with the refusal of a folder with this damaged file; nothing if it is as its law says."""
    try:
        found = family.read(folder)
    except DataError as error:
        paths = {"folder": re.escape(str(folder)), "file": re.escape(f"{folder}/{damaged}")}
        is_named = re.search(family.law.format(**paths), error.law)
        return "" if is_named and "\n" not in error.law else f"refused by {error.law!r:.300}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return f"read as {str(found)[:100]}"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_damage_of_data_is_refused_by_one_line_as_its_law_says(name, tmp_path):
    family, wrong = FAMILIES[name], {}
    if family.needs:
        pytest.importorskip(family.needs)
    for number, (damage, changes) in enumerate(family.damages.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for each, data in {**family.sound, **changes}.items():
            if data is not None:
                (folder / each).write_bytes(data)
        if said := refusal_of(family, folder, next(iter(changes))):
            wrong[damage] = said
    assert family.damages and not wrong


@pytest.mark.parametrize("packed", [False, True])
def test_sound_images_are_read_as_they_are(tmp_path, packed):
    for name, data in SOUND.items():
        (tmp_path / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(data) if packed else data)
    source = open_source(f"idx:{tmp_path}", 8, "float64")
    images, labels = source.held_out_rows(range(6))
    assert source.samples == 20 and labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(np.rint(images * 255).ravel(), np.arange(36) % 10)
