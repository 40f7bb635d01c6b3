"""The training step where arrays are not NumPy's, and where GPU kernels compute."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.kernels.source import package_sources
from mpitrain.machine import cuda
from mpitrain.ops.device import KERNELS
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu
from tests.fakes.pointers import PointerThreads
from tests.saving import save
from tests.training import configured, same, stepped

pytestmark = pytest.mark.compile

TINY = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=8",
    "batch.size=6",
    "run.steps=5",
    "batch.micro_batches=2",
    "optimizer.warmup=2",
    "replication.bucket_mb=0.004",
    "replication.algorithm=ring",
]
STEPS = 3
LATE = {"adamw", "add_into", "decode_fp16", "decode_int8", "encode_fp16", "encode_int8", "convert"}
"""Kernels that a step launches and a counted one does not: the update, and those of messages."""


def curve(transport, folder, settings):
    """Losses and gradient norms; the parameters and the optimizer's state, through a checkpoint, by full name."""
    config = configured(*TINY, *settings)
    trainer, source, _ = build(transport, config)
    outcomes = stepped(trainer, source, range(STEPS))
    saved = save(folder, trainer, Done(STEPS, 6 * STEPS, "run"), keep=1)
    again = build(transport, config, saved)
    assert replicas_equal(trainer) and again.step == STEPS
    parts = (
        (trainer.parameters, *trainer.replica.optimizer.state.values()),
        (again.trainer.parameters, *again.trainer.replica.optimizer.state.values()),
    )
    for one, other in zip(*parts, strict=True):
        assert np.array_equal(trainer.backend.to_host(one), trainer.backend.to_host(other)), (
            "a checkpoint is all there is"
        )
    assert trainer.arena.live == 0
    rows = source.held_out_rows(range(4))[0]
    assert np.array_equal(
        trainer.backend.to_host(trainer.logits(rows)),
        trainer.backend.to_host(again.trainer.logits(rows)),
    )
    loss, accuracy = trainer.evaluate(_few(source))
    facts = [[o.loss, o.grad_norm] for o in outcomes] + [[loss, accuracy]]
    return np.array(facts), trainer.backend.to_host(trainer.parameters).copy()


def _few(source):
    """The source with few held-out rows: the simulator is slow."""

    class Few:
        held_out, held_out_rows = 4, staticmethod(source.held_out_rows)

    return Few


def curves(ranks, folder, *settings):
    """What every rank saw, which must be one."""
    results = run_ranks(ranks, lambda threads: curve(PointerThreads(threads), folder, settings))
    assert all(same(results[0], other) for other in results[1:])
    return results[0]


def test_kernels_on_the_simulator_train_as_the_cpu_does(tmp_path):
    on_cpu = curves(3, tmp_path / "cpu", "device.kind=cpu")[0]
    simulated = curves(3, tmp_path / "sim", "device.kind=cuda-sim")[0]
    assert np.ptp(on_cpu[:STEPS, 0]) > 0.05, "the loss must move, or equality says nothing"
    assert np.all(np.abs(simulated[:, 0] / on_cpu[:, 0] - 1) <= 1e-4)


def test_products_of_a_library_and_of_three_tf32_train_as_our_own_do(tmp_path):
    tiled, *others = (
        curves(2, tmp_path / gemm, "device.kind=cuda-sim", f"device.gemm={gemm}")[0]
        for gemm in ("tiled", "library", "3xtf32")
    )
    for other in others:
        assert np.all(np.abs(other[:, 0] / tiled[:, 0] - 1) <= 1e-4)
        assert not np.array_equal(other, tiled)


@pytest.mark.counted
@pytest.mark.parametrize(
    "cuda_aware, wire, gemm", [("no", "fp16", "library"), ("yes", "int8", "3xtf32")]
)
def test_a_gpu_trains_bit_by_bit_as_the_simulator_does(
    cuda_aware, wire, gemm, tmp_path, monkeypatch
):
    """The arrays of the fake GPU refuse to be NumPy's, and what is not waited for is garbage."""
    travel = f"replication.wire={wire}", f"device.gemm={gemm}"
    simulated = curves(3, tmp_path / "sim", "device.kind=cuda-sim", *travel)
    gpu.play(monkeypatch)
    on_gpu = curves(
        3, tmp_path / "gpu", "device.kind=cuda", f"device.cuda_aware={cuda_aware}", *travel
    )
    assert same(simulated, on_gpu)
    assert cupy.faults == []
    engine = KERNELS["cuda"]().engine
    sources = {name: stem for stem, file in package_sources().items() for name in file.kernels}
    prepared = {one for each in engine.prepared.values() for one in each}
    launched = {each[:2] for launches in engine.noted.values() for each in launches}
    late = {name for name, words in launched if (sources[name], words) not in prepared}
    assert len(engine.prepared) == 3
    assert late <= LATE, "the ranks of a host compile the kernels of a step together"


def test_gpus_that_reduce_each_other_s_memory_train_as_by_messages(tmp_path, monkeypatch):
    """Bit by bit on two ranks, since a sum of two has one order."""
    gpu.play(monkeypatch)
    monkeypatch.setattr(cuda, "_allocation_start", cupy.allocation_start)
    by_ring, by_memory = (
        curves(
            2,
            tmp_path / algorithm,
            "device.kind=cuda",
            "device.cuda_aware=no",
            f"replication.algorithm={algorithm}",
        )
        for algorithm in ("ring", "shared")
    )
    assert same(by_ring, by_memory)
    assert cupy.faults == []


@pytest.mark.parametrize("wire", ["topk:0.1", "powersgd:2"])
def test_residuals_work_in_the_simulator_and_not_on_a_gpu(wire, tmp_path, monkeypatch):
    facts, _ = curves(2, tmp_path / "sim", "device.kind=cuda-sim", f"replication.wire={wire}")
    assert np.isfinite(facts).all()
    gpu.play(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"device\.kind is cuda\.\nSet replication\.wire to fp16"
    ) as refused:
        curves(2, tmp_path / "gpu", f"replication.wire={wire}")
    assert refused.value.agreed


def by_mode(transport, settings):
    """Losses and norms, an evaluation and the settled parameters of a run by replication.mode."""
    trainer, source, _ = build(PointerThreads(transport), configured(*TINY, *settings))
    outcomes = stepped(trainer, source, range(STEPS))
    loss, accuracy = trainer.evaluate(_few(source))
    assert replicas_equal(trainer) and trainer.arena.live == 0
    return (
        np.array([[o.loss, o.grad_norm] for o in outcomes] + [[loss, accuracy]]),
        trainer.backend.to_host(trainer.parameters).copy(),
    )


@pytest.mark.parametrize(
    "settings",
    [
        ["replication.mode=server"],
        [
            "layout.tp=3",
            "layout.algorithm=ring",
            "model.heads=3",
            "model.width=12",
            "model.context=4",
            "model.tied=true",
            "layout.sequence_parallel=true",
            "batch.size=6",
        ],
        ["replication.mode=gossip", "replication.period=2"],
        [
            "replication.mode=local",
            "replication.period=2",
            "replication.outer_lr=0.7",
            "replication.outer_momentum=0.9",
        ],
        [
            "layout.pp=3",
            "pipeline.schedule=zero-bubble",
            "batch.micro_batches=4",
            "model.tied=true",
        ],
        ["layout.pp=3", "pipeline.schedule=async-2bw", "batch.micro_batches=3"],
        ["replication.zero=3", "replication.gather=int8", "device.gemm=library"],
        [
            "model.experts=6",
            "layout.ep=3",
            "model.capacity=0.8",
            "model.balance=0.1",
            "model.z=0.01",
            "model.shared=8",
            "replication.zero=3",
            "memory.recompute=unit",
        ],
    ],
)
def test_modes_and_pipelines_on_a_gpu_equal_the_simulator_bitwise(settings, monkeypatch):
    on_cpu, simulated = (
        run_ranks(3, by_mode, [*settings, f"device.kind={kind}"]) for kind in ("cpu", "cuda-sim")
    )
    np.testing.assert_allclose(
        simulated[0][0], on_cpu[0][0], rtol=1e-4, atol=0
    )  # none need be right
    assert np.isfinite(simulated[0][0][2:]).all(), (
        "a stream's first steps are not known when they are asked for"
    )
    gpu.play(monkeypatch)
    on_gpu = run_ranks(3, by_mode, [*settings, "device.kind=cuda", "device.cuda_aware=no"])
    for one, other in zip(simulated, on_gpu, strict=True):
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))
    assert cupy.faults == []
