"""Operations that count: those of a backend on arrays without memory, with FLOPs and bytes summed.

A counted operation runs the backend's own function, on arrays without memory
(weightless.py). So it leases from the arena exactly what the function leases. A second call with
the same shapes repeats the leases of the first one without running the function.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from mpitrain.machine.arena import Arena, Lease
from mpitrain.ops import OPERATIONS, Operation, Ops
from mpitrain.ops.operands import DIM, operands
from mpitrain.ops.weightless import Weightless, WeightlessMemory


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

    def add(self, cost: OperationCost) -> None:
        self.nbytes += cost.nbytes
        self.flops += cost.flops
        self.recomputed += cost.flops * (self.is_backward and cost.is_forward)


class OperationCost(NamedTuple):
    """The cost of one call: the bytes that it moves, and its FLOPs in matrix products."""

    nbytes: int
    flops: int
    is_forward: bool


def cost_of(name: str, row: Operation, arguments: Sequence[Any]) -> OperationCost:
    sizes, nbytes = sizes_of(row, arguments), 0
    itemsize = next((x.itemsize for x in arguments if isinstance(x, Weightless)), 4)
    with suppress(KeyError):  # An absent argument may hide the size of a letter.
        nbytes = row.nbytes(itemsize, **sizes)
    flops = 2 * _product(row.products, sizes) if row.products else 0
    return OperationCost(nbytes, flops, "backward" not in name)


def counted(ops: Ops, count: Count) -> Ops:
    """Return operations that lease what `ops` lease, compute nothing, and add to `count`.

    ops  of a backend that is `Unlaunched`, or of the host; their arrays are `Weightless`
    """

    def bound(name: str, row: Operation) -> Callable[..., Any]:
        run, known = getattr(ops, name), dict[Any, _LeasedMemory]()

        def call(*arguments: Any, **named: Any) -> Any:
            leases: list[Lease] = []
            try:
                key = _key((arguments, tuple(named.items())), leases)
                hash(key)
            except (_Unknown, TypeError):
                count.add(cost_of(name, row, arguments))
                return run(*arguments, **named)
            if key in known:
                count.add(known[key].cost)
                return _repeated(known[key], leases, arguments, named)
            cost = cost_of(name, row, arguments)
            count.add(cost)
            result, memory = _observed(run, cost, leases, arguments, named)
            if memory:
                known[key] = memory
            return result

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
            for terms, array in zip(operand.reads.split("+"), _arrays(value), strict=False):
                _fit(terms, array.shape, sizes)
    return sizes


def _fit(terms: str, shape: Sequence[int], sizes: dict[str, int]) -> None:
    """Add the letters of a shape such as B,T,3HD that are not known yet."""
    for term, length in zip(terms.split(","), shape, strict=False):
        ((number, letters),) = [match for match in DIM.findall(term) if any(match)] or [("", "")]
        rest = length // int(number or 1)
        for letter in letters:
            rest //= max(1, sizes.get(letter, 1))
        unknown = [letter for letter in letters if letter not in sizes]
        for letter in unknown:
            sizes[letter] = rest if letter == unknown[-1] else 1


def _product(term: str, sizes: Mapping[str, int]) -> int:
    ((number, letters),) = [match for match in DIM.findall(term) if any(match)]
    return int(number or 1) * math.prod(sizes[letter] for letter in letters)


class _LeasedMemory(NamedTuple):
    """The memory that one call of an operation leased, so that later calls of this kind can repeat
    it.

    tree    its result, with an `_Array` in place of each array
    fresh   bytes of each lease that the result keeps
    excess  bytes beyond the live bytes before the call, at the call's peak
    """

    tree: Any
    fresh: list[int]
    excess: int
    cost: OperationCost


class _Array(NamedTuple):
    """An array of a result.

    lease  index among the leases of the arguments and then the fresh ones; -1: none
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    lease: int


class _Unknown(Exception):
    """A call has an argument or result that cannot be repeated."""


def _observed(
    run: Callable[..., Any], cost: OperationCost, leases: list[Lease], arguments: Any, named: Any
) -> tuple[Any, _LeasedMemory | None]:
    """Run an operation; return its result, and the leases to repeat if they can be.

    leases  those of the arguments; receives those of the result
    """
    arena, own = _arena(arguments, named), len(leases)
    before, peak = arena.live, arena.peak
    arena.peak = arena.live
    result = run(*arguments, **named)
    excess, arena.peak = arena.peak - before, max(peak, arena.peak)
    try:
        tree = _described(result, leases)
    except _Unknown:
        return result, None
    return result, _LeasedMemory(tree, [one.nbytes for one in leases[own:]], excess, cost)


def _repeated(result: _LeasedMemory, leases: list[Lease], arguments: Any, named: Any) -> Any:
    """Return the result of a call again, with leases of the same sizes."""
    arena = _arena(arguments, named)
    arena.peak = max(arena.peak, arena.live + result.excess)
    fresh = [arena.take((nbytes,), np.uint8).lease for nbytes in result.fresh]
    return _made(result.tree, leases + fresh, _source(arguments, named))


def _arena(arguments: Sequence[Any], named: Mapping[str, Any]) -> Arena:
    return next(one for one in (*arguments, *named.values()) if isinstance(one, Arena))


def _made(tree: Any, leases: Sequence[Lease], source: WeightlessMemory) -> Any:
    # No closure: one that calls itself would keep the leases alive until a garbage collection.
    match tree:
        case _Array(shape, strides, dtype, lease):
            array = source.made(shape, dtype, leases[lease] if lease >= 0 else None)
            return array if array.strides == strides else _strided(array, strides, source)
        case tuple() | list():
            return _alike(tree, [_made(one, leases, source) for one in tree])
    return tree


def _strided(array: Weightless, strides: tuple[int, ...], source: WeightlessMemory) -> Weightless:
    """Return an array with gaps: a view of a longer one without memory."""
    length = sum((n - 1) * step for n, step in zip(array.shape, strides, strict=True))
    whole = source.made((max(0, length) + array.itemsize,), np.uint8, array.lease)
    view: Any = np.ndarray.__new__(type(array), array.shape, array.dtype, whole.base, 0, strides)
    view.lease, view.source = array.lease, source
    return view


def _key(value: Any, leases: list[Lease]) -> Any:
    """Return a value that is equal for calls with equal leases; collects the arguments' leases."""
    match value:
        case Weightless():
            return value.shape, value.strides, value.dtype, _index(value.lease, leases)
        case np.ndarray():
            return value.shape, value.dtype
        case tuple() | list():
            return type(value), tuple(_key(one, leases) for one in value)
        case Arena():
            return Arena
        case slice():
            return value.start, value.stop, value.step
        case None | bool() | int() | float() | str() | np.number() | np.dtype():
            return value
    raise _Unknown


def _described(value: Any, leases: list[Lease]) -> Any:
    """Return a result with an `_Array` in place of each array; collects the fresh leases."""
    match value:
        case Weightless():
            return _Array(value.shape, value.strides, value.dtype, _index(value.lease, leases))
        case tuple() | list():
            return _alike(value, (_described(one, leases) for one in value))
        case None | bool() | int() | float() | str() | slice() | np.number() | np.ndarray():
            return value
    raise _Unknown


def _index(lease: Lease | None, leases: list[Lease]) -> int:
    if lease is None:
        return -1
    if not any(lease is one for one in leases):
        leases.append(lease)
    return next(index for index, one in enumerate(leases) if one is lease)


def _alike(value: Any, items: Any) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _source(arguments: Any, named: Mapping[str, Any]) -> WeightlessMemory:
    arrays = _arrays((arguments, tuple(named.values())))
    return next(one.source for one in arrays if isinstance(one, Weightless))


def _arrays(value: Any) -> Iterator[np.ndarray]:
    """Yield all arrays in nested tuples and lists, and in attributes of a pending state."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _arrays(one)
    elif not isinstance(value, Arena) and hasattr(value, "__dict__"):
        yield from _arrays([*vars(value).values()])
