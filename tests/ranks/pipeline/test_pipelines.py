"""Pipelines that train: every schedule and layout equals one rank, sends what it must, and keeps what any layout can load."""

import gc
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.pipeline.pipeline import Stage
from mpitrain.pipeline.schedule_files import write_plan
from mpitrain.pipeline.schedules import SCHEDULES, plan_of
from mpitrain.pipeline.simulate import Cost, peak
from mpitrain.regions import share
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.tools.bench.training.steps import STAGES, stage_rows
from mpitrain.tools.plan.stages import end_s, measure
from mpitrain.transport.base import FIRST_CLAIMED_TAG
from mpitrain.transport.threads import ThreadTransport, run_ranks
from tests.training import assert_alike, configured, trained

pytestmark = pytest.mark.slow
STEPS, ROWS = 3, 13  # ragged, whatever it is divided by
UNITS, WIDTH = 8, 24
SMALL = [
    "model.layers=3",
    f"model.width={WIDTH}",
    "model.heads=24",
    "model.context=8",
    f"batch.size={ROWS}",
    f"run.steps={STEPS}",
    "optimizer.warmup=0",
    "optimizer.lr=0.01",
    "optimizer.clip=0.5",
    "precision.compute=float64",
    "run.eval_rows=5",
]


def layout(dp, pp, name, micro_batches=0, *settings):
    return [
        f"layout.dp={dp}",
        f"layout.pp={pp}",
        f"pipeline.schedule={name}",
        f"batch.micro_batches={micro_batches}",
        *settings,
    ]


def one_rank(*settings):
    return run_ranks(1, trained, configured(*SMALL, *settings), STEPS)[0]


def assert_equal_to_one_rank(alone, ranks, settings):
    together = run_ranks(ranks, trained, configured(*SMALL, *settings), STEPS)
    assert_alike(alone, together)
    assert set().union(*(found.tensors for found in together)) == {*alone.tensors}


@pytest.fixture(scope="module")
def alone():
    return {tied: one_rank(f"model.tied={tied}") for tied in ("true", "false")}


def test_a_schedule_of_a_file_trains(alone, tmp_path):
    plan = plan_of("breadth-first", 2, 5, 2)
    turned = plan._replace(
        stage_of=(1, 0, 1, 0), by_stage=plan.by_stage[::-1]
    )  # the first chunk lies on the last stage
    write_plan(tmp_path / "own.json", turned)
    assert_equal_to_one_rank(
        alone["true"], 4, layout(2, 2, tmp_path / "own.json", 0, "model.tied=true")
    )


@pytest.mark.parametrize("wire", ("fp16", "int8", "topk:0.2", "powersgd:2"))
def test_gradients_travel_between_replicas_of_a_stage_in_a_wire_format(wire):
    settings = layout(
        2, 2, "1f1b", 3, "precision.compute=float32", f"replication.wire={wire}", "model.tied=true"
    )
    whole, *_ = run_ranks(4, trained, configured(*SMALL, *settings[:-2], "model.tied=true"), STEPS)
    for found, *_ in run_ranks(4, trained, configured(*SMALL, *settings), STEPS):
        assert np.all(
            np.abs(found[:, 0] / whole.told[:, 0] - 1) <= (1e-3 if wire == "fp16" else 0.1)
        )
        assert not np.array_equal(found, whole.told)


def test_a_nonfinite_gradient_of_one_stage_skips_the_update_everywhere():
    def run(transport):
        trainer, source, _ = build(transport, configured(*SMALL, *layout(2, 3, "zero-bubble", 3)))
        told, summed = [], trainer.replica.sum

        def spoilt():
            """On the middle stage of the first replica, when all micro-batches have gone back."""
            if trainer.replica.step == 1 and transport.rank == 2:
                trainer.gradients[0] = np.nan
            return summed()

        trainer.replica.sum = spoilt
        for index in range(3):
            outcome = trainer.step(index, *trainer.replica.batch(source, index))
            told.append((outcome.updated, outcome.nonfinite > 0))
        return told, replicas_equal(trainer)

    assert run_ranks(6, run) == [([(True, False), (False, True), (True, False)], True)] * 6


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_boundary_sends_two_messages_per_micro_batch(name, monkeypatch):
    stages, m, sent, start_send = 3, 6, Counter(), ThreadTransport.start_send

    def noted(self, array, to, tag=0):
        if tag < FIRST_CLAIMED_TAG:
            sent[self.rank, to, tag, array.nbytes] += 1
        return start_send(self, array, to, tag)

    def step(transport):
        trainer, source, _ = build(transport, configured(*SMALL, *layout(1, stages, name, m)))
        trainer.step(0, *trainer.replica.batch(source, 0))

    monkeypatch.setattr(ThreadTransport, "start_send", noted)
    run_ranks(stages, step)
    place = plan_of(name, stages, m).stage_of
    rows = [len(share(ROWS, micro, m)) for micro in range(m)]
    expected = Counter()
    for chunk, (here, there) in enumerate(pairwise(place)):
        for nbytes in (8 * WIDTH * 8 * each for each in rows if here != there):
            expected[here, there, 2 * (chunk + 1), nbytes] += 1
            expected[there, here, 2 * chunk + 1, nbytes] += 1
    assert sent == expected


@pytest.mark.parametrize("rows_divided", (False, True))
def test_tensor_parallel_stages_send_whole_or_sharded_activations(rows_divided, monkeypatch):
    sent, start_send, m = Counter(), ThreadTransport.start_send, 3

    def noted(self, array, to, tag=0):
        if tag < FIRST_CLAIMED_TAG:
            sent[self.me, self.members[to], tag, array.nbytes] += 1
        return start_send(self, array, to, tag)

    def step(transport):
        more = ["layout.tp=2", f"layout.sequence_parallel={str(rows_divided).lower()}"]
        trainer, source, _ = build(transport, configured(*SMALL, *layout(1, 2, "1f1b", m, *more)))
        trainer.step(0, *trainer.replica.batch(source, 0))

    monkeypatch.setattr(ThreadTransport, "start_send", noted)
    run_ranks(4, step)
    expected = Counter()
    for tp in range(2):
        for micro in range(m):
            nbytes = len(share(ROWS, micro, m)) * 8 * WIDTH * 8 // (1 + rows_divided)
            expected[tp, 2 + tp, 2, nbytes] += 1
            expected[2 + tp, tp, 1, nbytes] += 1
    assert sent == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_holds_as_many_micro_batches_as_its_schedule_says(name, monkeypatch):
    stages, m, live, most = 4, 8, defaultdict(int), defaultdict(int)

    def counted(method, change):
        before = getattr(Stage, method)

        def changed(self, *arguments):
            rank = self._replica.grid.coords.pp
            live[rank] += max(change, 0)
            most[rank] = max(most[rank], live[rank])
            found = before(self, *arguments)
            live[rank] += min(change, 0)
            return found

        monkeypatch.setattr(Stage, method, changed)

    for method, change in (("forward", 1), ("backward", -1), ("backward_weight", -1)):
        counted(method, change)

    def step(transport):
        trainer, source, _ = build(transport, configured(*SMALL, *layout(1, stages, name, m)))
        trainer.step(0, *trainer.replica.batch(source, 0))

    run_ranks(stages, step)
    plan = plan_of(name, stages, m)
    assert most == {
        stage: peak(mine, [Cost()] * len(plan.stage_of)).live
        for stage, mine in enumerate(plan.by_stage)
    }


@pytest.mark.parametrize(
    "name, layers", [("gpipe", 2), ("1f1b", 2), ("zero-bubble", 14), ("zb-v", 6)]
)
def test_a_stage_sends_and_holds_in_a_step_what_is_told_of_it(name, layers):
    """Peaks within a tenth: what the simulator leaves out are messages on their way, and that a fused backward holds less."""
    stages, m = 2, 4
    deep = [
        f"model.layers={layers}",
        "model.width=32",
        "model.heads=2",
        "model.context=32",
        f"batch.size={2 * m}",
    ]

    def run(transport):
        trainer, source, _ = build(
            transport, configured(*SMALL, *deep, *layout(1, stages, name, m))
        )
        batch = trainer.replica.batch(source, 0)
        trainer.step(0, *batch)
        assert 0 < trainer.pipe.peak_bytes <= trainer.arena.peak
        before = {name: tensor.copy() for name, tensor in trainer.tensors().items()}
        rows = stage_rows(trainer, *batch)
        assert trainer.arena.live == 0 and all(
            np.array_equal(before[name], now) for name, now in trainer.tensors().items()
        )
        return rows, STAGES.lines(rows), len(trainer.units)

    for rows, lines, units in run_ranks(stages, run):
        assert len(lines) == 1 + stages and units in [row.units for row in rows]
        for row in rows:
            assert (row.activations, row.gradients) == (
                row.planned_activations,
                row.planned_gradients,
            )
            assert row.activations + row.gradients == (2 * m if name == "zb-v" else m)
            assert row.sent_bytes == (row.activations + row.gradients) * 2 * 32 * 32 * 8
            assert abs(row.peak_bytes / row.simulated_bytes - 1) <= 0.1, (name, row)


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (8, layout(2, 2, "zb-v", 2, "layout.tp=2")),
        (4, layout(2, 2, "breadth-first", 2, "replication.zero=3")),
    ],
)
def test_stages_are_measured_together_and_nothing_is_updated(ranks, settings):
    """Costs are those of all parts on every rank; what is bound, kept and reduced afterwards is as if nobody had measured."""

    def run(transport):
        trainer, source, _ = build(transport, configured(*SMALL, *settings, "model.tied=true"))
        batch = trainer.replica.batch(source, 0)
        measured = measure(trainer, *batch, [1, 3])
        ending = end_s(trainer, *batch)
        return measured, ending, trainer.step(0, *batch).loss, replicas_equal(trainer)

    def alone(transport):
        trainer, source, _ = build(transport, configured(*SMALL, "model.tied=true"))
        return trainer.step(0, *trainer.replica.batch(source, 0)).loss

    (loss,) = run_ranks(1, alone)
    found = run_ranks(ranks, run)
    for measured, ending, own, is_equal in found:
        assert (
            measured == found[0][0]
            and ending == found[0][1] > 0
            and is_equal
            and abs(own - loss) <= 1e-9 * loss
        )
        assert [each.rows for each in measured] == [1, 3] and sum(measured[0].way) > 0
        for small, large in zip(*(each.costs for each in measured), strict=True):
            assert min(small[:3]) > 0 and 2.5 * small.saved <= large.saved <= 3 * small.saved


@pytest.mark.parametrize(
    "ranks, settings, law, way_out, mended",
    [
        (
            3,
            layout(1, 3, "interleaved", 3, "model.layers=1"),
            "there are 4 units for 6 chunks (stages x chunks).",
            "Lower --pp or pipeline.chunks to at most 4 chunks, or raise model.layers.",
            [
                (2, "layout.pp=2", "batch.micro_batches=2"),
                (3, "pipeline.chunks=1"),
                (3, "model.layers=2"),
            ],
        ),
        (
            3,
            layout(1, 3, "1f1b", 2),
            "A pipeline of 3 stages is never full with fewer micro-batches, but there are 2.",
            "Set batch.micro_batches to at least 3, or --pp to at most 2.",
            [(3, "batch.micro_batches=3"), (2, "layout.pp=2")],
        ),
        (
            3,
            layout(1, 3, "interleaved", 4),
            "3 stages do not divide 4 micro-batches.",
            "Take 3 or 6 micro-batches, or schedule 1f1b or breadth-first, which serve any number.",
            [
                (3, "batch.micro_batches=3"),
                (3, "batch.micro_batches=6"),
                (3, "pipeline.schedule=1f1b"),
                (3, "pipeline.schedule=breadth-first"),
            ],
        ),
        (
            4,
            layout(2, 2, "1f1b", 0, "batch.size=3"),
            "Each of dp 2 x micro-batches 2 = 4 shares needs a sequence, but batch.size",
            "Set batch.size to at least 4",
            [(4, "batch.size=4")],
        ),
        (
            2,
            layout(1, 2, "1f1b", 4, "pipeline.chunks=2"),
            "Schedule 1f1b has 1 chunk(s) a stage, but 2 were asked for.",
            "Leave the number of chunks out, or take one of interleaved, zb-v, v-half, breadth-first.",
            [(2, "pipeline.chunks=0"), (2, "pipeline.schedule=zb-v")],
        ),
    ],
)
def test_unsupported_pipelines_are_refused_with_supported_ones(
    ranks, settings, law, way_out, mended
):
    with pytest.raises(ConfigError) as caught:
        run_ranks(ranks, lambda transport: build(transport, configured(*SMALL, *settings)))
    assert caught.value.agreed and law in caught.value.law and way_out in caught.value.way_out
    for needed, *others in mended:
        run_ranks(
            needed,
            lambda transport, others: build(transport, configured(*SMALL, *settings, *others)),
            others,
        )


def test_default_micro_batches_are_two_per_stage_up_to_the_rows():
    def chosen(transport, *settings):
        return build(transport, configured(*SMALL, *settings)).trainer.config.batch.micro_batches

    for ranks, pp, rows, wanted in (
        (1, 1, 13, 1),
        (2, 2, 13, 4),
        (4, 2, 6, 2),
        (3, 3, 13, 6),
        (3, 3, 5, 3),
    ):
        assert run_ranks(ranks, chosen, f"layout.pp={pp}", f"batch.size={rows}") == [wanted] * ranks


def test_a_closed_trainer_leaves_no_window_and_waits_for_no_collector():
    def run(transport):
        trainer, source, _ = build(transport, configured(*SMALL, *layout(1, 2, "1f1b", 4)))
        trainer.step(0, *trainer.replica.batch(source, 0))
        trainer.evaluate(source)
        trainer.close()
        return len(transport.windows)

    gc.disable()
    try:
        assert run_ranks(2, run) == [0, 0]
    finally:
        gc.enable()
