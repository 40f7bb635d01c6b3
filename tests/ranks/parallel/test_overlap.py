"""Reductions between GPUs overlap with the backward pass: by the order of launches on the streams of tests.fakes.cupy."""

import threading
from itertools import groupby

import pytest

from mpitrain.config import parse, with_settings
from mpitrain.machine import cuda
from mpitrain.ops.device import KERNELS
from mpitrain.parallel.buckets import Buckets
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu
from tests.ranks.run.test_same_launches import SETTINGS as ONE_LAYER

pytestmark = pytest.mark.compile

SETTINGS = [
    *ONE_LAYER,
    "model.layers=2",
    "batch.micro_batches=1",
    "replication.algorithm=shared",
    "replication.bucket_mb=0.000001",
]


def poll_until_launched(buckets):
    """Poll until all ranks have started what this rank has started, and it has launched its work."""

    def launched():
        buckets._mover.poll()
        return all(one._awaited is not one._recorded for one in buckets._mover._started)

    buckets._mover._transport.wait_until(launched)


def test_a_reduction_lies_between_units_and_the_computation_never_waits(monkeypatch):
    gpu.play(monkeypatch)
    monkeypatch.setattr(cuda, "_allocation_start", cupy.allocation_start)
    monkeypatch.setattr(Buckets, "poll", poll_until_launched)
    engine, waits = KERNELS["cuda"]().engine, []
    wait_event, wait = cupy.Stream.wait_event, cuda._CudaPlace.wait

    def noting(stream, event):
        if not stream.non_blocking:
            waits.append("the computation waits")
        wait_event(stream, event)

    def noted(place):
        waits.append("the host waits")
        wait(place)

    monkeypatch.setattr(cupy.Stream, "wait_event", noting)
    monkeypatch.setattr(cuda._CudaPlace, "wait", noted)

    def run(transport):
        trainer, source, _ = build(transport, parse(with_settings({}, SETTINGS)))
        buckets = trainer.replica.buckets
        for step in range(2):
            batch = source.batch(0, step, 4, trainer.share())
            transport.barrier()
            cupy.log().clear()
            waits.clear()
            engine.streams[threading.get_ident()].clear()
            transport.barrier()
            trainer.step(step, *batch)
        on_messages = [aside for aside, _ in groupby(engine.streams[threading.get_ident()])]
        return len(buckets), sum(on_messages), cupy.log().count(("synchronize",)), list(waits)

    for buckets, reductions, synchronisations, waited in run_ranks(2, run):
        assert buckets == 6 and reductions == buckets, "each between two units, or after the last"
        assert (synchronisations, waited) == (1, []), "the host reads the device once"
    assert cupy.faults == []
