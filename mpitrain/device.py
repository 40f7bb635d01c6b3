"""What this process owns of its machine: its place among the ranks of this host, and its share of the cores.

Everything here can be asked before NumPy and MPI are imported, from the variables that launchers set.
"""

import os
from typing import NamedTuple

# launcher, local rank, ranks on this host, rank, ranks in all. Under `mpirun` inside a Slurm job the SLURM_ variables
# describe the batch step (local rank 0 of 1), so Slurm comes last, and only counts where `srun` started this process.
LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE"),
    ("Slurm", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


class Launched(NamedTuple):
    """What the launcher says of this process; a process started by hand is rank 0 of 1."""

    launcher: str
    local_rank: int
    local_size: int
    rank: int
    size: int


def launched() -> Launched:
    """Read the launcher's variables. Says nothing about what MPI itself will report."""
    for launcher, *names in LAUNCHERS:
        values = [os.environ.get(name, "") for name in names]
        if values[0].isdigit() and values[3].isdigit():
            local_size = values[1].split("(")[0].split(",")[0]  # Slurm writes 2(x4) for two tasks on each of four hosts
            return Launched(launcher, int(values[0]), int(local_size or 1), int(values[2] or 0), int(values[3]))
    return Launched("none", 0, 1, 0, 1)


def cores() -> int:
    """Cores this process may run on (its binding, where the launcher set one)."""
    return len(os.sched_getaffinity(0))


def blas_threads() -> int:
    """This rank's share of the cores: what it is bound to, but no more than its part of the whole host."""
    return max(1, min(cores(), (os.cpu_count() or 1) // launched().local_size))


def limit_blas_threads() -> None:
    """Give BLAS this rank's share of the cores, before NumPy is imported; a number the user set stays."""
    if not any(os.environ.get(name) for name in BLAS_VARIABLES):
        for name in BLAS_VARIABLES:
            os.environ[name] = str(blas_threads())
