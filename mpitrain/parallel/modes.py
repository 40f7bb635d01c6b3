"""The tables of replication modes, ZeRO stages and asynchronous pipelines."""

from mpitrain.config import Replication
from mpitrain.parallel.async_servers import AsyncWorker
from mpitrain.parallel.averaging import Gossip, LocalSGD
from mpitrain.parallel.master import Master
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


def mode_of(settings: Replication, schedule: str) -> type[Replica]:
    """Return the class of the mode of [replication] and pipeline.schedule; it describes the mode."""
    if schedule in STREAMS:
        return STREAMS[schedule]
    mode = MODES[settings.mode]
    return ZERO.get(settings.zero, mode) if mode is Replica else mode


def servers_of(settings: Replication, schedule: str) -> int:
    """Return the number of parameter servers, which are the last ranks and compute no rows."""
    return mode_of(settings, schedule).servers(settings)


def is_synchronous(settings: Replication, schedule: str) -> bool:
    """Return whether the ranks take steps together, with one update of all."""
    mode, rare = mode_of(settings, schedule), settings.model_copy(update={"period": 2})
    return not (schedule in STREAMS or mode.records(settings) or mode.exchange(rare) > 1)
