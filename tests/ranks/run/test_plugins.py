"""Rows of a plugin pass the laws of their kinds."""

from pathlib import Path

import numpy as np
import pytest

from mpitrain.bench.comparison.grammar import settings_by_mode
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import HostBackend
from mpitrain.ops import bodies
from mpitrain.parallel import modes
from mpitrain.pipeline import schedules as pipeline_schedules
from mpitrain.run import choices
from mpitrain.run.choices import keys as described_keys
from mpitrain.transport.threads import run_ranks
from tests.laws.collectives import CollectiveLaws
from tests.laws.operations import OperationLaws
from tests.laws.transport import laws_of
from tests.rows import added_rows
from tests.training import TINY, configured, curve, curves
from tests.unit.machine.test_memory import check_held
from tests.unit.pipeline import test_schedules as schedules

TOYS = Path(__file__).parents[2] / "toys.py"


@pytest.fixture(autouse=True)
def toys():
    with added_rows():
        choices.parse({"run": {"plugins": [str(TOYS)]}})
        yield


class ToyLaws(CollectiveLaws):
    algorithms = ("toy-ring",)


def test_an_algorithm_reduces():
    for n in (1, 2, 3, 4):
        run_ranks(n, ToyLaws().law_all_reduce_is_exact_on_every_rank)
        run_ranks(n, ToyLaws().law_several_reductions_are_polled_in_any_order)


def test_a_schedule_ends_and_takes_each_micro_batch_everywhere():
    schedules.test_no_number_of_stages_micro_batches_and_chunks_deadlocks("toy-gpipe")
    schedules.test_every_chunk_runs_each_micro_batch_once("toy-gpipe")
    schedules.test_sends_pair_with_receives_in_order_and_none_goes_to_its_own_stage("toy-gpipe")


@pytest.mark.parametrize(
    "settings",
    [
        ["replication.mode=toy"],
        ["replication.algorithm=toy-ring"],
        ["layout.pp=3", "pipeline.schedule=toy-gpipe", "batch.micro_batches=4"],
    ],
    ids=" ".join,
)
def test_training_has_the_curve_of_one_rank(settings):
    small = [*TINY, "precision.compute=float64"]
    alone = curves(1, *small)[:2]  # losses and norms: a stage has tensors of its own
    for found in run_ranks(3, curve, configured(*small, *settings)):
        for one, other in zip(alone, found[:2], strict=True):
            assert np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(one))


def test_a_model_learns_from_a_source():
    names = ["data.source=toy", "model.kind=toy-bigrams", "optimizer.lr=0.03"]
    losses, *_ = curves(2, *TINY, *names)
    assert losses[-1] < 0.5 * losses[0]


def test_an_operation_is_the_base_of_an_optimizer():
    """Its step at twice the learning rate is that of gradient descent without decay."""
    for law in laws_of(OperationLaws):
        getattr(OperationLaws(), law)(bodies.host(), HostBackend())
    small = [*TINY, "precision.compute=float64", "optimizer.lr=0.01"]
    others = ["optimizer.name=sgd", "optimizer.weight_decay=0", "optimizer.lr=0.005"]
    halved = curves(2, *small, "optimizer.name=toy-sgd", "replication.zero=1")
    for one, other in zip(curves(1, *small, *others), halved, strict=True):
        assert np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(one))


def test_a_mode_holds_what_its_row_says_and_is_compared():
    check_held(3, {"replication": {"mode": "toy"}})
    assert {"toy", "toy-ring"} <= settings_by_mode().keys()


def test_help_lists_rows_of_plugins():
    keys = {key.name: key for key in described_keys()}
    assert keys["replication.mode"].range.endswith(" | toy")
    phrase = "toy: each rank updates from the sum of all gradients, as a toy"
    assert keys["replication.mode"].help.endswith(f". {phrase}")
    assert "toy-ring | auto" in keys["replication.algorithm"].range
    assert ", toy-gpipe, or a" in keys["pipeline.schedule"].help


@pytest.mark.parametrize(
    "table", (pipeline_schedules.STREAMS, modes.STREAMS), ids=("order", "mode")
)
def test_an_asynchronous_schedule_with_one_row_of_two_is_refused_in_words(table):
    table["half-there"] = table["async-2bw"]
    with pytest.raises(ConfigError, match="half-there"):
        configured(*TINY, "pipeline.schedule=half-there")
