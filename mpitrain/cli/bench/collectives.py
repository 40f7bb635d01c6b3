"""`mpitrain bench`: the group of its commands, the command of each collective, and `bench fit`."""

import sys
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from mpitrain.cli import CommandGroup
from mpitrain.cli.bench.device import gemm, kernels, transactions
from mpitrain.cli.bench.links import bandwidth, pairs
from mpitrain.cli.bench.program import command as program
from mpitrain.cli.bench.rows import (
    AGAINST,
    FACTOR,
    TABLE,
    BenchReport,
    exit_with,
    sizes_from,
    table_width,
)
from mpitrain.cli.bench.units import command as units
from mpitrain.cli.former import generate, train
from mpitrain.cli.job_options import (
    Finite,
    check_files,
    counted,
    output_option,
    path_option,
    with_options,
)
from mpitrain.cli.session import mpi_session
from mpitrain.machine.process import KINDS, bound_socket

OPERATIONS = {
    "all-reduce": "allreduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all-to-all": "all-to-all",
    "send-receive": "sendrecv",
}
"""{command: operation in rows and files}. Where they differ, the operation is a hidden command, too."""


@click.group(cls=CommandGroup)
def command() -> None:
    """Measure collectives on all ranks of the MPI job: mpitrain launch -n 4 -- bench all-reduce

    Every row is checked. #wrong counts wrong elements or, for lossy sums, replicas that differ.
    The exit code is 1 if there are any.
    """


COLLECTIVE = with_options(
    click.option(
        "--algorithm",
        default="all",
        metavar="A,B|all",
        help="Algorithms to measure; all: every algorithm that can run here. PyTorch's calls over a backend only "
        "if named: gloo, nccl, mpitrain, as in all,gloo.",
    ),
    sizes_from("4K", "64M", "array"),
    FACTOR,
    click.option(
        "--dtype",
        default="float32",
        show_default=True,
        help="float32, float64, float16, bfloat16, int32.",
    ),
    click.option(
        "--device",
        type=click.Choice(KINDS),
        default="cpu",
        show_default=True,
        help="Kind of device that holds the arrays and reduces them.",
    ),
    click.option(
        "--buffers",
        default="window",
        show_default=True,
        metavar="window|plain|A,B",
        help="Memory of the arrays. window: shared by the ranks of a host, as in training; plain: private.",
    ),
    counted(
        "--iterations",
        0,
        0,
        "Timed runs per row; 0: as many as fit in a quarter of a second, from 5 to 500.",
        short="-n",
    ),
    counted("--warmup", 1, 3, "Untimed runs of each row before the timed ones.", short="-w"),
    counted("--sweeps", 1, 1, "Repetitions of the whole benchmark."),
    path_option(
        "--tuning", "Constants of the cost model for `auto` and the predictions, from bench fit."
    ),
    TABLE,
    AGAINST,
    output_option("--plot", "Draw time and bandwidth to this file, at the end."),
    click.option(
        "--fail-below",
        type=Finite(0),
        metavar="GB/s",
        help="Exit with code 1 if an algorithm's bus bandwidth at the largest size is below this.",
    ),
)
WIRE = click.option(
    "--wire",
    default="",
    metavar="A,B",
    help="Compressed formats to measure as well, for float32: fp16, bf16, int8, topk:0.01, powersgd:4.",
)


COUNTS = click.option(
    "--counts",
    type=click.Choice(("equal", "skewed")),
    default="equal",
    show_default=True,
    help="Elements for each rank. skewed: half as many as for the rank before; each run tells the counts first.",
)


def collective(name: str, operation: str, is_hidden: bool = False) -> click.Command:
    @click.command(
        name,
        short_help=f"Measure {name}: sizes x algorithms.",
        help=f"Measure {name}: sizes x algorithms, with bus bandwidth and the time predicted by the cost model.",
        hidden=is_hidden,
    )
    @COLLECTIVE
    def measure(**options: Any) -> None:
        measured = "all-to-all-skewed" if options.get("counts") == "skewed" else operation
        level = "multiple" if "mpitrain" in options["algorithm"].split(",") else "serialized"
        with mpi_session(kind=lambda: options["device"], thread_level=level) as transport:
            wrong = measure_collective(transport, measured, options)
        exit_with(wrong)

    more = {"allreduce": WIRE, "all-to-all": COUNTS}.get(operation)
    return more(measure) if more else measure


def measure_collective(transport: Any, operation: str, options: dict[str, Any]) -> int:
    """Print and write the rows of a collective. Collective.

    Returns the number of wrong elements, differing replicas, and algorithms or values that are too
    slow.
    """
    from mpitrain.collectives.selection.tuning import DEFAULT, foreign, read_tuning
    from mpitrain.tools.bench.collectives.table import footer, too_slow
    from mpitrain.tools.bench.pictures import plot
    from mpitrain.tools.bench.results import header
    from mpitrain.transport.agreement import on_all_ranks

    request = on_all_ranks(transport, lambda: request_of(operation, options))
    tuning = on_all_ranks(
        transport, lambda: read_tuning(options["tuning"]) if options["tuning"] else DEFAULT
    )
    facts = header(transport, operation, request.device, sys.argv[1:])
    shown = BenchReport(transport, facts, options)
    if advice := foreign(tuning, transport.hosts):
        shown.say(f"{advice} with --tuning")
    rows = [*_swept(transport, request, tuning, shown, options)]
    slow = too_slow(rows, options["fail_below"]) if options["fail_below"] is not None else []
    slower = shown.end(lambda: ["", *footer(rows), *slow], lambda path: plot(rows, facts, path))
    return sum(row.wrong for row in rows) + len(slow) + slower


def _swept(
    transport: Any, request: Any, tuning: Any, shown: BenchReport, options: dict[str, Any]
) -> Any:
    """Allocate the buffers of a `SweepRequest`; return an iterator that measures and prints rows."""
    from mpitrain.tools.bench.collectives.sweep import Sweep
    from mpitrain.tools.bench.collectives.table import columns
    from mpitrain.tools.bench.results import printed
    from mpitrain.tools.text_table import TextTable

    measured = Sweep(transport, request, tuning)
    table = TextTable(columns(request.buffers, bool(request.wires)), table_width(options))
    shown.begin([*printed(shown.facts), "", *table.heading()], measured.total)
    return shown.each(measured, table.line)


def request_of(operation: str, options: dict[str, Any]) -> Any:
    """Return the `SweepRequest` of these options; ConfigError if they contradict each other."""
    from mpitrain.collectives.engine.arithmetic import parse_wire
    from mpitrain.collectives.engine.executor import check_name
    from mpitrain.collectives.selection.algorithm import is_file
    from mpitrain.collectives.selection.cost_model import MEMORY
    from mpitrain.collectives.selection.own_algorithm import file_algorithm
    from mpitrain.errors import ConfigError
    from mpitrain.tools.bench.collectives.operations import TORCH, names
    from mpitrain.tools.bench.collectives.sweep import SweepRequest, dtype_of, sizes

    is_sum = operation == "allreduce"
    algorithms = options["algorithm"].split(",")
    if is_sum:
        algorithms = [file_algorithm(name) if is_file(name) else name for name in algorithms]
    for algorithm in algorithms:
        check_name(f"{operation} algorithm", algorithm, (*names(operation), *TORCH, "all"))
    places = options["buffers"].split(",")
    for place in places:
        check_name(f"buffers of {operation}", place, MEMORY)
    if theirs := [algorithm for algorithm in algorithms if algorithm in TORCH]:
        if not find_spec("torch"):
            raise ConfigError(
                f"Algorithm {theirs[0]} is a backend of PyTorch, which is not installed.",
                "Install it with `pip install torch`, or leave it out.",
            )
        if "nccl" in theirs and options["device"] != "cuda":
            raise ConfigError(
                f"nccl needs arrays on GPUs, but --device is {options['device']}.",
                "Set --device cuda, or leave out nccl.",
            )
    wires = [parse_wire(text) for text in options.get("wire", "").split(",") if text]
    if wires and options["dtype"] != "float32":
        raise ConfigError(
            f"--wire is for arrays of float32, but these are of {options['dtype']}.",
            "Leave out one of the two.",
        )
    return SweepRequest(
        operation,
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


@click.command("fit")
@path_option("--out", "Tuning file to write.", default=Path("tuning.json"), show_default=True)
@sizes_from("64", "64M", "array")
@counted("--sweeps", 1, 3, "Repetitions of the whole measurement.")
@TABLE
def fit(**options: Any) -> None:
    """Measure every all-reduce and fit the cost model to it, for this number of ranks.

    On several hosts with several ranks, the ranks of a host are also measured alone; in the same
    way the ranks of a socket, where a host has several and ranks are bound to them. Each is a
    level in the file.

    A second fit, without every second size, shows how well the model predicts sizes that it has not
    seen. Over slow links, sizes end once the time grows in proportion, except for one that is as
    long as the largest bucket of a run. The file is written after every sweep, so an interruption
    loses only the last one. Run it once for every number of ranks that you use. Constants for other
    numbers of ranks on the same machine stay in the file.
    """
    with mpi_session() as transport:
        measure_and_fit(transport, options)


def measure_and_fit(transport: Any, options: dict[str, Any]) -> None:
    """Fit the cost model after every sweep, level by level, and write its file; at the end, check it
    on sizes left out.
    """
    import numpy as np

    from mpitrain.collectives.selection.algorithm import Topology
    from mpitrain.collectives.selection.cost_model import MEMORY, candidates
    from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning, write_tuning
    from mpitrain.errors import ConfigError, MpitrainError
    from mpitrain.tools.bench.collectives.fit import (
        all_spoilt,
        checked,
        decided,
        described,
        fit,
        levels_seen,
        median_of_sweeps,
        merged,
        same_machine,
    )
    from mpitrain.tools.bench.collectives.sweep import SweepRequest, sizes
    from mpitrain.tools.bench.results import header, machine
    from mpitrain.transport.agreement import on_all_ranks

    if transport.size == 1:
        raise ConfigError(
            "bench fit measures messages, and one rank sends none.",
            "mpitrain launch -n 2 -- bench fit",
        ).on_every_rank()
    out, sweeps, hosts = options["out"], options["sweeps"], transport.hosts
    before = on_all_ranks(transport, lambda: read_tuning(out) if out.exists() else None)
    files = out, options["json_file"], options["csv_file"]
    on_all_ranks(transport, lambda: check_files(transport.rank, files))
    identity, lines = machine(transport), list[str]()
    facts = header(transport, "allreduce", "cpu", sys.argv[1:])
    shown = BenchReport(transport, facts, options)
    if before and not same_machine(before.machine, identity):
        lines.append(f"{out} held constants of another machine; these have taken their place")
    tuning = before
    for level, groups in levels_seen(hosts, transport.gather_text(bound_socket())).items():
        # The groups of a level measure at the same time. Rank 0 prints and fits those of its own.
        part = transport.split(groups[transport.rank])
        earlier, first = tuning, len(shown.rows)
        # Windows serve the algorithm `shared`, which needs a single host.
        places = ("plain",) if level == "network" else MEMORY
        lengths = sizes(options["min_bytes"], options["max_bytes"], 2)
        request = SweepRequest(
            "allreduce",
            candidates(Topology(part.hosts)),
            lengths,
            np.dtype("float32"),
            0,
            3,
            places,
            sweeps,
            stops=True,
        )
        measured = _swept(part, request, DEFAULT, shown, options) if part.size > 1 else ()
        for number, swept in groupby(measured, key=lambda row: row.sweep):
            for _ in swept:
                pass  # each row is printed, and added to `shown.rows`
            rows = shown.rows[first:]
            if spoilt := all_spoilt(rows):
                shown.say(
                    f"sweep {number} of {sweeps}: nothing is written, as every row of {' and '.join(spoilt)} arrays is marked ~"
                )
            elif transport.rank == 0:
                fitted = fit(identity, part.hosts, median_of_sweeps(rows), level)
                with shown.outputs.to(out):
                    write_tuning(out, tuning := merged(earlier, fitted))
                    shown.say(f"sweep {number} of {sweeps}: {level} written to {out}")
        shown.close()
        rows = shown.rows[first:]
        is_spoilt = transport.gather_text(bool(all_spoilt(rows)))[0]
        if is_spoilt:
            raise MpitrainError(
                "bench fit learns from rows that other work did not spoil, but there are none.",
                "Measure again while nothing else runs, or with more --sweeps.",
            ).on_every_rank()
        if transport.rank == 0:
            lines += ["", *described(level, fitted.levels[level], part.size)]
            lines += decided(fitted, part.hosts, rows)
            lines += checked(identity, part.hosts, rows)
    shown.end(lambda: lines)


for _name, _operation in OPERATIONS.items():
    command.add_command(collective(_name, _operation))
for _command in (
    *(fit, units, pairs, bandwidth, train, program, generate),
    *(gemm, kernels, transactions),
):
    command.add_command(_command)
for _name, _operation in OPERATIONS.items():
    if _name != _operation:
        command.add_command(collective(_operation, _operation, is_hidden=True))
