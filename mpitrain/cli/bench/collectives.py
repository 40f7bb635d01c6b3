"""`mpitrain bench`: the group of benchmarks, and a command for each collective, as nccl-tests."""

import sys
from pathlib import Path
from typing import Any

import click

from mpitrain.cli import CommandGroup
from mpitrain.cli.bench.bandwidth import command as bandwidth
from mpitrain.cli.bench.fit import fit
from mpitrain.cli.bench.gemm import gemm
from mpitrain.cli.bench.generate import command as generate
from mpitrain.cli.bench.kernels import kernels, launch
from mpitrain.cli.bench.options import Bytes, against_options, compared, table_options
from mpitrain.cli.bench.pairs import command as pairs
from mpitrain.cli.bench.rows import printed_sweep
from mpitrain.cli.bench.training.command import command as train
from mpitrain.cli.bench.transactions import transactions
from mpitrain.cli.job_options import Outputs, check_files, finite, output_option
from mpitrain.cli.session import MOST, mpi_session
from mpitrain.machine.process import KINDS

OPERATIONS = (
    "allreduce",
    "reduce-scatter",
    "all-gather",
    "broadcast",
    "reduce",
    "all-to-all",
    "sendrecv",
)


@click.group(cls=CommandGroup)
def command() -> None:
    """Measure collectives on all ranks of the MPI job: mpitrain launch -n 4 -- bench allreduce

    Every row is checked. #wrong counts wrong elements or, for lossy sums, replicas that differ.
    The exit code is 1 if there are any.
    """


command.add_command(train, "train")
command.add_command(generate)
command.add_command(kernels)
command.add_command(transactions)
command.add_command(gemm)
command.add_command(launch)
command.add_command(fit)
command.add_command(pairs)
command.add_command(bandwidth)


WIRE = click.option(
    "--wire",
    default="",
    metavar="A,B",
    help="Compressed formats to measure as well, for float32: fp16, bf16, int8, topk:0.01, powersgd:4.",
)


def collective(name: str) -> click.Command:
    @click.command(
        name,
        short_help=f"Measure {name}: sizes x algorithms.",
        help=f"Measure {name}: sizes x algorithms, with bus bandwidth and the time predicted by the cost model.",
    )
    @click.option(
        "--algorithm",
        default="all",
        metavar="A,B|all",
        help="Algorithms to measure; all: every algorithm that can run here.",
    )
    @click.option(
        "--min-bytes", type=Bytes(), default="4K", show_default=True, help="Smallest array."
    )
    @click.option(
        "--max-bytes", type=Bytes(), default="64M", show_default=True, help="Largest array."
    )
    @click.option(
        "--factor", type=float, default=4, show_default=True, help="Ratio of successive sizes."
    )
    @click.option(
        "--dtype",
        default="float32",
        show_default=True,
        help="float32, float64, float16, bfloat16, int32.",
    )
    @click.option(
        "--device",
        type=click.Choice(KINDS),
        default="cpu",
        show_default=True,
        help="Kind of device that holds the arrays and reduces them.",
    )
    @click.option(
        "--buffers",
        default="window",
        show_default=True,
        metavar="window|plain|leased|A,B",
        help="Memory of the arrays. window: shared by the ranks of a host, as in training; plain: private; "
        "leased (allreduce only): an activation buffer, leased anew for every run.",
    )
    @click.option(
        "--iterations",
        type=click.IntRange(0, MOST),
        default=0,
        show_default=True,
        help="Timed runs per row; 0: as many as fit in a quarter of a second, from 5 to 500.",
    )
    @click.option(
        "--warmup",
        type=click.IntRange(1, MOST),
        default=3,
        show_default=True,
        help="Untimed runs of each row before the timed ones.",
    )
    @click.option(
        "--sweeps",
        type=click.IntRange(1, MOST),
        default=1,
        show_default=True,
        help="Repetitions of the whole benchmark.",
    )
    @click.option(
        "--tuning",
        type=click.Path(path_type=Path),
        help="Constants of the cost model for `auto` and the predictions, from bench fit.",
    )
    @table_options
    @against_options
    @output_option("--plot", "Draw time and bandwidth to this file, at the end.")
    @click.option(
        "--fail-below",
        type=click.FloatRange(min=0),
        callback=finite,
        metavar="GB/s",
        help="Exit with code 1 if an algorithm's bus bandwidth at the largest size is below this.",
    )
    def measure(**options: Any) -> None:
        with mpi_session(kind=lambda: options["device"]) as transport:
            wrong = _measure(transport, name, options)
        sys.exit(1 if wrong else 0)

    return WIRE(measure) if name == "allreduce" else measure


for _name in OPERATIONS:
    command.add_command(collective(_name))


def _measure(transport: Any, name: str, options: dict[str, Any]) -> int:
    """Return the number of wrong elements, replicas that differ, and slow algorithms or values."""
    from mpitrain.collectives.selection.tuning import DEFAULT, foreign, read_tuning
    from mpitrain.tools.bench.collectives.header import header
    from mpitrain.tools.bench.collectives.plot import plot
    from mpitrain.tools.bench.collectives.table import footer, too_slow
    from mpitrain.transport.agreement import on_all_ranks

    request = on_all_ranks(transport, lambda: _request(name, options))
    files = {key: options[key] for key in ("json_file", "csv_file")}
    on_all_ranks(
        transport, lambda: check_files(transport.rank, [*files.values()], options["plot_file"])
    )
    tuning = on_all_ranks(
        transport, lambda: read_tuning(options["tuning"]) if options["tuning"] else DEFAULT
    )
    facts = header(transport, request.operation, request.device, sys.argv[1:])
    if transport.rank == 0 and (advice := foreign(tuning, transport.hosts)):
        click.echo(f"{advice} with --tuning")
    against, outputs = compared(transport, options, facts), Outputs()
    rows = list(printed_sweep(transport, request, tuning, facts, options["wide"], outputs, **files))
    slow = too_slow(rows, options["fail_below"]) if options["fail_below"] is not None else []
    outputs.conclude(
        transport,
        lambda: ["", *footer(rows), *slow, *against.lines(rows)],
        options["plot_file"],
        lambda path: plot(rows, facts, path),
    )
    return sum(row.wrong for row in rows) + len(slow) + against.failures(rows)


def _request(name: str, options: dict[str, Any]) -> Any:
    from mpitrain.collectives.engine.arithmetic import parse_wire
    from mpitrain.collectives.engine.executor import check_name
    from mpitrain.collectives.selection.algorithm import is_file
    from mpitrain.collectives.selection.cost_model import MEMORY
    from mpitrain.collectives.selection.own_algorithm import file_algorithm
    from mpitrain.errors import ConfigError
    from mpitrain.tools.bench.collectives.buffers import LEASED
    from mpitrain.tools.bench.collectives.native import names
    from mpitrain.tools.bench.collectives.request import SweepRequest, dtype_of, sizes

    algorithms = () if options["algorithm"] == "all" else options["algorithm"].split(",")
    if name == "allreduce":
        algorithms = [
            file_algorithm(algorithm) if is_file(algorithm) else algorithm
            for algorithm in algorithms
        ]
    for algorithm in algorithms:
        check_name(f"{name} algorithm", algorithm, names(name))
    places = options["buffers"].split(",")
    for place in places:
        check_name(
            f"buffers of {name}", place, (*MEMORY, LEASED) if name == "allreduce" else MEMORY
        )
    wires = [parse_wire(text) for text in options.get("wire", "").split(",") if text]
    if wires and LEASED in places:
        raise ConfigError(
            "--wire is for gradients, but --buffers has activations.", "Leave out one of the two."
        )
    if wires and options["dtype"] != "float32":
        raise ConfigError(
            f"--wire is for arrays of float32, but these are of {options['dtype']}.",
            "Leave out one of the two.",
        )
    return SweepRequest(
        name,
        algorithms,
        sizes(options["min_bytes"], options["max_bytes"], options["factor"]),
        dtype_of(options["dtype"]),
        options["iterations"],
        options["warmup"],
        places,
        options["sweeps"],
        [wire for wire in wires if wire.name != "none"],
        options["device"],
    )
