"""Peers of `bench train`: other libraries that train the same network, and what they cannot train."""

import importlib
from types import ModuleType
from typing import Any

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.models.table import MODELS, kinds
from mpitrain.optim import RULES
from mpitrain.parallel.modes import MODES
from mpitrain.run.build import Job
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

TORCH = "mpitrain.tools.bench.training.torch_peer", "pip install torch==2.13.0"
PEERS = {"torch": (*TORCH, "TorchPeer"), "torch-compiled": (*TORCH, "CompiledPeer")}
"""{peer: (its module, the command that installs its packages, its class)}."""


def peer_class(name: str, config: Config, dp: int = 1) -> Any:
    """Return the class of a peer. No message is sent.

    name    a key of PEERS
    config  device.kind is resolved: not "auto"
    dp      number of replicas
    raises  ConfigError if the peer is not installed or does not support the configuration
    """
    if not MODES[config.replication.mode].stages:
        raise ConfigError(
            f"The peer has no servers, but replication.mode is {config.replication.mode}.",
            "Leave out --peer, or set replication.mode=all-reduce.",
        )
    if config.run.delay:
        raise ConfigError(
            f"The peer has no stragglers, but run.delay is {config.run.delay}.",
            "Leave out --peer, or leave run.delay empty.",
        )
    if config.layout.cp > 1:
        raise ConfigError(
            f"The peer has whole rows on each rank, but layout.cp is {config.layout.cp}.",
            "Leave out --peer, or set layout.cp=1.",
        )
    if config.data.attend != "window":
        raise ConfigError(
            f"The peer's attention sees whole rows, but data.attend is {config.data.attend}.",
            "Leave out --peer, or set data.attend=window.",
        )
    if config.model.kind == "llama" and config.layout.tp * config.layout.pp > 1:
        raise ConfigError(
            f"The peer has a whole Llama on each rank, but layout.tp is {config.layout.tp} and layout.pp {config.layout.pp}.",
            "Leave out --peer, or set both to 1.",
        )
    if config.layout.tp > 1 and (
        dp > 1 or config.layout.pp > 1 or config.replication.zero or config.layout.sequence_parallel
    ):
        raise ConfigError(
            f"The peer divides layers among all ranks, without ZeRO and sequence parallelism, if layout.tp is "
            f"{config.layout.tp}.",
            "Leave out --peer, or set layout.dp=1, layout.pp=1, replication.zero=0 and "
            "layout.sequence_parallel=false.",
        )
    if config.layout.tp > 1 and (config.model.dropout or config.model.attention_dropout):
        raise ConfigError(
            f"The peer has no dropout with layout.tp above 1, but model.dropout is {config.model.dropout:g}, "
            f"model.attention_dropout {config.model.attention_dropout:g}, and layout.tp {config.layout.tp}.",
            "Leave out --peer, or set both rates to 0.",
        )
    stages, micro_batches = config.layout.pp, config.batch.micro_batches
    peers = {name: rule.torch.name for name, rule in RULES.items() if rule.torch}
    models = " or ".join(kinds(lambda row: row.has_peer))
    if (
        not MODELS[config.model.kind].has_peer
        or config.optimizer.name not in peers
        or (micro_batches > 1 and stages == 1)
    ):
        raise ConfigError(
            f"The peer trains a {models} with {' or '.join(peers.values())} in one micro-batch.",
            f"Leave out --peer, or set model.kind={models}, "
            f"optimizer.name={' or '.join(peers)} and batch.micro_batches=1.",
        )
    if stages > 1 and (
        config.pipeline.schedule not in ("gpipe", "1f1b")
        or config.model.tied
        or config.replication.zero
        or (micro_batches and config.batch.size % micro_batches)
        or dp > 1
    ):
        raise ConfigError(
            "The peer trains stages by gpipe or 1f1b, untied, without ZeRO, in micro-batches of one size, as one "
            "replica.",
            "Leave out --peer, or set pipeline.schedule=1f1b, model.tied=false, replication.zero=0, layout.dp=1, and "
            "batch.micro_batches to a divisor of batch.size.",
        )
    if config.model.freeze:
        raise ConfigError(
            f"The peer trains all parameters, but model.freeze is {config.model.freeze}.",
            "Leave out --peer, or leave model.freeze empty.",
        )
    if config.lora.rank:
        raise ConfigError(
            f"The peer trains all parameters, but lora.rank is {config.lora.rank}.",
            "Leave out --peer, or set lora.rank to 0.",
        )
    if config.optimizer.groups:
        raise ConfigError(
            "The peer decays matrices alone, but optimizer.groups has groups of its own.",
            "Leave out --peer, or leave optimizer.groups empty.",
        )
    if config.precision.compute != "float32" or config.optimizer.clip:
        raise ConfigError(
            "The peer computes in float32 and does not clip.",
            "Leave out --peer, or set precision.compute=float32 and optimizer.clip=0.",
        )
    module = imported(name)
    if config.model.kind == "llama":
        _imported(name, "mpitrain.tools.bench.hugging_face", "pip install transformers")
    module.placed(config.device.kind)
    peer = getattr(module, PEERS[name][2])
    peer.check(config)
    return peer


def peer_of(transport: Transport, job: Job, name: str, backend: str) -> Any:
    """Build a peer with the weights of a job, as a side of the comparison. Collective.

    backend  of PyTorch, for its messages
    raises  ConfigError on every rank, as `peer_class`
    """
    trainer = job.trainer
    dp = trainer.grid.axes.dp
    peer = on_all_ranks(transport, lambda: peer_class(name, trainer.config, dp))
    return peer(transport, trainer.config, job.source.inputs, trainer.tensors(), backend)


def imported(name: str) -> ModuleType:
    """Import the module of a peer; ConfigError if a package that it needs is not installed."""
    return _imported(name, *PEERS[name][:2])


def _imported(name: str, module: str, way_in: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The peer {name} needs the module {error.name}, which is not installed.",
            f"Install it with `{way_in}`, or leave out --peer.",
        ) from None
