"""Facts about the machine of a benchmark, for its header and for tuning files."""

from collections.abc import Sequence
from typing import Any

from mpitrain import __version__
from mpitrain.machine.process import job_id, processor, processors
from mpitrain.transport.base import Transport
from mpitrain.transport.library import library


def machine(transport: Transport) -> dict[str, Any]:
    """Return the facts that identify a machine for timing."""
    return {
        "hosts": len(set(transport.hosts)),
        "processor": processor().name,
        "cores": processors(),
        "mpi": library().version,
    }


def header(
    transport: Transport, operation: str, device: str, arguments: Sequence[str]
) -> dict[str, Any]:
    """Return the header of a table or of its JSON file."""
    return {
        "mpitrain": __version__,
        "ranks": transport.size,
        **machine(transport),
        "host_names": sorted(set(transport.hosts)),
        "device": device,
        "op": operation,
        "arguments": list(arguments),
        "job": job_id(),
    }


def printed(facts: dict[str, Any]) -> list[str]:
    return [
        f"# mpitrain {facts['mpitrain']} bench: {' '.join(facts['arguments'])}",
        f"# {facts['ranks']} ranks on {facts['hosts']} host(s): {', '.join(facts['host_names'])}",
        f"# {facts['processor']}, {facts['cores']} cores; {facts['mpi']}; device {facts['device']}",
    ]
