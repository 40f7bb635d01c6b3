"""`mpitrain bench gemm`: measures matrix products of one device, and finds the best tiles."""

from pathlib import Path
from typing import Any

import click

from mpitrain.cli.bench.one_device import device_of, exit_after, on_a_device, printed_rows
from mpitrain.cli.job_options import Outputs, check_files

PRODUCTS = ("NT", "NN", "TN", "NT+gelu", "TN+sums")
DTYPES = ("float32", "float16", "bfloat16")


class Names(click.ParamType):
    """A Click type for some of the known names, separated by commas."""

    name = "names"

    def __init__(self, known: tuple[str, ...]):
        self._known = known

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> tuple[str, ...]:
        names = tuple(value.split(",")) if isinstance(value, str) else value
        if wrong := [name for name in names if name not in self._known]:
            self.fail(f"{wrong[0]!r} is none of {', '.join(self._known)}.")
        return names


@click.command("gemm")
@on_a_device
@click.option(
    "--shapes",
    default="",
    metavar="MxNxK,N",
    help="Shapes of products (M, K) x (K, N); a single number N means NxNxN.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=Names(DTYPES),
    default="float32",
    show_default=True,
    metavar="A,B",
    help=f"Dtypes of the operands: {', '.join(DTYPES)}.",
)
@click.option(
    "--products",
    type=Names(PRODUCTS),
    default=",".join(PRODUCTS),
    show_default=True,
    metavar="A,B",
    help="Products of a linear layer: forward (NT), input half (NN) and weight half (TN) of backward, "
    "forward with bias and GELU, weight half with the bias gradient.",
)
@click.option(
    "--tune", is_flag=True, help="Measure every tile instead, and write the best tiles to --out."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="For --tune: the table to write, for --tiles and device.tiles (default: tiles.json). Its entries "
    "for other shapes stay.",
)
def gemm(
    kind: str,
    checked: bool,
    gemm: str,
    tiles: str,
    json_file: Path | None,
    csv_file: Path | None,
    against_file: Path | None,
    tolerance: float,
    shapes: str,
    dtypes: tuple[str, ...],
    products: tuple[str, ...],
    tune: bool,
    out: Path | None,
) -> None:
    """Measure matrix products in turns with a library: cuBLAS through CuPy, or NumPy's BLAS on
    cuda-sim and cpu.

    T marks an operand that is stored transposed. If our kernel fuses an epilogue, the library's
    time includes the kernels that compute it. percent is our rate relative to the library's. The
    exit code is 1 if any element is wrong.
    """

    def run() -> int:
        from mpitrain.errors import ConfigError
        from mpitrain.tools.bench.kernels import gemm as bench

        if out and not tune:
            raise ConfigError(
                "--out is where --tune writes its table, but --tune is not given.",
                "Add --tune, or use --json.",
            )
        if against_file and tune:
            raise ConfigError(
                "--against compares times of products, but --tune chooses tiles.",
                "Leave out one of the two.",
            )
        device, name = device_of(kind, gemm, tiles, checked)
        wanted = bench.parse_shapes(shapes or bench.SHAPES[kind])
        click.echo(f"# {name}")
        if tune:
            return _tune(bench.tune(device, wanted, dtypes), out or Path("tiles.json"), name)
        click.echo(
            f"{'product':<8} {'M x N x K':>18} {'dtype':>8}  {'tile':<13} {'time us':>10} {'library us':>11} "
            f"{'GFLOP/s':>10} {'percent':>8} {'#wrong':>7}"
        )
        rows, slow = printed_rows(
            bench.measure(device, wanted, dtypes, products),
            (json_file, csv_file),
            {"device": name},
            lambda row: (
                f"{row.product:<8} {f'{row.m} x {row.n} x {row.k}':>18} {row.dtype:>8}  {row.plan or '-':<13} "
                f"{row.time_us:10.1f} {row.library_us:11.1f} {row.gflops:10.2f} {row.percent:8.1f} {row.wrong:7}"
            ),
            (against_file, tolerance),
        )
        return sum(row.wrong for row in rows) + slow

    exit_after(run)


def _tune(rows: Any, out: Path, name: str) -> int:
    """Add the best tilings to the file, print them, and return the wrong elements of all products.

    Entries of the file for other shapes remain.
    """
    from mpitrain.ops.cuda.tiles import read_tiles, write_tiles

    check_files(0, [out])
    table = {entry[:5]: entry for entry in (read_tiles(out).measured if out.exists() else ())}
    click.echo(
        f"{'stored':<6} {'M x N x K':>18} {'dtype':>8}  {'best tile':<14} {'time us':>10} {'usual us':>10} {'tried':>6} "
        f"{'#wrong':>7}"
    )
    wrong, outputs = 0, Outputs()
    for row in rows:
        best, tile = (
            row.best,
            "x".join(map(str, row.best.tiling.tile[:3])) + f"/{row.best.tiling.splits}",
        )
        click.echo(
            f"{best.stored:<6} {f'{best.m} x {best.n} x {best.k}':>18} {best.elements:>8}  {tile:<14} {row.time_us:10.1f} "
            f"{row.usual_us:10.1f} {row.tried:6} {row.wrong:7}"
        )
        table[best[:5]] = best
        wrong += row.wrong
        with outputs.to(out):
            write_tiles(out, name, table.values())
    outputs.settle()
    click.echo(f"written to {out}")
    return wrong
