"""Adafactor: a second moment of rows and columns, and steps relative to each tensor's size.

A vector has a second moment of each element. A tensor with more than two dims counts as a matrix,
with all dims but the last flattened.

source  Shazeer and Stern 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML;
        the constants and the order of operations are those of torch.optim.Adafactor
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitrain.layers.base import Parameter
from mpitrain.optim.rule import (
    MatrixBlock,
    Round,
    Rule,
    TensorPiece,
    TensorWise,
    Update,
    columns,
    rows,
    scalar,
)

BETA2_DECAY = -0.8
"""The weight of new squares in update t is t to this power."""


def _rows(tensor: Parameter) -> tuple[int, ...] | None:
    """Return the shape of one number for each row of a matrix; vectors have none."""
    return rows(tensor) if len(tensor.shape) > 1 else None


def _flat(arrays: Any, name: str) -> Any:
    """Return a sum or a buffer as (count,), or None if the tensor has none."""
    return arrays[name].reshape(-1) if name in arrays else None


def _blocks(piece: TensorPiece) -> Iterator[tuple[MatrixBlock, Any, Any]]:
    """Yield (block, its gradients as (R, C), (rows, columns) and the sums along both)."""
    row, column = _flat(piece.facts, "row"), _flat(piece.facts, "column")
    for block in piece.blocks:
        indices = None if row is None else block.rows, block.columns
        yield block, _matrix(piece.gradients, block), (*indices, row, column)


def _matrix(array: Any, block: MatrixBlock) -> Any:
    return array[block.start : block.stop].reshape(len(block.rows), len(block.columns))


def _epsilon(piece: TensorPiece) -> float:
    return float(np.finfo(piece.parameters.dtype).eps)


def _add_squares(piece: TensorPiece, update: Update) -> None:
    """Add the squares of the gradient by rows and columns, and of the parameters."""
    ops, arena = update.ops, update.arena
    for _, gradients, along in _blocks(piece):
        ops.adafactor_squares(gradients, *along, update.scale, arena)
    ops.add_squares(piece.parameters, piece.facts["parameters"], arena)


def _add_update(piece: TensorPiece, update: Update) -> None:
    """Step the second moment; add the squares of the update before its clipping."""
    ops, arena, epsilon = update.ops, update.arena, _epsilon(piece)
    ops.adafactor_variances(
        _flat(piece.state, "row_moment"),
        _flat(piece.state, "column_moment"),
        _flat(piece.facts, "row"),
        _flat(piece.facts, "column"),
        float(update.number) ** BETA2_DECAY,
        epsilon,
        arena,
    )
    for _, gradients, along in _blocks(piece):
        ops.adafactor_update(gradients, *along, piece.facts["update"], update.scale, epsilon, arena)


def _apply(piece: TensorPiece, update: Update) -> None:
    for block, gradients, along in _blocks(piece):
        update.ops.adafactor(
            _matrix(piece.parameters, block),
            gradients,
            *along,
            piece.facts["parameters"],
            piece.facts["update"],
            count=math.prod(piece.tensor.shape),
            scale=update.scale,
            lr=update.lr,
            rate=min(update.lr, update.number**-0.5),
            eps=_epsilon(piece),
            weight_decay=update.settings.weight_decay,
            arena=update.arena,
            mirror=None if piece.mirror is None else _matrix(piece.mirror, block),
        )


ADAFACTOR = Rule(
    "a second moment of rows and columns alone (Shazeer and Stern 2018)",
    ("weight_decay",),
    {"row_moment": _rows, "column_moment": columns},
    TensorWise(
        [
            Round({"row": _rows, "column": columns, "parameters": scalar}, _add_squares),
            Round({"update": scalar}, _add_update),
        ],
        _apply,
    ),
    defaults={"lr": 1e-2, "weight_decay": 0.0},
)
