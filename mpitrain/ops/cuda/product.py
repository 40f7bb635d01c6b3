"""Matrix products on the device, with what follows them: by our kernels alone (`gemm`), or by its library (`library`)."""

from typing import Any

from mpitrain.errors import KernelError
from mpitrain.kernels.arguments import fresh, strided
from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import c_type, element, in_chunks, sum_type
from mpitrain.ops.cuda.sums import sum_rows
from mpitrain.ops.cuda.tiles import DEFAULT, Table, Tiling, count

ACTIVATIONS = {None: 0, "gelu": 1, "relu": 2}


def gemm(kernels: Kernels, arena: Any, a: Any, b: Any, c: Any, *, transposed_a: bool = False, transposed_b: bool = False,
         alpha: float = 1.0, beta: float = 0.0, bias: Any = None, residual: Any = None, saved: Any = None,
         activation: str | None = None, row_sums: Any = None, table: Table = DEFAULT, tiling: Tiling | None = None) -> None:
    """c = activation(alpha op(a) op(b) + beta c + bias) + residual.

    a, b, c    (rows, columns) or (batch, rows, columns), the last dim contiguous; stored transposed where so flagged
    saved      receives what the activation is applied to; like c, as is `residual`
    row_sums   (M,): receives the sums over k of op(a), in the dtype of sums
    table      says which tiling the shape gets, where none is given
    raises     KernelError if the shapes do not fit
    """
    m, n, k = _check(a, b, c, transposed_a, transposed_b, saved, residual)
    batches = c.shape[0] if c.ndim == 3 else 1
    if row_sums is not None and batches > 1:
        raise KernelError(f"Row sums of {batches} products have no place in one array.", "Multiply one by one.")
    stored = "NT"[transposed_a] + "NT"[transposed_b]
    tile, splits = tiling or table.tiling(a, stored, (m, n, k, batches), kernels.engine)
    types = element(a) | {"Result": c_type(c), "ROW_SUMS": int(row_sums is not None)}
    parts = batches * splits * m * (n + types["ROW_SUMS"])
    workspace = arena.take((parts,), sum_type(a)) if splits > 1 else None
    output = _output(c, beta, bias, residual, saved, activation, row_sums)
    raw = (None, *_steps(c), None, None, None, 0, None)
    chunked = {"CHUNKED": in_chunks(a, b)} if tile.kernel == "gemm_tensor" else {}
    kernels.launch(
        tile.kernel, (count(m, tile.TILE_M) * count(n, tile.TILE_N), 1, batches * splits), (tile.threads,),
        (m, n, k, alpha, strided(a), *_steps(a), strided(b), *_steps(b), beta,
         *(output if splits == 1 else raw), splits, fresh(workspace)), tile.shared,
        **types, **tile._asdict(), **chunked, TRANSPOSED_A=int(transposed_a), TRANSPOSED_B=int(transposed_b))
    if splits > 1:
        _combine(kernels, (batches, splits, m, n), workspace, alpha, beta, output, types)


def library(kernels: Kernels, arena: Any, a: Any, b: Any, c: Any, *, transposed_a: bool = False, transposed_b: bool = False,
            alpha: float = 1.0, beta: float = 0.0, bias: Any = None, residual: Any = None, saved: Any = None,
            activation: str | None = None, row_sums: Any = None) -> None:
    """As `gemm` of two dims, but the product is cuBLAS's (in the simulator NumPy's), and kernels after it do the rest.

    row_sums   only where `a` is stored transposed, and then contiguous: the sums down its columns
    raises     KernelError if the shapes do not fit
    """
    m, n, _ = _check(a, b, c, transposed_a, transposed_b, saved, residual)
    if c.ndim != 2:
        raise KernelError(f"The library makes one product at a time, not {c.shape[0]}.", "Multiply one by one, or by `gemm`.")
    if row_sums is not None and not transposed_a:
        raise KernelError(f"Only of an operand stored transposed can the rows be summed, not of {a.shape}.", "Use `gemm`.")
    if row_sums is not None:
        sum_rows(kernels, a, row_sums, False, arena)
    is_bare = bias is None and residual is None and saved is None and activation is None and alpha == 1 and beta in (0, 1)
    product = c if is_bare else arena.take((m, n), sum_type(a))
    if a.size and c.size:
        kernels.engine.multiply(a, b, product, transposed_a, transposed_b, is_bare and beta == 1)
    elif not (is_bare and beta == 1):
        product.fill(0)    # sums over nothing
    if not is_bare:
        types = element(a) | {"Result": c_type(c), "ROW_SUMS": 0}
        _combine(kernels, (1, 1, m, n), product, alpha, beta, _output(c, beta, bias, residual, saved, activation, None), types)


def _check(a: Any, b: Any, c: Any, transposed_a: bool, transposed_b: bool, saved: Any, residual: Any) -> tuple[int, int, int]:
    """(M, N, K); KernelError if the shapes do not fit."""
    (m, k), (n, inner) = a.shape[-2:], b.shape[-2:]
    m, k = (k, m) if transposed_a else (m, k)
    n, inner = (n, inner) if transposed_b else (inner, n)
    if inner != k or c.shape[-2:] != (m, n) or not a.ndim == b.ndim == c.ndim or any(
            x.ndim == 3 and x.shape[0] != c.shape[0] for x in (a, b)):
        raise KernelError(
            f"A product of {a.shape}{' transposed' * transposed_a} and {b.shape}{' transposed' * transposed_b} "
            f"does not fit into {c.shape}.", "Pass op(a): (M, K), op(b): (K, N), c: (M, N), with one batch size.")
    for name, array in (("saved", saved), ("residual", residual)):
        if array is not None and (array.shape != c.shape or array.strides != c.strides):
            raise KernelError(f"`{name}` of shape {array.shape} is not like the product of shape {c.shape}.",
                              "Pass an array of the same shape and strides.")
    return m, n, k


def _output(c: Any, beta: float, bias: Any, residual: Any, saved: Any, activation: str | None, row_sums: Any) -> tuple:
    """The arguments that an epilogue takes."""
    return (strided(c, fresh=beta == 0), *_steps(c), bias, strided(residual), strided(saved, fresh=True),
            ACTIVATIONS[activation], fresh(row_sums))


def _combine(kernels: Kernels, shape: tuple[int, int, int, int], workspace: Any, alpha: float, beta: float, output: tuple,
             types: dict[str, Any]) -> None:
    """The epilogue of sums that lie in a workspace of shape (batches, splits, M, N)."""
    batches, splits, m, n = shape
    fours = m * (count(n, 4) + types["ROW_SUMS"])
    kernels.launch("gemm_combine", (min(count(fours, 256), 1024), 1, batches), (256,),
                   (m, n, alpha, beta, *output, splits, workspace), **types)


def _steps(array: Any) -> tuple[int, int]:
    """Elements from row to row and from batch to batch."""
    size = array.itemsize
    return array.strides[-2] // size, array.strides[0] // size if array.ndim == 3 else 0
