"""Exercises: a statement, a skeleton, cases from small to large, and laws that judge the answers."""

from collections.abc import Callable
from typing import Any, NamedTuple

from mpitrain.collectives.plans.own_file import Wrong
from mpitrain.errors import Sentence

Case = tuple[int, ...]
"""Sizes of one question, as ranks and elements."""


class Cost(NamedTuple):
    """Cost of a correct answer, and the least cost by its formula."""

    counted: float
    formula: float


class Exercise(NamedTuple):
    """Row of the table of exercises.

    function    the name that the student's file defines
    sizes       names of the numbers of a case
    arguments   parameters of the function, as the skeleton writes them
    statement   the task, in lines
    body        lines of the skeleton's function
    cases       the questions, the smallest first
    calls       (case) -> arguments of each call of the function
    way         function of `answers.py` that makes the calls in the child
    judge       (case, answer of the child) -> cost; Wrong if the answer breaks a law
    cost        meaning of the cost
    formula     the formula of the cost, in words
    """

    function: str
    sizes: tuple[str, ...]
    arguments: str
    statement: str
    body: str
    cases: tuple[Case, ...]
    calls: Callable[[Case], list[list[Any]]]
    way: str
    judge: Callable[[Case, Any], Cost]
    cost: str
    formula: str


def check_cost(cost: Cost, name: str) -> Cost:
    """Return the cost; Wrong if it is above the formula."""
    if not cost.counted <= cost.formula + 1e-9:
        raise Wrong(
            "the cost ({name}) must be at most {formula:g}, but is {counted:g}",
            name=Sentence(name),
            formula=cost.formula,
            counted=cost.counted,
        )
    return cost
