"""On a device one step is launched as the one before: a CUDA graph of it could be launched again."""

import threading

import pytest

from mpitrain.config import parse, with_settings
from mpitrain.kernels.engines import KERNELS
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu

pytestmark = pytest.mark.compile

SETTINGS = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=8", "batch.size=4", "run.steps=6",
            "batch.micro_batches=2", "optimizer.clip=0.5", "device.kind=cuda", "device.cuda_aware=no",
            "replication.algorithm=ring"]


@pytest.mark.parametrize("ranks, settings", [(1, ["precision.compute=bfloat16"]), (2, ["precision.compute=float16"])])
def test_steps_launch_the_same_kernels_with_the_same_arguments_allocate_nothing_and_read_once(ranks, settings, monkeypatch):
    """The learning rate, clipping and AdamW's corrections change meanwhile: in device memory. A message reads for itself."""
    gpu.play(monkeypatch)
    engine, events, alloc, get = KERNELS["cuda"]().engine, [], cupy.cuda.alloc, cupy.ndarray.get

    def noting(what, function):
        def call(*arguments):
            events.append((threading.get_ident(), what))
            return function(*arguments)
        return call

    monkeypatch.setattr(cupy.cuda, "alloc", noting("allocated", alloc))
    monkeypatch.setattr(cupy.ndarray, "get", noting("read", get))

    def run(transport):
        trainer, source, _ = build(transport, parse(with_settings({}, [*SETTINGS, *settings])))
        me, found, learned = threading.get_ident(), [], []
        for index in range(5):
            batch = trainer.replication.batch(source, index)
            engine.noted[me].clear()
            before = len(events)
            learned.append(trainer.step(index, *batch).lr)
            found.append((list(engine.noted[me]), [what for thread, what in events[before:] if thread == me]))
        assert len(set(learned)) == 5
        return found

    for found in run_ranks(ranks, run):
        (launches, happened), (again, also) = found[3:]
        assert len(launches) > 50 and {"adamw", "cross_entropy", "convert"} & {name for name, *_ in launches} >= {"adamw"}
        for one, other in zip(launches, again, strict=True):
            assert one == other
        assert happened == also == ["read"]
    assert cupy.faults == []
