"""The verdict on planted numbers: the node or pair at fault is named, and nothing else."""

import json
import os
from itertools import combinations
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from mpitrain.errors import ConfigError
from mpitrain.tools.bench.pairs import BETWEEN, Pair
from mpitrain.tools.certify.collect import moved, turns
from mpitrain.tools.certify.report import document, junit, lines
from mpitrain.tools.certify.verdict import (
    Evidence,
    Jobs,
    Limits,
    Speeds,
    WrongCollective,
    judge,
    read_limits,
)
from mpitrain.tools.doctor.facts import Facts, facts_here
from mpitrain.tools.doctor.probes import Problem

NODES = "abcd"
FACT = Facts("", "m", [0], 1, "CPU", "openblas 1 Zen", 1, 1 << 30, 1 << 33)
JOBS = Jobs("1", "1", "1")


def pairs(slow=(), factor=10.0, n=4):
    """Links of 1 GB/s and 2 us; `slow` ones are worse by the factor."""
    found = []
    for first, second in combinations(range(n), 2):
        by = factor if (first, second) in slow else 1.0
        figures = 2 * by, 2 * by, 1 / by, 1 / by, 0
        found.append(Pair(first, second, NODES[first], NODES[second], BETWEEN, *figures))
    return found


def sound(n=4, **changes):
    facts = [FACT._replace(host=node, machine=node) for node in NODES[:n]]
    speeds = [Speeds([9e10, 1e11], [1e10, 2e10]) for _ in range(n)]
    found = Evidence(facts, speeds, [("x", "x")] * n, pairs(n=n), 50, [], [], JOBS, {})
    return found._replace(**changes)


def failing(evidence, limits=None):
    """The nodes that fail, and the number of other failures."""
    certificate = judge(evidence, limits or Limits())
    bad = [verdict.node for verdict in certificate.nodes if verdict.reasons]
    assert certificate.passes == (not bad and not certificate.others)
    return "".join(bad), len(certificate.others)


def changed(values, index, value):
    return [*values[:index], value, *values[index + 1 :]]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_sound_nodes_pass(n):
    assert failing(sound(n)) == ("", 0)


@pytest.mark.parametrize("field", ["gemm", "memory"])
@pytest.mark.parametrize("factor, bad", [(0.4, "c"), (0.6, ""), (float("nan"), "c")])
def test_a_rank_below_half_the_median_fails_its_node(field, factor, bad):
    speeds = sound().speeds
    slow = speeds[2]._replace(**{field: [factor * value for value in getattr(speeds[2], field)]})
    assert failing(sound(speeds=changed(speeds, 2, slow))) == (bad, 0)


def test_the_fastest_sample_counts():
    speeds = changed(sound().speeds, 0, Speeds([1.0, 1.0, 1e11, 1.0], [1.0, 2e10]))
    assert failing(sound(speeds=speeds)) == ("", 0)


def test_processors_are_compared_with_their_own_kind():
    speeds = [Speeds([rate], [1e10]) for rate in (1e11, 1e11, 2e10, 2e10)]
    facts = sound().facts
    assert failing(sound(speeds=speeds))[0] == "cd"
    other = [*facts[:2], *(fact._replace(processor="old") for fact in facts[2:])]
    steps = [("x", "x")] * 2 + [("y", "y")] * 2
    assert failing(sound(speeds=speeds, facts=other, steps=steps)) == ("", 0)


@pytest.mark.parametrize("steps, bad", [("xxyx", ("c", 0)), ("xyxx", ("b", 0)), ("xxyy", ("", 1))])
def test_other_bits_fail_the_minority(steps, bad):
    assert failing(sound(steps=[(step, step) for step in steps])) == bad


def test_a_rank_that_differs_from_itself_fails():
    assert failing(sound(steps=changed(sound().steps, 3, ("x", "y")))) == ("d", 0)


def test_the_other_blas_is_named():
    evidence = sound(steps=changed(sound().steps, 1, ("y", "y")))
    facts = changed(evidence.facts, 1, evidence.facts[1]._replace(blas="openblas 1 Prescott"))
    (reason,) = judge(evidence._replace(facts=facts), Limits()).nodes[1].reasons
    assert "Prescott" in reason and "Zen" in reason


@pytest.mark.parametrize(
    "slow, bad",
    [
        ([(1, 2)], ("", 1)),
        ([(0, 1), (1, 2), (1, 3)], ("b", 0)),
        ([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)], ("ab", 0)),
        ([(0, 1), (0, 2), (0, 3), (1, 2)], ("a", 1)),
    ],
)
def test_a_slow_link_fails_a_node_only_if_all_its_links_are_slow(slow, bad):
    assert failing(sound(pairs=pairs(slow))) == bad
    others = judge(sound(pairs=pairs(slow)), Limits()).others
    assert all("b and c" in reason for reason in others), "it names both nodes"


@pytest.mark.parametrize(
    "machines, factor, bad",
    [("mmmm", 3, ""), ("mmno", 3, ""), ("mnop", 3, "b"), ("mmmm", 10, "b"), ("mmno", 10, "b")],
)
def test_links_of_ranks_that_share_cores_are_slow_only_far_below_the_usual(machines, factor, bad):
    pairs_of = zip(sound().facts, machines, strict=True)
    facts = [fact._replace(machine=machine) for fact, machine in pairs_of]
    evidence = sound(pairs=pairs([(0, 1), (1, 2), (1, 3)], factor), facts=facts)
    assert failing(evidence) == (bad, 0)
    assert failing(evidence, Limits(link_GBs=0.5)) == ("b", 0)


def test_a_node_whose_cable_loses_frames_fails_though_its_links_are_fast():
    measured = [pair._replace(sent=9000, first_resent=400 * (2 in pair[:2])) for pair in pairs()]
    assert failing(sound(pairs=measured)) == ("c", 0)
    (reason,) = judge(sound(pairs=measured), Limits()).nodes[2].reasons
    assert reason == "all 3 links lose frames: 400 of 9,000 segments were sent again"
    one = changed(measured, 1, measured[1]._replace(first_resent=0))
    assert failing(sound(pairs=one)) == ("", 2)
    both = [pair._replace(best_GBs=0.1) if 2 in pair[:2] else pair for pair in measured]
    assert [reason[:18] for reason in judge(sound(pairs=both), Limits()).nodes[2].reasons] == [
        "all 3 links are sl",
        "all 3 links lose f",
    ]


def test_a_verdict_shows_least_and_usual_without_any_expectation():
    shown = "\n".join(lines(evidence := sound(pairs=pairs([(0, 2)])), judge(evidence, Limits())))
    assert "matrix products: least 100 GFLOP/s (rank 0 on a), usual 100" in shown
    assert "memory: least 20.0 GB/s (rank 0 on a), usual 20.0" in shown
    assert "links: least 0.100 GB/s (a and c), usual 1.00" in shown
    assert "links: most 20.0 us (a and c), usual 2.00" in shown


@pytest.mark.parametrize(
    "wrong, bad",
    [
        ([(0, 2), (1, 2), (2, 3)], ("c", 0)),
        ([(0, 2), (2, 3)], ("c", 0)),
        ([(0, 2), (1, 2), (2, 3), (0, 1)], ("c", 1)),
        ([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)], ("ab", 0)),
        ([(0, 1)], ("", 2)),
        ([(0, 1), (2, 3)], ("", 3)),
        ([(0, 1), (0, 2), (1, 2)], ("", 4)),
    ],
)
def test_wrong_bytes_fail_the_node_that_most_of_these_pairs_share(wrong, bad):
    links = [pair._replace(wrong=4 * (pair[:2] in wrong)) for pair in pairs()]
    assert failing(sound(pairs=links, wrong=[WrongCollective("reduce", "star", 3)])) == bad


@pytest.mark.parametrize(
    "limits, bad",
    [
        (Limits(link_GBs=0.5), ("", 0)),
        (Limits(link_GBs=2), ("", 6)),
        (Limits(link_us=1), ("", 6)),
        (Limits(gemm_GFLOPs=101), ("abcd", 0)),
        (Limits(memory_GBs=19), ("", 0)),
        (Limits(shm_MB=2000), ("abcd", 0)),
        (Limits(nodes=["a", "e"]), ("e", 0)),
        (Limits(ratio=0), ("", 0)),
    ],
)
def test_limits_of_a_file_hold_for_every_node(limits, bad):
    assert failing(sound(), limits) == bad


def test_of_shared_memory_only_what_is_free_counts(monkeypatch):
    full = SimpleNamespace(f_bavail=1, f_blocks=1 << 20, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert facts_here("a").shared == 4096


@pytest.mark.parametrize(
    "changes, bad",
    [
        ({"absent": {"e": "silent"}}, ("e", 0)),
        ({"facts": changed(sound().facts, 2, FACT._replace(host="c", shared=1 << 20))}, ("c", 0)),
        ({"findings": [Problem("b", "no locks"), Problem("", "all")]}, ("b", 1)),
        ({"wrong": [WrongCollective("reduce", "star", 3)]}, ("", 1)),
        ({"jobs": Jobs("1", "2", "1")}, ("", 1)),
        ({"jobs": Jobs("1", "1", "2")}, ("", 1)),
        ({"jobs": Jobs("", "", "", ["broken"])}, ("", 1)),
        ({"pairs": changed(pairs(), 0, pairs()[0]._replace(wrong=4))}, ("", 1)),
    ],
)
def test_every_other_failure_is_reported(changes, bad):
    assert failing(sound(**changes)) == bad


def test_a_moved_run_is_compared_only_where_its_ranks_have_equal_bits():
    jobs = Jobs("1", "2", "1")
    steps = changed(sound().steps, 1, ("y", "y"))
    assert failing(sound(jobs=jobs, steps=steps)) == ("b", 0)
    facts = changed(sound().facts, 1, sound().facts[1]._replace(processor="old"))
    assert failing(sound(jobs=jobs, facts=facts)) == ("", 0)


def test_files_hold_the_verdicts():
    evidence = sound(absent={"e": "silent <&>"}, wrong=[WrongCollective("reduce", "star", 3)])
    certificate = judge(evidence, Limits())
    assert len(lines(evidence, certificate)) == 12
    found = json.loads(json.dumps(document(evidence, certificate, {}), allow_nan=False))
    assert [node["passes"] for node in found["nodes"]] == [True] * 4 + [False]
    assert found["passes"] is False and found["usual"]["gemm_GFLOPs"] == 100
    suite = ElementTree.fromstring(junit(certificate).partition("\n")[2])
    assert (suite.get("tests"), suite.get("failures")) == ("6", "2")


@pytest.mark.parametrize("left_out", [(), ("speeds",), ("speeds", "steps", "pairs")])
def test_before_the_last_measurement_a_node_fails_or_is_not_judged(left_out):
    evidence = sound(findings=[Problem("b", "no locks")], awaits="runs", jobs=Jobs())
    evidence = evidence._replace(**dict.fromkeys(left_out, ()))
    certificate = judge(evidence, Limits())
    assert not certificate.passes and failing(evidence) == ("b", 0)
    measured = 2 * bool(evidence.speeds) + 3 * bool(evidence.pairs)
    assert len(lines(evidence, certificate)) == 6 + measured
    found = json.loads(json.dumps(document(evidence, certificate, {}), allow_nan=False))
    assert [node["passes"] for node in found["nodes"]] == [None, False, None, None]
    assert found["awaits"] == "runs" and len(found["ranks"]) == 4
    suite = ElementTree.fromstring(junit(certificate).partition("\n")[2])
    assert [case[0].tag for case in suite] == ["skipped", "failure", "skipped", "skipped"]


@pytest.mark.parametrize(
    "hosts, ranks",
    [("ab", [1, 0]), ("abc", [1, 2, 0]), ("aabb", [2, 3, 0, 1]), ("aaa", [1, 2, 0]), ("a", [0])],
)
def test_ranks_move_to_the_next_node(hosts, ranks):
    assert moved(hosts) == ranks


def test_ranks_that_share_cores_take_turns():
    facts = [
        FACT._replace(machine=machine, cores=cores)
        for machine, cores in (("m", [0, 1]), ("m", [1]), ("m", [2]), ("n", [0, 1]), ("m", [0]))
    ]
    assert turns(facts) == [[0, 2, 3], [1, 4]]


@pytest.mark.parametrize(
    "text, key",
    [("speed = 1", "speed"), ("ratio = 2.0", "ratio"), ("nodes = 3", "nodes"), ("[", "")],
)
def test_a_wrong_file_of_limits_is_refused(tmp_path, text, key):
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_limits(path)
    assert key in error.value.law and str(path) in error.value.law


def test_a_file_of_limits_is_read(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text('nodes = ["a"]\nlink_GBs = 2.5\n')
    assert read_limits(path) == Limits(nodes=["a"], link_GBs=2.5)
