"""A benchmark compared with an earlier one: slower values, and files of something else."""

import json
from typing import NamedTuple

import pytest

from mpitrain.cli import main
from mpitrain.errors import ConfigError
from mpitrain.tools.bench.against import Before, best_values, ratios, read_before, report, slow

FACTS = {"op": "allreduce", "ranks": 2, "device": "cpu", "mpitrain": "1"}


class Row(NamedTuple):
    op: str = "allreduce"
    algorithm: str = "ring"
    bytes: int = 8
    time_us: float = 20.0
    min_us: float = 10.0
    sweep: int = 1


class Link(NamedTuple):
    first: int
    second: int
    fastest_us: float
    best_GBs: float


def before(*rows):
    return Before(FACTS, best_values([row._asdict() for row in rows]))


def test_values_are_compared_by_the_fastest_run():
    then = before(Row(), Row(algorithm="star"), Row(min_us=8.0, sweep=2))
    found = ratios(then, [Row(min_us=12.0), Row(algorithm="star", min_us=5.0), Row(bytes=16)])
    assert [ratio.slower for ratio in found] == [1.5, 0.5]
    assert [ratio.row for ratio in slow(found, 1.25)] == ["ring 8"]
    assert not slow(found, 1.5)


def test_a_lower_bandwidth_is_slower():
    found = ratios(before(Link(0, 1, 2.0, 1.0)), [Link(0, 1, 2.0, 0.5)])
    assert {ratio.field: ratio.slower for ratio in found} == {"fastest_us": 1.0, "best_GBs": 2.0}


def test_a_report_has_a_line_for_each_value_and_each_changed_fact():
    found = ratios(before(Row()), [Row(min_us=30.0)])
    lines = report(before(Row()), {**FACTS, "mpitrain": "2"}, found, 1.25)
    assert sum("!" in line for line in lines) == 1
    assert sum(line.startswith("mpitrain:") for line in lines) == 1


@pytest.mark.parametrize("value", [0, -1, None, True, "9", 1e301, float("nan")])
def test_values_that_were_not_measured_do_not_count(value):
    assert best_values([{"op": "a", "min_us": value}]) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"header": {}, "rows": []}',
        '{"header": {}, "rows": [1]}',
        '{"header": [], "rows": [{"op": "a", "min_us": 1}]}',
        '{"header": {"ranks": 3}, "rows": [{"op": "a", "min_us": 1}]}',
        '{"header": {"op": "reduce"}, "rows": [{"op": "a", "min_us": 1}]}',
    ],
)
def test_files_of_something_else_are_refused(tmp_path, text):
    path = tmp_path / "before.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_before(path, FACTS)
    assert str(path) in error.value.law


@pytest.mark.slow
def test_a_command_compares_with_its_own_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    words = ["bench", "gemm", "--shapes", "64"]

    def code(*more):
        with pytest.raises(SystemExit) as end:
            main([*words, *more])
        return end.value.code

    assert code("--json", "before.json") == 0
    found = json.loads((tmp_path / "before.json").read_text())
    assert found["header"]["job"] == "77" and {"mpitrain", "host_names"} < found["header"].keys()
    assert code("--against", "before.json", "--tolerance", "1e6") == 0
    for row in found["rows"]:
        row["time_us"] /= 1e4
    (tmp_path / "before.json").write_text(json.dumps(found))
    assert code("--against", "before.json") == 1
    assert code("--against", "missing.json") == 2
    assert code("--against", "before.json", "--tune") == 2
    assert code("--against", "before.json", "--tolerance", "0.5") == 2
