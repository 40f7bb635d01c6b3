"""The floor of a step: its products counted against the model's formula, its seconds by kind."""

import math

import pytest

from mpitrain import build, parse, run_ranks
from mpitrain.errors import ConfigError
from mpitrain.tools.bench.training.floor import (
    BETWEEN,
    COMMUNICATION,
    BareProducts,
    ByKind,
    Stopwatch,
    attention_products,
    floor_table,
    kind_of,
    kind_rows,
)
from mpitrain.tools.bench.training.shapes import (
    SHAPES,
    TABLE,
    chosen,
    measure_shape,
    settings,
    shape_row,
)
from mpitrain.tools.bench.training.steps import Ours, Result

LAYERS, WIDTH, HEADS, CONTEXT, ROWS = 2, 16, 2, 70, 4
JOB = {
    "model": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "context": CONTEXT},
    "batch": {"size": ROWS, "micro_batches": 2},
    "run": {"steps": 4},
}


def flops(products):
    """Multiply-adds of products; the last dim of a, or the one before if it is transposed, is K."""
    return sum(
        math.prod(each.out.shape) * each.a.shape[-2 if each.a.is_transposed else -1]
        for each in products
    )


def measured(transport, **layout):
    """Two steps of a job, of its copy and of the products: the losses, and all results."""
    job = build(transport, parse({**JOB, "layout": layout}))
    ours, by_kind = Ours(job), ByKind(transport, job)
    floor = BareProducts(by_kind.watch.products)
    losses = []
    for index in range(2):
        rows = job.trainer.replication.rows.batch(job.data, index)
        losses.append((ours.step(index, *rows), by_kind.step(index, *rows)))
        floor.step(index, *rows)
    found = losses, by_kind, floor, kind_rows(transport, by_kind.seconds, floor.seconds)
    by_kind.close()
    ours.close()
    return found


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})])
def test_the_floor_has_the_products_of_the_step_and_the_copy_trains_alike(ranks, layout):
    everyone = run_ranks(ranks, lambda own: measured(own, **layout))
    matrices = LAYERS * 12 * WIDTH**2 + 256 * WIDTH
    blocks = [(64, 64), (6, 70)]
    scores = LAYERS * 6 * sum(WIDTH * queries * keys for queries, keys in blocks)
    expected = ROWS * (3 * CONTEXT * matrices + scores)
    assert sum(flops(by_kind.watch.products) for _, by_kind, _, _ in everyone) == expected
    for losses, by_kind, floor, rows in everyone:
        assert all(ours == copy for ours, copy in losses)
        kinds = {kind for kind, _, _ in rows}
        assert {"attention", "mlp", "head", "norm", "loss", "optimizer", BETWEEN} <= kinds
        assert rows == everyone[0][3] and (ranks == 1 or COMMUNICATION in kinds)
        assert all(bare > 0 for kind, _, bare in rows if kind in ("attention", "mlp", "head"))
        assert all(bare == 0 for kind, _, bare in rows if kind in ("norm", "loss", "optimizer"))
        assert len(by_kind.seconds) == len(floor.seconds) == 2


def test_products_of_attention_see_no_key_behind_the_last_query_of_a_block():
    products = attention_products(3, 130, 2, 8, "<f4")
    assert [out.shape for _, _, out in products[::2]] == [
        *[(2, 64, 64), (2, 64, 128), (2, 2, 130)] * 3
    ]


def test_each_moment_of_a_step_has_one_kind():
    now = iter(range(100))
    watch = Stopwatch(lambda: float(next(now)))
    attention, loss = watch.name("blocks.1.attention"), watch.name("the loss")
    watch.restart()  # 1
    span = watch.compute(attention, unit=3)  # 2: one second between operations
    wait = watch.wait(0)  # 3: another one
    watch.go_on(wait)  # 4: one of communication
    watch.end(span)  # 5
    watch.end(watch.compute(loss))  # 6 and 7
    watch.end(watch.begin(4, 0))  # a message is no work
    watch.stop()  # 8
    assert dict(watch.seconds) == {BETWEEN: 5.0, COMMUNICATION: 1.0, "loss": 1.0}


def test_a_unit_has_the_kind_of_its_last_word():
    assert [kind_of(name) for name in ("blocks.3.mlp", "head", "hidden.0", "2")] == [
        "mlp",
        "head",
        "hidden",
        "2",
    ]


def test_the_table_divides_a_step_by_its_products_block_by_block():
    ours, bare = (
        Result("mpitrain", [2.0, 3.0, 9.0], [], []),
        Result("floor", [1.0, 2.0, 3.0], [], []),
    )
    lines = floor_table(ours, bare, [("mlp", 0.5, 0.25), ("norm", 0.5, 0.0)])
    assert lines[1].split() == ["mlp", "500.00", "250.00", "250.00"]
    assert lines[2].split() == ["norm", "500.00", "-", "500.00"]
    assert "2.000 times" in lines[-1] and "1.500 .. 3.000" in lines[-1]


def test_a_shape_is_a_configuration_and_a_row():
    for name, shape in SHAPES.items():
        values = [setting.partition("=")[::2] for setting in settings(shape, 2)]
        tree = {}
        for key, value in values:
            section, _, field = key.partition(".")
            tree.setdefault(section, {})[field] = value if not value.isdigit() else int(value)
        assert parse(tree).batch.size == shape.rows * (1 if name.startswith(("tp", "pp")) else 2)
    ours, peer = (Result(name, [1.0, 2.0], [0.5, 0.5], []) for name in ("mpitrain", "peer"))
    peer = peer._replace(blocks=[3.0, 4.0])
    row = shape_row("context-128", ours, peer, ours)
    assert (row.ratio, row.least, row.most, row.floor, row.apart) == (2.5, 2.0, 3.0, 1.0, 0.0)
    assert TABLE.line(row).split()[:5] == ["context-128", "peer", "2.500", "2.00", ".."]
    assert TABLE.line(shape_row("tp-2", ours, None, ours)).split()[1:4] == ["-", "-", "-"]


def test_a_shape_that_takes_too_long_or_does_not_fit_is_refused(monkeypatch):
    tiny = {"layers": 1, "width": 8, "heads": 1, "context": 8}
    config = parse({"model": tiny, "batch": {"size": 2}})

    def go(own, seconds):
        return measure_shape(own, "vocabulary-50257", config, [], 2, 3, seconds)

    (found,) = run_ranks(1, lambda own: go(own, 300.0))
    (row,) = found.rows
    assert (row.shape, row.ratio) == ("vocabulary-50257", None) and row.floor > 1
    assert {"head", "norm"} <= {kind for kind, _, _ in found.kinds}
    with pytest.raises(ConfigError, match="at most 1e-06 s"):
        run_ranks(1, lambda own: go(own, 1e-6))
    monkeypatch.setattr(
        "mpitrain.tools.bench.training.shapes.process.free_memory", lambda kind: 2 * 10**7
    )
    with pytest.raises(ConfigError, match="programs of"):
        run_ranks(1, lambda own: go(own, 300.0))


@pytest.mark.parametrize(("names", "ranks"), [("nonsense", 2), ("tp-2,", 2), ("all", 3)])
def test_unknown_shapes_and_other_ranks_are_refused(names, ranks):
    with pytest.raises(ConfigError, match="shapes"):
        chosen(names, ranks)
    assert chosen("all", 2) == [*SHAPES]
