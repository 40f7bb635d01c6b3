"""Claims about messages: collectives, parameter servers, and workers that average.

The ranks are threads. A straggler is a rank that sleeps in its steps.
"""

from functools import partial

from mpitrain.collectives.selection.cost_model import plans_of
from mpitrain.config import Config
from mpitrain.config.faults import delay_s, delays
from mpitrain.run.build import build
from mpitrain.tools.textbook.claims.claim import Claim, Figures, other, usual
from mpitrain.tools.textbook.claims.measure import (
    PLAIN_MOMENTUM,
    busiest,
    configured,
    on_ranks,
    sent_by_busiest,
    trained,
)
from mpitrain.transport.base import Transport

LENGTH = 8192
"""Float32 elements of an array in these experiments."""


def ring_and_server(ranks: int) -> Figures:
    ring, star = (sent_by_busiest("bind", name, ranks, LENGTH) for name in ("ring", "star"))
    return Figures(ring / star, {"bytes of the ring": ring, "bytes of the server": star})


def ring_bytes(ranks: int, elements: int) -> Figures:
    sent = sent_by_busiest("bind", "ring", ranks, elements)
    formula = 2 * (ranks - 1) / ranks * elements * 4
    return Figures(abs(sent / formula - 1), {"bytes sent": sent, "bytes by formula": formula})


def growth(algorithm: str) -> Figures:
    bytes_2, bytes_8 = (sent_by_busiest("bind", algorithm, ranks, LENGTH) for ranks in (2, 8))
    return Figures(bytes_8 / bytes_2, {"bytes on 2 ranks": bytes_2, "bytes on 8 ranks": bytes_8})


def halves(algorithm: str, ranks: int) -> Figures:
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
    """Return the time of an all-reduce on links of 1 ms and 25 MB/s, computed from its messages."""
    plans = [
        plan
        for rank in range(ranks)
        for plan in plans_of("allreduce", algorithm, rank, ("host",) * ranks, nbytes // 4)
    ]
    longest = max(sum(1 for step in plan.steps if step.sends or step.receives) for plan in plans)
    return longest * 1e-3 + sent_by_busiest("bind", algorithm, ranks, nbytes // 4) / 25e6


def tree_and_ring(ranks: int, nbytes: int) -> Figures:
    tree, ring = (seconds(name, ranks, nbytes) for name in ("tree", "ring"))
    return Figures(tree / ring, {"ms of the tree": 1e3 * tree, "ms of the ring": 1e3 * ring})


def int8_wire(width: int) -> Figures:
    job = f"model.width={width}"
    whole, coded = (
        max(trained(2, job, f"replication.wire={wire}").sent_bytes) for wire in ("none", "int8")
    )
    return Figures(coded / whole, {"bytes with int8": coded, "bytes with float32": whole})


SERVER = "replication.mode=server"
TINY = ("model.layers=1", "model.width=4", "model.heads=1", "model.context=4", "batch.size=6")
STEPS = 30
"""Steps of a run with stragglers."""


def slept(transport: Transport, config: Config) -> list[list[float]]:
    """Train; return the seconds that this rank slept in each of its steps, grouped by common step."""
    job = build(transport, config)
    trainer, replica = job.trainer, job.trainer.replica
    late, start, seconds = delays(config.run.delay), trainer.share().start, list[list[float]]()
    for index in range(config.run.steps):
        own, sleeps = None, list[float]()
        for number in replica.steps(index, lambda: False):
            rows = replica.batch(job.data, number)
            own = trainer.step(number, *rows)
            if len(rows[0]):
                sleeps.append(delay_s(late, transport.rank, 0, number, start, 0, 0))
        replica.outcome(index, own)
        seconds.append(sleeps)
    trainer.sync_parameters()
    job.close()
    return seconds


def speed_up(workers: int, delay: str) -> float:
    """Return how much longer workers sleep on the critical path if the servers are synchronous.

    It is the ratio of the seconds with synchronous and with asynchronous servers. Synchronous
    workers wait for the longest sleep of each step. Asynchronous ones have a bound of STEPS, which
    they never reach: they never wait, and each takes STEPS steps.
    """
    job = (SERVER, f"run.delay={delay}", f"run.steps={STEPS}", f"replication.staleness={STEPS}")
    strict, late = (
        on_ranks(
            workers + 1,
            partial(slept, config=configured(*job, *TINY, f"replication.update={update}")),
        )
        for update in ("sync", "bounded")
    )
    waits = sum(max(map(sum, step)) for step in zip(*strict, strict=True))
    return waits / max(sum(map(sum, of_worker)) for of_worker in late)


def more_workers(delay: str) -> Figures:
    gain_2, gain_6 = speed_up(2, delay), speed_up(6, delay)
    return Figures(gain_6 / gain_2, {"times faster, 2 workers": gain_2, "times faster, 6": gain_6})


def stale(update: str, workers: int) -> Figures:
    most = trained(
        workers + 1, SERVER, f"replication.update={update}", "run.delay=0:40", "run.steps=6"
    ).staleness
    return Figures(most, {"updates late": most})


def lead(update: str) -> Figures:
    job = (SERVER, "replication.staleness=1", "run.delay=0:150", "run.steps=10", *TINY)
    most = trained(4, *job, f"replication.update={update}").lead
    return Figures(most, {"steps ahead": most})


def servers(workers: int) -> Figures:
    one, two = (
        busiest(workers + number, SERVER, f"replication.servers={number}") for number in (1, 2)
    )
    return Figures(2 * two / one, {"bytes, 1 server": one, "bytes, 2 servers": two})


def server_memory(settings: str, server: int) -> Figures:
    """Compare the bytes that the rank `server` holds with 2 workers and with 6.

    settings  of the job
    """
    held_2, held_6 = (
        sum(trained(workers + (server < 0), *settings.split()).memory[server].values())
        for workers in (2, 6)
    )
    return Figures(held_6 / held_2, {"kB, 2 workers": held_2 / 1e3, "kB, 6": held_6 / 1e3})


def equal_updates(workers: int, delay: str, rate: float) -> Figures:
    """Compare losses after 48 updates of 8 rows each, at one learning rate.

    Synchronous workers divide the 8 rows, so their number and their speed change no loss. An
    asynchronous worker has 8 rows of its own, so a step of 2 workers has 16 rows and 2 updates.

    delay  run.delay of the asynchronous workers
    """

    def job(per_step: int, *settings: str) -> tuple[str, ...]:
        size = (f"batch.size={8 * per_step}", f"run.steps={48 // per_step}")
        return *PLAIN_MOMENTUM, *size, f"optimizer.lr={rate}", *settings

    strict = trained(1, *job(1)).val_loss
    asynchronous = ("replication.update=async", "replication.async_lr=1", f"run.delay={delay}")
    late = trained(workers + 1, *job(workers, SERVER, *asynchronous))
    return Figures(
        late.val_loss / strict,
        {
            "loss, asynchronous": late.val_loss,
            "loss, synchronous": strict,
            "updates late": late.staleness,
        },
    )


def local_bytes(steps: int) -> Figures:
    local, every = (
        busiest(2, f"replication.mode={mode}", f"run.steps={steps}", "replication.period=10")
        for mode in ("local", "all-reduce")
    )
    return Figures(
        abs(10 * local / every - 1), {"bytes, local SGD": local, "bytes, all-reduce": every}
    )


def gossip_growth(mode: str) -> Figures:
    bytes_2, bytes_6 = (
        busiest(ranks, f"replication.mode={mode}", "run.steps=12", "model.layers=1")
        for ranks in (2, 6)
    )
    return Figures(bytes_6 / bytes_2, {"bytes on 2 ranks": bytes_2, "bytes on 6 ranks": bytes_6})


CLAIMS = {
    "ring-or-server": Claim(
        "With a ring the busiest rank sends fewer bytes than with a central server.",
        "Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009",
        "bytes of the ring / bytes of the server",
        ("<", 1),
        ring_and_server,
        tuple(usual("{ranks} ranks", ranks=ranks) for ranks in (2, 4, 8)),
        "mpitrain plan all-reduce --algorithm star --ranks 8",
    ),
    "ring-bytes": Claim(
        "In a ring all-reduce each rank sends 2 (n - 1) / n of the array.",
        "Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009",
        "difference from the formula, relative",
        ("<=", 1e-9),
        ring_bytes,
        (
            usual("{ranks} ranks, {elements} elements", ranks=4, elements=LENGTH),
            usual("{ranks} ranks, {elements} elements", ranks=7, elements=7000),
            other("{ranks} ranks, {elements} elements", ranks=7, elements=10),
        ),
        "mpitrain plan all-reduce --algorithm ring --ranks 4",
    ),
    "ring-scales": Claim(
        "The bytes that the busiest rank sends do not double from 2 to 8 ranks.",
        "Sergeev and Del Balso, Horovod, arXiv:1802.05799, 2018",
        "bytes on 8 ranks / bytes on 2 ranks",
        ("<", 2),
        growth,
        (
            usual("algorithm {algorithm}", algorithm="ring"),
            usual("algorithm {algorithm}", algorithm="halving-doubling"),
            other("algorithm {algorithm}", algorithm="star"),
        ),
        "mpitrain plan all-reduce --algorithm halving-doubling --ranks 8",
    ),
    "all-reduce-halves": Claim(
        "An all-reduce costs as many bytes as a reduce-scatter and an all-gather.",
        "Rajbhandari et al., ZeRO, SC 2020, section 7",
        "difference of the bytes, relative",
        ("<=", 1e-9),
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
        ("<", 1),
        tree_and_ring,
        (
            usual("{ranks} ranks, {nbytes} bytes", ranks=8, nbytes=1 << 10),
            other("{ranks} ranks, {nbytes} bytes", ranks=8, nbytes=1 << 20),
        ),
        "mpitrain plan all-reduce --algorithm tree --ranks 8",
    ),
    "int8-wire": Claim(
        "Gradients of 8 bits need a quarter of the bytes of float32.",
        "Dettmers, 8-Bit Approximations for Parallelism, ICLR 2016",
        "bytes with int8 / bytes with float32",
        ("<=", 0.26),
        int8_wire,
        (usual("model of width {width}", width=64), other("model of width {width}", width=2)),
        "mpitrain launch -n 2 -- compare ring --set replication.wire=int8",
    ),
    "server-memory": Claim(
        "The memory of a central server grows with the number of workers.",
        "Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014",
        "memory of the server with 6 workers / with 2",
        (">", 1.05),
        server_memory,
        (
            usual("the root of a star", settings="replication.algorithm=star", server=0),
            usual("a server that adds as gradients come", settings=SERVER, server=-1),
        ),
        "mpitrain launch -n 6 -- compare star server-sync",
    ),
    "equal-updates": Claim(
        "At equal numbers of updates and equal rates, asynchronous workers train as well.",
        "a common slip; Chen et al., Revisiting Distributed Synchronous SGD, arXiv:1604.00981, 2016",
        "validation loss, asynchronous / synchronous",
        ("<=", 1.03),
        equal_updates,
        (
            *(
                usual(label, workers=workers, delay=delay, rate=0.01)
                for workers in (2, 4, 6)
                for label, delay in (
                    ("{workers} workers, rate {rate}", ""),
                    ("{workers} workers, rate {rate}, one sleeps 20 ms a step", "0:20"),
                )
            ),
            other("{workers} workers, rate {rate}", workers=2, delay="", rate=0.001),
        ),
        "mpitrain launch -n 5 -- compare server-sync server-async --set replication.async_lr=1",
    ),
    "async-gains": Claim(
        "The more workers, the more asynchronous updates gain.",
        "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012",
        "gain with 6 workers / with 2",
        (">", 1.2),
        more_workers,
        (
            usual("random delays: {delay}", delay="random:10:0.25"),
            other("every step of every rank is late: {delay}", delay="random:10:1"),
        ),
        "mpitrain launch -n 7 -- compare server-sync server-async --set run.delay=random:10:0.25",
    ),
    "stale-gradients": Claim(
        "Without a common step, gradients are stale.",
        "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012",
        "updates between pull and push, at most",
        (">=", 1),
        stale,
        (
            usual("update = {update}, {workers} workers", update="async", workers=3),
            other("update = {update}, {workers} workers", update="async", workers=1),
            other("update = {update}, {workers} workers", update="sync", workers=3),
        ),
        "mpitrain launch -n 4 -- compare server-async",
    ),
    "bounded-staleness": Claim(
        "A staleness bound of 1 lets no worker run more than 1 step ahead.",
        "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013",
        "steps ahead of the slowest worker, at most",
        ("<=", 1),
        lead,
        (usual("update = {update}", update="bounded"), other("update = {update}", update="async")),
        "mpitrain launch -n 4 -- compare server-bounded --set replication.staleness=1",
    ),
    "more-servers": Claim(
        "With two servers the busiest rank sends half as many bytes.",
        "Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014",
        "bytes with 2 servers / with 1, times 2",
        ("<=", 1.1),
        servers,
        (usual("{workers} workers", workers=4), other("{workers} workers", workers=1)),
        "mpitrain launch -n 6 -- compare server-sync --set replication.servers=2",
    ),
    "local-bytes": Claim(
        "Local SGD with a period of 10 sends a tenth of the bytes.",
        "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019",
        "difference from a tenth, relative",
        ("<=", 0.05),
        local_bytes,
        (usual("{steps} steps", steps=20), other("{steps} steps", steps=15)),
        "mpitrain launch -n 2 -- compare ring local --steps 20",
    ),
    "gossip-bytes": Claim(
        "The bytes that a rank sends in gossip do not grow with the ranks.",
        "Lian et al., Can Decentralized Algorithms Outperform Centralized Ones?, NeurIPS 2017",
        "bytes on 6 ranks / on 2",
        ("<=", 1.1),
        gossip_growth,
        (usual("mode {mode}", mode="gossip"), other("mode {mode}", mode="all-reduce")),
        "mpitrain launch -n 4 -- compare ring gossip",
    ),
}
