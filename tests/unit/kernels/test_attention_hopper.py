"""Attention by Hopper's warpgroups: who computes what, values beside mma.sync, mistakes that must be noticed."""

import ml_dtypes
import numpy as np
import pytest

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.kernels.source import FOLDER
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda.attention import FORMS, Asked, choose, parts_of
from mpitrain.ops.device import cuda_ops, host_ops, reference_ops
from tests.cases.hopper import of_few
from tests.cases.numbers import assert_close, numbers, values
from tests.cases.packed import Packed

HOST = reference_ops()
ASKED = Asked(
    is_half=True, is_split=False, head=64, drops=False, in_chunks=True, wgmma=True, capability=90
)


@pytest.mark.parametrize(
    ("changed", "form"),
    [
        ({}, "wgmma"),
        ({"head": 128}, "wgmma"),
        ({"head": 80}, "mma.sync"),
        ({"in_chunks": False}, "mma.sync"),
        ({"wgmma": False}, "mma.sync"),
        ({"drops": True}, "ordinary units"),
        ({"is_half": False}, "ordinary units"),
        ({"is_half": False, "is_split": True}, "3xTF32"),
        ({"head": 200}, "ordinary units"),
        ({"wgmma": False, "capability": 75}, "ordinary units"),
    ],
    ids=str,
)
def test_the_table_names_the_kernels_of_an_attention(changed, form):
    asked = ASKED._replace(**changed)
    assert next(name for name, row in FORMS.items() if row.takes(asked)) == form


def test_only_who_asks_for_wgmma_gets_it():
    kernels = Kernels(Simulator())
    q, kv = np.empty((1, 8, 128), ml_dtypes.bfloat16), np.empty((1, 8, 256), ml_dtypes.bfloat16)
    assert choose(kernels, q, kv, 2, q).prefix == "attention_tensor"


@pytest.mark.parametrize("d", [64, 128])
def test_the_values_are_those_of_mma_sync_within_one_rounding(d):
    """Of the result, and of the weights, which either kernel rounds beside another largest score."""
    kernels, arena = Kernels(Simulator(checked=True)), Arena()
    qkv, dy = (numbers(n, 1, 200, n * d).astype(ml_dtypes.bfloat16) for n in (6, 2))
    ways = [Packed(cuda_ops(kernels, tensor_cores=way)) for way in ("wgmma", "mma")]
    (ours, our_saved), (theirs, saved) = (ops.attention(qkv, 2, arena) for ops in ways)
    ours, theirs = values(ours), values(theirs)
    sizes = qkv.copy()
    sizes[..., 4 * d :] = np.abs(qkv[..., 4 * d :])
    weighed = Packed(host_ops()).attention(values(sizes), 2, Arena())[0]
    assert (np.abs(ours - theirs) <= steps(theirs) + weighed * 2.0**-8).all()
    assert (ours == theirs).mean() > 0.6
    assert_close(our_saved[2][3], saved[2][3], "float32", "log sums")
    # Of one forward, gradients differ by the order of their sums alone.
    ours, theirs = (values(ops.attention_backward(dy, saved, arena)) for ops in ways)
    near = np.abs(ours - theirs) <= steps(theirs) + 1e-5
    assert near.all() and (ours == theirs).mean() > 0.98


def steps(x: np.ndarray) -> np.ndarray:
    """The distances of numbers in bfloat16 to the next ones."""
    return 2.0 ** (np.frexp(np.abs(x) + 1e-30)[1] - 8)


def test_a_repeated_run_has_the_same_bits_in_any_order():
    """dq is a sum over three blocks of keys, in two parts."""
    qkv, dy = (numbers(n, 1, 300, n * 64).astype(ml_dtypes.bfloat16) for n in (3, 1))
    found = set()
    for order in ("forward", "reverse", "random"):
        kernels, arena = Kernels(Simulator(checked=True, order=order)), Arena()
        with of_few(kernels, 2):
            ops = Packed(cuda_ops(kernels, tensor_cores="wgmma"))
            y, saved = ops.attention(qkv, 1, arena)
            found.add((y.tobytes(), ops.attention_backward(dy, saved, arena).tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("blocks", "heads", "parts"), [(8, 96, 4), (8, 132, 1), (8, 12, 4), (1, 3, 1), (2, 66, 2)]
)
def test_the_keys_of_a_head_are_shared_by_as_many_blocks_as_end_soonest(blocks, heads, parts):
    assert parts_of(blocks, heads, 132) == parts


TURN = "if (++stage == STAGES) stage = 0, parity ^= 1;"
ISSUE = "wgmma_fence();\n                multiply_keys();\n                multiply_values();"
WAIT = "wgmma_wait<1>();\n                hold(scores);\n                leave_keys();"
VALUES = (
    "wgmma_wait<0>();\n                hold(out);\n                leave_values();\n#pragma unroll"
)
MISTAKES = {
    "none": ("", "", ""),
    "a stage's parity that never changes": (
        TURN,
        "stage = (stage + 1) % STAGES;",
        "in flight|deadlock|mbarrier",
    ),
    "no fence before products": (ISSUE, ISSUE.replace("wgmma_fence();", ""), "registers"),
    "scores used before the wait": (WAIT, WAIT.replace("wgmma_wait<1>();", ""), "wrong|in flight"),
    "keys left before the wait": (
        WAIT,
        "leave_keys();" + WAIT.replace("leave_keys();", ""),
        "in flight",
    ),
    "sums shrunk under their product": (
        VALUES,
        VALUES.replace("wgmma_wait<0>();", ""),
        "wrong|in flight|registers",
    ),
    "weights rounded under their product": (
        VALUES,
        VALUES.replace("wgmma_wait<0>();", "round_sums(weights, scores); wgmma_wait<0>();"),
        "registers",
    ),
    "a panel of values 8 rows on": (
        "Values::part(0, s))",
        "Values::part(0, s + 8))",
        "wrong|out of bounds|in flight|uninit",
    ),
    "a maximum known too early": (
        "const float shift = largest * scale;",
        "rows.maximum[i] = largest; const float shift = largest * scale;",
        "wrong",
    ),
    "a turn that is not passed on": (
        "const auto pass_turn = [&] { arrive(turns + 8 * (1 - side)); };",
        "const auto pass_turn = [&] {};",
        "deadlock",
    ),
}
"""What is broken, by which text in place of which, and how the simulator's error begins; "wrong" for wrong numbers."""

LEFT = "wgmma_wait<1>();\n                arrive(empty + 8 * turn.stage);"
MISTAKES_OF_THE_BACKWARD = {
    "no fence behind stored slopes": ("proxy_fence();", "", "proxy"),
    "slopes of the other warpgroup not awaited": (
        "barrier_wait(written + 8 * turn.stage, turn.parity);",
        "",
        "race|uninitialised",
    ),
    "no order in a warp before its arrival": ("__syncwarp();    // of the whole warp", "", "race"),
    "a stage left before its products end": (
        LEFT,
        "arrive(empty + 8 * turn.stage); wgmma_wait<1>();",
        "in flight",
    ),
    "statistics not awaited": (
        "barrier_init(full + 8 * s, 2)",
        "barrier_init(full + 8 * s, 1)",
        "mbarrier|race|uninitialised|in flight|deadlock",
    ),
    "slopes stored without the swizzle": ("(chunk % 8 ^ lane / 4)", "(chunk % 8)", "wrong"),
    "dq added to what nobody stored": (
        "tile < stored ? rows_left(t0) : 0",
        "rows_left(t0)",
        "uninitialised",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES | MISTAKES_OF_THE_BACKWARD)
def test_a_mistake_in_the_kernels_is_noticed(mistake, tmp_path):
    old, new, expected = (MISTAKES | MISTAKES_OF_THE_BACKWARD)[mistake]
    places = 0
    for path in FOLDER.glob("*.cu*"):
        text = path.read_text()
        if path.name.startswith("attention_hopper") and old:
            places += text.count(old)
            text = text.replace(old, new)
        (tmp_path / path.name).write_text(text)
    assert places == bool(old), "the text stands there once"
    qkv, dy = (numbers(n, 1, 400, n * 64).astype(ml_dtypes.bfloat16) for n in (3, 1))
    said = said_of(Kernels(Simulator(checked=True), folder=tmp_path), qkv, dy)
    assert said.startswith(tuple(expected.split("|"))) and bool(said) == bool(expected), said


def said_of(kernels: Kernels, qkv: np.ndarray, dy: np.ndarray) -> str:
    """What came of the kernels: "", "wrong", or the text of the error."""
    ops, truth, arena = Packed(cuda_ops(kernels, tensor_cores="wgmma")), Packed(HOST), Arena()
    true_y, true_saved = truth.attention(values(qkv), 1, None)
    try:
        with of_few(kernels, 1):
            y, saved = ops.attention(qkv, 1, arena)
            assert_close(y, true_y, "bfloat16", "y")
            slopes = ops.attention_backward(dy, saved, arena)
        true_slopes = truth.attention_backward(values(dy), true_saved, None)
        assert_close(slopes, true_slopes, "bfloat16", "dqkv")
    except KernelError as error:
        return error.law
    except AssertionError:
        return "wrong"
    return ""
