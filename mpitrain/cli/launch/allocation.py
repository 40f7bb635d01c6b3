"""The allocation of a batch system around `launch`: its ranks, hosts and cores."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.files import reading

LONGEST = 1 << 20
"""Bytes that a file of hosts may have."""
NUMBERS = re.compile(r"\[(\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*)\]", re.ASCII)
"""The numbers in Slurm's short form of hosts, such as node[01-03,7]."""


class Allocation(NamedTuple):
    """The resources that a batch system granted to this job.

    system  name of the batch system
    ranks   number of tasks or slots
    hosts   number of hosts
    """

    system: str
    ranks: int
    hosts: int


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that these environment variables describe; None outside a job.

    raises  ConfigError if one of them has no number where the batch system writes one
    """
    if system := _system(environ):
        return Allocation(system.name, *system.counts(environ))
    return None


def nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the allocation's hosts, each once; [] outside a job.

    raises  ConfigError if the batch system does not list them
    """
    system = _system(environ)
    return list(dict.fromkeys(system.nodes(environ))) if system else []


def ranks_of(granted: Allocation | None, ppn: int = 0) -> int:
    """Return the number of ranks of the allocation; ConfigError outside one.

    ppn  ranks of each of its hosts; 0: as the batch system counts them
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
    """Return the lines of a file of hosts that are not empty, without comments.

    what    the option or variable that names the file
    raises  ConfigError for a file without hosts, and for a pipe, a device or a long file: reading
            those might never end
    """
    try:
        with reading(path) as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise OSError(0, f"it has more than {LONGEST >> 20} MiB")
        lines = [line.partition("#")[0].strip() for line in text.decode().splitlines()]
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
    """Return the hosts of Slurm's short form, such as node[01-03,7]; [] for a range that falls."""
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
    hosts = _count(environ, "SLURM_JOB_NUM_NODES", 1)
    return _count(environ, "SLURM_NTASKS", hosts), hosts


def _slurm_nodes(environ: Mapping[str, str]) -> list[str]:
    short = environ.get("SLURM_JOB_NODELIST", "")
    nodes = [name for form in short_forms(short) for name in expanded(form) if name]
    if not nodes:
        raise ConfigError(
            f"SLURM_JOB_NODELIST names the nodes of a Slurm job, but it is {short!r}.",
            "Name the nodes: --hosts a:4,b:4",
        )
    return nodes


def _pbs(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return (ranks, hosts): the node file has a line for each rank."""
    hosts = _pbs_nodes(environ)
    return len(hosts), len({*hosts})


def _pbs_nodes(environ: Mapping[str, str]) -> list[str]:
    return host_lines(Path(environ["PBS_NODEFILE"]), "PBS_NODEFILE")


def _lsf(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return (ranks, hosts) from a list of hosts, each followed by its slots: a 4 b 4."""
    words = environ["LSB_MCPU_HOSTS"].split()
    slots = words[1::2]
    if len(words) % 2 or not all(word.isascii() and word.isdigit() for word in slots):
        raise ConfigError(
            f"LSB_MCPU_HOSTS is a list such as a 4 b 4, but it is {' '.join(words)!r}.",
            "Unset LSB_MCPU_HOSTS, or start launch inside the job.",
        )
    return sum(map(int, slots)), len(slots)


def _lsf_nodes(environ: Mapping[str, str]) -> list[str]:
    return environ["LSB_MCPU_HOSTS"].split()[::2]


def _grid_engine(environ: Mapping[str, str]) -> tuple[int, int]:
    return _count(environ, "NSLOTS", 1), _count(environ, "NHOSTS", 1)


def _grid_engine_nodes(environ: Mapping[str, str]) -> list[str]:
    return [line.split()[0] for line in host_lines(Path(environ["PE_HOSTFILE"]), "PE_HOSTFILE")]


class BatchSystem(NamedTuple):
    """A batch system.

    name      as users call it
    variable  environment variable that shows it
    counts    returns the ranks and the hosts of the job
    nodes     returns the names of the hosts, in which a name may repeat
    """

    name: str
    variable: str
    counts: Callable[[Mapping[str, str]], tuple[int, int]]
    nodes: Callable[[Mapping[str, str]], list[str]]


SYSTEMS = (
    BatchSystem("Slurm", "SLURM_JOB_ID", _slurm, _slurm_nodes),
    BatchSystem("PBS", "PBS_NODEFILE", _pbs, _pbs_nodes),
    BatchSystem("LSF", "LSB_MCPU_HOSTS", _lsf, _lsf_nodes),
    BatchSystem("Grid Engine", "PE_HOSTFILE", _grid_engine, _grid_engine_nodes),
)


def _system(environ: Mapping[str, str]) -> BatchSystem | None:
    return next((system for system in SYSTEMS if environ.get(system.variable)), None)


def crowds_slurm(ranks: int, environ: Mapping[str, str]) -> bool:
    """Return whether this Slurm allocation has fewer cores than ranks."""
    cores = _cores_of_nodes(environ)
    return bool(cores) and ranks > sum(cores)


def slurm_cores(most: int, environ: Mapping[str, str]) -> int | None:
    """Return the cores of each rank: --cpus-per-task, or an even split of the smallest node.

    0 if that node has fewer than `most`, the ranks of the fullest node; None if Slurm does not
    list the cores.
    """
    cores = _cores_of_nodes(environ)
    return _count(environ, "SLURM_CPUS_PER_TASK", 0) or (min(cores) // most if cores else None)


def _cores_of_nodes(environ: Mapping[str, str]) -> list[int]:
    """Return the cores of each node, which Slurm lists for example as "4(x2),2" for 4, 4 and 2."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return [int(count) for count, hosts in groups for _ in range(int(hosts or 1))]
