"""Example calls of all operations on given sizes, made from the operands of their rows."""

from ast import literal_eval
from collections.abc import Callable
from functools import cache
from typing import Any

from mpitrain.ops.operands import Operand, Sizes, dims, operands
from mpitrain.ops.table import OPERATIONS, Ops

Draw = Callable[[Operand, tuple[int, ...]], Any]
"""(operand, shape) -> an array in the memory of the operations."""


def examples(ops: Ops, sizes: Sizes, draw: Draw, arena: Any) -> Callable[[str], dict[str, Any]]:
    """Return a function (name of an operation) -> {argument: example value}, `arena` too.

    Operations share the arrays of equal operands. So an operation may overwrite the array of
    another, as `row_exponentials` does for `cross_entropy_split`.
    """

    @cache
    def value(operand: Operand) -> Any:
        if operand.after:
            return last(operand.after)
        if number := operand.number:
            return sizes[number] if number in sizes else literal_eval(number)
        return draw(operand, dims(operand.shape or "", sizes))

    def arguments(name: str) -> dict[str, Any]:
        takes = operands(OPERATIONS[name].operands).takes
        return {operand.name: value(operand) for operand in takes} | {"arena": arena}

    @cache
    def last(name: str) -> Any:
        """Return the last result of an operation."""
        result = getattr(ops, name)(**arguments(name))
        return result[1] if len(operands(OPERATIONS[name].operands).results) > 1 else result

    return arguments
