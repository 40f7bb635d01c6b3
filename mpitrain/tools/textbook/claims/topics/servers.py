"""Claims about parameter servers and averaging workers.

The ranks are threads, and a straggler is a rank that sleeps in its steps.
"""

from functools import partial

from mpitrain.config import Config
from mpitrain.config.faults import delay_s, delays
from mpitrain.run.build import build
from mpitrain.tools.textbook.claims.claim import Claim, Figures, other, usual
from mpitrain.tools.textbook.claims.measure import busiest, configured, on_ranks, trained
from mpitrain.transport.base import Transport

SERVER = "replication.mode=server"
TINY = ("model.layers=1", "model.width=4", "model.heads=1", "model.context=4", "batch.size=6")
STEPS = 30
"""Steps of a run with stragglers."""


def slept(transport: Transport, config: Config) -> list[list[float]]:
    """Train, and return the seconds that this rank slept in each of its steps, by common step."""
    job = build(transport, config)
    trainer, replication = job.trainer, job.trainer.replication
    late, start, seconds = delays(config.run.delay), trainer.share().start, list[list[float]]()
    for index in range(config.run.steps):
        own, sleeps = None, list[float]()
        for number in replication.steps(index, lambda: False):
            rows = replication.batch(job.data, number)
            own = trainer.step(number, *rows)
            if len(rows[0]):
                sleeps.append(delay_s(late, transport.rank, 0, number, start, 0, 0))
        replication.outcome(index, own)
        seconds.append(sleeps)
    trainer.sync_parameters()
    job.close()
    return seconds


def speed_up(workers: int, delay: str) -> float:
    """Return the sleep on the critical path with synchronous servers over asynchronous ones.

    Synchronous workers wait for the longest sleep of each step. A bound of STEPS is never reached:
    such workers never wait, and each has STEPS steps.
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
    """Compare the gain of asynchronous updates with 6 workers and with 2."""
    gain_2, gain_6 = speed_up(2, delay), speed_up(6, delay)
    return Figures(gain_6 / gain_2, {"times faster, 2 workers": gain_2, "times faster, 6": gain_6})


def stale(update: str, workers: int) -> Figures:
    """Count the updates between the pull of a gradient and its push."""
    most = trained(
        workers + 1, SERVER, f"replication.update={update}", "run.delay=0:40", "run.steps=6"
    ).staleness
    return Figures(most, {"updates late": most})


def lead(update: str) -> Figures:
    """Count the steps by which a worker runs ahead of a slow one; the bound is 1."""
    job = (SERVER, "replication.staleness=1", "run.delay=0:150", "run.steps=10", *TINY)
    most = trained(4, *job, f"replication.update={update}").lead
    return Figures(most, {"steps ahead": most})


def servers(workers: int) -> Figures:
    """Compare the busiest rank's bytes with 2 servers, times 2, and with 1 server."""
    one, two = (
        busiest(workers + number, SERVER, f"replication.servers={number}") for number in (1, 2)
    )
    return Figures(2 * two / one, {"bytes, 1 server": one, "bytes, 2 servers": two})


def local_bytes(steps: int) -> Figures:
    """Compare the bytes of local SGD with a tenth of an all-reduce in each step."""
    local, every = (
        busiest(2, f"replication.mode={mode}", f"run.steps={steps}", "replication.period=10")
        for mode in ("local", "all-reduce")
    )
    return Figures(
        abs(10 * local / every - 1), {"bytes, local SGD": local, "bytes, all-reduce": every}
    )


def gossip_growth(mode: str) -> Figures:
    """Compare the bytes of a step on 6 ranks and on 2."""
    bytes_2, bytes_6 = (
        busiest(ranks, f"replication.mode={mode}", "run.steps=12", "model.layers=1")
        for ranks in (2, 6)
    )
    return Figures(bytes_6 / bytes_2, {"bytes on 2 ranks": bytes_2, "bytes on 6 ranks": bytes_6})


CLAIMS = {
    "async-gains": Claim(
        "The more workers, the more asynchronous updates gain.",
        "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012",
        "gain with 6 workers / with 2",
        ">",
        1.2,
        more_workers,
        (
            usual("random delays: {delay}", delay="random:10:0.25"),
            other("every step of every rank is late: {delay}", delay="random:10:1"),
        ),
        "mpitrain launch -n 7 -- compare --modes server-sync,server-async --set run.delay=random:10:0.25",
    ),
    "stale-gradients": Claim(
        "Without a common step, gradients are stale.",
        "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012",
        "updates between pull and push, at most",
        ">=",
        1,
        stale,
        (
            usual("update = {update}, {workers} workers", update="async", workers=3),
            other("update = {update}, {workers} workers", update="async", workers=1),
            other("update = {update}, {workers} workers", update="sync", workers=3),
        ),
        "mpitrain launch -n 4 -- compare --modes server-async",
    ),
    "bounded-staleness": Claim(
        "A staleness bound of 1 lets no worker run more than 1 step ahead.",
        "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013",
        "steps ahead of the slowest worker, at most",
        "<=",
        1,
        lead,
        (
            usual("update = {update}", update="bounded"),
            other("update = {update}", update="async"),
        ),
        "mpitrain launch -n 4 -- compare --modes server-bounded --set replication.staleness=1",
    ),
    "more-servers": Claim(
        "With two servers the busiest rank sends half as many bytes.",
        "Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014",
        "bytes with 2 servers / with 1, times 2",
        "<=",
        1.1,
        servers,
        (usual("{workers} workers", workers=4), other("{workers} workers", workers=1)),
        "mpitrain launch -n 6 -- compare --modes server-sync --set replication.servers=2",
    ),
    "local-bytes": Claim(
        "Local SGD with a period of 10 sends a tenth of the bytes.",
        "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019",
        "difference from a tenth, relative",
        "<=",
        0.05,
        local_bytes,
        (usual("{steps} steps", steps=20), other("{steps} steps", steps=15)),
        "mpitrain launch -n 2 -- compare --modes ring,local --steps 20",
    ),
    "gossip-bytes": Claim(
        "The bytes that a rank sends in gossip do not grow with the ranks.",
        "Lian et al., Can Decentralized Algorithms Outperform Centralized Ones?, NeurIPS 2017",
        "bytes on 6 ranks / on 2",
        "<=",
        1.1,
        gossip_growth,
        (usual("mode {mode}", mode="gossip"), other("mode {mode}", mode="all-reduce")),
        "mpitrain launch -n 4 -- compare --modes ring,gossip",
    ),
}
