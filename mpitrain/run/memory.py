"""Checks before a model is built that parameters, gradients and optimizer state fit in memory."""

from collections.abc import Callable

import numpy as np

from mpitrain.config import Config
from mpitrain.data import Source, Unopened
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit
from mpitrain.layers.flat import Storage
from mpitrain.layers.plain import Plain
from mpitrain.machine import process
from mpitrain.optim import RULES
from mpitrain.parallel.grid import divisor
from mpitrain.parallel.mode import Sizes
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.tensor.layer_factory import described
from mpitrain.run.resolve import Resolved
from mpitrain.transport.base import Transport

Model = Callable[[Config, Source | Unopened, Plain], list[Unit]]
"""(configuration, source, layer factory) -> units of the configured network."""


def check_memory(
    transport: Transport, resolved: Resolved, source: Source | Unopened, model: Model
) -> None:
    """Raise ConfigError if parameters, gradients and optimizer state exceed the free memory.

    It is called before the model is built; activations are not counted.
    """
    config = resolved.config
    ranks, where = transport.hosts.count(transport.hosts[transport.rank]), "on this host"
    if config.device.kind == "cuda":
        ranks, where = -(-ranks // process.gpus()), "on this GPU"
    shards = divisor(resolved.axes, transport.hosts, config.replication.shard)
    found, count = sizes(resolved, source, shards, model)
    needed = ranks * mode_of(config).memory(found)
    free = process.free_memory(config.device.kind)
    if needed > free:
        raise ConfigError(
            f"{count:,} parameters with gradients and optimizer state of {ranks} rank(s) need {needed / 1e9:,.1f} GB {where}, "
            f"but {free / 1e9:,.1f} GB are free.",
            "Lower model.width or model.layers"
            + (", or start fewer ranks per host." if ranks > 1 else "."),
        )


def sizes(
    resolved: Resolved, source: Source | Unopened, shards: int, model: Model
) -> tuple[Sizes, int]:
    """Return the arguments of a mode's memory formula, and the number of parameters.

    They are extrapolated from networks of one and two layers, which are quick to describe.
    """
    config, axes, chunks = resolved.config, resolved.axes, len(resolved.plan.place)
    layers = described(resolved.device.ops, config.layout)

    def storage(depth: int) -> Storage:
        shallow = config.model.model_copy(update={"layers": depth})
        units = model(config.model_copy(update={"model": shallow}), source, layers)
        return Storage(units, config.precision.stored, axes.dp)

    one, two = storage(1), storage(2)
    others = config.model.layers - 1
    length = one.length + others * (two.length - one.length)
    count = one.parameter_count + others * (two.parameter_count - one.parameter_count)
    spans = (two if others else one).spans
    largest = max((span.stop - span.start for span in spans), default=0)
    master = np.dtype(config.precision.stored).itemsize
    half = resolved.device.half.itemsize if resolved.device.half else master
    return Sizes(
        config.replication,
        axes,
        shards,
        length / axes.pp,
        length / chunks if chunks > 1 else largest,
        master,
        half if config.precision.is_half else 0,
        RULES[config.optimizer.name].per_parameter * master,
    ), count
