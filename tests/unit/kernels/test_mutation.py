"""The cases notice a broken kernel of every kind; `python -m tests.unit.kernels.mutation` runs all of them."""

from mpitrain.kernels.source import package_sources
from tests.cases.suite import SUITE
from tests.unit.kernels.mutation import EQUIVALENT, MUTATIONS, mutants, run, sample


def test_the_cases_notice_a_broken_kernel_of_every_kind():
    judged = list(run(sample()))
    assert {mutant.kind for mutant, _ in judged} == set(MUTATIONS)
    assert [
        (mutant.file, mutant.line, mutant.kind) for mutant, noticed in judged if not noticed
    ] == []


def test_every_mutant_known_to_be_equivalent_still_exists():
    assert set(EQUIVALENT) <= {(mutant.file, mutant.broken) for mutant in mutants()}


def test_every_source_has_cases_that_would_notice_a_mutant():
    assert package_sources().keys() == SUITE.keys()


def test_every_barrier_is_among_the_mutants():
    assert sum(mutant.kind == "barrier removed" for mutant in mutants()) >= 30
