"""On a device one step is launched as the one before: a CUDA graph of it could be launched again."""

import threading

import pytest

from mpitrain.config import parse, with_settings
from mpitrain.ops.device import KERNELS
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu

pytestmark = pytest.mark.compile

SETTINGS = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=8",
    "batch.size=4",
    "run.steps=6",
    "batch.micro_batches=2",
    "optimizer.clip=0.5",
    "device.kind=cuda",
    "device.cuda_aware=no",
    "replication.algorithm=ring",
]


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (2, ["precision.compute=float16"]),
        (2, ["replication.zero=3"]),
        (2, ["memory.recompute=2", "layout.tp=2", "memory.logit_chunks=3"]),
        (2, ["replication.mode=master"]),
        (3, ["replication.mode=server"]),
        (1, ["model.dropout=0.2", "model.attention_dropout=0.1", "optimizer.name=lamb"]),
        (
            2,
            [
                "optimizer.name=adafactor",
                "layout.sequence_parallel=true",
                "layout.tp=2",
                "layout.algorithm=ring",
            ],
        ),
        (2, ["optimizer.name=muon", "replication.zero=1"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_steps_repeat_their_launches_and_read_the_device_once(ranks, settings, monkeypatch):
    """The learning rate, clipping and AdamW's corrections change meanwhile: in device memory. A message reads for itself.

    Nor does a step read more that is skipped, here for an overflow in float16. What adds a message is launched when that comes,
    between other kernels: with ZeRO-3 the same ones are launched, if not in the same order.
    """
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
        mode, me, found, outcomes = trainer.replica, threading.get_ident(), [], []
        right = mode.loss

        def loss(logits, targets, scale):
            value, gradient = right(logits, targets, scale)
            if index == 2 and mode.skips.loss_scale > 1:
                gradient[0, 0] = float("inf")
            return value, gradient

        mode.loss = loss
        for index in range(5):
            engine.noted[me].clear()
            before = len(events)
            outcomes.append(trainer.step(index, *mode.batch(source, index)))
            found.append(
                (list(engine.noted[me]), [what for thread, what in events[before:] if thread == me])
            )
        assert len({outcome.lr for outcome in outcomes}) == 5
        assert [outcome.updated for outcome in outcomes[2:]] == [
            mode.skips.loss_scale == 1,
            True,
            True,
        ]
        return found

    for found in run_ranks(ranks, run):
        assert [happened for _, happened in found[2:]] == [["read"]] * 3
        launches, again = ([*map(repr, each)] for each, _ in found[3:])
        assert len(launches) > 5
        kernels = [launch[0] for launch in found[3][0]]
        assert "activation_backward" not in kernels, "GELU's derivative is within a product"
        # Slices of logits add their losses, and each micro-batch adds the gradient of the head.
        assert ("add" in kernels) == any("logit_chunks" in key for key in settings), (
            "a shortcut is within a product, or within what adds the bias to the ranks' sum"
        )
        # A segment of two computes the sum of its first unit again.
        sums = 3 if "memory.recompute=2" in settings else 2
        assert kernels.count("add_bias") == sums * 2 * ("layout.tp=2" in settings), (
            "of each micro-batch two"
        )
        if "replication.zero=3" in settings:
            launches, again = sorted(launches), sorted(again)
        for one, other in zip(launches, again, strict=True):
            assert one == other
    assert cupy.faults == []


@pytest.mark.parametrize("update", ["async", "bounded"])
def test_async_workers_read_the_device_once_and_servers_never(update, monkeypatch):
    """A server applies what is pushed by numbers that came with it. A message reads for itself."""
    gpu.play(monkeypatch)
    reads, get, steps = [], cupy.ndarray.get, 3

    def noting(array):
        reads.append(threading.get_ident())
        return get(array)

    monkeypatch.setattr(cupy.ndarray, "get", noting)
    config = parse(
        with_settings(
            {},
            [
                *SETTINGS,
                f"run.steps={steps}",
                "replication.mode=server",
                "replication.servers=2",
                f"replication.update={update}",
            ],
        )
    )

    def run(transport):
        trainer, source, _ = build(transport, config)
        mode, me, computed = trainer.replica, threading.get_ident(), 0
        before = reads.count(me)
        for index in range(steps):
            for number in mode.steps(index, lambda: False):
                trainer.step(number, *mode.batch(source, number))
                computed += 1
            assert mode.outcome(index, None).updated
        trainer.sync_parameters()
        return reads.count(me) - before, computed

    found = run_ranks(4, run)
    assert [read for read, _ in found] == [computed for _, computed in found]
    assert sum(computed for _, computed in found) == 2 * steps
    assert cupy.faults == []
