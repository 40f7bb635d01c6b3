"""The cases notice a fixed sample of broken kernels; `python -m tests.unit.kernels.mutation` runs all of them."""

import pytest

from tests.unit.kernels.mutation import EQUIVALENT, mutants, run, sample


@pytest.mark.timeout(900)
def test_the_cases_notice_a_sample_of_broken_kernels():
    missed = [(mutant.file, mutant.line, mutant.kind) for mutant, noticed in run(sample(20)) if not noticed]
    assert missed == []


def test_every_mutant_known_to_be_equivalent_still_exists():
    assert set(EQUIVALENT) <= {(mutant.file, mutant.broken) for mutant in mutants()}


def test_every_barrier_is_among_the_mutants():
    assert sum(mutant.kind == "barrier removed" for mutant in mutants()) >= 30
