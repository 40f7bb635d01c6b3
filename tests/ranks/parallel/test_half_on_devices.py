"""Half precision where arrays have 16 bits: on the simulator close to the cpu, on the fake GPU bit by bit as there."""

import numpy as np
import pytest

from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu
from tests.fakes.pointers import PointerThreads
from tests.training import configured, stepped

pytestmark = pytest.mark.compile

NARROW = [
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "model.context=16",
    "batch.size=4",
    "run.steps=20",
    "optimizer.warmup=2",
    "replication.bucket_mb=0.02",
    "replication.algorithm=ring",
]


def first_of(tree):
    """One of the tensors in it."""
    return first_of(next(iter(tree.values()))) if isinstance(tree, dict) else tree


def run(transport, settings, steps):
    """Outcomes, the parameters, and the dtypes of what layers compute with and what is updated."""
    trainer, source, _ = build(PointerThreads(transport), configured(*NARROW, *settings))
    replica = trainer.replica
    outcomes = stepped(trainer, source, range(steps))
    assert replicas_equal(trainer) and trainer.arena.live == 0
    used = trainer.parameters if trainer.grid.is_server else first_of(replica.open(0, 0))
    dtypes = {array.dtype.name for array in (used, trainer.parameters, trainer.gradients)}
    return (
        [(o.loss, o.grad_norm) for o in outcomes],
        trainer.backend.to_host(trainer.parameters).copy(),
        dtypes,
    )


@pytest.mark.parametrize("compute, ranks", [("bfloat16", 1), ("float16", 2)])
def test_kernels_of_16_bits_train_as_the_cpu_rounds(compute, ranks):
    half = f"precision.compute={compute}"
    on_cpu = np.array(run_ranks(1, run, [half, "device.kind=cpu"], 10)[0][0])[:, 0]
    exact = np.array(run_ranks(1, run, ["device.kind=cpu"], 10)[0][0])[:, 0]
    assert np.ptp(on_cpu) > 0.3 and np.abs(on_cpu - exact).max() > 1e-6, "it trains, and rounds"
    for losses, _, dtypes in run_ranks(ranks, run, [half, "device.kind=cuda-sim"], 10):
        assert np.all(np.abs(np.array(losses)[:, 0] / on_cpu - 1) <= 0.02)
        assert dtypes == {compute, "float32"}


@pytest.mark.parametrize(
    "settings",
    [
        ["bfloat16", "replication.zero=1"],
        ["float16", "replication.zero=3"],
        ["bfloat16", "layout.tp=2"],
        ["float16", "layout.pp=2", "model.tied=true"],
        ["float16", "replication.mode=server"],
    ],
    ids=" ".join,
)
def test_16_bit_training_on_a_gpu_equals_the_simulator_bitwise(settings, monkeypatch):
    """What an array library would have to compute with in 16 bits, the fake GPU refuses."""
    compute, *others = settings
    common = [
        f"precision.compute={compute}",
        "model.width=16",
        "model.context=8",
        "batch.micro_batches=2",
        *others,
    ]
    on_cpu, simulated = (
        run_ranks(2, run, [*common, f"device.kind={kind}"], 3) for kind in ("cpu", "cuda-sim")
    )
    for (losses, *_), (wanted, *_) in zip(simulated, on_cpu, strict=True):
        assert np.all(np.abs(np.array(losses)[:, 0] / np.array(wanted)[:, 0] - 1) <= 0.02)
    gpu.play(monkeypatch)
    on_gpu = run_ranks(2, run, [*common, "device.kind=cuda", "device.cuda_aware=no"], 3)
    for one, other in zip(simulated, on_gpu, strict=True):
        assert one[0] == other[0] and np.array_equal(one[1], other[1]) and one[2] == other[2]
    assert cupy.faults == []


@pytest.mark.parametrize("zero", range(4))
def test_bytes_per_parameter_are_those_of_the_published_formulas(zero):
    """With AdamW on n ranks: 18; 6 + 12/n; 2 + 16/n; 18/n, less the 2/n of a mirror that stage 3 makes as it gathers."""

    def held(transport):
        settings = [
            "precision.compute=bfloat16",
            "device.kind=cuda-sim",
            f"replication.zero={zero}",
        ]
        replica = build(transport, configured(*NARROW, *settings)).trainer.replica
        slots = [replica.gradient_slots] if zero > 1 else []
        slots += [replica.parameter_slots] if zero > 2 else []
        replica.sync()
        beside = sum(slot.flat.nbytes for slot in slots) + replica.grid.scratch_bytes
        return (sum(replica.held_by_kind().values()) - beside) / replica.storage.length

    for n in (1, 2, 3):
        assert run_ranks(n, held) == pytest.approx(
            [(18, 6 + 12 / n, 2 + 16 / n, 18 / n - 2 / n)[zero]] * n, rel=1e-12
        )
