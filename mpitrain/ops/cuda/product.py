"""Matrix products on the device, with an epilogue: by our kernels (`gemm`), or by cuBLAS
(`library`).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import Engine, Kernels, Macros
from mpitrain.machine.backend import address
from mpitrain.ops.cuda.launches import KINDS, c_type, element, in_chunks, sum_rows, sum_type
from mpitrain.ops.cuda.tiles import (
    DEFAULT,
    LONGEST,
    HopperTile,
    MeasuredTiles,
    Tiling,
    blocks_over,
    count,
    read_tiles,
)

Multiply = Callable[..., None]
"""`gemm`, `library` or `automatic`."""

ACTIVATIONS = {None: 0, "gelu": 1, "relu": 2, "gelu erf": 3, "tanh": 4, "gelu backward": -1}
STRIDED, STRIDED_COMBINE = "A B C residual saved", "C residual saved"
COMBINE = (256,)  # threads of gemm_combine
DIMS, DIMS_OF_GROUPS = ((2, 2, 2), (3, 3, 3)), ((2, 3, 2), (2, 2, 3))  # of a, b and c


def chosen(gemm_key: str, tiles: str = "", tensor_cores: str = "mma") -> Multiply:
    """Return the matrix product that device.gemm, device.tiles and device.tensor_cores choose.

    raises  ConfigError for a file that is no table of tiles
    """
    if gemm_key == "library":
        return library
    table = read_tiles(Path(tiles)) if tiles else DEFAULT
    if gemm_key in ("3xtf32", "auto") or tensor_cores == "wgmma":
        ways = gemm_key == "3xtf32", tensor_cores == "wgmma", gemm_key == "auto"
        table = MeasuredTiles(table.measured, *ways, table.attention)
    return partial(automatic if gemm_key == "auto" else gemm, table=table)


class ProductLaunch(NamedTuple):
    """The launch of a product: everything that follows from shapes and types.

    It is computed once per shape, because the computation costs as much as the launch.
    steps     row and batch strides of a, b and c, in elements
    types     macros of the kernel that combines splits, with the epilogue
    parts     elements of the workspace of splits, in dtype `sums`
    combined  grid of that kernel
    boxes     rows of the boxes of a and b, if the copy engine copies them
    """

    shape: tuple[int, int, int]
    steps: tuple[int, ...]
    kernel: str
    splits: int
    shared: int
    grid: tuple[int, int, int]
    block: tuple[int]
    macros: Macros
    types: Macros
    fresh: str
    parts: int
    sums: np.dtype
    combined: tuple[int, int, int]
    boxes: tuple[int, int] | None


def gemm(
    kernels: Kernels,
    arena: Any,
    a: Any,
    b: Any,
    c: Any,
    *,
    transposed_a: bool = False,
    transposed_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    residual: Any = None,
    saved: Any = None,
    activation: str | None = None,
    row_sums: Any = None,
    ends: Any = None,
    table: MeasuredTiles = DEFAULT,
    tiling: Tiling | None = None,
) -> None:
    """Compute c = activation(alpha op(a) op(b) + beta c + bias) + residual.

    a, b, c     (rows, columns) or (batch, rows, columns), the last dim contiguous; stored
                transposed where so flagged
    saved       receives the input of the activation; same shape and strides as c, as is `residual`
    activation  "gelu", "relu" or None; "gelu backward" multiplies by GELU's derivative at the old
                content of c
    row_sums    (M,) in the dtype of sums: row_sums = sums over k of op(a) + beta row_sums
    ends        (groups,) int64: the ends of runs of rows of `a`, on the device. Group g multiplies its
                rows by b[g], into the same rows of c; or, with `a` stored transposed, its rows by
                those of b, into c[g]. Only alpha and beta go with it
    table       chooses the tiling of the shape, unless `tiling` is given
    raises      KernelError if the shapes do not fit
    """
    asked = beta != 0, bias is None, saved is None, residual is None, activation
    # A kernel of tensor cores copies in chunks only where both operands begin at 16 bytes.
    may_copy_chunks = a.itemsize == 2 or table.is_3xtf32 or table.by_gain or tiling
    key = (
        a.dtype,
        c.dtype,
        a.shape,
        b.shape,
        c.shape,
        a.strides,
        b.strides,
        c.strides,
        transposed_a,
        transposed_b,
        row_sums is None,
        ends is None,
        asked,
        table,
        tiling,
        may_copy_chunks and (address(a) | address(b)) % 16 == 0,
    )
    plan = kernels.plans.get(key)
    if plan is None:
        plan = kernels.plans[key] = _plan(
            kernels, a, b, c, transposed_a, transposed_b, row_sums, ends, asked, table, tiling
        )
    m, n, k = plan.shape
    lda, stride_a, ldb, stride_b, ldc, stride_c = plan.steps
    epilogue = bias, residual, saved, row_sums
    operands: tuple[Any, ...]
    steps_c: tuple[int, ...]
    grouped: tuple[Any, ...]
    if plan.boxes:
        maps = map(kernels.engine.tensor_map, (a, b), plan.boxes)
        operands, steps_c, strided = (*maps, m, n, k, alpha, beta), (ldc,), STRIDED_COMBINE
        grouped = ()
    else:
        operands = m, n, k, alpha, a, lda, stride_a, b, ldb, stride_b, beta
        steps_c, strided = (ldc, stride_c), STRIDED
        grouped = 0 if ends is None else len(ends), ends
    if plan.splits == 1:
        kernels.launch(
            plan.kernel,
            plan.grid,
            plan.block,
            (*operands, c, *steps_c, *epilogue, 1, None, *grouped),
            plan.shared,
            plan.macros,
            plan.fresh,
            strided,
        )
        return
    workspace = arena.take((plan.parts,), plan.sums)
    kernels.launch(
        plan.kernel,
        plan.grid,
        plan.block,
        (*operands, None, *steps_c, None, None, None, None, plan.splits, workspace, *grouped),
        plan.shared,
        plan.macros,
        "workspace",
        strided,
    )
    kernels.launch(
        "gemm_combine",
        plan.combined,
        COMBINE,
        (m, n, alpha, beta, c, ldc, stride_c, *epilogue, plan.splits, workspace),
        0,
        plan.types,
        plan.fresh,
        STRIDED_COMBINE,
    )


def _plan(
    kernels: Kernels,
    a: Any,
    b: Any,
    c: Any,
    transposed_a: bool,
    transposed_b: bool,
    row_sums: Any,
    ends: Any,
    asked: tuple,
    table: MeasuredTiles,
    tiling: Tiling | None,
) -> ProductLaunch:
    """Return the launch for these shapes and types; KernelError if the shapes do not fit."""
    m, n, k = _check(a, b, c, transposed_a, transposed_b, ends)
    batches, groups = c.shape[0] if c.ndim == 3 else 1, 0 if ends is None else len(ends)
    stored = "NT"[transposed_a] + "NT"[transposed_b]
    if groups:
        # On average; a sum is not split, so one of three TF32 products would be too long.
        table = DEFAULT if (table.is_3xtf32 or table.by_gain) and k > LONGEST else table
        each = (count(m, groups), n, k, groups) if c.ndim == 2 else (m, n, count(k, groups), groups)
        tile = (tiling or table.tiling(a, stored, each, kernels.engine, has_boxes=False)).tile
        splits = 1
    else:
        tile, splits = tiling or table.tiling(
            a, stored, (m, n, k, batches), kernels.engine, in_boxes(a, b)
        )
    if isinstance(tile, HopperTile):
        splits = min(splits, count(k, tile.TILE_K))  # each has something to sum
    # Each group but one may leave a tile of rows incomplete, and so may the rows of nobody.
    rows = count(m, tile.TILE_M) + (groups if c.ndim == 2 and m else 0)
    types = element(a) | {"Result": c_type(c), "ROW_SUMS": int(row_sums is not None)}
    epilogue = _epilogue(*asked)
    chunked = {"CHUNKED": in_chunks(a, b)} if tile.kernel == "gemm_tensor" else {}
    macros = kernels.macros(
        **types,
        **tile._asdict(),
        **chunked,
        **(epilogue if splits == 1 else NO_EPILOGUE),
        SPLIT=int(splits > 1),
        GROUPED=0 if ends is None else 1 if c.ndim == 2 else 2,
        TRANSPOSED_A=int(transposed_a),
        TRANSPOSED_B=int(transposed_b),
    )
    if isinstance(tile, HopperTile):
        jobs = blocks_over(tile, m, n) * splits
        most = kernels.engine.multiprocessors // tile.CLUSTER * tile.CLUSTER
        grid = min(jobs, most), 1, 1  # a block goes on with the next tile
        boxes = _boxes(tile, transposed_a, transposed_b)
    else:
        grid, boxes = (rows * count(n, tile.TILE_N), 1, batches * splits), None
    return ProductLaunch(
        (m, n, k),
        (*_steps(a), *_steps(b), *_steps(c)),
        tile.kernel,
        splits,
        tile.shared,
        grid,
        (tile.threads,),
        macros,
        kernels.macros(**types, **epilogue),
        _fresh(epilogue),
        batches * splits * m * (n + types["ROW_SUMS"]),
        np.dtype(sum_type(a)),
        _combined(c, row_sums),
        boxes,
    )


def in_boxes(a: Any, b: Any) -> bool:
    """Return whether Hopper's copy engine takes both operands: matrices whose rows begin at multiples
    of 16 bytes.
    """
    return bool(in_chunks(a, b)) and all(
        x.ndim == 2 and x.strides[0] >= x.shape[1] * x.itemsize for x in (a, b)
    )


def _boxes(tile: HopperTile, transposed_a: bool, transposed_b: bool) -> tuple[int, int]:
    """Return the rows of the boxes of A and B. Each block of a cluster copies its share of B."""
    return (
        tile.TILE_K if transposed_a else tile.TILE_M,
        (tile.TILE_N if transposed_b else tile.TILE_K) // tile.CLUSTER,
    )


def _epilogue(
    adds_c: bool, no_bias: bool, no_saved: bool, no_residual: bool, activation: str | None
) -> dict[str, int]:
    """Return the macros of an epilogue: its kernel contains what is asked for, and nothing else."""
    return {
        "BETA": int(adds_c),
        "BIAS": int(not no_bias),
        "SAVED": int(not no_saved),
        "RESIDUAL": int(not no_residual),
        "ACTIVATION": ACTIVATIONS[activation],
    }


NO_EPILOGUE = _epilogue(False, True, True, True, None)


def _fresh(epilogue: dict[str, int]) -> str:
    if epilogue["BETA"]:
        return "saved"
    reads_c = epilogue["ACTIVATION"] == ACTIVATIONS["gelu backward"]
    return "saved row_sums" if reads_c else "C saved row_sums"


def library(
    kernels: Kernels,
    arena: Any,
    a: Any,
    b: Any,
    c: Any,
    *,
    transposed_a: bool = False,
    transposed_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    residual: Any = None,
    saved: Any = None,
    activation: str | None = None,
    row_sums: Any = None,
    ends: Any = None,
) -> None:
    """Compute `gemm` of two dims by cuBLAS (in the simulator by NumPy); our kernels run the
    epilogue, and products of groups.

    row_sums   only if `a` is stored transposed and contiguous: the sums down its columns
    raises     KernelError if the shapes do not fit
    """
    if ends is not None:
        gemm(
            *(kernels, arena, a, b, c),
            transposed_a=transposed_a,
            transposed_b=transposed_b,
            alpha=alpha,
            beta=beta,
            ends=ends,
        )
        return
    m, n, _ = _check(a, b, c, transposed_a, transposed_b)
    if row_sums is not None:
        sum_rows(kernels, a, row_sums, beta, arena)
    is_bare = (
        bias is None
        and residual is None
        and saved is None
        and activation is None
        and alpha == 1
        and beta in (0, 1)
    )
    product = c if is_bare else arena.take((m, n), sum_type(a))
    if a.size and c.size:
        kernels.engine.multiply(a, b, product, transposed_a, transposed_b, is_bare and beta == 1)
    elif not (is_bare and beta == 1):
        product.fill(0)  # sums of no products
    if not is_bare:
        epilogue = _epilogue(beta != 0, bias is None, saved is None, residual is None, activation)
        types = element(a) | {"Result": c_type(c), "ROW_SUMS": 0} | epilogue
        kernels.launch(
            "gemm_combine",
            _combined(c, None),
            COMBINE,
            (m, n, alpha, beta, c, *_steps(c), bias, residual, saved, None, 1, product),
            0,
            kernels.macros(**types),
            _fresh(epilogue),
            STRIDED_COMBINE,
        )


def automatic(
    kernels: Kernels, arena: Any, a: Any, b: Any, c: Any, *, table: MeasuredTiles, **ways: Any
) -> None:
    """Compute `gemm` by the library where measurements found it faster, otherwise by our kernels."""
    if library_is_faster(kernels.engine, table, a, b, c, **ways):
        library(kernels, arena, a, b, c, **ways)
    else:
        gemm(kernels, arena, a, b, c, table=table, **ways)


LIBRARY_WAYS = {"transposed_a", "transposed_b", "beta", "row_sums"}


LIBRARY_GAIN = 1.05
"""device.gemm=auto takes the library where it was so many times as fast as our kernels."""


def library_is_faster(
    engine: Engine, table: MeasuredTiles, a: Any, b: Any, c: Any, **ways: Any
) -> bool:
    """Return whether the library makes a product of 16 bits faster, by the table or as an H200 found.

    There it took half of the time of `mma.sync`, on compute capability 9.0. But it took three times as long
    where a dim is odd, and as long with an epilogue, for which it needs one of our kernels. Warpgroups were not
    measured there.
    """
    row_sums, beta = ways.get("row_sums"), ways.get("beta", 0)
    if not (
        a.itemsize == 2
        and a.ndim == b.ndim == c.ndim == 2
        and beta in (0, 1)
        and all(name in LIBRARY_WAYS or value is None for name, value in ways.items())
        and (row_sums is None or (ways.get("transposed_a") is True and a.flags.c_contiguous))
    ):
        return False
    if table.measured:
        stored = "".join("NT"[ways.get(f"transposed_{x}") is True] for x in "ab")
        shape = (*c.shape, a.shape[stored[0] == "N"], 1)
        if gain := table.choice(a, stored, shape, engine, in_boxes(a, b)).library:
            return gain >= LIBRARY_GAIN
    is_even = not any(dim % 8 for array in (a, b) for dim in array.shape)
    return engine.capability == 90 and is_even and not table.wgmma


def _check(
    a: Any, b: Any, c: Any, transposed_a: bool, transposed_b: bool, ends: Any = None
) -> tuple[int, int, int]:
    """Return (M, N, K); KernelError if the shapes do not fit."""
    (m, k), (n, inner) = a.shape[-2:], b.shape[-2:]
    m, k = (k, m) if transposed_a else (m, k)
    n, inner = (n, inner) if transposed_b else (inner, n)
    if (
        inner != k
        or c.shape[-2:] != (m, n)
        or (a.ndim, b.ndim, c.ndim) not in (DIMS if ends is None else DIMS_OF_GROUPS)
        or len(
            {len(x) for x in (a, b, c) if x.ndim == 3}
            | ({len(ends)} if ends is not None else set())
        )
        > 1
    ):
        raise KernelError(
            f"A product of {a.shape}{' transposed' * transposed_a} and {b.shape}{' transposed' * transposed_b} "
            f"does not fit into {c.shape}.",
            "Pass op(a): (M, K), op(b): (K, N), c: (M, N), with one batch size; groups divide M or K.",
        )
    return m, n, k


def _combined(c: Any, row_sums: Any) -> tuple[int, int, int]:
    """Return the grid of the epilogue of sums in a workspace (batches, splits, M, N)."""
    m, n = c.shape[-2:]
    runs = m * (count(n, KINDS[c.dtype].macros.run) + (row_sums is not None))
    return min(count(runs, 256), 1024), 1, c.shape[0] if c.ndim == 3 else 1


def _steps(array: Any) -> tuple[int, int]:
    """Return the row stride and the batch stride, in elements."""
    size = array.itemsize
    return array.strides[-2] // size, array.strides[0] // size if array.ndim == 3 else 0
