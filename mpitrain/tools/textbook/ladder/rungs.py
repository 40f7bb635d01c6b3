"""The rungs of the ladder, and their memory transactions as the checked simulator counts them.

C = A B, with A (M, K) and B (K, N) row-major. Sectors are the 32-byte pieces of global memory that
the requests of all warps touch. Caches are not modelled: each request counts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.kernels.loader import Kernels, Macros
from mpitrain.kernels.simulator.machine import LaunchTraffic, Simulator
from mpitrain.machine.arena import Arena
from mpitrain.machine.compiling import compiler
from mpitrain.tables import Table

FOLDER = Path(__file__).parent
SECTOR = 32
"""Bytes of a sector."""
MACROS = Macros(Element="__half", Sum="float")
"""Types of the header that the tensor-core rung shares with the package's kernels."""


class ProductShape(NamedTuple):
    """The dims of a product; multiples of 64."""

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
    by_rows   whether blocks go along the rows of C in x; otherwise along its columns
    dtype     of A and B; C is float32
    words     sectors of A, and those of B, as formulas of M, N and K
    sectors   their values
    """

    tile: tuple[int, int]
    block: tuple[int, ...]
    by_rows: bool
    dtype: str
    words: tuple[str, str]
    sectors: Callable[[ProductShape], tuple[int, int]]

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
    """Return the formulas of a square tile: each operand is read once for each tile across it."""
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
)
RUNGS["coalesced"] = Rung(
    (8, 32),
    (32, 8),
    False,
    "float32",
    ("M N K/32", "M N K/8"),
    lambda shape: (shape.products // 32, shape.products // 8),
)
RUNGS["shared"] = Rung((16, 16), (16, 16), False, "float32", **_tiles(16, 4))
RUNGS["registers"] = Rung((64, 64), (16, 16), False, "float32", **_tiles(64, 4))
RUNGS["tensor"] = Rung((64, 64), (128,), False, "float16", **_tiles(64, 2))


class Climbed(NamedTuple):
    """A rung that has run: its operands, its product, and the traffic of its launch."""

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
    """Run every rung on one shape, and return each with its traffic.

    cache   folder of compiled kernels; None: that of the simulator
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
