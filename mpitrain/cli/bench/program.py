"""`mpitrain bench program`: a whole PyTorch program over mpitrain and over gloo, in turns."""

import sys
from typing import Any

import click

from mpitrain.cli.bench.rows import CSV, JSON, BenchReport
from mpitrain.cli.job_options import counted
from mpitrain.cli.session import mpi_session


@click.command("program")
@counted("--workers", 0, 2, "Worker processes of the DataLoader of each rank.")
@counted("--busy", 0, 2, "Busy processes on each host beside the second row.")
@counted("--blocks", 1, 5, "Turns of each side.")
@counted("--steps", 1, 10, "Training steps in a turn.")
@JSON
@CSV
def command(
    workers: int, busy: int, blocks: int, steps: int, json_file: Any, csv_file: Any
) -> None:
    """Measure a whole PyTorch program over mpitrain and over gloo, in turns.

    It trains a small GPT with DistributedDataParallel, workers of a DataLoader, autocast to bfloat16
    and two micro-batches a step. The first row is measured as the host is, the second one beside
    busy processes.

    \b
    ratio  how many times as fast the program is over mpitrain
    """
    with mpi_session(thread_level="multiple") as transport:
        from mpitrain.errors import ConfigError
        from mpitrain.tools.bench.results import header, printed
        from mpitrain.transport.agreement import on_all_ranks

        def imported() -> Any:
            try:
                from mpitrain.tools.bench.training import torch_program
            except ImportError as error:
                raise ConfigError(
                    f"bench program needs PyTorch ({error}).", "pip install torch"
                ) from None
            return torch_program

        program = on_all_ranks(transport, imported)
        facts = header(transport, "program", "cpu", sys.argv[1:])
        shown = BenchReport(transport, facts, {"json_file": json_file, "csv_file": csv_file})
        shown.begin([*printed(facts), "", *program.TABLE.heading()], 1 + (busy > 0))
        rows = program.measure(transport, workers, busy, blocks, steps)
        for _ in shown.each(rows, program.TABLE.line):
            pass
        shown.end()
