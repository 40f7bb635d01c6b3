"""The table of all replication modes."""

from collections.abc import Callable
from functools import partial

from mpitrain.parallel.averaging.gossip import gossip
from mpitrain.parallel.averaging.local_sgd import local_sgd
from mpitrain.parallel.data.allreduce import all_reduce
from mpitrain.parallel.data.weight_stashing import pipedream, pipedream_2bw
from mpitrain.parallel.data.zero import STAGES, zero
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.parallel.servers.asynchronous import asynchronous
from mpitrain.parallel.servers.master import master
from mpitrain.parallel.servers.synchronous import synchronous


def server_or_worker(replica: ReplicationContext) -> Replication:
    """Return this rank's role in parameter-server training, a server or a worker; collective."""
    has_common_step = replica.config.replication.has_common_step
    return synchronous(replica) if has_common_step else asynchronous(replica)


MODES: dict[tuple[str, int], Callable[[ReplicationContext], Replication]] = {
    ("all-reduce", 0): all_reduce,
    ("all-reduce", 1): partial(zero, STAGES[1]),
    ("all-reduce", 2): partial(zero, STAGES[2]),
    ("all-reduce", 3): partial(zero, STAGES[3]),
    ("server", 0): server_or_worker,
    ("master", 0): master,
    ("local", 0): local_sgd,
    ("gossip", 0): gossip,
}
"""Constructors by (replication.mode, replication.zero). A new mode needs no more than a line here.
"""


STREAMS: dict[str, Callable[[ReplicationContext], Replication]] = {
    "async": pipedream,
    "async-2bw": pipedream_2bw,
}
"""Constructors by pipeline.schedule, for asynchronous pipelines. Their replicas use an all-reduce.
"""


def replication_for(replica: ReplicationContext) -> Replication:
    """Return the configured replication mode; collective."""
    settings, stream = replica.config.replication, STREAMS.get(replica.config.pipeline.schedule)
    return stream(replica) if stream else MODES[settings.mode, settings.zero](replica)
