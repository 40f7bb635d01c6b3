"""The check that parameters, gradients and optimizer state fit in memory, before a model exists."""

import numpy as np

from mpitrain.config import Config
from mpitrain.data import Source, Unopened
from mpitrain.errors import ConfigError
from mpitrain.layers.flat import Storage
from mpitrain.machine import process
from mpitrain.models.table import MODELS
from mpitrain.ops.device import Device
from mpitrain.optim import state_bytes
from mpitrain.parallel.grid import Axes, divisor
from mpitrain.parallel.mode import Sizes
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.tensor.layer_factory import described
from mpitrain.transport.base import Transport


def check_memory(
    transport: Transport,
    config: Config,
    source: Source | Unopened,
    axes: Axes,
    chunks: int,
    device: Device,
) -> None:
    """Raise ConfigError if parameters, gradients and optimizer state exceed the free memory.

    Activations are not counted.

    chunks  of the model, over all stages
    """
    ranks, where = transport.hosts.count(transport.hosts[transport.rank]), "on this host"
    if config.device.kind == "cuda":
        ranks, where = -(-ranks // process.gpus()), "on this GPU"
    shards = divisor(axes, transport.hosts, config.replication.shard)
    found, count = sizes(config, source, axes, chunks, device, shards)
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
    config: Config,
    source: Source | Unopened,
    axes: Axes,
    chunks: int,
    device: Device,
    shards: int,
) -> tuple[Sizes, int]:
    """Return the arguments of a mode's memory formula, and the number of parameters.

    They are extrapolated from networks of one and two layers, which are quick to describe.

    shards  ranks of ZeRO's sharding group
    """
    layers, model = described(device.ops, config.layout), MODELS[config.model.kind]

    def storage(depth: int) -> Storage:
        shallow = config.model.model_copy(update={"layers": depth})
        return Storage(model.build(layers, shallow, source), config.precision.stored, axes.dp)

    one, two = storage(1), storage(2)
    others = config.model.layers - 1
    length = one.length + others * (two.length - one.length)
    count = one.parameter_count + others * (two.parameter_count - one.parameter_count)
    spans = (two if others else one).spans
    largest = max((span.stop - span.start for span in spans), default=0)
    master = np.dtype(config.precision.stored).itemsize
    name = config.optimizer.name
    state = state_bytes(name, one) + others * (state_bytes(name, two) - state_bytes(name, one))
    half = device.half.itemsize if device.half else master
    return Sizes(
        config.replication,
        axes,
        shards,
        length / axes.pp,
        length / chunks if chunks > 1 else largest,
        master,
        half if config.precision.is_half else 0,
        state / length if length else 0,
    ), count
