"""The exercise column: two linear layers in tensor parallelism, by rows first and then by columns."""

from typing import Any

import numpy as np

from mpitrain.collectives.plans.own_file import Wrong
from mpitrain.tools.textbook.exercises.exercise import AnswerCost, Case, Exercise, check_cost

STATEMENT = """Two linear layers with ReLU between, divided over ranks: rows first, then columns.

y = relu(x a) b, with x of shape (B, I), a (I, H) and b (H, O).
This rank has some columns of x, the same rows of a, and some columns of b; the ranks'
shares may differ in size. Every rank returns the whole y, of shape (B, O).

The function is a generator. These two lines are collectives, which all ranks must reach:
    total = yield "all-reduce", array     # the sum of all ranks' arrays
    arrays = yield "all-gather", array    # the list of all ranks' arrays
Use as few elements as possible. Return y with `return`."""

BODY = """    raise NotImplementedError
    total = yield "all-reduce", x
"""

Matrix = np.ndarray


def tensors(case: Case) -> tuple[Matrix, Matrix, Matrix]:
    """Return x (rows, inputs), a (inputs, hidden), b (hidden, outputs): whole numbers, -8 to 8."""
    _, rows, inputs, hidden, outputs = case

    def filled(height: int, width: int, step: int) -> Matrix:
        return (step * np.arange(height * width) % 17 - 8.0).reshape(height, width)

    return filled(rows, inputs, 5), filled(inputs, hidden, 7), filled(hidden, outputs, 3)


def calls(case: Case) -> list[list[Any]]:
    """Return the arguments of each rank: the rank, the ranks, and its share of the tensors."""
    ranks = case[0]
    x, a, b = tensors(case)
    shares = zip(
        np.array_split(x, ranks, 1),
        np.array_split(a, ranks, 0),
        np.array_split(b, ranks, 1),
        strict=True,
    )
    return [
        [rank, ranks, *(tensor.tolist() for tensor in share)] for rank, share in enumerate(shares)
    ]


def judge(case: Case, answer: Any) -> AnswerCost:
    """Check the layer: the result of every rank, and the elements that the collectives move."""
    ranks, rows, _, hidden, outputs = case
    x, a, b = tensors(case)
    expected = np.maximum(x @ a, 0) @ b
    for rank, result in enumerate(answer["results"]):
        values = np.array(result, float)
        if values.shape != expected.shape:
            raise Wrong(
                "rank {rank} must return the shape {expected}, but returns {found}",
                rank=rank,
                expected=expected.shape,
                found=values.shape,
            )
        wrong = np.argwhere(~(values == expected))  # NaN is wrong, too.
        if len(wrong):
            row, column = map(int, wrong[0])
            raise Wrong(
                "rank {rank} must have {expected:g} in row {row}, column {column}, but has {found:g}",
                rank=rank,
                expected=expected[row, column],
                row=row,
                column=column,
                found=values[row, column],
            )
    # A ring's all-reduce moves 2 (n - 1) / n of an array through each rank, an all-gather half.
    share = (ranks - 1) / ranks
    counted = sum(
        share * (2 * total / ranks if name == "all-reduce" else total)
        for name, total in answer["collectives"]
    )
    formula = share * (2 * rows * hidden + rows * outputs)
    if counted < formula - 1e-9:
        # All ranks run in one process, so a global name would be memory that they share.
        raise Wrong(
            "the collectives move {counted:g} elements, but a result needs {formula:g}: "
            "ranks share no memory",
            counted=counted,
            formula=formula,
        )
    return check_cost(AnswerCost(counted, formula), "elements that a rank sends by rings")


EXERCISES = {
    "column": Exercise(
        "row_then_column",
        ("ranks", "B", "I", "H", "O"),
        "rank, ranks, x, a, b",
        STATEMENT,
        BODY,
        (
            (1, 1, 1, 1, 1),
            (1, 2, 3, 4, 2),
            (2, 1, 2, 1, 2),
            (2, 2, 3, 4, 3),
            (3, 2, 4, 3, 5),
            (4, 3, 7, 5, 9),
        ),
        calls=calls,
        way="programs",
        judge=judge,
        cost="elements that a rank sends by rings",
        formula="(n - 1) / n (2 B H + B O)",
    ),
}
