"""Update rules that need sums over whole tensors, in plain NumPy; they show that the interface carries such rules."""

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.optim.rule import Round, Rule, TensorWise, columns, elements, rows, scalar


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


def squares(piece, update):
    """Each block of the squared gradient, as a matrix."""
    g = np.square(update.scale * piece.gradients)
    for block in piece.blocks:
        yield block, g[block.start : block.stop].reshape(len(block.rows), len(block.columns))


def add_rows_and_columns(piece, update):
    for block, values in squares(piece, update):
        piece.facts["row"].reshape(-1)[block.rows] += values.sum(axis=1)
        piece.facts["column"].reshape(-1)[block.columns] += values.sum(axis=0)


def moments(piece, update):
    """The new moments of rows and columns: from state and sums alone."""
    return (
        0.9 * piece.state["row_moment"] + 0.1 * piece.facts["row"],
        0.9 * piece.state["column_moment"] + 0.1 * piece.facts["column"],
    )


def factored(piece, update):
    """g / sqrt(row x column / sum of rows), as Adafactor estimates the second moment."""
    row, column = moments(piece, update)
    found = update.scale * piece.gradients
    for block in piece.blocks:
        estimate = np.outer(row.reshape(-1)[block.rows], column.reshape(-1)[block.columns])
        found[block.start : block.stop] /= np.sqrt(estimate.reshape(-1) / row.sum()) + 1e-6
    return found


def add_update(piece, update):
    piece.facts["update"][...] += np.square(factored(piece, update)).sum()


def clipped(piece, update):
    """p -= lr (m + decay p): m is a mean of the factored gradient, clipped by its own size in the whole tensor."""
    size = np.sqrt(piece.facts["update"] / max(1, np.prod(piece.tensor.shape)))
    step = factored(piece, update) / np.maximum(1.0, size)
    piece.state["row_moment"][...], piece.state["column_moment"][...] = moments(piece, update)
    mean = piece.state["first_moment"]
    mean *= 0.8
    mean += 0.2 * step
    decay = update.settings.weight_decay if piece.tensor.decayed else 0.0
    piece.parameters[...] -= update.lr * (mean + decay * piece.parameters)
    if piece.mirror is not None:
        piece.mirror[...] = piece.parameters


def whole_matrices(config):
    """Refuse to divide a matrix."""
    if config.replication.zero or config.layout.tp > 1:
        return ConfigError("whole needs whole matrices, but they are divided.", "Set tp to 1.")
    return None


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
    "factored": Rule(
        "rows and columns of a second moment",
        ("weight_decay",),
        {"first_moment": elements, "row_moment": rows, "column_moment": columns},
        TensorWise(
            [
                Round({"row": rows, "column": columns}, add_rows_and_columns),
                Round({"update": scalar}, add_update),
            ],
            clipped,
        ),
    ),
    "whole": Rule(
        "needs whole matrices",
        (),
        {},
        TensorWise([], whole),
        refusal=whole_matrices,
    ),
}
