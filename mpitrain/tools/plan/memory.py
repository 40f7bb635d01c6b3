"""`plan memory`: activations and FLOPs of a job, unit by unit, counted in one process before it is launched."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from mpitrain.config import Config, Model
from mpitrain.errors import ConfigError
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import DeviceBackend
from mpitrain.optim import RULES
from mpitrain.optim.coded import BlockWise
from mpitrain.parallel.buckets import bucket_bytes, kept_apart, slots_of
from mpitrain.parallel.grid import Axes, divisor
from mpitrain.parallel.modes import is_synchronous, mode_of, servers_of
from mpitrain.parallel.replica import Sizes
from mpitrain.run.build import alone, sizes
from mpitrain.run.checkpoint.snapshot import KEPT
from mpitrain.run.count.step import Counter
from mpitrain.run.job import Job, StepCounts, slow_heads
from mpitrain.run.trainer import parameter_count
from mpitrain.tools.plan.unit_counts import UnitCount, unit_counts
from mpitrain.tools.text_table import TextColumn, TextTable


class StageMemory(NamedTuple):
    """Counted memory and FLOPs of one pipeline stage, on its ranks in replica 0.

    units  by unit: the count for one micro-batch
    step   the count for a whole step
    """

    units: list[UnitCount]
    step: StepCounts


class Counted(NamedTuple):
    """The counts of all stages of a job.

    config      the configuration with all defaults resolved
    parameters  number of parameters of the whole model
    state       bytes of parameters, gradients and optimizer state, mean over the ranks
    copies      {name of copies in host memory: their bytes, mean over the ranks}
    rows        of the largest micro-batch
    """

    config: Config
    axes: Axes
    parameters: int
    state: float
    copies: dict[str, float]
    rows: int
    stages: list[StageMemory]


def ranks_of(config: Config) -> int:
    """Return the number of ranks: dp * cp * tp * pp, and servers; an unset dp counts as 1."""
    layout = config.layout
    return max(1, layout.dp) * layout.cp * layout.tp * layout.pp + servers_of(
        config.replication, config.pipeline.schedule
    )


def most_imbalance(model: Model, ep: int) -> float:
    """Return the most rows that a rank's experts can get, over the mean: all tokens choose as many of
    them as they can.
    """
    return ep * min(model.top_k, model.experts // ep) / model.top_k if ep > 1 else 1.0


def check_imbalance(model: Model, parts: Iterable[int], imbalance: float) -> None:
    """Raise ConfigError if at no ep of `parts` a rank's experts can get `imbalance` times the mean rows."""
    most, ep = max((most_imbalance(model, ep), ep) for ep in parts)
    if imbalance > most:
        raise ConfigError(
            f"A rank's experts get at most {most:g} times the mean rows: layout.ep is {ep}, model.experts "
            f"{model.experts} and model.top_k {model.top_k}. But --imbalance is {imbalance:g}.",
            f"Set --imbalance to {most:g} or less.",
        )


def count(unresolved: Config, imbalance: float = 1.0) -> Counted:
    """Count a job of `ranks_of` ranks on one host. Of a tensor-parallel group, rank 0 is counted.

    imbalance  rows at the counted rank's experts, over those at the mean rank's
    """
    ranks = ranks_of(unresolved)
    check_imbalance(unresolved.model, [unresolved.layout.ep], imbalance)
    job = alone(unresolved, ("",) * ranks)
    config, axes, plan = job.config, job.axes, job.plan
    counter, fixed = (
        Counter(job, imbalance=imbalance),
        divisor(axes, ("",) * ranks, config.replication.shard),
    )
    rows = math.ceil(config.batch.size / axes.dp / plan.micro_batches)
    stages = [StageMemory(unit_counts(counter, pp), counter.step(pp)) for pp in range(axes.pp)]
    is_on_device = isinstance(job.device.backend, DeviceBackend)

    def bucket(_: Storage) -> float:
        return bucket_bytes(config.replication.bucket_mb, ("",), is_on_device, lambda: 0)

    every = [stage_sizes(job, *counter.storage(pp), fixed, bucket) for pp in range(axes.pp)]

    def mean(nbytes: Callable[[Sizes], float]) -> float:
        return fmean(map(nbytes, every))

    copies = {}
    if (
        is_synchronous(config.replication, config.pipeline.schedule)
        and config.checkpoint.background
    ):
        whole = mean(lambda stage: (stage.master + stage.state) * stage.length)
        copies["copies of a checkpoint"] = whole * axes.tp * axes.pp / axes.ranks
    if config.run.on_spike == "back":
        copies["two snapshots"] = KEPT * mean(
            mode_of(config.replication, config.pipeline.schedule).kept
        )
    if config.run.copies_every:
        copied = mean(lambda stage: copied_bytes(config, stage))
        copies["two copies, also of a neighbour's"] = KEPT * copied
    state, parameters = (
        mean(mode_of(config.replication, config.pipeline.schedule).memory),
        parameter_count(counter.model),
    )
    return Counted(config, axes, parameters, state, copies, rows, stages)


def table(counted: Counted) -> Iterator[str]:
    config, axes = counted.config, counted.axes
    yield (
        f"{config.model.kind}, {counted.parameters:,} parameters; {axes.product}, "
        f"{config.batch.micro_batches} micro-batch(es) of {counted.rows} row(s), {config.device.kind}"
    )
    if advice := slow_heads(config):
        yield advice
    for number, stage in enumerate(counted.stages):
        yield ""
        yield from TextTable(
            [
                TextColumn(f"stage {number}, a micro-batch", "<28", "name"),
                TextColumn("saved MB", "10.2f", lambda unit: max(0, unit.saved) / 1e6, gap=0),
                TextColumn("pending MB", "12.2f", lambda unit: unit.pending / 1e6, gap=0),
                TextColumn("peak MB", "10.2f", lambda unit: unit.peak / 1e6, gap=0),
                TextColumn("GFLOP", "10.2f", lambda unit: unit.flops / 1e9, gap=0),
            ]
        ).lines(stage.units)
        step = stage.step
        again = f", {step.recomputed / 1e9:.2f} of them recomputed" if step.recomputed else ""
        yield (
            f"{'activations of a step':28}{'':22}{step.peak / 1e6:10.2f}{step.flops / 1e9:10.2f}{again}"
        )
    yield ""
    yield f"{'parameters, gradients, state':28}{'':22}{counted.state / 1e6:10.2f}"
    for name, nbytes in counted.copies.items():
        yield f"{name + ', on the host':50}{nbytes / 1e6:10.2f}"


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
    return sizes(job, storage, shards)._replace(
        length=storage.length, largest=largest, frozen=storage.frozen.length, slot=slot
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
    return own + state * (not math.isclose(state, sizes.state * sizes.length))
