"""Tensor-parallel layers and adapters on the fake GPU: columns are copied without a kernel of CuPy, which would compute."""

import numpy as np
import pytest

from mpitrain.layers.base import Unit, normal
from mpitrain.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpitrain.run.build import build
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu
from tests.fakes.pointers import PointerThreads
from tests.training import configured

pytestmark = pytest.mark.compile

COMMON = ["optimizer.warmup=0", "optimizer.lr=0.01", "run.steps=2"]
GPT = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=8",
    "batch.size=2",
    "batch.micro_batches=2",
    "run.eval_rows=2",
]


def own_layers(transport, settings):
    """Losses, norms, and logits of one row and of three, of layers that gather or split columns themselves."""

    def units(layers):
        draw = normal(0.3)
        return [
            Unit("a", ColumnParallelLinear(layers, 10, 12, draw, "gelu", gather_output=True)),
            Unit("b", RowParallelLinear(layers, 12, 6, draw, input_is_parallel=False)),
            Unit("c", ColumnParallelLinear(layers, 6, 4, draw, bias=False, gather_output=True)),
        ]

    own = ["model.kind=mlp", "model.width=12", "batch.size=3"]
    trainer = Trainer(PointerThreads(transport), units, configured(*own, *COMMON, *settings))
    rng, found = np.random.default_rng(0), []
    for step in range(2):
        x = rng.standard_normal((3, 10)).astype(np.float32)
        found.append(np.array(trainer.step(step, x, np.array([0, 3, 1]))[:2]))
    return [*found, *(trainer.backend.to_host(trainer.logits(x[:rows])) for rows in (1, 3))]


def a_gpt(transport, settings):
    """Losses, norms, logits of one row and of two, and an evaluation of a GPT with adapters of a part of qkv."""
    adapters = ["lora.rank=2", "lora.targets=q,v_proj"]
    trainer, source, _ = build(
        PointerThreads(transport), configured(*GPT, *COMMON, *adapters, *settings)
    )
    found = [
        np.array(trainer.step(step, *trainer.replica.batch(source, step))[:2]) for step in range(2)
    ]
    tokens = np.arange(10).reshape(2, 5)
    found += [trainer.backend.to_host(trainer.logits(tokens[:rows])) for rows in (1, 2)]
    return [*found, np.array(trainer.evaluate(source))]


@pytest.mark.parametrize(
    "job, axis, ranks",
    [
        (own_layers, "tp", 1),
        (own_layers, "tp", 2),
        (a_gpt, "tp", 1),
        (a_gpt, "tp", 2),
        (a_gpt, "cp", 2),
    ],
)
def test_columns_are_copied_on_a_gpu_as_in_the_simulator(job, axis, ranks, monkeypatch):
    layout = f"layout.{axis}={ranks}"
    simulated = run_ranks(ranks, job, [layout, "device.kind=cuda-sim"])
    gpu.play(monkeypatch)
    on_gpu = run_ranks(ranks, job, [layout, "device.kind=cuda", "device.cuda_aware=no"])
    for one, other in zip(simulated, on_gpu, strict=True):
        assert all(map(np.array_equal, one, other))
    assert cupy.faults == []
