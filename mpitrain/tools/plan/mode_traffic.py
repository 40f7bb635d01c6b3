"""The bytes that the busiest rank sends to other replicas in a step, by mode: in words and numbers."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.config import Config
from mpitrain.config import Replication as Settings
from mpitrain.layers.flat import Span, Storage, dealt
from mpitrain.models.table import is_tied
from mpitrain.parallel.buckets import TURNS
from mpitrain.parallel.grid import EXPERTS, Axes, divisor
from mpitrain.parallel.servers import NUMBERS
from mpitrain.pipeline.schedules import STREAMS
from mpitrain.regions import share
from mpitrain.run.trainer import Trainer

CONTROL, CONTROL_ITEM = 5, 8
"""Elements of the control message, and bytes per element."""

NEWS = 6
"""Elements of CONTROL_ITEM bytes that local SGD and gossip sum at the end of a period."""

SQUARES = 3
"""Elements of CONTROL_ITEM bytes that the parameter servers all-reduce to agree on the norm."""

HEADER = NUMBERS * 8
"""Bytes of the header before each message of parameters or gradients to or from a server."""


class RankFacts(NamedTuple):
    """What the bytes depend on that a rank sends.

    hosts          of every rank, by rank
    storage        of the units of its stage
    computed       dtype of activations
    chunks, first  as in `Replica`
    """

    config: Config
    axes: Axes
    rank: int
    hosts: Sequence[str]
    storage: Storage
    computed: np.dtype
    chunks: Sequence[range] = ()
    first: int = 0

    @classmethod
    def of(cls, trainer: Trainer) -> "RankFacts":
        replica, transport = trainer.replica, trainer.transport
        return cls(
            trainer.config,
            trainer.grid.axes,
            transport.rank,
            transport.hosts,
            trainer.storage,
            replica.computed,
            replica.chunks,
            replica.first,
        )


class Sample(NamedTuple):
    """The sizes of one row of a batch.

    inputs, targets  bytes
    logits           elements
    """

    inputs: int
    targets: int
    logits: int


class Formula(NamedTuple):
    """The bytes that the busiest rank sends per step.

    words  the formula in words, for users
    of     (facts of a rank, sizes of a row) -> mean bytes of a step of the run; None if they
           cannot be predicted
    """

    words: str
    of: Callable[[RankFacts, Sample], float | None]


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


def _summed(words: str, elements: Callable[[int, int], float]) -> Formula:
    """Return the formula for one all-reduce algorithm that sums gradients and control message.

    elements  (n, count) -> elements that the busiest rank sends
    """

    def of(facts: RankFacts, sample: Sample) -> float:
        n, storage = facts.axes.ranks, facts.storage
        return (
            elements(n, storage.length) * storage.dtype.itemsize
            + elements(n, CONTROL) * CONTROL_ITEM
        )

    return Formula(words, of)


def sent_in_ring(rank: int, n: int, count: int) -> int:
    """Return the elements that a rank sends in a ring all-reduce.

    First it sends all chunks but its own, then all chunks but that of the next rank.
    """
    sizes = [stop - start for start, stop in chunk_bounds(count, n)]
    return 2 * count - sizes[rank] - sizes[(rank + 1) % n]


def _ring(n: int, count: int) -> int:
    return max(sent_in_ring(rank, n, count) for rank in range(n))


def _halving(n: int, count: int) -> int:
    """Return the elements that the busiest rank sends by recursive halving, then doubling.

    If n is not a power of two, the busiest rank is one into which another rank folds.
    """
    power, folded = 1 << _floor_lg(n), n - (1 << _floor_lg(n))
    bounds = [0, *(stop for _, stop in chunk_bounds(count, power))]

    def sent(rank: int) -> int:
        """Each halving sends one half of a block of chunks, the doubling back the other half."""
        blocks = [rank >> bit << bit for bit in range(1, _floor_lg(n) + 1)]
        return sum(bounds[first + (2 << bit)] - bounds[first] for bit, first in enumerate(blocks))

    return max(map(sent, range(folded or power)))


Travelled = Callable[[RankFacts], tuple[float, float] | None]
"""(facts of a rank) -> elements that ZeRO reduce-scatters, and those that it all-gathers; None: unknown."""


def zero_traffic(words: str, travelled: Travelled) -> Callable[[Settings], Formula]:
    """Return (settings) -> the formula of a ZeRO stage with ring collectives.

    words  the formula in words; {0} stands for the fraction of the bytes that each rank sends
    """
    return lambda settings: (
        _divided(words.format("(n-1)/n"), travelled)
        if settings.shard == "all"
        else _divided(words.format("(s-1)/s") + "; between hosts 2 (h-1)/h S/s", travelled)
    )


def _divided(words: str, travelled: Travelled) -> Formula:
    def of(facts: RankFacts, sample: Sample) -> float | None:
        nbytes = sharded(facts, travelled)
        control = _ring(facts.axes.ranks, CONTROL) * CONTROL_ITEM
        return None if nbytes is None else nbytes + control

    return Formula(words, of)


def sharded(facts: RankFacts, travelled: Travelled, ep: int = 1) -> float | None:
    """Return the bytes that a rank sends in a step to other replicas, without the control message.

    ep  as of `divisor`
    """
    axes, elements, storage = facts.axes, travelled(facts), facts.storage
    if elements is None:
        return None
    n = axes.copies // ep
    s = divisor(axes, facts.hosts, facts.config.replication.shard, ep)
    between = 2 * (n // s - 1) * storage.length / n * storage.dtype.itemsize
    return _bytes_of(facts, elements) * (s - 1) / s + between


def _bytes_of(facts: RankFacts, elements: tuple[float, float]) -> float:
    """Return the bytes of elements that are reduce-scattered, and of those that are all-gathered."""
    summed, gathered = elements
    return summed * facts.storage.dtype.itemsize + gathered * facts.computed.itemsize


def of_partial_sums(facts: RankFacts) -> int:
    """Return the bytes that a rank sends over tp: gradients of replicated tensors are partial sums."""
    axes, storage = facts.axes, facts.storage
    partial = sum(span.stop - span.start for span in storage.spans if span.partial)
    if facts.config.replication.zero > 1:
        partial //= divisor(axes, facts.hosts, facts.config.replication.shard)
    return sent_in_ring(axes.coords(facts.rank).tp, axes.tp, partial) * storage.dtype.itemsize


def of_replicas(facts: RankFacts) -> float | None:
    """Return the bytes that a rank sends in a step to sum gradients over the replicas, and with ZeRO to
    gather parameters; None if they are not known. Those of experts have fewer replicas.
    """
    axes, storage, replication = facts.axes, facts.storage, facts.config.replication
    travelled = {1: once, 2: by_micro_batch, 3: by_use}.get(replication.zero)
    if travelled and axes.ep == 1:
        return sharded(facts, travelled)
    at, parts = axes.coords(facts.rank), list[float | None]()
    for ep, of_experts in ((1, False), (axes.ep, True)):
        own = facts._replace(storage=_part(storage, of_experts))
        if travelled:
            parts.append(sharded(own, travelled, ep))
        else:
            index = at.dp // ep * axes.cp + at.cp
            sent = sent_in_ring(index, axes.copies // ep, own.storage.length)
            parts.append(sent * storage.dtype.itemsize)
    first, second = parts
    return None if first is None or second is None else first + second


def _part(storage: Storage, of_experts: bool) -> Any:
    """Return the sizes of a storage that formulas read: those of the tensors of experts, or of all others."""

    def own(spans: Iterable[Span]) -> list[Span]:
        return [span for span in spans if (span.holders == EXPERTS) == of_experts]

    spans, frozen = own(storage.spans), SimpleNamespace(spans=own(storage.frozen.spans))
    length = sum(span.stop - span.start for span in spans)
    facts = {"length": length, "dtype": storage.dtype, "units": storage.units}
    return SimpleNamespace(spans=spans, frozen=frozen, **facts)


def sent_to_agree(rank: int, ranks: int, experts: int = 0) -> int:
    """Return the bytes that a rank sends for all ranks to agree on the end of a step, and on the tokens
    that each expert was asked for and took.
    """
    return sum(sent_in_ring(rank, ranks, n) for n in (CONTROL, 2 * experts)) * CONTROL_ITEM


def once(facts: RankFacts) -> tuple[float, float]:
    """Return the elements that ZeRO stage 1 reduces and gathers: all of them, once a step."""
    return facts.storage.length, facts.storage.length


def by_micro_batch(facts: RankFacts) -> tuple[float, float]:
    """Return the elements that ZeRO stage 2 reduces and gathers.

    It reduces the gradients of each micro-batch. A pipeline stage with several model chunks sums
    the micro-batches of a chunk first.
    """
    length = facts.storage.length
    return _scatters_per_step(facts) * length, length


def by_use(facts: RankFacts) -> tuple[float, float] | None:
    """Return the elements that ZeRO stage 3 reduce-scatters and all-gathers in a step.

    The last two units stay gathered for backward, the first two for the next micro-batch. On a
    pipeline stage, the last chunk stays gathered. Frozen tensors stay gathered after an update, and
    their first units run no backward. Returns None if more units stay gathered, because of tied
    weights or replication.zero_keep, and if replication.gather compresses the all-gathers.
    """
    config, storage = facts.config, facts.storage
    if (
        is_tied(config.model, config.data.source)
        or config.replication.zero_keep
        or config.replication.gather != "none"
    ):
        return None
    summed, frozen = _scatters_per_step(facts) * storage.length, storage.frozen.spans
    if facts.chunks:
        if any(span.start < span.stop for span in frozen):
            return None
        last = [s.stop - s.start for s in storage.spans if s.unit in facts.chunks[-1]]
        return summed, 2 * storage.length - sum(last)
    m, steps, units = config.batch.micro_batches, config.run.steps, range(len(storage.units))
    opened = [*units, *reversed(units[facts.first :])] * m
    # With overlap, the last backward of the run gathers the first unit for another step.
    ahead = [0] if facts.first and config.replication.overlap else []
    stored = _gathered(frozen, opened * steps + ahead) / max(1, steps)
    return summed, _gathered(storage.spans, opened) + stored


def _scatters_per_step(facts: RankFacts) -> int:
    return 1 if facts.chunks else facts.config.batch.micro_batches


def _gathered(spans: Sequence[Span], opened: Iterable[int]) -> int:
    """Return the elements to gather if spans with equal `holders` alternate between two slots.

    opened  the units in the order of their use
    """
    kinds: dict[tuple[str, bool], dict[int, Span]] = {}
    for span in spans:
        if span.start < span.stop:
            kinds.setdefault((span.holders, span.partial), {})[span.unit] = span
    order, count = [*opened], 0
    for own in kinds.values():
        slot = {unit: number % TURNS for number, unit in enumerate(own)}
        contents = dict[int, int]()
        for unit in order:
            if unit in own and contents.get(slot[unit]) != unit:
                contents[slot[unit]] = unit
                count += own[unit].stop - own[unit].start
    return count


def _floor_lg(n: int) -> int:
    return n.bit_length() - 1


def _gradient_bytes(facts: RankFacts) -> int:
    return facts.storage.length * facts.storage.dtype.itemsize


def _children(rank: int, n: int) -> int:
    """Return the number of children of a rank in a binomial tree with root 0."""
    return sum(rank < 1 << bit and rank + (1 << bit) < n for bit in range((n - 1).bit_length()))


def _master(facts: RankFacts, sample: Sample) -> float:
    """Return the bytes of the busiest rank.

    Parameters go down a binomial tree, and gradients come up the same tree. Rows and logits travel
    directly between rank 0 and each worker.
    """
    size, n, length = facts.config.batch.size, facts.axes.ranks, _gradient_bytes(facts)
    logits = sample.logits * facts.computed.itemsize

    def sent(rank: int) -> int:
        rows = len(share(size, rank, n))
        if rank == 0:
            return (size - rows) * (sample.inputs + sample.targets + logits)
        return length + rows * (logits + sample.targets)

    return max(
        _children(rank, n) * length + sent(rank) + sent_in_ring(rank, n, CONTROL) * CONTROL_ITEM
        for rank in range(n)
    )


def _periods(config: Config) -> int:
    return -(-config.run.steps // config.replication.period)


def _local(facts: RankFacts, sample: Sample) -> float:
    n, storage = facts.axes.ranks, facts.storage
    averaged = _ring(n, storage.length) * storage.dtype.itemsize + _ring(n, NEWS) * CONTROL_ITEM
    return _periods(facts.config) * averaged / facts.config.run.steps


def _gossip(facts: RankFacts, sample: Sample) -> float:
    """Return the mean bytes of a step, including the average over all ranks after the run."""
    n, steps, storage = facts.axes.ranks, facts.config.run.steps, facts.storage
    average = _ring(n, storage.length) * storage.dtype.itemsize
    exchanges = _periods(facts.config) * _ring(n, NEWS) * CONTROL_ITEM
    return (steps * _gradient_bytes(facts) + exchanges + average) / steps


def _bytes_by_server(facts: RankFacts) -> list[int]:
    dealt_out = dealt(facts.storage.spans, facts.axes.servers)
    return [
        sum(piece.stop - piece.start for piece in pieces) * facts.storage.dtype.itemsize
        for pieces in dealt_out
    ]


def _server_sync(facts: RankFacts, sample: Sample) -> float:
    stored, workers = _bytes_by_server(facts), facts.axes.dp
    servers = len(stored)
    return max(
        sum(stored) + servers * HEADER,
        *(
            workers * (nbytes + HEADER) + sent_in_ring(server, servers, SQUARES) * CONTROL_ITEM
            for server, nbytes in enumerate(stored)
        ),
    )


def _server_late(facts: RankFacts, sample: Sample) -> float | None:
    """Return the bytes of asynchronous and bounded servers.

    Returns None if a worker may be the busiest rank, since nobody knows before the run how many
    tickets it will get. A step has one ticket per worker. For each ticket a worker sends a request,
    a pull of parameters, and a push of gradients. At a pause each worker sends one request that
    gets no ticket. At the end of the run each worker pulls the parameters.
    """
    config, stored, workers = facts.config, _bytes_by_server(facts), facts.axes.dp
    steps, servers = config.run.steps, len(stored)
    is_bounded = config.replication.update == "bounded"
    if is_bounded and not config.replication.staleness:
        return _server_sync(facts, sample)
    tickets, pauses, met = steps * workers, 0, 0
    while met < steps:
        met, pauses = config.next_pause(met), pauses + 1
    most = steps if is_bounded else tickets  # one worker draws at most this many tickets
    pushed = most * (sum(stored) + (2 * servers + 1) * HEADER) + (pauses + servers) * HEADER
    served = [(tickets + workers) * (nbytes + HEADER) + tickets * HEADER for nbytes in stored]
    # Server 0 also sends the messages about tickets.
    served[0] += (tickets + workers * pauses + steps * (workers + servers - 1)) * HEADER
    return None if pushed > max(served) and not is_bounded else max(pushed, *served) / steps


ALL_REDUCE = {
    "ring": _summed("2 (n-1)/n S", _ring),
    "halving-doubling": _summed(
        "2 (n'-1)/n' S, and S more if n > n'",
        lambda n, count: _halving(n, count) + count * (n > 1 << _floor_lg(n)),
    ),
    "recursive-doubling": _summed(
        "lg n' S, and S more if n > n'",
        lambda n, count: count * (_floor_lg(n) + (n > 1 << _floor_lg(n))),
    ),
    "tree": _summed("ceil(lg n) S", lambda n, count: count * (n - 1).bit_length()),
    "star": _summed("(n-1) S, the root", lambda n, count: (n - 1) * count),
    "shared": _summed("0: ranks read each other's memory", lambda n, count: 0),
}
"""{all-reduce algorithm: formula}. Other algorithms have none, or choose by the machine."""

SERVER = {
    "sync": Formula("W times the part of S that a server holds, or S, a worker", _server_sync),
    "async": Formula("W times the part of S that a server holds, and so at the end", _server_late),
    "bounded": Formula(
        "W times the part of S that a server holds, and so at the end, or S, a worker", _server_late
    ),
}
"""{replication.update: formula}"""

MODES: dict[str, Callable[[Settings], Formula | None]] = {
    "all-reduce": lambda settings: ALL_REDUCE.get(settings.algorithm),
    "master": lambda settings: Formula(
        "ceil(lg n) S, and all others' rows and gradients of logits", _master
    ),
    "server": lambda settings: SERVER[settings.update],
    "local": lambda settings: Formula("2 (n-1)/n S once in replication.period steps", _local),
    "gossip": lambda settings: Formula(
        "S, and 2 (n-1)/n S once for the average at the end", _gossip
    ),
}
"""{replication.mode: (settings) -> its formula}; None depends on the machine."""

ZERO: dict[int, Callable[[Settings], Formula]] = {
    1: zero_traffic("2 {0} S", once),
    2: zero_traffic("(m+1) {0} S", by_micro_batch),
    3: zero_traffic(
        "{0} of 3 m S, of which the last two units travel only 2 m times, the first two 2 m + 1 times",
        by_use,
    ),
}
"""{replication.zero: (settings) -> its formula}"""


def formula_of(config: Config) -> Formula | None:
    """Return the formula of a configuration's mode; None if it depends on the machine or on the
    schedule, or if the mode is a plugin's.
    """
    settings = config.replication
    if config.pipeline.schedule in STREAMS:
        return None
    if settings.mode == "all-reduce" and settings.zero in ZERO:
        return ZERO[settings.zero](settings)
    return MODES[settings.mode](settings) if settings.mode in MODES else None
