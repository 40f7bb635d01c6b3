"""ZeRO: the curve of one rank, from as many bytes held and sent as the formulas say."""

from functools import cache

import numpy as np
import pytest

from mpitrain.machine import cuda
from mpitrain.parallel.modes import MODES, ZERO
from mpitrain.parallel.zero import TURNS, GatheredOnUse, zero_3
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu
from tests.fakes.pointers import PointerThreads
from tests.laws.collectives import measured
from tests.ranks.parallel.test_replication import everything
from tests.rows import replaced
from tests.training import EXACT, TINY, configured, curve, curves

pytestmark = pytest.mark.slow
BASE = [*TINY, "precision.compute=float64"]
TIED = "model.tied=true"
STAGES = pytest.mark.parametrize("stage", (2, 3))
ALL = pytest.mark.parametrize("stage", (1, 2, 3))


def zero(stage):
    return f"replication.zero={stage}"


def assert_equal(one, other, what=""):
    for a, b in zip(one, other, strict=True):
        assert np.all(np.abs(a - b) <= 1e-9 + 1e-9 * np.abs(a)), what


alone = cache(lambda *settings: curves(1, *BASE, *settings))


@ALL
@pytest.mark.parametrize("optimizer", EXACT)
def test_in_float64_every_number_of_ranks_equals_one(optimizer, stage):
    rule = f"optimizer.name={optimizer}"
    assert np.ptp(alone(rule)[0]) > 0.05, "the loss must move, or equality says nothing"
    layouts = [
        (2, "batch.micro_batches=3"),
        (5, TIED),
        (1,),
        (3, TIED, "batch.micro_batches=3"),
        (4,),
    ]
    for ranks, *settings in layouts[: 5 if optimizer == "adamw" else 2]:
        algorithm = "replication.algorithm=" + ("auto" if ranks % 2 else "ring")
        together = curves(ranks, *BASE, rule, zero(stage), algorithm, *settings)
        assert_equal(alone(rule, *({TIED} & set(settings))), together, (ranks, settings))


@pytest.mark.parametrize(
    "settings",
    [
        [zero(1), "replication.overlap=false"],
        [zero(1), "replication.bucket_mb=100.0"],
        [zero(2), "replication.overlap=false"],
        [zero(2), "replication.bucket_mb=100.0"],
        [zero(3), "replication.overlap=false", TIED],
        [zero(3), "replication.zero_keep=1000"],
        [zero(3), "replication.zero_keep=100000", TIED],
    ],
)
def test_overlap_buckets_and_what_is_kept_do_not_change_the_curve(settings):
    assert_equal(
        alone(*({TIED} & set(settings))), curves(3, *BASE, *settings, "batch.micro_batches=2")
    )


class Closing(GatheredOnUse):
    """A unit is there from `open` to the next `poll` alone."""

    def open(self, unit, part):
        self.now_open, weights = unit, super().open(unit, part)
        self.sync()
        return weights

    def poll(self):
        for bucket in self._needed[self.now_open]:
            self.slots.views[bucket].fill(np.nan)
            self._there.pop(self.slots.slot[bucket], None)


def strict(replica):
    """ZeRO-3 with `Closing`, in which what was summed in a slot is gone."""
    mode = zero_3(replica, Closing)
    reducer, poll = mode.reducer, mode.reducer.poll

    def poll_and_spoil():
        poll()
        for slot, (bucket, _) in [*reducer._under_way.items()]:
            reducer._end(slot)
            reducer.slots.views[bucket].fill(np.nan)

    reducer.poll = poll_and_spoil
    return mode


@pytest.mark.parametrize("mode", (ZERO[2].make, ZERO[3].make, strict))
def test_evaluation_logits_and_text_are_those_of_one_rank(mode):
    settings = [TIED, "batch.micro_batches=2", "run.eval_rows=20"]
    (one,) = run_ranks(1, everything, settings)
    with replaced(MODES, "all-reduce", MODES["all-reduce"]._replace(make=mode)):
        for found in run_ranks(3, everything, settings):
            assert_equal(one, found)


@STAGES
@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("settings", [[], [TIED]])
def test_a_rank_holds_its_part_and_what_is_on_its_way(settings, ranks, stage):
    def run(transport):
        trainer = build(
            transport, configured(*TINY, *settings, zero(stage), "replication.bucket_mb=0.000001")
        ).trainer
        mode, storage = trainer.replication, trainer.storage
        state = sum(buffer.nbytes for buffer in mode.step_end.optimizer.state.values())
        sizes = [4 * (span.stop - span.start) for span in storage.spans]
        turning = sizes[1:] if settings else sizes
        slots = sum(max(turning[turn::TURNS]) for turn in range(TURNS)) + sum(sizes) - sum(turning)
        assert mode.reducer.slots.flat.nbytes == slots
        if stage == 3:
            assert mode.store.slots.flat.nbytes == slots
        return storage.length, mode.store.parameters.nbytes + mode.reducer.buffer.nbytes + state

    for length, held in run_ranks(ranks, run):
        assert held * ranks == length * ({2: 4 * ranks + 12, 3: 16}[stage])


@STAGES
@pytest.mark.parametrize(
    "settings, micro_batches", [([], 1), ([], 3), ([TIED], 2), (["replication.zero_keep=1200"], 2)]
)
def test_by_ring_a_rank_sends_what_the_formulas_say(settings, micro_batches, stage):
    n, m = 3, micro_batches

    def run(transport):
        config = configured(
            *TINY, *settings, zero(stage), f"batch.micro_batches={m}", "replication.algorithm=ring"
        )
        job = build(transport, config)
        trainer, mode = job.trainer, job.trainer.replication
        told = measured(trainer.transport, lambda: mode.step_end.control.total(0, 0, 0, 0))[1]
        batch = mode.rows.batch(job.data, 0)
        trainer.step(0, *batch)
        sent = measured(trainer.transport, lambda: trainer.step(1, *batch))[1]
        sizes = [4 * (span.stop - span.start) for span in trainer.storage.spans]
        counts = [
            sum(e.stop - e.start for e in trainer.storage.entries if e.unit == unit)
            for unit in range(len(sizes))
        ]
        return sent - told, sizes, counts

    for sent, sizes, counts in run_ranks(n, run):
        whole = sum(sizes)
        travelled = {2: (m + 1) * whole, 3: 3 * m * whole}[stage]
        if stage == 3:
            stays = [
                unit == 0 if TIED in settings else bool(settings) and count <= 1200
                for unit, count in enumerate(counts)
            ]
            assert any(stays) == bool(settings) and not all(stays)
            turning = [size for size, stay in zip(sizes, stays, strict=True) if not stay]
            travelled -= (
                (2 * m - 1) * (whole - sum(turning))
                + m * sum(turning[-TURNS:])
                + (m - 1) * sum(turning[:TURNS])
            )
        assert sent * n == travelled * (n - 1)


@STAGES
def test_after_the_first_step_nothing_is_bound_or_allocated(stage):
    def run(transport):
        job = build(transport, configured(*TINY, TIED, zero(stage), "batch.micro_batches=2"))
        trainer = job.trainer
        trainer.step(0, *trainer.replication.rows.batch(job.data, 0))
        held, mode = trainer.arena.allocations, trainer.replication
        shards = mode.reducer.shards
        for transport in (
            trainer.grid.transport,
            shards.dividing.transport,
            shards.alike.transport,
        ):
            transport.claim_tag = transport.allocate = None
        for index in (1, 2):
            trainer.step(index, *trainer.replication.rows.batch(job.data, index))
        return trainer.arena.allocations - held, trainer.arena.live

    assert run_ranks(2, run) == [(0, 0)] * 2


@STAGES
def test_what_a_checkpoint_keeps_is_all_that_the_next_steps_need(stage):
    def run(transport):
        config = configured(*TINY, TIED, zero(stage), "run.eval_rows=6")
        first, second = build(transport, config), build(transport, config)
        second.trainer.evaluate(second.data)  # gathers what it begins with

        def step(job, index):
            return job.trainer.step(
                index, *job.trainer.replication.rows.batch(job.data, index)
            ).loss

        for index in range(3):
            step(first, index)
        for source, target in zip(
            first.trainer.replication.kept(), second.trainer.replication.kept(), strict=True
        ):
            assert (source.name, source.pieces) == (target.name, target.pieces)
            target.array[:] = source.array
        covered = sum(piece.stop - piece.start for piece in source.pieces)
        assert covered == source.array.size == first.trainer.storage.length // transport.size
        return [step(first, index) == step(second, index) for index in (3, 4)], replicas_equal(
            second.trainer
        )

    assert run_ranks(3, run) == [([True, True], True)] * 3


@pytest.mark.parametrize("wire", ["int8", "topk:0.1"])
def test_in_a_wire_format_the_curve_is_that_of_all_reduce(wire):
    base = [*TINY, f"replication.wire={wire}", "optimizer.clip=0"]
    (losses, norms, parameters), divided = curves(3, *base), curves(3, *base, zero(1))
    assert np.array_equal(losses, divided[0]) and np.array_equal(parameters, divided[2])
    assert np.all(np.abs(norms - divided[1]) <= 1e-6 * norms), "squares are summed in another order"


@ALL
def test_between_hosts_a_progress_thread_changes_no_bit(stage):
    base = [*TINY, zero(stage), "replication.algorithm=ring", "batch.micro_batches=2"]
    without, beside = (
        run_ranks(3, curve, configured(*base, f"replication.progress_thread={thread}"), hosts="aab")
        for thread in ("no", "auto")
    )
    for one, other in zip(without, beside, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.compile
@pytest.mark.parametrize("algorithm, gather", [("ring", "none"), ("shared", "int8")])
def test_a_gpu_trains_bit_by_bit_as_the_simulator_does(algorithm, gather, monkeypatch):
    """The arrays of the fake GPU refuse to be NumPy's, and what is not waited for is garbage."""

    def run(threads, *settings):
        small = [
            "model.layers=1",
            "batch.size=4",
            "batch.micro_batches=2",
            zero(3),
            "device.gemm=library",
        ]
        job = build(
            PointerThreads(threads),
            configured(*TINY, *small, f"replication.gather={gather}", *settings),
        )
        trainer = job.trainer
        losses = [
            trainer.step(index, *trainer.replication.rows.batch(job.data, index)).loss
            for index in range(2)
        ]
        found = [losses, *trainer.tensors().values()]
        job.close()  # or a rank that is a thread would read what another has let go of
        return found

    simulated, _ = run_ranks(2, run, "device.kind=cuda-sim", "replication.algorithm=ring")
    gpu.play(monkeypatch)
    monkeypatch.setattr(cuda, "_allocation_start", cupy.allocation_start)
    for found in run_ranks(
        2, run, "device.kind=cuda", "device.cuda_aware=no", f"replication.algorithm={algorithm}"
    ):
        assert all(np.array_equal(one, other) for one, other in zip(simulated, found, strict=True))
    assert cupy.faults == []
