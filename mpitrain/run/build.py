"""`build` makes a run from its configuration: data, trainer and state; recovery calls it again."""

from __future__ import annotations  # help() prints signatures as they are written here.

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.data import Source, Unopened, as_it_is, has_tokens, largest_token, open_source
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit
from mpitrain.layers.flat import Storage
from mpitrain.layers.plain import Plain
from mpitrain.machine import process
from mpitrain.models.gpt import gpt
from mpitrain.models.mlp import mlp
from mpitrain.optim import STATE
from mpitrain.parallel.averaging.local_sgd import has_outer
from mpitrain.parallel.grid import divisor
from mpitrain.parallel.tensor.layer_factory import described
from mpitrain.pipeline.partition import TIME
from mpitrain.pipeline.profile_units import by_time, unit_seconds
from mpitrain.run.checkpoint import save_load
from mpitrain.run.checkpoint.manifest import Done
from mpitrain.run.given import Given, agree_on
from mpitrain.run.resolve import Resolved, resolve, resolve_here
from mpitrain.run.trainer import Trainer
from mpitrain.transport.agreement import from_all_ranks, on_all_ranks
from mpitrain.transport.base import Transport


class Job(NamedTuple):
    """A run in memory: a model ready for training or inference, its data, and its progress.

    trainer  the trainer
    source   the data source, or its sizes alone
    done     the progress: steps and samples so far, and the identity of the run
    """

    trainer: Trainer
    source: Source | Unopened
    done: Done

    @property
    def data(self) -> Source:
        """The data source, of a job that was built with one."""
        assert not isinstance(self.source, Unopened)
        return self.source

    @property
    def step(self) -> int:
        """The number of optimizer steps so far."""
        return self.done.step

    def close(self) -> None:
        """Free the communicators and windows of the job; collective. Do not use it afterwards."""
        self.trainer.close()


def build(
    transport: Transport,
    config: Config | Given,
    saved: Path | None = None,
    source: Source | Unopened | None = None,
) -> Job:
    """Build a run from its configuration and, if given, from a checkpoint; collective.

    Parameters
    ----------
    transport : Transport
        The transport that connects all ranks.
    config : Config
        The configuration, from `parse`.
    saved : Path, optional
        A checkpoint directory to load: RUN/checkpoints/step-N.
    source : Source, optional
        A data source that replaces the configured one.

    Returns
    -------
    Job
        Its `trainer`, its data `source`, and its `step`, the number of steps so far.

    Raises
    ------
    MpitrainError
        On every rank, if configuration, data, checkpoint and ranks do not fit together.
    """
    given = config if isinstance(config, Given) else agree_on(transport, lambda: config)
    largest = None if source else _largest(transport, given)
    opened: list[Source | Unopened] = []

    def facts(resolved: Resolved) -> dict[str, Any]:
        opened.append(found := source or _source(resolved.config, largest))
        _check_memory(transport, resolved, found)
        return {"inputs": found.inputs, "classes": found.classes, "held_out": found.held_out}

    resolved = resolve(transport, given, facts)
    (source,) = opened
    checkpoint = saved or given.place.saved
    found = save_load.read_beside(transport, Path(checkpoint)) if checkpoint else None
    done = found.done if found else Done(0, 0, given.run)
    if resolved.config.pipeline.partition == TIME:
        resolved = _cut_by_time(transport, resolved, source)
    trainer = Trainer(transport, lambda layers: model(resolved.config, source, layers), resolved)
    if found:
        found = save_load.load(
            found,
            trainer.replication.kept(),
            trainer.storage,
            transport,
            trainer.backend,
            resolved.axes._asdict(),
        )
        trainer.replication.restore(found.manifest.scalars)
        done = found.done
    return Job(trainer, source, done)


def _check_memory(transport: Transport, resolved: Resolved, source: Source | Unopened) -> None:
    """Raise ConfigError if parameters, gradients and optimizer state exceed the free memory.

    It is called before the model is built; activations are not counted.
    """
    config = resolved.config
    length, count = _size(resolved, source)
    ranks, where = transport.hosts.count(transport.hosts[transport.rank]), "on this host"
    if config.device.kind == "cuda":
        ranks, where = -(-ranks // process.gpus()), "on this GPU"
    parts = divisor(resolved.axes, transport.hosts, config.replication.shard)
    elements = _held(resolved, length, parts) + _on_its_way(resolved, source, length)
    needed = ranks * np.dtype(config.precision.stored).itemsize * elements
    free = process.free_memory(config.device.kind)
    if needed > free:
        raise ConfigError(
            f"{count:,} parameters with gradients and optimizer state of {ranks} rank(s) need {needed / 1e9:,.1f} GB {where}, "
            f"but {free / 1e9:,.1f} GB are free.",
            "Lower model.width or model.layers"
            + (", or start fewer ranks per host." if ranks > 1 else "."),
        )


def _held(resolved: Resolved, length: float, parts: int) -> float:
    """Return the elements of parameters, gradients and optimizer state on a rank.

    If ranks hold different amounts, it is the mean over them.

    length  elements of the flat parameter buffer of all stages together
    parts   number of ranks that ZeRO shards over
    """
    settings, (dp, ranks) = resolved.config.replication, (resolved.axes.dp, resolved.axes.ranks)
    length, state = length / resolved.axes.pp, len(STATE[resolved.config.optimizer.name])
    # In half precision ZeRO shards the float32 parameters from stage 1 on. It shards the rounded
    # copy from stage 3 on.
    is_half = resolved.config.precision.is_half
    mirror = _of_mirror(resolved) if is_half and settings.zero < 3 else 0.0
    # The servers hold one replica together. Each worker holds one without optimizer state.
    if settings.mode == "server":
        # Synchronous servers receive the workers' gradients in a separate buffer.
        arriving = settings.has_common_step
        return ((2 + mirror) * dp + 2 + arriving + state) * length / ranks
    if settings.mode == "master":  # Rank 0 alone has optimizer state.
        return (2 + mirror + state / ranks) * length
    averages = {"local": 3 if has_outer(settings) else 1, "gossip": 1}.get(settings.mode, 0)
    copies = ((1 if is_half else 3, 1), (2, 1), (1, state))
    divided = sum(count / (parts if settings.zero >= stage else 1) for stage, count in copies)
    stages = resolved.axes.pp
    # Stashed versions of the weights, as the mean over the stages.
    stashed = {"async": (stages - 1) / 2, "async-2bw": 1}.get(resolved.config.pipeline.schedule, 0)
    return (averages + divided + mirror + stashed * (mirror or 1)) * length


def _of_mirror(resolved: Resolved) -> float:
    """Return the element size of the mirror, divided by that of the master parameters.

    The mirror is the half-precision copy with which layers compute; without one the result is 1.
    """
    half = resolved.device.half
    return half.itemsize / np.dtype(resolved.config.precision.stored).itemsize if half else 1.0


def _on_its_way(resolved: Resolved, source: Source | Unopened, length: float) -> float:
    """Estimate the elements of the unsharded buffers that ZeRO gathers to and reduces from.

    They hold at least the largest unit, or one of several model chunks.
    """
    config, parts = resolved.config, len(resolved.plan.place)
    kinds = (0, 0, 1, 1 + _of_mirror(resolved))[config.replication.zero]
    if parts > 1:
        return kinds * length / parts
    shallow = config.model.model_copy(update={"layers": min(2, config.model.layers)})
    layers = described(resolved.device.ops, resolved.config.layout)
    units = model(config.model_copy(update={"model": shallow}), source, layers) if kinds else []
    spans = Storage(units, config.precision.stored, resolved.axes.dp).spans
    return kinds * max((span.stop - span.start for span in spans), default=0)


def _size(resolved: Resolved, source: Source | Unopened) -> tuple[int, int]:
    """Return the flat buffer's elements and the number of parameters of the configured network.

    They are extrapolated from networks of one and two layers, which are quick to describe.
    """
    config, layers = resolved.config, described(resolved.device.ops, resolved.config.layout)

    def size(depth: int) -> tuple[int, int]:
        shallow = config.model.model_copy(update={"layers": depth})
        units = model(config.model_copy(update={"model": shallow}), source, layers)
        storage = Storage(units, config.precision.stored, resolved.axes.dp)
        return storage.length, storage.parameter_count

    (length, count), (length_of_two, count_of_two) = size(1), size(2)
    others = config.model.layers - 1
    return length + others * (length_of_two - length), count + others * (count_of_two - count)


def model(config: Config, source: Source | Unopened, layers: Plain) -> list[Unit]:
    """Make the units of the configured network for this data source, with a layer factory."""
    m = config.model
    if m.kind == "gpt":
        return gpt(
            layers,
            vocab=source.inputs,
            context=m.context,
            width=m.width,
            heads=m.heads,
            depth=m.layers,
            tied=m.tied,
        )
    return mlp(layers, features=source.inputs, hidden=[m.width] * m.layers, classes=source.classes)


def _cut_by_time(transport: Transport, resolved: Resolved, source: Source | Unopened) -> Resolved:
    """Return a copy with an explicit partition, the fastest by measured times; collective.

    All ranks measure the time of each unit, not tensor-parallel, for a micro-batch.
    """
    config, device, axes = resolved.config, resolved.device, resolved.axes
    backend, batch = device.backend, config.batch
    rows = max(1, batch.size // (axes.dp * batch.micro_batches))
    layers = described(device.ops, config.layout.model_copy(update={"tp": 1}))
    shape = (rows, config.model.context) if source.model == "gpt" else (rows, source.inputs)
    computed = device.half or config.precision.stored
    inputs = np.zeros(shape, np.int64 if source.model == "gpt" else computed)
    right = backend.from_host(
        np.zeros(math.prod(shape[:2]) if source.model == "gpt" else rows, np.int64)
    )
    arena = device.arena()

    def loss(logits: Any) -> Any:
        _, gradient = layers.loss().gradient(logits.reshape(len(right), -1), right, 1.0, arena)
        return gradient.reshape(logits.shape)

    transport.barrier()  # All ranks measure at the same time, as they compute in training.
    seconds = transport.gather_text(
        unit_seconds(
            model(config, source, layers),
            backend.from_host(inputs),
            loss,
            backend,
            arena,
            config.precision.stored,
            computed,
        )
    )
    stages = [axes.place(rank).pp for rank in range(axes.ranks)]
    counts = on_all_ranks(transport, lambda: by_time(seconds, stages, resolved.plan.place))
    pipeline = config.pipeline.model_copy(update={"partition": ",".join(map(str, counts))})
    return resolved._replace(config=config.model_copy(update={"pipeline": pipeline}))


def _largest(transport: Transport, given: Given) -> int | None:
    """Return the largest token of a token file; None for any other source; collective.

    A file without a valid scan is scanned by all ranks, each an equal slice.
    """
    name = given.config.data.source
    if not has_tokens(name) or given.place.largest is not None:
        return given.place.largest
    # A wrong configuration is refused before the scan.
    on_all_ranks(transport, lambda: resolve_here(given, transport.hosts))
    return max(
        from_all_ranks(transport, lambda: largest_token(name, transport.rank, transport.size))
    )


def _source(config: Config, largest: int | None) -> Source:
    """Open the data source.

    largest  the largest token of a token file; None for any other source
    """
    data = config.data
    source = open_source(
        data.source,
        config.model.context,
        config.precision.stored,
        data.vocabulary,
        None if largest is None else as_it_is(data.source)._replace(largest=largest),
        data.validation,
    )
    if source.model != config.model.kind:
        raise ConfigError(
            f"The model.kind for {config.data.source} is {source.model}, but the configuration says {config.model.kind}.",
            f"Train with --set model.kind={source.model}, or choose another data source.",
        )
    return source
