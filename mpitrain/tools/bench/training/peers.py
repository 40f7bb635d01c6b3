"""Peers of `compare`: other libraries that train the same network, and what they cannot train."""

import importlib
from types import ModuleType
from typing import Any

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.models.table import kinds
from mpitrain.optim import RULES
from mpitrain.run.job import Job
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

TORCH = "mpitrain.tools.bench.training.torch_peer", "pip install torch==2.13.0"
PEERS = {"torch": (*TORCH, "TorchPeer"), "torch-compiled": (*TORCH, "CompiledPeer")}
"""{peer: (its module, the command that installs its packages, its class)}."""
SAME = {
    "run.delay": "",
    "layout.cp": 1,
    "data.attend": "window",
    "model.window": 0,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.freeze": [],
    "lora.rank": 0,
    "optimizer.groups": [],
    "optimizer.clip": 0.0,
    "precision.compute": "float32",
}
"""{key: its value in every job that a peer can train}."""
SAME_IN_TP = {"layout.pp": 1, "layout.sequence_parallel": False, "replication.zero": 0}
"""{key: its value in every tensor-parallel job that a peer can train}."""


def peer_class(name: str, config: Config, dp: int = 1) -> Any:
    """Return the class of a peer. No message is sent.

    name    a key of PEERS
    config  device.kind is resolved: not "auto"
    dp      number of replicas
    raises  ConfigError if the peer is not installed or does not support the configuration
    """
    values = config.flat()
    rules = {rule: row.torch.name for rule, row in RULES.items() if row.torch}
    wanted = [
        ("replication.mode", ["all-reduce"]),
        ("replication.zero", (0, 3)),
        ("model.kind", kinds(lambda row: row.has_peer)),
        ("optimizer.name", rules),
        *((key, [value]) for key, value in SAME.items()),
    ]
    stages, micro_batches = config.layout.pp, config.batch.micro_batches
    if config.layout.tp > 1:
        wanted += [(key, [value]) for key, value in SAME_IN_TP.items()]
    if stages > 1:
        wanted += [("pipeline.schedule", ("1f1b", "gpipe")), ("model.tied", [False])]
        wanted += [("replication.zero", [0])]
    else:
        wanted += [("batch.micro_batches", (0, 1))]
    if config.model.kind == "llama":
        wanted += [("layout.tp", [1]), ("layout.pp", [1])]
        wanted += [("model.qk_norm", [False]), ("model.head_dim", [0])]
        wanted += [("model.activation", ["silu"]), ("model.scaled_embedding", [False])]
        wanted += [("model.score_scale", [0]), ("model.score_cap", [0]), ("model.nope_every", [0])]
        wanted += [("model.pre_norm", [True]), ("model.post_norm", [False])]
    for key, allowed in wanted:
        if values[key] not in allowed:
            raise _refusal(f"{key} {' or '.join(map(str, allowed))}", key, values[key])
    if dp > 1 and (stages > 1 or config.layout.tp > 1):
        raise _refusal("one replica of stages or of divided layers", "layout.dp", dp)
    if stages > 1 and micro_batches and config.batch.size % micro_batches:
        raise _refusal("micro-batches of one size", "batch.micro_batches", micro_batches)
    module = imported(name)
    if config.model.kind == "llama":
        _imported(name, "mpitrain.tools.bench.hugging_face", "pip install transformers")
    module.placed(config.device.kind)
    peer = getattr(module, PEERS[name][2])
    peer.check(config)
    return peer


def _refusal(supported: str, key: str, value: Any) -> ConfigError:
    return ConfigError(
        f"The peer trains with {supported}, but {key} is {value}.",
        f"Leave out --peer, or change {key}.",
    )


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
