"""Resources of this process: its rank on this host, its cores, its GPU and the free memory.

All functions work before NumPy and MPI are imported. Ranks come from the launcher's variables.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shlex
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args
from zlib import crc32

from mpitrain import __version__
from mpitrain.errors import ConfigError
from mpitrain.machine.status import is_launched

# Each entry has the launcher, then its variables for: local rank, ranks on this host, rank, ranks.
# Under `mpirun` inside a Slurm job, the SLURM_ variables describe the batch step (local rank 0 of
# 1). So Slurm comes last, and only counts where `srun` started this process.
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
    ("PALS", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE", "PALS_RANKID", "PMI_SIZE"),
    ("Flux", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("Slurm", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("torchrun", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"),
)
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Without it the variables of torchrun are those of a program that sets them itself."""
# Variables with these prefixes make a process believe that it is a rank. Variables that tune an MPI
# library (OMPI_MCA_, UCX_, MPIR_CVAR_) are not among them.
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
    "PALS_",
    "FLUX_TASK_",
    "FLUX_JOB_",
    "TORCHELASTIC_",
)
# Ranks of one host share memory here; Docker limits it to 64 MiB by default (--shm-size).
SHARED_MEMORY = "/dev/shm"
OF_OPEN_MPI = 1 << 18
"""Bytes of the files that Open MPI's launcher makes for one host in the temporary folder."""
SIOCGIFFLAGS, IFF_UP = 0x8913, 1  # of Linux, for the flags of a network interface
BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")

SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h", ".json")
"""Suffixes of the files of this package that decide what a run computes."""


class Launched(NamedTuple):
    """Launcher's description of this process; a process started by hand is rank 0 of 1."""

    launcher: str
    local_rank: int
    local_size: int
    rank: int
    size: int


def launched() -> Launched:
    """Read the variables of the launcher; MPI itself may report other numbers."""
    for launcher, *names in LAUNCHERS:
        if launcher == "torchrun" and TORCHRUN not in os.environ:
            continue
        values = [os.environ.get(name, "") for name in names]
        if values[0].isdigit() and values[3].isdigit():
            # Slurm writes 2(x4) for two tasks on each of four hosts.
            first, size = values[1].split("(")[0].split(",")[0], int(values[3])
            local_size = int(first) if first.isdigit() else 1
            if names[1] == "FLUX_JOB_NNODES":
                local_size = -(-size // local_size)
            return Launched(
                launcher,
                int(values[0]),
                local_size,
                int(values[2]) if values[2].isdigit() else 0,
                size,
            )
    return Launched("none", 0, 1, 0, 1)


def name_local_rank() -> None:
    """Set LOCAL_RANK, as torchrun does, to this rank's own: programs choose their GPU by it.

    One that a batch script exports is the same for all ranks. That of torchrun's processes stays.
    """
    if (started := launched()).launcher != "none" and TORCHRUN not in os.environ:
        os.environ["LOCAL_RANK"] = str(started.local_rank)


def own_command() -> str:
    """Return the command of this program, as it stands behind `mpitrain launch --`."""
    program, *arguments = sys.argv
    if program.endswith(".py"):
        return shlex.join(["python", program, *arguments])
    is_command = program not in ("", "-c")
    return shlex.join([Path(program).name, *arguments]) if is_command else "python own.py"


SPARES = "mpitrain_spares"
"""Python's option -X with the number of ranks that wait for a place: the last K, or of each host with K/host."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that request a stop."""


def spares() -> tuple[int, bool] | None:
    """Return the number of spares, and whether it is that of each host; None: there are none."""
    number, _, host = str(sys._xoptions.get(SPARES, "")).partition("/")
    return (int(number), host == "host") if number.isdigit() and int(number) else None


def is_spare() -> bool:
    """Return whether this rank waits until another one is lost."""
    own, (number, is_per_host) = launched(), spares() or (0, False)
    return (
        own.local_rank + number >= own.local_size if is_per_host else own.rank + number >= own.size
    )


def ranks_here() -> int:
    """Return the number of ranks of this host that compute."""
    own, (number, is_per_host) = launched(), spares() or (0, False)
    if not is_per_host:
        # The ranks of a host follow each other.
        number = max(0, own.rank - own.local_rank + own.local_size - (own.size - number))
    return max(1, own.local_size - number)


def outlives_ranks() -> bool:
    """Return whether mpirun has switched ULFM on, so that a job outlives the loss of a rank."""
    name = "OMPI_MCA_mpi_ft_enable"
    return os.environ.get(name, "") not in ("", "0", "false")


@cache
def package() -> str:
    """Return the version of this package and a digest of its sources, as text.

    It takes about 20 ms. Places, times and compiled files do not matter.
    """
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder, subfolders, names in os.walk(root):
        # What is hidden belongs to editors: a lock of Emacs is a link to nothing.
        subfolders[:] = sorted(name for name in subfolders if name[0] != ".")
        for name in sorted(n for n in names if n.endswith(SOURCES) and n[0] != "."):
            data = Path(folder, name).read_bytes()
            digest.update(f"{folder[len(str(root)) :]}/{name} {len(data)}\n".encode() + data)
    return f"{__version__} ({digest.hexdigest()[:12]})"


def cores() -> int:
    """Return the number of cores this process may run on: its binding, if the launcher set one."""
    return len(os.sched_getaffinity(0))


def processors() -> int:
    """Return the number of cores of this host, whether or not this process may run on them."""
    return os.cpu_count() or 1


PACKAGES = Path("/sys/devices/system/cpu")


def _packages(cores: Iterable[int]) -> set[str]:
    """Return the sockets of these cores, as Linux numbers them; empty if it does not tell."""
    with contextlib.suppress(OSError):
        return {
            (PACKAGES / f"cpu{core}/topology/physical_package_id").read_text().strip()
            for core in cores
        }
    return set()


def sockets() -> int:
    """Return the number of sockets of this host; 1 if it is not known."""
    return max(1, len(_packages(range(processors()))))


def bound_socket() -> str:
    """Return the socket that this process is bound to; "" if to none, or if the host has only one."""
    bound = _packages(os.sched_getaffinity(0))
    return bound.pop() if sockets() > 1 and len(bound) == 1 else ""


def blas_threads() -> int:
    """Return this rank's number of BLAS threads: at most its bound cores.

    It is also at most an even split of the host's cores over the ranks of the host.
    """
    return max(1, min(cores(), processors() // ranks_here()))


def limit_blas_threads() -> None:
    """Limit BLAS to this rank's cores, before NumPy is imported; a number set by the user stays."""
    if not any(os.environ.get(name) for name in BLAS_VARIABLES):
        for name in BLAS_VARIABLES:
            os.environ[name] = str(blas_threads())


UCX_DEVICES = Path("/sys/class/infiniband")


def silence_ucx() -> None:
    """Leave out Open MPI's one-sided component of UCX where no device needs it: it prints errors.

    Call it before MPI starts. `launch` leaves it out, too.
    """
    if not UCX_DEVICES.is_dir() or not any(UCX_DEVICES.iterdir()):
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")


_CHOSEN = set[str]()
"""Variables that `yield_crowded_cores` has set in this process; all others are the user's, or of `launch`."""


def yield_crowded_cores() -> None:
    """Let MPI leave the core while it waits, if this host has fewer cores than ranks.

    Call it before MPI starts. `launch` cannot know the cores of other hosts.
    """
    if ranks_here() > processors():
        for name in ("OMPI_MCA_mpi_yield_when_idle", "MPIR_CVAR_ENABLE_HEAVY_YIELD"):
            if name not in os.environ:
                os.environ[name] = "1"
                _CHOSEN.add(name)


def poll_without_yielding() -> None:
    """Let MPI_Test of Open MPI never leave the core, which it does if ranks exceed cores.

    Call it before MPI starts, in a program whose waits poll and sleep. Beside other work each test
    would cost a turn of that work. What the user has set stays, except under `launch`, which sets it, too.
    """
    name = "OMPI_MCA_mpi_yield_when_idle"
    if name not in os.environ or name in _CHOSEN or is_launched():
        os.environ[name] = "0"


OPENBLAS_KERNELS, BY_MKL = "OPENBLAS_CORETYPE", "MPITRAIN_MKL"
MKL = "MKL"


def blas_kernels() -> str:
    """Return what multiplies matrices: MKL, kernels of OpenBLAS such as Haswell, or "": its own choice."""
    return MKL if os.environ.get(BY_MKL) == "1" else os.environ.get(OPENBLAS_KERNELS, "")


def has_chosen_blas() -> bool:
    """Return whether the user, or a process above this one, has chosen what multiplies matrices."""
    return bool(os.environ.get(BY_MKL) or os.environ.get(OPENBLAS_KERNELS))


def environment_with_blas(kernels: str, environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which these kernels multiply; values as of `blas_kernels`."""
    rest = {k: v for k, v in environment.items() if k not in (OPENBLAS_KERNELS, BY_MKL)}
    return rest | (
        {BY_MKL: "1"} if kernels == MKL else {OPENBLAS_KERNELS: kernels} if kernels else {}
    )


def choose_blas_kernels(kernels: str) -> None:
    """Let these kernels multiply, before NumPy is imported; values as of `blas_kernels`."""
    for name in (OPENBLAS_KERNELS, BY_MKL):
        os.environ.pop(name, None)
    os.environ |= environment_with_blas(kernels, {})


def lower_blas_threads(local_size: int) -> None:
    """Divide the cores among the ranks of this host, after NumPy is imported.

    A number of threads that the user has set stays.
    """
    if os.environ.get("OMP_NUM_THREADS") == str(blas_threads()):
        from threadpoolctl import threadpool_limits

        threadpool_limits(max(1, min(cores(), processors() // local_size)))


def blas_threads_in_use() -> int:
    """Return the number of threads of this process's BLAS, after NumPy is imported; 1 without BLAS."""
    from threadpoolctl import threadpool_info

    pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return max(pools, default=1)


def gpus() -> int:
    """Return the number of GPUs that CuPy finds; 0 without CuPy, a driver or a GPU."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):  # CuPy's own errors are RuntimeErrors
        return 0


def visible_gpus() -> list[str]:
    """Return the PCI address and the start of the UUID of each GPU that this process sees."""
    if not (seen := gpus()):
        return []
    import cupy

    runtime = cupy.cuda.runtime
    uuids = [runtime.getDeviceProperties(index)["uuid"].hex() for index in range(seen)]
    return [f"{runtime.deviceGetPCIBusId(i)}/{uuid[:8]}" for i, uuid in enumerate(uuids)]


def same_gpu() -> Callable[[], None]:
    """Return a function by which another thread takes the current GPU of this one.

    Each thread begins with GPU 0. Nothing has chosen another one before CuPy is imported.
    """
    cupy = sys.modules.get("cupy")
    return cupy.cuda.Device().use if cupy and gpus() else lambda: None


class Gpu(NamedTuple):
    """The current GPU of a process; serialisable as JSON.

    seen     number of GPUs that the process sees; if 0, it has none
    address  on the PCI bus
    uuid     tells instances of one GPU apart (MIG), which share its address
    free     free bytes of its memory
    """

    seen: int = 0
    address: str = ""
    uuid: str = ""
    free: int = 0


def current_gpu() -> Gpu:
    """Return the current GPU of this process, before the ranks allocate memory."""
    if not (seen := gpus()):
        return Gpu()
    import cupy

    runtime = cupy.cuda.runtime
    index = runtime.getDevice()
    uuid = runtime.getDeviceProperties(index)["uuid"].hex()
    return Gpu(seen, runtime.deviceGetPCIBusId(index), uuid, free_memory("cuda"))


def gpu_identities(hosts: Sequence[str], gpus: Sequence[Gpu]) -> list[tuple[str, str, str]]:
    """Return the host, PCI address and UUID of each rank's GPU, which no other GPU has.

    Without `gpus`, ranks compute on their hosts, and only the hosts differ.
    """
    found = gpus or [Gpu()] * len(hosts)
    return [(host, gpu.address, gpu.uuid) for host, gpu in zip(hosts, found, strict=True)]


def choose_gpu(kind: str, local_rank: int | None = None) -> None:
    """Make GPU (local rank) modulo (GPUs of the host) the current one, if `kind` may use a GPU.

    Call it before MPI starts, because a CUDA-aware MPI then looks for the current GPU. All other
    GPUs stay visible. Hiding them (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task) would prevent
    ranks of one host from reading each other's memory. Without a GPU, this function raises nothing.
    `backend_for` does so later, when all ranks can agree on the error.

    local_rank  None: as the launcher says
    """
    if kind in ("auto", "cuda") and (count := gpus()):
        import cupy

        local = launched().local_rank if local_rank is None else local_rank
        cupy.cuda.Device(local % count).use()


def has_driver() -> bool:
    return os.path.isdir("/proc/driver/nvidia")


def shared_memory() -> int:
    """Return the bytes free in SHARED_MEMORY."""
    if not os.path.isdir(SHARED_MEMORY):
        return 0
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def machine() -> str:
    """Return the boot identifier of the kernel. All containers of one machine share it."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def check_temporary_folder() -> None:
    """Raise ConfigError unless Open MPI can make its files in the folder for temporary files.

    Python would take another folder, but Open MPI ends.
    """
    names = ("TMPDIR", "TEMP", "TMP")
    folder = Path(next((os.environ[name] for name in names if os.environ.get(name)), "/tmp"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="mpitrain-", buffering=0) as file:
            file.write(bytes(OF_OPEN_MPI))
    except OSError as error:
        raise ConfigError(
            f"Open MPI needs a folder for temporary files, but {folder} cannot be written: {error.strerror or error}.",
            "Make room there, or set TMPDIR to another folder.",
        ) from None


def interfaces() -> list[str]:
    """Return the names of the network interfaces that are up, the loopback among them."""
    up = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("16s16x", name.encode())
                flags = fcntl.ioctl(asked.fileno(), SIOCGIFFLAGS, request)
                up += [name] * (struct.unpack_from("16xH", flags)[0] & IFF_UP)
    return up


def job_id() -> str:
    """Return the number of this job in its batch system; "" outside of one."""
    names = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def room_for(nbytes: int, ranks: int) -> int:
    """Return the bytes that SHARED_MEMORY must have free before ranks share a file of `nbytes`.

    ranks  number of ranks on this host

    Open MPI creates a file only if a twentieth of the file's size stays free; else it ends the job.
    Its own files allocate pages later: less than a megabyte per rank.
    """
    return nbytes + nbytes // 20 + (ranks << 20)


def free_memory(kind: str) -> int:
    """Return the bytes free before the ranks of this host allocate theirs.

    kind  "cuda": the current GPU's memory; other kinds: the host's, or a container's limit if less
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
            if match := re.search(r"MemAvailable: +(\d+) kB", text):
                free.append(int(match[1]) * 1024)
            elif text.strip().isdigit():
                free.append(int(text))
    return min(free)


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes (VmHWM); 0 if it is not known."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as file:
        if match := re.search(r"VmHWM:\s+(\d+) kB", file.read()):
            return int(match[1]) * 1024
    return 0


def caches() -> Path:
    """Return this user's folder of caches; not absolute without a home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def environment() -> dict[str, str]:
    return dict(os.environ)


def environment_of_one() -> dict[str, str]:
    """Return this environment without the variables that make a process one of many ranks.

    A child process with it starts MPI alone.
    """
    return {
        name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)
    }


MPI_LIBRARY = re.compile(r"/(?:libmpi|MPI\.)[^/\n]*\.so")
"""A library of MPI, or mpi4py's module, among the files that a process has mapped."""


def leave_job_of_parent() -> None:
    """Remove the variables of the launcher if another rank started this process.

    It has inherited them. MPI would take it for that rank a second time, and wait for ever.
    """
    names = {"PMIX_NAMESPACE", *(name for _, *names in LAUNCHERS for name in names)}
    own = {name: os.environ[name] for name in names if name in os.environ}
    parent = os.getppid() if launched().launcher != "none" else 0
    while parent > 1:
        try:
            at = Path(f"/proc/{parent}")
            began_with = dict(
                os.fsdecode(entry).partition("=")[::2]
                for entry in (at / "environ").read_bytes().split(b"\0")
            )
            if {name: began_with.get(name) for name in own} != own:
                return  # It is the launcher, or a rank of another job.
            if MPI_LIBRARY.search((at / "maps").read_text(errors="replace")):
                break
            parent = int((at / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return
    if parent > 1:
        rank = launched().rank
        for name in os.environ.keys() - environment_of_one().keys():
            del os.environ[name]
        print(f"note: rank {rank} started this process, which runs alone", file=sys.stderr)


Kind = Literal["cpu", "cuda", "cuda-sim"]
"""cpu: NumPy; cuda: our kernels on a GPU, through CuPy; cuda-sim: the same kernels compiled for the
CPU.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)


class Processor(NamedTuple):
    """A processor.

    vendor    such as GenuineIntel or AuthenticAMD; empty if unknown
    features  instruction sets, as the kernel names them
    """

    name: str
    vendor: str
    features: frozenset[str]

    @property
    def label(self) -> str:
        """The name and a sum of the features: virtual machines may have a name like AMD EPYC."""
        return f"{self.name} {crc32(' '.join(sorted(self.features)).encode()):08x}"

    @property
    def gains_from_mkl(self) -> bool:
        """Whether MKL multiplies faster than OpenBLAS: on Intel processors with AVX-512."""
        return self.vendor == "GenuineIntel" and "avx512f" in self.features


def processor(path: str = "/proc/cpuinfo") -> Processor:
    """Return the first processor that the kernel lists."""
    facts: dict[str, str] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if not line.strip() and facts:
                break
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    return Processor(
        facts.get("model name", platform.machine()),
        facts.get("vendor_id", ""),
        frozenset(facts.get("flags", "").split()),
    )


class ProcessId(NamedTuple):
    """Identity of a process, which no later process has.

    number     its PID
    started    ticks from the boot to its start; PIDs are used again
    namespace  that of its PID, so that containers of one host name are not mixed up
    host       name of its host
    """

    number: int
    started: int
    namespace: str
    host: str


def own_id() -> ProcessId:
    _, started = _status(os.getpid())
    return ProcessId(os.getpid(), started, _namespace(), socket.gethostname())


def process_state(process: ProcessId) -> str:
    """Return "running", "stopped", "gone", or "" if this process cannot see that one."""
    own = _namespace()
    if not own or (process.namespace, process.host) != (own, socket.gethostname()):
        return ""
    state, started = _status(process.number)
    if started != process.started or state in "ZX":
        return "gone"
    return "stopped" if state in "Tt" else "running"


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _status(number: int) -> tuple[str, int]:
    """Return the state letter and the start of a process; ("X", -1) if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{number}/stat") as file:
        # The name of the program may contain spaces and parentheses.
        fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "X", -1
