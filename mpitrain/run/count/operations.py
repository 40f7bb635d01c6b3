"""Operations that count: those of a backend on arrays without memory, with FLOPs and bytes summed.

A counted operation runs the backend's own function, on arrays without memory
(weightless.py). So it leases from the arena exactly what the function leases.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from mpitrain.machine.backend import Arena
from mpitrain.ops import OPERATIONS, Operation, Ops
from mpitrain.ops.reference.attention import Seen
from mpitrain.ops.table import operands, terms
from mpitrain.run.count.weightless import Weightless

T = TypeVar("T")


@dataclass
class Count:
    """FLOPs and bytes of operations so far.

    flops        floating-point operations of matrix products: 2 for each multiply-add
    recomputed   of `flops`, those of forwards while `is_backward`
    nbytes       bytes that the operations read and write, each array once
    is_backward  whether a backward is running, as its caller sets it
    """

    flops: int = 0
    recomputed: int = 0
    nbytes: int = 0
    is_backward: bool = False

    def add(self, name: str, nbytes: int, flops: int) -> None:
        """Add the cost of a call of the operation `name`."""
        self.nbytes += nbytes
        self.flops += flops
        self.recomputed += flops * (self.is_backward and "backward" not in name)


def cost_of(row: Operation, arguments: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes that a call moves, and its FLOPs in matrix products.

    A query of attention with a window has the scores of its keys alone.
    """
    sizes, nbytes = sizes_of(row, arguments), 0
    itemsize = next((x.itemsize for x in arguments if isinstance(x, Weightless)), 4)
    with suppress(KeyError):  # An absent argument may hide the size of a letter.
        nbytes = row.nbytes(itemsize, **sizes)
    flops = 2 * _product(row.products, sizes) if row.products else 0
    for seen in _of_kind(Seen, arguments):
        flops = flops // max(1, sizes["T"]) * seen.keys_of_a_query(sizes["T"])
    return nbytes, flops


def counted(ops: Ops, count: Count) -> Ops:
    """Return operations that lease what `ops` lease, compute nothing, and add to `count`.

    ops  of a backend that is `Unlaunched`, or of the host; their arrays are `Weightless`
    """

    def bound(name: str, row: Operation) -> Callable[..., Any]:
        run = getattr(ops, name)

        def call(*arguments: Any, **named: Any) -> Any:
            count.add(name, *cost_of(row, arguments))
            return run(*arguments, **named)

        return call

    return cast(
        Ops, SimpleNamespace(**{name: bound(name, row) for name, row in OPERATIONS.items()})
    )


class Unlaunched:
    """The kernels of a device, without launches and without products.

    A stand-in for `Kernels` where only leases count. The kernels expect what it does not launch.
    """

    def __init__(self, kernels: Any):
        engine = kernels.engine
        self.engine = SimpleNamespace(
            capability=engine.capability,
            multiprocessors=engine.multiprocessors,
            multiprocessor=engine.multiprocessor,
            has_wgmma=engine.has_wgmma,
            tensor_map=lambda *arguments: None,
            multiply=lambda *arguments: None,
        )
        self.plans: dict[tuple, Any] = {}
        self.launches, self._expected = 0, kernels.expected

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[Any],
        shared: int = 0,
        macros: Any = None,
        fresh: str = "",
        strided: str = "",
        **defines: Any,
    ) -> None:
        self.launches += 1
        if 0 not in grid:
            words = macros.defines if macros else defines
            self._expected[name, tuple((key, str(value)) for key, value in words.items())] = None

    def macros(self, **defines: Any) -> SimpleNamespace:
        return SimpleNamespace(defines=defines)


def sizes_of(row: Operation, arguments: Sequence[Any]) -> dict[str, int]:
    """Return the size of each letter in a row's operands, from the arguments of a call.

    If arguments fix only a product of letters, the last letter takes it and the others are 1.
    """
    takes = operands(row.operands).takes
    pairs = list(zip(takes, arguments, strict=False))
    sizes = {
        operand.number: value
        for operand, value in pairs
        if operand.number and isinstance(value, int)
    }
    for operand, value in pairs:
        if operand.shape and isinstance(value, np.ndarray):
            _fit(operand.shape, value.shape, sizes)
    for operand, value in pairs:
        if operand.after and operand.reads:
            for terms, array in zip(
                operand.reads.split("+"), _of_kind(np.ndarray, value), strict=False
            ):
                _fit(terms, array.shape, sizes)
    return sizes


def _fit(dims: str, shape: Sequence[int], sizes: dict[str, int]) -> None:
    """Add the letters of a shape such as B,T,3HD that are not known yet."""
    for term, length in zip(dims.split(","), shape, strict=False):
        ((number, letters),) = terms(term) or ((1, ""),)
        rest = length // number
        for letter in letters:
            rest //= max(1, sizes.get(letter, 1))
        unknown = [letter for letter in letters if letter not in sizes]
        for letter in unknown:
            sizes[letter] = rest if letter == unknown[-1] else 1


def _product(term: str, sizes: Mapping[str, int]) -> int:
    ((number, letters),) = terms(term)
    return number * math.prod(sizes[letter] for letter in letters)


def _of_kind(kind: type[T], value: Any) -> Iterator[T]:
    """Yield what is of a class in nested tuples and lists, and in attributes of a pending state."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _of_kind(kind, one)
    elif not isinstance(value, Arena | np.ndarray) and hasattr(value, "__dict__"):
        yield from _of_kind(kind, [*vars(value).values()])
