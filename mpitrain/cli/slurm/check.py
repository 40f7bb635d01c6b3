"""Checks of a command before it waits in a queue: its options, its configuration and its layout."""

from typing import Any

import click

from mpitrain.cli import COMMANDS, WORDS, commands
from mpitrain.cli.job_options import changes
from mpitrain.cli.slurm.request import BatchJob
from mpitrain.errors import ConfigError

ALONE = ("launch", "slurm", "plan", "runs", "learn", "plot", "report", "data")
"""Commands that need no batch job, or are one."""


def check(request: BatchJob) -> None:
    """Raise ConfigError or UsageError if the command or its training job cannot run.

    Files of the data are not read: a login host may not have them.
    """
    words = request.words
    if words[0] in ALONE:
        raise ConfigError(
            f"A batch job runs train, bench, generate or another command of ranks, but {words[0]}.",
            f"Type `mpitrain {words[0]}` without slurm.",
        )
    if words[0] not in WORDS:
        raise click.UsageError(
            f"{words[0]!r} is no mpitrain command. Commands are "
            f"{', '.join(name for name in COMMANDS if name not in ALONE)}."
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
    """Parse the words as the command itself would, without calling it."""
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
    from mpitrain.parallel.grid import axes
    from mpitrain.parallel.modes import servers_of
    from mpitrain.run.choices import check as check_choices

    if settings and any(parameters.get("out") for _ in settings):
        raise ConfigError(
            f"Each run of a sweep has a directory of its own, but --out is {parameters['out']}.",
            "Leave out --out.",
        )
    options = {
        key: parameters[key] for key in ("out", "dp", "tp", "pp", "device", "gemm", "algorithm")
    }
    config = _configured(
        parameters["config_file"],
        changes((*parameters["settings"], *settings), **options),
        "no",
        parameters["preset"],
    )
    check_choices(config)
    axes(config, request.ranks, servers_of(config))
    if config.device.kind == "cuda" and not request.gpus_per_node:
        raise ConfigError(
            "device.kind cuda needs GPUs, but --gpus-per-node is not given.",
            "Give the number of GPUs of a host.",
        )
