"""TOPICS: the table of all topics."""

from mpitrain.tables import Table
from mpitrain.tools.textbook.explain import (
    async_servers,
    collectives,
    experts,
    memory,
    pipelines,
    replication,
    tensors,
    tiling,
)
from mpitrain.tools.textbook.explain.explanation import Topic

PARTS = {
    "messages": ("star", "ring"),
    "data parallelism": ("master", "ddp", "accumulation"),
    "sharded layers": ("column", "row", "column-alone", "row-alone", "ring-attention", "moe"),
    "pipelines": ("gpipe", "1f1b", "1f1b-cut", "zero-bubble", "async"),
    "memory": ("zero1", "zero2", "zero3", "recomputation", "loss-scaling"),
    "servers and staleness": ("server", "async-server", "local", "gossip"),
    "kernels": ("tiling",),
}
"""{part of a lecture: its topics}; the first six are the lessons of jobs/lessons."""

_ROWS = (
    collectives.TOPICS
    | replication.TOPICS
    | tensors.TOPICS
    | experts.TOPICS
    | pipelines.TOPICS
    | async_servers.TOPICS
    | memory.TOPICS
    | tiling.TOPICS
)
TOPICS: Table[str, Topic] = Table({name: _ROWS[name] for part in PARTS.values() for name in part})
"""{name: topic}, in the order of a lecture. A new topic needs a row in a file here, its name in PARTS,
and the Korean of its texts.
"""
