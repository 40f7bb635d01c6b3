"""State in codes of 8 bits: the codes themselves, and buffers of pieces that are read and written by slices."""

from itertools import pairwise

import numpy as np
import pytest

from mpitrain.config import Optimizer, parse
from mpitrain.layers.base import Parameter, Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Arena, HostBackend
from mpitrain.ops.codes import BLOCK, SIGNED, TINY, UNSIGNED, block_count, decode, encode
from mpitrain.ops.device import host_ops
from mpitrain.optim import RULES
from mpitrain.optim.coded import CodedOptimizer, CodedState, is_coded, regions
from mpitrain.regions import Piece
from mpitrain.run.job import with_hyper_parameters

MAPS = {"signed": SIGNED, "unsigned": UNSIGNED}
SHAPES = {"small": (63, 64), "bias": (100,), "weight": (70, 64), "long": (5000,), "tiny": (3,)}


class Tensors:
    """A layer of tensors alone."""

    def parameters(self):
        return [
            Parameter(name, shape, lambda rng, shape: rng.standard_normal(shape), len(shape) == 2)
            for name, shape in SHAPES.items()
        ]


class Embedding(Tensors):
    """The same, of tokens."""

    vocab = 7


STORAGE = Storage([Unit("embedding", Embedding()), Unit("own", Tensors())], "float32")
CUTS = [(0, STORAGE.length), (0, 4096 + 96), (4096 + 96, STORAGE.length - 608), (0, 32)]


def state(pieces, of=SIGNED):
    found = regions(STORAGE, Optimizer(), pieces)
    length = sum(piece.stop - piece.start for piece in pieces)
    everything = [region for own in found.values() for region in own]
    return CodedState(everything, length, STORAGE.dtype, of, HostBackend()), everything


def drawn(count, of, seed=0):
    """Numbers of many magnitudes, some of them 0."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 3, count)
    values[::17] = 0
    return (np.abs(values) if of is UNSIGNED else values).astype(np.float32)


@pytest.mark.parametrize("name", MAPS)
def test_a_map_is_ascending_with_its_ends_and_0(name):
    of = MAPS[name]
    assert np.all(np.diff(of.values[:255]) > 0) and of.values[-1] == 1 and 0 in of.values
    assert of.values[0] == (0 if of is UNSIGNED else -1)
    assert of.values.dtype == np.float32 and np.abs(of.values[of.values != 0]).min() < 1e-6
    if of is SIGNED:
        assert np.array_equal(-of.values[254::-1], of.values[:255])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("count, lead", [(0, 0), (1, 224), (1000, 0), (1000, 96), (256, 0)])
def test_each_number_has_the_nearest_code_of_its_block(name, count, lead):
    of, values = MAPS[name], drawn(count, MAPS[name])
    codes, scales = encode(values, lead, of)
    assert len(scales) == block_count(count, lead)
    for block in range(len(scales)):
        here = slice(max(0, block * BLOCK - lead), (block + 1) * BLOCK - lead)
        own = values[here].astype(float)
        assert scales[block] == np.abs(own).max()
        distances = np.abs(own[:, None] - np.float64(scales[block]) * of.values.astype(float))
        if of is UNSIGNED:
            distances[own > 0, 0] = np.inf  # a positive number never becomes 0
        chosen = np.take_along_axis(distances, codes[here][:, None].astype(int), 1)[:, 0]
        assert np.all(chosen <= distances.min(1) * (1 + 1e-6))
        assert np.array_equal(codes[here] == 0, own == 0) or of is SIGNED
    again = encode(decode(codes, scales, lead, of, np.float32), lead, of)
    assert np.array_equal(again[0], codes) and np.array_equal(again[1], scales)


@pytest.mark.parametrize("name", MAPS)
def test_the_table_of_upper_bits_finds_the_code_of_every_number(name):
    of = MAPS[name]
    sweep = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = np.nextafter(of.bounds[:-1], [[-2], [2]]).astype(np.float32).ravel()
    values = np.concatenate([sweep[np.abs(sweep) <= 1], near, of.bounds[:-1], of.values])
    found = of.lowest[values.view(np.uint32) >> 16]
    found = found + (values > of.bounds[found])
    assert np.array_equal(found, np.searchsorted(of.bounds[:-1], values))


def test_a_block_of_numbers_that_are_too_small_is_0():
    values = np.full(300, TINY / 2, np.float32)
    values[-1] = 1
    codes, scales = encode(values, 0, UNSIGNED)
    assert scales.tolist() == [0, 1]
    assert not decode(codes, scales, 0, UNSIGNED, np.float32)[:256].any()


def test_large_tensors_are_coded_but_for_embeddings_and_tied_ones():
    found = {entry.name for entry in STORAGE.entries if is_coded(STORAGE, entry)}
    assert found == {"own.weight", "own.long"}
    tied = [entry.parameter._replace(holders="own.weight") for entry in STORAGE.entries]
    entries = [e._replace(parameter=p) for e, p in zip(STORAGE.entries, tied, strict=True)]
    assert not any(is_coded(STORAGE, entry) for entry in entries)
    plain = 2 * (63 * 64 + 103) + 70 * 64 + 5000
    blocks = (70 * 64 + 5000) / 256
    state_bytes = CodedOptimizer.state_bytes(RULES["adamw8bit"], STORAGE)
    assert state_bytes == 2 * (70 * 64 + 5000 + 4 * blocks + 4 * plain)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("start, stop", CUTS)
def test_values_that_are_read_and_written_again_have_the_same_codes(name, start, stop):
    of = MAPS[name]
    one, found = state([Piece(start, stop, 0)], of)
    one[0 : one.size] = drawn(one.size, of)
    codes, scales, plain = one.codes.copy(), one.scales.copy(), one.plain.copy()
    for low in range(0, one.size, 333):
        one[low : low + 333] = one[low : low + 333].copy()
    assert np.array_equal(one.codes, codes) and np.array_equal(one.scales, scales)
    assert np.array_equal(one.plain, plain) and one.nbytes == sum(
        array.nbytes for array in (codes, scales, plain)
    )
    assert all(region.lead % 32 == 0 for region in found)


@pytest.mark.parametrize("name", MAPS)
def test_in_other_pieces_a_value_moves_by_at_most_one_code(name):
    of = MAPS[name]
    whole, found = state([Piece(0, STORAGE.length, 0)], of)
    whole[0 : whole.size] = drawn(whole.size, of)
    starts = {entry.name: entry.start for entry in STORAGE.entries}
    ends = sorted([0, starts["own.weight"] + 352, starts["own.long"] + 32, STORAGE.length])
    pieces = [Piece(*cut, cut[0]) for cut in pairwise(ends)]
    other, cut = state(pieces, of)
    other[0 : whole.size] = whole[0 : whole.size]
    assert len(cut) > len(found) and any(region.lead for region in cut)
    gaps = np.pad(np.diff(of.values.astype(float)), 1, mode="edge")
    widest = np.maximum(gaps[1:], gaps[:-1])
    for region in cut:
        here = slice(region.start, region.stop)
        one, two = whole[here].astype(float), other[here].astype(float)
        if not region.scales:
            assert np.array_equal(one, two)
            continue
        blocks = (np.arange(len(one)) + region.lead) // BLOCK
        scales = other.scales[region.scales][blocks]
        assert np.all(np.abs(one - two) <= widest[other.codes[region.values]] * scales * 1.0001)


def test_steps_follow_those_of_adamw_and_leave_small_tensors_bitwise_equal():
    parameters = {}
    for name in ("adamw", "adamw8bit"):
        settings = with_hyper_parameters(parse({"optimizer": {"name": name}})).optimizer
        flat = np.zeros(STORAGE.length, np.float32)
        STORAGE.initialize(flat, 0, HostBackend())
        pieces = [Piece(0, 4192, 0), Piece(4192, STORAGE.length, 4192)]
        gradients, rule = np.empty_like(flat), RULES[name]
        here = {piece: slice(piece.start, piece.stop) for piece in pieces}
        arrays = {piece: (flat[at], gradients[at], None) for piece, at in here.items()}
        own = rule.step.optimizer(
            rule, settings, STORAGE, arrays, host_ops(), HostBackend(), Arena()
        )
        rng = np.random.default_rng(1)
        for step in range(1, 11):
            gradients[:] = rng.standard_normal(STORAGE.length)
            own.update(1.0, 0.01, step)
        parameters[name] = flat
    one, other = parameters.values()
    for entry in STORAGE.entries:
        a, b = entry.view(one), entry.view(other)
        if is_coded(STORAGE, entry):
            error = np.abs(a - b)
            assert 0 < error.max() < 0.01 and error.mean() < 1e-3, entry.name
        else:
            assert np.array_equal(a, b), entry.name
