"""Every algorithm there is, by operation and name."""

from mpitrain.collectives import binomial, doubling, pairwise, ring, star

ALL_REDUCE = {
    "ring": ring.all_reduce,
    "halving-doubling": doubling.halving_doubling,
    "recursive-doubling": doubling.recursive_doubling,
    "tree": binomial.all_reduce,
    "star": star.all_reduce,
}
"""All-reduce algorithms that are one plan: functions of (rank, n, count)."""

REDUCE_SCATTER = {"ring": ring.reduce_scatter, "pairwise": pairwise.reduce_scatter}
ALL_GATHER = {"ring": ring.all_gather, "pairwise": pairwise.all_gather}
ALL_TO_ALL = {"pairwise": pairwise.all_to_all, "at-once": pairwise.all_to_all_at_once}
PING_PONG = {"ping-pong": pairwise.ping_pong}
"""The other operations: functions of (rank, n, count)."""

BROADCAST = {"binomial": binomial.broadcast, "scatter-ring": star.broadcast}
REDUCE = {"binomial": binomial.reduce, "ring-gather": star.reduce}
"""Operations with a root: functions of (rank, n, count, root)."""

ALL_REDUCE_NAMES = (*ALL_REDUCE, "hierarchical", "shared", "native")
"""Every all-reduce: one plan, several, none (memory instead of messages), or MPI's own."""
