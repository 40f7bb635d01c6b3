"""Tuning files, tables of tiles and configurations that are damaged."""

import json
import random
from copy import deepcopy
from pathlib import Path

from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning, write_tuning
from mpitrain.ops.cuda.tiles import (
    TENSOR_TILES,
    TILES,
    FastestTile,
    Tiling,
    read_tiles,
    write_tiles,
)
from tests.unit.readers.fuzz_json import OF_TEXTS, OF_VALUES, Each, Fixed, Int, Number, Open, Text
from tests.unit.readers.fuzz_readers import INVALID, Damaged, in_the_way

SECONDS = Number(0, 1000)


class Name(Text):
    """Any text."""

    def holds(self, value):
        return isinstance(value, str)


class Table:
    """A JSON file, damaged in what it says, in its text, or as a file."""

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        path, own = (
            folder / "table.json",
            [name for name in ("swap", "overlap") if hasattr(self, name)],
        )
        kind = rng.choice([*OF_VALUES, *OF_VALUES, *OF_TEXTS, "in the way", *own])
        value, is_valid = self.value, kind == "in the way"
        if kind in OF_VALUES:
            value, is_valid = OF_VALUES[kind](rng, value, self.wanted)
            is_valid = is_valid or self.says_less(value)
        elif kind in own:
            value, is_valid = getattr(self, kind)(rng)
        path.write_text(json.dumps(value))
        if kind in OF_TEXTS:
            path.write_bytes(OF_TEXTS[kind](rng, value, json.dumps))
        if kind == "in the way":
            is_valid = in_the_way(rng, path)
        return Damaged(
            kind,
            path,
            str(path),
            self.meant(value) if is_valid and self.is_whole(value) else INVALID,
        )

    def says_less(self, value):
        """Whether it only lacks what a file may lack."""
        return False


class Tunings(Table):
    """What `bench fit` writes, of 2 and of 4 ranks."""

    read = staticmethod(read_tuning)

    def __init__(self, folder: Path):
        write_tuning(folder / "whole", DEFAULT)
        self.value = json.loads((folder / "whole").read_text())
        constants, knots = (SECONDS,) * 6, self.value["plans"]["2"]["plain"]
        plans = {memory: dict.fromkeys(knots, constants) for memory in ("window", "plain")}
        whole = {memory: Each(Name(), dict.fromkeys(knots, (SECONDS, SECONDS))) for memory in plans}
        self.wanted = {
            "machine": Open({"hosts": Int(1, 10**6), "cores": Int(1, 10**6)}),
            "plans": dict.fromkeys(self.value["plans"], plans),
            "whole": dict.fromkeys(self.value["plans"], whole),
        }

    def is_whole(self, value):
        return all(
            any(at)
            for memories in value["plans"].values()
            for knots in memories.values()
            for at in knots.values()
        )

    def meant(self, value):
        def constants(knots):
            return {int(knot): tuple(map(float, at)) for knot, at in knots.items()}

        return Tuning(
            value["machine"],
            {
                int(n): {memory: constants(at) for memory, at in found.items()}
                for n, found in value["plans"].items()
            },
            {
                int(n): {
                    memory: {name: constants(at) for name, at in names.items()}
                    for memory, names in found.items()
                }
                for n, found in value["whole"].items()
            },
        )

    def swap(self, rng):
        """Constants of one memory under the other's name; or knots of messages that take no time."""
        value, n = deepcopy(self.value), rng.choice(["2", "4"])
        if rng.random() < 0.5:
            memories = value["plans"][n]
            memories["window"], memories["plain"] = memories["plain"], memories["window"]
            return value, True
        knots = value["plans"][n][rng.choice(["window", "plain"])]
        knots[rng.choice(sorted(knots))] = [0, 0.0, 0, 0.0, 0, 0]
        return value, False

    def overlap(self, rng):
        """Numbers of ranks, memories and knots that are no such names, or that only Python takes
        for them.
        """
        value, n = deepcopy(self.value), rng.choice(["2", "4"])
        table = rng.choice(["plans", "whole"])
        if rng.random() < 0.5:
            new = rng.choice(["0", "-2", "2.0", " 2", "2_0", "٢", "02", "1e1", "9" * 400, ""])
            for name in ("plans", "whole"):
                value[name][new] = value[name].pop(n)
        else:
            memory = value[table][n]["plain"]
            memory = memory if table == "plans" else memory[rng.choice(sorted(memory))]
            memory[rng.choice(["256_", " 256", "4096.0", "0256", "-1"])] = memory.pop("256")
        return value, False


class Tables(Table):
    """What `bench gemm --tune` writes."""

    FOUND = (
        FastestTile("float32", "NT", 512, 128, 64, Tiling(TILES[0], 4)),
        FastestTile("float16", "NN", 4096, 4096, 64, Tiling(TENSOR_TILES[2], 1)),
        FastestTile("bfloat16", "TN", 7, 1, 2**31 - 1, Tiling(TENSOR_TILES[0], 32)),
    )

    def __init__(self, folder: Path):
        write_tiles(folder / "whole", "a device", self.FOUND)
        self.value = json.loads((folder / "whole").read_text())
        extent = Int(1, 2**31 - 1)
        line = {
            "elements": Text(("float64", "float32", "float16", "bfloat16")),
            "stored": Text(("NN", "NT", "TN", "TT")),
            "m": extent,
            "n": extent,
            "k": extent,
            "plan": ([Fixed()], Int(1, 32)),
            "kernel": Fixed(),
        }
        self.wanted = {"device": Name(), "measured": [line]}

    @staticmethod
    def read(path):
        return read_tiles(path).measured

    def is_whole(self, value):
        return True

    def says_less(self, value):
        lines = value.get("measured") if isinstance(value.get("device", ""), str) else None
        return (
            value.keys() <= self.value.keys()
            and isinstance(lines, list)
            and all(json.dumps(line) in map(json.dumps, self.value["measured"]) for line in lines)
        )

    def meant(self, value):
        tiles = {tuple(tile): tile for tile in (*TILES, *TENSOR_TILES)}
        return tuple(
            FastestTile(
                line["elements"],
                line["stored"],
                line["m"],
                line["n"],
                line["k"],
                Tiling(tiles[tuple(line["plan"][0])], line["plan"][1]),
            )
            for line in value["measured"]
        )

    def swap(self, rng):
        """Tiles in each other's place: of one kernel, or of another."""
        value = deepcopy(self.value)
        i, j = rng.sample(range(3), 2)
        one, other = value["measured"][i]["plan"], value["measured"][j]["plan"]
        one[0], other[0] = other[0], one[0]
        return value, {i, j} == {1, 2}

    def overlap(self, rng):
        """A tile that no kernel has."""
        value = deepcopy(self.value)
        tile = rng.choice(value["measured"])["plan"][0]
        tile[rng.randrange(len(tile))] = rng.choice([0, -1, 63, 10**400, 64.0, True, "64", None])
        return value, False
