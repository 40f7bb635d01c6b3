"""The check that parameters, gradients and optimizer state fit in memory, before a model has arrays."""

from collections.abc import Callable, Sequence
from math import isclose
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError, gigabytes
from mpitrain.layers.base import Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine import process
from mpitrain.optim import RULES, state_bytes
from mpitrain.optim.rule import BlockWise
from mpitrain.parallel.buckets import kept_apart, slots_of
from mpitrain.parallel.grid import divisor
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.replica import Sizes
from mpitrain.run.job import Job
from mpitrain.transport.base import Transport


class Room(NamedTuple):
    """The memory of this rank's host or GPU, in bytes.

    free     bytes before the ranks allocate; at most memory.limit_gb
    needed   bytes of parameters, gradients and optimizer state of `ranks`
    ranks    the ranks that share the memory
    where    name of the memory in a message
    allowed  predicate of `free` in a message
    """

    free: int
    needed: float
    ranks: Sequence[int]
    where: str
    allowed: str = "are free"


def check_memory(transport: Transport, job: Job, model: Sequence[Unit]) -> Room:
    """Raise ConfigError if parameters, gradients and optimizer state exceed the free memory.

    Activations do not count here: `run/count/step.py` checks that they fit in what is left.

    model  all units, as of `Job.described`
    """
    config, gpus = job.config, job.gpus
    places = process.gpu_identities(transport.hosts, gpus) if gpus else transport.hosts
    users = [rank for rank, place in enumerate(places) if place == places[transport.rank]]
    ranks, where = len(users), "on this GPU" if gpus else "on this host"
    storage = Storage(model, config.precision.stored, job.axes.copies)
    shards = divisor(job.axes, transport.hosts, config.replication.shard)
    mode = mode_of(config.replication, config.pipeline.schedule)
    needed = ranks * mode.memory(sizes(job, storage, shards))
    # The rank of a GPU that looked last has seen what the start of the others takes there.
    free = min(gpus[rank].free for rank in users) if gpus else process.free_memory("cpu")
    allowed = "are free"
    if config.memory.limit_gb and config.memory.limit_gb * 1e9 < free:
        free, allowed = int(config.memory.limit_gb * 1e9), "are allowed by memory.limit_gb"
    if needed > free:
        sum_needed, sum_free = gigabytes(needed, free)
        raise ConfigError(
            f"{storage.parameter_count:,} parameters with gradients and optimizer state of {ranks} rank(s) need "
            f"{sum_needed} {where}, but {sum_free} {allowed}.",
            "Lower model.width or model.layers"
            + (", or start fewer ranks per host." if ranks > 1 else "."),
        )
    return Room(free, needed, users, where, allowed)


def sizes(job: Job, storage: Storage, shards: int) -> Sizes:
    """Return the arguments of a mode's memory formula, as the mean over the pipeline stages.

    storage  of all units of the model
    shards   ranks of ZeRO's sharding group
    """
    stages, chunks = job.axes.pp, len(job.plan.stage_of)
    largest, slot = (
        each.length / chunks if chunks > 1 else each.largest for each in (storage, storage.frozen)
    )
    whole = _sizes(job, storage, shards, largest, slot)
    return whole._replace(length=storage.length / stages, frozen=whole.frozen / stages)


def stage_sizes(
    job: Job,
    storage: Storage,
    chunks: Sequence[range],
    shards: int,
    bucket: Callable[[Storage], float],
) -> Sizes:
    """Return the arguments of a mode's memory formula for the ranks of one pipeline stage, exactly.

    `largest` and `slot` have the elements of all full-size buffers of ZeRO 2 and 3.

    storage  of the units of the stage
    chunks   as in `Replica`
    shards   ranks of ZeRO's sharding group
    bucket   (storage) -> bytes of a bucket of ZeRO 2
    """
    replication, largest, slot = job.config.replication, 0, 0
    if replication.zero > 1:
        firsts = [own.start for own in chunks]
        buckets = storage.buckets(*((bucket(storage), firsts) if replication.zero == 2 else (0,)))
        largest = sum(slots_of(buckets, kept_apart(storage, buckets), chunks)[1])
        buckets += storage.frozen_buckets()
        alone = kept_apart(storage, buckets, replication.zero_keep)
        slot = sum(slots_of(buckets, alone, chunks)[1]) - largest
    return _sizes(job, storage, shards, largest, slot)


def _sizes(job: Job, storage: Storage, shards: int, largest: float, slot: float) -> Sizes:
    config, rounded = job.config, job.device.half or storage.dtype
    return Sizes(
        config.replication,
        job.axes,
        shards,
        storage.length,
        largest,
        storage.dtype.itemsize,
        mirror=rounded.itemsize if config.precision.is_half else 0,
        state=state_bytes(config.optimizer.name, storage) / max(1, storage.length),
        frozen=storage.frozen.length,
        slot=slot,
    )


def copied_bytes(config: Config, sizes: Sizes) -> float:
    """Return the bytes of one copy of run.copies_every on a rank, as the mean over the ranks.

    That is the state that a mode keeps (`Replica.kept`), decoded, and what a neighbour alone has of its own.
    """
    rule, zero = RULES[config.optimizer.name], sizes.settings.zero
    if isinstance(rule.step, BlockWise):
        sizes = sizes._replace(state=len(rule.state) * sizes.master)
    mode, axes = mode_of(config.replication, config.pipeline.schedule), sizes.axes
    own, state = mode.kept(sizes), mode.kept(sizes) - mode.kept(sizes._replace(state=0))
    if axes.servers > 1:  # A single one has all parameters, as workers have.
        return own + state + sizes.master * sizes.length / axes.ranks
    if zero and sizes.shards == axes.copies:
        return own + (own if zero == 3 or sizes.mirror else state)
    # Where not every rank has the whole state, one alone has it.
    return own + state * (not isclose(state, sizes.state * sizes.length))
