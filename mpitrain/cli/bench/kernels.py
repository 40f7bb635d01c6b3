"""`mpitrain bench kernels` and `bench launch`: measure the operations of one device."""

from pathlib import Path

import click

from mpitrain.cli.bench.one_device import device_of, exit_after, on_a_device, printed_rows
from mpitrain.cli.bench.options import CSV, JSON


@click.command("kernels")
@on_a_device
@click.option(
    "--peer",
    type=click.Choice(["torch"]),
    help="Measure attention in turns with PyTorch's fused attention.",
)
def kernels(
    kind: str,
    checked: bool,
    gemm: str,
    tiles: str,
    json_file: Path | None,
    csv_file: Path | None,
    against_file: Path | None,
    tolerance: float,
    peer: str | None,
) -> None:
    """Measure every operation of a training step on this device.

    \b
    percent  rate, relative to a copy (GB/s) or to the first product (GFLOP/s)
    peer us  time of the alternative, measured in turns: PyTorch's attention, or
             two operations of ours in place of a fused one
    #wrong   elements that differ from the reference

    The exit code is 1 if any element is wrong.
    """

    def run() -> int:
        from mpitrain.tools.bench.kernels.operations import measure
        from mpitrain.tools.bench.training.peers import imported

        theirs = imported(peer).TorchAttention if peer else None
        device, name = device_of(kind, gemm, tiles, checked)
        click.echo(f"# {name}")
        click.echo(
            f"{'operation':<26} {'time us':>10} {'rate':>10} {'':<8} {'percent':>8} {'peer us':>10} {'#wrong':>7}"
        )
        rows, slow = printed_rows(
            measure(device, theirs),
            (json_file, csv_file),
            {"device": name},
            lambda row: (
                f"{row.name:<26} {row.time_us:10.1f} {row.rate:10.2f} {row.unit:<8} {row.percent:8.1f} "
                f"{row.peer_us:10.1f} {row.wrong:7}".replace(f"{float('nan'):10.1f}", f"{'-':>10}")
            ),
            (against_file, tolerance),
        )
        return sum(row.wrong for row in rows) + slow

    exit_after(run)


@click.command("launch")
@JSON
@CSV
def launch(json_file: Path | None, csv_file: Path | None) -> None:
    """Measure the host overhead of kernel launches, on an engine that does nothing.

    \b
    looked at us    time with a check of each argument: a first launch, or any in the simulator
    found again us  time of later launches with such arguments, which come from a cache
    calls           Python function calls of one operation with cached launches

    Leasing of buffers is not included.
    """

    def run() -> int:
        from mpitrain.tools.bench.kernels.launch_overhead import measure

        click.echo(
            f"{'operation':<28} {'looked at us':>13} {'found again us':>15} {'ratio':>7} {'calls':>6} {'launches':>9}"
        )
        printed_rows(
            measure(),
            (json_file, csv_file),
            {},
            lambda row: (
                f"{row.name:<28} {row.looked_at_us:13.2f} {row.found_us:15.2f} {row.looked_at_us / row.found_us:7.1f} "
                f"{row.calls:6} {row.launches:9}"
            ),
        )
        return 0

    exit_after(run)
