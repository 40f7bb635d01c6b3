"""Muon: the momentum of each hidden matrix, made nearly orthogonal; AdamW for all other tensors.

The matrix of fused queries, keys and values is one matrix. Vectors, embeddings and the head have
AdamW's update, with the same learning rate and weight decay.

source  Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks; as
        torch.optim.Muon, but the iteration computes in the dtype of the parameters, not in bfloat16
"""

import math
from typing import Any

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter
from mpitrain.optim.adam import of_adam
from mpitrain.optim.rule import (
    ElementsOf,
    Rule,
    TensorPiece,
    TensorWise,
    Update,
    Whole,
    elements,
)


def is_hidden_matrix(tensor: Parameter) -> bool:
    """Return whether Muon steps this tensor itself."""
    return len(tensor.shape) == 2 and not tensor.role


def _momentum(piece: TensorPiece, update: Update, out: Any) -> None:
    """Step the momentum, and write Nesterov's momentum to out."""
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


def _apply(piece: TensorPiece, update: Update) -> None:
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
    TensorWise([], _apply, Whole(is_hidden_matrix, _momentum, _orthogonalize)),
    defaults={"momentum": 0.95},
    refusal=_needs_whole_matrices,
)
