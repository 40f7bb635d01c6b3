"""Attention by Hopper's warpgroups: who computes what, values beside mma.sync, mistakes that must be noticed, machine code."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.kernels.source import FOLDER
from mpitrain.machine.arena import Arena
from mpitrain.ops import bodies
from mpitrain.ops.cuda.attention import FORMS, Asked, choose
from tests.cases.hopper import of_few
from tests.cases.numbers import assert_close, numbers, values
from tests.cases.packed import Packed
from tests.unit.kernels.attention_code import Variant, faults_of

ASKED = Asked(
    is_half=True, head=64, drops=False, in_chunks=True, backward=False, wgmma=True, capability=90
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
    kernels = Kernels(Simulator(checked=True))
    qkv = numbers(3, 1, 200, 6 * d).astype(ml_dtypes.bfloat16)
    ways = ("wgmma", "mma")
    sides = [
        Packed(bodies.cuda(kernels, tensor_cores=way)).attention(qkv, 2, Arena()) for way in ways
    ]
    (ours, ours_saved), (theirs, theirs_saved) = sides
    ours, theirs = values(ours), values(theirs)
    sizes = qkv.copy()
    sizes[..., 4 * d :] = np.abs(qkv[..., 4 * d :])
    weighed = Packed(bodies.host()).attention(values(sizes), 2, Arena())[0]
    step = 2.0 ** (np.frexp(np.abs(theirs) + 1e-30)[1] - 8)  # between neighbours in bfloat16
    assert (np.abs(ours - theirs) <= step + weighed * 2.0**-8).all()
    assert (ours == theirs).mean() > 0.6
    assert_close(ours_saved[2][3], theirs_saved[2][3], "float32", "log sums")


TURN = "if (++stage == STAGES) stage = 0, parity ^= 1;"
ISSUE = "wgmma_fence();\n                multiply_keys();\n                multiply_values();"
WAIT = "wgmma_wait<1>();\n                hold(scores);\n                leave_keys();"
VALUES = (
    "wgmma_wait<0>();\n                hold(out);\n                leave_values();\n#pragma unroll"
)
ROUND = "                round_weights();\n            };"
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
        VALUES.replace("wgmma_wait<0>();", "round_weights(); wgmma_wait<0>();"),
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


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Any:
    """A function (text, its replacement) -> kernels whose attention has this change."""

    def kernels(old: str, new: str) -> Kernels:
        folder = tmp_path_factory.mktemp("kernels")
        for path in FOLDER.glob("*.cu*"):
            text = path.read_text()
            if path.name == "attention_hopper.cu" and old:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            (folder / path.name).write_text(text)
        return Kernels(Simulator(checked=True), folder=folder)

    return kernels


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_kernel_is_noticed(mistake, broken):
    old, new, expected = MISTAKES[mistake]
    kernels, qkv = broken(old, new), numbers(5, 1, 400, 192).astype(ml_dtypes.bfloat16)
    with of_few(kernels, 1):
        try:
            y, _ = Packed(bodies.cuda(kernels, tensor_cores="wgmma")).attention(qkv, 1, Arena())
            said = ""
        except KernelError as error:
            said = error.law
    if not said:
        try:
            truth = Packed(bodies.host()).attention(values(qkv), 1, Arena())[0]
            assert_close(y, truth, "bfloat16", "y")
        except AssertionError:
            said = "wrong"
    assert said.startswith(tuple(expected.split("|"))) and bool(said) == bool(expected), said


@pytest.mark.parametrize(
    "variant",
    [
        Variant("newest", 64, "causal"),
        Variant("newest", 128, "whole documents"),
        Variant("oldest", 128, "causal"),
    ],
    ids=str,
)
def test_the_machine_code_is_that_of_warpgroups(variant):
    """`python -m tests.unit.kernels.attention_code` compiles all variants."""
    assert faults_of(variant)[0] == []
