"""Configurations that are damaged."""

import random
from copy import deepcopy
from pathlib import Path

import tomli_w

from mpitrain.config import parse, read_toml
from tests.unit.readers.fuzz_json import DEEP, OF_VALUES, Fixed, Int, Number, Text
from tests.unit.readers.fuzz_readers import INVALID, Damaged, in_the_way


class Configurations:
    """A configuration of some keys, in TOML."""

    WANTED = {
        "run": {
            "seed": Int(0, 2**63 - 1),
            "steps": Int(0, 2**63 - 1),
            "eval_every": Int(-1, 2**63 - 1),
            "stall_seconds": Number(1, 1e30),
            "on_nonfinite": Text(("stop", "skip")),
            "trace": Fixed(),
        },
        "model": {
            "layers": Int(1, 2**63 - 1),
            "kind": Text(("gpt", "mlp")),
            "context": Int(1, 2**63 - 1),
            "tied": Fixed(),
        },
        "batch": {"size": Int(1, 10**9)},
        "data": {"vocabulary": Int(0, 2**63 - 1)},
        "checkpoint": {"every": Int(0, 2**63 - 1)},
    }
    VALUE = {
        "run": {
            "seed": 3,
            "steps": 70,
            "eval_every": -1,
            "stall_seconds": 60.0,
            "on_nonfinite": "skip",
            "trace": False,
        },
        "model": {"layers": 2, "kind": "gpt", "context": 64, "tied": True},
        "batch": {"size": 8},
        "data": {"vocabulary": 0},
        "checkpoint": {"every": 5},
    }
    OF_TEXT = (
        "truncation",
        "duplicate",
        "nesting",
        "encoding",
        "more behind",
        "no TOML",
        "line ends",
        "underscores",
        "swap",
    )

    def __init__(self, folder: Path):
        self.text = tomli_w.dumps(self.VALUE)

    @staticmethod
    def read(path):
        return parse(read_toml(path), path)

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        path, value = folder / "run.toml", self.VALUE
        kind = rng.choice([*OF_VALUES, *OF_VALUES, *self.OF_TEXT, "in the way"])
        if kind in OF_VALUES:
            value, is_valid = OF_VALUES[kind](rng, value, self.WANTED)
            if kind == "missing":
                is_valid = True  # a default is there for every key and every section
            try:
                path.write_text(tomli_w.dumps(value))
            except (
                TypeError,
                ValueError,
                UnicodeEncodeError,
            ):  # null and lone surrogates are not in TOML
                return self.damage(rng, folder)
        elif kind == "in the way":
            path.write_text(self.text)
            is_valid = in_the_way(rng, path) or path.is_file()  # an empty file is one without keys
            value = {} if path.is_file() and not path.read_bytes() else value
        else:
            data, is_valid, value = self.of_text(kind, rng)
            path.write_bytes(data)
        return Damaged(kind, path, str(path), parse(value) if is_valid else INVALID)

    def of_text(self, kind, rng):
        """(the bytes of a file, whether they are TOML, and what they say)."""
        lines, changed = self.text.splitlines(), deepcopy(self.VALUE)
        at = rng.choice([number for number, line in enumerate(lines) if "=" in line])
        name = lines[at].partition(" = ")[0]
        section = next(line for line in lines[at::-1] if line.startswith("[")).strip("[]")
        if kind == "truncation":
            text = "\n".join([*lines[:at], f"{name} ="[: rng.randrange(1, len(name) + 3)]])
        elif kind == "duplicate":
            again = [lines[at], f"{name} = 1", f"[{section}]", f"[{section}.{name}]"]
            text = "\n".join([*lines[: at + 1], rng.choice(again), *lines[at + 1 :]])
        elif kind == "nesting":
            opened = rng.choice(["[", "{a=", "[{a="])
            text = "\n".join(
                [*lines[:at], f"{name} = {opened * (DEEP // len(opened))}", *lines[at + 1 :]]
            )
        elif kind == "encoding":
            place = rng.randrange(len(self.text))
            data = self.text.encode()
            return rng.choice(
                [
                    (b"\xef\xbb\xbf" + data, True, changed),
                    (self.text.encode("utf-16"), False, None),
                    (data[:place] + b"\xff" + data[place:], False, None),
                    (data[:place] + b"\0" + data[place:], False, None),
                ]
            )
        elif kind == "more behind":
            more = rng.choice(["=", "]", "a b", "[[run]]", "run = 1", "\x1b[2J", "'''"])
            text = f"{self.text}\n{more}\n"
        elif kind == "no TOML":
            new = rng.choice(
                [
                    "",
                    "nan",
                    "inf",
                    "-inf",
                    "01",
                    "0x",
                    "1_",
                    "_1",
                    "'",
                    '"\\q"',
                    "[1,,]",
                    "{,}",
                    "1979-05-27",
                    "9" * 5000,
                    "1e999",
                ]
            )
            text = "\n".join([*lines[:at], f"{name} = {new}", *lines[at + 1 :]])
        elif kind == "line ends":
            comment = rng.choice(["", "  # a comment", "\t"])
            return (comment + "\r\n").join(lines).encode() + b"\r\n", True, changed
        elif kind == "underscores":  # TOML has them within numbers
            changed["run"]["steps"] = 1000
            return self.text.replace("steps = 70", "steps = 1_000").encode(), True, changed
        else:
            blocks = self.text.split("\n\n")
            rng.shuffle(blocks)
            return "\n\n".join(blocks).encode(), True, changed
        return text.encode(), False, None
