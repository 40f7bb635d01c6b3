"""`mpitrain plan`: the group, and its commands that simulate pipelines and print collectives without running them."""

import math
import shutil
from collections.abc import Callable
from copy import copy
from pathlib import Path

import click

from mpitrain.cli import CommandGroup, RootCommand
from mpitrain.cli.bench.rows import Bytes
from mpitrain.cli.job_options import (
    Finite,
    Outputs,
    check_files,
    counted,
    in_words,
    language_option,
    measured,
    output_option,
    path_option,
    say,
    spoken,
    with_options,
)
from mpitrain.cli.plan.jobs import MICRO_BATCHES, batch, layout, memory, tricks
from mpitrain.pipeline.schedules import NAMED, STREAMS

LEAST, MOST = 1e-12, 1e12
"""Bounds of the times in ms and sizes in MB that options take; 0 is valid too.

Sums and ratios of these numbers stay finite.
"""

HALVES, KEPT = ("forward", "backward", "weight"), ("saved", "pending")


NARROWEST, WIDEST, PIPED = 80, 130, 100
"""Columns of a chart: least, most, and without a terminal."""


def columns() -> int:
    return min(max(shutil.get_terminal_size((PIPED, 24)).columns, NARROWEST), WIDEST)


@click.group(cls=CommandGroup)
def command() -> None:
    """Simulate pipelines and collectives, count memory, and measure which batch suits a job.

    `batch` measures on all ranks of the MPI job. The other commands need one process and no MPI.
    """


def amount(name: str, default: float, text: str) -> Callable:
    """Return a Click option for milliseconds or megabytes."""
    return click.option(
        name,
        type=click.FloatRange(0),
        default=default,
        show_default=True,
        metavar="NUMBER",
        help=text,
    )


class Times(click.ParamType):
    """Milliseconds of all stages, or of each, in order: 1 or 1,1,2,1."""

    name = "times"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        try:
            times = tuple(map(float, str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r} is no number of at least 0, nor a list as 1,1,2,1.", param, ctx)
        if min(times) < 0:
            self.fail(f"{value!r} has a number below 0.", param, ctx)
        return times


def time_option(name: str, text: str) -> Callable:
    return click.option(
        name, type=Times(), default="1", show_default=True, metavar="NUMBER[,...]", help=text
    )


@command.command("schedule", cls=RootCommand)
@click.option(
    "--schedule",
    "name",
    default="1f1b",
    show_default=True,
    metavar="NAME|FILE",
    help=f"{', '.join(NAMED)}, or a file.",
)
@click.option("--stages", type=click.IntRange(1, 1024), show_default="4", help="Pipeline stages.")
@click.option(
    "--micro-batches",
    type=click.IntRange(1, 512),
    show_default="8",
    help="Micro-batches of a step.",
)
@click.option(
    "--chunks",
    type=click.IntRange(1, 26),
    show_default="2",
    help="Model chunks per stage, for a schedule that takes any number.",
)
@time_option(
    "--forward-ms",
    "Forward of a micro-batch on a stage, over all its chunks; or a number for each stage.",
)
@time_option("--backward-ms", "The same for the half of backward that computes input gradients.")
@time_option("--weight-ms", "The same for the half that computes weight gradients.")
@amount("--transfer-ms", 0, "Transfer of a message, while the stages compute.")
@amount("--receive-ms", 0, "Time of the receiving stage for a message, without overlap.")
@click.option(
    "--eager",
    "is_eager",
    is_flag=True,
    help="Transfer messages before their receives are posted, as MPI does with short messages.",
)
@amount("--overhead-ms", 0, "Host time of a stage before each instruction.")
@amount("--saved-mb", 0, "Memory per micro-batch from a stage's forward to its input half.")
@amount("--pending-mb", 0, "Memory per micro-batch from the input half to the weight half.")
@click.option(
    "--whole-backward",
    "is_whole",
    is_flag=True,
    help="Run the halves of a backward as one, as textbooks draw it. `train` does not.",
)
@output_option("--json", "Write the schedule to this file, as --schedule reads it.")
@output_option("--plot", "Draw the chart to this file. Needs mpitrain[report].")
def schedule(
    name: str,
    stages: int | None,
    micro_batches: int | None,
    chunks: int | None,
    json_file: Path | None,
    plot_file: Path | None,
    is_eager: bool,
    is_whole: bool,
    forward_ms: tuple[float, ...],
    backward_ms: tuple[float, ...],
    weight_ms: tuple[float, ...],
    **amounts: float,
) -> None:
    """Simulate a pipeline, and print its chart, its bubble and the memory of each stage.

    F is a forward, B the input half of a backward, W the weight half, BW both in one. Then follows
    the number of the micro-batch. A letter a, b or c names the first, second or third chunk of the
    stage.

    A FILE gives the stage of each model chunk ("place"), and the order of computations on each
    stage. F1.0 is the forward of chunk 1 for micro-batch 0:

    \b
        {"place": [0, 1],
         "stages": ["F0.0 F0.1 B0.0 W0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"]}
    """
    from mpitrain.errors import ConfigError
    from mpitrain.pipeline.schedule_files import find_plan, write_plan
    from mpitrain.pipeline.schedules import with_messages, with_whole_backwards
    from mpitrain.pipeline.simulate import Cost, simulate
    from mpitrain.tools.plan import MOST_SHOWN, several
    from mpitrain.tools.plan.schedule import chart, draw, halves_of, stream, summary

    times = dict(zip(HALVES, (forward_ms, backward_ms, weight_ms), strict=True))
    by_option = {f"{half}_ms": times[half] for half in HALVES}
    by_option |= {option: (value,) for option, value in amounts.items()}
    takes_time = any(map(any, times.values()))
    if not (
        takes_time
        and all(
            value == 0 or LEAST <= value <= MOST for each in by_option.values() for value in each
        )
    ):
        raise ConfigError(
            f"Times and sizes are 0 or from {LEAST:g} to {MOST:g}, and a stage takes time, but these are "
            + ", ".join(
                f"{option} {','.join(f'{value:g}' for value in each)}"
                for option, each in by_option.items()
            )
            + ".",
            f"Give one of {', '.join(f'--{half}-ms' for half in HALVES)} more than 0.",
        )
    if json_file and name in STREAMS:
        raise ConfigError(
            f"A file has the order of one step, but {name} goes on over the ends of steps.",
            "Leave out --json, or write that of 1f1b.",
        )
    if is_whole and name in STREAMS:
        raise ConfigError(
            f"Whole backwards are for the schedules of a step, but {name} goes on over the ends of steps.",
            "Leave out --whole-backward, or draw 1f1b.",
        )
    messages = amounts["transfer_ms"], amounts["receive_ms"], is_eager, amounts["overhead_ms"]

    plan = find_plan(name, stages, micro_batches, chunks)
    count = len(plan.by_stage)
    for half in HALVES:
        if len(times[half]) not in (1, count):
            raise ConfigError(
                f"--{half}-ms has one number, or one for each stage, but has {len(times[half])} for {count} stages.",
                f"Give 1 or {count} numbers.",
            )
    share = count / len(plan.stage_of)
    costs = [
        Cost(
            *(share * times[half][stage % len(times[half])] for half in HALVES),
            *(share * 1e6 * amounts[f"{kept}_mb"] for kept in KEPT),
        )
        for stage in plan.stage_of
    ]
    if name in STREAMS:
        preview = stream(name, stages, micro_batches, chunks, costs, *messages)
        plan, simulation, notes = preview.plan, preview.drawn, preview.notes()
        title, facts = preview.title, preview.summary()
        caption = f"{preview.title}; idle in the steady state {100 * preview.idle:.1f}%"
    else:
        order, notes = plan, []
        plan = with_whole_backwards(plan) if is_whole else plan
        simulation = simulate(with_messages(plan), costs, *messages)
        title = f"{name}: {len(plan.by_stage)} stage(s), {plan.micro_batches} micro-batch(es)"
        facts = [*summary(plan, simulation, costs), *halves_of(order, is_whole)]
        numbers = f"{several(len(plan.by_stage), 'stage')}, {several(plan.micro_batches, 'micro-batch', 'micro-batches')}"
        caption = f"{name}: {numbers}; stages wait for {100 * simulation.bubble:.1f}% of the time (bubble)"
    check_files(0, [json_file], plot_file)
    if count > MOST_SHOWN:
        check_shown(json_file, plot_file, count, "stages")
        begins = max(events[0].start for events in simulation.timeline)
        rows = [
            in_words(
                [
                    f"no chart of more than {MOST_SHOWN} stages: the last one begins at {begins:.6g} ms"
                ]
            )
        ]
    else:
        rows = chart(plan, simulation, columns(), notes, "version", spoken())
    say([title, ""], columns() if name in STREAMS else 0)
    click.echo("\n".join(rows))
    say(["", *facts], columns())
    outputs = Outputs()
    if json_file:
        with outputs.to(json_file):
            write_plan(json_file, plan)
            say([f"written to {json_file}"])
    if plot_file:
        with outputs.to(plot_file):
            files = draw(plan, simulation, f"simulated pipeline by {caption}", plot_file, notes)
            say([f"drawn in {file}" for file in files])
    outputs.settle()


SECONDS = Finite(LEAST, MOST)


@command.command("checkpoints", cls=RootCommand)
@click.option(
    "--days", type=SECONDS, required=True, help="Mean days between two failures of one rank."
)
@click.option("--ranks", type=click.IntRange(1, 10**6), required=True, help="Ranks of the job.")
@click.option(
    "--run",
    "runs",
    metavar="RUN",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A run that has measured --pause, --restart, --replace or --step (repeatable).",
)
@click.option(
    "--pause", type=SECONDS, help="Seconds without steps in a save: checkpoint_pause_s of a run."
)
@click.option(
    "--restart",
    type=Finite(0, MOST),
    help="Seconds from a failure until the steps go on.  [default: 60]",
)
@click.option("--step", type=SECONDS, help="Seconds of a step: also print checkpoint.every.")
@counted(
    "--spares",
    0,
    0,
    "Most ranks that wait as spares (launch --spares): also print what they cost.",
    most=64,
)
@measured("--hours", LEAST, 24.0, "Hours of a job, which begins with all of its spares.", most=MOST)
@click.option(
    "--replace",
    type=Finite(0, MOST),
    help="Seconds from a failure until the steps go on with a spare.  [default: 5]",
)
def checkpoints(
    days: float,
    ranks: int,
    runs: tuple[Path, ...],
    spares: int,
    hours: float,
    **given: float | None,
) -> None:
    """Compute how often a job should save, from how often ranks fail (Young 1974, Daly 2006).

    A failure of any rank ends the job, which loses the steps since the last checkpoint. A spare takes the
    place of a failed rank, but costs as much as a rank.
    """
    from mpitrain.run.run_dir import metrics_of
    from mpitrain.tools.plan.failures import daly, lost, lost_with_spares, measured

    seen = measured(map(metrics_of, runs))
    means = {option: sum(times) / len(times) for option, times in seen.items()}
    if means:
        words = [f"--{option}={means[option]:.3g} ({len(seen[option])} seen)" for option in means]
        say([f"measured: {', '.join(words)}"])
    known = {"restart": 60.0, "replace": 5.0} | means
    known |= {option: value for option, value in given.items() if value is not None}
    if "pause" not in known:
        raise click.MissingParameter(param_hint="'--pause'", param_type="option")
    pause, restart, replace = known["pause"], known["restart"], known["replace"]
    step = known.get("step")
    mean = 86400 * days / ranks
    root, best = math.sqrt(2 * pause * mean), daly(pause, mean)

    def shown(seconds: float) -> str:
        return f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.4g}"

    say([f"a rank of the job fails every {shown(mean)} s"])
    for name, every in (("Daly", best), ("Young", root), ("half", best / 2), ("twice", 2 * best)):
        steps = f", checkpoint.every={max(1, round(every / step))}" if step else ""
        part = lost(every, pause, restart, mean)
        share = "all of the time" if part == 1 else f"{100 * part:.3g}% of the time"
        say([f"{name:<6} save every {shown(every)} s{steps}: {share} is lost"])
    if not spares:
        return
    parts = [
        lost_with_spares(count, ranks, hours, replace, pause, restart, mean)
        for count in range(spares + 1)
    ]
    for count, part in enumerate(parts):
        say(
            [
                f"{count} spare(s), {hours:g} hours: {100 * part:.3g}% of the time of {ranks + count} ranks is lost"
            ]
        )
    least = min(range(spares + 1), key=parts.__getitem__)
    say([f"{least} spare(s) lose the least" if least else "no spare pays: a restart costs less"])


MOST_ON_HOST = 64
"""Ranks of a host in a large job: the cost model makes the plans of all ranks of some hosts."""
USUAL_ON_HOST = 8
"""Ranks of a host in a large job without --hosts."""
USUAL_BYTES = 1 << 26
"""Bytes of the array of a large job without --bytes."""


def check_shown(json_file: Path | None, plot_file: Path | None, number: int, noun: str) -> None:
    """Raise ConfigError for a file of more ranks or stages than are shown."""
    from mpitrain.errors import ConfigError

    if json_file or plot_file:
        raise ConfigError(
            f"--json and --plot show each of the {noun}, but {number:,} are too many.",
            f"Leave them out, or take fewer {noun}.",
        )


options = with_options(
    click.option(
        "--algorithm", default="ring", show_default=True, help="Any algorithm that sends messages."
    ),
    counted("--ranks", 1, 4, "Ranks of the collective.", most=16384),
    click.option(
        "--hosts",
        type=click.IntRange(1, 16384),
        help="Hosts; consecutive ranks share a host (default: 1; of more than 256 ranks one for each 8).",
    ),
    click.option(
        "--bytes",
        "nbytes",
        type=Bytes(),
        help="Also print the bytes that each rank sends, and predicted times, for a float32 array of this size.",
    ),
    path_option("--tuning", "Constants of the cost model for predicted times, from `bench fit`."),
    output_option("--json", "Write all steps and buffer contents to this file."),
    output_option("--plot", "Draw the steps to this file. Needs mpitrain[report]."),
)


@click.command("all-reduce", cls=RootCommand)
@options
def all_reduce(**chosen: object) -> None:
    """Print an all-reduce step by step.

    Below the messages of a step, the contents of every rank are shown: the ranks that contributed
    to its data. A line marks the border between the reduce-scatter and all-gather halves. Totals
    follow, counted and by formula. `reduce-scatter` and `all-gather` print the halves as separate
    collectives.
    """
    _plan("allreduce", **chosen)  # type: ignore[arg-type]


@click.command("reduce-scatter", cls=RootCommand)
@options
def reduce_scatter(**chosen: object) -> None:
    """Print a reduce-scatter step by step: at the end rank r holds the sum of chunk r."""
    _plan("reduce-scatter", **chosen)  # type: ignore[arg-type]


@click.command("all-gather", cls=RootCommand)
@options
def all_gather(**chosen: object) -> None:
    """Print an all-gather step by step: rank r contributes chunk r; all ranks get all chunks."""
    _plan("all-gather", **chosen)  # type: ignore[arg-type]


def _plan(
    operation: str,
    algorithm: str,
    ranks: int,
    hosts: int | None,
    nbytes: int | None,
    tuning: Path | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    from mpitrain.collectives.selection.algorithm import is_file
    from mpitrain.collectives.selection.own_algorithm import file_algorithm
    from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning
    from mpitrain.errors import ConfigError
    from mpitrain.tools.plan import MOST_SHOWN
    from mpitrain.tools.plan.collective import collective
    from mpitrain.tools.plan.collective_text import printed
    from mpitrain.tools.plan.traffic import amounts, of_many, times

    hosts = hosts or (1 if ranks <= MOST_SHOWN else -(-ranks // USUAL_ON_HOST))
    if hosts > ranks:
        raise ConfigError(
            f"Every host has a rank, but there are {ranks} ranks on {hosts} hosts.",
            f"Take at most {ranks} hosts.",
        )
    if operation == "allreduce" and is_file(algorithm):
        algorithm = file_algorithm(algorithm)
    names = [f"host {rank * hosts // ranks}" for rank in range(ranks)]
    constants = read_tuning(tuning) if tuning else DEFAULT
    if ranks > MOST_SHOWN:
        check_shown(json_file, plot_file, ranks, "ranks")
        if ranks > MOST_ON_HOST * hosts:
            raise ConfigError(
                f"Beyond {MOST_SHOWN} ranks a host has at most {MOST_ON_HOST}, but {ranks} ranks are on {hosts} host(s).",
                f"Take at least --hosts {-(-ranks // MOST_ON_HOST)}.",
            )
        lines = of_many(operation, algorithm, names)
        say([*lines, "", *times(operation, names, nbytes or USUAL_BYTES, constants)], columns())
        return
    simulated = collective(operation, algorithm, names)
    check_files(0, [json_file], plot_file)
    say(printed(simulated, columns()), columns())
    if nbytes is not None:
        lines = amounts(operation, algorithm, names, nbytes)
        say(["", *lines, "", *times(operation, names, nbytes, constants)], columns())
    outputs = Outputs()
    if json_file:
        from mpitrain.files import write_whole
        from mpitrain.tools.plan.collective_text import as_json

        with outputs.to(json_file):
            write_whole(json_file, as_json(simulated))
            say([f"written to {json_file}"])
    if plot_file:
        from mpitrain.tools.plan.collective_picture import draw

        with outputs.to(plot_file):
            say([f"drawn in {file}" for file in draw(simulated, plot_file)])
    outputs.settle()


for subcommand in (
    layout,
    memory,
    tricks,
    batch,
    MICRO_BATCHES,
    all_reduce,
    reduce_scatter,
    all_gather,
):
    command.add_command(subcommand)
for subcommand in {*command.commands.values()} - {MICRO_BATCHES}:  # it shares those of `batch`
    language_option(is_passed=False)(subcommand)

_old_spelling = copy(all_reduce)
_old_spelling.hidden = True
command.add_command(_old_spelling, "allreduce")
