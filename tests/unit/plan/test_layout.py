"""`plan layout`: what it counts is what a job needs, and its choices follow the network."""

import json
import os
import re
from pathlib import Path

import pytest

from mpitrain.collectives.selection.cost_model import KNOTS, Level, Tuning
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.parallel.grid import Axes
from mpitrain.pipeline.partition import UnitTime
from mpitrain.run.build import alone
from mpitrain.tools.bench.results import write_json
from mpitrain.tools.plan import units
from mpitrain.tools.plan.layout import MessageTimes, ParallelLayout, Planner, rank, report
from mpitrain.tools.plan.memory import count
from mpitrain.tools.plan.units import TimedUnit, UnitTimes, kind_of, read_units, seconds_of
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
    state = plan._state(layout.axes, layout.zero)
    peak = max(step.peak + own for step, own in zip(stages, state, strict=True))
    assert counted.state == pytest.approx(sum(state) / len(state), rel=1e-12)
    assert predicted.nbytes == peak
    assert predicted.computing == pytest.approx(max(step.flops for step in stages) / RATE)


def test_the_sums_of_a_tensor_parallel_step_are_those_of_the_formula():
    plan, _ = planner(["a"] * 2, "model.layers=5", "model.width=64", "model.context=32")
    rows, tokens, width, layers = 4, 32, 64, 5
    every = [unit.counted.sums for unit in plan._counted(Axes(2), 1, rows, "none")]
    nbytes = sum(size * times for sums in every for (*_, size), times in sums.items())
    assert nbytes == 4 * ((4 * layers + 2) * rows * tokens * width + 3 * rows * tokens)


def test_an_imbalance_that_no_layout_can_have_is_refused_and_a_row_says_the_one_it_has():
    experts = "model.experts=4", "model.top_k=1", "model.layers=1", "replication.zero=1"
    given = configured("device.kind=cpu", "batch.size=2", *experts)
    with pytest.raises(ConfigError, match=r"at most 2 times .* layout.ep is 2.* --imbalance is 9"):
        Planner(given, ["a"] * 2, RATE, GB, imbalance=9)
    plan = Planner(given, ["a"] * 2, RATE, GB, imbalance=1.5)
    ranking = rank(plan, given)
    assert {(each.layout.ep, each.imbalance) for each in ranking.predictions} == {(1, 1), (2, 1.5)}
    said = "\n".join(report(ranking, plan, ["a"] * 2))
    assert "imbalance" in said and " 1.5 " in said


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


def test_messages_take_the_constants_of_the_level_that_a_group_spans():
    def level(beta):
        return Level(
            {2: {"plain": dict.fromkeys(KNOTS, (0, 0, beta, 0, beta, 0))}}, {2: {"plain": {}}}
        )

    betas = {"socket": 1e-10, "host": 4e-10, "network": 1e-8}
    tuning = Tuning(
        {"hosts": 2, "cores": 8, "sockets": 2}, {name: level(beta) for name, beta in betas.items()}
    )
    times = MessageTimes(tuning, [f"host {rank // 4}" for rank in range(8)], is_on_device=False)
    nbytes = 1 << 24
    for members, beta in (
        (range(2), betas["socket"]),
        (range(2, 4), betas["socket"]),
        (range(0, 4, 2), betas["host"]),
        (range(0, 8, 4), 4 * betas["network"]),  # four groups share the link
    ):
        assert times.seconds("all-reduce", members, nbytes, 4, "ring") == pytest.approx(
            nbytes * beta
        )


def test_a_ring_of_attention_hides_its_shifts_behind_the_computing_between_hosts():
    layout = ParallelLayout(1, 1, 1, 0, 4, "none", 4)

    def tensors(hosts, rate):
        plan, _ = planner(hosts, "layout.cp_mode=ring", "replication.algorithm=ring", rate=rate)
        return plan.predict(layout).tensors

    apart = list("abcd")
    assert tensors(apart, 1e6) < 0.2 * tensors(apart, 1e18)
    assert tensors(["a"] * 4, 1e6) == tensors(["a"] * 4, 1e18) > 0


TIMED = [
    *(TimedUnit("mlp", rows, 1000 * rows, 10 * rows, 1.0 + rows) for rows in (2, 4, 8)),
    *(TimedUnit("embedding", rows, 0, 10 * rows, 0.5 * rows) for rows in (2, 8)),
]


def test_seconds_of_units_follow_their_sizes():
    points = UnitTimes({}, TIMED).points()
    for size, seconds in ((2000, 3), (3000, 4), (8000, 9), (16000, 18), (0, 1), (1000, 2)):
        assert seconds_of(points["mlp"], size) == pytest.approx(seconds), size
    assert [seconds_of(points["embedding"], size) for size in (5, 20, 50, 160)] == [0.25, 1, 2.5, 8]
    assert seconds_of([(10, 2.0)], 5) == 1, "a single size is proportional"
    assert [kind_of(name) for name in ("blocks.3.mlp", "hidden.2", "head")] == [
        "mlp",
        "hidden",
        "head",
    ]


def test_a_step_computes_for_the_seconds_of_its_units(tmp_path):
    facts = {"device": "cpu", "processor": "P", "cores": 4, "threads": 1}
    rows = [TimedUnit(kind, 1, 1, 1, 0.25) for kind in ("embedding", "attention", "mlp", "head")]
    write_json(tmp_path / "units.json", facts, rows)
    times = read_units(tmp_path / "units.json")
    assert times == UnitTimes(facts, rows)
    # One FLOP takes 0.25 s; an embedding has none, and takes that for an element.
    small, one = ("model.layers=1", "model.width=64"), ParallelLayout(1, 1, 1, 0, 1, "none")
    plan, given = planner(["a"], *small)
    work = plan.predict(one).computing * RATE + 16 * given.model.context * given.model.width
    for ranks, turns in ((1, 1), (8, 2)):
        plan, _ = planner(["a"] * ranks, *small, rate=times)
        assert plan.predict(one).computing == pytest.approx(turns * work / 4)
    with pytest.raises(ConfigError, match=r"attention, embedding, head, mlp, but .* hidden"):
        planner(["a"], "model.kind=mlp", "data.source=digits", rate=times)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"header": {}, "rows": []}', '{"header": {"device": "cpu"}, "rows": [1]}']
)
def test_another_file_is_no_file_of_units(tmp_path, text):
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(ConfigError, match=r"own\.json(.|\n)*bench units"):
        read_units(tmp_path / "own.json")


@pytest.mark.slow
def test_a_gpt_of_146_billion_takes_the_time_that_was_published():
    """Table 1 of Narayanan et al. 2021 (SC'21): 148 TFLOP/s on each of 1,536 A100, recomputation included.

    Layers of this width attain 60% of the 312 TFLOP/s of an A100.
    """
    job = ["layers=80", "width=12288", "heads=96", "context=2048"]
    plan, _ = planner(
        [f"host {rank // 8}" for rank in range(1536)],
        *(f"model.{each}" for each in job),
        "batch.size=2304",
        "data.vocabulary=51200",
        "device.kind=cuda-sim",
        "precision.compute=bfloat16",
        "pipeline.schedule=interleaved",
        f"replication.tuning={Path(__file__).parents[3] / 'jobs/gpu/a100.json'}",
        rate=0.6 * 312e12,
        limit=80e9,
    )
    predicted = plan.predict(ParallelLayout(24, 8, 8, 0, 96, "unit"))
    tokens, layers, width, vocabulary = 2304 * 2048, 80, 12288, 51200
    flops = 96 * tokens * layers * width**2
    flops *= 1 + 2048 / (6 * width) + vocabulary / (16 * layers * width)  # equation 3 of the paper
    assert predicted.step_s == pytest.approx(flops / 1536 / 148e12, rel=0.25)
    assert predicted.nbytes < plan.limit


@pytest.mark.slow
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


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_a_disturbed_timing_marks_what_it_predicts(is_disturbed):
    facts = {"device": "cpu", "processor": "P", "cores": 4, "threads": 1}
    kinds = ("embedding", "attention", "mlp", "head")
    rows = [TimedUnit(kind, 1, 1, 1, 0.25, is_disturbed and kind == "mlp") for kind in kinds]
    given = configured("device.kind=cpu", "batch.size=1", "model.layers=1")
    plan = Planner(given, ["a"], UnitTimes(facts, rows), GB)
    lines = report(rank(plan, given), plan, ["a"])
    assert (
        any("~: other work disturbed the timing of mlp;" in line for line in lines) == is_disturbed
    )
    (first,) = [line for line in lines if line.split()[:4] == ["1"] * 4 and " none " in line][:1]
    assert first.count("~") == (2 if is_disturbed else 0)


def test_units_of_each_kind_are_timed_once_at_the_two_largest_sizes_of_few_flops(monkeypatch):
    """A head of a large vocabulary and a long row would take most of the time."""
    sizes, heads = [], []

    def timed(job, wanted):
        source = job.source
        sizes.append((job.config.batch.size, *source.shape))
        heads.append(source.inputs)
        names = ("embedding", "attention", "mlp", "attention", "mlp", "head")
        return [UnitTime(1.0, False) if n in wanted else None for n in range(len(names))]

    monkeypatch.setattr(units, "unit_times", timed)
    given = ["device.kind=cpu", "model.context=64", "data.vocabulary=50000", "model.width=64"]
    job = alone(configured(*given), ["a"])
    for most in (1e12, 1e7):
        sizes.clear()
        monkeypatch.setattr(units, "MOST_FLOPS", most)
        steps = [*units.timed_quickly(job, 0)]
        rows = [row for _, of_size in steps for row in of_size]
        numbers = {kind: [row.unit for row in rows].count(kind) for kind in {r.unit for r in rows}}
        assert numbers == dict.fromkeys(("embedding", "attention", "mlp", "head"), 2)
        assert {*heads} == {units.MOST_TOKENS} and 0 < steps[0][0] <= steps[-1][0] <= 1
        assert all(row.flops <= most or row.elements <= 2 * 4096 for row in rows)


def test_other_cores_multiply_while_units_are_timed():
    with units.at_work(2):
        children = [*Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
        assert len(children) >= 2
    left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not {*children[-2:]} & {*left}


@pytest.mark.slow
def test_without_a_layout_that_fits_the_smallest_is_named():
    plan, given = planner(["a"] * 4, limit=1e6)
    with pytest.raises(
        ConfigError, match=r"the smallest needs 0\.00\d+ GB, with layout\.dp=\d"
    ) as raised:
        rank(plan, given)
    savings = [float(text) for text in re.findall(r"\((\S+) GB\)", raised.value.way_out)]
    assert savings == sorted(savings) and "optimizer.name=adamw8bit" in raised.value.way_out
    plan, _ = planner(["a"] * 4, "optimizer.name=adamw8bit", limit=1e6)
    smallest = min(plan.predict(layout).nbytes for layout in plan.layouts(given))
    assert any(abs(smallest / 1e9 / each - 1) < 0.01 for each in savings)


@pytest.mark.slow
def test_the_command_writes_all_layouts_and_a_picture(tmp_path):
    job = ["--device", "cpu", "--set", "model.layers=1"]
    done = mpitrain("bench", "units", *job, "--most-rows", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ["--ranks", "2", *job, "--units", "units.json"]
    done = mpitrain("plan", "layout", *words, "--json", "l.json", "--plot", "l.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "l.json").read_text())["rows"]
    assert f"{len(rows)} layouts of 2 ranks on 1 host(s)" in done.stdout
    assert rows[0]["layout"]["layout.dp"] * rows[0]["layout"]["layout.tp"] in (1, 2)
    assert (tmp_path / "l.png").stat().st_size > 10_000
    assert not done.stderr  # no bar without a terminal
    larger = [*words, "--set", "model.width=512"]
    done = mpitrain("plan", "layout", *larger, cwd=tmp_path)
    assert "units of a smaller model were timed: those of attention, mlp" in done.stdout
    for bad, said in (
        (["--ranks", "4", "--hosts", "3"], "3 hosts do not divide 4 ranks"),
        (["--ranks", "4", "--tuning", "units.json"], "units.json is no tuning file"),
    ):
        refused = mpitrain("plan", "layout", *bad, cwd=tmp_path)
        assert refused.returncode == 2 and said in refused.stderr


def test_messages_between_replicas_hide_behind_a_slow_backward_but_for_the_last_bucket():
    layout, hosts = ParallelLayout(2, 1, 1, 0, 1, "none"), ["a", "b"]
    hidden, exposed = (
        planner(hosts, "replication.algorithm=ring", rate=rate)[0].predict(layout).replicas
        for rate in (1e6, 1e18)
    )
    ((stored, _),) = planner(hosts)[0]._stages(layout.axes)
    nbytes = 4 * stored.length
    whole = MessageTimes(DEFAULT, hosts, False).seconds("all-reduce", range(2), nbytes, 4, "ring")
    assert exposed == pytest.approx(whole, rel=1e-5) and 0 < hidden < exposed / 5
    sharded = planner(hosts, rate=1e18)[0].predict(layout._replace(zero=3, micro_batches=4))
    assert sharded.replicas > 2 * exposed
