"""The topic of tiling: a ladder of kernels for one matrix product, and their memory transactions.

C = A B, with A (M, K) and B (K, N) row-major. The simulator counts the sectors (32-byte pieces of
global memory) that the requests of all warps touch. It has no caches: every request counts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import Sentence
from mpitrain.kernels.loader import Kernels, Macros
from mpitrain.kernels.simulator.machine import LaunchTraffic, Simulator
from mpitrain.machine.backend import Arena
from mpitrain.machine.compiling import compiler
from mpitrain.tables import Table
from mpitrain.tools.textbook.explain.explanation import (
    ROOT,
    Columns,
    CountedFormula,
    CutMatrix,
    Explanation,
    Frame,
    SourceLines,
    Topic,
    TopicSetting,
)

FOLDER = Path(__file__).parents[1] / "ladder"
"""Folder of the kernels."""
SECTOR = 32
"""Bytes of a sector."""
MACROS = Macros(Element="__half", Sum="float")
"""Types of the header that the tensor-core rung shares with the package's kernels."""


class ProductShape(NamedTuple):
    M: int
    N: int
    K: int

    @property
    def products(self) -> int:
        return self.M * self.N * self.K


class Rung(NamedTuple):
    """A kernel of the ladder, in the file of its name.

    tile      rows and columns of C that a block computes
    block     threads of a block, in x and y
    by_rows   whether neighbouring blocks in x have neighbouring rows of C; otherwise columns
    dtype     of A and B; C is float32
    words     sectors of A, and sectors of B, as formulas of M, N and K in words
    sectors   sectors of A, and sectors of B, as functions
    label     name in texts
    """

    tile: tuple[int, int]
    block: tuple[int, ...]
    by_rows: bool
    dtype: str
    words: tuple[str, str]
    sectors: Callable[[ProductShape], tuple[int, int]]
    label: Sentence

    def grid(self, shape: ProductShape) -> tuple[int, int]:
        rows, columns = shape.M // self.tile[0], shape.N // self.tile[1]
        return (rows, columns) if self.by_rows else (columns, rows)

    def operands(self, shape: ProductShape) -> tuple[np.ndarray, np.ndarray]:
        """Return A and B with small integers, whose product is exact in every dtype."""
        random, arena = np.random.default_rng(0), Arena()
        a, b = (
            arena.take(dims, np.dtype(self.dtype))
            for dims in ((shape.M, shape.K), (shape.K, shape.N))
        )
        for array in (a, b):
            array[...] = random.integers(-4, 5, array.shape)
        return a, b


def _tiles(side: int, nbytes: int) -> dict[str, Any]:
    """Return the formulas of a square tile. Each operand is read once for each tile across it."""
    whole = SECTOR // nbytes
    return {
        "words": (f"(N/{side}) M K/{whole}", f"(M/{side}) K N/{whole}"),
        "sectors": lambda shape: (shape.products // (side * whole),) * 2,
    }


RUNGS: Table[str, Rung] = Table()
"""{name: rung}, each with fewer sectors than the one before."""

RUNGS["naive"] = Rung(
    (32, 8),
    (32, 8),
    True,
    "float32",
    ("M N K", "M N K/32"),
    lambda shape: (shape.products, shape.products // 32),
    Sentence("naive"),
)
RUNGS["coalesced"] = Rung(
    (8, 32),
    (32, 8),
    False,
    "float32",
    ("M N K/32", "M N K/8"),
    lambda shape: (shape.products // 32, shape.products // 8),
    Sentence("coalesced"),
)
RUNGS["shared"] = Rung(
    (16, 16), (16, 16), False, "float32", **_tiles(16, 4), label=Sentence("shared tiles")
)
RUNGS["registers"] = Rung(
    (64, 64), (16, 16), False, "float32", **_tiles(64, 4), label=Sentence("register tiles")
)
RUNGS["tensor"] = Rung(
    (64, 64), (128,), False, "float16", **_tiles(64, 2), label=Sentence("tensor cores")
)


class Climbed(NamedTuple):
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    traffic: LaunchTraffic

    def reads(self, name: str) -> float:
        """Return how often the threads read an element of A or B, on average."""
        return self.traffic.read[name] / {"A": self.a, "B": self.b}[name].nbytes

    @property
    def sectors(self) -> int:
        return self.traffic.sectors["A"] + self.traffic.sectors["B"]

    @property
    def passes(self) -> int:
        """Passes over the banks of shared memory, Nsight Compute's wavefronts."""
        return sum(access.passes for access in self.traffic.shared)

    @property
    def conflicts(self) -> int:
        """Passes that bank conflicts have added."""
        return self.passes - sum(access.least for access in self.traffic.shared)


def climb(shape: ProductShape, cache: Path | None = None) -> dict[str, Climbed]:
    """Run every rung on one shape; return each with its traffic.

    cache   folder of compiled kernels; None: the simulator's
    raises  ConfigError without a compiler
    """
    compiler("The ladder of products is compiled", "choose another topic")
    launches: list[LaunchTraffic] = []
    engine = Simulator(checked=True, cache=cache, traffic=launches)
    kernels, climbed = Kernels(engine, FOLDER), {}
    for name, rung in RUNGS.items():
        a, b = rung.operands(shape)
        c = Arena().take((shape.M, shape.N), np.dtype(np.float32))
        kernels.launch(name, rung.grid(shape), rung.block, (*shape, a, b, c), 0, MACROS, "C")
        climbed[name] = Climbed(a, b, c, launches[-1])
    return climbed


SHAPE = ProductShape(128, 128, 32)
"""The product that each kernel of the ladder computes: small, but with several tiles per dim of C."""
COLUMNS = (
    Columns("a block: its tile of C, and the operands it reads", ("C", "A", "B")),
    Columns("reads of each element", ("A", "B")),
    Columns("sectors of 32 bytes", ("A", "B", "C")),
    Columns("shared memory", ("passes", "conflicts")),
)


def record(setting: TopicSetting) -> Explanation:
    ladder = climb(SHAPE)
    cells: list[tuple[str, ...]] = [("",) * 10] * len(RUNGS)
    frames = [Frame("start", tuple(cells))]
    for at, (rung, climbed) in enumerate(ladder.items()):
        cells[at] = _cells(RUNGS[rung], climbed)
        frames.append(
            Frame(Sentence("rung {k}: {rung}", k=at + 1, rung=RUNGS[rung].label), tuple(cells))
        )
    return Explanation(
        [
            "A warp of 32 threads reads global memory in sectors of 32 bytes.",
            "Naive: 32 threads read a column of A, so each word needs its own sector.",
            "Coalesced: they read neighbours in B, so every byte of a sector is used.",
            "Shared tiles: a block loads a tile once, and its threads share each element.",
            "Register tiles: a thread computes 16 elements, so a tile is four times as wide and high.",
            "Tensor cores: 16-bit elements need half the sectors, and a warp multiplies fragments.",
        ],
        Sentence(
            "C = A B with M, N, K = {m}, {n}, {k}. Sectors are those of all requests, without caches. "
            "Passes are over the 32 banks; conflicts are passes added by equal banks.",
            m=SHAPE.M,
            n=SHAPE.N,
            k=SHAPE.K,
        ),
        [rung.label for rung in RUNGS.values()],
        COLUMNS,
        frames,
        [_formula(rung, ladder[rung]) for rung in RUNGS],
        [_source(rung) for rung in RUNGS],
        "mpitrain bench transactions --dtype float32",
        ("tests/unit/textbook/test_ladder.py", "tests/unit/kernels/test_transactions.py"),
        products=[
            (
                Sentence(
                    "{rung}: a tile of C has {tile}",
                    rung=rung.label,
                    tile="{} x {}".format(*rung.tile),
                ),
                _tiled(rung.tile),
            )
            for rung in RUNGS.values()
        ],
    )


def _tiled(tile: tuple[int, int]) -> list[CutMatrix]:
    """Return the product with the tile of a block, and the rows of A and columns of B that it reads."""
    (rows, columns), at = tile, 64  # 64 divides evenly by each side
    size = "{} ({} x {})".format
    return [
        CutMatrix(
            "", size("A", SHAPE.M, SHAPE.K), (SHAPE.M, SHAPE.K), [(at, 0, rows, SHAPE.K, "", 0)]
        ),
        CutMatrix(
            "\N{DOT OPERATOR}",
            size("B", SHAPE.K, SHAPE.N),
            (SHAPE.K, SHAPE.N),
            [(0, at, SHAPE.K, columns, "", 1)],
        ),
        CutMatrix(
            "=",
            size("C", SHAPE.M, SHAPE.N),
            (SHAPE.M, SHAPE.N),
            [
                (row, column, rows, columns, "", 2 if row == column == at else -1)
                for row in range(0, SHAPE.M, rows)
                for column in range(0, SHAPE.N, columns)
            ],
        ),
    ]


def _cells(rung: Rung, climbed: Climbed) -> tuple[str, ...]:
    (rows, columns), sectors = rung.tile, climbed.traffic.sectors
    return (
        f"{rows}x{columns}",
        f"{rows}x{SHAPE.K}",
        f"{SHAPE.K}x{columns}",
        *(f"{climbed.reads(operand):g}" for operand in "AB"),
        *(f"{sectors[operand]:,}" for operand in "ABC"),
        f"{climbed.passes:,}",
        f"{climbed.conflicts:,}",
    )


def _formula(name: str, climbed: Climbed) -> CountedFormula:
    rung = RUNGS[name]
    return CountedFormula(
        Sentence("sectors of A and B, {rung}", rung=rung.label),
        climbed.sectors,
        " + ".join(rung.words),
        sum(rung.sectors(SHAPE)),
    )


def _source(name: str) -> SourceLines:
    file = FOLDER / f"{name}.cu"
    lines = file.read_text(encoding="utf-8").splitlines()
    first = next(
        at for at, line in enumerate(lines, 1) if f"void {name}(" in line or f") {name}(" in line
    )
    return SourceLines(name, file.relative_to(ROOT).as_posix(), first)


TOPICS = {
    "tiling": Topic(
        "Tiling: a matrix product reads global memory less with each rung of a ladder",
        record,
        ranks=1,
        most=1,
        compiled=True,
    )
}
