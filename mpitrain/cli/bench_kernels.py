"""`mpitrain bench kernels` and `bench gemm`: what one device computes, without other ranks."""

import sys
from typing import Any

import click

from mpitrain import device

DEVICES = ("cpu", "cuda-sim", "cuda")


@click.command("kernels")
@click.option("--device", "kind", type=click.Choice(DEVICES), default="cpu", show_default=True, help="Where to compute.")
@click.option("--checked", is_flag=True, help="Of cuda-sim: look for races, wrong addresses and uninitialised reads.")
def kernels(kind: str, checked: bool) -> None:
    """Measure every operation of a training step on this device.

    percent: of the bandwidth that a plain copy reaches, or of the rate of the first product; #wrong: elements that differ
    from the reference. The exit code is 1 if any does.
    """
    def run() -> int:
        from mpitrain.bench.kernels import measure
        from mpitrain.bench.target import target

        place, wrong = target(kind, checked), 0
        click.echo(f"{'operation':<20} {'time us':>10} {'rate':>10} {'':<8} {'percent':>8} {'#wrong':>7}")
        for row in measure(place):
            click.echo(f"{row.name:<20} {1e6 * row.seconds:10.1f} {row.rate:10.2f} {row.unit:<8} {row.percent:8.1f} "
                       f"{row.wrong:7}")
            wrong += row.wrong
        return wrong

    _end(run)


@click.command("gemm")
@click.option("--device", "kind", type=click.Choice(DEVICES), default="cpu", show_default=True, help="Where to compute.")
@click.option("--sizes", default="", metavar="N,N", help="Rows and columns of the square matrices.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True,
              help="Of the operands.")
def gemm(kind: str, sizes: str, dtype: str) -> None:
    """Measure square matrix products beside the library's own: NumPy's BLAS, or cuBLAS through CuPy."""
    def run() -> int:
        from mpitrain.bench.gemm import SIZES, measure
        from mpitrain.bench.target import target

        place, wrong = target(kind), 0
        click.echo(f"{'size':>6} {'time us':>10} {'library us':>11} {'GFLOP/s':>10} {'percent':>8} {'#wrong':>7}")
        for row in measure(place, [int(size) for size in sizes.split(",")] if sizes else SIZES[kind], dtype):
            click.echo(f"{row.size:6} {1e6 * row.seconds:10.1f} {1e6 * row.library_seconds:11.1f} {row.gflops:10.2f} "
                       f"{row.percent:8.1f} {row.wrong:7}")
            wrong += row.wrong
        return wrong

    _end(run)


def _end(run: Any) -> None:
    """Run without MPI; an error of ours is one message and its exit code, anything wrong is exit code 1."""
    device.limit_blas_threads()
    from mpitrain.errors import MpitrainError

    try:
        wrong = run()
    except MpitrainError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    sys.exit(1 if wrong else 0)
