"""Files of benchmarks: facts about the machine, and rows as JSON and CSV."""

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain import __version__
from mpitrain.files import write_whole
from mpitrain.machine.process import job_id, processor, processors, sockets
from mpitrain.transport.base import Transport
from mpitrain.transport.library import library


def machine(transport: Transport) -> dict[str, Any]:
    return {
        "hosts": len(set(transport.hosts)),
        "processor": processor().name,
        "cores": processors(),
        **({"sockets": sockets()} if sockets() > 1 else {}),
        "mpi": library().version,
    }


def header(
    transport: Transport, operation: str, device: str, arguments: Sequence[str]
) -> dict[str, Any]:
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


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Write named tuples of one class, below the names of its fields.

    Values that are not finite become empty cells.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(rows[0]._fields if rows else ())
    for row in rows:
        table.writerow("" if _is_odd(value) else value for value in row)
    write_whole(path, text.getvalue())


def write_json(path: Path, facts: dict[str, Any], rows: Sequence[Any]) -> None:
    """Write a header of facts and one object per named tuple; values that are not finite become null.

    The file is replaced as a whole, so that a reader never sees half a row.
    """
    listed = [
        json.dumps(
            {key: None if _is_odd(value) else value for key, value in row._asdict().items()},
            allow_nan=False,
        )
        for row in rows
    ]
    write_whole(
        path, f'{{"header": {json.dumps(facts)},\n"rows": [\n' + ",\n".join(listed) + "\n]}\n"
    )


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
