"""Operands of an operation: a line such as `x:M,K w:N,K b:N -> y:M,N`, read into shapes and counts.

An argument is a word before the arrow, under the name of its parameter. A result is a word after
the arrow, or the name of an argument that the operation writes. Dims are products of one-letter
sizes and of a number: `3HD`. The legend of the letters is in `table`.

    x:M,K          an array of shape (M, K)
    targets<V:M    integers from 0 to V - 1
    rows<M!:M      the integers from 0 to M - 1, each once
    v>0:L          an array of positive numbers
    m%:L           codes of 8 bits
    saved@linear   the last result of the operation `linear` on these same operands
    heads=H        a size
    scale=0.5      a number
    |2,M           at the end of an argument: the number of elements that the operation reads, if it
                   is not the argument's own; a sum has several such terms, joined by `+`
"""

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from mpitrain.errors import KernelError

INDEX_BYTES = 8
"""Bytes of a token or target."""

WORD = re.compile(
    r"(?P<name>\w+)(<(?P<below>\w+)(?P<once>!)?|(?P<positive>>0)|(?P<coded>%)|@(?P<after>\w+)|=(?P<number>[^:|]+))?"
    r"(:(?P<shape>[\w,]+))?(\|(?P<reads>[\w,+]+))?"
)
DIM = re.compile(r"(\d*)([A-Z]*)")

Sizes = Mapping[str, int]
"""{letter: size}."""


class Operand(NamedTuple):
    """An argument or a result; each field is the group of WORD with its name, or None."""

    name: str
    below: str | None
    once: str | None
    positive: str | None
    coded: str | None
    after: str | None
    number: str | None
    shape: str | None
    reads: str | None

    @property
    def is_integer(self) -> bool:
        """Whether its elements are integers, which no precision changes."""
        return bool(self.below or self.coded)


class Operands(NamedTuple):
    """All operands of an operation.

    takes    arguments up to the arena, in the order of the parameters
    gives    results, and arguments that are written
    results  names of the results that the operation returns
    """

    takes: list[Operand]
    gives: list[Operand]
    results: list[str]

    def nbytes(self, sizes: Sizes, itemsize: int) -> int:
        """Return the bytes read plus the bytes written; numbers and private data do not count."""
        moved = [(operand, operand.reads or operand.shape) for operand in self.takes]
        moved += [(operand, operand.shape) for operand in self.gives]
        return sum(
            math.prod(dims(term, sizes))
            * (INDEX_BYTES if operand.below else 1 if operand.coded else itemsize)
            for operand, shapes in moved
            if shapes
            for term in shapes.split("+")
        )


@cache
def operands(line: str) -> Operands:
    """Parse the operands of a row of `OPERATIONS`; KernelError if the syntax is wrong."""
    before, arrow, after = line.partition(" -> ")
    takes, gives = (
        [Operand(**match.groupdict()) for match in map(WORD.fullmatch, side.split()) if match]
        for side in (before, after)
    )
    if not arrow or len(takes) + len(gives) < len(line.split()) - 1:
        raise KernelError(
            f"Operands are arguments -> results, as x:M,K -> y:M, but a row has {line!r}.",
            "mpitrain/ops/operands.py lists all forms.",
        )
    arguments = {operand.name: operand for operand in takes}
    return Operands(
        takes,
        [arguments.get(operand.name, operand) for operand in gives],
        [operand.name for operand in gives if operand.name not in arguments],
    )


def dims(shape: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the dims of a shape such as 2,M,3HD."""
    return tuple(
        number * math.prod([sizes[s] for s in letters]) for number, letters in terms(shape)
    )


@cache
def terms(shape: str) -> tuple[tuple[int, str], ...]:
    """Return the number and the letters of each dim of a shape such as 2,M,3HD."""
    return tuple(
        (int(number or 1), letters) for number, letters in DIM.findall(shape) if number or letters
    )
