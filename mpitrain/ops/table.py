"""The row of an operation: a line of operands such as `x:M,K w:N,K b:N -> y:M,N`, and facts of backends.

An argument is a word before the arrow, under the name of its parameter. A result is a word after
the arrow, or the name of an argument that the operation writes. Dims are products of one-letter
sizes and of a number: `3HD`. The legend of the letters is below.

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

B, T, C     batch, tokens, channels
H, E, D     query heads or experts, heads of keys and values, channels of a head
M, K, N     rows, inputs (or keys of a part of attention), outputs
V           vocabulary
L           length of a flat array
I, J, F, G  rows and columns of an image, channels in and out
S, P        rows (and columns) of a convolution's kernel, and of a pooling window
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

from mpitrain.errors import KernelError

Body = TypeVar("Body", bound=Callable[..., Any])


class Ops(Protocol):
    """The operations of one backend by name, as PyTorch's ATen kernels of one device.

    Notes
    -----
    `reference` documents each operation with shapes, and has its row.

    A backward is split in two. The input half returns (dx, pending). The weight halves take
    `pending`, so that they can run later or be left out.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]: ...


class Operation(NamedTuple):
    """Descriptor of an operation; a row of `OPERATIONS`.

    operands   arguments and results of an example call, with shapes
    rounds     the results or arguments that half precision rounds on the host, as words, or "nothing"
    reference  the definition, in plain NumPy
    launches   kernel launches of the example, if no sum of a product is split; 0: devices refuse it
    products   multiply-adds of its matrix products, as a dim of the operands: MNK; empty: none.
               Causal attention counts whole squares of scores, as PaLM's appendix B does
    host       the operation on NumPy arrays; None: that is `reference`
    cuda       the operation on kernels; it takes a `Launcher` first
    file       the files of `ops/host` and `ops/cuda` that have bodies of this name; empty: none has

    A plugin adds a row as it is imported, before a backend is made: `OPERATIONS["scale"] =
    Operation(...)`.
    """

    operands: str
    rounds: str
    reference: Callable[..., Any]
    launches: int = 0
    products: str = ""
    host: Callable[..., Any] | None = None
    cuda: Callable[..., Any] | None = None
    file: str = ""

    def nbytes(self, itemsize: int = 4, **sizes: int) -> int:
        """Return the bytes that a device reads and writes in the example, each array once.

        itemsize  bytes of an element
        sizes     the size of each letter
        """
        return operands(self.operands).nbytes(sizes, itemsize)


ROWS: dict[str, Operation] = {}
"""The rows of the operations in `ops/reference`, each beside its definition there."""


def operation(
    operands: str, rounds: str, launches: int = 1, products: str = ""
) -> Callable[[Body], Body]:
    """Return a decorator that gives a definition of `ops/reference` its row; fields as in `Operation`."""

    def add(definition: Body) -> Body:
        file = definition.__module__.rpartition(".")[2]
        row = Operation(operands, rounds, definition, launches, products, file=file)
        ROWS[definition.__name__] = row
        return definition

    return add


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
            "mpitrain/ops/table.py lists all forms.",
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
