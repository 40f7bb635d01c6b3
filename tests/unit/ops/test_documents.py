"""Attention with documents in a row, each with the numbers that it has alone, and within a window."""

from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.machine.backend import Arena
from mpitrain.ops.device import host_ops, reference_ops
from mpitrain.ops.host import attention as host_attention
from mpitrain.ops.host import attention_tiled, compiled
from mpitrain.ops.host.passes import by_numpy
from mpitrain.ops.host.product import TileLimits
from mpitrain.ops.random_bits import AttentionMask
from mpitrain.ops.reference.attention import Seen
from tests.cases.documents import starts_of
from tests.cases.packed import Packed

reference = reference_ops()
HEADS, WIDTH = 2, 3
# The lengths of the documents of each row.
ROWS = {
    1: [[1]],
    7: [[7], [1, 6], [6, 1], [1] * 7, [2, 5]],
    131: [[131], [1, 130], [64, 67], [65, 66], [3] * 42 + [5], [128, 1, 2], [31, 33, 64, 3]],
}
TILES = [TileLimits(1, 1), TileLimits(3, 5), TileLimits(4, 4), TileLimits(7, 64)]


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def alone(qkv, dy, rows, offset=0):
    """Return y and dqkv of each document by itself, at its tokens."""
    y, dqkv, body = np.empty_like(dy), np.empty_like(qkv), Packed(reference, offset=offset)
    for row, lengths in enumerate(rows):
        for start, stop in pairwise(np.cumsum([0, *lengths])):
            mine = np.index_exp[row : row + 1, start:stop]
            y[mine], saved = body.attention(qkv[mine], HEADS, None)
            dqkv[mine] = body.attention_backward(dy[mine], saved, None)
    return y, dqkv


@pytest.fixture(params=["numpy", "compiled passes"])
def passes(request):
    return by_numpy if request.param == "numpy" else compiled.by_library


def bodies_with(tile, passes, drop=None, **bounds):
    """The bodies of the host, each with queries, keys and values in one array."""

    def of(module, *end):
        def attention(q, kv, heads, arena, seen):
            return module.attended(q, kv, heads, drop, arena, seen, *end)

        backward = host_attention.attention_backward
        return Packed(SimpleNamespace(attention=attention, attention_backward=backward), **bounds)

    return {"whole": of(host_attention, passes), "tiled": of(attention_tiled, passes, tile)}


@pytest.mark.parametrize("offset", [0, 2, 130])  # causal, in part, and not causal
@pytest.mark.parametrize(
    ("length", "tile"), [*product((1, 7), TILES), (131, TileLimits(7, 64))], ids=str
)
def test_each_document_of_a_row_is_that_document_alone(length, tile, offset, passes):
    rows = ROWS[length]
    qkv, dy = drawn(1, len(rows), length, 3 * HEADS * WIDTH), drawn(2, len(rows), length, 6)
    truth, found = alone(qkv, dy, rows, offset), {}
    definition = {"reference": Packed(reference, offset=offset)}
    for name, body in (bodies_with(tile, passes, offset=offset) | definition).items():
        y, saved = body.attention(qkv, HEADS, Arena(), starts=starts_of(rows))
        found[name] = y, body.attention_backward(dy, saved, Arena())
    for name, own in found.items():
        for one, other in zip(own, truth, strict=True):
            assert np.abs(one - other).max() <= 1e-12, name


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("each", ["one document", "documents"])
def test_masked_attention_has_the_gradients_of_pytorch(is_causal, each):
    check_against_pytorch(host_ops, each, 37, 0 if is_causal else 36, 0)


@pytest.mark.parametrize("passes", ["numpy", "compiled"])
@pytest.mark.parametrize("window", [1, 2, 5, 31, 36, 37, 40, 2**40])
@pytest.mark.parametrize("each", ["one document", "documents"])
def test_attention_within_a_window_has_the_gradients_of_pytorch(each, window, passes):
    check_against_pytorch(partial(host_ops, passes=passes), each, 37, 0, window)
    if window in (5, 31):
        check_against_pytorch(partial(host_ops, passes=passes), each, 530, 0, 16 * window)


def check_against_pytorch(host, each, length, offset, window):
    torch = pytest.importorskip("torch")
    heads, groups = 4, 2
    rows = [[5, length - 5], [length], [1] * length, [length - 7, 7]]
    starts = starts_of(rows)
    seen = np.tri(length, k=offset, dtype=bool)
    mask = torch.tensor(seen & ~np.tri(length, k=-window, dtype=bool) if window else seen)
    mask = mask.expand(len(rows), 1, -1, -1)
    if each == "documents":
        mask = mask & torch.tensor(starts[:, None, :, None] == starts[:, None, None, :])
    qkv, dy = drawn(1, 4, length, (heads + 2 * groups) * 3), drawn(2, 4, length, heads * 3)
    packed = torch.tensor(qkv, requires_grad=True)
    q, k, v = (
        part.unflatten(2, (-1, 3)).transpose(1, 2)
        for part in packed.split([heads * 3, groups * 3, groups * 3], 2)
    )
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    true_y = attended.transpose(1, 2).flatten(2)
    true_y.backward(torch.tensor(dy))
    for ops in (reference, *(host(name) for name in ("whole", "tiled"))):
        body = Packed(ops, kv_heads=groups, offset=offset, window=window)
        y, saved = body.attention(
            qkv, heads, Arena(), starts=starts if "documents" in each else None
        )
        found = body.attention_backward(dy, saved, Arena())
        assert np.abs(y - true_y.detach().numpy()).max() <= 1e-12
        assert np.abs(found - packed.grad.numpy()).max() <= 1e-12


@pytest.mark.parametrize("bounds", [{}, {"offset": 130}, {"window": 3}], ids=str)
@pytest.mark.parametrize(
    ("length", "tile"),
    [*((7, tile) for tile in TILES[:3]), (131, TILES[3]), (131, TileLimits(64, 224))],
    ids=str,
)
def test_dropout_within_documents_has_the_mask_of_the_definition(length, tile, bounds, passes):
    rows = ROWS[length]
    given = (5, 3), 2, 2**20 + 3, HEADS + 2, 0.3
    qkv, dy = drawn(1, len(rows), length, 3 * HEADS * WIDTH), drawn(2, len(rows), length, 6)
    definition = Packed(reference, "attention_dropout", **bounds)
    truth, saved = definition.attention(qkv, HEADS, *given, None, starts=starts_of(rows))
    gradient = definition.attention_backward(dy, saved, None)
    for body in bodies_with(tile, passes, AttentionMask(*given, length), **bounds).values():
        y, state = body.attention(qkv, HEADS, Arena(), starts=starts_of(rows))
        assert np.abs(y - truth).max() <= 1e-12
        assert np.abs(body.attention_backward(dy, state, Arena()) - gradient).max() <= 1e-12


@pytest.mark.product
@pytest.mark.parametrize("offset", [0, 130])
def test_scores_beyond_exponentials_are_shifted_within_documents(offset, passes):
    rows, length = [[60, 71]], 131
    qkv, dy = drawn(1, 1, length, 3 * HEADS * WIDTH), drawn(2, 1, length, 6)
    qkv[..., :12] = 30 * np.abs(qkv[..., :12]) + 30
    truth = alone(qkv, dy, rows, offset)
    for body in bodies_with(TileLimits(16, 48), passes, offset=offset).values():
        y, saved = body.attention(qkv, HEADS, Arena(), starts=starts_of(rows))
        found = y, body.attention_backward(dy, saved, Arena())
        for one, other in zip(found, truth, strict=True):
            assert np.abs(one - other).max() <= 1e-11 * max(1, np.abs(other).max())


@pytest.mark.parametrize("offset", [0, 130])
@pytest.mark.parametrize("name", ["whole", "tiled"])
def test_a_row_of_one_document_has_the_bits_of_a_row_without(name, offset, passes):
    qkv, dy = drawn(1, 2, 131, 3 * HEADS * WIDTH), drawn(2, 2, 131, 6)
    body, found = bodies_with(TileLimits(16, 48), passes, offset=offset)[name], []
    for starts in (None, starts_of([[131]] * 2)):
        arena = Arena()
        y, saved = body.attention(qkv, HEADS, arena, starts=starts)
        found.append((y.tobytes(), body.attention_backward(dy, saved, arena).tobytes(), arena.peak))
    assert found[0] == found[1]


class Counting:
    """NumPy that counts the multiplications of products."""

    def __init__(self):
        self.multiplications = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, out):
        self.multiplications += a.size * (b.shape[-1] if b.ndim > 1 else 1)
        return np.matmul(a, b, out=out)


@pytest.mark.parametrize(
    "bounds", [{}, {"offset": 511, "closed": True}, {"window": 64}, {"window": 1}], ids=str
)
@pytest.mark.parametrize("module", [host_attention, attention_tiled])
def test_products_between_documents_and_before_a_window_are_not_computed(
    module, bounds, monkeypatch
):
    q, kv = drawn(1, 1, 512, HEADS * WIDTH), drawn(2, 1, 512, 2 * HEADS * WIDTH)
    dq, dkv, halves = np.empty_like(q), np.empty_like(kv), []
    window = bounds.get("window")
    whole = Seen(starts_of([[512]]), **({} if window else bounds))
    for seen in (whole, Seen(None if window else starts_of([[64] * 8]), **bounds)):
        monkeypatch.setattr(module, "np", counting := Counting())
        y, saved = module.attended(q, kv, HEADS, None, Arena(), seen)
        forward = counting.multiplications
        saved.backward(y, dq, dkv, Arena())
        halves.append((forward, counting.multiplications - forward))
    for whole, divided in zip(*halves, strict=True):
        assert divided < whole / (7 if "offset" in bounds else 2 if window == 64 else 3)
