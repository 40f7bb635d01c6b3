"""Tables of all algorithms, by operation and name."""

from collections.abc import Callable

from mpitrain.collectives.direct import native, shared_memory, shared_memory_halves
from mpitrain.collectives.plans import binomial, hierarchical, pairwise, recursive, ring, star
from mpitrain.collectives.plans.steps import Plan
from mpitrain.collectives.selection.algorithm import (
    Algorithm,
    chunks_in_segments,
    never,
    of_plan,
    of_plans,
)
from mpitrain.tables import Table

ALL_REDUCE: Table[str, Algorithm] = Table(
    {
        "ring": of_plan(ring.all_reduce, segments=chunks_in_segments),
        "halving-doubling": of_plan(recursive.halving_doubling, segments=chunks_in_segments),
        "recursive-doubling": of_plan(recursive.recursive_doubling),
        "tree": of_plan(binomial.all_reduce),
        "star": of_plan(star.all_reduce, is_rival=never),
        "hierarchical": of_plans(
            hierarchical.all_reduce, hierarchical.is_rival, hierarchical.segments_of
        ),
        "shared": Algorithm(
            shared_memory.bind_shared,
            refusal=shared_memory.refusal,
            is_rival=shared_memory.is_rival,
        ),
        "native": Algorithm(native.Native, refusal=native.refusal, is_rival=native.is_rival),
    }
)

REDUCE_SCATTER: Table[str, Algorithm] = Table(
    {
        "ring": of_plan(ring.reduce_scatter, segments=chunks_in_segments),
        "pairwise": of_plan(pairwise.reduce_scatter, is_rival=never),
        "shared": Algorithm(
            shared_memory_halves.bind_reduce_scatter,
            refusal=shared_memory_halves.refusal,
            is_rival=shared_memory.is_rival,
            of_all_reduce=shared_memory_halves.REDUCE_SCATTER_TAKES,
        ),
    }
)

ALL_GATHER: Table[str, Algorithm] = Table(
    {
        "ring": of_plan(ring.all_gather, segments=chunks_in_segments),
        "pairwise": of_plan(pairwise.all_gather, is_rival=never),
        "shared": Algorithm(
            shared_memory_halves.bind_all_gather,
            refusal=shared_memory_halves.refusal,
            is_rival=shared_memory.is_rival,
            of_all_reduce=shared_memory_halves.ALL_GATHER_TAKES,
        ),
    }
)

TABLES = {"allreduce": ALL_REDUCE, "reduce-scatter": REDUCE_SCATTER, "all-gather": ALL_GATHER}
"""Algorithms with a choice by "auto".

Configuration, help texts, the cost model and benchmarks read these tables, so a new algorithm
needs only one entry.
"""

PLANS: dict[str, dict[str, Callable[..., Plan]]] = {
    "broadcast": {"binomial": binomial.broadcast, "scatter-ring": star.broadcast},
    "reduce": {"binomial": binomial.reduce, "ring-gather": star.reduce},
    "all-to-all": {"pairwise": pairwise.all_to_all, "at-once": pairwise.all_to_all_at_once},
    "sendrecv": {"ping-pong": pairwise.ping_pong},
}
"""Plans of the other operations: functions of (rank, n, count), and of the root if there is one.

"auto" does not choose among them.
"""


def choices(operation: str) -> tuple[str, ...]:
    """Return the algorithm names that a caller may pass, with "auto" where it can choose."""
    return (*TABLES[operation], "auto") if operation in TABLES else tuple(PLANS[operation])


def half_of(operation: str, algorithm: str) -> str:
    """Return the reduce-scatter or all-gather that belongs to an all-reduce algorithm.

    It is the algorithm of the same name, or "auto" if there is none.
    """
    return algorithm if algorithm in TABLES[operation] else "auto"
