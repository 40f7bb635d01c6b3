"""Tiles of matrix products: which there are, and which a product gets."""

from typing import Any, NamedTuple

from mpitrain.ops.cuda.elements import c_type


class Tile(NamedTuple):
    """How a block cuts its part of C: macros of gemm.cu."""

    TILE_M: int
    TILE_N: int
    TILE_K: int
    THREAD_M: int
    THREAD_N: int

    kernel = "gemm"
    shared = 0

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.TILE_M * self.TILE_N // (self.THREAD_M * self.THREAD_N)


class TensorTile(NamedTuple):
    """How a block cuts its part of C on tensor cores: macros of gemm_tensor.cu."""

    TILE_M: int
    TILE_N: int
    TILE_K: int
    WARP_M: int
    WARP_N: int
    STAGES: int

    kernel = "gemm_tensor"

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


TILES = (Tile(128, 128, 8, 8, 8), Tile(64, 64, 16, 4, 4), Tile(32, 32, 16, 4, 4))
TENSOR_TILES = (TensorTile(128, 128, 32, 64, 32, 4), TensorTile(64, 64, 32, 32, 32, 4), TensorTile(32, 32, 32, 16, 16, 3))
FILL = 132    # blocks that keep a large GPU busy


def tiles(count: int, size: int) -> int:
    """How many tiles of a size cover a count."""
    return -(-count // size)


def candidates(a: Any, capability: int) -> tuple[Tile | TensorTile, ...]:
    """The tiles that can multiply operands like `a`, large ones first: tensor cores wherever there are any."""
    kind = c_type(a)
    if kind == "__half" and 75 <= capability < 80:
        return tuple(tile._replace(STAGES=2) for tile in TENSOR_TILES)
    return TENSOR_TILES if kind in ("__half", "__nv_bfloat16") and capability >= 80 else TILES


def choose(possible: tuple[Tile | TensorTile, ...], m: int, n: int, k: int, batches: int) -> tuple[Tile | TensorTile, int]:
    """A tile, and into how many parts the sum over K is split, so that the blocks fill the device."""
    for tile in possible:
        blocks = tiles(m, tile.TILE_M) * tiles(n, tile.TILE_N) * batches
        if blocks >= FILL:
            return tile, 1
    long_enough = max(1, k // 512)
    return tile, min(long_enough, max(1, FILL // max(1, blocks)), 32)
