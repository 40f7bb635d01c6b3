"""The hosts of a job: those that a batch system granted, and the placement of ranks that the user names."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.files import reading, without_byte_order_mark
from mpitrain.machine.process import BLAS_VARIABLES

LONGEST = 1 << 20
"""Bytes that a file of hosts may have."""
NUMBERS = re.compile(r"\[(\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*)\]", re.ASCII)
"""The numbers in Slurm's short form of hosts, such as node[01-03,7]."""


class Allocation(NamedTuple):
    """What a batch system granted to this job.

    system  name of the batch system
    ranks   number of tasks or slots
    hosts   number of hosts
    """

    system: str
    ranks: int
    hosts: int


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that these environment variables describe; None outside a batch job.

    raises  ConfigError if one of them has no number where the batch system writes one
    """
    if system := _system(environ):
        return Allocation(system.name, *system.counts(environ))
    return None


def slots(environ: Mapping[str, str]) -> dict[str, int]:
    """Return {host of the allocation: ranks for which it has room, 0 if unknown}; {} outside a batch job.

    raises  ConfigError if the batch system does not list its hosts
    """
    system = _system(environ)
    return system.slots(environ) if system else {}


def ranks_of(granted: Allocation | None, ppn: int = 0) -> int:
    """Return the number of ranks that an allocation has; ConfigError without one.

    ppn  ranks of each host; 0: as the batch system counts them
    """
    if not granted or not granted.ranks:
        raise ConfigError(
            "launch needs a number of ranks outside a batch job, but none is given.",
            "Give it as -n RANKS, or as --hosts a:4,b:4.",
        )
    return ppn * granted.hosts or granted.ranks


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{name} is a number in a batch job, but it is {text!r}.",
            f"Unset {name}, or start launch inside the job.",
        )
    return int(text)


def host_lines(path: Path, what: str) -> list[str]:
    """Return the lines of a file of hosts, without comments and empty lines.

    what    the option or variable that names the file
    raises  ConfigError for a file without hosts, and for a pipe, a device or a long file: reading
            those might never end
    """
    try:
        with reading(path) as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise OSError(0, f"it has more than {LONGEST >> 20} MiB")
        lines = [
            line.partition("#")[0].strip()
            for line in without_byte_order_mark(text).decode().splitlines()
        ]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{what} names a file of hosts, but {path} cannot be read: {why}.",
            "Name a text file with one host in each line: node1 slots=4",
        ) from None
    if not any(lines):
        raise ConfigError(f"{what} names hosts, but {path} has none.", "Write one in each line.")
    return [line for line in lines if line]


def short_forms(hosts: str) -> list[str]:
    """Split a list of hosts at the commas outside of brackets."""
    return re.split(r",(?![^\[]*\])", hosts)


def expanded(name: str) -> list[str]:
    """Return the hosts of a short form of Slurm, such as node[01-03,7].

    [] if a range in it falls.
    """
    match = NUMBERS.search(name)
    if not match:
        return [name]
    numbers = []
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        numbers += [f"{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1)]
    return [
        name[: match.start()] + number + rest
        for number in numbers
        for rest in expanded(name[match.end() :])
    ]


def _slurm(environ: Mapping[str, str]) -> tuple[int, int]:
    if (parts := _count(environ, "SLURM_HET_SIZE", 1)) > 1:
        # The variables of hosts and tasks are those of the first component alone.
        raise ConfigError(
            f"launch starts ranks on one component of a Slurm job, but this job has {parts} (#SBATCH hetjob).",
            "Submit a job of one component: --nodes and --ntasks-per-node. Or start the ranks of all by "
            f"`srun --mpi=pmix --het-group=0-{parts - 1} mpitrain train`; MPICH: --mpi=pmi2.",
        )
    hosts = _count(environ, "SLURM_JOB_NUM_NODES", 1)
    return _count(environ, "SLURM_NTASKS", hosts), hosts


def _slurm_slots(environ: Mapping[str, str]) -> dict[str, int]:
    short = environ.get("SLURM_JOB_NODELIST", "")
    nodes = [name for form in short_forms(short) for name in expanded(form) if name]
    if not nodes:
        raise ConfigError(
            f"SLURM_JOB_NODELIST names the nodes of a Slurm job, but it is {short!r}.",
            "Name the nodes: --hosts a:4,b:4",
        )
    tasks = _on_nodes(environ, "SLURM_TASKS_PER_NODE")
    return dict(zip(nodes, tasks if len(tasks) == len(nodes) else [0] * len(nodes), strict=True))


def _pbs(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return (ranks, hosts) by the node file of PBS, which has a line for each rank."""
    hosts = _pbs_slots(environ)
    return sum(hosts.values()), len(hosts)


def _pbs_slots(environ: Mapping[str, str]) -> dict[str, int]:
    return Counter(host_lines(Path(environ["PBS_NODEFILE"]), "PBS_NODEFILE"))


def _lsf(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return (ranks, hosts) by LSF's list of hosts, each followed by its slots: a 4 b 4."""
    hosts = _lsf_slots(environ)
    return sum(hosts.values()), len(hosts)


def _lsf_slots(environ: Mapping[str, str]) -> dict[str, int]:
    words = environ["LSB_MCPU_HOSTS"].split()
    slots = words[1::2]
    if len(words) % 2 or not all(word.isascii() and word.isdigit() for word in slots):
        raise ConfigError(
            f"LSB_MCPU_HOSTS is a list such as a 4 b 4, but it is {' '.join(words)!r}.",
            "Unset LSB_MCPU_HOSTS, or start launch inside the job.",
        )
    found = Counter[str]()
    for host, number in zip(words[::2], slots, strict=True):
        found[host] += int(number)  # A host may stand there twice.
    return found


class BatchSystem(NamedTuple):
    """How a batch system describes a job by environment variables.

    name      as users call the system
    variable  environment variable that shows that the process is in a job
    counts    (environment variables) -> (ranks, hosts) of the job
    slots     (environment variables) -> as the function `slots`
    """

    name: str
    variable: str
    counts: Callable[[Mapping[str, str]], tuple[int, int]]
    slots: Callable[[Mapping[str, str]], dict[str, int]]


SYSTEMS = (
    BatchSystem("Slurm", "SLURM_JOB_ID", _slurm, _slurm_slots),
    BatchSystem("PBS", "PBS_NODEFILE", _pbs, _pbs_slots),
    BatchSystem("LSF", "LSB_MCPU_HOSTS", _lsf, _lsf_slots),
)


def _system(environ: Mapping[str, str]) -> BatchSystem | None:
    return next((system for system in SYSTEMS if environ.get(system.variable)), None)


def crowds_slurm(ranks: int, environ: Mapping[str, str]) -> bool:
    """Return whether this Slurm allocation has fewer cores than ranks."""
    cores = _on_nodes(environ, CORES)
    return bool(cores) and ranks > sum(cores)


def slurm_cores(most: int, environ: Mapping[str, str]) -> int | None:
    """Return the cores of each rank: --cpus-per-task, or an even share of the smallest node.

    0 if that node has fewer cores than ranks; None if Slurm does not list the cores.

    most  number of ranks on the node with most of them
    """
    cores = _on_nodes(environ, CORES)
    return _count(environ, "SLURM_CPUS_PER_TASK", 0) or (min(cores) // most if cores else None)


CORES = "SLURM_JOB_CPUS_PER_NODE"


def _on_nodes(environ: Mapping[str, str], name: str) -> list[int]:
    """Return a variable's number of each node; Slurm writes "4(x2),2" for 4, 4 and 2."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get(name, ""))
    return [int(count) for count, hosts in groups for _ in range(int(hosts or 1))]


HOST = re.compile(
    rf"(?P<name>\w(?:[\w.-]|{NUMBERS.pattern})*|\[[\w:.%]+\])"
    r"(?:(?::|\s+slots\s*=\s*|\s+)(?P<slots>\d{1,9}))?",
    re.ASCII,
)
MOST = re.compile(r"\s+max[_-]slots\s*=\s*(\d{1,9})", re.ASCII)
"""The largest number of ranks of a host, in a host file of Open MPI. It is used without `slots`."""
BINDINGS = {
    "Open MPI": {"none": "none", "core": "core", "socket": "package"},
    "MPICH": {"none": "none", "core": "core", "socket": "socket"},
    "srun": {"none": "none", "core": "cores", "socket": "sockets"},
}
EXPORTED = (
    *BLAS_VARIABLES,
    "LD_LIBRARY_PATH",
    "MPI4PY_LIBMPI",
    "MPI4PY_MPIABI",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "XDG_CACHE_HOME",
    "CUDA_PATH",
)
"""Variables that mpirun exports to other hosts, if they are set here."""
PREFIXES = ("UCX_", "FI_", "MPITRAIN_")
"""Further variables that are exported, by their beginnings."""


class Placement(NamedTuple):
    """The placement of ranks that the user names.

    hosts  {host: number of its ranks}; empty: the hosts of the allocation, or this host
    ppn    number of ranks of each host; 0: not given
    bind   "none", "core" or "socket"; "": not given
    """

    hosts: dict[str, int] = {}
    ppn: int = 0
    bind: str = ""

    @property
    def ranks(self) -> int:
        return sum(self.hosts.values())


def placement(hosts: str | None, hostfile: Path | None, ppn: int, bind: str) -> Placement:
    """Return the placement that the options of `launch` request. An option that is not given is None.

    raises  ConfigError if hosts are named twice, or cannot be read
    """
    if hosts is not None and hostfile:
        raise ConfigError(
            "The hosts are named once, but --hosts and --hostfile are both given.",
            "Leave one of them out.",
        )
    lines = [] if hosts is None else short_forms(hosts)
    if hostfile:
        lines = host_lines(hostfile, "--hostfile")
    placed: dict[str, int] = {}
    for line in lines:
        most = MOST.search(line)
        match = HOST.fullmatch(MOST.sub("", line).strip())
        names = expanded(match["name"]) if match else []
        ranks = int(match["slots"] or (most[1] if most else 1)) if match else 0
        if not names or ranks == 0 or (most and int(most[1]) < ranks):
            raise ConfigError(
                f"A host is NAME or NAME:RANKS, but {hostfile or '--hosts'} has {line!r}.",
                "For example: --hosts node1:4,node2:4 or node[1-2]:4; a line of a file may also be: "
                "node1 slots=4",
            )
        for name in names:
            placed[name] = placed.get(name, 0) + (ppn or ranks)
    if lines and ppn:
        placed = dict.fromkeys(placed, ppn)
    return Placement(placed, ppn, bind)


def described(ranks: int, hosts: int, most: int, cores: int | None, bind: str) -> str:
    """Describe the placement of the ranks in words.

    hosts  number of hosts
    most   number of ranks on the host with most of them
    cores  cores of each rank, on each of which it computes with one BLAS thread; None: unknown
    """
    spread = f"{most} on each" if most * hosts == ranks else f"at most {most} on each"
    bound = {"core": ", bound to cores", "socket": ", bound to sockets"}.get(bind, "")
    share = "" if cores is None else f"; {max(1, cores)} core(s) a rank"
    return f"{ranks} rank(s) on {hosts} host(s), {spread}{share}{bound}"


def open_mpi_options(placed: Placement, environ: Mapping[str, str], cores: int | None) -> list[str]:
    """Return the options of mpirun, which exports no variables to other hosts by itself.

    cores  cores of each rank, for a binding to cores; None: unknown, and one is assumed
    """
    options = ["--bind-to", BINDINGS["Open MPI"][placed.bind or "none"]]
    suffix = f":PE={cores or 1}" if placed.bind == "core" else ""
    if placed.ppn:
        options += ["--map-by", f"ppr:{placed.ppn}:node{suffix}"]
    elif placed.bind == "socket":
        options += ["--map-by", "package"]
    elif suffix:
        options += ["--map-by", f"slot{suffix}"]
    if placed.hosts:
        options += ["--host", _listed(placed.hosts)]
        for name in exported(environ):
            options += ["-x", name]
    return options


def mpich_options(placed: Placement, cores: int | None) -> list[str]:
    """Return the options of mpiexec, which exports all variables to other hosts by itself.

    cores  as in `open_mpi_options`
    """
    options = ["-hosts", _listed(placed.hosts)] if placed.hosts else []
    if placed.ppn:
        options += ["-ppn", str(placed.ppn)]
    if placed.bind:
        suffix = f":{cores or 1}" if placed.bind == "core" else ""
        options += ["-bind-to", BINDINGS["MPICH"][placed.bind] + suffix]
    return options


def srun_options(placed: Placement) -> list[str]:
    """Return the options of srun. Named hosts must belong to the allocation."""
    options = []
    if placed.hosts:
        options += [f"--nodelist={','.join(placed.hosts)}", f"--nodes={len(placed.hosts)}"]
        if len({*placed.hosts.values()}) > 1:
            raise ConfigError(
                f"srun starts equally many ranks on each host, but --hosts is {_listed(placed.hosts)}.",
                "Give each host the same number, or use --launcher mpirun.",
            )
    if ppn := placed.ppn or next(iter(placed.hosts.values()), 0):
        options.append(f"--ntasks-per-node={ppn}")
    if placed.bind:
        options.append(f"--cpu-bind={BINDINGS['srun'][placed.bind]}")
    return options


def _listed(hosts: Mapping[str, int]) -> str:
    return ",".join(f"{host}:{ranks}" for host, ranks in hosts.items())


def exported(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that ranks on other hosts need."""
    return sorted(name for name in environ if name in EXPORTED or name.startswith(PREFIXES))
