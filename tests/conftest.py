"""What mpirun needs on any machine (root in a container, more ranks than cores, one BLAS thread per rank), and marks."""

import os
import sys
from pathlib import Path

import pytest

from mpitrain.machine.process import gpus
from tests.processes import SECONDS

TESTS = Path(__file__).parent
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait leave the core to the others
    "OMPI_MCA_osc": "^ucx",  # prints an error per rank where there is no UCX device
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "sm,self",  # one host: starts in 0.2 s instead of 1.2 s
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",  # the same for MPICH
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the mpirun of this environment


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests by what they start, and skip what needs a GPU where there is none."""
    for item in items:
        if item.path.is_relative_to(TESTS / "mpi"):
            item.add_marker("mpi")
            item.add_marker(pytest.mark.xdist_group("mpi"))    # two at a time would be more ranks than the cores bear
        if not any(item.get_closest_marker(name) for name in ("compile", "mpi", "slow", "gpu")):
            item.add_marker("fast")
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not gpus():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="CuPy finds no GPU here"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Give every test its time."""
    if config.option.timeout is None:
        config.option.timeout = 3 * SECONDS
