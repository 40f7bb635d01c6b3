"""Training through wire formats: what is not sent is not lost, residuals survive a checkpoint.

`curves` asserts that replicas stay bitwise equal.
"""

import numpy as np
import pytest

from mpitrain.collectives.compression import RECENT
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import newest
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.saving import save
from tests.training import TINY, configured, curves, stepped

pytestmark = pytest.mark.slow

WIRES = ("fp16", "bf16", "int8", "topk:0.1", "powersgd:2")
RESIDUAL = ("topk:0.1", "powersgd:2")


@pytest.fixture(scope="module")
def whole():
    """The losses of gradients that travel whole."""
    return curves(3, *TINY)[0]


@pytest.mark.parametrize(
    "wire, tolerance, ranks",
    [("fp16", 0.01, 1), ("fp16", 0.01, 4), ("bf16", 0.02, 3), ("int8", 0.03, 2), ("int8", 0.03, 4)],
)
def test_a_format_that_sends_every_element_trains_like_whole_gradients(
    wire, tolerance, ranks, whole
):
    losses = curves(ranks, *TINY, f"replication.wire={wire}")[0]
    assert np.all(np.abs(losses - whole) <= tolerance) and not np.array_equal(losses, whole)


@pytest.mark.parametrize(
    "wire, ranks", [("topk:0.1", 1), ("powersgd:2", 3), ("topk:0.1", 4), ("powersgd:2", 2)]
)
def test_a_sparse_format_still_learns_most_in_the_first_steps(wire, ranks, whole):
    losses = curves(ranks, *TINY, f"replication.wire={wire}", "replication.dense_steps=0")[0]
    assert losses[0] - losses[-1] >= 0.6 * (whole[0] - whole[-1])


@pytest.mark.parametrize("wire", RESIDUAL)
def test_dense_steps_are_bitwise_those_of_whole_gradients(wire):
    base = [*TINY, "replication.algorithm=ring"]
    lossy = [f"replication.wire={wire}", "replication.dense_steps=3"]
    whole, mixed = (curves(2, *base, *more, steps=6)[0] for more in ([], lossy))
    assert np.array_equal(whole[:4], mixed[:4]) and not np.array_equal(whole[4:], mixed[4:])


def test_adamw_forgets_faster_in_steps_whose_gradients_are_delayed():
    def losses(*settings):
        return curves(2, *TINY, "replication.algorithm=ring", *settings)[0]

    # topk:1 leaves nothing out, and so delays nothing.
    everything = ["replication.wire=topk:1", "optimizer.beta1=0.9", "optimizer.beta1_delayed=0.4"]
    slow, fast = losses("optimizer.beta1=0.9"), losses("optimizer.beta1=0.4")
    assert np.abs(slow - fast).max() > 0.01
    assert np.abs(losses(*everything) - fast).max() <= 1e-3
    assert np.abs(losses(*everything, "replication.dense_steps=20") - slow).max() <= 1e-3


def dense_then_lossy(transport, wire):
    """After three whole steps: the last gradient, and what the wire format expects of the next."""
    config = configured(*TINY, f"replication.wire={wire}", "replication.dense_steps=3")
    trainer, source, _ = build(transport, config)
    expected = 0.0
    for index in range(3):
        stepped(trainer, source, [index])
        expected = expected + RECENT * (trainer.gradients.astype(np.float64) - expected)
    for kept in trainer.replica.state():
        if kept.name == "residual":
            assert not kept.array.any()
        elif kept.name == "prediction":
            ((start, stop, _),) = kept.pieces
            wanted = expected[start:stop]
            assert np.abs(kept.array - wanted).max() <= 1e-5 * (1e-3 + np.abs(wanted).max())
    assert {kept.name for kept in trainer.replica.state()} >= {"residual", "prediction"}


@pytest.mark.parametrize("wire", RESIDUAL)
def test_dense_steps_teach_what_to_expect(wire):
    run_ranks(2, dense_then_lossy, wire)


def by_tensor(trainer):
    """{(kind, name of the state, full name of the tensor): values} of what the wire format keeps."""
    found = {}
    for kept in trainer.replica.state():
        name, array, pieces, kind = kept.name, kept.array, kept.pieces, kept.kind
        for start, stop, place in pieces:
            found |= {
                (kind, name, entry.name): array[
                    place + entry.start - start : place + entry.stop - start
                ].copy()
                for entry in trainer.storage.entries
                if start <= entry.start < stop
            }
        if not pieces:
            found[kind, name, ""] = array.copy()
    return found


def train_and_save(transport, folder, wire, first, last, load, *settings):
    """Steps first..last of a run, from a checkpoint or from the start; saved at the end. Losses and residuals."""
    config = configured(*TINY, f"replication.wire={wire}", "replication.dense_steps=0", *settings)
    trainer, source, done = build(transport, config, newest(folder) if load else None)
    assert done.step == first
    losses = [result.loss for result in stepped(trainer, source, range(first, last))]
    assert replicas_equal(trainer)
    before = by_tensor(trainer)
    save(folder, trainer, done._replace(step=last), keep=1)
    return losses, before


@pytest.mark.parametrize("wire", WIRES)
def test_a_resumed_run_goes_on_bitwise_with_its_residuals(wire, tmp_path):
    whole = run_ranks(3, train_and_save, tmp_path / "whole", wire, 0, 5, False)
    first = run_ranks(3, train_and_save, tmp_path / "cut", wire, 0, 3, False)
    second = run_ranks(3, train_and_save, tmp_path / "cut", wire, 3, 5, True)
    for rank in range(3):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        for name, residual in whole[rank][1].items():
            assert np.array_equal(residual, second[rank][1][name]), name
    assert any(kept.any() for (kind, *_), kept in whole[1][1].items() if kind == "own") == (
        wire in RESIDUAL
    )


@pytest.mark.product
@pytest.mark.parametrize("wire", RESIDUAL)
@pytest.mark.parametrize("ranks, settings", [(1, []), (2, []), (4, ["layout.cp=2"])], ids=str)
def test_the_sum_of_the_residuals_is_kept_when_the_number_of_ranks_changes(
    wire, ranks, settings, tmp_path, capsys
):
    saved = [before for _, before in run_ranks(3, train_and_save, tmp_path, wire, 0, 3, False)]
    again = run_ranks(ranks, train_and_save, tmp_path, wire, 3, 3, True, *settings)
    loaded = [before for _, before in again]
    said = "starts anew: it is bound to the ranks of dp 3, pp 1, servers 0, tp 1"
    assert capsys.readouterr().err.count(said) == (wire == "powersgd:2")
    assert any(rank[name].any() for rank in saved for name in rank if name[0] == "own")
    for name in saved[0]:
        if name[0] != "own":
            assert np.array_equal(saved[0][name], loaded[0][name]) == (name[0] == "agreed")
            continue
        total = np.sum([rank[name] for rank in saved], axis=0, dtype=np.float64)
        kept = np.sum([rank[name] for rank in loaded], axis=0, dtype=np.float64)
        assert np.all(np.abs(total - kept) <= 1e-6 * np.abs(total).max()), name
