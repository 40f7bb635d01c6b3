"""Benchmarked collectives: how each is bound, its input, its expected result and its bus bandwidth.

Collectives of MPI itself and of PyTorch are bound to the same arrays, and checked and timed like ours.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.compression import bind_lossy
from mpitrain.collectives.engine.arithmetic import Arithmetic, Wire
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import Group, bind_algorithm, bind_all_to_all, bind_plan
from mpitrain.collectives.plans.steps import bounds, chunk_bounds
from mpitrain.collectives.routes import ROUTES
from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.collectives.selection.table import ALL_REDUCE, TABLES, choices
from mpitrain.errors import CommError, ConfigError, MpitrainError
from mpitrain.transport.base import Transport
from mpitrain.transport.native import NATIVE_OPERATIONS as NATIVE
from mpitrain.transport.native import bind_native

PERIOD = 13
"""Period of the test data: such small integers have an exact sum over 8 ranks in bfloat16."""
DRAWN = 100_003
"""Period of the random numbers of a test gradient."""
TORCH = ("gloo", "nccl", "mpitrain")
"""Backends of PyTorch whose collectives can be measured, too; only if asked for."""
REDUCING = ("reduce", "reduce-scatter")
"""MPI's collectives that reduce, and so accept only dtypes that MPI can reduce."""
ROUNDED = {"float16": 2**-11, "bfloat16": 2**-8}
"""{dtype: relative rounding error of one addition}. Integers up to its inverse are exact.

In bfloat16, sums over 14 ranks or more are larger than that.
"""


class Buffers(NamedTuple):
    """The arrays that a collective is bound to, in the memory of a device.

    other  send buffer of an all-to-all, or receive buffer of MPI's own reduce-scatter; else empty
    """

    array: Any
    other: Any


class ReductionOptions(NamedTuple):
    algorithm: str
    tuning: Tuning
    arithmetic: Arithmetic


def filled(rank: int, count: int) -> np.ndarray:
    """Return the input of a rank: small integers that encode rank and position."""
    return rank + 1 + np.arange(count) % PERIOD


class BenchedCollective(NamedTuple):
    """A collective as the benchmark runs and checks it. n: number of ranks.

    bind         (transport, buffers, options) -> Reduction
    right        (transport, count) -> (slice with the result, its expected values) after one run
    bus          (n) -> bus bandwidth divided by algorithm bandwidth, as in nccl-tests
    ways         messages one after the other in a run: 2 for a ping-pong, whose time is half a
                 round trip; else 1
    fill         (rank, count) -> input of a rank
    other        (n, count) -> number of elements of `Buffers.other`
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


SKEWED = "all-to-all-skewed"
"""The all-to-all of `--counts skewed`, in rows and files."""


def skewed(n: int, count: int) -> list[int]:
    """Return the elements that each rank sends to ranks 0, 1 ...: each gets half as many as the one before.

    Rank 0 receives `count` from all ranks together.
    """
    return [count // n >> rank for rank in range(n)]


def _bind_skewed(transport: Transport, buffers: Buffers, way: ReductionOptions) -> Any:
    """Return a collective whose run tells the counts first, as each layer with experts does."""
    group, counts = Group(transport, way.algorithm), skewed(transport.size, buffers.array.size)
    told = np.array(counts)[:, None]
    received = buffers.array[: transport.size * counts[transport.rank]]
    arrays = buffers.other[: sum(counts)], received

    def run() -> None:
        group.routes(told).bind(*arrays).run()

    return ForeignCollective(run, group.routes(told).bind(*arrays).algorithm)


def _landed(transport: Transport, count: int) -> tuple[slice, np.ndarray]:
    n, counts = transport.size, skewed(transport.size, count)
    part = slice(*bounds(counts)[transport.rank])
    received = n * counts[transport.rank]
    return slice(received), np.concatenate([filled(rank, count)[part] for rank in range(n)])


def _echoed(transport: Transport, count: int) -> tuple[slice, np.ndarray]:
    is_last = transport.rank == transport.size - 1
    return slice(None), filled(0 if is_last else transport.rank, count)


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
    SKEWED: BenchedCollective(
        _bind_skewed, _landed, lambda n: (n - 1) / n, other=lambda n, count: count
    ),
    "sendrecv": BenchedCollective(
        lambda transport, buffers, way: bind_plan(
            transport, "sendrecv", way.algorithm, buffers.array
        ),
        _echoed,
        lambda n: 1.0,
        ways=2,
    ),
}
"""{name in rows and files: operation}."""


def gradient(rank: int, count: int) -> np.ndarray:
    """Return a rank's input for a lossy sum: random numbers as small as gradients, with period
    DRAWN.
    """
    return np.resize(np.random.default_rng(rank).normal(0, 1e-6, DRAWN), count)


def lossy(wire: Wire) -> BenchedCollective:
    def right(transport: Transport, count: int) -> tuple[slice, np.ndarray]:
        total = sum(gradient(rank, min(count, DRAWN)) for rank in range(transport.size))
        return slice(None), np.resize(total, count)

    return OPERATIONS["allreduce"]._replace(
        fill=gradient,
        right=right,
        bind=lambda transport, buffers, way: bind_lossy(
            transport, buffers.array, wire, arithmetic=way.arithmetic
        ),
    )


class ForeignCollective(NamedTuple):
    """A collective of MPI itself ("native") or of PyTorch."""

    run: Callable[[], None]
    algorithm: str


def names(operation: str) -> tuple[str, ...]:
    """Return the names of all algorithms: ours, and "native" if MPI has the collective."""
    if operation == SKEWED:
        return (*ROUTES, "auto")
    return (*choices(operation), "native") if operation in NATIVE else choices(operation)


def operation_of(operation: str, algorithm: str) -> BenchedCollective:
    """Return the collective to measure; its `bind` binds that of the MPI library for "native", and
    that of PyTorch for a name of TORCH.

    Their reduce-scatter puts its result in the second array: there `is_in_other` is True.
    """
    ours = OPERATIONS[operation]
    has_native = operation in (*NATIVE, SKEWED)
    if algorithm not in TORCH and not (has_native and algorithm == "native"):
        return ours

    def bind(transport: Transport, buffers: Buffers, way: ReductionOptions) -> Any:
        if algorithm == "native":
            run = bind_native(
                transport, operation, *buffers, _counts(operation, transport, buffers)
            )
        else:
            from mpitrain.tools.bench import torch_groups

            run = torch_groups.bind(
                algorithm, operation, transport, *buffers, _counts(operation, transport, buffers)
            )
        return ForeignCollective(run, algorithm)

    if operation != "reduce-scatter":
        return ours._replace(bind=bind)
    return ours._replace(bind=bind, other=lambda n, count: count // n, is_in_other=True)


def _counts(operation: str, transport: Transport, buffers: Buffers) -> Sequence[int]:
    """Return the elements that a rank sends to each rank of an all-to-all of unequal counts, else none."""
    return skewed(transport.size, buffers.array.size) if operation == SKEWED else ()


def refusals(operation: str, situation: Topology) -> dict[str, MpitrainError]:
    """Return {algorithm: error} of the algorithms that cannot run on these ranks."""
    errors = {
        name: refusal
        for name, algorithm in TABLES.get(operation, {}).items()
        if (refusal := algorithm.refusal(situation))
    }
    hosts = situation.hosts
    if operation == SKEWED and not 1 < len(set(hosts)) < len(hosts):
        errors["hierarchical"] = ConfigError(
            "algorithm hierarchical needs several hosts, one of them with several ranks."
        )
    if operation in (*NATIVE, SKEWED):
        refusal = ALL_REDUCE["native"].refusal(situation) if operation in REDUCING else None
        if situation.is_on_device:
            refusal = CommError(
                "algorithm native is measured in the memory of the host, but --device is a GPU."
            )
        if refusal:
            errors["native"] = refusal
    return errors


def wrong_elements(transport: Transport, result: np.ndarray, right: np.ndarray) -> int:
    """Return the number of wrong elements over all ranks. Collective.

    Sums in a 16-bit dtype that are too large to be exact may differ by their rounding error.
    """
    is_right = result == right
    if rounded := ROUNDED.get(result.dtype.name):
        result, right = result.astype(np.float64), right.astype(np.float64)
        is_right |= (right * rounded > 1) & (
            np.abs(result - right) <= transport.size * rounded * right
        )
    return sum(transport.gather_text(int((~is_right).sum())))


def wrong_replicas(transport: Transport, replica: np.ndarray) -> int:
    """Return the number of ranks whose array is not finite or differs from rank 0's in any bit.

    Collective. The number is 0 for every wire format.
    """
    replicas = transport.gather_text((zlib.crc32(replica), bool(np.isfinite(replica).all())))
    return sum(bits != replicas[0][0] or not finite for bits, finite in replicas)


def error_norm(result: np.ndarray, right: np.ndarray) -> float:
    """Return the norm of a lossy sum's error, divided by the norm of the exact sum."""
    return float(
        np.linalg.norm(result.astype(np.float64) - right) / np.linalg.norm(right.astype(np.float64))
    )
