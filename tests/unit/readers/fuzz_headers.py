"""Headers of safetensors files that are damaged, in checkpoints whose digests are made to fit."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
from safetensors import numpy as safetensors

from mpitrain.run.checkpoint.manifest import INDEX
from tests.unit.readers.fuzz_checkpoints import MODEL, STATE, Any_, loaded, seal, written
from tests.unit.readers.fuzz_json import OF_TEXTS, OF_VALUES, Each, Fixed, Null
from tests.unit.readers.fuzz_readers import INVALID, Damaged, in_the_way


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
            in_the_way(rng, file)  # links below a run directory are not followed, either
            is_valid = False
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
        """Offsets that overlap, leave holes, are negative, change places, or reach beyond the file."""
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
        change = rng.choice(["library", "wider", "more", "space", "indented", "renamed"])
        texts = header["__metadata__"]
        if change == "wider":
            name = rng.choice(sorted(tensors))
            tensors[name] = tensors[name].astype("f8")
        if change == "renamed":
            tensors["another"] = tensors.pop(rng.choice(sorted(tensors)))
        if change == "more":
            tensors[rng.choice(["metadata", "zz", "\u00e9"])] = np.zeros(
                rng.choice([(0,), (3,), ()]), rng.choice(["i2", "u4", "f4", "?"])
            )
        if change in ("library", "wider", "more", "renamed"):
            file.write_bytes(safetensors.save(tensors, texts if rng.random() < 0.5 else None))
        else:
            text = json.dumps(
                header, indent=2 if change == "indented" else None
            ).encode() + b" " * rng.randrange(1, 9)
            file.write_bytes(len(text).to_bytes(8, "little") + text + body)
        return change != "renamed"

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
            in_the_way(rng, path / INDEX)
            return False
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
