"""The floor of a step: its products counted against the model's formula."""

import math

import pytest

from mpitrain import build, parse, run_ranks
from mpitrain.config import with_settings
from mpitrain.errors import ConfigError
from mpitrain.machine import process
from mpitrain.ops.reference.attention import Seen
from mpitrain.tools.bench.training.floor import BareProducts, attention_products, recorded
from mpitrain.tools.bench.training.shapes import SHAPES, chosen, measure_shape, settings

LAYERS, WIDTH, HEADS, CONTEXT, ROWS = 2, 16, 2, 70, 4
JOB = {
    "model": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "context": CONTEXT},
    "batch": {"size": ROWS, "micro_batches": 2},
    "run": {"steps": 4},
}


def flops(products):
    """Multiply-adds of products; the last dim of a, or the one before if it is transposed, is K."""
    return sum(
        math.prod(out.shape) * a.shape[-2 if a.is_transposed else -1] for a, _, out in products
    )


def products(transport, **layout):
    """The products of a step, and what is left of their arrays after one."""
    job = build(transport, parse({**JOB, "layout": layout}))
    found = recorded(transport, job)
    floor = BareProducts(found)
    assert math.isnan(floor.step(0, None, None))
    job.close()
    return found


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})])
def test_the_floor_has_the_products_of_the_step(ranks, layout):
    everyone = run_ranks(ranks, lambda own: products(own, **layout))
    matrices = LAYERS * 12 * WIDTH**2 + 256 * WIDTH
    blocks = [(64, 64), (6, 70)]
    scores = LAYERS * 6 * sum(WIDTH * queries * keys for queries, keys in blocks)
    assert sum(map(flops, everyone)) == ROWS * (3 * CONTEXT * matrices + scores)


@pytest.mark.parametrize(("window", "keys"), [(0, (64, 128, 130)), (5, (64, 68, 6))])
def test_products_of_attention_see_no_key_behind_a_block_or_before_its_window(window, keys):
    products = attention_products(3, 130, 2, 8, "<f4", Seen(window=window))
    blocks = [(2, 64, keys[0]), (2, 64, keys[1]), (2, 2, keys[2])]
    assert [out.shape for _, _, out in products[::2]] == blocks * 3


def test_a_shape_is_a_configuration():
    for name, shape in SHAPES.items():
        tree = with_settings({}, settings(shape, 2))
        assert parse(tree).batch.size == shape.rows * (1 if name.startswith(("tp", "pp")) else 2)


def test_a_shape_that_takes_too_long_or_does_not_fit_is_refused(monkeypatch):
    tiny = {"layers": 1, "width": 8, "heads": 1, "context": 8}
    config = parse({"model": tiny, "batch": {"size": 2}})

    def go(own, seconds):
        return measure_shape(own, "vocabulary-50257", config, [], 2, 3, seconds)

    ((rows, notes),) = run_ranks(1, lambda own: go(own, 300.0))
    ours, floor = rows
    assert (ours.of, ours.side, floor.side) == ("vocabulary-50257", "mpitrain", "bare products")
    assert floor.ratio < 1 and notes == []
    with pytest.raises(ConfigError, match="at most 1e-06 s"):
        run_ranks(1, lambda own: go(own, 1e-6))
    monkeypatch.setattr(process, "free_memory", lambda kind: 2 * 10**7)
    with pytest.raises(ConfigError, match="programs of"):
        run_ranks(1, lambda own: go(own, 300.0))


@pytest.mark.parametrize(("names", "ranks"), [("nonsense", 2), ("tp-2,", 2), ("all", 3)])
def test_unknown_shapes_and_other_ranks_are_refused(names, ranks):
    with pytest.raises(ConfigError, match="shapes"):
        chosen(names, ranks)
    assert chosen("all", 2) == [*SHAPES]
