"""Probes of the run's file system: locks within a host and between hosts, and mapped files."""

import fcntl
import os
import tempfile
from pathlib import Path

from mpitrain.tools.doctor.child import FAILED, in_child
from mpitrain.tools.doctor.problem import Problem, Values
from mpitrain.tools.doctor.trials import WORKS
from mpitrain.transport.base import Transport


def look_locks(transport: Transport, folder: Path) -> dict[str, str]:
    """Try locks on the first rank of each host, then try to take a lock that rank 0 holds."""
    hosts, rank = transport.hosts, transport.rank
    is_first = hosts.index(hosts[rank]) == rank
    results = in_child("locks", str(folder)) if is_first else {}
    path, descriptor = "", -1
    if rank == 0 and results.get("flock") == WORKS:
        try:
            descriptor, path = tempfile.mkstemp(prefix=".mpitrain-doctor-", dir=folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            results["flock"] = error.strerror or str(error)
    path = transport.gather_text(path)[0]
    if path and is_first and hosts[rank] != hosts[0]:
        results |= in_child("locked", path)
    transport.gather_text(None)
    if descriptor >= 0:
        os.close(descriptor)
        os.unlink(path)
    return results


def line_locks(seen: Values) -> str:
    return _line(seen)


def missing_locks(seen: Values) -> list[Problem]:
    return _problems(seen, "locks")


def look_maps(transport: Transport, folder: Path) -> dict[str, str]:
    """Try a mapped file on the first rank of each host."""
    is_first = transport.hosts.index(transport.hosts[transport.rank]) == transport.rank
    return in_child("mapped", str(folder)) if is_first else {}


def line_maps(seen: Values) -> str:
    return _line(seen)


def broken_maps(seen: Values) -> list[Problem]:
    return _problems(seen, "mapped files")


def _line(seen: Values) -> str:
    results = [result for value in seen.by_host().values() for result in value.items()]
    wrong = [f"{name}: {text}" for name, text in results if text != WORKS]
    return "; ".join(dict.fromkeys(wrong)) or ", ".join(
        dict.fromkeys(f"{name} works" for name, _ in results)
    )


def _problems(seen: Values, name: str) -> list[Problem]:
    problems = []
    for host, value in seen.by_host().items():
        wrong = [
            text if kind == FAILED else f"{kind}: {text}"
            for kind, text in value.items()
            if text != WORKS
        ]
        if wrong:
            problems.append(Problem(host, f"{name} must work on {host}, but {'; '.join(wrong)}"))
    return problems
