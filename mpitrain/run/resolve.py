"""What a configuration means here, found once, in the same way on every rank, and passed on."""

import sys
from pathlib import Path
from typing import NamedTuple

from mpitrain.collectives.engine.codecs import Wire, parse_wire
from mpitrain.collectives.selection import table as algorithm_table
from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning
from mpitrain.config import Config, check_choice, parse
from mpitrain.errors import ConfigError
from mpitrain.machine import process
from mpitrain.ops.device import Device, device_for
from mpitrain.parallel.grid import Axes, axes, divisor
from mpitrain.parallel.tensor.sequence import check_rows, sequences_of
from mpitrain.pipeline.instructions import Plan
from mpitrain.pipeline.memory import goes_in_passes
from mpitrain.pipeline.schedule_files import find_plan
from mpitrain.pipeline.schedules import NAMED, SCHEDULES, plan_of
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport


class Resolved(NamedTuple):
    """A configuration, and what it means on these ranks.

    config  with device.kind and batch.micro_batches settled
    axes    with dp filled in
    plan    what each stage computes, and where the parts of the model lie
    wire    in which format gradients travel
    tuning  what `auto` chooses by
    device  this rank's
    """

    config: Config
    axes: Axes
    plan: Plan
    wire: Wire
    tuning: Tuning
    device: Device


def resolve(transport: Transport, config: Config) -> Resolved:
    """Resolve a configuration; collective.

    raises  ConfigError on every rank if it cannot work here
    """
    on_all_ranks(transport, lambda: check_names(config))
    found = on_all_ranks(transport, lambda: axes(config, transport.size))
    on_all_ranks(transport, lambda: divisor(found, transport.hosts, config.replication.shard))
    plan = on_all_ranks(transport, lambda: _planned(config, found))
    batch = config.batch.model_copy(update={"micro_batches": plan.micro_batches})
    config, device = _settled(transport, config.model_copy(update={"batch": batch}))
    on_all_ranks(
        transport, lambda: axes(config, transport.size)
    )  # as many shares as there are now need rows
    on_all_ranks(transport, lambda: check_rows(config, found))
    wire = on_all_ranks(transport, lambda: parse_wire(config.replication.wire))
    file = config.replication.tuning
    tuning = on_all_ranks(transport, lambda: read_tuning(Path(file)) if file else DEFAULT)
    return Resolved(config, found, plan, wire, tuning, device)


def choices() -> dict[str, tuple[str, ...]]:
    """{key: what it may be}, of the keys whose values are names in a table that the configuration does not know."""
    return dict.fromkeys(
        ("replication.algorithm", "layout.algorithm"), algorithm_table.choices("allreduce")
    )


def check_names(config: Config) -> None:
    """ConfigError for a name that is in no table."""
    for key, known in choices().items():
        check_choice(key, config.flat()[key], known)


def _planned(config: Config, found: Axes) -> Plan:
    """What the stages compute: by the configured schedule, or by that of a file; ConfigError if it cannot serve these numbers."""
    settings, stages, micro_batches = config.pipeline, found.pp, config.batch.micro_batches
    rows = config.batch.size // found.dp
    if not micro_batches and settings.schedule in NAMED:
        micro_batches = _filling(stages, rows, sequences_of(config))
    plan = find_plan(settings.schedule, stages, micro_batches or None, settings.chunks or None)
    if plan.micro_batches < stages:
        raise ConfigError(
            f"A pipeline of {stages} stages is never full with fewer micro-batches, but there are {plan.micro_batches}.",
            f"Set batch.micro_batches to at least {stages}, or --pp to at most {plan.micro_batches}."
            if settings.schedule in NAMED
            else f"Name a schedule, or a file that has at least {stages} micro-batches.",
        )
    if (
        config.replication.zero > 1
        and len(plan.place) > 1
        and not all(map(goes_in_passes, plan.lists))
    ):
        raise ConfigError(
            f"With replication.zero {config.replication.zero} all micro-batches go through a part of the model before the next, "
            f"so that it is gathered and reduced once, but {settings.schedule} comes back to parts.",
            f"Set pipeline.schedule to {_in_passes(stages, plan.micro_batches, settings.chunks)}, or replication.zero to 0 or 1.",
        )
    return plan


def _filling(stages: int, rows: int, fitting: int) -> int:
    """Micro-batches that nobody has set: two a stage, as far as there are rows for that; one if only these have what `fitting`
    divides.
    """
    count = stages * min(2, max(1, rows // stages)) if stages > 1 else 1
    return count if fitting == 1 or rows % (count * fitting) == 0 else stages


def _in_passes(stages: int, micro_batches: int, chunks: int) -> str:
    """The schedules that take all micro-batches through a part before the next, of those with so many chunks, if not 0."""
    return " or ".join(
        name
        for name, schedule in SCHEDULES.items()
        if chunks in (0, schedule.chunks or chunks)
        and not schedule.grouped
        and all(map(goes_in_passes, plan_of(name, stages, micro_batches, chunks or None).lists))
    )


def _settled(transport: Transport, config: Config) -> tuple[Config, Device]:
    """The configuration with `auto` replaced, cuda if every rank finds a GPU, else cpu; and the device. Collective.

    raises  ConfigError on every rank if the kind needs what one of them lacks, or cannot do what is configured
    """
    kind = config.device.kind
    if kind == "auto":
        kind = "cuda" if all(transport.gather_text(process.gpus() > 0)) else "cpu"
    wanted, compute = config.device, config.precision.compute
    device = on_all_ranks(
        transport, lambda: device_for(kind, wanted.gemm, wanted.tiles, compute=compute)
    )
    if kind == "cuda":
        _say_who_shares(transport)
    chosen = config.model_copy(update={"device": config.device.model_copy(update={"kind": kind})})
    return on_all_ranks(
        transport, lambda: parse(chosen.model_dump())
    ), device  # what `auto` has become has laws of its own


def _say_who_shares(transport: Transport) -> None:
    """One line from rank 0 if a host has more ranks than GPUs. Collective."""
    found = dict(zip(transport.hosts, transport.gather_text(process.gpus()), strict=True))
    crowded = [
        f"{transport.hosts.count(host)} ranks on {host} share {gpus} GPU{'s' * (gpus > 1)}"
        for host, gpus in found.items()
        if transport.hosts.count(host) > gpus
    ]
    if crowded and transport.rank == 0:
        print(
            f"warning: {'; '.join(crowded)}: they take turns, and each needs its own memory.",
            file=sys.stderr,
            flush=True,
        )
