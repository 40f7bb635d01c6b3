"""The table of topics: a row for each."""

from mpitrain.tables import Table
from mpitrain.tools.textbook.explain.explanation import Text, sentence
from mpitrain.tools.textbook.explain.recorders import (
    async_servers,
    collectives,
    loss_scaling,
    pipelines,
    recomputation,
    replication,
    tensors,
    tiling,
)
from mpitrain.tools.textbook.explain.recorders.modes import MODES
from mpitrain.tools.textbook.explain.recorders.schedules import SCHEDULES
from mpitrain.tools.textbook.explain.topic import Topic

TOPICS: Table[str, Topic] = Table()
"""{name: topic}, in the order of a lecture."""


def _collective(name: str, shown: collectives.Shown, title: Text) -> None:
    TOPICS[name] = Topic(title, collectives.recorder(shown, title), timed=True)


_collective("ring", collectives.RING, sentence("Ring all-reduce: the sum of all ranks, in chunks"))
_collective("star", collectives.STAR, sentence("Star all-reduce: rank 0 adds everything"))
for _name, (_title, _shown) in MODES.items():
    TOPICS[_name] = Topic(
        _title,
        replication.recorder(_shown, _title),
        ranks=3 if _shown.servers else 2 if _shown.is_split else 4,
        least=2 if _shown.servers or _name == "gossip" else 1,
        timed=True,
    )
for _name, _layer, _title in (
    ("column", tensors.COLUMN, sentence("Column-parallel linear layer: outputs are divided")),
    ("row", tensors.ROW, sentence("Row-parallel linear layer: inputs are divided")),
):
    TOPICS[_name] = Topic(_title, tensors.recorder(_layer, _title), ranks=2, most=4)

for _name, (_title, _schedule) in SCHEDULES.items():
    TOPICS[_name] = Topic(_title, pipelines.recorder(_schedule, _title), ranks=3, most=4)

_ASYNC = sentence("Parameter server, asynchronous: gradients are applied as they come")
TOPICS["async-server"] = Topic(_ASYNC, async_servers.recorder(_ASYNC), ranks=3, least=2, most=6)
TOPICS["recomputation"] = Topic(recomputation.TITLE, recomputation.record, ranks=1, most=1)
TOPICS["loss-scaling"] = Topic(loss_scaling.TITLE, loss_scaling.record, ranks=1, most=1)
TOPICS["tiling"] = Topic(tiling.TITLE, tiling.record, ranks=1, most=1, compiled=True)
