"""The kernel launches of a training step of GPT-2 124M, as an H100 gets them; arrays without memory stand for its own."""

from collections import Counter

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import pytest

from mpitrain.config import Optimizer
from mpitrain.kernels.loader import Kernels
from mpitrain.layers.base import READING, backward
from mpitrain.layers.flat import Storage
from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import Arena, HostBackend
from mpitrain.models.gpt import gpt
from mpitrain.ops.device import cuda_ops
from mpitrain.optim import RULES
from mpitrain.optim import Optimizer as OptimizerOfRank
from mpitrain.regions import Piece
from mpitrain.run.count.operations import Unlaunched
from mpitrain.run.count.weightless import WeightlessForKernels, WeightlessMemory
from tests.cases.launches import Nothing

ROWS, CONTEXT, VOCABULARY = 8, 1024, 50257
STEP = {
    "add_parts": 25,
    "adamw": 1,
    "attention_dots": 12,
    "cross_entropy": 1,
    "embedding": 1,
    "embedding_backward_positions": 1,
    "embedding_backward_table": 1,
    "gradient_facts": 1,
    "layer_norm": 25,
    "layer_norm_backward": 25,
    "sum_parts": 1,
    "total": 2,
}
"""Launches of kernels that do not depend on the dtype."""


class Noted(Unlaunched):
    """Kernels that count launches by name, and launch nothing."""

    def __init__(self):
        super().__init__(Kernels(Nothing(takes_plain=True)))
        self.names = Counter()

    def launch(self, name, grid, *rest, **more):
        self.names[name] += 0 not in grid


def step(compute, micro_batches=1):
    """The launches of a step by kernel: forward, loss, backward, statistics of the gradient, update."""
    kernels, memory = Noted(), WeightlessMemory(WeightlessForKernels)
    ops, arena = cuda_ops(kernels), Arena(memory)
    units = gpt(
        Plain(ops), vocab=VOCABULARY, context=CONTEXT, width=768, heads=12, depth=12, tied=True
    )
    storage = Storage(units, "float32")
    whole = Piece(0, storage.length, 0)
    flat, masters = (memory.made((storage.length,), "float32") for _ in range(2))
    mirror = None if compute == "float32" else memory.made((storage.length,), compute)
    weights = storage.weights(masters if mirror is None else mirror)
    gradients, _ = storage.gradients(flat)
    for _ in range(micro_batches):
        x, saved = memory.made((ROWS, CONTEXT), np.int64), []
        targets = memory.made((ROWS * CONTEXT,), np.int64)
        for w, unit in zip(weights, units, strict=True):
            x, state = unit.layer.forward(w, x, READING, arena)
            saved.append(state)
        _, dy = ops.cross_entropy(x.reshape(len(targets), -1), targets, 1.0, arena)
        dy = dy.reshape(x.shape)
        for unit, w, dw in zip(units[::-1], weights[::-1], gradients[::-1], strict=True):
            dy = backward(unit.layer, w, dy, saved.pop(), dw, arena)
    ops.gradient_facts(flat, arena)
    arrays = {whole: (masters, flat, mirror)}
    optimizer = OptimizerOfRank(
        RULES["adamw"], Optimizer(), storage, arrays, ops, HostBackend(), arena
    )
    optimizer.update(1.0, 1e-3, 1)
    return kernels.names


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_a_step_of_gpt2_has_279_launches_without_split_products(compute):
    """There were 401: each bias, each gain and each run of the optimizer had a launch more. Tiles choose the splits."""
    found = step(compute)
    assert {name: found[name] for name in STEP} == STEP
    assert sum(found.values()) - found["gemm_combine"] == 279


def test_a_second_micro_batch_has_the_launches_of_the_first():
    """There were 48 more: each gradient of a bias was added to that of the first micro-batch by a launch."""
    first, both = step("bfloat16"), step("bfloat16", micro_batches=2)
    once = {"adamw", "gradient_facts", "total"}
    assert {name: both[name] for name in both.keys() - once} == {
        name: 2 * first[name] for name in first.keys() - once
    }
    assert both["adamw"] == both["gradient_facts"] == 1
