"""Optimizer steps in place, and gradient statistics; sums over tensors stay in device memory.

Numbers that change from step to step are in device memory. So the arguments of a launch never
change: see `LaunchNumbers`. `kernels` is a `Launcher`; the other arguments are those of the definition.
"""

from functools import partial
from typing import Any

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.codes import SIGNED, UNSIGNED, block_count
from mpitrain.ops.cuda.launches import (
    KINDS,
    MOST_BLOCKS,
    POINTWISE,
    ByDtypes,
    Typed,
    blocks,
    c_type,
    element,
    parts,
    pointwise,
    total,
)
from mpitrain.ops.reference.steps import LEAST_NORM, NEWTON_SCHULZ

MIRRORED = ByDtypes(lambda p, mirror: element(p) | {"Mirror": c_type(mirror)})


def takes_runs(body: Any) -> Any:
    """Mark a step that takes `GroupRuns` as its weight_decay: one launch steps several parameter groups."""
    body.takes_runs = True
    return body


MAPS = np.concatenate([SIGNED.values, SIGNED.bounds, UNSIGNED.values, UNSIGNED.bounds])
"""Values and bounds of the codes of both moments, (1024,) float32."""


def _step(kernels, name, p, arrays, mirror, rates, *constants) -> None:
    """Launch an element-wise step of p.

    arrays     the gradient, then the state
    rates      the result of `LaunchNumbers.rates`
    constants  arguments that are the same in all steps of a run, such as beta
    """
    macros = _types(p, mirror)
    pointwise(kernels, name, (p.size, p, *arrays, mirror, *rates, *constants), macros)


@takes_runs
def sgd(kernels, p, g, scale, lr, weight_decay, arena, mirror=None):
    _step(kernels, "sgd", p, (g,), mirror, kernels.numbers.rates(p, lr, weight_decay, scale))


def _with_momentum(name, kernels, p, g, m, scale, lr, beta, weight_decay, arena, mirror=None):
    _step(kernels, name, p, (g, m), mirror, kernels.numbers.rates(p, lr, weight_decay, scale), beta)


momentum, nesterov = (
    takes_runs(partial(_with_momentum, name)) for name in ("momentum", "nesterov")
)


@takes_runs
def lion(kernels, p, g, m, scale, lr, beta1, beta2, weight_decay, arena, mirror=None):
    rates = kernels.numbers.rates(p, lr, weight_decay, scale)
    _step(kernels, "lion", p, (g, m), mirror, rates, 1 - beta1, 1 - beta2)


def _with_two_moments(
    name, kernels, p, g, m, v, scale, lr, beta1, beta2, eps, weight_decay, step, arena, mirror=None
):
    # The bias corrections depend only on the step, so the host computes them, in double.
    rates = kernels.numbers.rates(p, lr, weight_decay, scale, 1 - beta1**step, 1 - beta2**step)
    _step(kernels, name, p, (g, m, v), mirror, rates, 1 - beta1, 1 - beta2, eps)


adam, adamw = (takes_runs(partial(_with_two_moments, name)) for name in ("adam", "adamw"))


def adamw8bit(
    kernels,
    p,
    g,
    m,
    v,
    m_scales,
    v_scales,
    scale,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    step,
    lead,
    arena,
    mirror=None,
):
    """Step p in place as adamw, with moments in codes; a warp has a block of 256 elements."""
    kernels.launch(
        "adamw8bit",
        (max(1, -(-block_count(p.size, lead) // 8)),),
        POINTWISE,
        (
            p.size,
            lead,
            p,
            g,
            m,
            v,
            m_scales,
            v_scales,
            mirror,
            kernels.numbers.of(p, scale, lr, 1 - beta1**step, 1 - beta2**step),
            kernels.numbers.constant(MAPS),
            1 - beta1,
            1 - beta2,
            eps,
            weight_decay,
        ),
        macros=_types(p, mirror),
    )


def gradient_facts(kernels, x, arena):
    return total(kernels, _facts(kernels, x, arena), arena)


def _facts(kernels: Kernels, x: Any, arena: Any) -> Any:
    """Return each block's sum of squares and number of elements that are not finite: (2, blocks)."""
    count = max(blocks(x.size, KINDS[x.dtype].macros.run)[0], 1)
    facts = arena.take((2, count), "float64")
    kernels.launch(
        "gradient_facts",
        (count,),
        POINTWISE,
        (x.size, x, facts[0], facts[1]),
        macros=KINDS[x.dtype].macros,
        fresh="square_parts nonfinite_parts",
    )
    return facts


def _types(p: Any, mirror: Any) -> Typed:
    return KINDS[p.dtype].macros if mirror is None else MIRRORED[p.dtype, mirror.dtype]


SUMMED = ByDtypes(lambda x, sums: element(x) | {"Result": c_type(sums)})
STEPPED = ByDtypes(
    lambda x, sums, mirror: element(x) | {"Result": c_type(sums), "Mirror": c_type(mirror)}
)
ROWS_OF_A_BLOCK, COLUMNS_OF_A_BLOCK = 8, 32  # of sums of squares along rows, and along columns


def add_squares(kernels, x, squares, arena):
    _add_total(kernels, x, _facts(kernels, x, arena)[:1], squares)


def lamb_moments(kernels, p, g, m, v, squares, scale, beta1, beta2, eps, weight_decay, step, arena):
    macros = KINDS[p.dtype].macros
    count = max(blocks(p.size, macros.run)[0], 1)
    sums = arena.take((2, count), "float64")
    values = kernels.numbers.of(p, scale, 1 - beta1**step, 1 - beta2**step, of="lamb_moments")
    kernels.launch(
        "lamb_moments",
        (count,),
        POINTWISE,
        (p.size, p, g, m, v, sums, values, 1 - beta1, 1 - beta2, eps, weight_decay),
        macros=macros,
        fresh="square_parts",
    )
    _add_total(kernels, p, sums, squares)


def lamb(kernels, p, m, v, squares, lr, beta1, beta2, eps, weight_decay, step, arena, mirror=None):
    macros = _summed_types(p, squares, mirror)
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
            kernels.numbers.of(p, lr, 1 - beta1**step, 1 - beta2**step, of="lamb"),
            eps,
            weight_decay,
        ),
        macros=macros,
    )


def adafactor_squares(kernels, g, rows, columns, row_squares, column_squares, scale, arena):
    height, width = g.shape
    macros = SUMMED[g.dtype, column_squares.dtype]
    values = kernels.numbers.of(g, scale, of="adafactor_squares")
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


def adafactor_variances(kernels, row, column, row_squares, column_squares, weight, eps, arena):
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
            kernels.numbers.of(column, weight, of="adafactor_variances"),
            eps,
        ),
        macros=SUMMED[column.dtype, column_squares.dtype],
    )


def adafactor_update(
    kernels, g, rows, columns, row_factors, column_factors, squares, scale, eps, arena
):
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
            kernels.numbers.of(g, scale, of="adafactor_update"),
            eps,
            sums,
        ),
        macros=SUMMED[g.dtype, squares.dtype],
        fresh="parts",
    )
    _add_total(kernels, g, sums, squares)


def adafactor(
    kernels,
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
            kernels.numbers.of(p, scale, lr, rate, of="adafactor"),
            eps,
            weight_decay,
        ),
        macros=_summed_types(p, update_squares, mirror),
    )


def muon_momentum(kernels, g, m, out, scale, momentum, arena):
    macros = KINDS[g.dtype].macros
    pointwise(
        kernels,
        "muon_momentum",
        (
            g.size,
            g,
            m,
            out,
            kernels.numbers.of(g, scale, of="muon_momentum"),
            momentum,
            1 - momentum,
        ),
        macros,
        fresh="out",
    )


def newton_schulz(kernels, x, steps, arena):
    a, b, c = NEWTON_SCHULZ
    macros, is_wide = KINDS[x.dtype].macros, len(x) <= x.shape[1]
    side = min(x.shape)
    squares = gradient_facts(kernels, x.reshape(-1), arena)
    pointwise(kernels, "divide_by_norm", (x.size, x, squares, LEAST_NORM), macros)
    gram, polynomial = arena.take((2, side, side), x.dtype)
    one, other = x, arena.take(x.shape, x.dtype)
    for _ in range(steps):
        kernels.multiply(arena, one, one, gram, transposed_a=not is_wide, transposed_b=is_wide)
        polynomial[...] = gram
        kernels.multiply(arena, gram, gram, polynomial, alpha=c, beta=b)
        other[...] = one
        left, right = (polynomial, one) if is_wide else (one, polynomial)
        kernels.multiply(arena, left, right, other, beta=a)
        one, other = other, one
    if one is not x:
        x[...] = one


def muon(kernels, p, update, lr, ratio, weight_decay, arena, mirror=None):
    macros = KINDS[p.dtype].macros if mirror is None else MIRRORED[p.dtype, mirror.dtype]
    pointwise(
        kernels,
        "muon",
        (p.size, p, update, mirror, kernels.numbers.of(p, lr, of="muon"), ratio, weight_decay),
        macros,
    )


def _add_total(kernels, x, partial, result) -> None:
    """Add the sum of each row of float64 (R, count) to result (R,)."""
    rows, count = partial.shape
    kernels.launch(
        "add_total",
        (1, rows),
        POINTWISE,
        (count, partial, result),
        macros=SUMMED[x.dtype, result.dtype],
    )


def _summed_types(p, sums, mirror):
    if mirror is None:
        return SUMMED[p.dtype, sums.dtype]
    return STEPPED[p.dtype, sums.dtype, mirror.dtype]
