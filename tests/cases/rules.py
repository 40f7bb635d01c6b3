"""Update rules that need sums over whole tensors, or whole tensors, in plain NumPy, as a plugin may add them."""

import numpy as np

from mpitrain.optim.optimizer import Rule, scalar
from mpitrain.optim.tensors import Round, TensorWise


def gradient(piece, update):
    """The scaled gradient of a piece, with decay as sgd has it."""
    decay = update.settings.weight_decay if piece.tensor.decayed else 0.0
    return update.scale * piece.gradients + decay * piece.parameters


def add_norm(piece, update):
    piece.facts["squares"][...] += np.square(gradient(piece, update)).sum()


def normalised(piece, update):
    """p -= lr (m = g / |g|), with the norm of the whole tensor, and a count of its updates."""
    norm = np.sqrt(piece.facts["squares"]) + update.settings.epsilon
    piece.parameters[...] -= update.lr * gradient(piece, update) / norm
    piece.state["updates"][...] += 1
    if piece.mirror is not None:
        piece.mirror[...] = piece.parameters


UNDIVIDED = {"replication.zero": 0, "layout.tp": 1}
"""What a rule needs whose tensors no ranks may divide."""


def whole(piece, update):
    """A step that needs the matrix itself: divided by its largest singular value."""
    (block,) = piece.blocks
    g = piece.gradients.reshape(len(block.rows), len(block.columns))
    piece.parameters[...] -= update.lr * piece.gradients / np.linalg.norm(g, 2)


TOYS = {
    "normalised": Rule(
        "divided by the norm of its tensor",
        ("weight_decay", "epsilon"),
        {"updates": scalar},
        TensorWise([Round({"squares": scalar}, add_norm)], normalised),
        {"epsilon": 1e-7},
    ),
    "whole": Rule("needs whole matrices", (), {}, TensorWise([], whole), needs=UNDIVIDED),
}
