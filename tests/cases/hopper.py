"""Attention by Hopper's warpgroups, where the device has them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from mpitrain.ops.device import cuda_ops, host_ops
from tests.cases.documents import OFFSETS, check_documents
from tests.cases.layers import CAPPED, check_attention
from tests.cases.numbers import assert_close, numbers, stored, values
from tests.cases.packed import Packed, on
from tests.cases.rings import check_ring


@contextmanager
def of_few(kernels: Kernels, few: int) -> Iterator[None]:
    """As if the device had so many multiprocessors, so that a block goes through several jobs."""
    engine = kernels.engine
    multiprocessors = engine.multiprocessors
    try:
        engine.multiprocessors = few
        yield
    finally:
        engine.multiprocessors = multiprocessors


def by_warpgroups(check: Callable, kernels: Kernels, few: int = 2, **ways: Any) -> None:
    if not kernels.engine.has_wgmma:
        return
    with of_few(kernels, few):
        check(kernels, tensor_cores="wgmma", **ways)


def check_extremes(kernels: Kernels, d: int = 64, dtype: str = "bfloat16") -> None:
    """Scores of thousands, the same for all keys or far apart; a NaN reaches what sees it, and no other sequence or head."""
    if not kernels.engine.has_wgmma:
        return
    ops, h, t = cuda_ops(kernels, tensor_cores="wgmma"), 2, 200
    packed, truth = Packed(ops), Packed(host_ops())
    qkv = stored(numbers(5, 2, t, 3 * h * d), dtype)
    plain = packed.attention(qkv, h, Arena())[0].astype("f4")
    large = qkv.copy()
    large[..., : 2 * h * d] *= 30
    y, _ = packed.attention(large, h, Arena())
    assert_close(y, truth.attention(values(large), h, Arena())[0], dtype, "large")
    same = qkv.copy()
    same[..., h * d : 2 * h * d] = 100
    y, _ = packed.attention(same, h, Arena())
    assert_close(y, truth.attention(values(same), h, Arena())[0], dtype, "same")
    for place, tile in ((0, 150), (2 * h * d, 128)):  # a query of the first head, and a value
        wrong = qkv.copy()
        wrong[1, 150, place] = np.nan
        y = packed.attention(wrong, h, Arena())[0].astype("f4")
        hit = np.isnan(y)
        assert hit[1, 150, :d].all() if place == 0 else hit[1, 150:, 0].all()
        # A hidden value of the same tile has the weight 0, which leaves a NaN one.
        hit[1, tile : 151 if place == 0 else t, : d if place == 0 else 1] = False
        assert not hit.any() and np.array_equal(y[0], plain[0])


def in_a_ring(kernels: Kernels) -> None:
    """Parts of documents, of which a rank's later queries see no key of the earlier rank."""
    if kernels.engine.has_wgmma:
        documents, half = [[100, 420, 40]], "float16"
        with of_few(kernels, 2):
            check_ring(on(kernels, half, "wgmma"), 2, (1, 560), 1, 64, None, documents, dtype=half)


def hopper_attentions() -> Iterator[Callable]:
    """attention_hopper: ragged lengths, one token, several jobs a block, shared keys, parts, documents and windows."""
    brain = partial(by_warpgroups, check_attention, dtype="bfloat16")
    for b, t, h in ((1, 1, 1), (1, 128, 1), (2, 129, 1), (1, 300, 2), (0, 5, 1)):
        yield partial(brain, b=b, t=t, h=h, d=64)
    yield partial(brain, b=1, t=200, h=2, g=1, d=128)
    half = partial(by_warpgroups, check_attention, dtype="float16", h=2, g=1, d=64)
    for t, queries, offset in ((130, None, 130), (300, 170, 130), (97, 40, 57), (97, 33, 20)):
        yield partial(half, b=1, t=t, queries=queries, offset=offset)
    for d, window in ((64, 70), (128, 0)):
        yield partial(brain, b=1, t=140, h=1, d=d, window=window, **CAPPED)
    packed = partial(by_warpgroups, check_documents, h=1, d=64, dtype="float16")
    for offset in OFFSETS:
        yield partial(packed, rows=[[100, 150, 10]], offset=offset)
    for window in (1, 129):
        yield partial(packed, rows=[[300]], window=window)
    yield in_a_ring
    yield check_extremes
