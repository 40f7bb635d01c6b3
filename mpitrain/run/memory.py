"""The check that parameters, gradients and optimizer state fit in memory, before a model exists."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isclose
from typing import NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.errors import ConfigError, gigabytes
from mpitrain.layers.base import freeze
from mpitrain.layers.flat import Storage
from mpitrain.machine import process
from mpitrain.models.table import adapted
from mpitrain.optim import RULES, state_bytes
from mpitrain.optim.rule import BlockWise
from mpitrain.parallel.buckets import kept_apart, slots_of
from mpitrain.parallel.grid import divisor
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.replica import Sizes
from mpitrain.parallel.tensor.layer_factory import described
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


def check_memory(transport: Transport, job: Job) -> Room:
    """Raise ConfigError if parameters, gradients and optimizer state exceed the free memory.

    Activations do not count here: `run/count/step.py` checks that they fit in what is left.
    """
    config, gpus = job.config, job.gpus
    places = process.gpu_identities(transport.hosts, gpus)
    users = [rank for rank, place in enumerate(places) if place == places[transport.rank]]
    ranks, where = len(users), "on this GPU" if gpus else "on this host"
    estimate, count = sizes(job, divisor(job.axes, transport.hosts, config.replication.shard))
    # The rank of a GPU that looked last has seen what the start of the others takes there.
    free = min(gpus[rank].free for rank in users) if gpus else process.free_memory("cpu")
    allowed = "are free"
    if config.memory.limit_gb and config.memory.limit_gb * 1e9 < free:
        free, allowed = int(config.memory.limit_gb * 1e9), "are allowed by memory.limit_gb"
    if config.model.freeze or config.lora.rank:
        # The first estimate is for a network that is entirely frozen. If even this does not fit,
        # the network is not described in detail.
        estimate = estimate._replace(
            length=0, largest=0, frozen=estimate.length, slot=estimate.largest
        )
        if ranks * mode_of(config.replication, config.pipeline.schedule).memory(estimate) <= free:
            estimate = frozen_sizes(estimate, job)
    needed = ranks * mode_of(config.replication, config.pipeline.schedule).memory(estimate)
    if needed > free:
        sum_needed, sum_free = gigabytes(needed, free)
        raise ConfigError(
            f"{count:,} parameters with gradients and optimizer state of {ranks} rank(s) need {sum_needed} {where}, "
            f"but {sum_free} {allowed}.",
            "Lower model.width or model.layers"
            + (", or start fewer ranks per host." if ranks > 1 else "."),
        )
    return Room(free, needed, users, where, allowed)


def sizes(job: Job, shards: int) -> tuple[Sizes, int]:
    """Return the arguments of a mode's memory formula, and the number of parameters.

    Both are extrapolated from networks of one and two layers, which are quick to describe. No
    parameter of these networks is frozen.

    shards  ranks of ZeRO's sharding group
    """
    config, axes, chunks = job.config, job.axes, len(job.plan.stage_of)
    stored, name = config.precision.stored, config.optimizer.name

    def described_at(depth: int) -> Storage:
        shallow = replace(job, config=config.changed({"model.layers": depth}))
        units = shallow.units(described(job.device.ops, config.layout))
        return Storage(units, stored, axes.copies)

    one, two, others = described_at(1), described_at(2), config.model.layers - 1
    length = one.length + others * (two.length - one.length)
    count = one.parameter_count + others * (two.parameter_count - one.parameter_count)
    largest = (two if others else one).largest
    state = state_bytes(name, one) + others * (state_bytes(name, two) - state_bytes(name, one))
    return Sizes(
        config.replication,
        axes,
        shards,
        length / axes.pp,
        length / chunks if chunks > 1 else largest,
        np.dtype(stored).itemsize,
        _mirror(job),
        state / length if length else 0,
    ), count


def frozen_sizes(estimate: Sizes, job: Job) -> Sizes:
    """Return the arguments of a mode's memory formula for a network with frozen parameters.

    Adapters are included. The whole network is described, which takes longer than `sizes`.

    estimate  the result of `sizes`, whose numbers of elements are replaced
    raises    ConfigError as `freeze`
    """
    config, axes, chunks = job.config, job.axes, len(job.plan.stage_of)
    layers = described(job.device.ops, config.layout)
    units = freeze(adapted(job.units(layers), config.lora, layers), config.model.freeze)
    storage = Storage(units, config.precision.stored, axes.copies)
    length, frozen = storage.length, storage.frozen.length
    state = state_bytes(config.optimizer.name, storage)
    return estimate._replace(
        length=length / axes.pp,
        state=state / length if length else 0,
        largest=length / chunks if chunks > 1 else storage.largest,
        frozen=frozen / axes.pp,
        slot=frozen / chunks if chunks > 1 else storage.frozen.largest,
    )


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
    itemsize, state = storage.dtype.itemsize, state_bytes(job.config.optimizer.name, storage)
    return Sizes(
        replication,
        job.axes,
        shards,
        storage.length,
        largest,
        itemsize,
        _mirror(job),
        state / storage.length if storage.length else 0,
        storage.frozen.length,
        slot,
    )


def _mirror(job: Job) -> int:
    """Return the bytes of the rounded copy of a parameter; 0 in full precision."""
    precision = job.config.precision
    if not precision.is_half:
        return 0
    return (job.device.half or np.dtype(precision.stored)).itemsize


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
