"""The one function that makes everything of a run that is bound to a transport. Recovery is calling it again."""

from pathlib import Path
from typing import NamedTuple

from mpitrain import checkpoint
from mpitrain.collectives.cost import DEFAULT
from mpitrain.collectives.tuning import read_tuning
from mpitrain.collectives.wire import parse_wire
from mpitrain.config import Config
from mpitrain.data import Source, open_source
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit
from mpitrain.layers.plain import Plain
from mpitrain.models.gpt import gpt
from mpitrain.models.mlp import mlp
from mpitrain.ops import ops_for
from mpitrain.placement import settled
from mpitrain.topology import topology
from mpitrain.trainer import Trainer
from mpitrain.transport.agree import agreed
from mpitrain.transport.base import Transport


class Job(NamedTuple):
    """A model ready to train or to be asked, its data, and the optimizer steps it has behind it."""

    trainer: Trainer
    source: Source
    step: int


def build(transport: Transport, config: Config, saved: Path | None = None) -> Job:
    """Build a run from its configuration and, if given, from a checkpoint directory; collective.

    raises  MpitrainError with `agreed` set, on every rank, for whatever a user can mend
    """
    agreed(transport, lambda: topology(config, transport.size))
    config = settled(transport, config)
    source = agreed(transport, lambda: _source(config))
    found = agreed(transport, lambda: checkpoint.read(saved, transport.rank, transport.size)) if saved else None
    agreed(transport, lambda: parse_wire(config.replication.wire))
    file = config.replication.tuning
    tuning = agreed(transport, lambda: read_tuning(Path(file)) if file else DEFAULT)
    trainer = Trainer(transport, model(config, source), config, tuning)
    if found is None:
        return Job(trainer, source, 0)
    agreed(transport, lambda: checkpoint.load(found, trainer))
    return Job(trainer, source, found.step)


def model(config: Config, source: Source) -> list[Unit]:
    """The configured network for this source's inputs and classes."""
    layers, m = Plain(ops_for(config.device.kind)), config.model
    if m.kind == "gpt":
        return gpt(layers, vocab=source.inputs, context=m.context, width=m.width, heads=m.heads, depth=m.layers,
                   tied=m.tied)
    return mlp(layers, features=source.inputs, hidden=[m.width] * m.layers, classes=source.classes)


def _source(config: Config) -> Source:
    source = open_source(config.data.source, config.model.context, config.precision.compute)
    if source.model != config.model.kind:
        raise ConfigError(
            f"The model.kind for {config.data.source} is {source.model}, but the configuration says {config.model.kind}.",
            f"Add --set model.kind={source.model}, or choose another data.source.",
        )
    return source
