"""Stragglers on purpose: who sleeps in which step, and that nothing else changes."""

import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest

from mpitrain.config.faults import delay_s, delays
from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from mpitrain.tools.bench.comparison.modes import jobs
from mpitrain.transport.threads import run_ranks
from tests.training import TINY, configured

STEPS, LATE = 4, "1:40,random:20:0.5"


def slept(monkeypatch, ranks, *settings):
    """{(rank, step, first row computed): seconds slept}, and every rank's losses."""
    naps, here = defaultdict(float), threading.local()
    monkeypatch.setattr(
        "mpitrain.run.injection.time",
        SimpleNamespace(sleep=lambda seconds: naps.__setitem__(here.now, naps[here.now] + seconds)),
    )

    def train(transport):
        trainer, source, _ = build(transport, configured(*TINY, f"run.steps={STEPS}", *settings))
        replica, losses = trainer.replica, []
        for index in range(STEPS):
            own = None
            for number in replica.steps(index, lambda: False):
                here.now = transport.rank, number, trainer.share().start
                own = trainer.step(number, *replica.batch(source, number))
            losses.append(replica.outcome(index, own).loss)
        replica.sync()
        return losses

    return run_ranks(ranks, train), dict(naps)


def test_ranks_sleep_as_they_are_told_and_compute_what_they_did(monkeypatch):
    late, naps = slept(monkeypatch, 3, f"run.delay={LATE}", "run.seed=5")
    assert set(naps) == {(rank, step, 4 * rank) for rank in range(3) for step in range(STEPS)}
    for (rank, step, row), seconds in naps.items():
        assert seconds == delay_s(delays(LATE), rank, 5, step, row, 0, 0)
    assert [{naps[rank, step, 4 * rank] for step in range(STEPS)} for rank in (0, 1)] == [
        {0, 0.02},
        {0.04, 0.06},
    ]
    punctual, none = slept(monkeypatch, 3, "run.seed=5")
    assert late == punctual and not none


def test_a_ticket_of_asynchronous_servers_takes_as_long_whoever_draws_it(monkeypatch):
    _, naps = slept(
        monkeypatch,
        4,
        "run.delay=random:20:0.5",
        "replication.mode=server",
        "replication.update=async",
    )
    assert sorted(key[1:] for key in naps) == [
        (step, row) for step in range(STEPS) for row in (0, 4, 8)
    ]
    assert all(
        seconds == delay_s(delays("random:20:0.5"), 0, 0, step, row, 0, 0)
        for (_, step, row), seconds in naps.items()
    )
    assert set(naps.values()) == {0, 0.02}


def test_a_rank_that_computes_no_rows_cannot_be_late_in_a_comparison():
    with pytest.raises(ConfigError, match=r"run\.delay names rank 2,"):
        jobs(["ring", "server-sync"], ["run.delay=2:5"], "aaa")
