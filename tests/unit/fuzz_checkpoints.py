"""Checkpoints that are damaged in one file, and whose digests are made to fit."""

import hashlib
import json
import random
import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np
from safetensors import numpy as safetensors

from mpitrain.machine.backend import HostBackend
from mpitrain.run.fill import fill
from mpitrain.run.manifest import INDEX, MANIFEST, read_manifest, verify
from mpitrain.transport.threads import run_ranks
from tests.cases.layouts import LAYOUTS, kept, save
from tests.unit.fuzz_json import OF_TEXTS, OF_VALUES, Each, Fixed, Int, Null, Number, Text
from tests.unit.fuzz_readers import INVALID, Damaged, canonical, in_the_way

LAYOUT = LAYOUTS["whole on 1"]
MODEL, STATE, BLOCK = "model-00001-of-00001.safetensors", "state-00000.safetensors", 16 << 20
COUNT = Int(0, 2**63 - 1)
STORAGE, KEPT = kept(LAYOUT, 0)


class Word(Text):
    def holds(self, value):
        return (
            isinstance(value, str)
            and 0 < len(value) <= 100
            and value.isascii()
            and value.isprintable()
        )


class Any_(Text):
    def holds(self, value):
        return isinstance(value, str)


def written(folder: Path) -> Path:
    """A checkpoint of one rank, with a tensor of the state in two pieces."""
    return run_ranks(1, save, folder, LAYOUT)[0]


def loaded(path: Path):
    """What a checkpoint holds, as a run on one rank loads it."""
    manifest = read_manifest(path)
    verify(path, manifest, 0, 1)
    empty = [one._replace(array=np.zeros_like(one.array)) for one in KEPT]
    fill(path, manifest, empty, STORAGE, HostBackend(), LAYOUT.facts, 0)
    return manifest.done, dict(manifest.scalars), [(one.name, one.array.tobytes()) for one in empty]


def seal(path: Path, body: dict | None = None) -> None:
    """Make digests and sizes fit what lies there; of this body of the manifest, or of that which is
    there.
    """
    if body is None:
        body = json.loads((path / MANIFEST).read_text())
        for name, listed in body["files"].items():
            data = (path / name).read_bytes() if (path / name).is_file() else b"x"
            listed[1:] = [len(data), [hashlib.sha256(data).hexdigest()]]
    body = {name: value for name, value in body.items() if name != "sha256"}
    digest = hashlib.sha256(canonical(body).encode()).hexdigest()
    (path / MANIFEST).write_text(canonical({**body, "sha256": digest}))


class Manifests:
    """The manifest, damaged in what it says; or in its text, which its own digest then shows."""

    def __init__(self, folder: Path):
        self.whole = written(folder / "whole")
        self.truth = loaded(self.whole)
        self.body = json.loads((self.whole / MANIFEST).read_text())
        del self.body["sha256"]
        size = max(nbytes for _, nbytes, _ in self.body["files"].values())
        part = (Fixed(), [Fixed()], Null(Fixed()), [(Fixed(), Fixed(), Fixed())])
        self.wanted = {
            "format": Fixed(),
            "step": Fixed(),
            "samples": COUNT,
            "run": Word(),
            "layout": Each(Word(), COUNT),
            "scalars": Each(Word(), Number(0, 2**63 - 1024)),
            "files": Each(Word(), (Int(0, 2**31 - 1), Fixed(), [Fixed()])),
            "stored": [(Fixed(), Fixed(), Fixed(), Text(("agreed", "own", "mean", "bound")), part)],
            "block": Int(size, BLOCK),
        }

    read = staticmethod(loaded)

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        path = folder / self.whole.name
        shutil.copytree(self.whole, path)
        kind = rng.choice([*OF_VALUES, *OF_TEXTS, "in the way", "bounds", "overlap", "swap"])
        if kind == "in the way":
            return Damaged(
                kind, path, MANIFEST, self.truth if in_the_way(rng, path / MANIFEST) else INVALID
            )
        if kind in OF_TEXTS:
            seal(path, self.body)
            full = json.loads((path / MANIFEST).read_text())
            (path / MANIFEST).write_bytes(OF_TEXTS[kind](rng, full, canonical))
            return Damaged(kind, path, str(path.parent), INVALID)
        if kind in OF_VALUES:
            body, is_valid = OF_VALUES[kind](rng, self.body, self.wanted)
        else:
            body, is_valid = getattr(self, kind)(rng)
        try:
            seal(path, body)
        except UnicodeEncodeError:
            return self.damage(rng, folder / "again")
        if not is_valid or not self._is_whole(body):
            return Damaged(kind, path, str(path), INVALID)
        done, _, arrays = self.truth
        same = [one[3] for one in body["stored"]] == [
            one[3] for one in self.body["stored"]
        ] and body["layout"] == self.body["layout"]
        done = done._replace(samples=body["samples"], run=body["run"])
        return Damaged(kind, path, "", (done, body["scalars"], arrays if same else loaded(path)[2]))

    def _is_whole(self, body: dict) -> bool:
        """Whether entries of the right types fit together: the index and what is stored are listed,
        and replicas counted.
        """
        kinds = {}
        return (
            body["layout"].get("dp", 0) >= 1
            and body["files"].keys() == self.body["files"].keys()
            and 1 <= body["scalars"].get("loss_scale", 1) <= 2**24
            and len(body["stored"]) == len(self.body["stored"])
            and all(
                len(now[2]) == len(then[2])
                for now, then in zip(
                    body["files"].values(), self.body["files"].values(), strict=True
                )
            )
            and all(
                kinds.setdefault((name, part[0]), kind) == kind
                for _, _, name, kind, part in body["stored"]
            )
        )

    def bounds(self, rng):
        """A piece, a rectangle or a file that reaches beyond what it is of."""
        body = deepcopy(self.body)
        stored = rng.choice(body["stored"])
        _, shape, _, pieces = stored[4]
        size = int(np.prod(shape))
        change = rng.choice(["piece", "rectangle", "file", "negative", "place", "empty"])
        if change == "piece":
            pieces[-1][1] += rng.choice([1, 2**40, 10**30])
        elif change == "rectangle":
            stored[4][2] = [[[0, length + 1] for length in shape]] if shape else [[[0, 1]]]
        elif change == "file":
            name = rng.choice(sorted(body["files"]))
            body["files"][name][1] += rng.choice([1, -1, 2**40])
        elif change == "negative":
            pieces[0][0] = -rng.choice([1, size, 2**70])
        elif change == "place":
            pieces[0][2] = rng.choice([1, size, -1])
        else:
            pieces.clear()
        return body, False

    def overlap(self, rng):
        """The same elements, or the same bytes, twice."""
        body = deepcopy(self.body)
        stored = rng.choice(body["stored"])
        other = rng.choice([one for one in body["stored"] if one != stored])
        change = rng.choice(["entry", "key", "piece", "rectangles"])
        if change == "entry":
            body["stored"].append(deepcopy(stored))
        elif change == "key":
            stored[1] = other[1]
        elif change == "piece":
            first = stored[4][3][0]
            length = first[1] - first[0]
            stored[4][3][:] = [first, [first[0], first[1], length]]
        else:
            stored[4][2] = [[[0, length] for length in stored[4][1]]] * 2
        return body, False

    def swap(self, rng):
        """Two entries that change places, which says the same; or two of one size whose keys do,
        which says something else.
        """
        body = deepcopy(self.body)
        i, j = rng.sample(range(len(body["stored"])), 2)
        body["stored"][i], body["stored"][j] = body["stored"][j], body["stored"][i]
        if rng.random() < 0.5:  # a piece where another one's length is
            body["stored"][i][0], body["stored"][j][0] = MODEL, INDEX
            return body, False
        return body, True


class Headers:
    """The header of the state, or of the parameters, and the index, in a checkpoint whose digests
    fit.
    """

    WANTED = {"dtype": Fixed(), "shape": [Fixed()], "data_offsets": (Fixed(), Fixed())}

    def __init__(self, folder: Path):
        self.whole = written(folder / "whole")
        self.truth = loaded(self.whole)

    read = staticmethod(loaded)

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        path = folder / self.whole.name
        shutil.copytree(self.whole, path)
        file = path / rng.choice([MODEL, STATE])
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        tensors = safetensors.load(raw)
        own = {
            name: getattr(self, name)
            for name in ("length_of_header", "places", "dtypes", "rewritten", "index", "metadata")
        }
        kind = rng.choice([*OF_VALUES, *OF_TEXTS, "in the way", *own, *own])
        if kind == "in the way":
            is_valid = in_the_way(rng, file)
        elif kind in OF_TEXTS:
            text, is_valid = OF_TEXTS[kind](rng, header, json.dumps), False
            file.write_bytes(len(text).to_bytes(8, "little") + text + body)
        elif kind in OF_VALUES:
            wanted = {name: self.WANTED for name in header if name != "__metadata__"}
            changed, is_valid = OF_VALUES[kind](
                rng, header, {**wanted, "__metadata__": Null(Each(Any_(), Any_()))}
            )
            is_valid = is_valid or self._says_the_same(header, changed)
            text = json.dumps(changed).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + body)
        else:
            is_valid = own[kind](rng, path, file, header, body, tensors)
        seal(path)
        if is_valid and file.is_file() and kind not in ("in the way", "index"):
            safetensors.load(file.read_bytes())  # its own library reads it, too
        named = (
            "index.json"
            if kind == "index"
            else str(path)
            if kind in ("in the way", "length")
            else file.name
        )
        return Damaged(kind, path, str(path) if named else "", self.truth if is_valid else INVALID)

    def _says_the_same(self, header, changed) -> bool:
        """Whether all that differs is something that no reader asks for: the texts, or more entries
        of a tensor.
        """
        tensors = {name: one for name, one in changed.items() if name != "__metadata__"}
        texts = changed.get("__metadata__")
        return (
            tensors.keys() == header.keys() - {"__metadata__"}
            and all(
                isinstance(one, dict)
                and all(
                    json.dumps(one.get(key)) == json.dumps(header[name][key]) for key in self.WANTED
                )
                for name, one in tensors.items()
            )
            and (
                texts is None
                or (
                    isinstance(texts, dict)
                    and all(isinstance(text, str) and text.isprintable() for text in texts.values())
                )
            )
        )

    def length_of_header(self, rng, path, file, header, body, tensors):
        text = json.dumps(header).encode()
        length = rng.choice(
            [
                0,
                1,
                len(text) - 1,
                len(text) + 1,
                len(text) + len(body),
                len(text) + len(body) + 1,
                2**32,
                2**63,
                2**64 - 1,
            ]
        )
        file.write_bytes(length.to_bytes(8, "little") + text + body)
        return False

    def places(self, rng, path, file, header, body, tensors):
        """Offsets that overlap, leave holes, are negative, change places, or reach beyond the file.
        """
        names = [name for name in header if name != "__metadata__"]
        one, other = (header[name]["data_offsets"] for name in rng.sample(names, 2))
        change = rng.choice(
            ["all at 0", "hole", "negative", "beyond", "shifted", "more behind", "less"]
        )
        if change == "all at 0":
            for name in names:
                start, stop = header[name]["data_offsets"]
                header[name]["data_offsets"] = [0, stop - start]
        elif change == "hole":
            body += bytes(8)
            header[names[-1]]["data_offsets"] = [
                place + 8 for place in header[names[-1]]["data_offsets"]
            ]
        elif change == "negative":
            one[:] = [place - one[1] - 8 for place in one]
        elif change == "beyond":
            one[:] = [place + len(body) for place in one]
        elif change == "shifted":
            one[:] = [place + rng.choice([-1, 1]) for place in one]
        elif change == "more behind":
            body += b"\0"
        else:
            body = body[:-1]
        if [*one] == [*other]:
            return self.places(rng, path, file, header, body, tensors)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + body)
        return False

    def dtypes(self, rng, path, file, header, body, tensors):
        """A tensor of another type: of the same width, of another one, unknown, or BF16, which
        NumPy cannot hold.
        """
        name = rng.choice([name for name in tensors if tensors[name].size])
        if rng.random() < 0.5:
            header[name]["dtype"] = rng.choice(
                ["I32", "U32", "F64", "F16", "BF16", "F33", "f32", "", "F8_E4M3", "BOOL"]
            )
        else:
            dtype, there = rng.choice([("BF16", 2), ("I64", 8), ("U8", 1), ("F8_E5M2", 1)])
            tensors[name] = np.zeros(tensors[name].size * there, np.uint8)
            at = 0
            for other in header:
                if other != "__metadata__":
                    header[other]["data_offsets"] = [at, at := at + tensors[other].nbytes]
            header[name]["dtype"], body = (
                dtype,
                b"".join(tensors[one].tobytes() for one in header if one != "__metadata__"),
            )
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + body)
        return False

    def rewritten(self, rng, path, file, header, body, tensors):
        """The same tensors by another writer: in another order, wider, with more of them, or with
        more space.
        """
        change = rng.choice(["library", "wider", "more", "space", "indented"])
        texts = header["__metadata__"]
        if change == "wider":
            name = rng.choice(sorted(tensors))
            tensors[name] = tensors[name].astype("f8")
        if change == "more":
            tensors[rng.choice(["metadata", "zz", "\u00e9"])] = np.zeros(
                rng.choice([(0,), (3,), ()]), rng.choice(["i2", "u4", "f4", "?"])
            )
        if change in ("library", "wider", "more"):
            file.write_bytes(safetensors.save(tensors, texts if rng.random() < 0.5 else None))
        else:
            text = json.dumps(
                header, indent=2 if change == "indented" else None
            ).encode() + b" " * rng.randrange(1, 9)
            file.write_bytes(len(text).to_bytes(8, "little") + text + body)
        return True

    def metadata(self, rng, path, file, header, body, tensors):
        header["__metadata__"] = rng.choice(
            [None, {}, {"a": 1}, {"a": None}, [], "x", {"format": "pt"}]
        )
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + body)
        return header["__metadata__"] in (None, {}, {"format": "pt"})

    def index(self, rng, path, file, header, body, tensors):
        """The index, whose names lead to files."""
        index = json.loads((path / INDEX).read_text())
        places, name = index["weight_map"], rng.choice(sorted(index["weight_map"]))
        change = rng.choice(
            ["file", "missing", "type", "text", "more", "metadata", "no map", "way"]
        )
        if change == "way":
            return in_the_way(rng, path / INDEX)
        if change == "file":
            places[name] = rng.choice(
                [
                    STATE,
                    INDEX,
                    "..",
                    "/etc/passwd",
                    f"../{path.name}/{MODEL}",
                    "",
                    "nowhere.safetensors",
                    "\x1b[2J",
                ]
            )
        elif change == "missing":
            del places[name]
        elif change == "type":
            places[name] = rng.choice([None, 1, [MODEL], {}])
        elif change == "more":
            places["another"] = rng.choice([MODEL, "elsewhere"])
        elif change == "metadata":
            index["metadata"] = rng.choice([None, 5, {}])
        elif change == "no map":
            index = rng.choice([[], {}, 5, {"weight_map": []}, {"weight_map": None}])
        text = (
            json.dumps(index).encode()
            if change != "text"
            else rng.choice(list(OF_TEXTS.values()))(rng, index, json.dumps)
        )
        (path / INDEX).write_bytes(text)
        return change in ("more", "metadata")
