"""device.graph=auto on the fake GPU: one launch repeats those of a step, as long as nothing that they depend on has changed."""

import threading

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.ops.device import KERNELS
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu
from tests.fakes.pointers import PointerThreads
from tests.training import same

pytestmark = pytest.mark.compile

SETTINGS = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=8",
    "batch.size=4",
    "batch.micro_batches=2",
    "run.steps=8",
    "optimizer.clip=0.5",
    "device.kind=cuda",
    "device.cuda_aware=no",
]
STEPS = 7


def steps(settings, between=lambda index, trainer: None, ranks=1):
    """Losses and norms of steps, final parameters, and for each step its launches by the host and by graphs."""

    def run(transport):
        trainer, source, _ = build(
            PointerThreads(transport), parse(with_settings({}, [*SETTINGS, *settings]))
        )
        engine, me = KERNELS["cuda"]().engine, threading.get_ident()
        outcomes, launched = [], []
        for index in range(STEPS):
            kept = between(index, trainer)
            engine.noted[me].clear()
            cupy.log().clear()
            result = trainer.step(index, *trainer.replica.batch(source, index))
            outcomes.append((result.loss, result.grad_norm, result.updated))
            graphs = [event[1] for event in cupy.log() if event[0] == "graph"]
            launched.append((list(engine.noted[me]), graphs))
            del kept
        assert trainer.arena.live == 0
        parameters = trainer.backend.to_host(trainer.parameters).copy()
        return np.array(outcomes, float), parameters, launched

    *numbers, launched = run_ranks(ranks, run)[0]
    assert cupy.faults == []
    return numbers, launched


@pytest.mark.parametrize(
    "settings",
    [
        ["precision.compute=float16"],
        ["model.experts=4", "model.capacity=0.8", "model.shared=8", "memory.recompute=unit"],
        ["model.tied=true", "memory.logit_chunks=2"],
    ],
)
def test_a_graph_has_the_launches_of_a_step_and_its_bits(settings, monkeypatch, capsys):
    gpu.play(monkeypatch)
    plain, eager = steps(settings)
    graphed, launched = steps([*settings, "device.graph=auto"])
    assert same(plain, graphed) and "device.graph" not in capsys.readouterr().err
    captures = [i for i, (own, graphs) in enumerate(launched) if graphs and len(own) > 10]
    replays = [i for i, (own, graphs) in enumerate(launched) if graphs and len(own) <= 10]
    assert captures and len(replays) >= 3, [(len(own), graphs) for own, graphs in launched]
    assert all(not graphs for _, graphs in eager)
    for index in captures:
        ours, others = ([launch[0] for launch in each[index][0]] for each in (launched, eager))
        assert ours == others
    # Arguments are those of the step before the capture: the same addresses and numbers.
    first = captures[0]
    assert [*map(repr, launched[first][0])] == [*map(repr, launched[first - 1][0])]


def test_a_changed_buffer_is_found(monkeypatch):
    """Nothing is launched on the old addresses: their content would be somebody else's."""
    gpu.play(monkeypatch)
    held = []

    def between(index, trainer):
        if index == 4:  # What a step finds free is no longer the same.
            held.append(trainer.arena.take((1 << 12,), np.float32))
        if index == 5:
            held.clear()
            trainer.replica.losses = trainer.backend.zeros(2, np.float64)

    plain, _ = steps([], between)
    graphed, launched = steps(["device.graph=auto"], between)
    assert same(plain, graphed)
    assert [bool(graphs) for _, graphs in launched[2:]] == [True, True, False, False, True]


def test_a_graph_writes_nothing_that_is_kept_between_steps(monkeypatch, capsys):
    """New logits are computed before the old ones die, so as much is leased in each step, but other buffers are free. Then there
    is no graph, and rank 0 says why.
    """
    gpu.play(monkeypatch)
    kept, tokens = [], np.zeros((2, 8), np.int32)

    def between(index, trainer):
        if kept:
            assert same(kept[0], [trainer.backend.to_host(kept[1])])
        logits = trainer.logits(tokens) if index < STEPS - 1 else None
        kept[:] = []
        if logits is not None:
            kept[:] = [trainer.backend.to_host(logits).copy()], logits

    _, launched = steps(["device.graph=auto"], between)
    assert not any(graphs for _, graphs in launched)
    assert capsys.readouterr().err.count("What is kept between steps changes") == 1


@pytest.mark.parametrize(
    ("settings", "ranks", "reason"),
    [
        (["model.dropout=0.2"], 1, "It copies numbers from the host"),
        (["device.gemm=library"], 1, "It cannot be captured: calling cuBLAS"),
        (["data.attend=document", "data.separator=0"], 1, "Documents and padding need the host"),
        (["memory.release_every=1"], 1, "memory.release_every gives back"),
        (["run.inject=raise:0@8:backward"], 1, "run.inject fails within a step"),
        (["replication.algorithm=ring"], 2, "The host drives the messages"),
    ],
)
def test_what_needs_the_host_launches_each_kernel_and_says_so_once(
    settings, ranks, reason, monkeypatch, capsys
):
    gpu.play(monkeypatch)
    _, launched = steps([*settings, "device.graph=auto"], ranks=ranks)
    assert not any(graphs for _, graphs in launched)
    assert capsys.readouterr().err.count(reason) == 1
