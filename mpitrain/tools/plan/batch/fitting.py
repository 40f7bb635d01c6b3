"""The largest micro-batch that fits in memory: by counted bytes, then by a trial allocation.

R rows of a micro-batch, dp replicas, m micro-batches of a step: a global batch of R dp m rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpitrain.data import Source
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.ops.device import Device
from mpitrain.parallel.memory import Room, check_memory
from mpitrain.parallel.tensor.sequence import sequences_of
from mpitrain.run.build import model, scheduled
from mpitrain.run.counting import bytes_needed
from mpitrain.run.resolve import Resolved
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport


class Fit(NamedTuple):
    """The micro-batches of a job that fit in memory.

    unit     rows of the smallest micro-batch; all others are multiples
    rows     rows of the largest micro-batch that fits
    is_most  whether it is the largest that was looked at, so that a larger one may fit
    room     memory of this host or GPU before the job exists
    counted  bytes of activations in that memory, with `rows`
    """

    unit: int
    rows: int
    is_most: bool
    room: Room
    counted: int


def with_rows(resolved: Resolved, rows: int, micro_batches: int = 0) -> Resolved:
    """Return the job with micro-batches of `rows` rows each.

    micro_batches  of a step; 0: as many as the job has
    """
    count = micro_batches or resolved.plan.micro_batches
    size = rows * resolved.axes.dp * count
    batch = resolved.config.batch.model_copy(update={"size": size, "micro_batches": count})
    return resolved._replace(config=resolved.config.model_copy(update={"batch": batch}))


def find_largest(transport: Transport, resolved: Resolved, source: Source, most: int) -> Fit:
    """Return the largest micro-batch that fits on all ranks, of at most `most` rows; collective.

    raises  ConfigError on every rank, if the smallest one does not fit
    """
    config, axes, plan, *_, gpus, device = resolved
    unit = sequences_of(config)
    room = on_all_ranks(
        transport,
        lambda: check_memory(transport, config, source, axes, len(plan.stage_of), device, gpus),
    )

    def count(rows: int) -> tuple[int, int]:
        return counted_bytes(transport, source, room, with_rows(resolved, rows))

    def own() -> int:
        largest = largest_multiple(
            lambda rows: room.needed + count(rows)[0] <= room.free, unit, most
        )
        if largest:
            return largest
        raise ConfigError(
            f"{len(room.ranks)} rank(s) need {count(unit)[0] / 1e6:,.1f} MB for the activations of "
            f"{unit} row(s) in a micro-batch, but {(room.free - room.needed) / 1e6:,.1f} MB "
            f"of the {room.free / 1e6:,.1f} MB that {room.allowed} remain {room.where}.",
            "Set memory.recompute=unit, or lower model.width or model.context.",
        )

    counted = min(transport.gather_text(on_all_ranks(transport, own)))
    state = int(room.needed / len(room.ranks))
    rows = largest_multiple(
        lambda rows: can_allocate(transport, device, state + count(rows)[1]), unit, counted
    )
    if not rows:
        raise ConfigError(
            f"{unit} row(s) in a micro-batch fit by count, but a rank ran out of memory in a trial allocation.",
            "Set memory.limit_gb to the memory that this job really has.",
        )
    return Fit(unit, rows, rows + unit > most, room, count(rows)[0])


def counted_bytes(
    transport: Transport, source: Source, room: Room, resolved: Resolved
) -> tuple[int, int]:
    """Count the activations of a step. It sends no message.

    returns  bytes on all ranks that share the memory, and on this rank
    raises   ConfigError if an operation of a plugin cannot be counted
    """
    try:
        nbytes, step = bytes_needed(
            scheduled(resolved),
            source,
            lambda layers: model(resolved.config, source, layers),
            room,
            transport.rank,
        )
    except MpitrainError:
        raise
    except Exception as error:  # A plugin's layer may use an array in a way that needs memory.
        raise ConfigError(
            f"plan batch counts activations, but a step of this job cannot be counted: {type(error).__name__}: {error}.",
            "Let the operations of your plugin ask has_memory of mpitrain.ops.weightless.",
        ) from None
    return nbytes, step.peak


def can_allocate(transport: Transport, device: Device, nbytes: int) -> bool:
    """Return whether every rank can allocate and write so many bytes at once; collective.

    If one rank is out of memory, all ranks return False. Its messages need not be cancelled, as in
    a step: a trial allocation has none.
    """
    array = None
    try:
        array = device.arena().take((max(1, nbytes),), np.uint8)
        array.fill(0)
        device.backend.synchronize()
    except (MemoryError, OSError):
        return all(transport.gather_text(False))
    # All ranks hold their memory at the same time, as in a step.
    return all(transport.gather_text(array is not None))


def largest_multiple(fits: Callable[[int], bool], unit: int, most: int) -> int:
    """Return the largest multiple of `unit` up to `most` that fits, by bisection; 0: none does.

    fits  (rows) -> whether they fit; no more rows fit than of a number that does not
    """
    low, high = 0, most // unit
    step = 1
    while low < high:
        # Doubling finds small answers without counting large ones.
        middle = min(high, low + step) if step else (low + high + 1) // 2
        if fits(middle * unit):
            low, step = middle, 2 * step
        else:
            high, step = middle - 1, 0
    return low * unit
