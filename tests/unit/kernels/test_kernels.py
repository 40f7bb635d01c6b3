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


def check_and_type(case):
    """What a case checks, and the type of its elements."""
    return getattr(case, "func", case), getattr(case, "keywords", {}).get("dtype")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_kernel_computes_what_the_reference_says(group, machine):
    """The fast build has other flags, and no other source: the last case of each check in float32 and in 16 bits shows that they
    are right.
    """
    kernels, cases = Kernels(Simulator(**MACHINES[machine])), list(GROUPS[group]())
    if machine == "fast":
        cases = [
            case
            for (_, dtype), case in {check_and_type(case): case for case in cases}.items()
            if dtype != "float64"
        ]
    for case in cases:
        try:
            case(kernels)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise
