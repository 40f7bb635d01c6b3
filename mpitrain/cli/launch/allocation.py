"""The allocation of a batch system around `launch`: its ranks, hosts and cores."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import ConfigError


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
    """Return the allocation that these environment variables describe; None outside a job."""
    for system, (variable, read) in SYSTEMS.items():
        if environ.get(variable):
            return Allocation(system, *read(environ))
    return None


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


def _slurm(environ: Mapping[str, str]) -> tuple[int, int]:
    hosts = int(environ.get("SLURM_JOB_NUM_NODES", 1))
    return int(environ.get("SLURM_NTASKS") or hosts), hosts


def _pbs(environ: Mapping[str, str]) -> tuple[int, int]:
    """Count the lines of the node file; it has one for each rank."""
    path = Path(environ["PBS_NODEFILE"])
    try:
        hosts = path.read_text().split()
    except OSError as error:
        raise ConfigError(
            f"PBS_NODEFILE names the hosts of this job, but {path} cannot be read: {error.strerror}.",
            "Start launch inside the job, or unset PBS_NODEFILE.",
        ) from None
    return len(hosts), len({*hosts})


def _lsf(environ: Mapping[str, str]) -> tuple[int, int]:
    """Add up the slots in a list of hosts, each followed by its slots: a 4 b 4."""
    words = environ["LSB_MCPU_HOSTS"].split()
    return sum(map(int, words[1::2])), len(words) // 2


def _grid_engine(environ: Mapping[str, str]) -> tuple[int, int]:
    return int(environ.get("NSLOTS", 1)), int(environ.get("NHOSTS", 1))


SYSTEMS: dict[str, tuple[str, Callable[[Mapping[str, str]], tuple[int, int]]]] = {
    "Slurm": ("SLURM_JOB_ID", _slurm),
    "PBS": ("PBS_NODEFILE", _pbs),
    "LSF": ("LSB_MCPU_HOSTS", _lsf),
    "Grid Engine": ("PE_HOSTFILE", _grid_engine),
}
"""{batch system: (the variable that shows it, function that returns ranks and hosts)}."""


def crowds_slurm(ranks: int, environ: Mapping[str, str]) -> bool:
    """Return whether this Slurm allocation has fewer cores than ranks."""
    cores = _cores_of_nodes(environ)
    return bool(cores) and ranks > sum(cores)


def slurm_cores(ranks: int, environ: Mapping[str, str]) -> int:
    """Return the cores of each rank: --cpus-per-task, or an even split of the smallest node.

    0 if Slurm does not list the cores, or has fewer than ranks.
    """
    if given := environ.get("SLURM_CPUS_PER_TASK"):
        return int(given)
    cores = _cores_of_nodes(environ)
    return min(cores) // -(-ranks // len(cores)) if cores else 0


def _cores_of_nodes(environ: Mapping[str, str]) -> list[int]:
    """Return the cores of each node, which Slurm lists for example as "4(x2),2" for 4, 4 and 2."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return [int(count) for count, hosts in found for _ in range(int(hosts or 1))]
