"""The one function that makes everything of a run that is bound to a transport. Recovery is calling it again."""

import os
from pathlib import Path
from typing import NamedTuple

from mpitrain import checkpoint
from mpitrain.collectives.tuning import DEFAULT, read_tuning
from mpitrain.collectives.wire import parse_wire
from mpitrain.config import Config
from mpitrain.data import Scan, Source, Unopened, as_it_is, has_tokens, largest_token, open_source
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit
from mpitrain.layers.plain import Plain
from mpitrain.models.gpt import gpt
from mpitrain.models.mlp import mlp
from mpitrain.ops import ops_for
from mpitrain.optim import STATE
from mpitrain.placement import settled
from mpitrain.topology import topology
from mpitrain.trainer import Trainer
from mpitrain.transport.agree import agreed, check_same
from mpitrain.transport.base import Transport
from mpitrain.units import Plan


class Job(NamedTuple):
    """A model ready to train or to be asked, its data, and the optimizer steps it has behind it."""

    trainer: Trainer
    source: Source | Unopened
    step: int


def build(transport: Transport, config: Config, saved: Path | None = None, source: Source | Unopened | None = None,
          noted: Scan | None = None) -> Job:
    """Build a run from its configuration and, if given, from a checkpoint directory; collective.

    source  what stands in for the configured data source, which is then not opened
    noted   an earlier scan of the tokens, on rank 0: they are scanned again if their file is another or has changed since
    raises  MpitrainError with `agreed` set, on every rank, for whatever a user can mend
    """
    agreed(transport, lambda: topology(config, transport.size))
    config = settled(transport, config)
    source = source or _opened(transport, config, noted)
    agreed(transport, lambda: parse_wire(config.replication.wire))
    file = config.replication.tuning
    tuning = agreed(transport, lambda: read_tuning(Path(file)) if file else DEFAULT)
    units = agreed(transport, lambda: model(config, source))
    agreed(transport, lambda: _check_memory(transport, units, config))
    found = agreed(transport, lambda: checkpoint.read(saved, transport.rank, transport.size)) if saved else None
    step = found.step if found else 0
    check_same(transport, "data source and checkpoint", {
        "inputs": source.inputs, "classes": source.classes, "held_out": source.held_out, "step": step,
    })
    trainer = Trainer(transport, units, config, tuning)
    if found:
        agreed(transport, lambda: checkpoint.load(found, trainer))
    return Job(trainer, source, step)


def _check_memory(transport: Transport, units: list[Unit], config: Config) -> None:
    """Refuse a model whose parameters, gradients and optimizer state alone are more than this host has."""
    plan = Plan(units, config.precision.compute)
    here = transport.hosts.count(transport.hosts[transport.rank])
    needed = here * plan.length * plan.dtype.itemsize * (2 + len(STATE[config.optimizer.name]))
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > has:
        raise ConfigError(
            f"{plan.parameter_count:,} parameters with gradients and optimizer state on {here} rank(s) of this host need "
            f"{needed / 1e9:,.0f} GB, but it has {has / 1e9:,.0f} GB.",
            "Lower model.width or model.layers, or start fewer ranks per host.",
        )


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
