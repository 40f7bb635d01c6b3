"""The commands that measure one device without MPI: options, printing, exit code."""

import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpitrain.cli.bench.options import CSV, JSON, Against, against_options, write_rows
from mpitrain.cli.job_options import Outputs, check_files
from mpitrain.machine import process
from mpitrain.machine.process import KINDS

if TYPE_CHECKING:
    # This module must not import NumPy before the BLAS threads are limited.
    from mpitrain.ops.device import Device


def on_a_device(command: Callable) -> Callable:
    """Add the options of `bench kernels` and `bench gemm` to a command."""
    for option in (
        against_options,
        CSV,
        JSON,
        click.option(
            "--tiles",
            type=click.Path(),
            default="",
            help="Table of tiles, as written by bench gemm --tune.",
        ),
        click.option(
            "--gemm",
            type=click.Choice(["tiled", "library"]),
            default="tiled",
            show_default=True,
            help="Matrix products: tiled (our kernels) or library (cuBLAS, then kernels for the epilogue).",
        ),
        click.option(
            "--checked",
            is_flag=True,
            help="On cuda-sim: check for races, wrong addresses and uninitialised reads.",
        ),
        click.option(
            "--device",
            "kind",
            type=click.Choice(KINDS),
            default="cpu",
            show_default=True,
            help="Kind of device.",
        ),
    ):
        command = option(command)
    return command


def device_of(kind: str, gemm: str, tiles: str, checked: bool) -> "tuple[Device, str]":
    """Return the device and its name for a header; ConfigError if it is missing or unsuitable."""
    from mpitrain.errors import ConfigError
    from mpitrain.machine.process import processor
    from mpitrain.ops.device import device_for

    if kind == "cpu" and (gemm != "tiled" or tiles):
        raise ConfigError(
            "--gemm and --tiles are about products on a GPU, but --device is cpu.",
            "Leave them out.",
        )
    device = device_for(kind, gemm, tiles, checked)
    return device, device.kernels.engine.name if device.kernels else processor().name


def printed_rows(
    rows: Iterable[Any],
    files: tuple[Path | None, Path | None],
    facts: dict[str, Any],
    line: Callable[[Any], str],
    against: tuple[Path | None, float] = (None, 1.0),
) -> tuple[list[Any], int]:
    """Print and write rows as they come; return them and the number of slow values.

    files    JSON and CSV
    facts    about the device, for the JSON file
    against  an earlier JSON file, and how many times slower a value may be
    """
    from mpitrain import __version__

    check_files(0, files)
    facts = {
        "mpitrain": __version__,
        "host_names": [platform.node()],
        **facts,
        "arguments": sys.argv[1:],
        "job": process.job_id(),
    }
    earlier = Against(*against, facts)
    seen, outputs = list[Any](), Outputs()
    for row in rows:
        seen.append(row)
        click.echo(line(row))
        write_rows(outputs, *files, facts, seen)
    outputs.settle()
    if lines := earlier.lines(seen):
        click.echo("\n".join(lines))
    return seen, earlier.failures(seen)


def exit_after(run: Callable[[], int]) -> None:
    """Run a benchmark without MPI and exit: with the error's code, or 1 unless `run` returns 0."""
    process.limit_blas_threads()
    from mpitrain.errors import MpitrainError

    try:
        wrong = run()
    except MpitrainError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except MemoryError as error:
        click.echo(f"out of memory: {error}. Name smaller shapes.", err=True)
        sys.exit(MpitrainError.exit_code)
    except BrokenPipeError:
        sys.exit(MpitrainError.exit_code)
    sys.exit(1 if wrong else 0)
