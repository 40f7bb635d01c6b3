"""`mpitrain bench kernels`, `bench gemm` and `bench launch`: measure one device, without MPI."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpitrain.cli.bench.options import CSV, JSON, write_rows
from mpitrain.cli.output_checks import Outputs, check_files
from mpitrain.machine import process
from mpitrain.machine.kinds import KINDS

if TYPE_CHECKING:
    # This module must not import NumPy before the BLAS threads are limited.
    from mpitrain.ops.device import Device

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
        found = tuple(value.split(",")) if isinstance(value, str) else value
        if wrong := [name for name in found if name not in self._known]:
            self.fail(f"{wrong[0]!r} is none of {', '.join(self._known)}.")
        return found


def on_a_device(command: Callable) -> Callable:
    """Add the options of `bench kernels` and `bench gemm` to a command."""
    for option in (
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
        from mpitrain.bench.kernels.operations import measure
        from mpitrain.bench.training.steps import imported

        theirs = imported(peer).TorchAttention if peer else None
        device, name = _device(kind, gemm, tiles, checked)
        click.echo(f"# {name}")
        click.echo(
            f"{'operation':<26} {'time us':>10} {'rate':>10} {'':<8} {'percent':>8} {'peer us':>10} {'#wrong':>7}"
        )
        rows = _printed(
            measure(device, theirs),
            (json_file, csv_file),
            {"device": name},
            lambda row: (
                f"{row.name:<26} {row.time_us:10.1f} {row.rate:10.2f} {row.unit:<8} {row.percent:8.1f} "
                f"{row.peer_us:10.1f} {row.wrong:7}".replace(f"{float('nan'):10.1f}", f"{'-':>10}")
            ),
        )
        return sum(row.wrong for row in rows)

    _end(run)


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
        from mpitrain.bench.kernels import gemm as bench
        from mpitrain.errors import ConfigError

        if out and not tune:
            raise ConfigError(
                "--out is where --tune writes its table, but --tune is not given.",
                "Add --tune, or use --json.",
            )
        device, name = _device(kind, gemm, tiles, checked)
        wanted = bench.parse_shapes(shapes or bench.SHAPES[kind])
        click.echo(f"# {name}")
        if tune:
            return _tune(bench.tune(device, wanted, dtypes), out or Path("tiles.json"), name)
        click.echo(
            f"{'product':<8} {'M x N x K':>18} {'dtype':>8}  {'tile':<13} {'time us':>10} {'library us':>11} "
            f"{'GFLOP/s':>10} {'percent':>8} {'#wrong':>7}"
        )
        rows = _printed(
            bench.measure(device, wanted, dtypes, products),
            (json_file, csv_file),
            {"device": name},
            lambda row: (
                f"{row.product:<8} {f'{row.m} x {row.n} x {row.k}':>18} {row.dtype:>8}  {row.plan or '-':<13} "
                f"{row.time_us:10.1f} {row.library_us:11.1f} {row.gflops:10.2f} {row.percent:8.1f} {row.wrong:7}"
            ),
        )
        return sum(row.wrong for row in rows)

    _end(run)


@click.command("launch")
@JSON
@CSV
def launch(json_file: Path | None, csv_file: Path | None) -> None:
    """Measure the host overhead of kernel launches, on an engine that does nothing.

    The first launch of a kind checks its arguments one by one ("looked at"). Later launches with
    such arguments come from a cache ("found again"); the simulator checks every launch. calls is
    the number of Python calls with cached launches. Leasing of buffers is not included.
    """

    def run() -> int:
        from mpitrain.bench.kernels.launch_overhead import measure

        click.echo(
            f"{'operation':<28} {'looked at us':>13} {'found again us':>15} {'ratio':>7} {'calls':>6} {'launches':>9}"
        )
        _printed(
            measure(),
            (json_file, csv_file),
            {},
            lambda row: (
                f"{row.name:<28} {row.looked_at_us:13.2f} {row.found_us:15.2f} {row.looked_at_us / row.found_us:7.1f} "
                f"{row.calls:6} {row.launches:9}"
            ),
        )
        return 0

    _end(run)


def _device(kind: str, gemm: str, tiles: str, checked: bool) -> "tuple[Device, str]":
    """Return the device and its name for a header; ConfigError if it is missing or unsuitable."""
    from mpitrain.bench.collectives.header import processor
    from mpitrain.errors import ConfigError
    from mpitrain.ops.device import device_for

    if kind == "cpu" and (gemm != "tiled" or tiles):
        raise ConfigError(
            "--gemm and --tiles are about products on a GPU, but --device is cpu.",
            "Leave them out.",
        )
    device = device_for(kind, gemm, tiles, checked)
    return device, device.kernels.engine.name if device.kernels else processor()


def _printed(
    rows: Iterable[Any],
    files: tuple[Path | None, Path | None],
    facts: dict[str, Any],
    line: Callable[[Any], str],
) -> list[Any]:
    """Print and write rows as they come, and return them.

    files  JSON and CSV
    facts  about the device, for the JSON file
    """
    check_files(0, files)
    seen, outputs = list[Any](), Outputs()
    for row in rows:
        seen.append(row)
        click.echo(line(row))
        write_rows(outputs, *files, {**facts, "arguments": sys.argv[1:]}, seen)
    outputs.settle()
    return seen


def _tune(rows: Any, out: Path, name: str) -> int:
    """Print the best tilings as they are found, and add them to the file, which has other shapes.

    Return the number of wrong elements.
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


def _end(run: Callable[[], int]) -> None:
    """Run a benchmark without MPI and exit: with the error's code, or 1 if any element is wrong."""
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
