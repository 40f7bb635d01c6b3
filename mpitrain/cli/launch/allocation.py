"""The allocation of a batch system around `launch`: its ranks, hosts and cores."""

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import ConfigError

SECONDS = 20.0
"""Time in which scontrol must answer."""


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


def ranks_of(found: Allocation | None, ppn: int = 0) -> int:
    """Return the number of ranks of the allocation; ConfigError outside one.

    ppn  ranks of each of its hosts; 0: as the batch system counts them
    """
    if not found or not found.ranks:
        raise ConfigError(
            "launch needs a number of ranks outside a batch job, but none is given.",
            "Give it as -n RANKS, or as --hosts a:4,b:4.",
        )
    return ppn * found.hosts or found.ranks


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in a variable of the batch system."""
    text = environ.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{name} is a number in a batch job, but it is {text!r}.",
            f"Unset {name}, or start launch inside the job.",
        )
    return int(text)


def _lines(environ: Mapping[str, str], name: str) -> list[str]:
    """Return the lines of the file that a variable of the batch system names."""
    path = Path(environ[name])
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{name} names the hosts of this job, but {path} cannot be read: {why}.",
            f"Start launch inside the job, or unset {name}.",
        ) from None


def _slurm(environ: Mapping[str, str]) -> tuple[int, int]:
    hosts = _count(environ, "SLURM_JOB_NUM_NODES", 1)
    return _count(environ, "SLURM_NTASKS", hosts), hosts


def _slurm_nodes(environ: Mapping[str, str]) -> list[str]:
    """Ask scontrol for the names, which the variable has in a short form such as node[1-4]."""
    short = environ.get("SLURM_JOB_NODELIST", "")
    line = ["scontrol", "show", "hostnames", short]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)
        found, why = done.stdout.split(), done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found, why = [], str(error)
    if not found:
        raise ConfigError(
            f"scontrol lists the nodes of a Slurm job, but not those of {short!r}: {why}.",
            "Name the nodes: --hosts a:4,b:4",
        )
    return found


def _pbs(environ: Mapping[str, str]) -> tuple[int, int]:
    """Count the lines of the node file; it has one for each rank."""
    hosts = _pbs_nodes(environ)
    return len(hosts), len({*hosts})


def _pbs_nodes(environ: Mapping[str, str]) -> list[str]:
    return [line.strip() for line in _lines(environ, "PBS_NODEFILE") if line.strip()]


def _lsf(environ: Mapping[str, str]) -> tuple[int, int]:
    """Add up the slots in a list of hosts, each followed by its slots: a 4 b 4."""
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
    return [line.split()[0] for line in _lines(environ, "PE_HOSTFILE") if line.strip()]


class System(NamedTuple):
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
    System("Slurm", "SLURM_JOB_ID", _slurm, _slurm_nodes),
    System("PBS", "PBS_NODEFILE", _pbs, _pbs_nodes),
    System("LSF", "LSB_MCPU_HOSTS", _lsf, _lsf_nodes),
    System("Grid Engine", "PE_HOSTFILE", _grid_engine, _grid_engine_nodes),
)


def _system(environ: Mapping[str, str]) -> System | None:
    """Return the batch system of these environment variables; None outside a job."""
    return next((system for system in SYSTEMS if environ.get(system.variable)), None)


def crowds_slurm(ranks: int, environ: Mapping[str, str]) -> bool:
    """Return whether this Slurm allocation has fewer cores than ranks."""
    cores = _cores_of_nodes(environ)
    return bool(cores) and ranks > sum(cores)


def slurm_cores(ranks: int, environ: Mapping[str, str]) -> int:
    """Return the cores of each rank: --cpus-per-task, or an even split of the smallest node.

    0 if Slurm does not list the cores, or has fewer than ranks.
    """
    if given := _count(environ, "SLURM_CPUS_PER_TASK", 0):
        return given
    cores = _cores_of_nodes(environ)
    return min(cores) // -(-ranks // len(cores)) if cores else 0


def _cores_of_nodes(environ: Mapping[str, str]) -> list[int]:
    """Return the cores of each node, which Slurm lists for example as "4(x2),2" for 4, 4 and 2."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return [int(count) for count, hosts in found for _ in range(int(hosts or 1))]
