"""Every way of keeping replicas in step that there is."""

from collections.abc import Callable

from mpitrain.parallel.allreduce import AllReduce
from mpitrain.parallel.asynchronous import LateServer, LateWorker
from mpitrain.parallel.gossip import Gossip
from mpitrain.parallel.local import Local
from mpitrain.parallel.master import Master
from mpitrain.parallel.replicate import Replica, Replication
from mpitrain.parallel.server import Server, Worker
from mpitrain.parallel.stashed import EachMicroBatch, EachStep
from mpitrain.parallel.zero import ZeroOne, ZeroTwo
from mpitrain.parallel.zero_three import ZeroThree


def server_or_worker(replica: Replica) -> Replication:
    """What this rank is of parameter servers; collective."""
    settings, is_server = replica.config.replication, replica.grid.is_server
    if settings.has_common_step:
        return Server(replica) if is_server else Worker(replica)
    return LateServer(replica) if is_server else LateWorker(replica)


MODES: dict[tuple[str, int], Callable[[Replica], Replication]] = {
    ("all-reduce", 0): AllReduce,
    ("all-reduce", 1): ZeroOne,
    ("all-reduce", 2): ZeroTwo,
    ("all-reduce", 3): ZeroThree,
    ("server", 0): server_or_worker,
    ("master", 0): Master,
    ("local", 0): Local,
    ("gossip", 0): Gossip,
}
"""By replication.mode and replication.zero. A line here is all it takes for the trainer to know a mode."""


STREAMS: dict[str, Callable[[Replica], Replication]] = {"async": EachMicroBatch, "async-2bw": EachStep}
"""By pipeline.schedule, where stages update by themselves; they reduce as all-reduce does."""


def replication_for(replica: Replica) -> Replication:
    """The configured mode; collective."""
    settings, stream = replica.config.replication, STREAMS.get(replica.config.pipeline.schedule)
    return stream(replica) if stream else MODES[settings.mode, settings.zero](replica)
