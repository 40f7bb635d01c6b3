"""Every kernel equals the reference, in the checked build of the simulator and in several orders of threads.

The fast build, which is long to compile, runs what trains on it: layers, whole models, `bench kernels`, `bench gemm`.
"""

import pytest

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import ORDERS, Simulator
from tests.cases.suite import SUITE

GROUPS = {group.__name__: group for groups in SUITE.values() for group in groups}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_kernel_computes_what_the_reference_says(group, order):
    kernels = Kernels(Simulator(checked=True, order=order, seed=1))
    for case in GROUPS[group]():
        try:
            case(kernels)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise
