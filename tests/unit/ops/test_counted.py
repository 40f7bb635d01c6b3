"""Counted operations lease what the operations themselves lease, byte for byte, without computing."""

import numpy as np
import pytest

from mpitrain.layers.base import Unit, backward, normal
from mpitrain.layers.plain import Plain, Sequential
from mpitrain.machine.backend import Arena, has_memory
from mpitrain.ops import OPERATIONS
from mpitrain.ops.cuda import product
from mpitrain.ops.device import cuda_ops, host_ops, rounded, simulated
from mpitrain.ops.reference.attention import Seen
from mpitrain.run.count.operations import Count, Unlaunched, counted, sizes_of
from mpitrain.run.count.weightless import Weightless, WeightlessForKernels, WeightlessMemory
from tests.laws.layers import NOW, WIDTH, kinds
from tests.unit.placing import place

DTYPES = {"host": np.float64, "bfloat16": np.float32, "float16": np.float32, "kernels": np.float32}


def bodies_of(name):
    """The operations of a backend, and the same ones on arrays without memory."""
    if name == "kernels":
        kernels = simulated()
        return cuda_ops(kernels), cuda_ops(Unlaunched(kernels), product.gemm)
    ops = host_ops() if name == "host" else rounded(name).ops
    return ops, ops


def levels(layer, arena, weights, gradients, x, dy, both):
    """Live bytes after each pass of a layer, and the peak of each."""
    found = []

    def note():
        found.append((arena.live, arena.peak))
        arena.peak = arena.live

    y, saved = layer.forward(weights, x, NOW, arena)
    note()
    del y
    note()
    if both:
        dx = backward(layer, weights, dy, saved, gradients, arena)
        del saved
    else:
        dx, pending = layer.backward_input(weights, dy, saved, arena)
        del saved
        note()
        layer.backward_weight(pending, gradients, arena)
        del pending
    note()
    del dx
    note()
    assert arena.live == 0
    return found


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    "body", [*[*DTYPES][:-1], pytest.param("kernels", marks=pytest.mark.compile)]
)
def test_a_layer_leases_what_is_counted(body, both):
    real, leasing = bodies_of(body)
    memory = WeightlessMemory(WeightlessForKernels if body == "kernels" else Weightless)
    mine, count, dtype = Arena(memory), Count(), DTYPES[body]
    plain = Plain(counted(leasing, count))
    layers = [kinds(Plain(real)), kinds(plain)]
    for name in layers[0]:
        for wrap in (lambda plain, layer: layer, lambda plain, layer: plain.residual(layer)):
            units = [
                wrap(factory, found[name])
                for factory, found in zip((Plain(real), plain), layers, strict=True)
            ]
            expected = None
            weights, gradients, _, slots = place([Unit("layer", units[0])], 1, dtype)
            for slot in slots.values():
                slot.array[...] = 0
            x = np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(dtype)
            truth = [
                levels(units[0], Arena(), weights["layer"], gradients["layer"], x, x + 1, both)
                for _ in range(2)  # gradients are written, then added to
            ]
            weights, gradients, _, slots = place([Unit("layer", units[1])], 1, dtype)
            for slot in slots.values():
                slot.array = memory.made(slot.array.shape, dtype)
            weights = without_memory(weights, memory)
            array = memory.made(x.shape, dtype)
            for expected in truth:
                found = levels(
                    units[1], mine, weights["layer"], gradients["layer"], array, array, both
                )
                assert found == expected, name


def without_memory(tree, memory):
    if isinstance(tree, dict):
        return {name: without_memory(leaf, memory) for name, leaf in tree.items()}
    return memory.made(tree.shape, tree.dtype)


def test_flops_are_those_of_the_products():
    memory, count = WeightlessMemory(), Count()
    ops, arena = counted(host_ops(), count), Arena(memory)
    x, w, b = (memory.made(shape, "float32") for shape in ((5, 3), (7, 3), (7,)))
    y, saved = ops.linear(x, w, b, arena)
    assert count.flops == 2 * 5 * 3 * 7 and y.shape == (5, 7)
    _, pending = ops.linear_backward_input(y, w, saved, arena)
    ops.linear_backward_weight(pending, w, True, arena)
    assert count.flops == 3 * 2 * 5 * 3 * 7 and count.recomputed == 0
    count.is_backward = True
    ops.linear(x, w, b, arena)
    assert count.recomputed == 2 * 5 * 3 * 7
    before = count.flops
    qkv = memory.made((2, 11, 3 * 12), "float32")
    q, kv = qkv[..., :12], qkv[..., 12:]
    y, saved = ops.attention(q, kv, 3, arena)
    assert count.flops - before == 2 * 2 * 2 * 11 * 11 * 12
    before = count.flops
    ops.attention_backward(y, saved, q, kv, arena)
    assert count.flops - before == 2 * 4 * 2 * 11 * 11 * 12
    for window, keys in ((4, 4), (11, 11), (90, 11)):
        before = count.flops
        y, saved = ops.attention(q, kv, 3, arena, Seen(window=window))
        ops.attention_backward(y, saved, q, kv, arena)
        assert count.flops - before == 2 * 6 * 2 * 11 * keys * 12


def test_products_are_dims_of_the_operands():
    for row in OPERATIONS.values():
        assert {letter for letter in row.products if letter.isalpha()} <= set(row.operands), row


def test_sizes_are_read_from_the_arguments():
    memory = WeightlessMemory()
    q, kv = memory.made((2, 5, 12), "float32"), memory.made((2, 5, 8), "float32")
    found = sizes_of(OPERATIONS["attention"], (q, kv, 3))
    assert found == {"H": 3, "E": 1, "B": 2, "T": 5, "D": 4}
    found = sizes_of(OPERATIONS["attention_backward"], (q, (q, kv, 3, []), q, kv))
    assert (found["B"], found["T"], found["H"] * found["D"]) == (2, 5, 12)
    assert found["E"] * found["D"] == 4


CALLS = {
    "broadcast": lambda x, y: x + y[:1],
    "scalar": lambda x, y: x * 0.5,
    "compare": lambda x, y: x > y,
    "sum": lambda x, y: x.sum(1, keepdims=True),
    "sum of all": lambda x, y: np.sum(x),
    "wide sum": lambda x, y: x.sum(0, dtype=np.float64),
    "maximum": lambda x, y: x.max(1, initial=-np.inf),
    "product": lambda x, y: x @ y.T,
    "batches": lambda x, y: x.reshape(2, 2, 3) @ y.reshape(2, 2, 3).swapaxes(1, 2),
    "vectors": lambda x, y: np.vecdot(x, y),
    "of a vector": lambda x, y: x @ y[0],
    "runs": lambda x, y: np.add.reduceat(x, [0, 2], axis=0),
    "where": lambda x, y: np.where(x > 0, x, y),
    "alike": lambda x, y: np.empty_like(x),
    "largest": lambda x, y: x.argmax(1),
    "picked": lambda x, y: x[np.arange(4), [0, 1, 2, 0]],
    "cast": lambda x, y: x.astype(np.float64),
    "copied": lambda x, y: x.T.reshape(-1),
    "transposed": lambda x, y: x.reshape(2, 2, 3).transpose(1, 0, 2)[:, 1:],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_result_without_memory_has_the_shape_and_dtype_of_numpys(name):
    memory, real = WeightlessMemory(), np.ones((4, 3), np.float32)
    truth = CALLS[name](real, real)
    found = CALLS[name](*(memory.made(real.shape, real.dtype) for _ in range(2)))
    assert (found.shape, found.dtype, np.ndim(found)) == (truth.shape, truth.dtype, truth.ndim)
    if truth.ndim and truth.base is not None:
        assert found.strides == truth.strides


def test_an_array_without_memory_takes_none():
    memory = WeightlessMemory()
    array = memory.made((1 << 20, 1 << 20), "float32")  # 4 TB
    array += 1
    array[5:] = 2
    array.fill(3)
    assert array[5, 5] == 0 and not has_memory(array) and has_memory(np.ones(1))
    with pytest.raises(TypeError):
        assert array.ctypes


@pytest.mark.parametrize("attention", ["whole", "tiled"])
@pytest.mark.parametrize("body", ["host", "bfloat16"])
def test_later_blocks_and_sequences_lease_as_the_second(body, attention):
    """Arrays of many blocks and sequences: without memory, a loop ends after two rounds."""
    ops = host_ops(attention) if body == "host" else rounded(body, attention).ops
    memory, count, shape = WeightlessMemory(), Count(), (5, 150, 96)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = []
    for some, arena, array in (
        (ops, Arena(), x),
        (counted(ops, count), Arena(memory), memory.made(shape, np.float32)),
    ):
        plain = Plain(some)
        layer = Sequential(
            norm=plain.norm(96),
            qkv=plain.qkv(96, 6, normal(0.1)),
            attention=plain.attention(96, 6),
            up=plain.linear(96, 768, normal(0.1), "gelu"),
            down=plain.linear(768, 96, normal(0.1)),
        )
        weights, gradients, _, slots = place([Unit("layer", layer)], 1, np.float32)
        if some is not ops:
            for slot in slots.values():
                slot.array = memory.made(slot.array.shape, np.float32)
            weights = without_memory(weights, memory)
        own = weights["layer"], gradients["layer"], array, array
        found.append([levels(layer, arena, *own, both) for both in (False, True)])
    assert found[0] == found[1]
