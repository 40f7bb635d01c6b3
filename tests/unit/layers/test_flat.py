"""Flat storage: order, padding, views, buckets, ties and initial values."""

from operator import attrgetter

import numpy as np
import pytest

from mpitrain.layers.base import Parameter, Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import HostBackend
from mpitrain.regions import Piece

HOST = HostBackend()


def normal(generator, shape):
    return generator.standard_normal(shape)


class Described:
    """A layer that is nothing but its description."""

    def __init__(self, *parameters):
        self._parameters = list(parameters)

    def parameters(self):
        return self._parameters


def tensor(name, *shape, decayed=True, **more):
    return Parameter(name, shape, normal, decayed, **more)


UNITS = [
    Unit("embedding", Described(tensor("table", 7, 3))),
    Unit(
        "block",
        Described(
            tensor("norm.gain", 3, decayed=False),
            tensor("up.weight", 5, 3),
            tensor("up.bias", 5, decayed=False),
            tensor("frozen", 2, trainable=False),
        ),
    ),
    Unit("empty", Described()),
    Unit(
        "head",
        Described(tensor("weight", 7, 3), tensor("bias", 7, decayed=False)),
        {"weight": "embedding.table"},
    ),
]


@pytest.mark.parametrize("dp", (1, 2, 3))
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_tensors_fill_the_buffer_without_overlap_and_units_are_padded(dp, dtype):
    storage = Storage(UNITS, dtype, dp)
    assert storage.parameter_count == 21 + 3 + 15 + 5 + 2 + 7
    for layout, count in ((storage, 21 + 3 + 15 + 5 + 7), (storage.frozen, 2)):
        flat = np.zeros(layout.length, dtype)
        for number, entry in enumerate(layout.entries, 1):
            assert not entry.view(flat).any()
            entry.view(flat)[...] = number
        assert np.count_nonzero(flat) == count
        assert all(entry.start % 32 == 0 for entry in layout.entries), (
            "a mirror of 16 bits has whole cache lines, too"
        )
        for start, stop, *_ in layout.spans:
            assert start % (32 * dp) == 0 and stop % (32 * dp) == 0


def test_views_nest_by_dots_and_share_memory():
    storage = Storage(UNITS, "float32")
    flat, frozen = (np.zeros(layout.length, "f4") for layout in (storage, storage.frozen))
    weights = storage.weights(flat, frozen)
    weights[1]["up"]["weight"][...] = 2
    assert weights[1]["up"]["weight"].shape == (5, 3) and flat.sum() == 30


def test_a_tied_tensor_is_stored_once_and_its_gradient_is_one_sum():
    storage = Storage(UNITS, "float32")
    flat, frozen = (np.zeros(layout.length, "f4") for layout in (storage, storage.frozen))
    weights = storage.weights(flat, frozen)
    assert weights[3]["weight"] is weights[0]["table"]
    gradients, leaves = storage.gradients(flat)
    assert gradients[3]["weight"] is gradients[0]["table"]
    assert not gradients[3]["weight"].claim() and gradients[0]["table"].claim()
    assert [len(stored) for stored in leaves] == [1, 3, 0, 1]


def test_a_frozen_tensor_has_a_view_of_another_buffer_and_no_gradient():
    storage = Storage(UNITS, "float32")
    flat, frozen = (np.zeros(layout.length, "f4") for layout in (storage, storage.frozen))
    storage.weights(flat, frozen)[1]["frozen"][...] = 3
    assert frozen.sum() == 6 and not flat.any()
    gradients, _ = storage.gradients(flat)
    assert "frozen" not in gradients[1] and "up" in gradients[1]
    with pytest.raises(KeyError, match="frozen"):
        gradients[1]["frozen"]
    assert [bucket.units for bucket in storage.frozen_buckets()] == [(1,)]


def test_initial_values_depend_on_seed_and_name_alone():
    whole, alone = Storage(UNITS, "float64"), Storage(UNITS[:1], "float64", dp=3)
    a, b, c = np.zeros(whole.length), np.zeros(alone.length), np.zeros(whole.length)
    whole.initialize(a, 5, HOST)
    alone.initialize(b, 5, HOST)
    whole.initialize(c, 6, HOST)
    assert np.array_equal(whole.entries[0].view(a), alone.entries[0].view(b))
    assert not np.array_equal(a, c)
    table = tensor("table", 7, 3, slices=((slice(2, 5), slice(0, 3)),))
    part = Storage([Unit("embedding", Described(table))], "float64")
    d = np.zeros(part.length)
    part.initialize(d, 5, HOST)
    assert np.array_equal(part.entries[0].view(d), whole.entries[0].view(a)[2:5])
    assert part.parameter_count == 21


def test_who_holds_pieces_draws_these_alone_and_who_holds_none_none():
    storage = Storage(UNITS, "float64")
    flat, held = np.zeros(storage.length), np.full(7, np.nan)
    storage.initialize(flat, 5, HOST)
    storage.initialize(held, 5, HOST, [Piece(2, 6, 0), Piece(33, 36, 4)])
    assert np.array_equal(held, np.concatenate([flat[2:6], flat[33:36]])) and held[4:].any()
    storage.initialize(np.empty(0), 5, HOST, [])


def test_qkv_of_some_heads_is_three_rectangles():
    heads = tuple((slice(0, 2), slice(start, start + 3)) for start in (3, 9, 15))
    qkv = tensor("qkv", 2, 18, slices=heads)
    whole = np.arange(36.0).reshape(2, 18)
    assert qkv.local_shape == (2, 9)
    assert np.array_equal(qkv.part_of(whole), whole.reshape(2, 3, 6)[:, :, 3:].reshape(2, 9))
    assert np.array_equal(tensor("all", 2, 18).part_of(whole), whole)


def test_float32_starts_as_the_rounded_float64():
    wide, narrow = Storage(UNITS, "float64"), Storage(UNITS, "float32")
    a, b = np.zeros(wide.length), np.zeros(narrow.length, "f4")
    wide.initialize(a, 0, HOST)
    narrow.initialize(b, 0, HOST)
    for x, y in zip(wide.entries, narrow.entries, strict=True):
        assert np.array_equal(x.view(a).astype("f4"), y.view(b))


def test_runs_cover_what_is_trained_and_join_neighbours_of_equal_decay():
    storage = Storage(UNITS, "float32")
    covered = np.zeros(storage.length)
    for start, stop, decayed in storage.runs(0, storage.length, attrgetter("decayed")):
        covered[start:stop] += 1 + decayed
    for entry in storage.entries:
        assert (entry.view(covered) == 1 + entry.parameter.decayed).all(), entry.name
    block = list(storage.runs(*storage.spans[1][:2], attrgetter("decayed")))
    assert [decayed for *_, decayed in block] == [False, True]


@pytest.mark.parametrize("nbytes", (1, 100, 200, 1e9))
def test_buckets_are_whole_units_in_reverse_and_cover_everything(nbytes):
    storage = Storage(UNITS, "float32")
    buckets = storage.buckets(nbytes)
    assert [b.stop for b in buckets] == [storage.length, *(b.start for b in buckets[:-1])]
    assert buckets[-1].start == 0
    for bucket in buckets:
        assert storage.spans[bucket.units[-1]].start == bucket.start
    stored = [
        unit
        for bucket in buckets
        for unit in bucket.units
        if storage.spans[unit].start < storage.spans[unit].stop
    ]
    assert stored == [3, 1, 0]
