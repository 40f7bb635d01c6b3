"""ZeRO within each host, and the same on every host: the curve of one rank; what crosses, what is held, what is refused."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import ThreadTransport, run_ranks
from tests.laws.collectives import measured
from tests.training import TINY, configured, curve

pytestmark = pytest.mark.slow

EXACT = [*TINY, "precision.compute=float64"]
RING = "replication.algorithm=ring"
TIED = "model.tied=true"


def by_host(stage):
    return [f"replication.zero={stage}", "replication.shard=host"]


@cache
def alone(*settings):
    return run_ranks(1, curve, configured(*EXACT, *settings))[0]


@pytest.mark.parametrize(
    "stage, hosts, settings, like",
    [
        (1, "abba", ["replication.algorithm=auto", TIED], [TIED]),
        (1, "abc", [RING, "replication.overlap=false"], []),
        (2, "aabb", [RING, "batch.micro_batches=3"], []),
        (2, "aa", ["replication.algorithm=auto"], []),
        pytest.param(
            3, "ababab", [RING, "batch.micro_batches=2", TIED], [TIED], marks=pytest.mark.slow
        ),
        (3, "abba", ["replication.algorithm=auto", "replication.overlap=false"], []),
        (3, "ab", [RING, "optimizer.name=momentum"], ["optimizer.name=momentum"]),
    ],
)
def test_in_float64_any_hosts_equal_one_rank(stage, hosts, settings, like):
    for found in run_ranks(
        len(hosts), curve, configured(*EXACT, *by_host(stage), *settings), hosts=hosts
    ):
        for one, other in zip(alone(*like), found, strict=True):
            assert np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(one))


@pytest.mark.parametrize("hosts", ("aabb", "abab", "aaabbb", "abc", "aa"))
def test_between_hosts_a_rank_sends_only_its_gradients_once_a_step(hosts, monkeypatch):
    """By a ring; s ranks on each of h hosts, m micro-batches."""
    n, h, m = len(hosts), len(set(hosts)), 2
    s = n // h
    crossed, send = Counter(), ThreadTransport.start_send

    def counted(self, array, to, tag=0):
        if self.hosts[to] != self.hosts[self.rank]:
            crossed[self.me] += array.nbytes
        return send(self, array, to, tag)

    def run(transport, stage):
        job = build(transport, configured(*TINY, *by_host(stage), RING, f"batch.micro_batches={m}"))
        trainer, mode = job.trainer, job.trainer.replication
        batch, told = mode.rows.batch(job.data, 0), []
        trainer.step(0, *batch)
        mode.step_end.sync()
        transport.barrier()
        for work in (
            lambda: mode.step_end.control.total(0, 0, 0, 0),
            lambda: (trainer.step(1, *batch), mode.step_end.sync()),
        ):
            before = crossed[transport.rank]
            sent = measured(transport, work)[1]
            told.append((sent, crossed[transport.rank] - before))
            transport.barrier()
        (control, control_crossed), (sent, between) = told
        state = sum(buffer.nbytes for buffer in mode.step_end.optimizer.state.values())
        held = state, mode.reducer.buffer.nbytes, mode.store.parameters.nbytes
        between -= control_crossed
        return (
            between,
            sent - control - between,
            held,
            [4 * (span.stop - span.start) for span in trainer.storage.spans],
        )

    monkeypatch.setattr(ThreadTransport, "start_send", counted)
    for stage in (1, 2, 3):
        for between, within, held, sizes in run_ranks(n, run, stage, hosts=hosts):
            whole = sum(sizes)
            assert between * n == 2 * (h - 1) * whole, stage
            travelled = {
                1: 2 * whole,
                2: (m + 1) * whole,
                3: 3 * m * whole - m * sum(sizes[-2:]) - (m - 1) * sum(sizes[:2]),
            }
            assert within * s == travelled[stage] * (s - 1), stage
            assert [
                size * (s if stage >= level else 1)
                for size, level in zip(held, (1, 2, 3), strict=True)
            ] == [2 * whole, whole, whole], stage


def test_what_the_hosts_hold_alike_is_noticed_if_it_differs():
    def run(transport):
        trainer = build(transport, configured(*TINY, *by_host(3))).trainer
        was = replicas_equal(trainer)
        trainer.parameters[transport.rank // 3] += transport.rank // 3
        return was, replicas_equal(trainer)

    assert run_ranks(4, run, hosts="abab") == [(True, False)] * 4


def test_hosts_with_different_numbers_of_ranks_are_refused():
    with pytest.raises(
        ConfigError, match=r"shard host .* but there are 2 on a, 1 on b\.\n +Start as many"
    ) as refused:
        run_ranks(
            3, lambda transport: build(transport, configured(*TINY, *by_host(2))), hosts="aba"
        )
    assert refused.value.agreed
