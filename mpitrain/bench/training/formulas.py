"""Formulas for the bytes that the busiest rank sends per step in each mode of replication.

LETTERS defines the letters of `Formula.words`. The byte counts of `Formula.of` also include the
headers of server messages and the control message, if the mode has them. The control message is
four numbers, all-reduced by the algorithm of the gradients, or else by a ring.
"""

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.layers.flat import dealt
from mpitrain.parallel.grid import divisor, share
from mpitrain.parallel.servers.messages import NUMBERS
from mpitrain.run.build import Job
from mpitrain.run.trainer import Trainer

CONTROL, CONTROL_ITEM = 4, 8
"""Elements of the control message, and bytes per element."""

NEWS = 5
"""Elements of CONTROL_ITEM bytes that local SGD and gossip sum at the end of a period."""

SQUARES = 3
"""Elements of CONTROL_ITEM bytes that the parameter servers all-reduce to agree on the norm."""

HEADER = NUMBERS * 8
"""Bytes of the header before each message of parameters or gradients to or from a server."""


LETTERS = {
    "S": "bytes of all gradients, padding included",
    "n": "ranks",
    "n'": "the largest power of two that is at most n",
    "lg": "the logarithm to base 2",
    "m": "micro-batches of a rank",
    "W": "workers",
    "s": "ranks on each host",
    "h": "hosts",
}
"""{letter of a formula in words: its meaning}."""


class Formula(NamedTuple):
    """The bytes that the busiest rank sends per step.

    words  formula in words
    of     (job) -> bytes, mean over its steps; None if they cannot be predicted
    """

    words: str
    of: Callable[[Job], float | None]


def _summed(words: str, elements: Callable[[int, int], float]) -> Formula:
    """Return the formula for one all-reduce algorithm that sums gradients and control message.

    elements  (n, count) -> elements that the busiest rank sends
    """

    def of(job: Job) -> float:
        n, storage = job.trainer.transport.size, job.trainer.storage
        return (
            elements(n, storage.length) * storage.dtype.itemsize
            + elements(n, CONTROL) * CONTROL_ITEM
        )

    return Formula(words, of)


def _ring_of(rank: int, n: int, count: int) -> int:
    """Return the elements that a rank sends in a ring all-reduce.

    They are all chunks but its own, and then all chunks but its neighbour's.
    """
    sizes = [stop - start for start, stop in chunk_bounds(count, n)]
    return 2 * count - sizes[rank] - sizes[(rank + 1) % n]


def _ring(n: int, count: int) -> int:
    return max(_ring_of(rank, n, count) for rank in range(n))


def _divided(words: str, travelled: Callable[[Trainer], tuple[float, float] | None]) -> Formula:
    """Return the formula for ZeRO with ring collectives.

    travelled  (trainer) -> elements that are reduce-scattered and all-gathered, or None
    """

    def of(job: Job) -> float | None:
        trainer = job.trainer
        n, elements, storage = trainer.transport.size, travelled(trainer), trainer.storage
        if elements is None:
            return None
        s = divisor(trainer.grid.axes, trainer.transport.hosts, trainer.config.replication.shard)
        between = 2 * (n // s - 1) * storage.length / n
        summed, gathered = (
            elements[0] * storage.dtype.itemsize,
            elements[1] * trainer.replication.replica.computed.itemsize,
        )
        return (
            (summed + gathered) * (s - 1) / s
            + between * storage.dtype.itemsize
            + _ring(n, CONTROL) * CONTROL_ITEM
        )

    return Formula(words, of)


def _one(trainer: Trainer) -> tuple[float, float]:
    return trainer.storage.length, trainer.storage.length


def _two(trainer: Trainer) -> tuple[float, float]:
    return trainer.config.batch.micro_batches * trainer.storage.length, trainer.storage.length


def _three(trainer: Trainer) -> tuple[float, float] | None:
    """Return the elements that ZeRO stage 3 reduce-scatters and all-gathers in a step.

    The last two units stay gathered for backward, the first two for the next micro-batch. Returns
    None if more units stay gathered, because of tied weights or replication.zero_keep, and if
    replication.gather compresses the all-gathers.
    """
    config, storage = trainer.config, trainer.storage
    if config.model.tied or config.replication.zero_keep or config.replication.gather != "none":
        return None
    m, sizes = config.batch.micro_batches, [span.stop - span.start for span in storage.spans]
    return m * storage.length, 2 * m * storage.length - m * sum(sizes[-2:]) - (m - 1) * sum(
        sizes[:2]
    )


ZERO: dict[int, tuple[str, Callable[[Trainer], tuple[float, float] | None]]] = {
    1: ("2 {0} S", _one),
    2: ("(m+1) {0} S", _two),
    3: (
        "{0} of 3 m S, of which the last two units travel only 2 m times, the first two 2 m + 1 times",
        _three,
    ),
}
"""{ZeRO stage: (words, elements)}. {0} in the words is the fraction that each rank sends."""


def _lg(n: int) -> int:
    """Return the largest k with 2^k <= n."""
    return n.bit_length() - 1


def _nbytes(trainer: Trainer) -> int:
    """Return S of LETTERS: the bytes of all gradients."""
    return trainer.storage.length * trainer.storage.dtype.itemsize


def _children(rank: int, n: int) -> int:
    """Return the number of children of a rank in a binomial tree with root 0."""
    return sum(rank < 1 << bit and rank + (1 << bit) < n for bit in range((n - 1).bit_length()))


def _master(job: Job) -> float:
    """Return the bytes of mode `master`.

    Weights go down a binomial tree, and gradients come up one. Rows and logits travel directly
    between rank 0 and each worker.
    """
    trainer, data = job.trainer, job.data
    config, n = trainer.config, trainer.transport.size
    inputs, targets = data.batch(config.run.seed, 0, config.batch.size, range(1))
    logits = (
        targets.size * data.classes * trainer.replication.replica.computed.itemsize
    )  # the bytes of one row, as in inputs.nbytes and targets.nbytes

    def sent(rank: int) -> int:
        rows = len(share(config.batch.size, rank, n))
        if rank == 0:
            others = config.batch.size - rows
            return others * (inputs.nbytes + targets.nbytes + logits)
        return _nbytes(trainer) + rows * (logits + targets.nbytes)

    return max(
        _children(rank, n) * _nbytes(trainer)
        + sent(rank)
        + _ring_of(rank, n, CONTROL) * CONTROL_ITEM
        for rank in range(n)
    )


def _meetings(trainer: Trainer) -> int:
    """Return the number of periods of local SGD or gossip in the run."""
    return -(-trainer.config.run.steps // trainer.config.replication.period)


def _local(job: Job) -> float:
    trainer = job.trainer
    n, storage = trainer.transport.size, trainer.storage
    averaged = _ring(n, storage.length) * storage.dtype.itemsize + _ring(n, NEWS) * CONTROL_ITEM
    return _meetings(trainer) * averaged / trainer.config.run.steps


def _gossip(job: Job) -> float:
    """Return the bytes of gossip, with the average over all ranks at the end of the run."""
    trainer = job.trainer
    n, steps, storage = trainer.transport.size, trainer.config.run.steps, trainer.storage
    average = _ring(n, storage.length) * storage.dtype.itemsize
    return (
        steps * _nbytes(trainer) + _meetings(trainer) * _ring(n, NEWS) * CONTROL_ITEM + average
    ) / steps


def _parts(trainer: Trainer) -> list[int]:
    """Return the bytes of the parameters on each server."""
    dealt_out = dealt(trainer.storage.spans, trainer.grid.axes.servers)
    return [
        sum(piece.stop - piece.start for piece in pieces) * trainer.storage.dtype.itemsize
        for pieces in dealt_out
    ]


def _server_sync(job: Job) -> float:
    parts, workers = _parts(job.trainer), job.trainer.grid.axes.dp
    servers = len(parts)
    return max(
        sum(parts) + servers * HEADER,
        *(
            workers * (part + HEADER) + _ring_of(server, servers, SQUARES) * CONTROL_ITEM
            for server, part in enumerate(parts)
        ),
    )


def _server_late(job: Job) -> float | None:
    """Return the bytes of asynchronous and bounded servers.

    None if a worker may be the busiest rank: the number of its tickets is not known before. A step
    has one ticket per worker. For a ticket, a worker sends a request for it, a pull of parameters,
    and a push of gradients. At a pause each worker sends one request that gets no ticket. At the
    end of the run it pulls the parameters.
    """
    trainer = job.trainer
    config, parts, workers = trainer.config, _parts(trainer), trainer.grid.axes.dp
    steps, servers = config.run.steps, len(parts)
    if config.replication.update == "bounded" and not config.replication.staleness:
        return _server_sync(job)
    is_bounded, tickets, pauses, met = config.replication.update == "bounded", steps * workers, 0, 0
    while met < steps:
        met, pauses = config.next_pause(met), pauses + 1
    most = steps if is_bounded else tickets  # one worker draws at most this many tickets
    pushed = most * (sum(parts) + (2 * servers + 1) * HEADER) + (pauses + servers) * HEADER
    served = [(tickets + workers) * (part + HEADER) + tickets * HEADER for part in parts]
    # Server 0 also sends the messages about tickets.
    served[0] += (tickets + workers * pauses + steps * (workers + servers - 1)) * HEADER
    return None if pushed > max(served) and not is_bounded else max(pushed, *served) / steps


FORMULAS = {
    "ring": _summed("2 (n-1)/n S", _ring),
    "halving-doubling": _summed(
        "2 (n'-1)/n' S, and S more if n > n'",
        lambda n, count: 2 * count * (1 - 0.5 ** _lg(n)) + count * (n > 1 << _lg(n)),
    ),
    "recursive-doubling": _summed(
        "lg n' S, and S more if n > n'", lambda n, count: count * (_lg(n) + (n > 1 << _lg(n)))
    ),
    "tree": _summed("ceil(lg n) S", lambda n, count: count * (n - 1).bit_length()),
    "star": _summed("(n-1) S, the root", lambda n, count: (n - 1) * count),
    "shared": _summed("0: ranks read each other's memory", lambda n, count: 0),
    **{
        f"zero{stage}": _divided(words.format("(n-1)/n"), travelled)
        for stage, (words, travelled) in ZERO.items()
    },
    **{
        f"zero{stage}-host": _divided(
            words.format("(s-1)/s") + "; between hosts 2 (h-1)/h S/s", travelled
        )
        for stage, (words, travelled) in ZERO.items()
    },
    "master": Formula("ceil(lg n) S, and all others' rows and gradients of logits", _master),
    "local": Formula("2 (n-1)/n S once in replication.period steps", _local),
    "gossip": Formula("S, and 2 (n-1)/n S once for the average at the end", _gossip),
    "server-sync": Formula(
        "W times the part of S that a server holds, or S, a worker", _server_sync
    ),
    "server-async": Formula(
        "W times the part of S that a server holds, and so at the end", _server_late
    ),
    "server-bounded": Formula(
        "W times the part of S that a server holds, and so at the end, or S, a worker", _server_late
    ),
}
"""{mode: formula}. Other modes have no formula, or one that depends on the chosen algorithm."""
