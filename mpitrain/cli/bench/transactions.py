"""`mpitrain bench transactions`: count the memory transactions of kernels, in the simulator."""

from pathlib import Path

import click

from mpitrain.cli.bench.one_device import exit_after, printed_rows
from mpitrain.cli.bench.options import CSV, JSON

DTYPES = ("float32", "float16", "bfloat16")


@click.command("transactions")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    default=("float32", "bfloat16"),
    show_default=True,
    help="Type of elements; may be repeated.",
)
@JSON
@CSV
def transactions(dtypes: tuple[str, ...], json_file: Path | None, csv_file: Path | None) -> None:
    """Count the memory transactions of every kernel of a training step. Needs g++ or zig, no GPU.

    \b
    bytes     that threads read and write in global memory
    sectors   bytes of the 32-byte sectors that this takes
    requests  loads and stores of warps in shared memory
    passes    over the 32 banks; each bank conflict adds some
    extra     passes because of bank conflicts, and their lines of code
    """

    def run() -> int:
        import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy

        from mpitrain.tools.bench.kernels.transactions import count

        click.echo("# simulator")
        click.echo(
            f"{'dtype':<9} {'operation':<28} {'kernel':<30} {'bytes':>9} {'sectors':>9} {'requests':>9} "
            f"{'passes':>8} {'extra':>7}"
        )
        printed_rows(
            count(dtypes),
            (json_file, csv_file),
            {"device": "simulator"},
            lambda row: (
                f"{row.dtype:<9} {row.operation:<28} {row.kernel:<30} {row.nbytes:9} {row.sectors:9} "
                f"{row.requests:9} {row.passes:8} {row.passes - row.least:7} {row.conflicts}"
            ).rstrip(),
        )
        return 0

    exit_after(run)
