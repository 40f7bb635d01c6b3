"""The placement of ranks: their hosts, their number on each, and the cores to which they are bound."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.cli.launch.allocation import NUMBERS, expanded, host_lines, short_forms
from mpitrain.errors import ConfigError
from mpitrain.machine.process import BLAS_VARIABLES

HOST = re.compile(
    rf"(?P<name>\w(?:[\w.-]|{NUMBERS.pattern})*|\[[\w:.%]+\])"
    r"(?:(?::|\s+slots\s*=\s*|\s+)(?P<slots>\d{1,9}))?",
    re.ASCII,
)
MOST = re.compile(r"\s+max[_-]slots\s*=\s*(\d{1,9})", re.ASCII)
"""Open MPI's largest number of ranks of a host. It counts where there is no other."""
BINDINGS = {
    "Open MPI": {"none": "none", "core": "core", "socket": "package"},
    "MPICH": {"none": "none", "core": "core", "socket": "socket"},
    "srun": {"none": "none", "core": "cores", "socket": "sockets"},
}
EXPORTED = (
    *BLAS_VARIABLES,
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "XDG_CACHE_HOME",
    "CUDA_PATH",
)
"""Variables that mpirun exports to other hosts, if they are set here."""
PREFIXES = ("UCX_", "FI_", "MPITRAIN_")
"""Further ones, by their beginnings."""


class Placement(NamedTuple):
    """The placement of ranks that the user names.

    hosts  {host: its ranks}; empty: those of the allocation, or this host
    ppn    ranks of each host; 0: not given
    bind   "none", "core" or "socket"; "": as before
    """

    hosts: dict[str, int] = {}
    ppn: int = 0
    bind: str = ""

    @property
    def ranks(self) -> int:
        return sum(self.hosts.values())


def placement(hosts: str | None, hostfile: Path | None, ppn: int, bind: str) -> Placement:
    """Return the placement that the options of `launch` request. A missing option is None.

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
    """Return the placement of the ranks in words.

    hosts  number of hosts
    most   number of ranks on the fullest host
    cores  cores of each rank, on each of which it computes with one BLAS thread; None: unknown
    """
    spread = f"{most} on each" if most * hosts == ranks else f"at most {most} on each"
    bound = {"core": ", bound to cores", "socket": ", bound to sockets"}.get(bind, "")
    share = "" if cores is None else f"; {max(1, cores)} core(s) a rank"
    return f"{ranks} rank(s) on {hosts} host(s), {spread}{share}{bound}"


def open_mpi_options(placed: Placement, environ: Mapping[str, str], cores: int | None) -> list[str]:
    """Return the options of mpirun; it exports no variables to other hosts by itself.

    cores  cores of each rank, for a binding to cores; None: unknown, so one
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
    """Return the options of mpiexec; it exports all variables to other hosts by itself.

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
    """Return the options of srun; named hosts must belong to the allocation."""
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
