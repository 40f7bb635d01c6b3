"""Checkpoints that are damaged in one file, and whose digests are made to fit."""

import hashlib
import json
import random
import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np

from mpitrain.machine.backend import HostBackend
from mpitrain.run.checkpoint.loading import fill
from mpitrain.run.checkpoint.manifest import INDEX, MANIFEST, read_manifest, verify
from mpitrain.transport.threads import run_ranks
from tests.cases.layouts import LAYOUTS, kept, save
from tests.unit.readers.fuzz_json import OF_TEXTS, OF_VALUES, Each, Fixed, Int, Null, Number, Text
from tests.unit.readers.fuzz_readers import INVALID, Damaged, canonical, in_the_way

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
        kind = rng.choice(
            [*OF_VALUES, *OF_TEXTS, "in the way", "bounds", "overlap", "swap", *["relations"] * 5]
        )
        if kind == "in the way":
            in_the_way(rng, path / MANIFEST)  # links below a run directory are not followed, either
            return Damaged(kind, path, MANIFEST, INVALID)
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
        facts = [
            (
                one["layout"],
                [kind for _, _, _, kind, _ in one["stored"]],
                [listed[0] for listed in one["files"].values()],
            )
            for one in (body, self.body)
        ]
        same = facts[0] == facts[1]
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
        change = rng.choice(["piece", "rectangle", "file", "negative", "place", "empty", "shape"])
        if change == "piece":
            pieces[-1][1] += rng.choice([1, 2**40, 10**30])
        elif change == "rectangle":
            stored[4][2] = [[[0, length + 1] for length in shape]] if shape else [[[0, 1]]]
        elif change == "file":
            name = rng.choice(sorted(body["files"]))
            body["files"][name][1] += rng.choice([1, -1, 2**40])
        elif change == "shape":  # of all that is stored of a tensor
            for one in body["stored"]:
                if (one[2], one[4][0]) == (stored[2], stored[4][0]):
                    one[4][1] = [size, *[1] * len(shape)]
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

    def relations(self, rng):
        """Entries of the right types that do not fit together."""
        body, change = deepcopy(self.body), rng.randrange(14)
        stored, name = rng.choice(body["stored"]), rng.choice(sorted(body["files"]))
        several = [one for one in body["stored"] if one[2] == "residual"]
        if change == 0:
            body["layout"]["dp"] = 0
        elif change == 1:
            del body["layout"]["dp"]
        elif change == 2:
            body["scalars"]["loss_scale"] = rng.choice([0, 0.5, 2**25])
        elif change == 3:
            del body["files"][INDEX]
        elif change == 4:
            body["files"][name][2] *= rng.choice([0, 2])
        elif change == 5:
            body["files"]["nothing"] = [0, 0, []]
        elif change == 6:
            body["files"][rng.choice(["../elsewhere", "/etc/passwd", "", ".hidden", "a\x1bb"])] = (
                body["files"][name]
            )
        elif change == 7:
            stored[0] = rng.choice(["nowhere.safetensors", INDEX, "../" + STATE])
        elif change == 8:
            body["stored"].append([STATE, "more", "parameters", "agreed", stored[4]])
        elif change == 9:
            several[0][3] = "agreed"
            body["stored"].append([STATE, "more", "residual", "own", several[0][4]])
        elif change == 10:
            more = (
                ["", [4], None, [[0, 4, 0]]]
                if not stored[4][0]
                else [stored[4][0], [4], None, [[0, 4, 0]]]
            )
            body["stored"].append([STATE, "more", stored[2], "mean", more])
        elif change == 11:
            body["stored"].append([STATE, "more", "unread", "bound", ["", [4], None, []]])
        elif change == 12:
            rectangles = rng.choice(
                [[], [[[0, 2]], [[0, 2]]], [[[0, 4], [0, 1]]], [[[1, 5]]], [[[3, 2]]], [[]]]
            )
            body["stored"].append(
                [STATE, "more", "unread", "bound", ["a", [4], rectangles, [[0, 1, 0]]]]
            )
        else:
            twice = [
                [STATE, "more", "unread", kind, [tensor, shape, None, [[0, 1, 0]]]]
                for kind, tensor, shape in rng.choice(
                    [
                        (("own", "a", [4]), ("own", "a", [5])),
                        (("own", "a", [4]), ("mean", "a", [4])),
                        (("own", "a", [4]), ("own", "b", [4])),
                    ]
                )
            ]
            body["stored"] += twice
            if twice[0][4][0] == twice[1][4][0]:  # else they are of one key
                twice[1][1] = "other"
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
