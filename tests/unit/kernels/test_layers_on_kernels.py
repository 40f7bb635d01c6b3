"""Layers and whole models on the simulator: what the CPU body computes."""

import sys
from functools import partial

import numpy as np
import pytest

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.layers.base import READING
from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import Arena, SimulatorBackend
from mpitrain.machine.cuda import CudaBackend
from mpitrain.models.gpt import gpt
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.tiles import MeasuredTiles
from mpitrain.ops.device import cuda_ops, ops_for
from tests.cases.numbers import numbers
from tests.fakes import cupy, gpu
from tests.laws.layers import LAWS_OF_BITS, LayerLaws, blocks
from tests.laws.operations import OperationLaws
from tests.laws.transport import laws_of
from tests.laws.vocabulary import VocabularyLaws
from tests.unit.placing import place


@pytest.mark.parametrize("law", laws_of(OperationLaws))
def test_operations_on_the_simulator_obey(law, users_kernels):
    """In float32: layers have float64, and so have the cases of the kernels."""
    getattr(OperationLaws(dtypes=["float32"]), law)(ops_for("cuda-sim"), SimulatorBackend())


@pytest.mark.parametrize("law", LAWS_OF_BITS)
def test_layers_on_hopper_s_warpgroups_obey(law, monkeypatch):
    """They are launched: with heads of 64 channels and rows of whole 16 bytes nothing else multiplies."""
    kernels, names, table = Kernels(Simulator()), set(), MeasuredTiles(wgmma=True)
    launch = kernels.launch

    def noted(name, grid, *rest, **more):
        if all(grid):
            names.add(name)
        return launch(name, grid, *rest, **more)

    monkeypatch.setattr(kernels, "launch", noted)
    ops = cuda_ops(kernels, partial(product.gemm, table=table), tensor_cores="wgmma")
    laws = LayerLaws(blocks, 64, np.dtype("bfloat16"))
    getattr(laws, law)(Plain(ops), SimulatorBackend())
    of_hopper = {name for name in names if "hopper" in name}
    assert {"gemm_hopper", "attention_hopper", "attention_hopper_backward"} <= of_hopper
    assert names - of_hopper == {"attention_dots", "add"}


@pytest.mark.parametrize("law", laws_of(VocabularyLaws))
def test_parts_of_a_vocabulary_on_arrays_that_are_not_numpy_s_obey(law, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy, "kernels_alone", True)
    cupy.faults.clear()
    getattr(VocabularyLaws(), law)(cuda_ops(gpu.kernels()), CudaBackend())
    assert cupy.faults == []


@pytest.mark.parametrize("law", laws_of(LayerLaws))
def test_layers_on_arrays_that_are_not_numpy_s_obey(law, monkeypatch):
    """The kernels are the simulator's, whose own arrays training proves."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy, "kernels_alone", True)
    cupy.faults.clear()
    backend = CudaBackend()
    ops = cuda_ops(gpu.kernels(), backend=backend)
    getattr(LayerLaws(), law)(Plain(ops, backend=backend), backend)
    assert cupy.faults == []


def test_a_block_is_launched_as_its_products_norms_and_attention_alone(monkeypatch):
    """Shortcuts, biases and GELU forward and backward are within these. In weight halves a norm's sums of parts are added up."""
    kernels, arena, names = Kernels(Simulator()), Arena(), []
    launch = kernels.launch
    monkeypatch.setattr(
        kernels,
        "launch",
        lambda name, *rest, **more: (names.append(name), launch(name, *rest, **more)),
    )
    units = gpt(Plain(cuda_ops(kernels)), vocab=7, context=6, width=8, heads=2, depth=1)[1:3]
    weights, gradients, _, _ = place(units, 1, np.float32)
    found = {}

    def noted(what, result):
        found[what] = [*names]
        names.clear()
        return result

    x = numbers(1, 2, 6, 8).astype(np.float32)
    for unit in units:
        w, grads = weights[unit.name], gradients[unit.name]
        _, saved = noted(("forward", unit.name), unit.layer.forward(w, x, READING, arena))
        _, pending = noted(("input", unit.name), unit.layer.backward_input(w, x, saved, arena))
        noted(("weight", unit.name), unit.layer.backward_weight(pending, grads, arena))
    assert found == {
        ("forward", "blocks.0.attention"): ["layer_norm", "gemm", "attention", "gemm"],
        ("input", "blocks.0.attention"): [
            "gemm",
            "attention_dots",
            "attention_backward_kv",
            "attention_backward_q",
            "gemm",
            "layer_norm_backward",
        ],
        ("weight", "blocks.0.attention"): ["add_parts", "gemm", "gemm"],
        ("forward", "blocks.0.mlp"): ["layer_norm", "gemm", "gemm"],
        ("input", "blocks.0.mlp"): ["gemm", "gemm", "layer_norm_backward"],
        ("weight", "blocks.0.mlp"): ["add_parts", "gemm", "gemm"],
    }
