"""The tables of all algorithms: each operation, each name, and the plan or the binding behind it."""

from collections.abc import Callable
from functools import partial

from mpitrain.collectives.direct import Native, bind_shared
from mpitrain.collectives.plans import exchanges, hierarchical, ring
from mpitrain.collectives.plans.steps import Plan
from mpitrain.collectives.selection.algorithm import (
    Algorithm,
    Topology,
    chunks_in_segments,
    never,
    of_plan,
    of_plans,
)
from mpitrain.errors import CommError, ConfigError
from mpitrain.tables import Table


def _has_levels(topology: Topology) -> bool:
    """Return whether there are several hosts, and one of them has several ranks."""
    return 1 < len(set(topology.hosts)) < len(topology.hosts)


def _is_far(topology: Topology) -> bool:
    """Return whether steps take a network's latency, and a ring more of them than ceil(lg n)."""
    return len(set(topology.hosts)) > 1 and len(topology.hosts) > 3


def _is_on_host(topology: Topology) -> bool:
    """Return whether arrays are in host memory.

    "auto" does not predict "native" and "shared" for GPU memory. MPI does not overlap a reduction of
    GPU memory with computation, and `choose` has a rule for shared GPU memory.
    """
    return not topology.is_on_device


def _lacks_type(topology: Topology) -> CommError | None:
    if topology.is_native:
        return None
    return CommError(
        f"algorithm native needs a dtype that MPI reduces, which {topology.dtype} is not.",
        "Use algorithm ring, which reduces any type.",
    )


def _on_hosts(instead: str, topology: Topology) -> ConfigError | None:
    """Return an error that recommends algorithm `instead`, unless all ranks are on one host."""
    if len(set(topology.hosts)) == 1:
        return None
    return ConfigError(
        f"algorithm shared needs all ranks on one host, but they are on {len(set(topology.hosts))}.",
        f"Use algorithm {instead}.",
    )


def _shared(operation: str, instead: str, of_all_reduce: tuple[float, float]) -> Algorithm:
    return Algorithm(
        partial(bind_shared, operation),
        refusal=partial(_on_hosts, instead),
        is_rival=_is_on_host,
        of_all_reduce=of_all_reduce,
    )


ALL_REDUCE: Table[str, Algorithm] = Table(
    {
        "ring": of_plan(ring.all_reduce, segments=chunks_in_segments),
        "halving-doubling": of_plan(exchanges.halving_doubling, segments=chunks_in_segments),
        "recursive-doubling": of_plan(exchanges.recursive_doubling),
        "tree": of_plan(exchanges.tree_all_reduce),
        "star": of_plan(exchanges.star_all_reduce, is_rival=never),
        "hierarchical": of_plans(hierarchical.all_reduce, _has_levels, hierarchical.segments_of),
        "shared": _shared("allreduce", "hierarchical", (1.0, 1.0)),
        "native": Algorithm(Native, refusal=_lacks_type, is_rival=_is_on_host),
    }
)

# The fractions of the halves of "shared" are rough. With 2 ranks and 64 KiB to 64 MiB in windows, a
# reduce-scatter took 0.2 to 0.7 of the all-reduce. An all-gather took 0.5 to 0.7. In other memory,
# both took 1.0 falling to 0.4.

REDUCE_SCATTER: Table[str, Algorithm] = Table(
    {
        "ring": of_plan(ring.reduce_scatter, segments=chunks_in_segments),
        "bruck": of_plan(exchanges.bruck_reduce_scatter, _is_far),
        "pairwise": of_plan(exchanges.pairwise_reduce_scatter, is_rival=never),
        "shared": _shared("reduce-scatter", "ring", (1.0, 0.5)),
    }
)

ALL_GATHER: Table[str, Algorithm] = Table(
    {
        "ring": of_plan(ring.all_gather, segments=chunks_in_segments),
        "bruck": of_plan(exchanges.bruck_all_gather, _is_far),
        "pairwise": of_plan(exchanges.pairwise_all_gather, is_rival=never),
        "shared": _shared("all-gather", "ring", (1.0, 0.7)),
    }
)

TABLES = {"allreduce": ALL_REDUCE, "reduce-scatter": REDUCE_SCATTER, "all-gather": ALL_GATHER}
"""{operation: its algorithms by name}, for the operations in which "auto" chooses the algorithm.

Configuration, help texts, the cost model and benchmarks read these tables, so a new algorithm
needs only one entry. The keys are the operations as benchmarks write them to files; `title` is
their spelling everywhere else.
"""

PLANS: dict[str, dict[str, Callable[..., Plan]]] = {
    "broadcast": {
        "binomial": exchanges.tree_broadcast,
        "scatter-ring": exchanges.scatter_ring_broadcast,
    },
    "reduce": {"binomial": exchanges.tree_reduce, "ring-gather": exchanges.ring_gather_reduce},
    "all-to-all": {"pairwise": exchanges.all_to_all, "at-once": exchanges.all_to_all_at_once},
    "shift": {"ring": ring.shift},
    "sendrecv": {"ping-pong": exchanges.ping_pong},
}
"""{operation: {name: plan}} of all other operations; their callers name the plan, without "auto".

Each plan is a function of (rank, n, count), and of the root if there is one.
"""


def title(operation: str) -> str:
    """Return the name of an operation for messages and traces: "all-reduce" for "allreduce"."""
    return operation.replace("allreduce", "all-reduce")


def choices(operation: str) -> tuple[str, ...]:
    """Return the algorithm names that a caller may pass, with "auto" where it can choose."""
    return (*TABLES[operation], "auto") if operation in TABLES else tuple(PLANS[operation])
