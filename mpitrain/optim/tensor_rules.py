"""Rules that need sums over whole tensors, or whole tensors: LAMB, Adafactor, Muon.

LAMB: Adam's update of each tensor, scaled to the norm of the tensor.

source  You et al. 2020, Large Batch Optimization for Deep Learning, ICLR, algorithm 2

Adafactor: a second moment of rows and columns, and steps relative to each tensor's size.

A vector has a second moment of each element. A tensor with more than two dims counts as a matrix,
with all dims but the last flattened.

source  Shazeer and Stern 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML;
        the constants and the order of operations are those of torch.optim.Adafactor

Muon: the momentum of each hidden matrix, made nearly orthogonal; AdamW for all other tensors.

The matrix of fused queries, keys and values is one matrix. Vectors, embeddings and the head have
AdamW's update, with the same learning rate and weight decay.

source  Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks; as
        torch.optim.Muon, but the iteration computes in the dtype of the parameters, not in bfloat16
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter
from mpitrain.optim.rule import (
    ADAM,
    ElementsOf,
    MatrixBlock,
    Round,
    Rule,
    TensorPiece,
    TensorWise,
    Update,
    Whole,
    columns,
    elements,
    of_adam,
    rows,
    scalar,
)


def _pair(tensor: Parameter) -> tuple[int, ...]:
    return (2,)


def _add_squares_lamb(piece: TensorPiece, update: Update) -> None:
    update.ops.lamb_moments(
        piece.parameters,
        piece.gradients,
        piece.state["first_moment"],
        piece.state["second_moment"],
        piece.facts["squares"],
        scale=update.scale,
        weight_decay=update.settings.weight_decay,
        arena=update.arena,
        **of_adam(update),
    )


def _apply_lamb(piece: TensorPiece, update: Update) -> None:
    update.ops.lamb(
        piece.parameters,
        piece.state["first_moment"],
        piece.state["second_moment"],
        piece.facts["squares"],
        lr=update.lr,
        weight_decay=update.settings.weight_decay,
        arena=update.arena,
        mirror=piece.mirror,
        **of_adam(update),
    )


LAMB = Rule(
    "Adam's update, scaled to the norm of each tensor (You et al. 2020)",
    ADAM,
    {"first_moment": elements, "second_moment": elements},
    TensorWise([Round({"squares": _pair}, _add_squares_lamb)], _apply_lamb),
    defaults={"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01},
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


def _add_squares_adafactor(piece: TensorPiece, update: Update) -> None:
    ops, arena = update.ops, update.arena
    for _, gradients, along in _blocks(piece):
        ops.adafactor_squares(gradients, *along, update.scale, arena)
    ops.add_squares(piece.parameters, piece.facts["parameters"], arena)


def _add_update(piece: TensorPiece, update: Update) -> None:
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


def _apply_adafactor(piece: TensorPiece, update: Update) -> None:
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
            Round({"row": _rows, "column": columns, "parameters": scalar}, _add_squares_adafactor),
            Round({"update": scalar}, _add_update),
        ],
        _apply_adafactor,
    ),
    defaults={"lr": 1e-2, "weight_decay": 0.0},
)


def is_hidden_matrix(tensor: Parameter) -> bool:
    """Return whether Muon steps this tensor itself."""
    return len(tensor.shape) == 2 and not tensor.role


def _momentum(piece: TensorPiece, update: Update, out: Any) -> None:
    update.ops.muon_momentum(
        piece.gradients,
        piece.state["first_moment"],
        out,
        update.scale,
        update.settings.momentum,
        update.arena,
    )


def _orthogonalize(matrix: Any, update: Update) -> None:
    update.ops.newton_schulz(matrix, update.settings.ns_steps, update.arena)


def _lr_factor(kind: str, tensor: Parameter) -> float:
    height, width = tensor.shape
    if kind == "original":
        return math.sqrt(max(1, height / width))
    return 0.2 * math.sqrt(max(height, width))


def _apply_muon(piece: TensorPiece, update: Update) -> None:
    settings, arena = update.settings, update.arena
    if piece.result is not None:
        update.ops.muon(
            piece.parameters,
            piece.result,
            update.lr,
            _lr_factor(settings.adjust_lr_fn, piece.tensor),
            settings.weight_decay,
            arena,
            mirror=piece.mirror,
        )
        return
    update.ops.adamw(
        piece.parameters,
        piece.gradients,
        piece.state["first_moment"],
        piece.state["second_moment"],
        scale=update.scale,
        lr=update.lr,
        weight_decay=settings.weight_decay,
        arena=arena,
        mirror=piece.mirror,
        **of_adam(update),
    )


def _needs_whole_matrices(config: Config) -> ConfigError | None:
    if config.layout.tp == 1:
        return None
    return ConfigError(
        f"Muon updates whole matrices, but layout.tp {config.layout.tp} divides them.",
        "Set layout.tp to 1, or choose another optimizer.name.",
    )


MUON = Rule(
    "orthogonal momentum of hidden matrices, adamw for other tensors (Jordan et al. 2024)",
    (
        "weight_decay",
        "momentum",
        "ns_steps",
        "adjust_lr_fn",
        "beta1",
        "beta1_delayed",
        "beta2",
        "epsilon",
    ),
    {
        "first_moment": elements,
        "second_moment": ElementsOf(lambda tensor: not is_hidden_matrix(tensor)),
    },
    TensorWise([], _apply_muon, Whole(is_hidden_matrix, _momentum, _orthogonalize)),
    defaults={"momentum": 0.95},
    refusal=_needs_whole_matrices,
)
