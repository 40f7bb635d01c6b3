"""`mpitrain bench`: what the network and the memory of this machine can do, and what every algorithm makes of it."""

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from mpitrain.cli import Group
from mpitrain.cli.bench_kernels import gemm, kernels, launch
from mpitrain.cli.bench_train import command as train
from mpitrain.cli.ending import MOST, ranks
from mpitrain.cli.files import check_files
from mpitrain.machine.kinds import KINDS

OPERATIONS = ("allreduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all", "sendrecv")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_BYTES = 1 << 40


class Bytes(click.ParamType):
    """A number of bytes: 4096, 64K, 1.5M, 2G; at most a tebibyte."""

    name = "bytes"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", value.strip(), re.IGNORECASE)
        if not found:
            self.fail(f"{value!r} is no number of bytes; write 4096, 64K, 1.5M or 2G.")
        size = float(found[1]) * UNITS[found[2].upper()]
        if size > MOST_BYTES:
            self.fail(f"{value!r} is more than 1024G.")
        return int(size)


@click.group(cls=Group)
def command() -> None:
    """Measure collectives, with all the ranks this was started with: mpitrain launch -n 4 -- bench allreduce

    Every row is checked: #wrong counts elements that are not what they must be, or replicas of a lossy sum that differ, and
    the exit code is 1 if there are any.
    """


command.add_command(train, "train")
command.add_command(kernels)
command.add_command(gemm)
command.add_command(launch)


WIRE = click.option("--wire", default="", metavar="A,B",
                    help="Formats to measure beside the algorithms, float32: fp16, bf16, int8, topk:0.01, powersgd:4.")


def collective(name: str) -> click.Command:
    """The subcommand that measures one collective."""
    @click.command(name, short_help=f"Measure {name}: sizes x algorithms.",
                   help=f"Measure {name}: sizes x algorithms, with bus bandwidth and the model's prediction.")
    @click.option("--algorithm", default="all", metavar="A,B|all", help="Algorithms to measure; all: every one there is.")
    @click.option("--min-bytes", type=Bytes(), default="4K", show_default=True, help="Smallest array.")
    @click.option("--max-bytes", type=Bytes(), default="64M", show_default=True, help="Largest array.")
    @click.option("--factor", type=float, default=4, show_default=True, help="From one size to the next.")
    @click.option("--dtype", default="float32", show_default=True, help="float32, float64, float16, bfloat16, int32.")
    @click.option("--device", type=click.Choice(KINDS), default="cpu", show_default=True,
                  help="Whose memory holds the arrays, and whose kernels reduce them.")
    @click.option("--buffers", default="window", show_default=True, metavar="window|plain|leased|A,B",
                  help="Where arrays lie: in memory shared by the ranks of a host, as in training; anywhere; of allreduce also "
                       "where activations that travel do, leased anew for every run.")
    @click.option("--iterations", type=click.IntRange(0, MOST), default=0, show_default=True,
                  help="Timed runs per row; 0: what fits in a quarter of a second, from 5 to 500.")
    @click.option("--warmup", type=click.IntRange(1, MOST), default=3, show_default=True, help="Runs before those.")
    @click.option("--sweeps", type=click.IntRange(1, MOST), default=1, show_default=True, help="Times to go through it all.")
    @click.option("--tuning", type=click.Path(path_type=Path), help="Constants for `auto` and the predictions, from bench fit.")
    @click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write rows there, as they are measured.")
    @click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw time and bandwidth, at the end.")
    def measure(**options: Any) -> None:
        with ranks(kind=lambda: options["device"]) as transport:
            wrong = _measure(transport, name, options)
        sys.exit(1 if wrong else 0)

    return WIRE(measure) if name == "allreduce" else measure


for _name in OPERATIONS:
    command.add_command(collective(_name))


def _measure(transport: Any, name: str, options: dict[str, Any]) -> int:
    """Run one benchmark; rank 0 prints. The number of wrong elements and replicas."""
    from mpitrain.bench.header import header
    from mpitrain.bench.table import footer
    from mpitrain.collectives.tuning import DEFAULT, foreign, read_tuning
    from mpitrain.transport.agreed import agreed

    request = agreed(transport, lambda: _request(name, options))
    agreed(transport, lambda: check_files(transport.rank, [options["json_file"]], options["plot_file"]))
    tuning = agreed(transport, lambda: read_tuning(options["tuning"]) if options["tuning"] else DEFAULT)
    facts = header(transport, request, sys.argv[1:])
    if transport.rank == 0 and (advice := foreign(tuning, transport.hosts)):
        click.echo(f"{advice} with --tuning")
    rows = list(_swept(transport, request, tuning, facts, options["json_file"]))
    if transport.rank == 0:
        click.echo("\n" + "\n".join(footer(rows)))
        if options["plot_file"]:
            from mpitrain.bench.plot import plot

            plot(rows, facts, options["plot_file"])
    return sum(row.wrong for row in rows)


def _swept(transport: Any, request: Any, tuning: Any, facts: dict[str, Any], json_file: Path | None) -> Iterator[Any]:
    """The rows of a request, as they are measured; rank 0 prints each, and writes them all if asked."""
    from mpitrain.bench.header import printed
    from mpitrain.bench.sweep import sweep
    from mpitrain.bench.table import COLUMNS, UNITS, line, write_json

    measured = sweep(transport, request, tuning)
    if transport.rank == 0:
        click.echo("\n".join([*printed(facts), "", COLUMNS, UNITS]))
    rows = []
    for row in measured:
        rows.append(row)
        if transport.rank == 0:
            click.echo(line(row, request.buffers))
            if json_file:
                write_json(json_file, facts, rows)
        yield row


def _request(name: str, options: dict[str, Any]) -> Any:
    """The command line as what to measure; ConfigError for names that do not exist."""
    from mpitrain.bench.bound import LEASED
    from mpitrain.bench.native import names
    from mpitrain.bench.sweep import SweepRequest, dtype_of, sizes
    from mpitrain.collectives.check import check_name
    from mpitrain.collectives.cost import MEMORY
    from mpitrain.collectives.wire import parse_wire
    from mpitrain.errors import ConfigError

    algorithms = () if options["algorithm"] == "all" else options["algorithm"].split(",")
    for algorithm in algorithms:
        check_name(f"{name} algorithm", algorithm, names(name))
    places = options["buffers"].split(",")
    for place in places:
        check_name(f"buffers of {name}", place, (*MEMORY, LEASED) if name == "allreduce" else MEMORY)
    wires = [parse_wire(text) for text in options.get("wire", "").split(",") if text]
    if wires and LEASED in places:
        raise ConfigError("--wire is for gradients, but --buffers has activations.", "Leave out one of the two.")
    if wires and options["dtype"] != "float32":
        raise ConfigError(f"--wire is for arrays of float32, but these are of {options['dtype']}.", "Leave out one of the two.")
    return SweepRequest(name, algorithms, sizes(options["min_bytes"], options["max_bytes"], options["factor"]),
                        dtype_of(options["dtype"]), options["iterations"], options["warmup"], places, options["sweeps"],
                        [wire for wire in wires if wire.name != "none"], options["device"])


@command.command("fit")
@click.option("--out", type=click.Path(path_type=Path), default=Path("tuning.json"), show_default=True, help="The tuning file.")
@click.option("--min-bytes", type=Bytes(), default="64", show_default=True, help="Smallest array.")
@click.option("--max-bytes", type=Bytes(), default="64M", show_default=True, help="Largest array.")
@click.option("--sweeps", type=click.IntRange(1, MOST), default=3, show_default=True, help="Times to go through it all.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write rows there, as they are measured.")
def fit(out: Path, min_bytes: int, max_bytes: int, sweeps: int, json_file: Path | None) -> None:
    """Measure every all-reduce and fit the cost model to it, for this number of ranks.

    Every second size is left out at first, to tell how well the model does on sizes it has not seen. Over slow links sizes
    stop growing where time has begun to grow with them. The file is written after every sweep, so that an interruption
    keeps those before. Run it once for every number of ranks you use: the file keeps what it has of the same machine.
    """
    with ranks() as transport:
        _fit(transport, out, min_bytes, max_bytes, sweeps, json_file)


def _fit(transport: Any, out: Path, min_bytes: int, max_bytes: int, sweeps: int, json_file: Path | None) -> None:
    """Measure, fit and write after every sweep; at the end check on sizes left out."""
    import numpy as np

    from mpitrain.bench.fit import checked, described, fit, median_of_sweeps, merged
    from mpitrain.bench.header import header, machine
    from mpitrain.bench.sweep import Row, SweepRequest, sizes
    from mpitrain.collectives.choose import candidates
    from mpitrain.collectives.cost import MEMORY
    from mpitrain.collectives.entry import Situation
    from mpitrain.collectives.tuning import DEFAULT, read_tuning, write_tuning
    from mpitrain.errors import ConfigError, on_every_rank
    from mpitrain.transport.agreed import agreed

    if transport.size == 1:
        raise on_every_rank(ConfigError("bench fit measures messages, and one rank sends none.",
                                        "mpitrain launch -n 2 -- bench fit"))
    before = agreed(transport, lambda: read_tuning(out) if out.exists() else None)
    agreed(transport, lambda: check_files(transport.rank, [out, json_file]))
    places = MEMORY if len(set(transport.hosts)) == 1 else ("plain",)  # windows serve `shared`, which needs one host
    request = SweepRequest("allreduce", candidates(Situation(transport.hosts)), sizes(min_bytes, max_bytes, 2),
                           np.dtype("float32"), 0, 3, places, sweeps, stops=True)
    identity, tuning = machine(transport), DEFAULT
    rows: list[Row] = []
    measured = _swept(transport, request, DEFAULT, header(transport, request, sys.argv[1:]), json_file)
    for number, swept in groupby(measured, key=lambda row: row.sweep):
        rows += swept
        if transport.rank == 0:
            tuning = fit(identity, transport.hosts, median_of_sweeps(rows))
            write_tuning(out, merged(before, tuning))
            click.echo(f"sweep {number} of {sweeps}: written to {out}")
    if transport.rank == 0:
        click.echo("\n" + "\n".join([*described(tuning, transport.size), *checked(identity, transport.hosts, rows)]))
        if before and before.machine != identity:
            click.echo(f"{out} held constants of another machine; these have taken their place")
