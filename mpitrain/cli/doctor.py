"""`mpitrain doctor`: prints the software and hardware of this machine, and warns of problems."""

import json
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import Outputs, check_files, output_option, path_option
from mpitrain.cli.session import mpi_session
from mpitrain.errors import ConfigError, visible
from mpitrain.machine import process

FOLDER = path_option(
    "--dir",
    "A directory on the file system of the runs, for locks and files.  [default: this one]",
    "folder",
    default=Path(),
)


@click.command()
@FOLDER
@output_option("--json", "Write facts, probes and problems to this JSON file.")
def command(folder: Path, json_file: Path | None) -> None:
    """Print Python, MPI, GPUs, BLAS, ranks and hosts, and warn of problems and their remedies.

    Start it as you will start training, for example: mpitrain launch -n 4 -- doctor

    Probes try the start, shared windows, messages between hosts, clocks, locks and mapped files. A
    probe that can crash or hang runs in a child process. The exit code is 1 if ranks loaded
    different MPI libraries.
    """
    with mpi_session(allow_alone=True) as transport:
        is_refused = _examine(transport, folder, json_file)
    sys.exit(1 if is_refused else 0)


def _examine(transport: Any, folder: Path, json_file: Path | None) -> bool:
    """Print the report; return whether the ranks loaded different MPI libraries."""
    from mpitrain.tools.doctor.facts import facts, look, of_all, verdict
    from mpitrain.tools.doctor.probes import examine
    from mpitrain.transport.agreement import on_all_ranks
    from mpitrain.transport.device import cuda_messages

    on_all_ranks(transport, lambda: check_folder(folder))
    on_all_ranks(transport, lambda: check_files(transport.rank, [json_file]))
    everyone = of_all(transport, look)
    aware = cuda_messages(transport, "auto")
    observed = examine(transport, folder)
    is_refused = any(seen.problems for seen in observed if seen.name == "MPI loaded")
    started, outputs = process.launched(), Outputs()
    if transport.rank == 0 and started.rank == 0:
        problems = [problem.text for seen in observed for problem in seen.problems]
        entries = [*facts(everyone, aware), *((seen.name, seen.line) for seen in observed)]
        for name, value in entries:
            click.echo(f"{name:<12} {visible(value)}")
        conclusion = list(verdict(everyone, started, problems, is_refused))
        for line in conclusion:
            click.echo(visible(line))
        if json_file:
            document = {
                "facts": [list(fact) for fact in entries],
                "ranks": [rank._asdict() for rank in everyone],
                "probes": {
                    seen.name: {
                        "question": seen.question,
                        "values": seen.values,
                        "problems": [problem._asdict() for problem in seen.problems],
                    }
                    for seen in observed
                },
                "verdict": conclusion,
            }
            write_document(outputs, json_file, document)
    on_all_ranks(transport, outputs.settle)
    return is_refused


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"--dir is a directory on the file system of the runs, but {folder} is no directory.",
            "Name one that every host can see.",
        )


def write_document(outputs: Outputs, path: Path, document: dict[str, Any]) -> None:
    from mpitrain.files import write_whole

    with outputs.to(path):
        write_whole(path, json.dumps(document, indent=1) + "\n")


def versions() -> list[str]:
    """Return a line for Python, each library that a report of a fault should name, and MPI."""
    from importlib.metadata import PackageNotFoundError, version

    from mpitrain.cli.launch.command import library
    from mpitrain.errors import ConfigError

    lines = [f"Python {platform.python_version()}"]
    for name, packages in LIBRARIES.items():
        installed = []
        for package in packages:
            with suppress(PackageNotFoundError):
                installed.append(version(package))
        lines.append(f"{name} {installed[0] if installed else 'none'}")
    try:
        lines.append(f"MPI {library().version}")
    except ConfigError as error:
        lines.append(f"MPI none: {error.law}")
    return lines


LIBRARIES = {
    "NumPy": ["numpy"],
    "mpi4py": ["mpi4py"],
    "CuPy": ["cupy-cuda13x", "cupy-cuda12x", "cupy"],
    "PyTorch": ["torch"],
}
"""{name: the packages that have it}."""
