"""The row of a replication mode: constructor, formulas of memory and bytes sent, refused keys."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.config import Config
from mpitrain.config import Replication as Settings
from mpitrain.errors import ConfigError
from mpitrain.layers.flat import Span, dealt
from mpitrain.models.table import is_tied
from mpitrain.parallel.buckets import TURNS
from mpitrain.parallel.grid import Axes, divisor, share
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext


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
    of     (context of a rank, sizes of a row) -> mean bytes of a step of the run; None if they
           cannot be predicted
    """

    words: str
    of: Callable[[ReplicationContext, Sample], float | None]


class Sizes(NamedTuple):
    """The arguments of a memory formula.

    settings  the section `replication` of the configuration
    axes      the number of ranks along each axis
    shards    ranks that divide a replica's state: ZeRO's sharding group
    length    elements of the flat parameter buffer of a stage, as the mean over the stages
    largest   elements of the largest unit, or of the mean chunk of several on a stage
    master    bytes of a parameter, which are those of its gradient, too
    mirror    bytes of the rounded copy of a parameter; 0 in full precision
    state     bytes of optimizer state per parameter, as the mean over trained parameters
    frozen    elements of the frozen parameters of a stage, which are not part of `length`
    slot      as `largest`, for frozen parameters
    """

    settings: Settings
    axes: Axes
    shards: int
    length: float
    largest: float
    master: int
    mirror: int
    state: float
    frozen: float = 0
    slot: float = 0

    @property
    def replica(self) -> float:
        """The bytes of a replica that is not sharded: parameters, mirror, gradients and state."""
        return (2 * self.master + self.mirror + self.state) * self.length + self.fixed

    @property
    def fixed(self) -> float:
        """The bytes of all frozen parameters, in the dtype with which layers compute."""
        return self.computed * self.frozen

    @property
    def computed(self) -> int:
        """Bytes of a parameter in the dtype with which layers compute."""
        return self.mirror or self.master


class Mode(NamedTuple):
    """The row of a replication mode in one of the tables of modes.py.

    help      phrase about the mode, for the help of its key
    make      (context) -> the mode on this rank; collective
    memory    (sizes) -> bytes of parameters, gradients and optimizer state on a rank, as the mean
              over the ranks; without scratch of reductions
    traffic   (settings) -> formula of the bytes that the busiest rank sends in a step; None if it
              depends on the machine or on the schedule
    refusal   (configuration) -> error that names a key that the mode does not support, or None
    servers   (settings) -> number of the last ranks, which compute no rows
    records   (settings) -> fields of StepResult that metrics.jsonl has only in this mode
    exchange  (settings) -> steps between two exchanges of stop requests
    stages    {replication.zero: row} of the mode's ZeRO stages
    variants  {suffix of the mode's name in `mpitrain compare`: setting}; empty: the mode has no
              variants
    """

    help: str
    make: Callable[[ReplicationContext], Replication]
    memory: Callable[[Sizes], float]
    traffic: Callable[[Settings], Formula | None] = lambda settings: None
    refusal: Callable[[Config], ConfigError | None] = lambda config: None
    servers: Callable[[Settings], int] = lambda settings: 0
    records: Callable[[Settings], tuple[str, ...]] = lambda settings: ()
    exchange: Callable[[Settings], int] = lambda settings: 1
    stages: Mapping[int, "Mode"] = {}
    variants: Mapping[str, str] = {}


def has_outer(settings: Settings) -> bool:
    """Return whether local SGD has an outer optimizer (DiLoCo), which keeps two more buffers."""
    return settings.outer_lr != 1 or settings.outer_momentum != 0


def first(*rules: Callable[[Config], ConfigError | None]) -> Callable[[Config], ConfigError | None]:
    """Join several refusals of a mode into one, which returns the first error."""
    return lambda config: next(filter(None, (rule(config) for rule in rules)), None)


def only(key: str, others: str, **needed: str | int) -> Callable[[Config], ConfigError | None]:
    """Return a refusal of all configurations in which a key does not have the value that it needs.

    key     the key that selected the mode, for the message
    others  a value of `key` with which the other keys may have any value, for the message
    needed  {section__key: value}
    """

    def rule(config: Config) -> ConfigError | None:
        values = config.flat()
        title = {"replication.mode": "Mode", "pipeline.schedule": "Schedule"}[key]
        for name, value in needed.items():
            other = name.replace("__", ".")
            if values[other] != value:
                return ConfigError(
                    f"{title} {values[key]} needs {other} {value}, but it is {values[other]}.",
                    f"Set {other} to {value}, or {key} to {others}.",
                )
        return None

    return rule


def of_zero(config: Config) -> ConfigError | None:
    """Return the error about a key that the ZeRO stage does not support, or None; for all modes."""
    settings, compute = config.replication, config.precision.compute
    if settings.wire != "none" and settings.zero > 1:
        return ConfigError(
            "Wire formats carry sums that every replica has whole, but with replication.zero "
            f"{settings.zero} none has, and replication.wire is {settings.wire}.",
            "Set replication.wire to none, or replication.zero to 0 or 1.",
        )
    if settings.shard != "all" and not settings.zero:
        return ConfigError(
            f"replication.shard {settings.shard} says among whom ZeRO divides, but replication.zero is 0.",
            "Set replication.zero to 1, 2 or 3, or replication.shard to all.",
        )
    if settings.gather != "none" and (settings.zero != 3 or compute != "float32"):
        return ConfigError(
            f"replication.gather {settings.gather} is of float32 parameters that no rank has whole, but "
            f"replication.zero is {settings.zero} and precision.compute {compute}.",
            "Set replication.gather to none, or replication.zero to 3 and precision.compute to float32.",
        )
    return None


CONTROL, CONTROL_ITEM = 5, 8
"""Elements of the control message, and bytes per element."""

NEWS = 6
"""Elements of CONTROL_ITEM bytes that local SGD and gossip sum at the end of a period."""

SQUARES = 3
"""Elements of CONTROL_ITEM bytes that the parameter servers all-reduce to agree on the norm."""

NUMBERS = 10
"""Numbers in the header of a message to or from a server."""

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


def _summed(words: str, elements: Callable[[int, int], float]) -> Formula:
    """Return the formula for one all-reduce algorithm that sums gradients and control message.

    elements  (n, count) -> elements that the busiest rank sends
    """

    def of(replica: ReplicationContext, sample: Sample) -> float:
        n, storage = replica.grid.axes.ranks, replica.storage
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


Travelled = Callable[[ReplicationContext], tuple[float, float] | None]
"""(context) -> elements that ZeRO reduce-scatters, and those that it all-gathers; None: unknown."""


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
    def of(replica: ReplicationContext, sample: Sample) -> float | None:
        nbytes = sharded(replica, travelled)
        control = _ring(replica.grid.axes.ranks, CONTROL) * CONTROL_ITEM
        return None if nbytes is None else nbytes + control

    return Formula(words, of)


def sharded(replica: ReplicationContext, travelled: Travelled) -> float | None:
    """Return the bytes that a rank sends in a step to other replicas, without the control message."""
    grid, elements, storage = replica.grid, travelled(replica), replica.storage
    if elements is None:
        return None
    n, hosts = grid.axes.copies, grid.world.transport.hosts
    s = divisor(grid.axes, hosts, replica.config.replication.shard)
    summed, gathered = elements
    between = 2 * (n // s - 1) * storage.length / n
    return (summed * storage.dtype.itemsize + gathered * replica.computed.itemsize) * (
        s - 1
    ) / s + between * storage.dtype.itemsize


def of_partial_sums(replica: ReplicationContext) -> int:
    """Return the bytes that a rank sends over tp: gradients of replicated tensors are partial sums."""
    grid, storage = replica.grid, replica.storage
    partial = sum(span.stop - span.start for span in storage.spans if span.partial)
    if replica.config.replication.zero > 1:
        hosts, shard = grid.world.transport.hosts, replica.config.replication.shard
        partial //= divisor(grid.axes, hosts, shard)
    return sent_in_ring(grid.coords.tp, grid.axes.tp, partial) * storage.dtype.itemsize


def of_replicas(replica: ReplicationContext) -> float | None:
    """Return the bytes that a rank sends in a step to sum gradients over the replicas, and with ZeRO to
    gather parameters; None if they are not known.
    """
    grid, storage, zero = replica.grid, replica.storage, replica.config.replication.zero
    if zero:
        return sharded(replica, {1: once, 2: by_micro_batch, 3: by_use}[zero])
    count = sent_in_ring(grid.copies.rank, grid.axes.copies, storage.length)
    return count * storage.dtype.itemsize


def sent_to_agree(rank: int, ranks: int) -> int:
    """Return the bytes that a rank sends for all ranks to agree on the end of a step."""
    return sent_in_ring(rank, ranks, CONTROL) * CONTROL_ITEM


def once(replica: ReplicationContext) -> tuple[float, float]:
    """Return the elements that ZeRO stage 1 reduces and gathers: all of them, once a step."""
    return replica.storage.length, replica.storage.length


def by_micro_batch(replica: ReplicationContext) -> tuple[float, float]:
    """Return the elements that ZeRO stage 2 reduces and gathers.

    It reduces the gradients of each micro-batch. A pipeline stage with several model chunks sums
    the micro-batches of a chunk first.
    """
    length = replica.storage.length
    return _scatters_per_step(replica) * length, length


def by_use(replica: ReplicationContext) -> tuple[float, float] | None:
    """Return the elements that ZeRO stage 3 reduce-scatters and all-gathers in a step.

    The last two units stay gathered for backward, the first two for the next micro-batch. On a
    pipeline stage, the last chunk stays gathered. Frozen tensors stay gathered after an update, and
    their first units run no backward. Returns None if more units stay gathered, because of tied
    weights or replication.zero_keep, and if replication.gather compresses the all-gathers.
    """
    config, storage = replica.config, replica.storage
    if is_tied(config) or config.replication.zero_keep or config.replication.gather != "none":
        return None
    summed, frozen = _scatters_per_step(replica) * storage.length, storage.frozen.spans
    if replica.chunks:
        if any(span.start < span.stop for span in frozen):
            return None
        last = [s.stop - s.start for s in storage.spans if s.unit in replica.chunks[-1]]
        return summed, 2 * storage.length - sum(last)
    m, steps, units = config.batch.micro_batches, config.run.steps, range(len(storage.units))
    opened = [*units, *reversed(units[replica.first :])] * m
    # With overlap, the last backward of the run gathers the first unit for another step.
    ahead = [0] if replica.first and config.replication.overlap else []
    stored = _gathered(frozen, opened * steps + ahead) / max(1, steps)
    return summed, _gathered(storage.spans, opened) + stored


def _scatters_per_step(replica: ReplicationContext) -> int:
    return 1 if replica.chunks else replica.config.batch.micro_batches


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


def _gradient_bytes(replica: ReplicationContext) -> int:
    return replica.storage.length * replica.storage.dtype.itemsize


def _children(rank: int, n: int) -> int:
    """Return the number of children of a rank in a binomial tree with root 0."""
    return sum(rank < 1 << bit and rank + (1 << bit) < n for bit in range((n - 1).bit_length()))


def _master(replica: ReplicationContext, sample: Sample) -> float:
    """Return the bytes of the busiest rank.

    Parameters go down a binomial tree, and gradients come up the same tree. Rows and logits travel
    directly between rank 0 and each worker.
    """
    size, n, length = replica.config.batch.size, replica.grid.axes.ranks, _gradient_bytes(replica)
    logits = sample.logits * replica.computed.itemsize

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


def _local(replica: ReplicationContext, sample: Sample) -> float:
    n, storage = replica.grid.axes.ranks, replica.storage
    averaged = _ring(n, storage.length) * storage.dtype.itemsize + _ring(n, NEWS) * CONTROL_ITEM
    return _periods(replica.config) * averaged / replica.config.run.steps


def _gossip(replica: ReplicationContext, sample: Sample) -> float:
    """Return the mean bytes of a step, including the average over all ranks after the run."""
    n, steps, storage = replica.grid.axes.ranks, replica.config.run.steps, replica.storage
    average = _ring(n, storage.length) * storage.dtype.itemsize
    exchanges = _periods(replica.config) * _ring(n, NEWS) * CONTROL_ITEM
    return (steps * _gradient_bytes(replica) + exchanges + average) / steps


def _bytes_by_server(replica: ReplicationContext) -> list[int]:
    dealt_out = dealt(replica.storage.spans, replica.grid.axes.servers)
    return [
        sum(piece.stop - piece.start for piece in pieces) * replica.storage.dtype.itemsize
        for pieces in dealt_out
    ]


def _server_sync(replica: ReplicationContext, sample: Sample) -> float:
    stored, workers = _bytes_by_server(replica), replica.grid.axes.dp
    servers = len(stored)
    return max(
        sum(stored) + servers * HEADER,
        *(
            workers * (nbytes + HEADER) + sent_in_ring(server, servers, SQUARES) * CONTROL_ITEM
            for server, nbytes in enumerate(stored)
        ),
    )


def _server_late(replica: ReplicationContext, sample: Sample) -> float | None:
    """Return the bytes of asynchronous and bounded servers.

    Returns None if a worker may be the busiest rank, since nobody knows before the run how many
    tickets it will get. A step has one ticket per worker. For each ticket a worker sends a request,
    a pull of parameters, and a push of gradients. At a pause each worker sends one request that
    gets no ticket. At the end of the run each worker pulls the parameters.
    """
    config, stored, workers = replica.config, _bytes_by_server(replica), replica.grid.axes.dp
    steps, servers = config.run.steps, len(stored)
    is_bounded = config.replication.update == "bounded"
    if is_bounded and not config.replication.staleness:
        return _server_sync(replica, sample)
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

MASTER = Formula("ceil(lg n) S, and all others' rows and gradients of logits", _master)
LOCAL = Formula("2 (n-1)/n S once in replication.period steps", _local)
GOSSIP = Formula("S, and 2 (n-1)/n S once for the average at the end", _gossip)

SERVER = {
    "sync": Formula("W times the part of S that a server holds, or S, a worker", _server_sync),
    "async": Formula("W times the part of S that a server holds, and so at the end", _server_late),
    "bounded": Formula(
        "W times the part of S that a server holds, and so at the end, or S, a worker", _server_late
    ),
}
"""{replication.update: formula}"""
