"""TOPICS: the table of all topics."""

from mpitrain.tables import Table
from mpitrain.tools.textbook.explain import (
    async_servers,
    collectives,
    memory,
    pipelines,
    replication,
    tensors,
    tiling,
)
from mpitrain.tools.textbook.explain.explanation import Topic

TOPICS: Table[str, Topic] = Table(
    {
        **collectives.TOPICS,
        **replication.TOPICS,
        **tensors.TOPICS,
        **pipelines.TOPICS,
        **async_servers.TOPICS,
        **memory.TOPICS,
        **tiling.TOPICS,
    }
)
"""{name: topic}, in the order of a lecture. A new topic needs a row in a file here, and the Korean of
its texts.
"""
