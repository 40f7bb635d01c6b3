"""`plan layout`: what it counts is what a job needs, and its choices follow the network."""

import json

import pytest

from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.tools.plan.layout import MessageTimes, ParallelLayout, Planner, rank, report
from mpitrain.tools.plan.memory import count
from tests.processes import mpitrain
from tests.training import configured

RATE, GB = 1e9, 1e9


def planner(
    hosts: list[str], *settings: str, rate: float = RATE, limit: float = GB
) -> tuple[Planner, Config]:
    given = configured("device.kind=cpu", "batch.size=16", *settings)
    return Planner(given, hosts, rate, limit), given


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(2, 1, 1, 0, 2, "none"),
        ParallelLayout(2, 1, 1, 3, 2, "unit"),
        ParallelLayout(1, 2, 1, 0, 4, "none"),
        ParallelLayout(1, 1, 4, 0, 8, "none"),
        ParallelLayout(2, 1, 2, 1, 4, "unit"),
        ParallelLayout(1, 2, 2, 0, 4, "unit"),
        ParallelLayout(1, 2, 1, 1, 4, "none", 2),
    ],
)
def test_memory_and_flops_are_those_that_a_job_counts(layout, kind):
    plan, given = planner(["a"] * 4, "model.layers=5", f"model.kind={kind}")
    predicted, counted = plan.predict(layout), count(layout.of(given))
    stages = [stage.step for stage in counted.stages]
    peak = counted.state + max(step.peak for step in stages)
    assert predicted.nbytes == pytest.approx(peak, rel=0.03)
    assert predicted.computing == pytest.approx(max(step.flops for step in stages) / RATE)


def test_the_sums_of_a_tensor_parallel_step_are_those_of_the_formula():
    plan, _ = planner(["a"] * 2, "model.layers=5", "model.width=64", "model.context=32")
    rows, tokens, width, layers = 4, 32, 64, 5
    every = [unit.counted.sums for unit in plan._counted(2, 1, rows, "none")]
    nbytes = sum(size * times for sums in every for (*_, size), times in sums.items())
    assert nbytes == 4 * ((4 * layers + 2) * rows * tokens * width + 3 * rows * tokens)


def test_all_groups_share_the_link_of_their_host():
    hosts = [f"host {rank // 4}" for rank in range(8)]
    times = MessageTimes(DEFAULT, hosts, is_on_device=False)
    alone, crowded = (
        MessageTimes(DEFAULT, names, is_on_device=False).seconds(
            "sendrecv", range(0, 8, 4), 1 << 24, 4
        )
        for names in (["a", "x", "y", "z", "b", "u", "v", "w"], hosts)
    )
    assert crowded == pytest.approx(4 * alone, rel=0.05)
    assert times.seconds("all-reduce", range(1), 1 << 24, 4) == 0
    # Between the sizes that it evaluates, the model of a long array is a line.
    third, whole = (
        times.seconds("all-reduce", range(4), size, 4, "ring") for size in (3 << 26, 9 << 26)
    )
    assert whole == pytest.approx(3 * third, rel=0.02)


def test_tensor_parallelism_stays_within_a_host_and_what_is_set_stays():
    hosts = [f"host {rank // 2}" for rank in range(8)]
    plan, given = planner(hosts, "model.heads=8", "layout.pp=2", "memory.recompute=unit", rate=1e13)
    ranking = rank(plan, given)
    assert ranking.best[0].layout.tp <= 2
    assert {(each.layout.pp, each.layout.recompute) for each in ranking.predictions} == {
        (2, "unit")
    }
    assert all(plan.refusal(each.layout) is None for each in (*ranking.best, *ranking.front))
    fastest = [each.step_s for each in ranking.best]
    assert fastest == sorted(fastest)
    assert [each.nbytes for each in ranking.front] == sorted(
        (each.nbytes for each in ranking.front), reverse=True
    )
    assert report(ranking, plan, hosts)[-1].startswith(
        "mpitrain launch -n 8 -- train --set layout.dp="
    )


def test_without_a_layout_that_fits_the_smallest_is_named():
    plan, given = planner(["a"] * 4, limit=1e6)
    with pytest.raises(ConfigError, match=r"the smallest needs 0\.00\d GB, with layout\.dp=\d"):
        rank(plan, given)


def test_the_command_writes_all_layouts_and_a_picture(tmp_path):
    words = ["--ranks", "2", "--device", "cpu", "--set", "model.layers=1"]
    done = mpitrain("plan", "layout", *words, "--json", "l.json", "--plot", "l.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "l.json").read_text())["rows"]
    assert f"{len(rows)} layouts of 2 ranks on 1 host(s)" in done.stdout
    assert rows[0]["layout"]["layout.dp"] * rows[0]["layout"]["layout.tp"] in (1, 2)
    assert (tmp_path / "l.png").stat().st_size > 10_000
    assert not done.stderr  # no bar without a terminal
    refused = mpitrain("plan", "layout", "--ranks", "4", "--hosts", "3", cwd=tmp_path)
    assert refused.returncode == 2 and "3 hosts do not divide 4 ranks" in refused.stderr


def test_messages_between_replicas_hide_behind_a_slow_backward_but_for_the_last_bucket():
    layout, hosts = ParallelLayout(2, 1, 1, 0, 1, "none"), ["a", "b"]
    hidden, exposed = (
        planner(hosts, "replication.algorithm=ring", rate=rate)[0].predict(layout).replicas
        for rate in (1e6, 1e18)
    )
    nbytes = 4 * sum(unit.elements for unit in planner(hosts)[0]._counted(1, 1, 8, "none"))
    whole = MessageTimes(DEFAULT, hosts, False).seconds("all-reduce", range(2), nbytes, 4, "ring")
    assert exposed == pytest.approx(whole, rel=1e-5) and 0 < hidden < exposed / 5
    sharded = planner(hosts, rate=1e18)[0].predict(layout._replace(zero=3, micro_batches=4))
    assert sharded.replicas > 2 * exposed
