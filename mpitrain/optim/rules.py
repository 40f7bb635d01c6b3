"""The table of all update rules, and its rows of whole tensors.

LAMB: Adam's update of each tensor, scaled to the norm of the tensor.

source  You et al. 2020, Large Batch Optimization for Deep Learning, ICLR, algorithm 2

Adafactor: second moments of rows and columns only, and steps in proportion to each tensor's size. A
vector has a second moment for each element. A tensor with more than two dims counts as a matrix,
with all dims but the last flattened.

source  Shazeer and Stern 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML;
        the constants and the order of operations are those of torch.optim.Adafactor

Muon: the momentum of each hidden matrix, made nearly orthogonal; AdamW for all other tensors.
Fused queries, keys and values are one matrix. Vectors, embeddings and the head have AdamW's update,
with the same learning rate and weight decay.

source  Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks; as
        torch.optim.Muon, but the iteration computes in the dtype of the parameters, not in bfloat16
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpitrain import config
from mpitrain.layers.base import Parameter
from mpitrain.ops.codes import SIGNED, UNSIGNED
from mpitrain.optim.coded import BlockWise
from mpitrain.optim.optimizer import (
    SETTINGS,
    ElementWise,
    Rule,
    TorchClass,
    Update,
    columns,
    elements,
    rows,
    scalar,
)
from mpitrain.optim.tensors import ElementsOf, MatrixBlock, Round, TensorPiece, TensorWise, Whole
from mpitrain.tables import Table

ADAM = ("weight_decay", "beta1", "beta1_delayed", "beta2", "epsilon")
"""The hyper-parameters of Adam and its variants."""


def torch_adam(settings: config.Optimizer) -> Mapping[str, Any]:
    return {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}


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
        **update.of_adam(),
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
        **update.of_adam(),
    )


LAMB = Rule(
    "Adam's update, scaled to the norm of each tensor (You et al. 2020)",
    ADAM,
    {"first_moment": elements, "second_moment": elements},
    TensorWise([Round({"squares": _pair}, _add_squares_lamb)], _apply_lamb),
    defaults={"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01},
)


BETA2_DECAY = -0.8
"""Exponent of Adafactor: in update t the new squares have the weight t ** BETA2_DECAY."""


def _rows(tensor: Parameter) -> tuple[int, ...] | None:
    """Return the shape of one number per row of a matrix; None for a vector."""
    return rows(tensor) if len(tensor.shape) > 1 else None


def _flat(arrays: Any, name: str) -> Any:
    """Return the fact or the buffer `name` of a tensor as (count,), or None if it has none."""
    return arrays[name].reshape(-1) if name in arrays else None


def _blocks(piece: TensorPiece) -> Iterator[tuple[MatrixBlock, Any, Any]]:
    """Yield (block, its gradients (R, C), indices and sums) of each matrix of a piece.

    Indices and sums are (row indices, column indices, sums by row, sums by column). Those of rows
    are None for a vector.
    """
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
        float(update.step) ** BETA2_DECAY,
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
            rate=min(update.lr, update.step**-0.5),
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
    """Return whether Muon orthogonalises the momentum of this tensor; others have AdamW's update."""
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
        **update.of_adam(),
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
)


RULES: Table[str, Rule] = Table(
    {
        "sgd": Rule(
            "stochastic gradient descent",
            ("weight_decay",),
            {},
            ElementWise("sgd", lambda update: {}),
        ),
        "momentum": Rule(
            "SGD with heavy-ball momentum (Polyak 1964)",
            ("weight_decay", "momentum"),
            {"momentum": elements},
            ElementWise("momentum", lambda update: {"beta": update.settings.momentum}),
        ),
        "nesterov": Rule(
            "SGD with Nesterov momentum, as torch.optim.SGD (Sutskever et al. 2013)",
            ("weight_decay", "momentum"),
            {"momentum": elements},
            ElementWise("nesterov", lambda update: {"beta": update.settings.momentum}),
            defaults={"lr": 0.1, "weight_decay": 0.0},
            torch=TorchClass(
                "SGD", lambda settings: {"momentum": settings.momentum, "nesterov": True}
            ),
        ),
        "adam": Rule(
            "Adam, whose weight decay is added to the gradient (Kingma and Ba 2015)",
            ADAM,
            {"first_moment": elements, "second_moment": elements},
            ElementWise("adam", Update.of_adam),
            defaults={"weight_decay": 0.0},
            torch=TorchClass("Adam", torch_adam),
        ),
        "adamw": Rule(
            "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
            ADAM,
            {"first_moment": elements, "second_moment": elements},
            ElementWise("adamw", Update.of_adam),
            torch=TorchClass("AdamW", torch_adam),
        ),
        "adamw8bit": Rule(
            "adamw with moments of 8 bits (Dettmers et al. 2022)",
            ADAM,
            {"first_moment": elements, "second_moment": elements},
            BlockWise(
                "adamw8bit",
                "adamw",
                {"first_moment": SIGNED, "second_moment": UNSIGNED},
                Update.of_adam,
            ),
        ),
        "lion": Rule(
            "the sign of a momentum, with decoupled weight decay (Chen et al. 2023)",
            ("weight_decay", "beta1", "beta2"),
            {"momentum": elements},
            ElementWise(
                "lion",
                lambda update: {"beta1": update.settings.beta1, "beta2": update.settings.beta2},
            ),
            defaults={"lr": 5e-4, "weight_decay": 0.4, "beta1": 0.9, "beta2": 0.99},
        ),
        "lamb": LAMB,
        "adafactor": ADAFACTOR,
        "muon": MUON,
    }
)
"""Update rules by optimizer.name."""


def without_unread(settings: config.Optimizer) -> config.Optimizer:
    """Return a copy in which keys that the rule does not read have their defaults.

    Earlier versions accepted such keys; they had no effect.
    """
    keys = RULES[settings.name].unread_keys(settings) if settings.name in RULES else []
    return settings.model_copy(update={key: SETTINGS[key].default for key in keys})
