"""`mpitrain plan schedule --schedule async`: two steps, updates, versions, figures."""

from itertools import product

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedules import plan_of
from mpitrain.pipeline.simulate import Cost, staleness, weights
from mpitrain.tools.plan.schedule import stream


def shown(*words, columns=100):
    done = CliRunner().invoke(
        commands,
        ["plan", "schedule", *map(str, words)],
        env={"COLUMNS": str(columns)},
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    return done.output


def test_two_async_steps_are_drawn_with_updates_and_versions():
    assert (
        shown("--schedule", "async-2bw", "--stages", 2, "--micro-batches", 3)
        == """\
async-2bw: 2 stages, 3 micro-batches a step; the first 2 steps of a stream that goes on

ms       0              5              10             15             20
stage 0  F0 F1 .. B0 W0 F2 B1 W1 F3 B2 W2 F4 B3 W3 F5 B4 W4 F6 B5 W5
version  0  0     0  0  0  0  0  0  0  0* 0  0  0  0  0  0  1  0  0*
stage 1  .. F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 F4 B4 W4 F5 B5 W5 F6
version     0  0  0  0  0  0  0  0  0* 0  0  0  0  0  0  0  0  0* 1

F forward, B input half of backward, W weight half, dots idle
version: of its weights, which a stage computes with; * an update follows, which makes the next
  version
a step in the steady state 9 ms, of which a stage computes 9: idle 0.0%, no bubble between steps
the pipe fills at the start, and after evaluations and checkpoints: the last stage begins after 1 ms
1 update a step on each stage
versions of the weights that are held, by stage: 2, 2
staleness of a gradient when it is applied, by stage: 1, 1 updates
peak live, by stage: 2, 1 micro-batches
of these, with a pending weight half: at most 1, 1
"""
    )


def test_pipedream_holds_a_version_for_each_stage_to_come():
    printed = shown("--schedule", "async")
    assert "bubble 20" not in printed and "makespan" not in printed
    for line in (
        "a step in the steady state 24 ms, of which a stage computes 24: idle 0.0%, no bubble between steps",
        "8 updates a step on each stage",
        "versions of the weights that are held, by stage: 4, 3, 2, 1",
        "staleness of a gradient when it is applied, by stage: 3, 2, 1, 0 updates",
    ):
        assert f"\n{line}\n" in printed


def test_versions_and_staleness_are_those_of_pipedream_and_2bw():
    for p, m in product((1, 2, 5), (5, 8)):
        lists = plan_of("async", p, 4 * m).lists
        assert [staleness(mine) for mine in lists] == [p - 1 - s for s in range(p)], (p, m)
        assert {staleness(mine, m) for mine in lists} == {1}, (p, m)
        assert all(sum(each.is_updated for each in weights(mine)) == 4 * m for mine in lists)
        assert all(sum(each.is_updated for each in weights(mine, m)) == 4 for mine in lists)


@pytest.mark.parametrize("name", ["async", "async-2bw"])
def test_no_stage_idles_in_the_steady_state_of_an_async_chart(name):
    for p, m in product((1, 2, 4, 7), (8, 11)):
        cost = Cost(1, 1.5, 0.5)
        found = stream(name, p, m, None, cost, 0, 0)
        assert found.step_ms == pytest.approx(3 * m) and found.idle(cost) == pytest.approx(0)
        end = max(mine[-1].end for mine in found.drawn.timeline)
        assert all(mine[-1].end == end for mine in found.drawn.timeline), (p, m)


def test_a_stream_needs_as_many_micro_batches_as_stages():
    done = CliRunner().invoke(
        commands, ["plan", "schedule", "--schedule", "async", "--micro-batches", "3"]
    )
    assert isinstance(done.exception, ConfigError)
    assert done.exception.law == (
        "A stream has at least as many micro-batches in a step as stages, but these are 3 and 4."
    )


@pytest.mark.parametrize("columns", [80, 130])
@pytest.mark.parametrize("micro_batches", [4, 9, 200])
def test_no_line_is_wider_than_the_terminal(columns, micro_batches):
    output = shown("--schedule", "async", "--micro-batches", micro_batches, columns=columns)
    assert max(map(len, output.splitlines())) <= columns


@pytest.mark.slow
def test_a_stream_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert "drawn in" in shown("--schedule", "async", "--plot", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
