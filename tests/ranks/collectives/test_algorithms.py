"""A line in the table of all-reduces is all that auto, the cost model and benchmarks need; test_plugins.py trains with one."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.bench.collectives import request_of as request
from mpitrain.collectives.group import bind
from mpitrain.collectives.plans import ring
from mpitrain.collectives.plans.steps import relabel
from mpitrain.collectives.selection import table as algorithm_table
from mpitrain.collectives.selection.algorithm import Algorithm, Topology, of_plan
from mpitrain.collectives.selection.cost_model import candidates, choose, predict
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.config import parse
from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from mpitrain.tools.bench.collectives.sweep import Sweep, SweepRequest
from mpitrain.transport.threads import run_ranks
from tests.rows import replaced

NAME = "ring-backwards"


def backwards(rank, n, count):
    """A ring that goes the other way round: every rank sends to the one before."""
    return relabel(ring.all_reduce(n - 1 - rank, n, count), range(n - 1, -1, -1))


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setitem(algorithm_table.ALL_REDUCE, NAME, of_plan(backwards))


@pytest.mark.parametrize("hosts", [("a",) * 4, ("a", "b", "c"), ("a", "a", "b")])
def test_an_added_algorithm_is_predicted_and_a_candidate_of_auto(hosts, added, monkeypatch):
    for count in (12, 3 << 18):  # in chunks of one length
        one, other = (
            predict(DEFAULT, "allreduce", name, hosts, count, 4) for name in ("ring", NAME)
        )
        assert one == pytest.approx(other, rel=1e-9) and one > 0
    assert NAME in candidates(Topology(hosts))
    star = algorithm_table.ALL_REDUCE["star"]  # which is no rival
    with ExitStack() as others:
        for name in set(algorithm_table.ALL_REDUCE) - {NAME}:
            others.enter_context(replaced(algorithm_table.ALL_REDUCE, name, star))
        assert choose(DEFAULT, Topology(hosts), 100, 4) == NAME


def test_an_added_algorithm_is_a_row_of_the_benchmark(added):
    asked = SweepRequest("allreduce", (), [1 << 10], np.dtype("float32"), 1, 1, ("plain",), 1)
    rows = run_ranks(2, lambda transport: list(Sweep(transport, asked, DEFAULT)))[0]
    assert [row.algorithm for row in rows] == [*algorithm_table.ALL_REDUCE, "auto"]
    row = next(row for row in rows if row.algorithm == NAME)
    assert (row.wrong, row.chosen) == (0, NAME) and row.predicted_us > 0
    with pytest.raises(ConfigError, match=f"must be one of ring, .*{NAME}, auto, .*but"):
        request("allreduce", {"algorithm": "rign"})


def test_what_was_bound_says_what_it_became(monkeypatch):
    def became(transport, algorithm):
        return bind(transport, np.ones(1000, "float32"), algorithm=algorithm).algorithm

    assert run_ranks(2, became, "star") == ["star"] * 2
    assert run_ranks(3, became, "hierarchical", hosts="aab") == ["hierarchical"] * 3
    assert (
        run_ranks(2, became, "auto")
        == [choose(DEFAULT, Topology(("a", "a")), 1000, 4, "plain")] * 2
    )
    with replaced(algorithm_table.ALL_REDUCE, "shared", Algorithm(lambda *bound: None)):
        with pytest.raises(ConfigError, match="2 x 4,000"):
            run_ranks(2, became, "shared")
        monkeypatch.setattr("mpitrain.collectives.group.choose", lambda *facts: "shared")
        assert run_ranks(2, became, "auto") == ["ring"] * 2, "where it cannot be had"


def test_an_unknown_name_is_refused_on_every_rank_with_the_nearest():
    def refusal(transport):
        with pytest.raises(ConfigError) as raised:
            build(transport, parse({"replication": {"algorithm": "rign"}}))
        return raised.value.agreed, raised.value.named()

    for agreed, text in run_ranks(2, refusal):
        assert agreed and text.splitlines()[0] == (
            "ConfigError: replication.algorithm must be 'ring', 'halving-doubling', "
            "'recursive-doubling', 'tree', 'star', 'hierarchical', 'shared', 'native' or 'auto', but "
            "is 'rign'; did you mean ring?"
        )
    option = CliRunner().invoke(commands, ["train", "--staleness", "3"])
    assert "--set replication.staleness=3" in option.output


def test_the_readme_names_every_algorithm():
    text = (Path(__file__).parents[3] / "README.md").read_text()
    assert all(f"`{name}`" in text for name in algorithm_table.choices("allreduce"))
