"""`mpitrain slurm`: writes a batch script from an mpitrain command, submits it and follows its log."""

import shlex
import sys

import click

from mpitrain.cli.slurm.follow import follow, submit
from mpitrain.cli.slurm.request import BatchJob, grid, seconds_of
from mpitrain.cli.slurm.script import script
from mpitrain.cli.slurm.systems import SYSTEMS
from mpitrain.errors import ConfigError

POSITIVE = click.IntRange(min=1)
WORDS = "mpitrain.slurm.words"
"""Key of the words of the command line in Click's context."""


class SlurmCommand(click.Command):
    """A Click command that keeps its words, for the head of the script."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.meta[WORDS] = list(args)
        return super().parse_args(context, args)


@click.command(cls=SlurmCommand, context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=POSITIVE, default=1, show_default=True, help="Hosts.")
@click.option(
    "--ranks-per-node",
    type=POSITIVE,
    help="Ranks of each host (default: one per GPU, else 2; generate: 1).",
)
@click.option(
    "--cores-per-rank",
    type=POSITIVE,
    help="Cores of each rank (default: whole hosts, divided by their ranks).",
)
@click.option("--gpus-per-node", type=POSITIVE, help="GPUs of each host.")
@click.option(
    "--time",
    default="1:00:00",
    show_default=True,
    help="Time limit: minutes, H:M:S or D-H:M:S.",
)
@click.option("--partition", default="", help="Partition or queue.")
@click.option("--account", default="", help="Account or project.")
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
    help="Train a run for each value, as an array (repeatable: all combinations).",
)
@click.option(
    "--margin",
    type=click.IntRange(min=30),
    default=60,
    show_default=True,
    help="Seconds before the limit at which the script asks the run to stop.",
)
@click.option(
    "--with",
    "extra",
    multiple=True,
    metavar="OPTION",
    help="A further option of the batch system, such as --with --qos=debug (repeatable).",
)
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
    nodes: int,
    ranks_per_node: int | None,
    cores_per_rank: int | None,
    gpus_per_node: int | None,
    time: str,
    partition: str,
    account: str,
    environment: str,
    is_mpirun: bool,
    sweep: tuple[str, ...],
    margin: int,
    extra: tuple[str, ...],
    system: str,
    submits: bool,
    follows: bool,
    arguments: tuple[str, ...],
) -> None:
    """Write a batch script: mpitrain slurm --nodes 2 -- train book.toml > book.sbatch

    A training job stops before its time limit, after a checkpoint, queues itself again and resumes.
    A job of bench keeps its rows in a JSON file with the job's number. The command and its
    configuration are checked before anything is written.
    """
    from mpitrain.cli.slurm.check import check

    if (submits or follows) and environment == "venv":
        environment = f"venv:{sys.prefix}"
    words = list(arguments[1:] if arguments[0] == "mpitrain" else arguments)
    if not words:
        raise click.UsageError("mpitrain has no command here.")
    per_node = ranks_per_node or gpus_per_node or (1 if words[:1] == ["generate"] else 2)
    request = BatchJob(
        words,
        nodes,
        per_node,
        cores_per_rank or 0,
        gpus_per_node or 0,
        seconds_of(time),
        margin,
        partition,
        account,
        "mpirun" if is_mpirun or system != "slurm" else "srun",
        environment,
        grid(sweep),
        list(extra),
        _written_by(click.get_current_context()),
    )
    if (submits or follows) and system != "slurm":
        raise ConfigError(
            f"--submit and --follow are of Slurm, but the script is for {system.upper()}.",
            f"Write the script to a file, then type: {SYSTEMS[system].submit} FILE",
        )
    if any(set(text) & {"\n", "#"} for text in (partition, account, *extra)) or "\n" in "".join(
        words
    ):
        raise ConfigError(
            "A directive of a batch script is a line without #, but an option has one or a line break.",
            "Leave it out, or edit the script.",
        )
    check(request)
    if words[0] == "train" and request.warning < margin:
        click.echo(
            f"note: --margin {margin} is cut to {request.warning} s, because --time is {time}: "
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
    words = [word for word in context.meta[WORDS] if word not in ("--submit", "--follow")]
    return shlex.join(["mpitrain", "slurm", *words])
