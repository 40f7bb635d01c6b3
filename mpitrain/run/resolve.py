"""What a configuration means here: names that other rooms know, and device.kind settled in the same way on every rank."""

import sys

from mpitrain.collectives.algorithms import all_reduce_choices
from mpitrain.config import Config, check_choice, parse
from mpitrain.machine import process
from mpitrain.machine.backend import backend_for
from mpitrain.transport.agreed import agreed
from mpitrain.transport.base import Transport


def choices() -> dict[str, tuple[str, ...]]:
    """{key: what it may be}, of the keys whose values are names in a table that the configuration does not know."""
    return {"replication.algorithm": all_reduce_choices()}


def check_names(config: Config) -> None:
    """ConfigError for a name that is in no table."""
    for key, known in choices().items():
        check_choice(key, config.flat()[key], known)


def settled(transport: Transport, config: Config) -> Config:
    """The configuration with `auto` replaced: cuda if every rank finds a GPU, else cpu; collective.

    raises  ConfigError on every rank if the kind needs what one of them lacks, or cannot do what is configured
    """
    kind = config.device.kind
    if kind == "auto":
        kind = "cuda" if all(transport.gather_text(process.gpus() > 0)) else "cpu"
    agreed(transport, lambda: backend_for(kind))
    if kind == "cuda":
        _say_who_shares(transport)
    chosen = config.model_copy(update={"device": config.device.model_copy(update={"kind": kind})})
    return agreed(transport, lambda: parse(chosen.model_dump()))    # what `auto` has become has laws of its own


def _say_who_shares(transport: Transport) -> None:
    """One line from rank 0 if a host has more ranks than GPUs. Collective."""
    found = dict(zip(transport.hosts, transport.gather_text(process.gpus()), strict=True))
    crowded = [f"{transport.hosts.count(host)} ranks on {host} share {gpus} GPU{'s' * (gpus > 1)}"
               for host, gpus in found.items() if transport.hosts.count(host) > gpus]
    if crowded and transport.rank == 0:
        print(f"warning: {'; '.join(crowded)}: they take turns, and each needs its own memory.", file=sys.stderr, flush=True)
