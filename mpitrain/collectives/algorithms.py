"""Every algorithm there is, by operation and name."""

from mpitrain.collectives import binomial, doubling, hierarchical, native, pairwise, ring, shared, star
from mpitrain.collectives.all_reduce import Algorithm, of_plan, of_plans

ALL_REDUCE = {
    "ring": of_plan(ring.all_reduce),
    "halving-doubling": of_plan(doubling.halving_doubling),
    "recursive-doubling": of_plan(doubling.recursive_doubling),
    "tree": of_plan(binomial.all_reduce),
    "star": of_plan(star.all_reduce, is_rival=lambda situation: False),  # what the others are compared with
    "hierarchical": of_plans(hierarchical.all_reduce, is_rival=hierarchical.is_rival),
    "shared": Algorithm(shared.bind_shared, refusal=shared.refusal, is_rival=shared.is_rival),
    "native": Algorithm(native.Native, refusal=native.refusal, is_rival=native.is_rival),
}
"""All-reduces. A line here is all it takes: configuration, help, `auto`, cost model and benchmarks read this table."""

REDUCE_SCATTER = {"ring": ring.reduce_scatter, "pairwise": pairwise.reduce_scatter}
ALL_GATHER = {"ring": ring.all_gather, "pairwise": pairwise.all_gather}
ALL_TO_ALL = {"pairwise": pairwise.all_to_all, "at-once": pairwise.all_to_all_at_once}
PING_PONG = {"ping-pong": pairwise.ping_pong}
"""The other operations: functions of (rank, n, count)."""

BROADCAST = {"binomial": binomial.broadcast, "scatter-ring": star.broadcast}
REDUCE = {"binomial": binomial.reduce, "ring-gather": star.reduce}
"""Operations with a root: functions of (rank, n, count, root)."""


def all_reduce_choices() -> tuple[str, ...]:
    """What can be asked for: an all-reduce by name, or the one that is predicted to be fastest."""
    return (*ALL_REDUCE, "auto")
