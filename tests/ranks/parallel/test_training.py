"""Law 6: the same curve on any number of ranks, with any all-reduce, in any number of micro-batches."""

import numpy as np
import pytest

from mpitrain.collectives.engine import executor
from mpitrain.data import Unopened
from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.training import STEPS, TINY, configured, curve, curves, near, same

pytestmark = pytest.mark.slow

SHORT = 6


@pytest.mark.parametrize(
    "settings, threads",
    [
        ([], 1),
        (["batch.micro_batches=2"], 1),
        (["replication.wire=int8"], 1),
        (["replication.bucket_mb=0.0"], 1),
        (["replication.zero=1", "batch.micro_batches=2"], 2),
        (["replication.zero=2", "batch.micro_batches=2"], 2),
        (["replication.zero=3", "batch.micro_batches=2"], 1),
    ],
)
def test_between_hosts_a_progress_thread_changes_no_bit(settings, threads, monkeypatch):
    """threads: of each rank; gradients and parameters of ZeRO 1 and 2 have one each."""
    started, start = [], executor.ProgressThread.start

    def noted(self, reduction):
        started.append(self)
        start(self, reduction)

    monkeypatch.setattr(executor.ProgressThread, "start", noted)
    base = [*TINY, "replication.algorithm=ring", *settings]
    without, beside = (
        curves(3, *base, f"replication.progress_thread={way}", steps=4, hosts="aab")
        for way in ("no", "auto")
    )
    assert len(set(map(id, started))) == 3 * threads and len(started) >= 3 * 4
    assert same(without, beside)


def test_within_a_host_no_thread_is_started(monkeypatch):
    monkeypatch.setattr(executor, "ProgressThread", None)
    curves(2, *TINY, steps=1)


def test_tiled_attention_trains_as_whole_on_every_layout():
    """A context of 80 has a whole tile and a ragged one."""

    def losses(ranks, *settings):
        config = configured(*TINY, "precision.compute=float64", "model.context=80", *settings)
        return run_ranks(ranks, lambda transport: curve(transport, config, SHORT)[:2])

    (truth,) = losses(1, "memory.attention=whole")
    assert np.ptp(truth[0]) > 0.1
    for ranks, *settings in (
        (1, "batch.micro_batches=3"),
        (2, "layout.tp=2"),
        (2, "layout.tp=2", "layout.sequence_parallel=true"),
        (2, "layout.cp=2"),
        (2, "layout.pp=2", "pipeline.schedule=zero-bubble"),
        (2, "replication.zero=3"),
    ):
        for found in losses(ranks, "memory.attention=tiled", *settings):
            assert near(truth, found), settings


@pytest.mark.compile
def test_compiled_passes_train_as_numpy_does_on_every_layout():
    alone = curves(1, *TINY, "device.passes=numpy")[0]
    for steps, ranks, *settings in (
        (STEPS, 1),
        (SHORT, 1, "precision.compute=bfloat16"),
        (SHORT, 3, "replication.zero=2", "batch.micro_batches=2"),
    ):
        found = curves(ranks, *TINY, "device.passes=compiled", *settings, steps=steps)[0]
        tolerance = 0.02 if "bfloat16" in str(settings) else 1e-4
        assert np.all(np.abs(found / alone[:steps] - 1) <= tolerance), settings


@pytest.mark.parametrize("algorithm", ("ring", "shared"))
def test_a_run_repeats_bitwise(algorithm):
    settings = [*TINY, f"replication.algorithm={algorithm}"]
    assert same(*(curves(3, *settings, steps=SHORT) for _ in range(2)))


def test_replicas_that_differ_in_one_bit_are_noticed():
    def run(transport):
        trainer, _, _ = build(transport, configured(*TINY))
        equal = replicas_equal(trainer)
        if transport.rank == 1:
            trainer.parameters[3:4].view(np.uint32)[0] ^= 1
        return equal, replicas_equal(trainer)

    assert run_ranks(3, run) == [(True, False)] * 3


def test_ranks_with_different_configurations_or_data_are_refused():
    def run(transport):
        config = configured(*TINY, f"model.context={16 - transport.rank}")
        with pytest.raises(ConfigError, match=r"model\.context is 16 on rank 0"):
            build(transport, config)
        source = Unopened("tokens", (16,), 256, 256, 7 + transport.rank)
        with pytest.raises(ConfigError, match="held_out is 7"):
            build(transport, configured(*TINY), source=source)

    run_ranks(2, run)
