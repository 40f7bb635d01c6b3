"""The losses of small runs are those that were written down."""

import json

import pytest

from tests.golden.curves import CASES, HALVES, LOSSES, WARPGROUPS, losses

pytestmark = pytest.mark.compile

TOLERANCE = {"cpu": 1e-9, "cuda-sim": 1e-5, "bfloat16": 5e-4}
"""Relative: float64 with AdamW on any BLAS, float32 with momentum on any compiler, and that in 16 bits with other products."""


RUNS = [
    *((kind, "device.passes=auto") for kind in CASES if kind not in HALVES),
    ("cpu", "device.passes=numpy"),
    ("bfloat16", WARPGROUPS),  # written down by mma.sync
]


@pytest.mark.parametrize("kind, setting", RUNS)
def test_a_small_run_loses_what_it_lost(kind, setting, users_kernels):
    then = json.loads(LOSSES.read_text())[kind]
    steps = 8 if kind in HALVES else len(then)  # the simulator is slow
    now, then = losses(kind, setting, steps=steps), then[:steps]
    assert then[0] - then[-1] > 0.5, "the loss must move, or equality says nothing"
    for step, (one, other) in enumerate(zip(now, then, strict=True)):
        assert abs(one / other - 1) <= TOLERANCE[kind], (step, one, other)
