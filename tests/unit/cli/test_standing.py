"""The rank that stood still in a start, as `launch` reads it from the traces of this host's ranks."""

import pytest

from mpitrain.trace.blame import standing
from mpitrain.trace.recorder import CONNECTING, PAUSE, Recorder

STALL = 4.0
PAUSES, WAITS = "pauses", "waits"


@pytest.mark.parametrize(
    ("last", "ranks", "blamed"),
    [
        ({0: (WAITS, 1.0), 1: (PAUSES, 1.1), 2: (WAITS, 1.2)}, 3, "rank 1 on "),
        ({0: (WAITS, 1.0), 1: (WAITS, 6.0), 2: (WAITS, 1.2)}, 3, "rank 1 on "),
        ({0: (CONNECTING, 1.0), 2: (CONNECTING, 1.2)}, 3, "rank 1 on "),
        ({0: (CONNECTING, 1.0), 2: (CONNECTING, 1.2)}, 6, "rank 1 more on "),
        ({0: (PAUSES, 1.0)}, 1, "rank 0 on "),
        ({0: (CONNECTING, 1.0), 1: (CONNECTING, 2.0), 2: (CONNECTING, 1.2)}, 3, ""),
        ({0: (WAITS, 1.0), 1: (WAITS, 2.0), 2: (WAITS, 1.2)}, 3, ""),
        ({0: (PAUSES, 1.0), 1: (PAUSES, 2.0), 2: (WAITS, 1.2)}, 3, ""),
        ({}, 3, ""),
    ],
)
def test_a_rank_is_named_only_where_the_traces_of_its_host_prove_it(last, ranks, blamed, tmp_path):
    for rank, (action, at) in last.items():
        recorder = Recorder(clock=lambda at=at: at)
        recorder.facts(rank=rank, ranks=ranks, local_ranks=min(ranks, 3), host="vm")
        recorder.keep(tmp_path / f"rank-{rank:05d}")
        if action == WAITS:
            recorder.wait(recorder.name("words of all ranks", range(ranks)))
        else:
            recorder.begin(PAUSE, recorder.name(action))
    found = standing(tmp_path, STALL)
    assert found.startswith(blamed) and bool(found) == bool(blamed), found
