"""Probes of the start: MPI library, launcher, threads, GPU binding and imports."""

from pathlib import Path
from typing import Any

from mpitrain.machine import process
from mpitrain.tools.doctor.child import FAILED, in_child
from mpitrain.tools.doctor.problem import Problem, Values
from mpitrain.transport.base import Transport
from mpitrain.transport.library import library

SLOW_IMPORTS = 10.0
"""Seconds of imports from which a shared file system is probably the reason."""


def look_library(transport: Transport, folder: Path) -> list[str]:
    mpi = library()
    return [mpi.version, mpi.path]


def line_library(seen: Values) -> str:
    libraries = dict.fromkeys(tuple(value) for value in seen.values)
    return "; ".join(f"{version}, {path or 'path unknown'}" for version, path in libraries)


def mixed_libraries(seen: Values) -> list[Problem]:
    """Return a problem for each host whose ranks loaded another version than rank 0."""
    first = seen.values[0][0]
    return [
        Problem(
            host, f"all ranks need one MPI library, but rank 0 loaded {first} and {host} {other}"
        )
        for host, (other, _) in dict(zip(seen.hosts, seen.values, strict=True)).items()
        if other != first
    ]


def look_interface(transport: Transport, folder: Path) -> dict[str, Any]:
    names = process.environment()
    interfaces = [
        kind
        for kind, prefix in (("PMIx", "PMIX_"), ("PMI-2", "PMI2_"), ("PMI", "PMI_"))
        if any(name.startswith(prefix) for name in names)
    ]
    return {
        "launcher": process.launched().launcher,
        "interfaces": interfaces,
        "mpi": library().version.split()[0:2],
    }


def line_interface(seen: Values) -> str:
    first = seen.values[0]
    return f"{first['launcher']}, {' and '.join(first['interfaces']) or 'no PMI or PMIx'}"


def missing_interface(seen: Values) -> list[Problem]:
    """Return a problem for each host where srun starts a rank without the interface of its MPI."""
    problems = []
    for host, value in seen.by_host().items():
        needs = ["PMIx"] if value["mpi"][0] == "Open" else ["PMI-2", "PMI", "PMIx"]
        if value["launcher"] == "Slurm" and not set(needs) & set(value["interfaces"]):
            offered = " and ".join(value["interfaces"]) or "neither PMI nor PMIx"
            problems.append(
                Problem(
                    host,
                    f"{' '.join(value['mpi'])} needs {' or '.join(needs)}, but srun gives {host} {offered}",
                )
            )
    return problems


def look_threads(transport: Transport, folder: Path) -> str:
    return library().thread_level


def line_threads(seen: Values) -> str:
    return ", ".join(dict.fromkeys(seen.values))


def few_threads(seen: Values) -> list[Problem]:
    """Return a problem for each host whose MPI lets only the main thread send."""
    return [
        Problem(host, f"a progress thread needs level serialized, but {host} has {level}")
        for host, level in seen.by_host().items()
        if level in ("single", "funneled")
    ]


def look_gpus(transport: Transport, folder: Path) -> list[Any]:
    return [process.gpus(), process.environment().get("CUDA_VISIBLE_DEVICES", "")]


def line_gpus(seen: Values) -> str:
    counts = sorted({count for count, _ in seen.values})
    return f"{' or '.join(map(str, counts))} GPU(s) visible to a rank"


def hidden_gpus(seen: Values) -> list[Problem]:
    """Return a problem for each host whose ranks see different sets of GPUs."""
    problems = []
    for host in dict.fromkeys(seen.hosts):
        sets = {
            variable
            for name, (count, variable) in zip(seen.hosts, seen.values, strict=True)
            if name == host and count and variable
        }
        if len(sets) > 1:
            problems.append(
                Problem(
                    host,
                    f"ranks of {host} cannot read each other's GPUs: CUDA_VISIBLE_DEVICES is {' and '.join(sorted(sets))}",
                )
            )
    return problems


def look_imports(transport: Transport, folder: Path) -> dict[str, str] | None:
    """Import in a child of the first rank of each host."""
    if transport.hosts.index(transport.hosts[transport.rank]) != transport.rank:
        return None
    return in_child("imports", "", 120.0)


def line_imports(seen: Values) -> str:
    trials = seen.by_host().values()
    if any(FAILED in value for value in trials):
        return "failed"
    slowest = max(trials, key=lambda value: float(value["seconds"]))
    return f"{float(slowest['seconds']):.2f} s, {slowest['files']} files opened by each rank"


def slow_imports(seen: Values) -> list[Problem]:
    problems = []
    for host, value in seen.by_host().items():
        if FAILED in value:
            problems.append(Problem(host, f"the imports of a run fail on {host}: {value[FAILED]}"))
        elif float(value["seconds"]) > SLOW_IMPORTS:
            problems.append(
                Problem(host, f"imports take {float(value['seconds']):.0f} s on {host}")
            )
    return problems
