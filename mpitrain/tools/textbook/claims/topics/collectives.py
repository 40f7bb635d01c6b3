"""Claims about collectives: bytes and messages that their plans send, run on threads and counted."""

from mpitrain.collectives.selection.cost_model import plans_of
from mpitrain.tools.textbook.claims.claim import Claim, Figures, other, usual
from mpitrain.tools.textbook.claims.measure import sent_by_busiest, trained

LENGTH = 8192
"""Elements of float32 in an array of these experiments."""


def ring_and_server(ranks: int) -> Figures:
    """Compare the busiest rank of a ring with the busiest rank of a star."""
    ring, star = (sent_by_busiest("bind", name, ranks, LENGTH) for name in ("ring", "star"))
    return Figures(ring / star, {"bytes of the ring": ring, "bytes of the server": star})


def ring_bytes(ranks: int, elements: int) -> Figures:
    """Compare the busiest rank's bytes with the formula."""
    sent = sent_by_busiest("bind", "ring", ranks, elements)
    formula = 2 * (ranks - 1) / ranks * elements * 4
    return Figures(abs(sent / formula - 1), {"bytes sent": sent, "bytes by formula": formula})


def growth(algorithm: str) -> Figures:
    """Compare the busiest rank's bytes on 8 ranks with those on 2."""
    bytes_2, bytes_8 = (sent_by_busiest("bind", algorithm, ranks, LENGTH) for ranks in (2, 8))
    return Figures(bytes_8 / bytes_2, {"bytes on 2 ranks": bytes_2, "bytes on 8 ranks": bytes_8})


def halves(algorithm: str, ranks: int) -> Figures:
    """Compare an all-reduce with a ring's reduce-scatter and all-gather."""
    whole = sent_by_busiest("bind", algorithm, ranks, LENGTH)
    parts = [
        sent_by_busiest(operation, "ring", ranks, LENGTH)
        for operation in ("bind_reduce_scatter", "bind_all_gather")
    ]
    return Figures(
        abs(whole / sum(parts) - 1),
        {"bytes of the all-reduce": whole, "bytes of its two halves": sum(parts)},
    )


def seconds(algorithm: str, ranks: int, nbytes: int) -> float:
    """Return the time of an all-reduce on links of 1 ms and 25 MB/s, from its messages."""
    plans = [
        plan
        for rank in range(ranks)
        for plan in plans_of("allreduce", algorithm, rank, ("host",) * ranks, nbytes // 4)
    ]
    longest = max(sum(1 for step in plan.steps if step.sends or step.receives) for plan in plans)
    return longest * 1e-3 + sent_by_busiest("bind", algorithm, ranks, nbytes // 4) / 25e6


def tree_and_ring(ranks: int, nbytes: int) -> Figures:
    """Compare the times of a tree and a ring, from counted messages and bytes."""
    tree, ring = (seconds(name, ranks, nbytes) for name in ("tree", "ring"))
    return Figures(tree / ring, {"ms of the tree": 1e3 * tree, "ms of the ring": 1e3 * ring})


def int8_wire(width: int) -> Figures:
    """Compare the bytes of a step with an int8 wire and with float32."""
    job = f"model.width={width}"
    whole, coded = (
        max(trained(2, job, f"replication.wire={wire}").sent_bytes) for wire in ("none", "int8")
    )
    return Figures(coded / whole, {"bytes with int8": coded, "bytes with float32": whole})


CLAIMS = {
    "ring-or-server": Claim(
        "With a ring the busiest rank sends fewer bytes than with a central server.",
        "Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009",
        "bytes of the ring / bytes of the server",
        "<",
        1,
        ring_and_server,
        tuple(usual("{ranks} ranks", ranks=ranks) for ranks in (2, 4, 8)),
        "mpitrain plan allreduce --algorithm star --ranks 8",
    ),
    "ring-bytes": Claim(
        "In a ring all-reduce each rank sends 2 (n - 1) / n of the array.",
        "Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009",
        "difference from the formula, relative",
        "<=",
        1e-9,
        ring_bytes,
        (
            usual("{ranks} ranks, {elements} elements", ranks=4, elements=LENGTH),
            usual("{ranks} ranks, {elements} elements", ranks=7, elements=7000),
            other("{ranks} ranks, {elements} elements", ranks=7, elements=10),
        ),
        "mpitrain plan allreduce --algorithm ring --ranks 4",
    ),
    "ring-scales": Claim(
        "The bytes that the busiest rank sends do not double from 2 to 8 ranks.",
        "Sergeev and Del Balso, Horovod, arXiv:1802.05799, 2018",
        "bytes on 8 ranks / bytes on 2 ranks",
        "<",
        2,
        growth,
        (
            usual("algorithm {algorithm}", algorithm="ring"),
            usual("algorithm {algorithm}", algorithm="halving-doubling"),
            other("algorithm {algorithm}", algorithm="star"),
        ),
        "mpitrain plan allreduce --algorithm halving-doubling --ranks 8",
    ),
    "all-reduce-halves": Claim(
        "An all-reduce costs as many bytes as a reduce-scatter and an all-gather.",
        "Rajbhandari et al., ZeRO, SC 2020, section 7",
        "difference of the bytes, relative",
        "<=",
        1e-9,
        halves,
        (
            usual("{algorithm}, {ranks} ranks", algorithm="ring", ranks=2),
            usual("{algorithm}, {ranks} ranks", algorithm="ring", ranks=4),
            other("{algorithm}, {ranks} ranks", algorithm="tree", ranks=4),
        ),
        "mpitrain plan reduce-scatter --ranks 4",
    ),
    "tree-for-short": Claim(
        "For short messages a tree is faster than a ring.",
        "Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19(1), 2005",
        "time of the tree / time of the ring, links of 1 ms and 200 Mbit/s",
        "<",
        1,
        tree_and_ring,
        (
            usual("{ranks} ranks, {nbytes} bytes", ranks=8, nbytes=1 << 10),
            other("{ranks} ranks, {nbytes} bytes", ranks=8, nbytes=1 << 20),
        ),
        "mpitrain plan allreduce --algorithm tree --ranks 8",
    ),
    "int8-wire": Claim(
        "Gradients of 8 bits need a quarter of the bytes of float32.",
        "Dettmers, 8-Bit Approximations for Parallelism, ICLR 2016",
        "bytes with int8 / bytes with float32",
        "<=",
        0.26,
        int8_wire,
        (
            usual("model of width {width}", width=64),
            other("model of width {width}", width=2),
        ),
        "mpitrain launch -n 2 -- compare --modes ring --set replication.wire=int8",
    ),
}
