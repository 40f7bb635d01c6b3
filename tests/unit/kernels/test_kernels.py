"""Every kernel equals the reference in the checked build of the simulator, in several orders of threads.

The fast build has the same source and other flags. With those of users the laws of operations prove each operation in
float32, and goldens what models launch in 16 bits; other types and shapes have their proof here.
"""

import pytest

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from tests.cases.suite import SUITE

GROUPS = {group.__name__: group for groups in SUITE.values() for group in groups}


@pytest.mark.parametrize("group", GROUPS)
def test_a_kernel_computes_what_the_reference_says(group):
    """Races are found in any order of threads, so the reverse one is that of a case of each check and type."""
    compute(Simulator(checked=True, order="random", seed=1), cases := [*GROUPS[group]()])
    kinds = {
        (case.func, case.keywords.get("dtype")) if hasattr(case, "func") else case: case
        for case in cases
    }
    compute(Simulator(checked=True, order="reverse"), kinds.values())


def compute(machine, cases):
    kernels = Kernels(machine)
    for case in cases:
        try:
            case(kernels)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise
