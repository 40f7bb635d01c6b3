"""Every operation: its backward against central differences in float64, and the host body against the reference."""

import numpy as np
import pytest

from mpitrain.data import IGNORED
from mpitrain.machine.backend import Arena, HostBackend
from mpitrain.ops.device import host_ops, reference_ops
from tests.cases.packed import Packed
from tests.laws.transport import laws_of
from tests.laws.vocabulary import Split, VocabularyLaws

host, reference = host_ops(), reference_ops()

BODIES = [reference, host]
STEP = 1e-5
ATTENTION_SHAPES = [
    (1, 1, 1, 1),
    (2, 5, 3, 2),
    (1, 7, 2, 1),
    (2, 131, 2, 3),
    (1, 300, 1, 2),
]  # B, T, H, D


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def slope(f, x, direction):
    """d f(x + h direction) / dh at 0 by central differences."""
    return (f(x + STEP * direction) - f(x - STEP * direction)) / (2 * STEP)


def assert_close(a, b, tolerance=1e-6):
    scale = max(np.abs(b).max(initial=0), 1e-3)
    assert np.shape(a) == np.shape(b)
    assert np.abs(a - b).max(initial=0) <= tolerance * scale, (a, b)


def assert_gradient(f, x, dx):
    """dx is the gradient of the scalar function f at x: all elements, or the largest and 39 others."""
    assert dx.shape == x.shape
    elements = np.append(np.random.default_rng(9).permutation(x.size)[:39], np.abs(dx).argmax())
    expected = []
    for element in elements:
        direction = np.zeros(x.size)
        direction[element] = 1
        expected.append(slope(f, x, direction.reshape(x.shape)))
    assert_close(dx.reshape(-1)[elements], np.array(expected))


def written(write, shape):
    """What a weight half writes over rubbish; checks that accumulating adds the same to what is there."""
    fresh, added = np.full(shape, np.nan), numbers(5, *shape)
    before = added.copy()
    write(fresh, False)
    write(added, True)
    assert_close(added - before, fresh, 1e-12)
    return fresh


@pytest.mark.product
@pytest.mark.parametrize("ops", BODIES)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (5, 3, 7), (2, 1, 4), (70, 8, 515)])
@pytest.mark.parametrize("activation", ["", "_gelu", "_relu"])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_has_the_gradient_of_its_forward(ops, m, k, n, activation, biased):
    arena = Arena()
    forward = getattr(ops, f"linear{activation}")
    backward_input = getattr(ops, f"linear{activation}_backward_input")
    x, w, b, dy = (
        numbers(1, m, k),
        numbers(2, n, k),
        numbers(3, n) if biased else None,
        numbers(4, m, n),
    )
    _, saved = forward(x, w, b, arena)
    dx, pending = backward_input(dy, w, saved, arena)
    assert_gradient(lambda x: np.vdot(dy, forward(x, w, b, arena)[0]), x, dx)
    dw = written(
        lambda out, accumulate: ops.linear_backward_weight(pending, out, accumulate, arena), w.shape
    )
    assert_gradient(lambda w: np.vdot(dy, forward(x, w, b, arena)[0]), w, dw)
    if biased:
        db = written(
            lambda out, accumulate: ops.linear_backward_bias(pending, out, accumulate, arena),
            b.shape,
        )
        assert_gradient(lambda b: np.vdot(dy, forward(x, w, b, arena)[0]), b, db)
        again, same = np.full_like(w, np.nan), np.full_like(b, np.nan)
        ops.linear_backward_weight(pending, again, False, arena, same)
        np.testing.assert_array_equal(again, dw)
        np.testing.assert_array_equal(same, db)


@pytest.mark.product
@pytest.mark.parametrize("ops", BODIES)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (2, 7, 5), (700, 97)])
def test_a_bias_and_a_residual_are_each_added_where_they_are_given(ops, shape):
    x, b, residual = numbers(1, *shape), numbers(2, shape[-1]), numbers(3, *shape)
    for here, other in ((b, residual), (b, None), (None, residual), (None, None)):
        truth = x + (0 if here is None else here) + (0 if other is None else other)
        ops.add_bias(x, here, out := np.full(shape, np.nan), Arena(), other)
        ops.add_bias(over := x.copy(), here, over, Arena(), other)
        for found in (out, over):
            np.testing.assert_array_equal(found, truth)


@pytest.mark.product
@pytest.mark.parametrize("ops", BODIES)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (2, 7, 5)])
def test_an_activation_alone_is_that_of_a_product_by_one(ops, activation, shape):
    arena, z, dy = Arena(), numbers(1, *shape), numbers(2, *shape)
    true_y, kept = getattr(reference, f"linear_{activation}")(
        z.reshape(-1, shape[-1]), np.eye(shape[-1]), None, arena
    )
    truth, _ = getattr(reference, f"linear_{activation}_backward_input")(
        dy.reshape(true_y.shape), np.eye(shape[-1]), kept, arena
    )
    y, saved = getattr(ops, activation)(z.copy(), arena)
    assert_close(y, true_y.reshape(shape), 1e-12)
    assert_close(
        getattr(ops, f"{activation}_backward")(dy, saved, arena), truth.reshape(shape), 1e-12
    )


@pytest.mark.product
@pytest.mark.parametrize("ops", BODIES)
@pytest.mark.parametrize(("m", "c"), [(1, 1), (1, 5), (3, 2), (70, 1000)])
def test_layer_norm_has_the_gradient_of_its_forward(ops, m, c):
    arena = Arena()
    x, gain, bias, dy = numbers(1, m, c), numbers(2, c), numbers(3, c), numbers(4, m, c)
    _, saved = ops.layer_norm(x, gain, bias, 1e-5, arena)
    dx, pending = ops.layer_norm_backward_input(dy, gain, saved, arena)
    write = ops.layer_norm_backward_weight
    dgain = written(lambda out, adds: write(pending, out, None, adds, arena), (c,))
    dbias = written(lambda out, adds: write(pending, None, out, adds, arena), (c,))
    both = np.full((2, c), np.nan)
    write(pending, *both, False, arena)
    np.testing.assert_array_equal(both, [dgain, dbias])
    assert_gradient(lambda x: np.vdot(dy, ops.layer_norm(x, gain, bias, 1e-5, arena)[0]), x, dx)
    assert_gradient(
        lambda gain: np.vdot(dy, ops.layer_norm(x, gain, bias, 1e-5, arena)[0]), gain, dgain
    )
    assert_gradient(
        lambda bias: np.vdot(dy, ops.layer_norm(x, gain, bias, 1e-5, arena)[0]), bias, dbias
    )


@pytest.mark.product
@pytest.mark.parametrize("ops", BODIES)
@pytest.mark.parametrize(("b", "t", "v", "c"), [(1, 1, 1, 1), (3, 5, 2, 7), (2, 9, 50, 3)])
def test_embedding_has_the_gradient_of_its_forward(ops, b, t, v, c):
    arena = Arena()
    tokens = np.random.default_rng(0).integers(v, size=(b, t))
    table, positions, dx = numbers(1, v, c), numbers(2, t + 2, c), numbers(3, b, t, c)
    _, saved = ops.embedding(tokens, table, positions, arena)
    dtable = written(
        lambda out, acc: ops.embedding_backward_table(dx, saved, out, acc, arena), table.shape
    )
    dpositions = written(
        lambda out, acc: ops.embedding_backward_positions(dx, out, acc, arena), positions.shape
    )
    assert_gradient(
        lambda table: np.vdot(dx, ops.embedding(tokens, table, positions, arena)[0]), table, dtable
    )
    assert_gradient(
        lambda at: np.vdot(dx, ops.embedding(tokens, table, at, arena)[0]), positions, dpositions
    )


@pytest.mark.parametrize(("b", "t", "heads", "d"), ATTENTION_SHAPES)
def test_attention_has_the_gradient_of_its_forward(b, t, heads, d):
    """Of the definition, which every body on the host equals."""
    arena, ops = Arena(), Packed(reference)
    qkv, dy = numbers(1, b, t, 3 * heads * d), numbers(2, b, t, heads * d)
    _, saved = ops.attention(qkv, heads, arena)
    dqkv = ops.attention_backward(dy, saved, arena)
    assert_gradient(lambda qkv: np.vdot(dy, ops.attention(qkv, heads, arena)[0]), qkv, dqkv)


def test_attention_sees_no_later_token():
    arena, ops = Arena(), Packed(reference)
    qkv = numbers(1, 1, 200, 6)
    y, _ = ops.attention(qkv, 2, arena)
    for t in (0, 63, 64, 127, 128, 150):
        later = qkv.copy()
        later[:, t + 1 :] += 1e3
        assert_close(ops.attention(later, 2, arena)[0][:, : t + 1], y[:, : t + 1], 1e-12)


@pytest.mark.product
@pytest.mark.parametrize("ops", BODIES)
@pytest.mark.parametrize(("m", "v"), [(1, 1), (1, 5), (7, 3), (300, 200)])
def test_cross_entropy_has_the_gradient_of_its_loss(ops, m, v):
    arena = Arena()
    logits, targets = 3 * numbers(1, m, v), np.random.default_rng(0).integers(v, size=m)
    kept = logits.copy()
    loss, dlogits = ops.cross_entropy(logits, targets, 0.125, arena)
    assert dlogits is logits
    assert_close(loss, ops.cross_entropy_loss(kept, targets, arena), 1e-12)
    assert_gradient(
        lambda logits: 0.125 * ops.cross_entropy_loss(logits, targets, arena), kept, dlogits
    )
    right = kept[np.arange(m), targets] == kept.max(1)
    assert ops.count_correct(kept, targets, arena) == right.sum()


@pytest.mark.parametrize("ops", BODIES)
def test_a_row_that_does_not_count_has_no_loss_and_no_gradient(ops):
    """Not even if its logits are not finite."""
    logits, targets = numbers(2, 6, 5), np.array([0, IGNORED, 4, IGNORED, IGNORED, 2])
    logits[3, 1] = np.nan
    counted = targets != IGNORED
    some = logits[counted].copy()
    assert ops.count_correct(logits, targets, Arena()) == ops.count_correct(
        some, targets[counted], Arena()
    )
    assert_close(
        ops.cross_entropy_loss(logits, targets, Arena()),
        ops.cross_entropy_loss(some, targets[counted], Arena()),
        1e-12,
    )
    loss, dlogits = ops.cross_entropy(logits, targets, 0.25, Arena())
    true_loss, truth = ops.cross_entropy(some, targets[counted], 0.25, Arena())
    assert_close(loss, true_loss, 1e-12)
    assert np.array_equal(dlogits[counted], truth) and not dlogits[~counted].any()


@pytest.mark.parametrize("ops", BODIES)
def test_cross_entropy_survives_huge_logits(ops):
    logits = np.array([[1e4, -1e4, 0], [-1e38, 0, 1e38]], np.float32)
    loss, dlogits = ops.cross_entropy(logits, np.array([0, 2]), 1.0, Arena())
    assert loss == 0
    assert np.array_equal(dlogits, np.zeros((2, 3), np.float32))


def test_squares_do_not_overflow_and_nonfinite_values_are_counted():
    assert host.gradient_facts(np.full(10, 1e30, np.float32), Arena()) == (pytest.approx(1e61), 0)
    assert host.gradient_facts(np.full(1 << 25, 1, np.float32), Arena()) == (1 << 25, 0)
    for body in BODIES:
        assert body.gradient_facts(np.array([1, np.nan, np.inf, -np.inf, 0]), Arena())[1] == 3


@pytest.mark.parametrize("ops", BODIES)
def test_a_sum_with_weights_may_be_written_over_either(ops):
    a, b = numbers(1, 100_003), numbers(2, 100_003)
    for first, second in ((0, 1), (0, None), (1, 0)):
        for place in (0, 1, 2):
            arrays = [a.copy(), b.copy(), np.empty_like(a)]
            ops.weighted_sum(
                arrays[first],
                0.75,
                None if second is None else arrays[second],
                -0.5,
                arrays[place],
                Arena(),
            )
            assert_close(
                arrays[place],
                0.75 * (a, b)[first] - (0 if second is None else 0.5 * (a, b)[second]),
                1e-14,
            )


@pytest.mark.parametrize("ops", BODIES)
def test_steps_of_lion_are_the_lines_of_its_algorithm(ops):
    """Algorithm 2 of Chen et al. 2023, with the gradient times its factor."""
    p, m, theta, momentum = numbers(1, 50), np.zeros(50), numbers(1, 50), np.zeros(50)
    for step in range(10):
        g = numbers(10 + step, 50) * (np.arange(50) % 7 > 0)  # the sign of 0 is 0
        ops.lion(p, g, m, 0.5, 0.1, 0.9, 0.99, 0.3, Arena())
        c = 0.9 * momentum + (1 - 0.9) * (g / 2)
        theta = theta - 0.1 * (np.sign(c) + 0.3 * theta)
        momentum = 0.99 * momentum + (1 - 0.99) * (g / 2)
    assert_close(p, theta, 1e-12)
    assert_close(m, momentum, 1e-12)


@pytest.mark.product
@pytest.mark.parametrize("ops", BODIES)
@pytest.mark.parametrize("law", laws_of(VocabularyLaws))
def test_parts_of_a_vocabulary_obey(law, ops):
    getattr(VocabularyLaws(), law)(ops, HostBackend())


@pytest.mark.product
@pytest.mark.parametrize("ops", BODIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_undivided_vocabulary_has_the_same_gradient_bitwise(ops, dtype):
    logits, targets = (
        (3 * numbers(1, 300, 200)).astype(dtype),
        np.random.default_rng(0).integers(200, size=300),
    )
    _, truth = ops.cross_entropy(logits.copy(), targets, 0.125, Arena())
    _, dlogits = Split(ops, HostBackend(), logits, targets, 1).cross_entropy(0.125)
    np.testing.assert_array_equal(dlogits, truth)


def test_the_length_of_a_part_s_gradient_takes_no_new_memory():
    """How many tokens a part holds changes from batch to batch."""
    arena, rng = Arena(), np.random.default_rng(0)
    dx, dtable, table = numbers(1, 4, 9, 3), np.zeros((5, 3)), np.zeros((5, 3))
    allocations = set()
    for _ in range(9):
        _, saved = host.embedding(
            rng.integers(rng.integers(2, 12), size=(4, 9)), table, None, arena, 2
        )
        host.embedding_backward_table(dx, saved, dtable, True, arena)
        allocations.add(arena.allocations)
    assert len(allocations) == 1
