"""The one function that makes everything of a run that is bound to a transport. Recovery is calling it again."""

from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np

from mpitrain.collectives.tuning import DEFAULT, read_tuning
from mpitrain.collectives.wire import parse_wire
from mpitrain.config import KEPT_ON_HOST, Config
from mpitrain.data import Scan, Source, Unopened, as_it_is, has_tokens, largest_token, open_source
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit
from mpitrain.layers.flat import Storage
from mpitrain.layers.plain import Plain
from mpitrain.machine import process
from mpitrain.models.gpt import gpt
from mpitrain.models.mlp import mlp
from mpitrain.ops import ops_for
from mpitrain.optim import STATE
from mpitrain.parallel.grid import topology
from mpitrain.run import checkpoint
from mpitrain.run.checkpoint import Checkpoint, Done
from mpitrain.run.resolve import check_names, settled
from mpitrain.run.trainer import Trainer
from mpitrain.transport.agreed import agreed, check_same
from mpitrain.transport.base import Transport


class Job(NamedTuple):
    """A model ready to train or to be asked, its data, and what it has behind it."""

    trainer: Trainer
    source: Source | Unopened
    done: Done

    @property
    def data(self) -> Source:
        """The source of a job that was built with its data."""
        assert not isinstance(self.source, Unopened)
        return self.source

    @property
    def step(self) -> int:
        """The optimizer steps behind it."""
        return self.done.step


def build(transport: Transport, config: Config, saved: Path | None = None, source: Source | Unopened | None = None,
          noted: Scan | None = None) -> Job:
    """Build a run from its configuration and, if given, from a checkpoint directory; collective.

    source  what stands in for the configured data source, which is then not opened
    noted   an earlier scan of the tokens, on rank 0: they are scanned again if their file is another or has changed since
    raises  MpitrainError with `agreed` set, on every rank, for whatever a user can mend
    """
    agreed(transport, lambda: check_names(config))
    agreed(transport, lambda: topology(config, transport.size))
    config = settled(transport, config)
    source = source or _opened(transport, config, noted)
    agreed(transport, lambda: parse_wire(config.replication.wire))
    file = config.replication.tuning
    tuning = agreed(transport, lambda: read_tuning(Path(file)) if file else DEFAULT)
    agreed(transport, lambda: _check_memory(transport, config, source))
    units = agreed(transport, lambda: model(config, source))
    found = _read(transport, saved, config) if saved else None
    done = found.done if found else Done(0, 0, transport.gather_text(uuid4().hex)[0])
    check_same(transport, "data source and checkpoint", {
        "inputs": source.inputs, "classes": source.classes, "held_out": source.held_out, **done._asdict(),
    })
    trainer = Trainer(transport, units, config, tuning)
    if found:
        agreed(transport, lambda: checkpoint.load(found, trainer))
    return Job(trainer, source, done)


def _read(transport: Transport, saved: Path, config: Config) -> Checkpoint:
    """The checkpoint, with residuals if the wire format keeps any; collective."""
    read = partial(checkpoint.with_residuals, rank=transport.rank, ranks=transport.size)
    return checkpoint.read_beside(transport, saved, read if config.replication.wire.startswith(KEPT_ON_HOST) else checkpoint.read)


def _check_memory(transport: Transport, config: Config, source: Source | Unopened) -> None:
    """Refuse a model whose parameters, gradients and optimizer state alone are more than is free here; before it is built."""
    length, count = _size(config, source)
    ranks, where = transport.hosts.count(transport.hosts[transport.rank]), "on this host"
    if config.device.kind == "cuda":
        ranks, where = -(-ranks // process.gpus()), "on this GPU"
    needed = ranks * length * np.dtype(config.precision.compute).itemsize * (2 + len(STATE[config.optimizer.name]))
    free = process.free_memory(config.device.kind)
    if needed > free:
        raise ConfigError(
            f"{count:,} parameters with gradients and optimizer state of {ranks} rank(s) need {needed / 1e9:,.1f} GB {where}, "
            f"but {free / 1e9:,.1f} GB are free.",
            "Lower model.width or model.layers, or start fewer ranks per host.",
        )


def _size(config: Config, source: Source | Unopened) -> tuple[int, int]:
    """Elements of a flat buffer, and parameters, of the configured network: those of one layer and as much again per other."""
    def size(layers: int) -> tuple[int, int]:
        shallow = config.model.model_copy(update={"layers": layers})
        storage = Storage(model(config.model_copy(update={"model": shallow}), source), config.precision.compute)
        return storage.length, storage.parameter_count

    (length, count), (length_of_two, count_of_two) = size(1), size(2)
    others = config.model.layers - 1
    return length + others * (length_of_two - length), count + others * (count_of_two - count)


def model(config: Config, source: Source | Unopened) -> list[Unit]:
    """The configured network for this source's inputs and classes."""
    layers, m = Plain(ops_for(config.device.kind, config.device.gemm, config.device.tiles)), config.model
    if m.kind == "gpt":
        return gpt(layers, vocab=source.inputs, context=m.context, width=m.width, heads=m.heads, depth=m.layers,
                   tied=m.tied)
    return mlp(layers, features=source.inputs, hidden=[m.width] * m.layers, classes=source.classes)


def _opened(transport: Transport, config: Config, noted: Scan | None) -> Source:
    """The data source. Tokens that were not scanned before are by all ranks together, each an equal part; collective."""
    name = config.data.source
    if not has_tokens(name):
        return agreed(transport, lambda: _source(config, None))
    now = agreed(transport, lambda: as_it_is(name))
    largest = noted.largest if noted and noted == now._replace(largest=noted.largest) else None
    largest = transport.gather_text(largest)[0]
    if largest is None:
        mine = agreed(transport, lambda: largest_token(name, transport.rank, transport.size))
        largest = max(transport.gather_text(mine))
    return agreed(transport, lambda: _source(config, now._replace(largest=largest)))


def _source(config: Config, scan: Scan | None) -> Source:
    source = open_source(config.data.source, config.model.context, config.precision.compute, config.data.vocabulary, scan)
    if source.model != config.model.kind:
        raise ConfigError(
            f"The model.kind for {config.data.source} is {source.model}, but the configuration says {config.model.kind}.",
            f"Train with --set model.kind={source.model}, or choose another data source.",
        )
    return source
