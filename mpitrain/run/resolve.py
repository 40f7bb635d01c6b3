"""Resolves a configuration for the given ranks and devices, once and equally on every rank."""

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
from mpitrain.optim import RULES, checked
from mpitrain.parallel.grid import Axes, axes, divisor
from mpitrain.parallel.tensor.sequence import check_rows, sequences_of
from mpitrain.pipeline.instructions import Plan
from mpitrain.pipeline.memory import goes_in_passes
from mpitrain.pipeline.schedule_files import find_plan
from mpitrain.pipeline.schedules import NAMED, SCHEDULES, plan_of
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport


class Resolved(NamedTuple):
    """A configuration with its automatic values resolved for these ranks.

    config  with device.kind and batch.micro_batches set
    axes    the size of each mesh axis, with dp set
    plan    the pipeline schedule, and the stage of each model chunk
    wire    the format of gradient compression
    tuning  the parameters of the cost model, by which `auto` chooses algorithms
    device  the device of this rank
    """

    config: Config
    axes: Axes
    plan: Plan
    wire: Wire
    tuning: Tuning
    device: Device


def resolve(transport: Transport, config: Config) -> Resolved:
    """Resolve a configuration; collective.

    raises  ConfigError on every rank if it does not fit the ranks, hosts or devices
    """
    config = on_all_ranks(transport, lambda: with_defaults(config))
    found = on_all_ranks(transport, lambda: axes(config, transport.size))
    on_all_ranks(transport, lambda: divisor(found, transport.hosts, config.replication.shard))
    plan = on_all_ranks(transport, lambda: _planned(config, found))
    batch = config.batch.model_copy(update={"micro_batches": plan.micro_batches})
    config, device = _settled(transport, config.model_copy(update={"batch": batch}))
    # Each micro-batch needs a row; their number may have changed.
    on_all_ranks(transport, lambda: axes(config, transport.size))
    on_all_ranks(transport, lambda: check_rows(config, found))
    wire = on_all_ranks(transport, lambda: parse_wire(config.replication.wire))
    file = config.replication.tuning
    tuning = on_all_ranks(transport, lambda: read_tuning(Path(file)) if file else DEFAULT)
    return Resolved(config, found, plan, wire, tuning, device)


def choices() -> dict[str, tuple[str, ...]]:
    """Return {key: allowed names} for the keys that name an entry of a table."""
    return {
        **dict.fromkeys(
            ("replication.algorithm", "layout.algorithm"), algorithm_table.choices("allreduce")
        ),
        "optimizer.name": tuple(RULES),
    }


def check_names(config: Config) -> None:
    """Raise ConfigError for a name that is not in its table."""
    for key, known in choices().items():
        check_choice(key, config.flat()[key], known)


def with_defaults(config: Config) -> Config:
    """Check the names, and return a copy with the defaults of the update rule.

    raises  ConfigError for a name that is not in its table, or for keys that do not fit the rule
    """
    check_names(config)
    return checked(config)


def _planned(config: Config, found: Axes) -> Plan:
    """Make the pipeline plan of the configured schedule, or read it from a file.

    raises  ConfigError if it does not fit the numbers of stages and micro-batches, or ZeRO
    """
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
    """Return the default number of micro-batches: two per stage if there are enough rows.

    rows     of each replica per step
    fitting  must divide the rows of a micro-batch; where two per stage prevent that, take one
    """
    count = stages * min(2, max(1, rows // stages)) if stages > 1 else 1
    return count if fitting == 1 or rows % (count * fitting) == 0 else stages


def _in_passes(stages: int, micro_batches: int, chunks: int) -> str:
    """Return the schedules that finish a model chunk for all micro-batches before the next chunk.

    chunks  only schedules with this number of chunks per stage; 0: all
    returns names with " or " between them, for a message
    """
    return " or ".join(
        name
        for name, schedule in SCHEDULES.items()
        if chunks in (0, schedule.chunks or chunks)
        and not schedule.grouped
        and all(map(goes_in_passes, plan_of(name, stages, micro_batches, chunks or None).lists))
    )


def _settled(transport: Transport, config: Config) -> tuple[Config, Device]:
    """Resolve device.kind `auto` and make the device; collective.

    `auto` becomes cuda if every rank finds a GPU, else cpu.

    raises  ConfigError on every rank if a rank lacks the device, or it does not support the keys
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
    # The kind that replaced `auto` has rules of its own, so the configuration is validated again.
    return on_all_ranks(transport, lambda: parse(chosen.model_dump())), device


def _say_who_shares(transport: Transport) -> None:
    """Print a warning on rank 0 if a host has more ranks than GPUs; collective."""
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
