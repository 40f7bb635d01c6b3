"""`mpitrain bench gemm`, `kernels` and `transactions`: measure one device without MPI."""

import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpitrain.cli.bench.rows import AGAINST, CSV, JSON, BenchReport, exit_with
from mpitrain.cli.job_options import Outputs, check_files, path_option, with_options
from mpitrain.machine import process
from mpitrain.machine.process import KINDS

if TYPE_CHECKING:
    # This module must not import NumPy before the BLAS threads are limited.
    from mpitrain.ops.device import Device
    from mpitrain.tools.text_table import TextTable

PRODUCTS = ("NT", "NN", "TN", "NT+gelu", "TN+sums")
DTYPES = ("float32", "float16", "bfloat16")

ON_A_DEVICE = with_options(
    click.option(
        "--device",
        "kind",
        type=click.Choice(KINDS),
        default="cpu",
        show_default=True,
        help="Kind of device.",
    ),
    click.option(
        "--checked",
        is_flag=True,
        help="On cuda-sim: check for races, wrong addresses and uninitialised reads.",
    ),
    click.option(
        "--gemm",
        type=click.Choice(["tiled", "3xtf32", "library", "auto"]),
        default="tiled",
        show_default=True,
        help="Matrix products: tiled (our kernels), 3xtf32 (float32 on tensor cores), library (cuBLAS), auto (the faster).",
    ),
    click.option(
        "--tensor-cores",
        type=click.Choice(["mma", "wgmma"]),
        default="mma",
        show_default=True,
        help="16-bit products by warps (mma) or by the warpgroups of Hopper (wgmma).",
    ),
    click.option(
        "--tiles",
        type=click.Path(),
        default="",
        help="Table of tiles, as written by bench gemm --tune.",
    ),
    JSON,
    CSV,
    AGAINST,
)


def device_of(options: dict[str, Any]) -> "tuple[Device, str]":
    """Return the device and its name for a header; ConfigError if it is missing or unsuitable."""
    from mpitrain.errors import ConfigError
    from mpitrain.machine.process import processor
    from mpitrain.ops.device import device_for

    kind, gemm, tiles = options["kind"], options["gemm"], options["tiles"]
    tensor_cores = options["tensor_cores"]
    if kind == "cpu" and ((gemm, tensor_cores) != ("tiled", "mma") or tiles):
        raise ConfigError(
            "--gemm, --tensor-cores and --tiles are about products on a GPU, but --device is cpu.",
            "Leave them out.",
        )
    if tensor_cores == "wgmma" and gemm == "library":
        raise ConfigError(
            "--tensor-cores wgmma is about our kernels, but --gemm is library.",
            "Use --gemm tiled, 3xtf32 or auto, or leave --tensor-cores out.",
        )
    device = device_for(kind, gemm, tiles, options["checked"], tensor_cores=tensor_cores)
    return device, device.kernels.engine.name if device.kernels else processor().name


def print_rows(
    rows: Iterable[Any], table: "TextTable", options: dict[str, Any], device: str
) -> int:
    """Print and write rows as they come; return the number of wrong elements and of slow values.

    device  its name
    """
    from mpitrain import __version__

    facts = {
        "mpitrain": __version__,
        "host_names": [platform.node()],
        "device": device,
        "arguments": sys.argv[1:],
        "job": process.job_id(),
    }
    shown = BenchReport(None, facts, options)
    shown.begin([f"# {device}", *table.heading()])
    wrong = sum(getattr(row, "wrong", 0) for row in shown.each(rows, table.line))
    return wrong + shown.end()


class Names(click.ParamType):
    """A Click type: some of the known names, separated by commas."""

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
@ON_A_DEVICE
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
@path_option(
    "--out",
    "For --tune: the table to write, for --tiles and device.tiles (default: tiles.json). Its entries "
    "for other shapes stay.",
)
def gemm(
    shapes: str,
    dtypes: tuple[str, ...],
    products: tuple[str, ...],
    tune: bool,
    out: Path | None,
    **options: Any,
) -> None:
    """Measure matrix products in turns with a library: cuBLAS through CuPy, or NumPy's BLAS on
    cuda-sim and cpu.

    T marks an operand that is stored transposed. If our kernel fuses an epilogue, the library's
    time includes the kernels that compute it. percent is our rate relative to the library's. The
    exit code is 1 if any element is wrong.
    """
    process.limit_blas_threads()
    from mpitrain.errors import ConfigError
    from mpitrain.tools.bench.kernels import gemm as bench

    if out and not tune:
        raise ConfigError(
            "--out is where --tune writes its table, but --tune is not given.",
            "Add --tune, or use --json.",
        )
    if options["against_file"] and tune:
        raise ConfigError(
            "--against compares times of products, but --tune chooses tiles.",
            "Leave out one of the two.",
        )
    device, name = device_of(options)
    wanted = bench.parse_shapes(shapes or bench.SHAPES[options["kind"]])
    if tune:
        rows = bench.tune(device, wanted, dtypes)
        compares = options["gemm"] == "auto" and "float32" in dtypes
        exit_with(_tune(rows, out or Path("tiles.json"), name, device if compares else None))
    exit_with(
        print_rows(bench.measure(device, wanted, dtypes, products), bench.TABLE, options, name)
    )


def _tune(rows: Any, out: Path, name: str, of_attention: Any) -> int:
    """Print the fastest tilings, and add them to the file; return the number of wrong elements.

    Tilings that the file has for other shapes stay.

    of_attention  the device whose attention in float32 is measured as well; None: it is not
    """
    from mpitrain.ops.cuda.tiles import DEFAULT, read_tiles, write_tiles
    from mpitrain.tools.bench.kernels.gemm import TUNED
    from mpitrain.tools.bench.kernels.operations import attention_gain

    check_files(0, [out])
    before = read_tiles(out) if out.exists() else DEFAULT
    table = {entry.replaces: entry for entry in before.measured}
    gains = {entry[:2]: entry for entry in before.attention}
    click.echo("\n".join([f"# {name}", *TUNED.heading()]))
    wrong, outputs = 0, Outputs()
    for row in rows:
        click.echo(TUNED.line(row))
        table[row.best.replaces] = row.best
        wrong += row.wrong
        with outputs.to(out):
            write_tiles(out, name, table.values(), gains.values())
    if of_attention:
        found = attention_gain(of_attention)
        gains[found[:2]] = found
        click.echo(
            f"attention in float32, {found.tokens} tokens, heads of {found.head} channels: "
            f"3xTF32 is {found.gain:.2f} times as fast as CUDA cores"
        )
        with outputs.to(out):
            write_tiles(out, name, table.values(), gains.values())
    outputs.settle()
    click.echo(f"written to {out}")
    return wrong


@click.command("kernels")
@ON_A_DEVICE
@click.option(
    "--peer",
    type=click.Choice(["torch"]),
    help="Measure attention in turns with PyTorch's fused attention.",
)
def kernels(peer: str | None, **options: Any) -> None:
    """Measure every operation of a training step on this device.

    \b
    percent  rate, relative to a copy (GB/s) or to the first product (GFLOP/s)
    peer us  time of the alternative, measured in turns: PyTorch's attention, or
             two operations of ours in place of a fused one
    #wrong   elements that differ from the reference

    The exit code is 1 if any element is wrong.
    """
    process.limit_blas_threads()
    from mpitrain.tools.bench.kernels.operations import TABLE, measure
    from mpitrain.tools.bench.training.peers import imported

    theirs = imported(peer).TorchAttention if peer else None
    device, name = device_of(options)
    exit_with(print_rows(measure(device, theirs), TABLE, options, name))


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
def transactions(dtypes: tuple[str, ...], **options: Any) -> None:
    """Count the memory transactions of every kernel of a training step. Needs g++ or zig, no GPU.

    \b
    bytes     that threads read and write in global memory
    sectors   bytes of the 32-byte sectors that this takes
    requests  loads and stores of warps in shared memory
    passes    over the 32 banks; each bank conflict adds some
    extra     passes because of bank conflicts, and their lines of code
    """
    process.limit_blas_threads()
    import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy

    from mpitrain.tools.bench.kernels.transactions import TABLE, count

    exit_with(print_rows(count(dtypes), TABLE, options, "simulator"))
