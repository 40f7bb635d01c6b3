"""Tiles of matrix products: the available tiles, and the choice of one for each product.

A block of threads computes one tile of C in steps along K:

             N                      a block: TILE_M x TILE_N elements of C
          +------+------+           a step: TILE_K columns of op(A), rows of op(B)
        M | tile |      |           splits: so many blocks share one tile,
          +------+------+           each for its own range of K; a second
          |      |      |           kernel adds their sums
          +------+------+
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.errors import ConfigError
from mpitrain.files import reading_of, text_of, write_whole
from mpitrain.kernels.loader import GRAIN, Engine
from mpitrain.ops.cuda.launches import c_type, shared_of
from mpitrain.strict_json import validated


class Tile(NamedTuple):
    """The tile of a block of `gemm`, as macros of gemm.cu."""

    TILE_M: int
    TILE_N: int
    TILE_K: int
    THREAD_M: int
    THREAD_N: int

    @property
    def kernel(self) -> str:
        return "gemm"

    @property
    def shared(self) -> int:
        return 0

    def static(self, itemsize: int) -> int:
        """Return the bytes of static shared memory, for sums of `itemsize` bytes.

        It is two buffers of both tiles. Each row has 4 elements of padding.
        """
        return 2 * self.TILE_K * (self.TILE_M + self.TILE_N + 2 * 4) * itemsize

    @property
    def threads(self) -> int:
        return self.TILE_M * self.TILE_N // (self.THREAD_M * self.THREAD_N)

    @property
    def registers(self) -> int:
        """The most registers of a thread, a result of gemm.cu's launch bounds."""
        return 128

    @property
    def step(self) -> float:
        """Cycles of a multiprocessor for one element of K of a block.

        It makes 128 multiply-adds per cycle. The excess over the tile's area represents the
        traffic through shared memory.
        """
        return (self.TILE_M + EDGE) * (self.TILE_N + EDGE) / 128

    @property
    def alone(self) -> float:
        """The factor on the time of a block that has a multiprocessor for itself."""
        return 1.0


class TensorTile(NamedTuple):
    """The tile of a block on tensor cores, as macros of gemm_tensor.cu."""

    TILE_M: int
    TILE_N: int
    TILE_K: int
    WARP_M: int
    WARP_N: int
    STAGES: int

    @property
    def kernel(self) -> str:
        return "gemm_tensor"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2

    @property
    def slowness(self) -> int:
        """Time of tensor cores for a multiply-add, relative to 16-bit elements."""
        return 1 if self.itemsize == 2 else 6

    @property
    def threads(self) -> int:
        return self.TILE_M * self.TILE_N // (self.WARP_M * self.WARP_N) * 32

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, enough for operands stored in either order."""
        chunk = 16 // self.itemsize
        a = max(self.TILE_M * (self.TILE_K + chunk), self.TILE_K * (self.TILE_M + 8))
        b = max(self.TILE_N * (self.TILE_K + chunk), self.TILE_K * (self.TILE_N + 8))
        return self.itemsize * (a + b) * self.STAGES

    @property
    def registers(self) -> int:
        """The most registers of a thread, a result of gemm_tensor.cu's launch bounds.

        The bounds count a thread's sums and 64 registers more, of float32 128 more.
        """
        room = 65536 // (self.threads * (self.WARP_M * self.WARP_N // 32 + 32 * self.itemsize))
        return min(255, 65536 // (self.threads * min(4, max(1, room))) // GRAIN * GRAIN)

    @property
    def loading(self) -> float:
        """Cycles of shared memory for one element of K of a block.

        It serves 128 bytes per cycle. Each warp reads its rows of A and columns of B, and
        copies write those of the block.
        """
        elements = self.threads // 32 * (self.WARP_M + self.WARP_N) + self.TILE_M + self.TILE_N
        return self.itemsize * elements / 128

    @property
    def step(self) -> float:
        """Cycles of a multiprocessor for one element of K of a block.

        Tensor cores, shared memory and the L2 cache work at the same time, and the slowest one decides.
        """
        copying = self.itemsize * (self.TILE_M + self.TILE_N) / L2_RATE
        multiplying = self.slowness * self.TILE_M * self.TILE_N / TENSOR_RATE
        times = self.loading, multiplying, copying
        return max(times) + EXPOSED * min(times)

    @property
    def alone(self) -> float:
        """The factor on the time of a block that has a multiprocessor for itself.

        One warp for each scheduler cannot hide all waits. With two, only barriers stop all warps at once.
        """
        return 1.1 if self.threads >= 256 else 1.6


class FloatTile(TensorTile):
    """The same of float32, as three products of TF32, which have half the rate of 16-bit ones."""

    @property
    def itemsize(self) -> int:
        return 4


class HopperTile(NamedTuple):
    """The tile of a block that multiplies by warpgroups, as macros of gemm_hopper.cu."""

    TILE_M: int
    TILE_N: int
    TILE_K: int
    STAGES: int
    CLUSTER: int

    @property
    def kernel(self) -> str:
        return "gemm_hopper"

    @property
    def threads(self) -> int:
        return 384

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: SHARED of gemm_hopper.cu."""
        stage = 2 * self.TILE_K * (self.TILE_M + self.TILE_N) + 2 * 8
        return self.STAGES * stage + 8 * 16 * 72 * 4 + 512 + 8 * 32 * 4 * 16 + 1024

    @property
    def registers(self) -> int:
        """Registers of a thread when it starts."""
        return 168

    @property
    def step(self) -> float:
        """Cycles of a multiprocessor for one element of K of a block.

        On paper: tensor cores, shared memory and the L2 cache work at the same time. Each product of 64 rows reads its
        operands from shared memory. The blocks of a cluster share the columns of B.
        """
        loading = 2 * self.TILE_M // 64 * (64 + self.TILE_N) / 128
        copying = 2 * (self.TILE_M + self.TILE_N / self.CLUSTER) / L2_RATE
        return max(loading, self.TILE_M * self.TILE_N / WARPGROUP_RATE, copying)

    @property
    def alone(self) -> float:
        """1: no block has company."""
        return 1.0


AnyTile = Tile | TensorTile | HopperTile

TILES = (
    Tile(128, 128, 8, 8, 8),
    Tile(64, 64, 16, 4, 4),
    Tile(32, 32, 16, 4, 4),
    Tile(128, 64, 16, 8, 4),
    Tile(64, 128, 16, 4, 8),
)
TENSOR_TILES = (
    TensorTile(128, 128, 64, 64, 64, 3),
    TensorTile(64, 64, 32, 32, 32, 4),
    TensorTile(32, 32, 32, 16, 16, 3),
    TensorTile(128, 128, 32, 64, 64, 4),
    TensorTile(192, 96, 32, 96, 48, 4),
    TensorTile(256, 128, 64, 64, 64, 3),
    TensorTile(128, 256, 64, 64, 64, 3),
    TensorTile(256, 128, 32, 64, 64, 3),
    TensorTile(128, 256, 32, 64, 64, 3),
)
FLOAT_TILES = (
    FloatTile(128, 128, 16, 64, 32, 4),
    FloatTile(64, 64, 16, 32, 32, 4),
    FloatTile(32, 32, 16, 16, 16, 3),
)
HOPPER_TILES = (
    HopperTile(256, 192, 64, 3, 1),
    HopperTile(256, 192, 64, 3, 2),
    HopperTile(256, 128, 64, 3, 1),
    HopperTile(128, 128, 64, 4, 1),
)
ONLY_MEASURED = TILES[3:]  # they take a measurement: `cost` finds them a few percent apart
MOST_STATIC = 48 << 10  # bytes of static shared memory that a kernel may have
# A measurement holds for shapes with every dim within this factor.
NEAR = 2.0
SPLITS = (1, 2, 4, 8, 16, 32)
MOST_SPLITS = 32
SHORTEST = 256  # no split of a sum over K is shorter
# Nor longer, with `FloatTile`: rounding errors grow with the number of additions in a row.
LONGEST = 8192
# Cycles of a block's start, with its first copies, and of its end for each element that a thread has
# of the tile. Other blocks of the multiprocessor can hide them. Both are on paper.
START, END = 1500, 35
# `cost` counts (m + EDGE) * (n + EDGE) multiplications for a step in K of an m x n tile of `gemm`.
EDGE = 27
# Multiply-adds per cycle of the tensor cores of a multiprocessor. On an H100, each of its four
# schedulers issues a product of 16 x 8 x 16 every 6.5 cycles.
TENSOR_RATE = 1260
# The same of products by warpgroups, from NVIDIA's data sheet: 989 TFLOP/s of 132 multiprocessors at 1.83 GHz.
WARPGROUP_RATE = 2048
# Bytes per cycle that a multiprocessor gets from the L2 cache while all others do.
L2_RATE = 23.5
# Tensor cores, shared memory and the L2 cache work in parallel. This fraction of the shortest time is not hidden.
EXPOSED = 0.25
BYTES = 20  # bytes of memory traffic per cycle and multiprocessor
LAUNCH = 5000  # cycles that one more kernel takes
GAIN = 1.05  # splitting must win by this factor, because the estimate is rough


HALVES = ("float16", "bfloat16")
Extent = Annotated[int, Field(ge=1, lt=1 << 31)]


class Tiling(NamedTuple):
    """A tile, and the number of splits of the sum over K."""

    tile: AnyTile
    splits: int


class FastestTile(NamedTuple):
    """The tiling that was fastest for a shape.

    elements  dtype of the operands
    stored    storage of the operands: "NT" is a product with the second operand stored transposed
    gain      of float32: how many times as fast 3xTF32 was as the CUDA cores; 0: not compared
    library   of 16 bits: how many times as fast the library was as this tiling; 0: not compared
    """

    elements: str
    stored: str
    m: int
    n: int
    k: int
    tiling: Tiling
    gain: float = 0.0
    library: float = 0.0

    @property
    def replaces(self) -> tuple:
        """What a later measurement has in common with the entry that it replaces in a file.

        Of warpgroups and of others the file has an entry each: device.tensor_cores says which is read.
        """
        return *self[:5], isinstance(self.tiling.tile, HopperTile)

    def distance(self, m: int, n: int, k: int) -> float:
        """Return the largest factor between corresponding dims of the two shapes."""
        return max(
            max(size, wanted) / min(size, wanted)
            for size, wanted in zip(self[2:5], (m, n, k), strict=True)
        )


class AttentionGain(NamedTuple):
    """How many times as fast attention in float32 was by 3xTF32 as on CUDA cores, forward and backward
    together.
    """

    head: int
    tokens: int
    gain: float

    def distance(self, tokens: int) -> float:
        """Return the factor between the measured length and another, at least 1."""
        return max(self.tokens, tokens) / min(self.tokens, tokens)


GAINS = ("gain", "library")
FLOAT_GAIN = 1.3
"""device.gemm=auto takes 3xTF32 where it was so many times as fast as the CUDA cores."""


class Choice(NamedTuple):
    """The tiling for a shape, and `library` of the measurement that it is from, or 0."""

    tiling: Tiling
    library: float


class MeasuredTiles:
    """A choice of tilings by measurement, otherwise by `cost`.

    It takes the tiling of the nearest measured shape, if every dim differs at most by the factor
    NEAR; likewise the gain of attention of the nearest measured length.

    is_3xtf32  float32 is multiplied on tensor cores, as three products of TF32
    by_gain    float32 is multiplied so where the measured shape has a `gain` of FLOAT_GAIN or more
    wgmma      warpgroups multiply 16-bit elements where the device can, and the copy engine takes the operands
    attention  measured gains of attention, for `by_gain`
    """

    def __init__(
        self,
        measured: Iterable[FastestTile] = (),
        is_3xtf32: bool = False,
        wgmma: bool = False,
        by_gain: bool = False,
        attention: Iterable[AttentionGain] = (),
    ):
        self.measured, self.is_3xtf32, self.wgmma = tuple(measured), is_3xtf32, wgmma
        self.by_gain, self.attention = by_gain, tuple(attention)
        # The choice is cached: a search in every product would cost as much as the launch.
        self._chosen: dict[tuple, Choice] = {}

    def tiling(
        self,
        a: Any,
        stored: str,
        shape: tuple[int, int, int, int],
        engine: Engine,
        has_boxes: bool = True,
    ) -> Tiling:
        """Return the tiling of `choice`."""
        return self.choice(a, stored, shape, engine, has_boxes).tiling

    def choice(
        self,
        a: Any,
        stored: str,
        shape: tuple[int, int, int, int],
        engine: Engine,
        has_boxes: bool = True,
    ) -> Choice:
        """Return the tiling for operands like `a` on the engine's device, and what the library gained.

        shape      (M, N, K, batches)
        has_boxes  the copy engine takes the operands, if there is one
        """
        by_warpgroups = (
            self.wgmma
            and has_boxes
            and a.itemsize == 2
            and shape[3] == 1
            and min(shape) > 0
            and engine.has_wgmma
        )
        key = (
            by_warpgroups,
            a.dtype,
            stored,
            shape,
            engine.capability,
            engine.multiprocessors,
            engine.multiprocessor,
        )
        if key not in self._chosen:
            tiles: tuple[AnyTile, ...] = HOPPER_TILES
            if not by_warpgroups:
                tiles = possible(a, engine.capability, self.is_3xtf32)
            gained = possible(a, engine.capability, True) if self.by_gain else ()
            self._chosen[key] = self._choose(tiles, gained, a.dtype.name, stored, shape, engine)
        return self._chosen[key]

    def splits_attention(self, head: int, tokens: int) -> bool:
        """Return whether attention in float32 multiplies by 3xTF32.

        head    channels
        tokens  of whole causal sequences; 0: of others, for which no gain was measured
        """
        if self.is_3xtf32 or not self.by_gain or not tokens:
            return self.is_3xtf32
        of_head = (entry for entry in self.attention if entry.head == head)
        near = {entry.distance(tokens): entry.gain for entry in of_head}
        return min(near, default=NEAR + 1) <= NEAR and near[min(near)] >= FLOAT_GAIN

    def _choose(
        self,
        tiles: tuple[AnyTile, ...],
        gained: tuple[AnyTile, ...],
        elements: str,
        stored: str,
        shape: tuple[int, int, int, int],
        engine: Engine,
    ) -> Choice:
        """Return the choice for a shape: of `gained` only one that was measured with a gain of FLOAT_GAIN."""
        *dims, batches = shape
        known = [
            entry
            for entry in self.measured
            if batches == 1
            and min(dims) > 0
            and (
                entry.tiling.tile in tiles
                or (entry.gain >= FLOAT_GAIN and entry.tiling.tile in gained)
            )
            and (entry.elements, entry.stored) == (elements, stored)
            and entry.distance(*dims) <= NEAR
        ]
        if known:
            nearest = min(known, key=lambda entry: entry.distance(*dims))
            tile, splits = nearest.tiling
            # The measured sum may have been shorter.
            return Choice(Tiling(tile, max(splits, fewest(tile, dims[2]))), nearest.library)
        tiles = tuple(tile for tile in tiles if tile not in ONLY_MEASURED)
        return Choice(usual(tiles, *shape, engine), 0.0)


DEFAULT = MeasuredTiles()


def count(extent: int, size: int) -> int:
    """Return the number of tiles of a size that cover an extent."""
    return -(-extent // size)


def possible(a: Any, capability: int, is_3xtf32: bool = False) -> tuple[Tile | TensorTile, ...]:
    """Return the tiles that can multiply operands like `a`: on tensor cores wherever possible, but
    float32 only with `is_3xtf32`.
    """
    kind = c_type(a)
    if kind == "__half" and 75 <= capability < 80:
        return two_stages()
    if kind in ("__half", "__nv_bfloat16") and capability >= 80:
        return _fitting(TENSOR_TILES, shared_of(capability))
    if kind == "float" and is_3xtf32 and capability >= 80:
        return _fitting(FLOAT_TILES, shared_of(capability))
    size = max(4, a.itemsize)
    return tuple(tile for tile in TILES if tile.static(size) <= MOST_STATIC)


def usual(
    tiles: tuple[AnyTile, ...], m: int, n: int, k: int, batches: int, engine: Engine
) -> Tiling:
    """Return the tiling of the lowest cost; of equals, the first tile and the fewest splits."""
    most = max(1, min(k // SHORTEST, MOST_SPLITS))
    return min(
        (Tiling(tile, parts) for tile in tiles for parts in range(fewest(tile, k), most + 1)),
        key=lambda tiling: cost(tiling, m, n, k, batches, engine),
    )


def fewest(tile: AnyTile, k: int) -> int:
    """Return the fewest splits of a sum over K with this tile."""
    return min(count(k, LONGEST), MOST_SPLITS) if isinstance(tile, FloatTile) and k else 1


def blocks_over(tile: AnyTile, m: int, n: int) -> int:
    """Return the number of blocks that cover C, in whole clusters of neighbouring rows of tiles."""
    cluster = tile.CLUSTER if isinstance(tile, HopperTile) else 1
    return count(count(m, tile.TILE_M), cluster) * cluster * count(n, tile.TILE_N)


def cost(tiling: Tiling, m: int, n: int, k: int, batches: int, engine: Engine) -> float:
    """Return an estimate of the cycles of a product.

    It is the cost of one block times the blocks on the busiest multiprocessor, plus the addition of
    the splits. Blocks that share a multiprocessor are no faster: they count as if they
    ran one after another. While one block loads its first tiles, or writes, the others multiply.
    That cost therefore counts once for all blocks that are resident together. A block without such
    company, perhaps the last one, is slower by the factor `alone`.
    """
    (tile, splits), elements, multiprocessors = tiling, batches * m * n, engine.multiprocessors
    blocks = blocks_over(tile, m, n) * batches * splits
    rounds = count(blocks, multiprocessors)
    resident = engine.multiprocessor.resident(tile.threads, tile.registers, tile.shared)
    waves = count(rounds, resident)
    lonely = rounds if resident == 1 else rounds % resident == 1
    depth = count(k, tile.TILE_K * splits) * tile.TILE_K
    multiplying = (rounds + lonely * (tile.alone - 1)) * depth * tile.step
    multiplying += waves * (START + END * tile.TILE_M * tile.TILE_N / tile.threads)
    if splits == 1:
        return multiplying
    return GAIN * multiplying + LAUNCH + (2 * splits + 1) * 4 * elements / multiprocessors / BYTES


def worth_measuring(
    a: Any, m: int, n: int, k: int, engine: Engine, is_3xtf32: bool = False, wgmma: bool = False
) -> list[Tiling]:
    """Return the candidates for a measurement: every tile, with splits of K where they can pay.

    wgmma  only the tiles of warpgroups, where the device has them: no others would be read then
    A split pays if its length is at least 128 and the blocks do not exceed two per multiprocessor.
    """
    tilings, multiprocessors = [], engine.multiprocessors
    tiles: tuple[AnyTile, ...] = HOPPER_TILES
    if not wgmma or not engine.has_wgmma or a.itemsize != 2:
        tiles = possible(a, engine.capability, is_3xtf32)
    for tile in tiles:
        blocks = blocks_over(tile, m, n)
        least = fewest(tile, k)
        tilings += [
            Tiling(tile, splits)
            for splits in sorted({least, *SPLITS})
            if splits == least
            or (splits > least and k >= 128 * splits and blocks * splits <= 2 * multiprocessors)
        ]
    return tilings


class _TileLine(BaseModel):
    """The entry of one shape in a file; it calls a tiling a plan."""

    model_config = ConfigDict(strict=True, extra="forbid")

    elements: Literal["float64", "float32", "float16", "bfloat16"]
    stored: Literal["NN", "NT", "TN", "TT"]
    m: Extent
    n: Extent
    k: Extent
    kernel: Literal["gemm", "gemm_tensor", "gemm_hopper"]
    plan: tuple[list[int], Annotated[int, Field(ge=1, le=MOST_SPLITS)]]
    gain: float = Field(0.0, ge=0)
    library: float = Field(0.0, ge=0)


class _AttentionLine(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    head: Extent
    tokens: Extent
    gain: float = Field(ge=0)


class _TilesFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    device: str = ""
    measured: list[_TileLine]
    attention: list[_AttentionLine] = []


def read_tiles(path: Path) -> MeasuredTiles:
    """Return the table in a file of `write_tiles`; ConfigError if it is none."""
    with reading_of(f"The table of tiles {path}", "mpitrain bench gemm --tune writes one."):
        data = text_of(path)
    try:
        file = validated(_TilesFile, data)
        gains = [AttentionGain(line.head, line.tokens, line.gain) for line in file.attention]
        return MeasuredTiles(map(_entry, file.measured), attention=gains)
    except ValueError as error:
        raise ConfigError(
            f"{path} is no table of tiles: {error}.", "mpitrain bench gemm --tune writes one."
        ) from None


def write_tiles(
    path: Path,
    device: str,
    measured: Iterable[FastestTile],
    attention: Iterable[AttentionGain] = (),
) -> None:
    """Write the file as a whole.

    device  the name of the measured device, for human readers
    """
    listed = [
        {
            **dict(zip(FastestTile._fields, entry[:5], strict=False)),
            "plan": entry.tiling,
            "kernel": entry.tiling.tile.kernel,
            **{word: value for word in GAINS if (value := getattr(entry, word))},
        }
        for entry in measured
    ]
    gains = [entry._asdict() for entry in attention]
    file = {"device": device, "measured": listed, **({"attention": gains} if gains else {})}
    write_whole(path, json.dumps(file, indent=1) + "\n")


def _entry(line: _TileLine) -> FastestTile:
    """Return a line of the file as `FastestTile`; ValueError for a tile that no kernel has."""
    wanted, splits = line.plan
    on_tensor_cores = FLOAT_TILES if line.elements == "float32" else TENSOR_TILES + two_stages()
    for tile in TILES + on_tensor_cores + HOPPER_TILES * (line.elements in HALVES):
        if [*tile] == wanted and tile.kernel == line.kernel:
            return FastestTile(
                *(line.elements, line.stored, line.m, line.n, line.k),
                Tiling(tile, splits),
                line.gain,
                line.library,
            )
    raise ValueError(f"no kernel takes {wanted} of {line.kernel}")


@cache
def two_stages() -> tuple[TensorTile, ...]:
    """Return the tensor tiles with two stages, for devices with little shared memory."""
    return tuple(tile._replace(STAGES=2) for tile in TENSOR_TILES if tile.TILE_K == 32)


@cache
def _fitting(tiles: tuple[TensorTile, ...], nbytes: int) -> tuple[TensorTile, ...]:
    """Return the tiles for devices with this shared memory per block."""
    return tuple(tile for tile in tiles if tile.shared <= nbytes)
