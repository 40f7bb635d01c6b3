"""The losses of small runs are those that were written down."""

import json

import pytest

from tests.golden.curves import CASES, LOSSES, losses

pytestmark = pytest.mark.compile

TOLERANCE = {"cpu": 1e-9, "cuda-sim": 1e-5}
"""Relative: float64 with AdamW on any BLAS, float32 with momentum on any compiler."""


@pytest.mark.parametrize("kind, passes", [*[(kind, "auto") for kind in CASES], ("cpu", "numpy")])
def test_a_small_run_loses_what_it_lost(kind, passes):
    then = json.loads(LOSSES.read_text())[kind]
    now = losses(kind, f"device.passes={passes}")
    assert then[0] - then[-1] > 0.5, "the loss must move, or equality says nothing"
    assert len(now) == len(then)
    for step, (one, other) in enumerate(zip(now, then, strict=True)):
        assert abs(one / other - 1) <= TOLERANCE[kind], (step, one, other)
