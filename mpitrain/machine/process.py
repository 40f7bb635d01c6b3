"""What this process owns of its machine: its place among the ranks of this host, its share of the cores, its GPU.

Everything here can be asked before NumPy and MPI are imported, from the variables that launchers set.
"""

import contextlib
import os
import re
from typing import NamedTuple

# launcher, local rank, ranks on this host, rank, ranks in all. Under `mpirun` inside a Slurm job the SLURM_ variables
# describe the batch step (local rank 0 of 1), so Slurm comes last, and only counts where `srun` started this process.
LAUNCHERS = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    (
        "MVAPICH",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
    ),
    ("MPICH or Intel MPI", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE"),
    ("Slurm", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
# What makes a process believe that it is a rank. What tunes an MPI library (OMPI_MCA_, UCX_, MPIR_CVAR_) is not among it.
RANK_VARIABLES = (
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "PMIX_",
    "PMI_",
    "PMI2_",
    "MPI_LOCAL",
    "MPIRUN_",
    "HYDI_",
    "HYDRA_",
    "PRTE_LAUNCHED",
    "MV2_COMM_WORLD_",
    "SLURM_",
)
SHARED_MEMORY = "/dev/shm"  # where ranks of one host share memory; Docker gives it 64 MiB unless told otherwise (--shm-size)
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
            local_size = (
                values[1].split("(")[0].split(",")[0]
            )  # Slurm writes 2(x4) for two tasks on each of four hosts
            return Launched(
                launcher, int(values[0]), int(local_size or 1), int(values[2] or 0), int(values[3])
            )
    return Launched("none", 0, 1, 0, 1)


def cores() -> int:
    """Cores this process may run on (its binding, where the launcher set one)."""
    return len(os.sched_getaffinity(0))


def processors() -> int:
    """Cores of this host, whatever part of them this process may run on."""
    return os.cpu_count() or 1


def blas_threads() -> int:
    """This rank's share of the cores: what it is bound to, but no more than its part of the whole host."""
    return max(1, min(cores(), processors() // launched().local_size))


def limit_blas_threads() -> None:
    """Give BLAS this rank's share of the cores, before NumPy is imported; a number the user set stays."""
    if not any(os.environ.get(name) for name in BLAS_VARIABLES):
        for name in BLAS_VARIABLES:
            os.environ[name] = str(blas_threads())


def gpus() -> int:
    """How many GPUs CuPy finds; 0 without CuPy, a driver or a GPU."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):  # CuPy's own errors are RuntimeErrors
        return 0


def choose_gpu(kind: str) -> None:
    """Make one GPU this rank's: number (local rank) modulo (GPUs of the host). Nothing to do if `kind` wants none.

    It comes before MPI starts, because a CUDA-aware MPI looks for the current GPU when it does. The others stay visible:
    hiding them (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task) takes from ranks of one host the way to read each other's
    memory. Where there is no GPU nothing is said here: `backend_for` does, when all ranks can agree on it.
    """
    if kind in ("auto", "cuda") and (count := gpus()):
        import cupy

        cupy.cuda.Device(launched().local_rank % count).use()


def has_driver() -> bool:
    """Whether NVIDIA's driver runs on this machine."""
    return os.path.isdir("/proc/driver/nvidia")


def shared_memory() -> int:
    """Bytes free in SHARED_MEMORY."""
    if not os.path.isdir(SHARED_MEMORY):
        return 0
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize


def room_for(nbytes: int, ranks: int) -> int:
    """Bytes that must be free in SHARED_MEMORY before ranks of one host share a file of so many bytes.

    Open MPI makes no file that leaves less than a twentieth of its size free, and ends the job
    instead. Its own files have pages that it takes later: less than a megabyte for each rank.
    """
    return nbytes + nbytes // 20 + (ranks << 20)


def free_memory(kind: str) -> int:
    """Bytes that are free before this rank and its neighbours take theirs: of its GPU if `kind` is cuda, else of the host.

    A container's limit counts as a smaller host.
    """
    if kind == "cuda":
        import cupy

        return cupy.cuda.runtime.memGetInfo()[0]
    free = []
    for path in (
        "/proc/meminfo",
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            text = file.read()
            if found := re.search(r"MemAvailable: +(\d+) kB", text):
                free.append(int(found[1]) * 1024)
            elif text.strip().isdigit():
                free.append(int(text))
    return min(free)


def environment() -> dict[str, str]:
    """This process's environment."""
    return dict(os.environ)


def environment_of_one() -> dict[str, str]:
    """This process's environment without what tells it that it is one rank of many: for a child that starts MPI alone."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)
    }
