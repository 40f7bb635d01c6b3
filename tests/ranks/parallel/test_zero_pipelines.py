"""ZeRO 2 and 3 in pipelines: equal to one rank, each chunk gathered once a pass and reduced once; and who is refused."""

from itertools import pairwise

import pytest

from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedule_files import write_plan
from mpitrain.pipeline.schedules import BackwardInput, BackwardWeight, Forward, Plan
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.laws.collectives import measured
from tests.ranks.pipeline.test_pipelines import (
    ROWS,
    SMALL,
    WIDTH,
    assert_equal_to_one_rank,
    layout,
    one_rank,
)
from tests.training import configured

pytestmark = pytest.mark.slow
TIED, UNTIED = "model.tied=true", "model.tied=false"
STAGES = pytest.mark.parametrize("zero", (2, 3))


@pytest.fixture(scope="module")
def alone():
    return {tied: one_rank(tied) for tied in (TIED, UNTIED)}


@STAGES
@pytest.mark.parametrize(
    "name, chunks, tied",
    [("gpipe", 1, UNTIED), ("breadth-first", 2, TIED), ("breadth-first", 3, UNTIED)],
)
def test_each_chunk_is_gathered_once_a_pass_and_reduced_once(name, chunks, tied, zero):
    dp, pp, m = 3, 2, 4

    def run(transport):
        even = ",".join(
            [str(12 // (pp * chunks))] * (pp * chunks)
        )  # or what nobody comes after stays where it is
        settings = layout(
            dp,
            pp,
            name,
            m,
            tied,
            f"pipeline.chunks={chunks}",
            f"replication.zero={zero}",
            "model.layers=5",
            f"pipeline.partition={even}",
            "replication.algorithm=ring",
        )
        trainer, source, _ = build(transport, configured(*SMALL, *settings))
        mode, storage = trainer.replica, trainer.storage
        told = measured(trainer.transport, lambda: mode.total(0, 0, 0, 0))[1]
        batch = mode.batch(source, 0)
        trainer.step(0, *batch)
        sent = measured(trainer.transport, lambda: trainer.step(1, *batch))[1]
        parts = mode.chunks
        assert len(parts) == chunks and parts[0].start == 0 and parts[-1].stop == len(storage.units)
        assert all(before.stop == after.start for before, after in pairwise(parts))
        sizes = [
            (span.stop - span.start, 1 if span.holders or span.unit in parts[-1] else 2)
            for span in storage.spans
        ]
        whole, held = (
            sum(size for size, _ in sizes),
            sum(span.stop - span.start for span in storage.spans if span.holders),
        )
        gathered = sum(size * (turns if zero == 3 else 1) for size, turns in sizes)
        plain = {span.unit: span.stop - span.start for span in storage.spans if not span.holders}
        units = [[plain[unit] for unit in chunk] for chunk in parts]
        place = (
            max(map(sum, units)) if zero == 2 else sum(map(max, *units) if chunks > 1 else units[0])
        )
        assert {
            mode.gradient_slots.flat.nbytes,
            (mode.parameter_slots if zero == 3 else mode.gradient_slots).flat.nbytes,
        } == {8 * (place + held)}
        return sent - told, 8 * (dp - 1) * (gathered + whole) / dp, 8 * held / dp

    found = run_ranks(dp * pp, run)
    crossings = pp * chunks - 1
    activations = 2 * crossings * ROWS * 8 * WIDTH * 8
    held = sum(
        held for *_, held in found
    )  # what two stages hold is summed by both, a third of it by each replica
    assert (held > 0) == (tied == TIED)
    assert (
        sum(sent for sent, *_ in found)
        == sum(travelled for _, travelled, _ in found) + activations + held
    )


REFUSED = [
    (2, "1f1b", 0, "gpipe or breadth-first"),
    (2, "interleaved", 2, "breadth-first"),
    (1, "zb-v", 0, "gpipe or breadth-first"),
]


@pytest.mark.parametrize("pp, name, chunks, working", REFUSED)
def test_zero_refuses_schedules_that_return_to_a_chunk(pp, name, chunks, working):
    def attempt(name):
        settings = layout(
            2, pp, name, 4, "replication.zero=3", f"pipeline.chunks={chunks}", "batch.size=8"
        )
        run_ranks(2 * pp, lambda transport: build(transport, configured(*SMALL, *settings)))

    with pytest.raises(ConfigError) as caught:
        attempt(name)
    assert (
        caught.value.agreed
        and caught.value.way_out
        == f"Set pipeline.schedule to {working}, or replication.zero to 0 or 1."
    )
    assert caught.value.law.endswith(f"gathered and reduced once, but {name} comes back to chunks.")
    for other in working.split(" or "):
        attempt(other)


@pytest.mark.parametrize("zero", (0, 1))
def test_a_tied_gradient_waits_for_all_its_uses_in_any_order(zero, tmp_path, alone):
    orders = [
        [0, 1],
        [1, 0],
    ]  # the weight half of chunk 0, with the embedding, before that of chunk 1, with the head, and after
    for order in orders:
        halves = [BackwardWeight(chunk, micro) for chunk in order for micro in range(2)]
        mine = [
            kind(chunk, micro)
            for micro in range(2)
            for kind, chunk in ((Forward, 0), (Forward, 1), (BackwardInput, 1), (BackwardInput, 0))
        ]
        write_plan(tmp_path / "own.json", Plan((0, 0), ((*mine, *halves),)))
        settings = layout(
            2,
            1,
            tmp_path / "own.json",
            2,
            TIED,
            f"replication.zero={zero}",
            "replication.bucket_mb=0.0001",
        )
        assert_equal_to_one_rank(alone[TIED], 2, settings)
