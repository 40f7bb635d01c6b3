"""Matrix products on the device: which kernel, which tile, and what is passed to it."""

from typing import Any, NamedTuple

from mpitrain.errors import KernelError
from mpitrain.kernels.arguments import fresh, strided
from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import c_type, element, sum_type

ACTIVATIONS = {None: 0, "gelu": 1, "relu": 2}


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


def gemm(kernels: Kernels, arena: Any, a: Any, b: Any, c: Any, *, transposed_a: bool = False, transposed_b: bool = False,
         alpha: float = 1.0, beta: float = 0.0, bias: Any = None, residual: Any = None, saved: Any = None,
         activation: str | None = None, row_sums: Any = None,
         plan: tuple[Tile | TensorTile, int] | None = None) -> None:
    """c = activation(alpha op(a) op(b) + beta c + bias) + residual.

    a, b, c    (rows, columns) or (batch, rows, columns), the last dim contiguous; stored transposed where so flagged
    saved      receives what the activation is applied to; like c, as is `residual`
    row_sums   (M,): receives the sums over k of op(a), in the dtype of sums
    plan       tile and splits; chosen from the shape if None
    raises     KernelError if the shapes do not fit
    """
    (m, k), (n, inner) = a.shape[-2:], b.shape[-2:]
    m, k = (k, m) if transposed_a else (m, k)
    n, inner = (n, inner) if transposed_b else (inner, n)
    batches = c.shape[0] if c.ndim == 3 else 1
    if inner != k or c.shape[-2:] != (m, n) or not a.ndim == b.ndim == c.ndim or any(
            x.ndim == 3 and x.shape[0] != batches for x in (a, b)):
        raise KernelError(
            f"A product of {a.shape}{' transposed' * transposed_a} and {b.shape}{' transposed' * transposed_b} "
            f"does not fit into {c.shape}.", "Pass op(a): (M, K), op(b): (K, N), c: (M, N), with one batch size.")
    if row_sums is not None and batches > 1:
        raise KernelError(f"Row sums of {batches} products have no place in one array.", "Multiply one by one.")
    for name, array in (("saved", saved), ("residual", residual)):
        if array is not None and (array.shape != c.shape or array.strides != c.strides):
            raise KernelError(f"`{name}` of shape {array.shape} is not like the product of shape {c.shape}.",
                              "Pass an array of the same shape and strides.")
    tile, splits = plan or choose(candidates(a, kernels.engine.capability), m, n, k, batches)
    types = element(a) | {"Result": c_type(c), "ROW_SUMS": int(row_sums is not None)}
    parts = batches * splits * m * (n + types["ROW_SUMS"])
    workspace = arena.take((parts,), sum_type(a)) if splits > 1 else None
    (lda, stride_a), (ldb, stride_b), (ldc, stride_c) = (_steps(array) for array in (a, b, c))
    output = (strided(c, fresh=beta == 0), ldc, stride_c, bias, strided(residual), strided(saved, fresh=True),
              ACTIVATIONS[activation], fresh(row_sums))
    raw = (None, ldc, stride_c, None, None, None, 0, None)
    kernels.launch(
        tile.kernel, (tiles(m, tile.TILE_M) * tiles(n, tile.TILE_N), 1, batches * splits), (tile.threads,),
        (m, n, k, alpha, strided(a), lda, stride_a, strided(b), ldb, stride_b, beta,
         *(output if splits == 1 else raw), splits, fresh(workspace)), tile.shared,
        **types, **tile._asdict(), TRANSPOSED_A=int(transposed_a), TRANSPOSED_B=int(transposed_b))
    if splits > 1:
        fours = m * (tiles(n, 4) + types["ROW_SUMS"])
        kernels.launch("gemm_combine", (min(tiles(fours, 256), 1024), 1, batches), (256,),
                       (m, n, alpha, beta, *output, splits, workspace), **types)


def _steps(array: Any) -> tuple[int, int]:
    """Elements from row to row and from batch to batch."""
    size = array.itemsize
    return array.strides[-2] // size, array.strides[0] // size if array.ndim == 3 else 0
