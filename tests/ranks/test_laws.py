"""The laws of transports and collectives on threads: 1, 2, 3, 5 and 8 ranks, 1 to 3 in fast tests; sums on 7, too."""

import numpy as np
import pytest

from mpitrain.collectives import compression
from mpitrain.collectives.engine import executor
from mpitrain.collectives.group import Group, bind
from mpitrain.collectives.plans import steps as plan_steps
from mpitrain.collectives.selection.table import choices
from mpitrain.transport.threads import run_ranks
from tests.laws.collectives import CollectiveLaws, measured
from tests.laws.exchange import ExchangeLaws
from tests.laws.lossy import LossyLaws
from tests.laws.moving import MovingLaws
from tests.laws.traffic import TrafficLaws
from tests.laws.transport import TransportLaws, few_and, laws_of
from tests.laws.windows import WindowLaws

LAW_CLASSES = (
    TransportLaws,
    CollectiveLaws,
    TrafficLaws,
    LossyLaws,
    MovingLaws,
    WindowLaws,
    ExchangeLaws,
)
LAWS = [(cls, name) for cls in LAW_CLASSES for name in laws_of(cls)]


@few_and(5, 8)
@pytest.mark.parametrize(("cls", "name"), LAWS, ids=[name for _, name in LAWS])
def test_threads_obey(cls, name, sizes):
    """On 8 ranks sums and their messages alone: all else is the same on 5."""
    for n in sizes:
        if n < 8 or cls in (CollectiveLaws, TrafficLaws):
            run_ranks(n, getattr(cls(), name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "law_all_reduce_is_exact_on_every_rank",
        "law_reduce_scatter_leaves_chunk_r_on_rank_r",
        "law_all_gather_brings_chunk_r_from_rank_r",
        "law_broadcast_reaches_all_from_any_root",
        "law_reduce_ends_at_any_root",
    ],
)
def test_seven_ranks_obey(name):
    """Of the numbers between powers of two, the one that exceeds its own by most."""
    run_ranks(7, getattr(CollectiveLaws(), name))


ALL_REDUCE_LAWS = [
    "law_all_reduce_is_exact_on_every_rank",
    "law_a_long_message_is_reduced_exactly",
    "law_several_reductions_are_polled_in_any_order",
]


class SegmentLaws(CollectiveLaws, TrafficLaws):
    """What algorithms that cut an array into segments take part in."""

    algorithms = ("ring", "halving-doubling")


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("law_all_reduce_is_exact_on_every_rank", 100),
        ("law_a_long_message_is_reduced_exactly", 1000),
        ("law_several_reductions_are_polled_in_any_order", 1000),
        ("law_reduce_scatter_leaves_chunk_r_on_rank_r", 100),
        ("law_ring", 100),
        ("law_halving_doubling", 100),
        ("law_all_gather_brings_chunk_r_from_rank_r", 100),
    ],
)
@few_and(5)
def test_many_segments_obey(name, segment, sizes, monkeypatch):
    monkeypatch.setattr(plan_steps, "SEGMENT", segment)
    for n in sizes:
        run_ranks(n, getattr(SegmentLaws(), name))


@pytest.mark.parametrize(
    "name",
    [
        "law_all_ranks_hold_the_same_bits",
        "law_coded_sums_are_as_near_as_their_rounding",
        "law_what_is_not_finite_stays_so_on_every_rank",
    ],
)
@few_and(5)
def test_coded_sums_in_many_lanes_obey(name, sizes, monkeypatch):
    monkeypatch.setattr(compression, "LANE", 500)
    for n in sizes:
        run_ranks(n, getattr(LossyLaws(), name))


ROUTED = "law_an_all_to_all_of_unequal_counts_brings_every_row_and_takes_it_back"
TOGETHER = "law_all_to_alls_of_unequal_counts_may_be_under_way_together"


class TwoLevelLaws(CollectiveLaws):
    """The algorithm that asks where ranks are."""

    algorithms = ("hierarchical",)


@pytest.mark.product
@pytest.mark.parametrize("hosts", ["aab", "aabb", "abab", "aaabb", "abcabc", "aaaaabbc"])
@pytest.mark.parametrize("name", [*ALL_REDUCE_LAWS, ROUTED, TOGETHER])
def test_ranks_on_several_hosts_obey(name, hosts):
    run_ranks(len(hosts), getattr(TwoLevelLaws(), name), hosts=hosts)


def test_hierarchical_sends_between_hosts_what_a_ring_of_hosts_would():
    hosts, count = "aaabbb", 3 * 2 * 5
    n_hosts, local = 2, 3

    def between(transport):
        array = np.ones(count)
        _, nbytes = measured(transport, bind(transport, array, algorithm="hierarchical").run)
        return nbytes / array.nbytes

    inward = outward = (local - 1) / local
    around = 2 * (n_hosts - 1) / n_hosts / local
    assert run_ranks(6, between, hosts=hosts) == pytest.approx(
        [inward + around + outward] * 6, rel=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "longest"), [*zip(ALL_REDUCE_LAWS, (400, 40_000, 40_000), strict=True)]
)
def test_messages_between_hosts_are_cut_and_obey(name, longest, monkeypatch):
    """An array becomes 20 messages and more, three of which are under way at a time."""
    monkeypatch.setattr(executor, "BETWEEN_HOSTS", longest)
    monkeypatch.setattr(executor, "WINDOW", 3)
    monkeypatch.setattr(
        AcrossHosts, "algorithms", tuple(a for a in choices("allreduce") if a != "shared")
    )
    for n in (2, 3, 5):
        run_ranks(n, getattr(AcrossHosts(), name), hosts=[f"host{rank}" for rank in range(n)])


class AcrossHosts(CollectiveLaws):
    """Every rank on a host of its own."""


def test_relays_send_one_message_to_each_other_host():
    """8 ranks on 2 hosts: between hosts 1 message in place of 4, of the same bytes."""
    hosts, rows = "aaaabbbb", np.ones((8, 3))

    def messages(transport):
        routes = Group(transport, algorithm).routes(np.ones((8, 1), np.int64))
        return measured(transport, routes.bind(rows, np.empty_like(rows)).run)

    algorithm = "pairwise"
    assert run_ranks(8, messages, hosts=hosts) == [(7, 7 * 24)] * 8
    # 3 to its host, 1 to a relay with 4 rows, 3 of 4 such rows that it relays.
    algorithm = "hierarchical"
    assert run_ranks(8, messages, hosts=hosts) == [(3 + 1 + 3, (3 + 4 + 3) * 24)] * 8


def test_rows_go_by_one_call_of_mpi_on_one_host_alone():
    def chosen(transport):
        rows = np.ones((4 * transport.size, 3))
        routes = Group(transport).routes(np.full((transport.size, 1), 4))
        return routes.bind(rows, np.empty_like(rows)).algorithm

    for algorithm, hosts in ("native", "aa"), ("pairwise", "ab"), ("hierarchical", "aabb"):
        assert run_ranks(len(hosts), chosen, hosts=[*hosts]) == [algorithm] * len(hosts)


def test_between_hosts_no_message_is_longer_than_the_limit():
    def longest(transport):
        array = np.ones(100_000, "float32")
        messages, nbytes = measured(transport, bind(transport, array, algorithm="tree").run)
        return messages, nbytes

    parts = -(-400_000 // executor.BETWEEN_HOSTS)
    assert run_ranks(2, longest, hosts=["a", "b"]) == [(parts, 400_000)] * 2
    assert run_ranks(2, longest, hosts=["a", "a"]) == [(1, 400_000)] * 2
