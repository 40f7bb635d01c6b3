"""What mpirun needs on any machine: root in a container, more ranks than cores, one BLAS thread per rank."""

import os
import sys
from pathlib import Path

import pytest

from mpitrain.machine.process import gpus
from tests.processes import SECONDS

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


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not gpus():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="CuPy finds no GPU here"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Give every test its time."""
    if config.option.timeout is None:
        config.option.timeout = 3 * SECONDS
