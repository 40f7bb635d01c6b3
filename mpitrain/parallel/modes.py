"""The tables of replication modes, ZeRO stages and asynchronous pipelines."""

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.parallel.async_servers import AsyncWorker
from mpitrain.parallel.averaging import Gossip, LocalSGD
from mpitrain.parallel.grid import Grid
from mpitrain.parallel.master import Master
from mpitrain.parallel.mode import first, of_zero
from mpitrain.parallel.replica import Replica
from mpitrain.parallel.weight_stashing import PipeDream, PipeDream2BW
from mpitrain.parallel.zero import Zero1, Zero2, Zero3
from mpitrain.tables import Table

ZERO: Table[int, type[Replica]] = Table({1: Zero1, 2: Zero2, 3: Zero3})
"""{replication.zero: class}: the ZeRO stages, which only mode all-reduce supports."""

MODES: Table[str, type[Replica]] = Table(
    {
        "all-reduce": Replica,
        "master": Master,
        "server": AsyncWorker,
        "local": LocalSGD,
        "gossip": Gossip,
    }
)
"""{replication.mode: class}"""

STREAMS: Table[str, type[Replica]] = Table({"async": PipeDream, "async-2bw": PipeDream2BW})
"""{pipeline.schedule: class}, for asynchronous pipelines. Their replicas use an all-reduce."""


def mode_of(config: Config) -> type[Replica]:
    """Return the class of a configuration's mode, whose attributes describe the mode."""
    if config.pipeline.schedule in STREAMS:
        return STREAMS[config.pipeline.schedule]
    mode = MODES[config.replication.mode]
    return ZERO.get(config.replication.zero, mode) if mode is Replica else mode


def class_of(config: Config, grid: Grid) -> type[Replica]:
    """Return the class of this rank's replica."""
    return mode_of(config).of_rank(grid.is_server, config.replication)


def refusal_of(config: Config) -> ConfigError | None:
    """Return the error about a key that the configured mode does not support, or None."""
    return first(of_zero, mode_of(config).refusal)(config)


def servers_of(config: Config) -> int:
    """Return the number of parameter servers, which are the last ranks and compute no rows."""
    return mode_of(config).servers(config.replication)


def is_synchronous(config: Config) -> bool:
    """Return whether the ranks take steps together, with one update of all."""
    mode, settings = mode_of(config), config.replication
    rare = settings.model_copy(update={"period": 2})
    is_stream = config.pipeline.schedule in STREAMS
    return not (is_stream or mode.records(settings) or mode.exchange(rare) > 1)


def check_synchronous(config: Config, reason: str) -> None:
    """Raise ConfigError for a mode or schedule whose ranks update by themselves.

    reason  a clause that says who needs steps of all ranks together, for the message
    """
    if not is_synchronous(config):
        schedule = config.pipeline.schedule
        key = "pipeline.schedule" if schedule in STREAMS else "replication.mode"
        raise ConfigError(
            f"{reason} steps that all ranks take together, but {key} is {config.flat()[key]}.",
            "Set pipeline.schedule=1f1b and replication.mode=all-reduce.",
        )
