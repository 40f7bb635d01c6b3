"""The benchmarked collectives: binding, input data, expected result and bus bandwidth of each."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.compression import bind_lossy
from mpitrain.collectives.engine.arithmetic import Arithmetic, Wire
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import bind_algorithm, bind_all_to_all, bind_plan
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.transport.base import Transport

PERIOD = 13
"""Period of the test data: such small integers have an exact sum over 8 ranks in bfloat16."""

DRAWN = 100_003
"""Period of the random numbers of a test gradient."""


class Buffers(NamedTuple):
    """The arrays of an operation, in the memory of a device.

    other  send buffer of an all-to-all, or receive buffer of MPI's own reduce-scatter; else empty
    """

    array: Any
    other: Any


class ReductionOptions(NamedTuple):
    """The options of a reduction: its algorithm, the tuning for "auto", and the arithmetic."""

    algorithm: str
    tuning: Tuning
    arithmetic: Arithmetic


def filled(rank: int, count: int) -> np.ndarray:
    """Return the input of a rank: small integers that encode rank and position."""
    return rank + 1 + np.arange(count) % PERIOD


class BenchedCollective(NamedTuple):
    """A benchmarked collective.

    bind         (transport, buffers, way) -> Reduction
    right        (transport, count) -> (slice, expected values in it) after one run
    bus          (n) -> bus bandwidth over algorithm bandwidth, as in nccl-tests
    ways         2 for a ping-pong, whose time is half a round trip; else 1
    fill         (rank, count) -> input of a rank
    other        (n, count) -> elements of `Buffers.other`
    is_in_other  whether the result is in `Buffers.other`
    """

    bind: Callable[[Transport, Buffers, ReductionOptions], Reduction]
    right: Callable[[Transport, int], tuple[slice, np.ndarray]]
    bus: Callable[[int], float]
    ways: int = 1
    fill: Callable[[int, int], np.ndarray] = filled
    other: Callable[[int, int], int] = lambda n, count: 0
    is_in_other: bool = False


def _bind_algorithm(
    operation: str, transport: Transport, buffers: Buffers, way: ReductionOptions
) -> Reduction:
    return bind_algorithm(transport, operation, buffers.array, "add", *way)


def summed(transport: Transport, count: int) -> np.ndarray:
    """Return the sum of `filled` over all ranks."""
    n = transport.size
    return n * (n + 1) // 2 + n * (np.arange(count) % PERIOD)


def _scattered(transport: Transport, count: int) -> tuple[slice, np.ndarray]:
    chunk = slice(*chunk_bounds(count, transport.size)[transport.rank])
    return chunk, summed(transport, count)[chunk]


def _gathered(transport: Transport, count: int) -> tuple[slice, np.ndarray]:
    bounds = chunk_bounds(count, transport.size)
    return slice(None), np.concatenate(
        [filled(rank, count)[slice(*chunk)] for rank, chunk in enumerate(bounds)]
    )


def _rooted(transport: Transport, count: int) -> tuple[slice, np.ndarray]:
    part = slice(None) if transport.rank == 0 else slice(0, 0)
    return part, summed(transport, count)[part]


def _transposed(transport: Transport, count: int) -> tuple[slice, np.ndarray]:
    chunk = slice(*chunk_bounds(count, transport.size)[transport.rank])
    return slice(None), np.concatenate(
        [filled(rank, count)[chunk] for rank in range(transport.size)]
    )


def gradient(rank: int, count: int) -> np.ndarray:
    """Return a rank's input for a lossy sum: random numbers as small as gradients. A short pattern
    repeats along the array.
    """
    return np.resize(np.random.default_rng(rank).normal(0, 1e-6, DRAWN), count)


def lossy(wire: Wire) -> BenchedCollective:
    """Return an all-reduce in a compressed wire format, by the algorithm of that format."""
    return OPERATIONS["allreduce"]._replace(
        fill=gradient,
        right=lambda transport, count: (
            slice(None),
            np.resize(
                sum(gradient(rank, min(count, DRAWN)) for rank in range(transport.size)), count
            ),
        ),
        bind=lambda transport, buffers, way: bind_lossy(
            transport, buffers.array, wire, arithmetic=way.arithmetic
        ),
    )


OPERATIONS = {
    "allreduce": BenchedCollective(
        partial(_bind_algorithm, "allreduce"),
        lambda transport, count: (slice(None), summed(transport, count)),
        lambda n: 2 * (n - 1) / n,
    ),
    "reduce-scatter": BenchedCollective(
        partial(_bind_algorithm, "reduce-scatter"), _scattered, lambda n: (n - 1) / n
    ),
    "all-gather": BenchedCollective(
        partial(_bind_algorithm, "all-gather"), _gathered, lambda n: (n - 1) / n
    ),
    "broadcast": BenchedCollective(
        lambda transport, buffers, way: bind_plan(
            transport, "broadcast", way.algorithm, buffers.array, root=0
        ),
        lambda transport, count: (slice(None), filled(0, count)),
        lambda n: 1.0,
    ),
    "reduce": BenchedCollective(
        lambda transport, buffers, way: bind_plan(
            transport, "reduce", way.algorithm, buffers.array, way.arithmetic, op="add", root=0
        ),
        _rooted,
        lambda n: 1.0,
    ),
    "all-to-all": BenchedCollective(
        lambda transport, buffers, way: bind_all_to_all(
            transport, buffers.other, buffers.array, way.algorithm
        ),
        _transposed,
        lambda n: (n - 1) / n,
        other=lambda n, count: count,
    ),
    "sendrecv": BenchedCollective(
        lambda transport, buffers, way: bind_plan(
            transport, "sendrecv", way.algorithm, buffers.array
        ),
        lambda transport, count: (
            slice(None),
            filled(0 if transport.rank == transport.size - 1 else transport.rank, count),
        ),
        lambda n: 1.0,
        ways=2,
    ),
}
"""{name on the command line: operation}."""
