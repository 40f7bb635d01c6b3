"""Update rules with sums over whole tensors train on every layout as on one rank, from state of any layout."""

import numpy as np
import pytest

from mpitrain.optim import RULES
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done
from mpitrain.transport.threads import run_ranks
from tests.cases.rules import TOYS
from tests.saving import load, save
from tests.training import TINY, configured

pytestmark = pytest.mark.slow
STEPS = 6
ZERO, TIED = "replication.zero=", "model.tied=true"
LAYOUTS = [
    (2, []),
    (2, [ZERO + "1", "replication.overlap=false"]),
    (3, [ZERO + "2", "batch.micro_batches=2"]),
    (2, ["layout.tp=2"]),
    (5, [ZERO + "3"]),
    (4, ["layout.tp=2", ZERO + "1"]),
    (2, ["layout.pp=2", "batch.micro_batches=2"]),
    (4, ["layout.tp=2", "layout.sequence_parallel=true", ZERO + "2"]),
    (4, ["layout.pp=2", "pipeline.schedule=gpipe", "batch.micro_batches=2", ZERO + "3"]),
    (3, ["replication.mode=server", "replication.servers=2"]),
    (2, ["replication.mode=master"]),
    (1, []),
]
"""In the order in which one loads what the one before it has written."""


@pytest.fixture(autouse=True)
def _toys(monkeypatch):
    for name, rule in TOYS.items():
        monkeypatch.setitem(RULES, name, rule)


def trained(transport, settings, folder, first=0, stop=STEPS, path=None):
    """Losses and norms of some steps from a checkpoint, and the checkpoint at their end."""
    config = configured(*TINY, "precision.compute=float64", *settings)
    trainer, source, _ = build(transport, config)
    if path:
        load(path, trainer)
    mode, found = trainer.replication, []
    for index in range(first, stop):
        own = None
        for number in mode.steps(index, lambda: False):
            own = trainer.step(number, *mode.batch(source, number))
        outcome = mode.outcome(index, own)
        found.append((outcome.loss, outcome.grad_norm))
    return np.array(found), save(folder, trainer, Done(stop, 12 * stop, "run"), 9), trainer


def everything(path, settings):
    """All parameters and state of a checkpoint by tensor: as one rank loads them."""

    def run(transport):
        trainer = build(
            transport, configured(*TINY, "precision.compute=float64", *settings)
        ).trainer
        load(path, trainer)
        return {
            (one.name, entry.name): entry.view(one.array).copy()
            for one in trainer.replication.kept()
            for entry in one.entries or trainer.storage.entries
        }

    return run_ranks(1, run)[0]


def close(one, other):
    return np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(one))


@pytest.mark.parametrize("tied", ([], [TIED]), ids=("untied", "tied"))
@pytest.mark.parametrize("rule", ("normalised", "factored"))
def test_every_layout_goes_on_as_one_rank_from_what_another_layout_wrote(rule, tied, tmp_path):
    own = [f"optimizer.name={rule}", *tied]
    curve, before, _ = run_ranks(1, trained, own, tmp_path / "start", 0, 2)[0]
    alone, end, _ = run_ranks(1, trained, own, tmp_path / "end", 2, STEPS, before)[0]
    assert np.ptp([*curve[:, 0], *alone[:, 0]]) > 0.05, (
        "the loss must move, or equality says nothing"
    )
    wanted = everything(end, own)
    assert {name for name, _ in wanted} == {"parameters", *RULES[rule].state}
    for number, (ranks, settings) in enumerate(LAYOUTS):
        here = tmp_path / str(number)
        results = run_ranks(ranks, trained, [*own, *settings], here, 2, STEPS, before)
        for found, _, _ in results:
            assert close(alone, found), settings
        found = everything(results[0][1], own)
        assert found.keys() == wanted.keys()
        for key, array in wanted.items():
            assert close(array, found[key]), (key, settings)
        before = run_ranks(ranks, trained, [*own, *settings], here / "early", 0, 2)[0][1]
