"""What `mpitrain compare` measures of modes, on threads."""

import pytest

from mpitrain.bench.compare import compare, jobs
from mpitrain.bench.formulas import FORMULAS
from mpitrain.transport.threads import run_ranks
from tests.training import TINY

APART = ("local", "gossip", "server-async", "server-bounded")
"""Modes that have a curve of their own."""


def measured(words, hosts, *settings):
    found = jobs(words, [*TINY, "run.eval_rows=4", "precision.compute=float64", *settings], hosts)
    return run_ranks(len(hosts), lambda transport: [*compare(transport, found, lambda mode, loss: None)], hosts=hosts)[0]


@pytest.mark.slow
@pytest.mark.parametrize("hosts, parts", [("aa", 1), ("abc", 2), ("abab", 1), ("aaaaa", 1)])
def test_the_busiest_rank_sends_what_the_formula_says(hosts, parts):
    rows = measured([word for word in FORMULAS if word not in ("shared", *APART)], hosts, "run.steps=2",
                    f"batch.micro_batches={parts}")
    for each in rows:
        assert max(each.sent_bytes) == each.formula_bytes, each.mode
        assert all(abs(one - other) <= 1e-9 for (_, one), (_, other) in zip(each.curve, rows[0].curve, strict=True))
        assert abs(each.val_loss - rows[0].val_loss) <= 1e-9


@pytest.mark.parametrize("hosts, servers", [("aa", 1), ("abab", 2), ("aaaaa", 1)])
def test_so_it_does_where_workers_are_apart_or_late_pauses_and_several_servers_included(hosts, servers):
    rows = measured([*APART, "server-sync"], hosts, "run.steps=5", "replication.period=2", "checkpoint.every=2",
                    f"replication.servers={servers}", "replication.staleness=1")
    for each in rows:
        if each.mode == "server-async" and servers > 1:
            assert each.formula_bytes is None, "which worker draws most tickets is not known before"
        else:
            assert max(each.sent_bytes) == each.formula_bytes, each.mode
        assert each.lead <= 1 or each.mode == "server-async"
