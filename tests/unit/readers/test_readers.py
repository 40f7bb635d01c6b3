"""Damaged files that mpitrain wrote itself: one refusal that names the file, or what a sound file of that content says."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import numpy as safetensors

from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning, write_tuning
from mpitrain.formats.safetensors_files import INDEX, located
from mpitrain.machine.backend import HostBackend
from mpitrain.ops.cuda.tiles import (
    TENSOR_TILES,
    TILES,
    FastestTile,
    Tiling,
    read_tiles,
    write_tiles,
)
from mpitrain.run.checkpoint.loading import fill
from mpitrain.run.checkpoint.manifest import MANIFEST, read_manifest, verify
from mpitrain.transport.threads import run_ranks
from tests.cases.layouts import LAYOUTS, kept, save
from tests.processes import SECONDS
from tests.unit.readers.damages import WAYS, in_the_way, of_text, of_values, refusal

MODEL, STATE, STEP = "model-00001-of-00001.safetensors", "state-00000.safetensors", "step-00000001"
LAYOUT = LAYOUTS["whole on 1"]
STORAGE, KEPT = kept(LAYOUT, 0)


def loaded(path: Path) -> list:
    """What a checkpoint holds, as a run on one rank loads it."""
    manifest = read_manifest(path)
    verify(path, manifest, 0, 1)
    empty = [one._replace(array=np.zeros_like(one.array)) for one in KEPT]
    fill(path, manifest, empty, STORAGE, HostBackend(), LAYOUT.facts, 0)
    return [(one.name, one.array.tobytes()) for one in empty]


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True) + "\n"


def seal(path: Path, body: dict | None = None) -> None:
    """Make the digests of a checkpoint fit its files, or its manifest this body."""
    if body is None:
        body = json.loads((path / MANIFEST).read_text())
        del body["sha256"]
        for name, listed in body["files"].items():
            data = (path / name).read_bytes() if (path / name).is_file() else b"x"
            listed[1:] = [len(data), [hashlib.sha256(data).hexdigest()]]
    digest = hashlib.sha256(canonical(body).encode()).hexdigest()
    (path / MANIFEST).write_text(canonical({**body, "sha256": digest}))


def put_header(path: Path, text: bytes, body: bytes, length: int | None = None) -> None:
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    seal(path.parent)


class Format(NamedTuple):
    """A format whose content is JSON.

    read      (path) -> what a file, or a checkpoint, says
    write     (folder) -> the sound file
    content   (file) -> its content as JSON
    put       (file, content) writes it, and whatever must fit it
    put_text  (file, bytes) writes a text
    sound     matches the damages of values and of the file that leave it sound
    refused   changes to its entries that are refused, in Python
    accepted  changes that are accepted
    """

    read: Callable[[Path], Any]
    write: Callable[[Path], Path]
    content: Callable[[Path], Any]
    put: Callable[[Path, Any], None]
    put_text: Callable[[Path, bytes], None]
    sound: str
    refused: str
    accepted: str


def checkpoint_of(name: str) -> Callable[[Path], Path]:
    return lambda folder: run_ranks(1, save, folder, LAYOUT)[0] / name


def header(file: Path) -> tuple[dict, bytes]:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def plain(file: Path) -> Any:
    return json.loads(file.read_bytes())


def written(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def manifest_body(file: Path) -> dict:
    body = plain(file)
    del body["sha256"]
    return body


def of_header(name: str) -> Format:
    return Format(
        lambda file: loaded(file.parent),
        checkpoint_of(name),
        lambda file: header(file)[0],
        lambda file, content: put_header(file, json.dumps(content).encode(), header(file)[1]),
        lambda file, text: put_header(file, text, header(file)[1]),
        r".+: more|__metadata__: (no .*|null)|no __metadata__",
        """
first['data_offsets'], last['data_offsets'] = last['data_offsets'], first['data_offsets']
first['data_offsets'][0] += 4
first['data_offsets'][0] -= 4
last['data_offsets'][1] += 4
last['data_offsets'][:] = [0, last['data_offsets'][1] - last['data_offsets'][0]]
last['data_offsets'][1] += 2**40
last['shape'].append(2)
first['dtype'] = 'I32'
first['dtype'] = 'F16'
first['dtype'] = 'F64'
first['dtype'] = 'BF16'
first['dtype'] = 'F33'
first['dtype'] = ''
__metadata__['a'] = 1
__metadata__['a'] = None
""",
        "__metadata__ = {'format': 'pt'}",
    )


def write_both(folder: Path, write: Callable, *content: Any) -> Path:
    folder.mkdir()
    write(folder / "table.json", *content)
    return folder / "table.json"


FOUND = (
    FastestTile("float32", "NT", 512, 128, 64, Tiling(TILES[0], 4)),
    FastestTile("float16", "NN", 4096, 4096, 64, Tiling(TENSOR_TILES[2], 1)),
    FastestTile("bfloat16", "TN", 7, 1, 2**31 - 1, Tiling(TENSOR_TILES[0], 32)),
)
OF_TWO = "levels['host']['plans']['2']"
"""Constants of a tuning, of plans and two ranks."""
FORMATS = {
    "manifests": Format(
        lambda file: loaded(file.parent),
        checkpoint_of(MANIFEST),
        manifest_body,
        lambda file, content: seal(file.parent, content),
        lambda file, text: file.write_bytes(text),
        r"layout: no (dp|pp|tp|shards)|scalars: no scale|files: no .*index\.json|files\..*\.2: shorter",
        """
format = 'mpitrain-9'
step = 2
base = {'folder': 'a', 'sha256': {}, 'more': 1}
layout['pp'] = 2**63
scalars['scale'] = 2**63
samples = 2**63
run = ''
run = 'a' * 101
run = 'a\\x1bb'
run = '\\u00e9'
files[STATE][2] *= 2
files[STATE][0] = 2**31
files[STATE][1] += 1
files[STATE][1] = 0
files[STATE][2][0] = 'g' * 64
files[STATE][2][0] = files[MODEL][2][0]
files['nothing'] = [0, 0, []]
files['../elsewhere'] = files[STATE]
files['/etc/passwd'] = files[STATE]
files['.hidden'] = files[STATE]
files['a\\x1bb'] = files[STATE]
block = 1
block = 0
stored[0][0] = INDEX
stored[0][0] = '../' + STATE
stored[0][1] = stored[1][1]
stored[0][3] = 'mine'
stored.append(stored[0])
stored.append(unread('a', 'bound', 'a', [1] * 33, None, [[0, 1, 0]]))
stored[0][4][3][0][1] += 1
stored[0][4][3][0][1] += 10**30
stored[0][4][3][0][0] = -1
stored[0][4][3].append(stored[0][4][3][0])
stored[0][4][3].append([4, 8, 8])
stored[0][4][3].clear()
stored[0][4][1] = [9]
stored[2][4][1] = [192, 1]
stored[2][4][2][0][1][1] += 1
""",
        "stored.reverse()\nstored.append(unread('a', 'bound', 'a', [4], [[[1, 3]]], [[0, 2, 0]]))",
    ),
    "headers of parameters": of_header(MODEL),
    "headers of state": of_header(STATE),
    "indexes": Format(
        lambda file: loaded(file.parent),
        checkpoint_of(INDEX),
        plain,
        lambda file, content: (written(file, content), seal(file.parent)),
        lambda file, text: (file.write_bytes(text), seal(file.parent)),
        r"metadata.*|no metadata|more|weight_map: more|utf-8-sig",
        "".join(
            f"weight_map['head.bias'] = {name!r}\n"
            for name in (STATE, INDEX, "..", "/etc/passwd", f"../{STEP}/{MODEL}", "", "no", "\x1b")
        ),
        "weight_map['another'] = MODEL",
    ),
    "tuning": Format(
        read_tuning,
        lambda folder: write_both(folder, write_tuning, DEFAULT),
        plain,
        written,
        lambda file, text: file.write_bytes(text),
        r"utf-8-sig|machine: more|machine: no (?!hosts|cores).*|machine\.(?!hosts|cores).*|link.*"
        r"|levels\.host\.whole\.\d\.(plain|window): (more|no .*)",
        f"""
levels['rack'] = levels.pop('host')
levels['host']['machine'] = machine
machine['sockets'] = 0
machine['hosts'] = 0
machine['cores'] = 10**6 + 1
{OF_TWO}['plain']['256'][0] = 1001
{OF_TWO}['plain']['256'] = [0, 0.0, 0, 0.0, 0, 0]
{OF_TWO}['gpu'] = {OF_TWO}['plain']
del {OF_TWO}['window'], levels['host']['whole']['2']['plain']
"""
        + "".join(
            f"[at.update({{{name!r}: at.pop('2')}}) for at in levels['host'].values()]\n"
            for name in ("0", "-2", "2.0", " 2", "2_0", "٢", "02", "1e1", "9" * 400, "")
        )
        + "".join(
            f"{OF_TWO}['plain'][{name!r}] = {OF_TWO}['plain'].pop('256')\n"
            for name in ("256_", " 256", "4096.0", "0256", "-1")
        ),
        f"{OF_TWO}['plain'], {OF_TWO}['window'] = {OF_TWO}['window'], {OF_TWO}['plain']",
    ),
    "tiles": Format(
        lambda file: read_tiles(file).measured,
        lambda folder: write_both(folder, write_tiles, "a device", FOUND),
        plain,
        written,
        lambda file, text: file.write_bytes(text),
        r"utf-8-sig|no device|measured: (shorter|\[\])|link.*",
        "".join(f"measured[0]['plan'][0][0] = {size!r}\n" for size in (0, -1, 63, 64.0, True, "64"))
        + """
measured[0]['plan'][1] = 0
measured[0]['plan'][1] = 33
measured[0]['m'] = 0
measured[0]['n'] = 2**31
measured[0]['elements'] = 'float8'
measured[0]['stored'] = 'NX'
measured[0]['kernel'] = 'other'
measured[0]['plan'][0], measured[1]['plan'][0] = measured[1]['plan'][0], measured[0]['plan'][0]
""",
        "measured[1]['plan'][0], measured[2]['plan'][0] = measured[2]['plan'][0], measured[1]['plan'][0]",
    ),
}


def edited(content: Any, change: str) -> Any:
    """A copy of the content after a change in Python to its entries."""
    copy = deepcopy(content)
    tensors = [one for one in copy.values() if isinstance(one, dict) and "dtype" in one] or [None]
    known = {
        "INDEX": INDEX,
        "STATE": STATE,
        "MODEL": MODEL,
        "first": tensors[0],
        "last": tensors[-1],
    }
    known |= {"unread": unread, "__builtins__": {}}
    names = known | copy
    exec(change, names)
    return {name: value for name, value in names.items() if name not in known}


def unread(key: str, kind: str, *part: Any) -> list:
    """The entry of a stored array that no job of these tensors reads."""
    return [STATE, key, "unread", kind, list(part)]


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.slow
def test_a_file_is_refused_by_name_exactly_where_it_is_damaged(name, tmp_path):
    form, wrong, count = FORMATS[name], [], 0
    file = form.write(tmp_path / "sound")
    truth, content = form.read(file), form.content(file)
    named = tmp_path / "case"

    def tried(damage: str, is_sound: bool, put: Callable[[Path], None]) -> None:
        shutil.rmtree(named, ignore_errors=True)
        shutil.copytree(tmp_path / "sound", named, symlinks=True)
        path = named / file.relative_to(tmp_path / "sound")
        put(path)
        said = refusal(form.read, path, named)
        if is_sound:
            said = "" if said.startswith("read as ") else said or "refused"
        if said:
            wrong.append(f"{damage} ({'sound' if is_sound else 'damaged'}): {said}")

    for damage, value in of_values(content):
        is_sound = bool(re.fullmatch(form.sound, damage.removeprefix(": ").removesuffix("\x1b")))
        try:
            tried(damage, is_sound, lambda path, value=value: form.put(path, value))
        except (TypeError, AttributeError, LookupError) as error:  # a digest of nothing
            raise AssertionError(damage) from error
        count += is_sound
    texts = canonical if name == "manifests" else json.dumps
    full = plain(file) if name == "manifests" else content
    altered = [("altered", texts(full).replace('"samples": 12', '"samples": 13').encode())]
    altered += [("not canonical", json.dumps(full, indent=1).encode())]
    for damage, data in [*of_text(texts(full)), *(altered if name == "manifests" else [])]:
        is_sound = bool(re.fullmatch(form.sound, damage))
        tried(damage, is_sound, lambda path, data=data: form.put_text(path, data))
    for way in WAYS:
        is_sound = way.startswith("link") or bool(re.fullmatch(form.sound, way))
        tried(way, is_sound, lambda path, way=way: in_the_way(way, path))
    for changes, is_sound in ((form.refused, False), (form.accepted, True)):
        for change in filter(None, changes.split("\n")):
            value = edited(content, change)
            tried(change, is_sound, lambda path, value=value: form.put(path, value))
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong[:40])
    assert count and form.read(file) == truth


def test_another_writer_s_file_of_these_tensors_says_the_same(tmp_path):
    file = checkpoint_of(STATE)(tmp_path)
    tensors, truth = safetensors.load(file.read_bytes()), loaded(file.parent)
    name = next(iter(tensors))
    for others in ({}, {name: tensors[name].astype("f8")}, {"zz": np.zeros((0, 3), "i2")}):
        file.write_bytes(safetensors.save({**tensors, **others}))
        seal(file.parent)
        assert loaded(file.parent) == truth
    content, data = header(file)
    text = json.dumps(content).encode()
    for length in (0, 1, len(text) - 1, len(text) + 1, len(text) + len(data), 2**32, 2**63):
        put_header(file, text, data, length)
        assert refusal(loaded, file.parent, file.parent) == "", length
    for damaged in (data + b"\0", data[:-1]):
        put_header(file, text, damaged)
        assert refusal(loaded, file.parent, file.parent) == "", len(damaged)


def test_a_type_that_numpy_has_not_is_named_and_files_need_no_texts(tmp_path):
    tensors = {
        "a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [6, 14]},
    }
    text, file = json.dumps(tensors).encode(), tmp_path / "a.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(14))
    texts, found = located(file)
    assert texts == {} and found["b"].numpy == np.float32
    assert found["b"].start == 8 + len(text) + 6
    assert (found["a"].dtype, found["a"].shape) == ("BF16", (3,))
    with pytest.raises(ValueError, match=r"a\.safetensors has a tensor of BF16,"):
        _ = found["a"].numpy
