"""LAMB: Adam's update of each tensor, scaled to the norm of the tensor.

source  You et al. 2020, Large Batch Optimization for Deep Learning, ICLR, algorithm 2
"""

from mpitrain.layers.base import Parameter
from mpitrain.optim.adam import ADAM, of_adam
from mpitrain.optim.rule import Round, Rule, TensorPiece, TensorWise, Update, elements


def _pair(tensor: Parameter) -> tuple[int, ...]:
    """Return the shape of the squares of a tensor and of its update."""
    return (2,)


def _add_squares(piece: TensorPiece, update: Update) -> None:
    """Step the moments; add the squares of the parameters and of the update."""
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


def _apply(piece: TensorPiece, update: Update) -> None:
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
    TensorWise([Round({"squares": _pair}, _add_squares)], _apply),
    defaults={"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01},
)
