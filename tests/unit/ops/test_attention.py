"""Attention on the host: every body equals the definition, and tiles do no more work than they need."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.layers.base import TokenShare
from mpitrain.machine.backend import Arena, HostBackend, padded
from mpitrain.ops import OPERATIONS
from mpitrain.ops.device import device_for, host_ops, reference_ops, rounded
from mpitrain.ops.host import attention as chosen
from mpitrain.ops.host import attention as host_attention
from mpitrain.ops.host import attention_tiled, compiled
from mpitrain.ops.host import passes as passes_by_numpy
from mpitrain.ops.host.passes import by_numpy
from mpitrain.ops.host.product import TileLimits
from mpitrain.ops.random_bits import AttentionMask
from mpitrain.ops.reference.attention import CAUSAL
from tests.cases.layers import GROUPED
from tests.cases.packed import Packed
from tests.cases.rings import RINGS, check_ring, of_rank
from tests.laws.operations import TOLERANCE, OperationLaws
from tests.laws.transport import laws_of
from tests.training import configured

reference = reference_ops()
SHAPES = [
    (1, 1, 1, 1),
    (0, 5, 2, 3),
    (2, 5, 3, 2),
    (2, 7, 2, 3),
    (1, 64, 1, 4),
    (1, 65, 2, 5),
    (2, 131, 3, 7),
]  # B, T, H, D
TILES = [TileLimits(1, 1), TileLimits(3, 5), TileLimits(4, 4), TileLimits(7, 64)]
# Tiles far smaller than the rows would be some ten thousand.
CASES = [
    (shape, tile)
    for shape in SHAPES
    for tile in (*TILES, TileLimits(64, 224))
    if shape[1] <= 20 * tile.short
]


@pytest.fixture(params=["numpy", "compiled passes"])
def passes(request):
    return by_numpy if request.param == "numpy" else compiled.by_library


def tiled(tile, passes=by_numpy):
    return lambda q, kv, heads, arena, seen=CAUSAL: attention_tiled.attended(
        q, kv, heads, None, arena, seen, passes, tile
    )


def of(name, passes=by_numpy):
    """The attention of a value of memory.attention."""
    return partial(chosen.attention, passes, name)


def over_packed(forward, **shape):
    """A body of the host that takes queries, keys and values in one array."""
    ops = SimpleNamespace(attention=forward, attention_backward=chosen.attention_backward)
    return Packed(ops, **shape)


def drawn(seed, *shape, dtype="float64"):
    return np.random.default_rng(seed).standard_normal(shape).astype("f4").astype(dtype)


def assert_equals_the_definition(forward, qkv, dy, heads, tolerance, **shape):
    """A body of any dtype against the definition in float64."""
    arena, own, definition = Arena(), over_packed(forward, **shape), Packed(reference, **shape)
    y, saved = own.attention(qkv, heads, arena)
    wide, wide_dy = qkv.astype("float64"), dy.astype("float64")
    true_y, true_saved = definition.attention(wide, heads, None)
    for found, truth in (
        (y, true_y),
        (
            own.attention_backward(dy, saved, arena),
            definition.attention_backward(wide_dy, true_saved, None),
        ),
    ):
        assert found.shape == truth.shape and found.dtype == qkv.dtype
        scale = max(np.abs(truth).max(initial=0), 1e-3)
        assert np.abs(found - truth).max(initial=0) <= tolerance * scale


@pytest.mark.product
@pytest.mark.parametrize("own", ["numpy", "compiled passes"])
@pytest.mark.parametrize("name", ["whole", "tiled"])
@pytest.mark.parametrize("law", laws_of(OperationLaws))
def test_operations_with_each_attention_obey(law, name, own):
    rows = [row for row in OPERATIONS if "attention" in row]
    getattr(OperationLaws(rows), law)(host_ops(name, own.split()[0]), HostBackend())


@pytest.mark.product
@pytest.mark.parametrize(("shape", "tile"), [*CASES, ((1, 700, 2, 16), None)], ids=str)
def test_tiles_of_any_size_equal_the_definition(shape, tile, passes):
    b, t, h, d = shape
    for dtype, tolerance in {"float64": 1e-12, "float32": TOLERANCE["float32"]}.items():
        qkv, dy = drawn(1, b, t, 3 * h * d, dtype=dtype), drawn(2, b, t, h * d, dtype=dtype)
        assert_equals_the_definition(tiled(tile, passes), qkv, dy, h, tolerance)


@pytest.mark.product
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "queries", "offset"), GROUPED, ids=str)
def test_shared_heads_and_offsets_equal_the_definition(
    tokens, heads, kv_heads, queries, offset, passes
):
    qkv = drawn(1, 2, tokens, (heads + 2 * (kv_heads or heads)) * 3)
    dy = drawn(2, 2, queries or tokens, heads * 3)
    shape = {"kv_heads": kv_heads, "queries": queries, "offset": offset}
    tiles = [tiled(tile, passes) for tile in (*TILES[1:], None)]
    for forward in (of("whole", passes), *tiles):
        assert_equals_the_definition(forward, qkv, dy, heads, 1e-12, **shape)


@pytest.mark.product
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("cap", [0.7, 1e4])
def test_a_soft_cap_and_a_scale_equal_the_definition(cap, drops, passes):
    """With the larger cap scores are too large for exponentials without a shift."""
    qkv, dy = drawn(1, 2, 131, 8 * 3), drawn(2, 2, 131, 4 * 3)
    forward = partial(chosen.attention_dropout, passes, "auto") if drops else tiled(None, passes)
    shape = {"kv_heads": 2, "window": 50, "cap": cap, "scale": 0.9 if cap < 1 else 500.0}
    given = ((5, 7), 2, 7, 11, 0.3) if drops else ()
    own = over_packed(forward, **shape)
    definition = Packed(reference, "attention_dropout" if drops else "attention", **shape)
    y, saved = own.attention(qkv, 4, *given, Arena())
    true_y, true_saved = definition.attention(qkv, 4, *given, None)
    assert np.abs(y - true_y).max() <= 1e-11 * np.abs(true_y).max()
    found, truth = (
        each.attention_backward(dy, of, Arena())
        for each, of in ((own, saved), (definition, true_saved))
    )
    assert np.abs(found - truth).max() <= 1e-11 * np.abs(truth).max()


@pytest.mark.product
@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("body", ["reference", "numpy", "compiled"])
def test_the_ranks_of_a_ring_compute_attention_over_whole_rows(body, ring, monkeypatch):
    monkeypatch.setattr(attention_tiled, "tile_for", lambda width: TileLimits(16, 24))
    check_ring(reference if body == "reference" else host_ops("whole", body), *ring)


def test_the_ranks_of_a_ring_have_equal_work(monkeypatch):
    counts = []
    for rank in range(3):
        monkeypatch.setattr(attention_tiled, "np", counting := Counting())
        q, kv, dy = (drawn(n, 1, 6 * 37, n * 8) for n in (1, 2, 1))
        of_rank(host_ops("tiled"), TokenShare(rank, 3, True), q, kv, dy, 2, None)
        counts.append(counting.multiplications)
    assert counts[0] == counts[1] == counts[2] > 0


def test_the_definition_shares_heads_as_if_they_were_repeated():
    """Keys and values repeated for each query head of a group; their gradients are sums."""
    heads, groups, width = 6, 2, 4
    q, k, v = (drawn(n, 2, 9, count * width) for n, count in enumerate((heads, groups, groups)))
    dy = drawn(3, 2, 9, heads * width)
    each = heads // groups
    repeated = [
        np.repeat(x.reshape(2, 9, groups, width), each, 2).reshape(2, 9, -1) for x in (k, v)
    ]
    own, truth = Packed(reference, kv_heads=groups), Packed(reference)
    y, saved = own.attention(np.concatenate([q, k, v], 2), heads, None)
    true_y, true_saved = truth.attention(np.concatenate([q, *repeated], 2), heads, None)
    assert np.abs(y - true_y).max() <= 1e-14
    dq, *dkv = np.split(truth.attention_backward(dy, true_saved, None), 3, 2)
    summed = [x.reshape(2, 9, groups, each, width).sum(3).reshape(2, 9, -1) for x in dkv]
    found = own.attention_backward(dy, saved, None)
    assert np.abs(found - np.concatenate([dq, *summed], 2)).max() <= 1e-14


@pytest.mark.product
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_beyond_the_range_of_exponentials_are_shifted(dtype, sign, passes):
    """All scores of the first head are about 2,000 times the sign; the second head needs no shift."""
    t, d = 130, 4
    qkv = drawn(1, 1, t, 3, 2, d, dtype=dtype)
    qkv[:, :, 1, 0] = sign * np.abs(qkv[:, :, 1, 0])
    qkv[:, :, 0, 0] = np.abs(qkv[:, :, 0, 0])
    qkv[:, :, :2, 0] = 30 * qkv[:, :, :2, 0] + np.array([30, 30 * sign])[:, None]
    qkv, dy = qkv.reshape(1, t, -1), drawn(2, 1, t, 2 * d, dtype=dtype)
    tolerance = {"float64": 1e-11, "float32": 1e-2}[dtype]  # a score has an error of 2,000 ulps
    whole = of("whole", passes)
    for forward in (whole, tiled(TileLimits(16, 48), passes)):
        assert_equals_the_definition(forward, qkv, dy, 2, tolerance)


class Counting:
    """NumPy that counts exponentials and the multiplications of products."""

    def __init__(self):
        self.exponentials = self.multiplications = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def exp(self, x, out):
        self.exponentials += x.size
        return np.exp(x, out=out)

    def matmul(self, a, b, out=None):
        self.multiplications += a.size * (b.shape[1] if b.ndim == 2 else 1)
        return np.matmul(a, b, out=out)


@pytest.mark.parametrize("t", [1, 63, 512, 600])
def test_tiles_compute_the_half_below_the_diagonal_once(t, monkeypatch):
    counting, h, d = Counting(), 2, 8
    for module in (attention_tiled, passes_by_numpy):
        monkeypatch.setattr(module, "np", counting)
    body = over_packed(tiled(None))
    _, saved = body.attention(drawn(1, 1, t, 3 * h * d), h, Arena())
    blocks = [min(64, t - first) for first in range(0, t, 64)]
    visible = sum(
        rows * (first + rows) for first, rows in zip(range(0, t, 64), blocks, strict=True)
    )
    assert visible <= t * (t + 64) / 2
    assert counting.exponentials == h * visible
    assert counting.multiplications == h * visible * (2 * d + 2)
    body.attention_backward(drawn(2, 1, t, h * d), saved, Arena())
    # Blocks of keys begin at the first token, so the last one may be smaller.
    again = sum(keys * (t - first) for first, keys in zip(range(0, t, 64), blocks, strict=True))
    assert counting.exponentials == h * (visible + again)
    assert counting.multiplications == h * (visible * (2 * d + 2) + again * (5 * d + 2))


def test_tiles_save_the_output_and_one_number_a_row():
    peaks = []
    for t in (1024, 2048):
        arena = Arena()
        qkv, dy = drawn(1, 2, t, 3 * 16, dtype="float32"), drawn(2, 2, t, 16, dtype="float32")
        body = over_packed(tiled(None))
        y, saved = body.attention(qkv, 4, arena)
        assert arena.live == padded(y.nbytes) + padded(2 * 4 * t * 4)
        body.attention_backward(dy, saved, arena)
        peaks.append(arena.peak)
    assert peaks[1] < 2.1 * peaks[0]
    assert peaks[1] < 2048 * 2048 / 2 * 4  # less than the half of one head's scores


def test_the_bodies_write_no_input():
    qkv, dy = drawn(1, 2, 70, 3 * 6), drawn(2, 2, 70, 6)
    before = qkv.copy(), dy.copy()
    for name in ("whole", "tiled"):
        body = over_packed(of(name))
        _, saved = body.attention(qkv, 2, Arena())
        body.attention_backward(dy, saved, Arena())
        assert np.array_equal(qkv, before[0]) and np.array_equal(dy, before[1])


def test_auto_takes_tiles_from_a_number_of_tokens_on():
    edge = chosen.TILED_FROM
    for t, name in ((edge - 1, "whole"), (edge, "tiled")):
        qkv = drawn(1, 1, t, 3 * 8, dtype="float32")
        bodies = device_for("cpu").ops.attention, of(name)
        own, truth = (over_packed(body).attention(qkv, 2, Arena()) for body in bodies)
        assert type(own[1][2]) is type(truth[1][2]) and np.array_equal(own[0], truth[0])
    assert edge > Config().model.context  # the default job has its bits from before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_in_half_precision_have_rounded_results(dtype):
    qkv, dy = drawn(1, 1, 70, 3 * 16, dtype="float32"), drawn(2, 1, 70, 16, dtype="float32")
    half, full = Packed(rounded(dtype, "tiled").ops), Packed(host_ops("tiled"))
    y, saved = half.attention(qkv, 2, Arena())
    exact, _ = full.attention(qkv, 2, Arena())
    assert saved[2].y is y and not np.array_equal(y, exact)
    dqkv = half.attention_backward(dy, saved, Arena())
    truth = full.attention_backward(dy, full.attention(qkv, 2, Arena())[1], Arena())
    for found, value in ((y, exact), (dqkv, truth)):
        assert np.abs(found - value).max() <= 2.0**-7 * np.abs(value).max()


def test_kernels_compute_in_tiles_alone():
    for kind in ("cuda", "cuda-sim"):
        for name in ("auto", "tiled"):
            configured(f"device.kind={kind}", f"memory.attention={name}")
        with pytest.raises(ConfigError, match="attention is whole"):
            configured(f"device.kind={kind}", "memory.attention=whole")
    with pytest.raises(ConfigError, match="attention must be"):
        configured("memory.attention=flash")


@pytest.mark.product
@pytest.mark.parametrize(("shape", "tile"), CASES, ids=str)
def test_dropout_of_any_tiles_has_the_mask_of_the_definition(shape, tile, passes):
    batch, length, heads, width = shape
    given = (5, 3), 2, 2**20 + 3, heads + 2, 0.3
    for kv_heads in {heads, 1}:
        qkv = drawn(3, batch, length, (heads + 2 * kv_heads) * width)
        dy = drawn(1, batch, length, heads * width)
        definition = Packed(reference, "attention_dropout", kv_heads)
        truth, saved = definition.attention(qkv, heads, *given, None)
        gradient = definition.attention_backward(dy, saved, None)
        drop = AttentionMask(*given, length)
        for module, *end in ((attention_tiled, passes, tile), (host_attention, passes)):

            def dropped(q, kv, heads, arena, seen, run=module.attended, drop=drop, end=end):
                return run(q, kv, heads, drop, arena, seen, *end)

            body = over_packed(dropped, kv_heads=kv_heads)
            y, state = body.attention(qkv, heads, Arena())
            assert np.all(np.abs(y - truth) <= TOLERANCE["float64"])
            found = body.attention_backward(dy, state, Arena())
            assert np.all(np.abs(found - gradient) <= TOLERANCE["float64"])
