"""Every kernel equals the reference, in both builds of the simulator and in several orders of threads."""

import pytest

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from tests.cases.suite import SUITE

GROUPS = {group.__name__: group for groups in SUITE.values() for group in groups}


def last_of_each_check(group):
    """The last case in 16 bits of each check of a group."""
    keys = [(case, getattr(case, "keywords", {})) for case in group()]
    halves = [(case, words) for case, words in keys if words.get("dtype", "")[-2:] == "16"]
    return [*{case.func: case for case, _ in halves}.values()]


HALVES = {name: cases for name, group in GROUPS.items() if (cases := last_of_each_check(group))}


@pytest.mark.parametrize("group", GROUPS)
def test_a_kernel_computes_what_the_reference_says(group):
    """Races are found in any order of threads, so the reverse one is that of a case of each check and type."""
    compute(Simulator(checked=True, order="random", seed=1), cases := [*GROUPS[group]()])
    kinds = {
        (case.func, case.keywords.get("dtype")) if hasattr(case, "func") else case: case
        for case in cases
    }
    compute(Simulator(checked=True, order="reverse"), kinds.values())


@pytest.mark.parametrize("group", HALVES)
def test_the_fast_build_computes_in_16_bits_what_the_reference_says(group):
    """It has other flags, and no other source: a case of each check suffices. For other types the laws of operations do it."""
    compute(Simulator(), HALVES[group])


def compute(machine, cases):
    kernels = Kernels(machine)
    for case in cases:
        try:
            case(kernels)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise
