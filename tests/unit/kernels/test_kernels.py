"""Every kernel equals the reference, in both builds of the simulator and in several orders of threads."""

import pytest

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from tests.cases.suite import SUITE

MACHINES = {
    "fast": {},
    "checked random": {"checked": True, "order": "random", "seed": 1},
    "checked reverse": {"checked": True, "order": "reverse"},
}
GROUPS = {group.__name__: group for groups in SUITE.values() for group in groups}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_kernel_computes_what_the_reference_says(group, machine):
    kernels = Kernels(Simulator(**MACHINES[machine]))
    for case in GROUPS[group]():
        try:
            case(kernels)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise
