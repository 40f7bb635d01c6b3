"""ZeRO: the curve of one rank, with less of the optimizer's state on each."""

import numpy as np
import pytest

from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.training import EXACT, TINY, configured, curve, curves

pytestmark = pytest.mark.slow

ONE = "replication.zero=1"


@pytest.mark.parametrize(
    "layouts",
    [
        [(1, "auto"), (3, "ring")],
        [(2, "auto"), (4, "ring"), (5, "auto")],
    ],
    ids=["few", "many"],
)
@pytest.mark.parametrize("optimizer", EXACT)
def test_in_float64_every_number_of_ranks_equals_one(optimizer, layouts):
    settings = [
        *TINY,
        "precision.compute=float64",
        f"optimizer.name={optimizer}",
        "model.tied=true",
    ]
    alone = curves(1, *settings)
    assert np.ptp(alone[0]) > 0.05, "the loss must move, or equality says nothing"
    for ranks, algorithm in layouts:
        together = curves(ranks, *settings, ONE, f"replication.algorithm={algorithm}")
        for one, other in zip(alone, together, strict=True):
            assert np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(one)), (ranks, algorithm)


@pytest.mark.parametrize(
    "settings",
    [["batch.micro_batches=3"], ["replication.overlap=false"], ["replication.bucket_mb=100.0"]],
)
def test_micro_batches_overlap_and_buckets_do_not_change_the_curve(settings):
    base = [*TINY, "precision.compute=float64"]
    alone, together = curves(1, *base), curves(3, *base, ONE, *settings)
    for one, other in zip(alone, together, strict=True):
        assert np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(one))


@pytest.mark.parametrize("wire", ["int8", "topk:0.1"])
def test_in_a_wire_format_the_curve_is_that_of_all_reduce(wire):
    base = [*TINY, f"replication.wire={wire}", "optimizer.clip=0"]
    (losses, norms, parameters), divided = curves(3, *base), curves(3, *base, ONE)
    assert np.array_equal(losses, divided[0]) and np.array_equal(parameters, divided[2])
    assert np.all(np.abs(norms - divided[1]) <= 1e-6 * norms), "squares are summed in another order"


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_a_rank_keeps_the_state_of_its_part_alone(ranks):
    def run(transport):
        trainer = build(transport, configured(*TINY, ONE)).trainer
        return trainer.storage.length, [
            buffer.size for buffer in trainer.replication.step_end.optimizer.state.values()
        ]

    for length, state in run_ranks(ranks, run):
        assert state == [length // ranks] * 2


def test_between_hosts_threaded_gathers_change_no_bit():
    base = [*TINY, ONE, "replication.algorithm=ring"]
    without, beside = (
        run_ranks(3, curve, configured(*base, f"replication.progress_thread={thread}"), hosts="aab")
        for thread in ("no", "auto")
    )
    for one, other in zip(without, beside, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
