"""The trainer in one file that the contributors' page begins with: its losses are those of the engine, bit for bit."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import mpitrain
from mpitrain.transport.threads import run_ranks
from tests.training import stepped

PLAIN = Path(__file__).parents[3] / "jobs/lessons/train_plain.py"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_plain_trainer_loses_what_the_engine_loses(ranks):
    spec = spec_from_file_location("train_plain", PLAIN)
    plain = module_from_spec(spec)
    spec.loader.exec_module(plain)
    assert len(PLAIN.read_text().splitlines()) <= 150

    def engine(transport):
        job = mpitrain.build(transport, mpitrain.parse(plain.SETTINGS))
        return [result.loss for result in stepped(job.trainer, job.source, range(10))]

    losses = run_ranks(ranks, plain.train)
    assert losses == run_ranks(ranks, engine)
    assert losses[0][0] - losses[0][-1] > 0.5, "the loss must move, or equality says nothing"
