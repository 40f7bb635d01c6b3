"""`mpitrain slurm`: writes a batch script for a command or a program, submits it and follows its log."""

import shlex
import sys
from collections.abc import Callable
from typing import Any

import click

from mpitrain.cli import LINE, commands
from mpitrain.cli.job_options import changes, counted
from mpitrain.cli.launch.program import program
from mpitrain.cli.slurm.follow import expedites, follow, submit
from mpitrain.cli.slurm.script import SYSTEMS, BatchJob, grid, script, seconds_of
from mpitrain.errors import ConfigError

POSITIVE = click.IntRange(min=1)
PASSED = {
    "qos": "-q",
    "constraint": "-C",
    "nodelist": "-w",
    "exclude": "-x",
    "reservation": "",
    "gres": "",
    "mem": "",
    "job-name": "-J",
    "output": "-o",
    "error": "-e",
    "mail-type": "",
    "mail-user": "",
    "dependency": "-d",
    "begin": "-b",
}
"""{long option of sbatch that goes into the script as it is: its short form}."""


def _with_passed(command: Callable) -> Callable:
    for name, short in reversed(PASSED.items()):
        names = [short] if short else []
        command = click.option(*names, f"--{name}", metavar="TEXT", help="As for sbatch.")(command)
    return command


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-N", "--nodes", type=POSITIVE, default=1, show_default=True, help="Hosts.")
@click.option(
    "--ranks-per-node",
    "--ntasks-per-node",
    type=POSITIVE,
    help="Ranks of each host (default: one per GPU, else 2; generate: 1).",
)
@click.option(
    "--cores-per-rank",
    "--cpus-per-task",
    "-c",
    type=click.IntRange(0),
    default=0,
    help="Cores of each rank (default: whole hosts, divided by their ranks).",
)
@click.option(
    "--spares",
    type=click.IntRange(0),
    default=0,
    help="Of all these ranks the last SPARES wait for the place of one that dies; uses mpirun.",
)
@click.option("--gpus-per-node", type=click.IntRange(0), default=0, help="GPUs of each host.")
@click.option(
    "-t",
    "--time",
    default="1:00:00",
    show_default=True,
    help="Time limit: minutes, H:M:S or D-H:M:S.",
)
@click.option("-p", "--partition", default="", help="Partition or queue.")
@click.option("-A", "--account", default="", help="Account or project.")
@click.option(
    "--env",
    "environment",
    default="venv",
    show_default=True,
    metavar="KIND[:VALUE]",
    help="Environment of the job: venv[:PATH], module:NAME,NAME or apptainer:IMAGE.",
)
@click.option(
    "--mpirun", "is_mpirun", is_flag=True, help="Start ranks with mpirun instead of srun."
)
@click.option(
    "--sweep",
    multiple=True,
    metavar="KEY=A,B,...",
    help="A run for each value, as an array (repeatable: all combinations); a program gets --KEY=A.",
)
@click.option(
    "--checkpoint",
    default="",
    metavar="PATH",
    help="File or folder of a program's checkpoints: two legs without a new file end the job.",
)
@counted(
    "--margin",
    30,
    60,
    "Seconds before the limit at which the script asks the run or program to stop.",
    most=None,
)
@click.option(
    "--with",
    "extra",
    multiple=True,
    metavar="OPTION",
    help="A further option of the batch system, as in --with --licenses=a:1 (repeatable).",
)
@_with_passed
@click.option("--exclusive", is_flag=True, help="As for sbatch: whole hosts.")
@click.option("--slurm", "system", flag_value="slurm", default=True, help="Write for Slurm.")
@click.option("--pbs", "system", flag_value="pbs", help="Write for PBS.")
@click.option("--lsf", "system", flag_value="lsf", help="Write for LSF.")
@click.option("--submit", "submits", is_flag=True, help="Submit the script to Slurm.")
@click.option(
    "--follow",
    "follows",
    is_flag=True,
    help="Submit it, print its log until the job ends, and exit with the job's code.",
)
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND ..."
)
def command(
    system: str,
    submits: bool,
    follows: bool,
    arguments: tuple[str, ...],
    time: str,
    is_mpirun: bool,
    sweep: tuple[str, ...],
    **options: Any,
) -> None:
    """Write a batch script: mpitrain slurm --nodes 2 -- train book.toml > book.sbatch

    The command is one of mpitrain, or a Python program: mpitrain slurm --nodes 2 -- python own.py. A
    program that exits with 85 is queued again; mpitrain.torch.stop_requested() says when to stop.

    A training job stops before its time limit, after a checkpoint, queues itself again and resumes.
    A job of bench keeps its rows in a JSON file with the job's number. The command and its
    configuration are checked before anything is written.
    """
    if (submits or follows) and options["environment"] == "venv":
        options["environment"] = f"venv:{sys.prefix}"
    target = program(list(arguments))
    words = target.words[3:] if target.command else list(arguments)
    passed = {name: options.pop(name.replace("-", "_")) for name in PASSED}
    as_given = [f"--{name}={value}" for name, value in passed.items() if value]
    as_given += ["--exclusive"] if options.pop("exclusive") else []
    if as_given and system != "slurm":
        raise ConfigError(
            f"{as_given[0].partition('=')[0]} is an option of Slurm, but the script is for {system.upper()}.",
            "Give the option of that system with --with.",
        )
    options["extra"] = (*as_given, *options["extra"])
    options["ranks_per_node"] = (
        options["ranks_per_node"]
        or options["gpus_per_node"]
        or (1 if words[:1] == ["generate"] else 2)
    )
    request = BatchJob(
        words=words,
        is_program=not target.command,
        seconds=seconds_of(time),
        by="mpirun" if is_mpirun or options["spares"] or system != "slurm" else "srun",
        sweep=grid(sweep),
        written_by=_written_by(click.get_current_context()),
        **options,
    )
    if (submits or follows) and system != "slurm":
        raise ConfigError(
            f"--submit and --follow are of Slurm, but the script is for {system.upper()}.",
            f"Write the script to a file, then type: {SYSTEMS[system].submit} FILE",
        )
    if request.checkpoint and (request.sweep or not request.is_program):
        raise ConfigError(
            "--checkpoint is of one program, but this job "
            + ("is a sweep." if request.sweep else f"runs {words[0]}."),
            "Leave it out.",
        )
    directives = request.partition, request.account, *request.extra
    if any(set(text) & {"\n", "#"} for text in directives) or "\n" in "".join(words):
        raise ConfigError(
            "A directive of a batch script is a line without #, but an option has one or a line break.",
            "Leave it out, or edit the script.",
        )
    if request.spares:
        check_spares(request)
    check(request)
    if (submits or follows) and request.goes_on and expedites():
        request = request._replace(extra=("--requeue=expedite", *request.extra))
    if request.goes_on and request.warning < request.margin:
        click.echo(
            f"note: --margin {request.margin} is cut to {request.warning} s, because --time is {time}: "
            "a quarter of the time at most, and at least 30 s.",
            err=True,
        )
    text = script(request, system)
    if not (submits or follows):
        click.echo(text, nl=False)
        return
    job = submit(text)
    if follows:
        sys.exit(follow(job))


def _written_by(context: click.Context) -> str:
    words = [word for word in context.meta[LINE] if word not in ("--submit", "--follow")]
    return shlex.join(["mpitrain", *words])


def check_spares(request: BatchJob) -> None:
    """Raise ConfigError unless ranks of this batch job can wait as spares."""
    kind = "" if request.is_program else request.words[0]
    for is_wrong, law, way_out in (
        (
            request.spares >= request.ranks,
            f"{request.ranks} rank(s) cannot have {request.spares} spare(s) among them: no rank would compute.",
            "Take more nodes or ranks of each, or lower --spares.",
        ),
        (
            kind not in ("", "train"),
            f"Only train and programs of your own go on with spares, but the command is {kind}.",
            "Leave --spares out.",
        ),
        (
            request.environment.startswith("apptainer"),
            f"`mpitrain launch` starts spares, but --env {request.environment} starts an image without it.",
            "Take --env venv or --env module.",
        ),
    ):
        if is_wrong:
            raise ConfigError(law, way_out)


ALONE = ("launch", "slurm", "plan", "runs", "learn", "plot", "report", "data")
"""Commands that need no batch job, or are one."""


def check(request: BatchJob) -> None:
    """Check that the command of a batch job can run, without reading data: a login host may not have any.

    raises  ConfigError or UsageError if the command or its configuration is wrong
    """
    words = request.words
    if request.is_program:
        return
    if words[0] in ALONE:
        raise ConfigError(
            f"A batch job runs train, bench, generate or another command of ranks, but {words[0]}.",
            f"Type `mpitrain {words[0]}` without slurm.",
        )
    if request.sweep and words[0] != "train":
        raise ConfigError(
            f"--sweep is of training runs, but the command is {words[0]}.",
            "Submit a job for each, or leave out --sweep.",
        )
    context = _parsed(words)
    if words[0] == "train":
        for settings in request.sweep or [[]]:
            _check_training(request, context.params, settings)


def _parsed(words: list[str]) -> click.Context:
    """Parse the words of an mpitrain command, without calling it."""
    command: click.Command = commands
    context = click.Context(commands, info_name="mpitrain")
    while isinstance(command, click.Group):
        if not words:
            raise click.UsageError("Missing command.", context)
        name, subcommand, words = command.resolve_command(context, list(words))
        assert subcommand is not None
        command, context = subcommand, click.Context(subcommand, context, name)
    assert context.parent is not None and context.info_name is not None
    return command.make_context(context.info_name, words, context.parent)


def _check_training(request: BatchJob, parameters: dict[str, Any], settings: list[str]) -> None:
    from mpitrain.cli.train import _configured
    from mpitrain.run.choices import check as check_choices
    from mpitrain.run.job import axes

    if settings and any(parameters.get("out") for _ in settings):
        raise ConfigError(
            f"Each run of a sweep has a directory of its own, but --out is {parameters['out']}.",
            "Leave out --out.",
        )
    options = {
        key: parameters[key]
        for key in ("out", "dp", "cp", "tp", "pp", "device", "gemm", "algorithm")
    }
    config = _configured(
        parameters["config_file"],
        changes((*parameters["settings"], *settings), **options),
        "no",
        parameters["preset"],
    )
    check_choices(config)
    axes(config, request.ranks - request.spares)
    if request.spares and config.run.on_failure != "continue":
        raise ConfigError(
            f"Spares wait for run.on_failure=continue, but --spares is {request.spares} and run.on_failure is end.",
            "Add --set run.on_failure=continue, or leave --spares out.",
        )
    if config.device.kind == "cuda" and not request.gpus_per_node:
        raise ConfigError(
            "device.kind cuda needs GPUs, but --gpus-per-node is not given.",
            "Give the number of GPUs of a host.",
        )
