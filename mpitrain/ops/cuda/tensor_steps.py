"""Tensor-wise optimizer steps, in place; sums over tensors stay in device memory."""

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import KINDS, ByDtypes, c_type, element
from mpitrain.ops.cuda.grids import MOST_BLOCKS, POINTWISE, blocks, parts
from mpitrain.ops.cuda.linear import Multiply
from mpitrain.ops.cuda.steps import MIRRORED, LaunchNumbers, gradient_facts
from mpitrain.ops.reference.tensor_steps import LEAST_NORM, NEWTON_SCHULZ

SUMMED = ByDtypes(lambda x, sums: element(x) | {"Result": c_type(sums)})
STEPPED = ByDtypes(
    lambda x, sums, mirror: element(x) | {"Result": c_type(sums), "Mirror": c_type(mirror)}
)
ROWS_OF_A_BLOCK, COLUMNS_OF_A_BLOCK = 8, 32  # of sums of squares along rows, and along columns


def add_squares(kernels: Kernels, x, squares, arena):
    """Add the sum of the squares of x to squares (1,)."""
    count = max(blocks(x.size, KINDS[x.dtype].macros.run)[0], 1)
    sums = arena.take((2, count), "float64")
    kernels.launch(
        "gradient_facts",
        (count,),
        POINTWISE,
        (x.size, x, sums[0], sums[1]),
        macros=KINDS[x.dtype].macros,
        fresh="square_parts nonfinite_parts",
    )
    _add_total(kernels, x, sums[:1], squares)


def lamb_moments(
    kernels: Kernels,
    numbers: LaunchNumbers,
    p,
    g,
    m,
    v,
    squares,
    scale,
    beta1,
    beta2,
    eps,
    weight_decay,
    step,
    arena,
):
    """Step both moments, and add the squares of parameters and of the update to squares (2,)."""
    macros = KINDS[p.dtype].macros
    count = max(blocks(p.size, macros.run)[0], 1)
    sums = arena.take((2, count), "float64")
    values = numbers.of(p, scale, 1 - beta1**step, 1 - beta2**step, of="lamb_moments")
    kernels.launch(
        "lamb_moments",
        (count,),
        POINTWISE,
        (p.size, p, g, m, v, sums, values, 1 - beta1, 1 - beta2, eps, weight_decay),
        macros=macros,
        fresh="square_parts",
    )
    _add_total(kernels, p, sums, squares)


def lamb(
    kernels: Kernels,
    numbers: LaunchNumbers,
    p,
    m,
    v,
    squares,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    step,
    arena,
    mirror=None,
):
    """Step p in place by the update times the trust ratio."""
    macros = _types(p, squares, mirror)
    kernels.launch(
        "lamb",
        blocks(p.size, macros.run),
        POINTWISE,
        (
            p.size,
            p,
            m,
            v,
            mirror,
            squares,
            numbers.of(p, lr, 1 - beta1**step, 1 - beta2**step, of="lamb"),
            eps,
            weight_decay,
        ),
        macros=macros,
    )


def adafactor_squares(
    kernels: Kernels,
    numbers: LaunchNumbers,
    g,
    rows,
    columns,
    row_squares,
    column_squares,
    scale,
    arena,
):
    """Add the squares of scale g to the sums of its rows and columns in the whole tensor."""
    height, width = g.shape
    macros = SUMMED[g.dtype, column_squares.dtype]
    values = numbers.of(g, scale, of="adafactor_squares")
    if rows is not None:
        kernels.launch(
            "row_squares",
            (-(-height // ROWS_OF_A_BLOCK),),
            POINTWISE,
            (height, width, g, rows, values, row_squares),
            macros=macros,
        )
    across = -(-width // COLUMNS_OF_A_BLOCK)
    sums = arena.take((parts(height, across), width), "float64")
    kernels.launch(
        "column_squares",
        (across, len(sums)),
        (COLUMNS_OF_A_BLOCK, 8),
        (height, width, g, sums),
        macros=macros,
        fresh="parts",
    )
    kernels.launch(
        "add_column_squares",
        blocks(width),
        POINTWISE,
        (len(sums), width, sums, columns, values, column_squares),
        macros=macros,
    )


def adafactor_variances(
    kernels: Kernels,
    numbers: LaunchNumbers,
    row,
    column,
    row_squares,
    column_squares,
    weight,
    eps,
    arena,
):
    """Step the factored variance, and overwrite the sums by the factors of its estimate."""
    kernels.launch(
        "adafactor_variances",
        (1,),
        POINTWISE,
        (
            1 if row is None else row.size,
            column.size,
            row,
            column,
            row_squares,
            column_squares,
            numbers.of(column, weight, of="adafactor_variances"),
            eps,
        ),
        macros=SUMMED[column.dtype, column_squares.dtype],
    )


def adafactor_update(
    kernels: Kernels,
    numbers: LaunchNumbers,
    g,
    rows,
    columns,
    row_factors,
    column_factors,
    squares,
    scale,
    eps,
    arena,
):
    """Add the squares of scale g / sqrt(variance) to squares (1,)."""
    height, width = g.shape
    sums = arena.take((1, max(1, min(height, MOST_BLOCKS))), "float64")
    kernels.launch(
        "adafactor_update",
        (sums.size,),
        POINTWISE,
        (
            height,
            width,
            g,
            rows,
            columns,
            row_factors,
            column_factors,
            numbers.of(g, scale, of="adafactor_update"),
            eps,
            sums,
        ),
        macros=SUMMED[g.dtype, squares.dtype],
        fresh="parts",
    )
    _add_total(kernels, g, sums, squares)


def adafactor(
    kernels: Kernels,
    numbers: LaunchNumbers,
    p,
    g,
    rows,
    columns,
    row_factors,
    column_factors,
    parameter_squares,
    update_squares,
    count,
    scale,
    lr,
    rate,
    eps,
    weight_decay,
    arena,
    mirror=None,
):
    """Step p in place: relative to its root mean square, by the clipped update."""
    height, width = p.shape
    kernels.launch(
        "adafactor",
        (min(height, MOST_BLOCKS),),
        POINTWISE,
        (
            height,
            width,
            p,
            g,
            mirror,
            rows,
            columns,
            row_factors,
            column_factors,
            parameter_squares,
            update_squares,
            float(count),
            numbers.of(p, scale, lr, rate, of="adafactor"),
            eps,
            weight_decay,
        ),
        macros=_types(p, update_squares, mirror),
    )


def muon_momentum(kernels: Kernels, numbers: LaunchNumbers, g, m, out, scale, momentum, arena):
    """Step m in place, and write Nesterov's momentum to out."""
    macros = KINDS[g.dtype].macros
    kernels.launch(
        "muon_momentum",
        blocks(g.size, macros.run),
        POINTWISE,
        (g.size, g, m, out, numbers.of(g, scale, of="muon_momentum"), momentum, 1 - momentum),
        macros=macros,
        fresh="out",
    )


def newton_schulz(kernels: Kernels, multiply: Multiply, x, steps, arena):
    """Replace a matrix (M, N) by nearly the nearest semi-orthogonal one."""
    a, b, c = NEWTON_SCHULZ
    macros, is_wide = KINDS[x.dtype].macros, len(x) <= x.shape[1]
    side = min(x.shape)
    squares = gradient_facts(kernels, x.reshape(-1), arena)
    kernels.launch(
        "divide_by_norm",
        blocks(x.size, macros.run),
        POINTWISE,
        (x.size, x, squares, LEAST_NORM),
        macros=macros,
    )
    gram, polynomial = arena.take((2, side, side), x.dtype)
    one, other = x, arena.take(x.shape, x.dtype)
    for _ in range(steps):
        multiply(kernels, arena, one, one, gram, transposed_a=not is_wide, transposed_b=is_wide)
        polynomial[...] = gram
        multiply(kernels, arena, gram, gram, polynomial, alpha=c, beta=b)
        other[...] = one
        left, right = (polynomial, one) if is_wide else (one, polynomial)
        multiply(kernels, arena, left, right, other, beta=a)
        one, other = other, one
    if one is not x:
        x[...] = one


def muon(
    kernels: Kernels, numbers: LaunchNumbers, p, update, lr, ratio, weight_decay, arena, mirror=None
):
    """Step p in place: p = (1 - lr weight_decay) p - lr ratio update."""
    macros = KINDS[p.dtype].macros if mirror is None else MIRRORED[p.dtype, mirror.dtype]
    kernels.launch(
        "muon",
        blocks(p.size, macros.run),
        POINTWISE,
        (p.size, p, update, mirror, numbers.of(p, lr, of="muon"), ratio, weight_decay),
        macros=macros,
    )


def _add_total(kernels: Kernels, x, partial, result) -> None:
    """Add the sum of each row of float64 (R, count) to result (R,)."""
    rows, count = partial.shape
    kernels.launch(
        "add_total",
        (1, rows),
        POINTWISE,
        (count, partial, result),
        macros=SUMMED[x.dtype, result.dtype],
    )


def _types(p, sums, mirror):
    """Return the macros Element, Result and Mirror of element.cuh."""
    if mirror is None:
        return SUMMED[p.dtype, sums.dtype]
    return STEPPED[p.dtype, sums.dtype, mirror.dtype]
