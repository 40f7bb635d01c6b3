"""`plan memory`: activations and FLOPs of a job, unit by unit, counted in one process before it is launched."""

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import NamedTuple

from mpitrain.config import Config, Model
from mpitrain.errors import ConfigError
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import DeviceBackend
from mpitrain.parallel.buckets import bucket_bytes
from mpitrain.parallel.grid import Axes, divisor
from mpitrain.parallel.modes import is_synchronous, mode_of, servers_of
from mpitrain.parallel.replica import Sizes
from mpitrain.run.build import alone, copied_bytes, stage_sizes
from mpitrain.run.checkpoint.snapshot import KEPT
from mpitrain.run.count.step import Counter
from mpitrain.run.job import StepCounts, slow_heads
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
