"""Text that all ranks write together: they compute alike, and rank 0 draws."""

from itertools import islice

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.errors import TrainingError
from mpitrain.run.build import build
from mpitrain.run.generate import tokens
from mpitrain.transport.threads import run_ranks

TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "batch.size=4"]


def trainer_of(transport):
    return build(transport, parse(with_settings({}, TINY))).trainer


def written(transport, count, stop_after):
    """The tokens that this rank got, and how often it computed. Seed and wish to stop are its own: rank 0's count."""
    trainer, forwards = trainer_of(transport), []
    logits = trainer._asked
    trainer._asked = lambda *given: (forwards.append(given), logits(*given))[1]
    drawn = tokens(
        trainer,
        [10, 20],
        0.8,
        40,
        seed=transport.rank,
        stop_requested=lambda: len(forwards) >= stop_after + transport.rank,
    )
    return list(islice(drawn, count)), len(forwards)


@pytest.mark.parametrize("count, stop_after, many", [(20, 99, 20), (20, 5, 5), (0, 99, 0)])
def test_every_rank_computes_as_often_and_gets_the_text_of_one_rank(count, stop_after, many):
    (alone,) = run_ranks(1, written, count, stop_after)
    assert len(alone[0]) == alone[1] == many
    assert run_ranks(3, written, count, stop_after) == [alone] * 3


def test_a_diverged_model_is_the_same_error_on_every_rank():
    def write(transport):
        trainer = trainer_of(transport)
        trainer.parameters[:] = np.inf
        with np.errstate(all="ignore"), pytest.raises(TrainingError, match="not finite") as found:
            next(tokens(trainer, [1], 1.0, 0, 0))
        return found.value.agreed

    assert run_ranks(3, write) == [True] * 3
