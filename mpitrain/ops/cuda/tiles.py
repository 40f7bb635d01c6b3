"""Tiles of matrix products: which there are, and which a product gets."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.errors import ConfigError
from mpitrain.files import contents, write_whole
from mpitrain.kernels.loader import Engine
from mpitrain.ops.cuda.elements import c_type
from mpitrain.strict_json import validated


class Tile(NamedTuple):
    """How a block cuts its part of C: macros of gemm.cu."""

    TILE_M: int
    TILE_N: int
    TILE_K: int
    THREAD_M: int
    THREAD_N: int

    @property
    def kernel(self) -> str:
        """Its name."""
        return "gemm"

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return 0

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.TILE_M * self.TILE_N // (self.THREAD_M * self.THREAD_N)

    @property
    def registers(self) -> int:
        """Of a thread, at most: what gemm.cu's launch bounds leave it."""
        return 128

    @property
    def rate(self) -> int:
        """Products of two numbers that a multiprocessor adds in a cycle, at most."""
        return 128


class TensorTile(NamedTuple):
    """How a block cuts its part of C on tensor cores: macros of gemm_tensor.cu."""

    TILE_M: int
    TILE_N: int
    TILE_K: int
    WARP_M: int
    WARP_N: int
    STAGES: int

    @property
    def kernel(self) -> str:
        """Its name."""
        return "gemm_tensor"

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.TILE_M * self.TILE_N // (self.WARP_M * self.WARP_N) * 32

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, enough for operands stored either way."""
        a = max(self.TILE_M * (self.TILE_K + 8), self.TILE_K * (self.TILE_M + 8))
        b = max(self.TILE_N * (self.TILE_K + 8), self.TILE_K * (self.TILE_N + 8))
        return 2 * (a + b) * self.STAGES

    @property
    def registers(self) -> int:
        """Of a thread, at most: what gemm_tensor.cu's launch bounds leave it, beside those of its sums 64."""
        room = 65536 // (self.threads * (self.WARP_M * self.WARP_N // 32 + 64))
        return min(255, 65536 // (self.threads * min(4, max(1, room))))

    @property
    def rate(self) -> int:
        """Products of two numbers that a multiprocessor adds in a cycle, at most: what mma.sync reaches."""
        return 1024


TILES = (
    Tile(128, 128, 8, 8, 8),
    Tile(64, 64, 16, 4, 4),
    Tile(32, 32, 16, 4, 4),
    Tile(128, 64, 16, 8, 4),
    Tile(64, 128, 16, 4, 8),
)
TENSOR_TILES = (
    TensorTile(128, 128, 32, 64, 32, 4),
    TensorTile(64, 64, 32, 32, 32, 4),
    TensorTile(32, 32, 32, 16, 16, 3),
    TensorTile(128, 128, 32, 64, 64, 4),
    TensorTile(128, 256, 32, 64, 64, 3),
    TensorTile(256, 128, 32, 64, 64, 3),
)
USUAL = 3  # so many of them are taken without a measurement, large ones first
NEAR = (
    2.0  # what was measured speaks for shapes of which no dim is further away than by this factor
)
SPLITS = (1, 2, 4, 8, 16, 32)
MOST_SPLITS = 32
SHORTEST = 256  # of a sum over K no part is shorter
FILLING = 3  # tiles of TILE_K that pass before a block multiplies, and what its start and end take: unless others multiply
EDGE = 16  # a block does as much work on what passes through shared memory as so many more rows and columns of it were
BYTES = 20  # that a multiprocessor's share of the memory moves in a cycle
LAUNCH = 5000  # cycles that one more kernel takes
GAIN = 1.05  # by which splitting must win: the arithmetic is no more exact


Extent = Annotated[int, Field(ge=1, lt=1 << 31)]


class Tiling(NamedTuple):
    """A tile, and into how many parts the sum over K is split."""

    tile: Tile | TensorTile
    splits: int


class Measured(NamedTuple):
    """The tiling that was fastest for a shape.

    elements  dtype of the operands
    stored    how: "NT" is a product with a second operand stored transposed
    """

    elements: str
    stored: str
    m: int
    n: int
    k: int
    tiling: Tiling

    def distance(self, m: int, n: int, k: int) -> float:
        """The largest factor between the dims of both shapes."""
        return max(
            max(mine, other) / min(mine, other)
            for mine, other in zip(self[2:5], (m, n, k), strict=True)
        )


class Table:
    """Which tiling a product gets: that of the nearest measured shape, where one is near, or the cheapest by arithmetic."""

    def __init__(self, measured: Iterable[Measured] = ()):
        self.measured = tuple(measured)
        self._chosen: dict[
            tuple, Tiling
        ] = {}  # a search for each of a step's products would cost as much as its launch

    def tiling(
        self, a: Any, stored: str, shape: tuple[int, int, int, int], engine: Engine
    ) -> Tiling:
        """The tiling for operands like `a` on the engine's device; shape: (M, N, K, batches)."""
        key = (
            a.dtype,
            stored,
            shape,
            engine.capability,
            engine.multiprocessors,
            engine.multiprocessor,
        )
        if key not in self._chosen:
            self._chosen[key] = self._choose(
                possible(a, engine.capability), a.dtype.name, stored, shape, engine
            )
        return self._chosen[key]

    def _choose(
        self,
        tiles: tuple[Tile | TensorTile, ...],
        elements: str,
        stored: str,
        shape: tuple[int, int, int, int],
        engine: Engine,
    ) -> Tiling:
        *dims, batches = shape
        known = [
            entry
            for entry in self.measured
            if batches == 1
            and min(dims) > 0
            and entry.tiling.tile in tiles
            and (entry.elements, entry.stored) == (elements, stored)
            and entry.distance(*dims) <= NEAR
        ]
        if known:
            return min(known, key=lambda entry: entry.distance(*dims)).tiling
        return usual(tiles[:USUAL], *shape, engine)


DEFAULT = Table()


def count(extent: int, size: int) -> int:
    """How many tiles of a size cover an extent."""
    return -(-extent // size)


def possible(a: Any, capability: int) -> tuple[Tile | TensorTile, ...]:
    """The tiles that can multiply operands like `a`: on tensor cores wherever there are any."""
    kind = c_type(a)
    if kind == "__half" and 75 <= capability < 80:
        return two_stages()
    return TENSOR_TILES if kind in ("__half", "__nv_bfloat16") and capability >= 80 else TILES


def usual(
    tiles: tuple[Tile | TensorTile, ...], m: int, n: int, k: int, batches: int, engine: Engine
) -> Tiling:
    """The tiling of the lowest cost, of equals the one of the largest tile and the fewest parts."""
    splits = range(1, max(1, min(k // SHORTEST, MOST_SPLITS)) + 1)
    return min(
        (Tiling(tile, parts) for tile in tiles for parts in splits),
        key=lambda tiling: cost(tiling, m, n, k, batches, engine),
    )


def cost(tiling: Tiling, m: int, n: int, k: int, batches: int, engine: Engine) -> float:
    """About how many cycles a product takes: blocks of the busiest multiprocessor times the cost of one, and joining the parts.

    A multiprocessor that several blocks share is no faster: they count as if it had them one after another. But while one fills
    its first tiles, or writes, the others multiply: that counts once for all that are there at a time.
    """
    (tile, splits), elements, multiprocessors = tiling, batches * m * n, engine.multiprocessors
    blocks = count(m, tile.TILE_M) * count(n, tile.TILE_N) * batches * splits
    area = (tile.TILE_M + EDGE) * (tile.TILE_N + EDGE)
    rounds = count(blocks, multiprocessors)
    waves = count(rounds, engine.multiprocessor.resident(tile.threads, tile.registers, tile.shared))
    multiplying = (
        (rounds * count(k, tile.TILE_K * splits) + waves * FILLING) * tile.TILE_K * area / tile.rate
    )
    if splits == 1:
        return multiplying
    return GAIN * multiplying + LAUNCH + (2 * splits + 1) * 4 * elements / multiprocessors / BYTES


def worth_measuring(a: Any, m: int, n: int, k: int, engine: Engine) -> list[Tiling]:
    """Every tile; sums over K are split where parts of some length remain and one part's blocks do not fill the device."""
    tilings, multiprocessors = [], engine.multiprocessors
    for tile in possible(a, engine.capability):
        blocks = count(m, tile.TILE_M) * count(n, tile.TILE_N)
        tilings += [
            Tiling(tile, splits)
            for splits in SPLITS
            if splits == 1 or (k >= 128 * splits and blocks * splits <= 2 * multiprocessors)
        ]
    return tilings


class _Line(BaseModel):
    """What a file says of one shape; it calls a tiling a plan."""

    model_config = ConfigDict(strict=True, extra="forbid")

    elements: Literal["float64", "float32", "float16", "bfloat16"]
    stored: Literal["NN", "NT", "TN", "TT"]
    m: Extent
    n: Extent
    k: Extent
    kernel: Literal["gemm", "gemm_tensor"]
    plan: tuple[list[int], Annotated[int, Field(ge=1, le=MOST_SPLITS)]]


class _File(BaseModel):
    """A table of tiles as text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    device: str = ""
    measured: list[_Line]


def read_tiles(path: Path) -> Table:
    """The table in a file of `write_tiles`; ConfigError if it is none."""
    try:
        return Table(map(_entry, validated(_File, contents(path)).measured))
    except OSError as error:
        raise ConfigError(
            f"The table of tiles {path} cannot be read: {error.strerror}.",
            "mpitrain bench gemm --tune writes one.",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is no table of tiles: {error}.", "mpitrain bench gemm --tune writes one."
        ) from None


def write_tiles(path: Path, device: str, measured: Iterable[Measured]) -> None:
    """Write the file whole. device: the name of what it was measured on, for the reader."""
    listed = [
        {
            **dict(zip(Measured._fields, entry[:5], strict=False)),
            "plan": entry.tiling,
            "kernel": entry.tiling.tile.kernel,
        }
        for entry in measured
    ]
    write_whole(path, json.dumps({"device": device, "measured": listed}, indent=1) + "\n")


def _entry(line: _Line) -> Measured:
    """A line of the file; ValueError for a tile that no kernel has."""
    wanted, splits = line.plan
    tiles: list[Tile | TensorTile] = [*TILES, *TENSOR_TILES, *two_stages()]
    for tile in tiles:
        if [*tile] == wanted and tile.kernel == line.kernel:
            return Measured(
                line.elements, line.stored, line.m, line.n, line.k, Tiling(tile, splits)
            )
    raise ValueError(f"no kernel takes {wanted} of {line.kernel}")


def two_stages() -> tuple[TensorTile, ...]:
    """The tiles as devices with little shared memory have them."""
    return tuple(tile._replace(STAGES=2) for tile in TENSOR_TILES)
