"""The table of all replication modes."""

from collections.abc import Callable

from mpitrain.parallel.averaging.gossip import Gossip
from mpitrain.parallel.averaging.local_sgd import LocalSGD
from mpitrain.parallel.data.allreduce import AllReduce
from mpitrain.parallel.data.weight_stashing import PipeDream, PipeDream2BW
from mpitrain.parallel.data.zero import ZeroOne, ZeroTwo
from mpitrain.parallel.data.zero_three import ZeroThree
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.parallel.servers.asynchronous import AsyncServer, AsyncWorker
from mpitrain.parallel.servers.master import Master
from mpitrain.parallel.servers.synchronous import Server, Worker


def server_or_worker(replica: ReplicationContext) -> Replication:
    """Return this rank's role in parameter-server training, a server or a worker; collective."""
    settings, is_server = replica.config.replication, replica.grid.is_server
    if settings.has_common_step:
        return Server(replica) if is_server else Worker(replica)
    return AsyncServer(replica) if is_server else AsyncWorker(replica)


MODES: dict[tuple[str, int], Callable[[ReplicationContext], Replication]] = {
    ("all-reduce", 0): AllReduce,
    ("all-reduce", 1): ZeroOne,
    ("all-reduce", 2): ZeroTwo,
    ("all-reduce", 3): ZeroThree,
    ("server", 0): server_or_worker,
    ("master", 0): Master,
    ("local", 0): LocalSGD,
    ("gossip", 0): Gossip,
}
"""Constructors by (replication.mode, replication.zero). A new mode needs no more than a line here.
"""


STREAMS: dict[str, Callable[[ReplicationContext], Replication]] = {
    "async": PipeDream,
    "async-2bw": PipeDream2BW,
}
"""Constructors by pipeline.schedule, for asynchronous pipelines. Their replicas use an all-reduce.
"""


def replication_for(replica: ReplicationContext) -> Replication:
    """Return the configured replication mode; collective."""
    settings, stream = replica.config.replication, STREAMS.get(replica.config.pipeline.schedule)
    return stream(replica) if stream else MODES[settings.mode, settings.zero](replica)
