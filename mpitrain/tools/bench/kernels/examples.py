"""Arguments of an example call of each operation, with the shapes of its row."""

from ast import literal_eval
from collections.abc import Callable
from functools import cache
from typing import Any

from mpitrain.ops import OPERATIONS, Ops
from mpitrain.ops.table import Operand, Sizes, dims, operands

Draw = Callable[[Operand, tuple[int, ...]], Any]
"""(operand, shape) -> an array of example values, in the memory that the operations compute in."""


def examples(ops: Ops, sizes: Sizes, draw: Draw, arena: Any) -> Callable[[str], dict[str, Any]]:
    """Return a function: name of an operation -> {argument: example value}, with `arena`.

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
        result = getattr(ops, name)(**arguments(name))
        return result[-1] if len(operands(OPERATIONS[name].operands).results) > 1 else result

    return arguments
